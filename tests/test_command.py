"""``python -m jax_dma``."""

import json

import jax
import pytest

import jax_dma
from jax_dma.__main__ import main
from jax_dma.command import bench, check

SMALL = ["-T", "40", "-N", "4", "-K", "2", "-H", "16", "--repetitions", "1"]


def test_the_command_says_what_works_and_checks_it(capsys):
    """Every implementation is named, and each usable one is run against the reference."""
    assert main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {name: entry["status"] for name, entry in report["implementations"].items()} == jax_dma.status()
    assert all(entry["check"]["passed"] for entry in report["implementations"].values() if entry["available"])


def test_a_broken_implementation_fails_the_command(capsys, monkeypatch):
    monkeypatch.setattr(jax_dma, "status", lambda: {"no_such_implementation": "available"})
    assert main([]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.fixture
def two_problems(monkeypatch):
    """The whole list takes minutes to compile."""
    chosen = {name: check.PROBLEMS[name] for name in ("one_query", "dense_mask")}
    monkeypatch.setattr(check, "PROBLEMS", chosen)


def test_check_measures_against_float64(capsys, two_problems):
    assert main(["check", "--dtype", "float32", "--implementation", "xla", "--implementation", "reference"]) == 0
    text = capsys.readouterr().out
    assert "every error is as small as promised" in text and "xla" in text and "bfloat16   " not in text
    assert main(["check", "--json", "--dtype", "bfloat16", "--implementation", "xla"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["problem"] for row in result["rows"]] == ["one_query", "dense_mask"]
    assert set(result["rows"][1]["errors"]) == {"out", "lse", "dq", "dk", "dv", "dbias"}


def test_check_fails_where_something_is_wrong(capsys, monkeypatch, two_problems):
    """An implementation that is a little off, and one that raises."""
    attention = jax_dma.attention

    def off(q, *rest, implementation, **options):
        out, lse = attention(q, *rest, implementation=implementation, **options)
        return out * (1.001 if implementation == "xla" else 1), lse

    monkeypatch.setattr(jax_dma, "attention", off)
    check._values_and_gradients.cache_clear()
    arguments = ["check", "--dtype", "float32", "--implementation", "xla", "--all"]
    assert main(arguments) == 1
    assert "WRONG in dense_mask" in capsys.readouterr().out

    def broken(*operands, implementation, **options):
        if implementation == "xla":
            raise RuntimeError("out of order")
        return attention(*operands, implementation=implementation, **options)

    monkeypatch.setattr(jax_dma, "attention", broken)
    check._values_and_gradients.cache_clear()
    assert main(arguments) == 1
    assert "out of order" in capsys.readouterr().out
    check._values_and_gradients.cache_clear()


def test_bench_times_a_shape(capsys, tmp_path):
    """Our implementations and jax.nn, both passes, a table and a chart."""
    chart = tmp_path / "chart.png"
    assert main(["bench", *SMALL, "--mask", "top_k", "--window", "8", "--bias", "key", "--plot", str(chart)]) == 0
    text = capsys.readouterr().out
    for name in ("xla", "reference", "jax.nn xla", "forward+backward", "x fastest", "intervals in place"):
        assert name in text, name
    assert chart.read_bytes().startswith(b"\x89PNG") and str(chart) in text


@pytest.mark.parametrize("bias", bench.BIASES)
@pytest.mark.parametrize("mask", bench.MASKS)
def test_bench_makes_every_kind_of_mask_and_bias(mask, bias):
    """Only their types: what they are passes the checks of attention."""
    problem = bench.Problem(2, 40, 56, 4, 2, 16, 8, "float32", mask, bias, 8, 0.5, True)
    operands, dout = jax.eval_shape(lambda key: bench._operands(problem, key), jax.random.key(0))
    out = jax.eval_shape(lambda *x: jax_dma.attention(*x, is_causal=True), *operands)
    assert out.shape == dout.shape and out.dtype == dout.dtype


def test_bench_as_json_of_one_implementation(capsys):
    arguments = ["--json", *SMALL, "-S", "60", "--mask", "window", "--forward-only", "--only", "xla", "--plot", ""]
    assert main(["bench", *arguments]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(row["implementation"], row["pass"]) for row in result["rows"]] == [("xla", "forward")]
    assert result["rows"][0]["ms"] > 0 and result["call"]["S"] == 60 and result["plot"] is None


def test_bench_fails_where_an_implementation_does(capsys, monkeypatch):
    def broken(*operands, implementation, **options):
        raise RuntimeError("out of order")

    monkeypatch.setattr(jax_dma, "attention", broken)
    assert main(["bench", *SMALL, "--only", "xla", "--plot", ""]) == 1
    assert "not run: xla: RuntimeError: out of order" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nonsense"], "invalid choice"),
        (["bench", "-T", "0"], "-T"),
        (["bench", "-N", "6", "-K", "4"], "-N 6 must be a multiple of -K 4"),
        (["bench", "--mask", "holes"], "--mask"),
        (["bench", "--mask", "random", "--window", "9"], "--mask random has no --window"),
        (["bench", "--only", "nobody"], "nobody"),
        (["check", "--implementation", "nobody"], "there is no such implementation"),
    ],
)
def test_what_is_mistyped_is_named(arguments, words, capsys):
    """Exit code 2, as for every command that is called wrongly."""
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["status"], ["check"], ["bench"]])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as error:
        main([*command, "--help"])
    text = capsys.readouterr().out
    assert error.value.code == 0 and "--json" in text and ("Exits with 1" in text or not command)
