"""A short run of the fuzzer (``make fuzz`` is a longer one), and that it would notice."""

import json

import jax
import numpy as np
import pytest

import fuzz
import jax_dma

USABLE = [name for name in jax_dma.available_implementations() if name not in ("cuda", "pallas")]


@pytest.mark.timeout(600)
def test_random_calls(pytestconfig):
    """Half a minute of calls from the whole contract, the same ones each time."""
    named = pytestconfig.getoption("--implementation")
    calls, runs, found = fuzz.fuzz(30, 1, [name for name in USABLE if not named or name in named])
    assert runs >= calls >= 1 and not found, "\n".join(found)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_random_calls_on_the_gpu():
    calls, runs, found = fuzz.fuzz(60, 1, [name for name in jax_dma.available_implementations() if name != "cpu"])
    assert runs >= calls >= 1 and not found, "\n".join(found)


def test_a_call_is_what_its_text_says():
    """So that what a failure prints can be run again."""
    for call in map(fuzz.draw, range(300)):
        assert fuzz.Call.of(call.text()) == call and isinstance(json.loads(call.text()), dict)


def test_a_wrong_gradient_is_found_and_made_small(monkeypatch):
    """A gradient of bias that is off by a thousandth where there is a soft cap, and nothing else."""
    attention = jax_dma.attention

    @jax.custom_vjp
    def off(x):
        return x

    off.defvjp(lambda x: (x, None), lambda _, dx: (1.001 * dx,))

    def wrong(q, k, v, mask, bias, *, logits_soft_cap, **options):
        bias = bias if bias is None or logits_soft_cap is None else off(bias)
        return attention(q, k, v, mask, bias, logits_soft_cap=logits_soft_cap, **options)

    monkeypatch.setattr(jax_dma, "attention", wrong)
    call = fuzz.Call(T=9, S=12, N=4, K=2, H=8, mask="BKTS", bias="1KTS", softcap=3.0, inner=("checkpoint",), seed=3)
    (failed, text), *_ = fuzz.failures(call, ["reference"])[0].values()
    small, message = fuzz.shrink(failed, "reference", seconds=200)
    assert "dbias" in text and "dbias" in message
    assert small.softcap == 3.0 and small.bias is not None and small.mask is None and not small.inner


def test_a_wrong_mask_is_found(monkeypatch):
    window = jax_dma.masks.sliding_window
    monkeypatch.setattr(jax_dma.masks, "sliding_window", lambda T, S, left, right=0: window(T, S, left + 1, right))
    call = fuzz.Call(T=20, S=20, N=1, K=1, H=8, mask="11", builder="sliding_window", window=3, batch=(1,))
    assert "reference" in fuzz.failures(call, ["reference"])[0]


def test_the_command_fails_with_a_line_to_run_again(capsys, monkeypatch):
    attention = jax_dma.attention

    def raises(q, *rest, **options):
        if q.shape[-3] > 2:
            raise RuntimeError("too long")
        return attention(q, *rest, **options)

    monkeypatch.setattr(jax_dma, "attention", raises)
    monkeypatch.setattr(fuzz, "draw", lambda seed: fuzz.Call(T=8, S=3, N=1, K=1, H=2, seed=seed))
    assert fuzz.main(["--seconds", "1", "--seed", "5", "--implementation", "reference"]) == 1
    text = capsys.readouterr().out
    assert "seed 5" in text and "RuntimeError: too long" in text
    line = next(line for line in text.splitlines() if "--call" in line)
    again = line.split("--call ")[1].strip("'")
    assert json.loads(again)["T"] == 3  # the least that fails
    assert fuzz.main(["--call", again, "--implementation", "reference"]) == 1
    monkeypatch.setattr(jax_dma, "attention", attention)
    assert fuzz.main(["--call", again, "--implementation", "reference"]) == 0


def test_contents_are_the_same_each_time():
    call = fuzz.draw(11).with_(dtype="float32")
    (a, seen), (b, again) = fuzz.contents_of(call), fuzz.contents_of(call)
    for x, y in zip(jax.tree.leaves((a, seen)), jax.tree.leaves((b, again)), strict=True):
        assert np.array_equal(x, y, equal_nan=np.asarray(x).dtype.kind == "f")
