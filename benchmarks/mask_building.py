"""How long masks take to make: dense top-k, its plan, the plan of any dense mask, and top-k from one score per key.

    python benchmarks/mask_building.py --json results.json

Beside each the same in plain JAX: the selection that ``jax_dma`` uses where it has no kernel, and ``jax.lax.top_k``.
The bytes are those that must be read and written once.
"""

import argparse
import functools
import sys

import jax
import jax.numpy as jnp
import report
import workloads
from tqdm import tqdm

import jax_dma
from jax_dma import masks, select
from jax_dma.command import timing


def by_lax(window, scores):
    """The mask by ``jax.lax.top_k``, causal."""
    T, S = scores.shape[-2:]
    visible = jnp.arange(S) <= jnp.arange(T)[:, None] + (S - T)
    hidden = jnp.array(-jnp.inf, scores.dtype)
    kept, index = jax.lax.top_k(jnp.where(visible, scores, hidden), window)
    chosen = jnp.zeros(scores.shape, bool)
    chosen = jnp.put_along_axis(chosen, index, kept != hidden, axis=-1, inplace=False)
    return chosen


def cases(options):
    """(what, function, operand, bytes): each a jitted function of one array."""
    T = 1024 if options.small else 8192
    w = T // 8
    normal = lambda *shape, dtype=jnp.float32: jax.random.normal(jax.random.key(0), shape, dtype)
    q, k = jax.ShapeDtypeStruct((1, T, 32, 128), jnp.bfloat16), jax.ShapeDtypeStruct((1, T, 8, 128), jnp.bfloat16)
    for dtype in ("bfloat16", "float32"):
        scores = functools.partial(normal, 1, 8, T, T, dtype=dtype)
        half, size = 8 * T * T / 2, jnp.dtype(dtype).itemsize  # the causal half is read
        name = f"{dtype}[1,8,{T},{T}], top {w}, causal"
        dense = functools.partial(masks.dense_top_k, window=w, is_causal=True)
        yield f"dense_top_k {name}", dense, scores, half * size + 2 * half
        planned = lambda x: jax_dma.plan_top_k(x, w, q, k, is_causal=True)
        yield f"plan_top_k {name}", planned, scores, half * size + half / 4
        if dtype == "bfloat16":
            plain = lambda x: select._select_plain(x, window=w, causal=True, packed=False)[0]
            yield f"plain JAX {name}", plain, scores, half * size + 2 * half
            yield f"jax.lax.top_k {name}", functools.partial(by_lax, w), scores, half * size + 2 * half
    random = lambda: jax.random.bernoulli(jax.random.key(0), 0.2, (1, 8, T, T))
    yield f"plan bool[1,8,{T},{T}]", lambda mask: jax_dma.plan(mask, q, k), random, 8 * T * T * 9 / 8
    for S in (T, 16 * T, 128 * T):
        scores = functools.partial(normal, 1, 8, S)
        top_k = functools.partial(masks.top_k, window=2 * w)
        yield f"top_k float32[1,8,{S}], top {2 * w}", top_k, scores, 8 * S * 12


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="an eighth of the length: does it run at all?")
    parser.add_argument("--repetitions", type=int, default=0, help="timed calls; 0 chooses by duration")
    parser.add_argument("--json", metavar="FILE", help="also write the results, with device, versions and commit")
    parser.add_argument("--commit", help="recorded in the results where git cannot tell")
    options = parser.parse_args(argv)
    peak = workloads.peaks(report.device_name())
    rows = []
    for what, function, operand, size in tqdm(list(cases(options)), unit="case", disable=None):
        x = jax.jit(operand)()
        ms = timing.measure(jax.jit(function), [(x,)], timing.default_timer(), options.repetitions).ms
        rows.append({"what": what, "ms": ms, "bytes": size, "limit_ms": 1e3 * size / peak.bytes if peak else None})
        if options.json:
            report.write_json(options.json, rows, options.commit)
    report.show(rows, [(name, lambda r, name=name: r[name]) for name in ("what", "ms", "limit_ms")])
    return 0


if __name__ == "__main__":
    sys.exit(main())
