"""``python -m jax_dma check``: the accuracy of every implementation on this machine, against float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jax_dma
from jax_dma.command import output
from jax_dma.command.status import TOLERANCES, device_for

HELP = "the accuracy of each implementation on this machine, against float64"
DESCRIPTION = """\
Runs a dozen calls, forward and backward, on each available implementation in each dtype that it computes in, and shows
the largest relative error of out, lse and the gradients, against the executable specification in float64 on the same
rounded inputs. Exits with 1 if an error is larger than promised, or a call fails.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A call of attention. ``mask`` and ``bias`` are functions of (random generator, problem), or None."""

    T: int
    S: int
    N: int = 4
    K: int = 2
    H: int = 64
    Hv: int | None = None
    mask: object = None
    bias: object = None
    options: dict = dataclasses.field(default_factory=dict)


B = 2
_dense = lambda rng, p: jnp.asarray(rng.random((B, p.K, p.T, p.S)) < 0.3)
_lengths = lambda rng, p: jax_dma.masks.lengths(rng.integers(p.S // 2, p.S + 1, B), p.T, p.S)
_window = lambda rng, p: jax_dma.masks.sliding_window(p.T, p.S, 40)
_top_k = lambda rng, p: jax_dma.masks.top_k(rng.standard_normal((B, p.K, p.S), np.float32), 40, p.T)
_bias = lambda *shape: lambda rng, p: rng.standard_normal([getattr(p, x) if isinstance(x, str) else x for x in shape])
_causal = {"is_causal": True}
PROBLEMS = {
    "plain": Problem(130, 130, H=40, Hv=24),
    "causal": Problem(192, 192, options=_causal),
    "longer_keys": Problem(70, 333, options=_causal),
    "one_query": Problem(1, 700, N=8, bias=_bias(B, "K", 1, "S")),
    "padding": Problem(150, 210, mask=_lengths, bias=_bias(1, 1, "T", "S")),
    "window": Problem(300, 333, H=128, mask=_window),
    "top_k": Problem(256, 256, mask=_top_k, bias=_bias(B, "K", 1, "S"), options=_causal),
    "top_k_gathered": Problem(200, 900, H=32, mask=_top_k, bias=_bias(B, 1, 1, "S")),
    "dense_mask": Problem(150, 210, mask=_dense, bias=_bias(B, "K", "T", "S"), options=_causal),
    "query_heads": Problem(96, 160, N=6, H=32, bias=_bias(1, "N", "T", "S")),
    "soft_cap": Problem(150, 150, bias=_bias(1, "K", "T", 1), options={"logits_soft_cap": 8.0, "is_causal": True}),
    "wide": Problem(140, 140, H=256, bias=_bias(1, 1, 1, 1)),
}


def add_arguments(parser):
    """The options of the command."""
    parser.add_argument("--implementation", action="append", metavar="NAME", help="only this one (repeatable)")
    parser.add_argument("--dtype", action="append", choices=list(TOLERANCES), help="only this one (repeatable)")
    parser.add_argument("--all", action="store_true", help="show every call, not the worst of each kind of result")


def run(options):
    """Errors by implementation, dtype and problem; ``passed`` tells whether all are within tolerance."""
    available = jax_dma.available_implementations()
    names = options.implementation or available
    for name in names:
        if name not in available:
            options.error(f"{name}: {jax_dma.status().get(name, 'there is no such implementation')}")
    rows, dtypes = [], options.dtype or list(TOLERANCES)
    for i, (title, problem) in enumerate(PROBLEMS.items()):
        for dtype in dtypes:
            operands, mask, cotangents = _operands(problem, dtype)
            want = _truth(problem, operands, mask, cotangents)
            for name in names:
                output.progress(f"{i + 1}/{len(PROBLEMS)} {title} {dtype} {name}")
                row = _errors(name, problem, dtype, operands, mask, cotangents, want)
                if row is not None:
                    rows.append({"implementation": name, "dtype": dtype, "problem": title, **row})
    output.progress()
    return {"rows": rows, "passed": bool(rows) and all(row["passed"] for row in rows), "all": options.all}


def _operands(problem, dtype):
    p, rng = problem, np.random.default_rng(0)
    Hv = p.H if p.Hv is None else p.Hv
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    operands = {"q": draw(B, p.T, p.N, p.H), "k": draw(B, p.S, p.K, p.H), "v": draw(B, p.S, p.K, Hv)}
    if p.bias is not None:
        operands["bias"] = jnp.asarray(p.bias(rng, p), dtype)
    mask = None if p.mask is None else p.mask(rng, p)
    return operands, mask, (draw(B, p.T, p.N, Hv), draw(B, p.T, p.N).astype(jnp.float32))


@functools.cache  # the truth is one program for all dtypes
def _values_and_gradients(problem, implementation):
    def function(operands, mask, cotangents):
        results = lambda x: jax_dma.attention(
            x["q"], x["k"], x["v"], mask, x.get("bias"), return_lse=True, implementation=implementation,
            **problem.options,
        )  # fmt: skip
        values, vjp = jax.vjp(results, operands)
        return values, vjp(cotangents)[0]

    return jax.jit(function)


def _truth(problem, operands, mask, cotangents):
    """Values, gradients, and the norm of the gradient of bias before it is summed over what is broadcast."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = lambda x: jnp.asarray(np.asarray(x).astype(np.float64))
        operands, cotangents = jax.tree.map(wide, (operands, cotangents))
        mask = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), mask)
        function = _values_and_gradients(problem, "reference")
        values, gradients = function(operands, mask, cotangents)
        norm = 0.0
        if "bias" in operands:
            p, bias = problem, operands["bias"]
            bias = jnp.repeat(bias, p.N // p.K, axis=1) if bias.shape[1] == p.K else bias
            full = {**operands, "bias": jnp.broadcast_to(bias, (B, p.N, p.T, p.S))}
            norm = float(jnp.linalg.norm(function(full, mask, cotangents)[1]["bias"].ravel()))
        return jax.tree.map(np.asarray, (values, gradients)), norm


def _errors(name, problem, dtype, operands, mask, cotangents, want):
    """Errors of one implementation on one problem, or None if it does not serve it."""
    ((out, lse), gradients), bias_norm = want
    try:
        with device_for(name):
            function = _values_and_gradients(problem, name)
            got = jax.tree.map(np.asarray, function(*jax.device_put((operands, mask, cotangents), _device(name))))
    except Exception as error:  # that an implementation fails is what this command is there to show
        if isinstance(error, ValueError) and "cannot serve this call" in str(error):
            return None
        return {"errors": {}, "passed": False, "failure": output.one_line(error)}
    errors = {"out": _error(got[0][0], out), "lse": _error(got[0][1], lse)}
    for which, gradient in gradients.items():
        errors["d" + which] = _error(got[1][which], gradient, bias_norm if which == "bias" else 0.0)
    allowed = dict(zip(("out", "lse"), TOLERANCES[dtype]))
    passed = all(error <= allowed.get(which, TOLERANCES[dtype][2]) for which, error in errors.items())
    return {"errors": errors, "passed": passed, "failure": None}


def _device(name):
    return jax.devices(name)[0] if name in ("cpu", "cuda") else jax.devices()[0]


def _error(got, want, at_least=0.0):
    """Relative Frobenius error; infinite where -inf does not stand exactly where it should, or anything is NaN."""
    got, empty = got.astype(np.float64), np.isneginf(want)
    if not np.array_equal(np.isneginf(got), empty) or np.isnan(got).any():
        return float("inf")
    difference = np.linalg.norm(np.where(empty, 0, got - np.where(empty, 0, want)).ravel())
    norm = max(np.linalg.norm(np.where(empty, 0, want).ravel()), at_least)
    return float(difference / norm) if norm > 0 else float(difference > 0)


def render(result):
    """The result for people."""
    kinds = ("out", "lse", "gradient")
    worst = {}
    for row in result["rows"]:
        key = (row["implementation"], row["dtype"]) + ((row["problem"],) if result["all"] else ())
        entry = worst.setdefault(key, {"rows": 0, "wrong": [], "errors": dict.fromkeys(kinds, 0.0)})
        entry["rows"] += 1
        for name, error in row["errors"].items():
            kind = name if name in kinds else "gradient"
            entry["errors"][kind] = max(entry["errors"][kind], error)
        if not row["passed"]:
            entry["wrong"].append(f"WRONG in {row['problem']}" + (f": {row['failure']}" if row["failure"] else ""))
    lines = output.table(
        ["implementation", "dtype", *(["call"] if result["all"] else []), "calls", *kinds, ""],
        [
            [*key, entry["rows"], *entry["errors"].values(), "; ".join(entry["wrong"]) or "ok"]
            for key, entry in sorted(worst.items())
        ],
    )  # fmt: skip
    allowed = "; ".join(f"{dtype} {' / '.join(map(str, limits))}" for dtype, limits in TOLERANCES.items())
    verdict = "every error is as small as promised" if result["passed"] else "NOT every error is as small as promised"
    return "\n".join([*lines, "", f"largest relative errors; allowed for out / lse / gradients: {allowed}", verdict])
