"""Attention in O(T * w): time against length, against the window, and for score patterns made to be hard.

Every call builds its mask from the scores (``masks.top_k``) and has a trainable bias per key. Beside it: the window
that sees as many keys in place, and dense causal attention by jax.nn where it serves the call in reasonable time.
"""

import argparse
import functools
import sys

import jax
import jax.numpy as jnp
from tqdm import tqdm

import jax_dma
import report
from jax_dma.command import timing

LENGTHS = (32_768, 65_536, 131_072, 262_144, 524_288, 1_048_576)
WINDOWS = (1_024, 2_048, 4_096)
PATTERNS = ("random", "rising", "falling", "constant", "sawtooth", "one per tile", "heads differ")
DENSE_UP_TO = 131_072  # dense attention at 1,048,576 tokens takes 14 s forward


def scores_of(pattern, key, K, S):
    """float32 [1, K, S]: which keys are kept, and when they come and go."""
    s = jnp.arange(S, dtype=jnp.float32)
    random = jax.random.normal(key, (1, K, S))
    return jnp.broadcast_to(
        {
            "random": random,
            "rising": s,  # every key enters: a window
            "falling": -s,  # the first w stay
            "constant": 0 * s,  # ties go to the lower index
            "sawtooth": s % 1000,
            "one per tile": jnp.where(s % 128 == 5, 1e3 - 1e-4 * s, random),  # long-lived keys far apart
            "heads differ": random + jnp.arange(K)[:, None] * s / S,
        }[pattern],
        (1, K, S),
    )


def attend(kind, window, q, k, v, bias, scores):
    T = q.shape[1]
    if kind == "dense":
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    if kind == "window":
        return jax_dma.attention(q, k, v, jax_dma.masks.sliding_window(T, T, window - 1), bias)
    return jax_dma.attention(q, k, v, jax_dma.masks.top_k(scores, window), bias)


def measure(kind, window, pattern, T, options):
    """A row: milliseconds of the forward pass and of both passes."""
    N, K, H = options.heads, options.kv_heads, options.head_dim
    keys = jax.random.split(jax.random.key(0), 6)
    dtype = jnp.dtype(options.dtype)
    q, dout = (jax.random.normal(x, (1, T, N, H), dtype) for x in keys[:2])
    k, v = (jax.random.normal(x, (1, T, K, H), dtype) for x in keys[2:4])
    bias, scores = jax.random.normal(keys[4], (1, K, 1, T), dtype), scores_of(pattern, keys[5], K, T)
    forward = functools.partial(attend, kind, window)

    def both(q, k, v, bias, scores, dout):
        out, vjp = jax.vjp(lambda q, k, v, bias: forward(q, k, v, bias, scores), q, k, v, bias)
        return out, vjp(dout)

    row = {"kind": kind, "window": window, "pattern": pattern, "T": T, "N": N, "K": K, "H": H, "dtype": str(dtype)}
    timer = timing.default_timer()
    try:
        row["forward_ms"] = timing.measure(jax.jit(forward), [(q, k, v, bias, scores)], timer, options.repetitions).ms
        if not options.forward_only:
            inputs = (q, k, v, bias, scores, dout)
            compiled = jax.jit(both).lower(*inputs).compile()
            row["temporary_gib"] = compiled.memory_analysis().temp_size_in_bytes / 2**30
            row["ms"] = timing.measure(jax.jit(both), [inputs], timer, options.repetitions).ms
    except Exception as error:
        row["error"] = " ".join(str(error).split())[:160]
    return row


def cases(options):
    """(kind, window, pattern, T) to measure."""
    lengths = [T for T in LENGTHS if T <= options.longest]
    middle = max(T for T in lengths if T <= DENSE_UP_TO)
    yield from (("top_k", 2048, "random", T) for T in lengths)
    yield from (("top_k", w, "random", middle) for w in WINDOWS if w != 2048)
    yield from (("top_k", 2048, pattern, middle) for pattern in PATTERNS if pattern != "random")
    yield from (("window", 2048, "random", T) for T in lengths)
    if jax.default_backend() == "gpu" and not options.no_dense:
        yield from (("dense", 0, "random", T) for T in lengths if T <= DENSE_UP_TO)


def plot(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5))
    for axis, field, title in zip(axes, ("forward_ms", "ms"), ("forward", "forward + backward")):
        for kind, style in (("top_k", "o-"), ("window", ".--"), ("dense", "s:")):
            series = [r for r in rows if r["kind"] == kind and r["pattern"] == "random" and r["window"] in (0, 2048)]
            points = sorted((r["T"], r[field]) for r in series if field in r)
            if points:
                label = {"top_k": "top 2,048 keys, mask included", "window": "window of 2,048", "dense": "dense, cuDNN"}
                axis.plot(*zip(*points), style, label=label[kind])
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms", title=title)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--longest", type=int, default=1_048_576, help="leave longer sequences out")
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8, help="key/value heads")
    parser.add_argument("--head-dim", type=int, default=128, help="head dimension")
    parser.add_argument("--dtype", default="bfloat16", help="of q, k, v and bias")
    parser.add_argument("--repetitions", type=int, default=0, help="timed calls; 0 chooses by duration")
    parser.add_argument("--forward-only", action="store_true", help="leave the backward pass out")
    parser.add_argument("--no-dense", action="store_true", help="leave dense attention out")
    parser.add_argument("--json", metavar="FILE", help="also write the results, with device, versions and commit")
    parser.add_argument("--plot", metavar="FILE", help="also draw time against length")
    parser.add_argument("--commit", help="recorded in the results where git cannot tell")
    options = parser.parse_args(argv)
    if options.longest < LENGTHS[0]:
        parser.error(f"--longest must be at least {LENGTHS[0]}: shorter sequences say nothing here")
    rows = []
    for case in tqdm(list(cases(options)), unit="case", disable=None):
        rows.append(measure(*case, options))
        if options.json:
            report.write_json(options.json, rows, options.commit)
    columns = ("kind", "window", "pattern", "T", "forward_ms", "ms", "temporary_gib", "error")
    report.show(rows, [(name, lambda r, name=name: r.get(name)) for name in columns])
    if options.plot:
        plot(rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
