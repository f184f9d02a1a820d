"""The Pallas kernels: interpreted on a CPU, on small cases; compiled on a GPU, on all of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dma
from cases import INTERVAL_PATTERNS, NAMED, PATTERNS, Case, make, poison
from jax_dma import choice, op
from jax_dma.implementations import ffi
from support import check, evaluate, relative_error

INTERPRETED = [
    "key_padding_mask (1)", "bias_per_key_and_kv_head", "192_keys (11)", "more_queries_causal (12)",
    "intervals_and_causal (13)", "plan_and_causal (13)", "query_mask (18)", "wide_group (20)", "one_kv_head",
    "softcap (24)", "decode_grouped (25)", "decode_intervals (25)", "many_key_tiles", "no_batch_axis",
]  # fmt: skip
SMALL = Case((2,), 35, 150, 6, 2, 16, dtype="bfloat16")  # one case for many patterns: G of 3 is padded to 4


@pytest.fixture(autouse=True)
def interpret(monkeypatch):
    monkeypatch.setenv("JAX_DMA_PALLAS_INTERPRET", "1")


def half(case):
    """The case in a dtype that these kernels compute in."""
    return case.with_(dtype="float16") if case.dtype == "float32" else case


@pytest.mark.parametrize("name", INTERPRETED)
def test_named_case_interpreted(name):
    check("pallas", half(NAMED[name]))


@pytest.mark.parametrize(
    "mask, bias",
    [
        ("B1TS", "BKTS"), ("B1TS", "1KTS"), ("11TS", "11TS"), ("1K1S", "1NT1"), ("BN", "1N1S"), ("1K", "111S"),
        ("BNTS", "BNTS"),
    ],
)  # fmt: skip
def test_broadcast_patterns_interpreted(mask, bias):
    """Each way in which the gradient of bias is found, with anything at all where the mask hides."""
    case = SMALL.with_(mask=mask, bias=bias, bias_dtype="float32", is_causal=mask == "B1TS")
    check("pallas", case, poison(case, make(case)))


@pytest.mark.parametrize("H, Hv", [(3, 5), (100, 33)])
def test_any_head_dimension_interpreted(H, Hv):
    check("pallas", Case((1,), 20, 70, 2, 1, H, Hv, dtype="float16", mask="1K1S", bias="1KTS"))


def test_vmap_interpreted():
    """A bias that is not mapped, beside queries that are: its gradient is summed by JAX."""
    case = Case((), 20, 70, 4, 2, 16, dtype="bfloat16", bias="1KTS", mask="1N1S")
    inputs = make(case)
    q = jnp.stack([inputs.q, 2 * inputs.q])

    def loss(bias, implementation, dtype):
        operands = (x.astype(dtype) for x in (q, inputs.k, inputs.v))
        attend = lambda q, k, v: jax_dma.attention(q, k, v, inputs.mask, bias, implementation=implementation)
        return (jax.vmap(attend, in_axes=(0, None, None))(*operands).astype(jnp.float32) ** 2).sum()

    got, want = (
        jax.jit(jax.grad(lambda b, name=name, dtype=dtype: loss(b, name, dtype)))(inputs.bias.astype(dtype))
        for name, dtype in (("pallas", jnp.bfloat16), ("reference", jnp.float32))
    )
    assert got.dtype == jnp.bfloat16 and relative_error(got, want) < 1e-2


def test_nothing_to_attend_to():
    check("pallas", Case((2,), 5, 0, 4, 2, 8, dtype="bfloat16", mask="BNTS", bias="1KTS"))


def choice_on(platform, names=choice._DEFAULT, dtype=jnp.bfloat16):
    x = jax.ShapeDtypeStruct((1, 8, 2, 16), dtype)
    call = dataclasses.replace(op.Call(1.0, 0.0, False, False, names), visibility=(False,) * 6)
    return choice.choose(platform, call, (x, x, x))


def test_chosen_on_a_gpu_without_the_compiled_kernels(monkeypatch):
    """Only there by itself; float32 goes to plain JAX."""
    monkeypatch.setattr(ffi, "load", lambda name: "not built")
    assert choice_on("cpu") == "xla" and choice_on(None) == "xla"
    assert choice_on("cpu", ("pallas",)) == "pallas" == choice_on("cpu", ("pallas", "xla"))
    monkeypatch.delenv("JAX_DMA_PALLAS_INTERPRET")
    assert choice_on("cpu", ("pallas", "xla")) == "xla"
    with pytest.raises(ValueError, match="pallas: it runs on cuda"):
        choice_on("cpu", ("pallas",))
    monkeypatch.setattr(choice, "_has_platform", lambda platform: True)
    assert choice_on("cuda") == "pallas" and choice_on("cuda", dtype=jnp.float32) == "xla"
    monkeypatch.setattr(choice, "_has_platform", lambda platform: False)
    assert choice_on("cuda") == "xla"
    with pytest.raises(ValueError, match="pallas: .*only where there is a GPU"):
        choice_on("cuda", ("pallas",))


def test_refusals():
    x = np.zeros((1, 4, 129, 8), np.float32)
    with pytest.raises(ValueError, match="pallas.*float32"):
        jax_dma.attention(x, x, x, implementation="pallas")
    x = x.astype(np.float16)
    with pytest.raises(ValueError, match="pallas.*G is 129"):
        jax_dma.attention(x, x[:, :, :1], x[:, :, :1], implementation="pallas")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMED)
def test_named_case_compiled(name):
    implementation = ("pallas", "xla") if name == "group_of_128" else "pallas"
    check(implementation, half(NAMED[name]))


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(len(PATTERNS)), ids=PATTERNS)
def test_every_broadcast_pattern_compiled(index):
    mask, bias = PATTERNS[index], PATTERNS[(7 * index + 5) % len(PATTERNS)]
    case = SMALL.with_(mask=mask, bias=bias, dtype=("bfloat16", "float16")[index % 2], is_causal=index % 5 == 0, T=150)
    check("pallas", case, poison(case, make(case, seed=index)))


@pytest.mark.gpu
@pytest.mark.parametrize("mask", INTERVAL_PATTERNS)
def test_every_broadcast_pattern_of_key_intervals_compiled(mask):
    bias = PATTERNS[5 * INTERVAL_PATTERNS.index(mask) % len(PATTERNS)]
    case = Case((3,), 140, 170, 4, 2, 16, mask=mask, bias=bias, dtype="bfloat16")
    check("pallas", case, poison(case, make(case)))


@pytest.mark.gpu
@pytest.mark.parametrize("H, Hv", [(1, 1), (3, 5), (64, 64), (96, 96), (128, 128), (128, 64), (129, 7), (256, 256)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_any_head_dimension_compiled(H, Hv, dtype):
    check("pallas", Case((2,), 300, 340, 4, 2, H, Hv, dtype=dtype, mask="1KTS", bias="1KTS"))


@pytest.mark.gpu
@pytest.mark.parametrize("bias", ["1K1S", "11TS"])
def test_gradients_are_bitwise_the_same_compiled(bias):
    case = Case((3,), 300, 700, 8, 2, 32, mask="BK", bias=bias, dtype="bfloat16")
    first, again = (evaluate("pallas", case, make(case), deterministic=True) for _ in range(2))
    for name in ("out", "lse", "dq", "dk", "dv", "dbias"):
        assert getattr(first, name).tobytes() == getattr(again, name).tobytes(), name
