"""Errors against a float64 evaluation of the same inputs, and what counts as accurate.

The truth is ``jax_dma``'s executable specification run in float64 on the CPU, with the bias spelled out to
[B, N, T, S] so that its unreduced gradient is known too.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jax_dma
import peers
import workloads

# Relative Frobenius error allowed for out, lse and each gradient.
TOLERANCES = {
    "bfloat16": {"out": 5e-3, "lse": 1e-3, "gradient": 1e-2},
    "float16": {"out": 1e-3, "lse": 1e-3, "gradient": 2e-3},
    "float32": {"out": 1e-5, "lse": 1e-5, "gradient": 1e-4},
}
OF_BASELINE = 2.0  # and never more than this many times the error of jax.nn.dot_product_attention in the same dtype


def tolerance(dtype, result):
    """The error allowed for a result by name: out, lse or a gradient."""
    return TOLERANCES[dtype][result if result in ("out", "lse") else "gradient"]


def truth(workload, operands, function):
    """``function(operands, attend)`` in float64 on the CPU: results made with ``attend(operands) -> (out, lse)``."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        convert = lambda x: jnp.asarray(np.asarray(x).astype(np.float64) if _is_float(x) else np.asarray(x))
        attend = lambda x: jax_dma.attention(
            x.q, x.k, x.v, x.mask, x.bias, is_causal=workload.causal, return_lse=True, implementation="reference"
        )  # fmt: skip
        results = jax.jit(lambda x: function(x, attend))(jax.tree.map(convert, operands))
        return jax.tree.map(np.asarray, results)


def _is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def full_bias(workload, bias):
    """The bias spelled out to [B, N, T, S]."""
    w = workload
    if bias.shape[1] == w.K:
        bias = jnp.repeat(bias, w.N // w.K, axis=1)
    return jnp.broadcast_to(bias, (w.B, w.N, w.T, w.S))


def reduce_bias_gradient(workload, gradient):
    """A [B, N, T, S] gradient summed to the bias's shape (NumPy)."""
    w, shape = workload, workload.bias_shape()
    if shape[1] == w.K != w.N:
        gradient = gradient.reshape(w.B, w.K, w.N // w.K, w.T, w.S).sum(2)
    axes = tuple(i for i, n in enumerate(shape) if n == 1)
    return gradient.sum(axes, keepdims=True) if axes else gradient


def relative_error(result, expected, at_least=0.0):
    """Frobenius norm of the difference over that of the truth (or ``at_least``); inf where non-finite values differ."""
    result, expected = np.asarray(result).astype(np.float64), np.asarray(expected)
    if result.shape != expected.shape:
        return float("inf")
    finite = np.isfinite(expected)
    if not np.array_equal(result[~finite], expected[~finite]) or not np.isfinite(result[finite]).all():
        return float("inf")
    difference, norm = np.linalg.norm(result[finite] - expected[finite]), np.linalg.norm(expected[finite])
    norm = max(norm, at_least)
    return float(difference / norm) if norm > 0 else (0.0 if difference == 0 else float("inf"))


def check(workload, found, compute, seed=0, lse_gradient=False):
    """Rows with the error of every result of every implementation.

    Args:
      workload: a Workload.
      found: the implementations.
      compute: (attend, workload, operands, dout, dlse) -> dict of results; ``attend(operands) -> (out, lse | None)``. A
        gradient of the bias is called ``dbias`` and has the bias's shape.
      seed: of the operands.
      lse_gradient: whether ``compute`` differentiates lse; implementations that cannot are left out.
    """
    first, second = jax.random.split(jax.random.key(seed))
    operands = workloads.make(workload, first)
    dout, dlse = workloads.cotangents(workload, second)
    expected, floors, blind = _expected(workload, operands, dout, dlse, compute)
    rows = []
    for implementation in sorted(found, key=lambda i: i.name != peers.BASELINE):
        row = {
            "workload": workload.name, "implementation": implementation.name, "ours": implementation.ours, "errors": {},
            "allowed": {name: tolerance(workload.dtype, name) for name in expected}, "ok": None,
            "error": implementation.refuses(workload, workloads.TRAINING),
        }  # fmt: skip
        if implementation.ours and row["error"]:
            continue  # it is entitled to refuse: the next one serves
        if lse_gradient and not implementation.lse_gradient:
            row["error"] = row["error"] or "it gives no lse that can be differentiated"
        rows.append(row)
        if row["error"] is None:
            # What peers make of a query that sees no key is their affair: it is left out of their comparison.
            skip = blind if not implementation.ours else np.zeros_like(blind)
            cotangents = (jnp.where(skip[..., None], 0, dout), jnp.where(skip, 0, dlse))
            attend = lambda x: implementation.call(workload, implementation.prepare(workload, x))
            try:
                results = jax.jit(lambda *x: compute(attend, workload, *x))(operands, *cotangents)
                row["errors"] = _errors(jax.tree.map(np.asarray, results), expected, floors, skip)
            except Exception as error:
                row["error"] = peers.one_line(error)
        row["ok"] = bool(row["errors"]) and all(e <= row["allowed"][name] for name, e in row["errors"].items())
    _compare_with_baseline(rows)
    return rows


def _expected(workload, operands, dout, dlse, compute):
    """(results, least norm of their denominators, bool [B, T, N] of the queries that see nothing), in float64."""
    bias = operands.bias
    spelled_out = operands._replace(bias=None if bias is None else full_bias(workload, bias))

    def function(x, attend):
        operands, dout, dlse = x
        return compute(attend, workload, operands, dout, dlse), attend(operands)[1]

    results, lse = truth(workload, (spelled_out, dout, dlse), function)
    floors = {}
    if "dbias" in results:
        floors["dbias"] = float(np.linalg.norm(results["dbias"]))
        results["dbias"] = reduce_bias_gradient(workload, results["dbias"])
    return results, floors, np.isneginf(lse)


def _errors(results, expected, floors, skip):
    errors = {}
    for name, value in results.items():
        if value is None:
            continue
        truth_ = expected[name]
        if name in ("out", "lse"):
            value, truth_ = value[~skip], truth_[~skip]
        errors[name] = relative_error(value, truth_, floors.get(name, 0.0))
    return errors


def _compare_with_baseline(rows):
    baseline = next((r for r in rows if r["implementation"] == peers.BASELINE and r["errors"]), None)
    for row in rows:
        if baseline is None or not row["ours"] or not row["errors"]:
            continue
        shared = set(row["errors"]) & set(baseline["errors"])
        row["of_baseline"] = {n: row["errors"][n] / max(baseline["errors"][n], 1e-30) for n in sorted(shared)}
        row["ok"] = row["ok"] and all(ratio <= OF_BASELINE for ratio in row["of_baseline"].values())


def columns(rows):
    """Columns for :func:`report.show`."""
    names = [n for n in ("out", "lse", "dq", "dk", "dv", "dbias") if any(n in r["errors"] for r in rows)]
    worst = lambda r: max(r["of_baseline"].values()) if r.get("of_baseline") else None
    return [
        ("workload", lambda r: r["workload"]),
        ("implementation", lambda r: r["implementation"]),
        *[(n, lambda r, n=n: r["errors"].get(n)) for n in names],
        (f"x {peers.BASELINE}", worst),
        ("result", lambda r: ("pass" if r["ok"] else "FAIL") if r["errors"] or r["ours"] else "-"),
        ("note", lambda r: r["error"] or ""),
    ]
