"""``python -m jax_dma bench``: how long the attention of a given shape takes, next to the peers installed."""

import argparse
import dataclasses
import functools
import importlib
import math
import os
import textwrap

import jax
import jax.numpy as jnp

import jax_dma
from jax_dma.choice import default_platform
from jax_dma.command import output, timing

HELP = "how long a call of your shape takes, by each implementation and the peers installed"
DESCRIPTION = """\
Times a call of the shape given, forward alone and forward with backward, by each implementation that serves it and by
the other attention functions installed (jax.nn, tokamax). On a GPU these are device times from a profile, on a CPU
host-clock medians of functions that take turns. Peers get masks and biases in the form that they take, and that
conversion is not timed. Exits with 1 if an implementation of jax_dma fails.

  python -m jax_dma bench -T 8192 -N 32 -K 8 -H 128 --mask top_k --window 1024 --bias key
  python -m jax_dma bench -B 4 -T 1024 -N 8 -H 64 --dtype float32 --mask segments --json > result.json

--mask    none
          window       each query sees the last --window keys
          top_k        the --window highest-scored keys, by one score per key: the bias, if that is --bias key
          dense_top_k  the same by one score per query and key, a bool array
          random       a bool array, each position visible with probability --density
          padding      the first half to all of the keys
          segments     packed sequences of --window positions on average
--bias    none, key [B, K, 1, S], kv [B, K, T, S], query [B, N, T, S], batch [1, N, T, S], one [1, 1, T, S]
"""
MASKS = ("none", "window", "top_k", "dense_top_k", "random", "padding", "segments")
WITHOUT_WINDOW = ("none", "random", "padding")
BIASES = ("none", "key", "kv", "query", "batch", "one")
PASSES = ("forward", "forward+backward")
_CACHE_BYTES = 120e6  # twice the largest cache in use: smaller problems are timed on several inputs in turn


def add_arguments(parser):
    """The options of the command."""
    size = functools.partial(parser.add_argument, type=_size, metavar="INT")
    size("-B", default=1, help="batch size (default 1)")
    size("-T", default=1024, help="query length (default 1024)")
    size("-S", help="key length (default T)")
    size("-N", default=8, help="query heads (default 8)")
    size("-K", help="key/value heads (default N)")
    size("-H", default=64, help="head dimension of q and k (default 64)")
    size("--Hv", help="head dimension of v (default H)")
    parser.add_argument("--dtype", default=None, choices=["bfloat16", "float16", "float32"],
                        help="default: bfloat16 on a GPU, float32 elsewhere")  # fmt: skip
    parser.add_argument("--mask", default="none", choices=MASKS, metavar="KIND", help="see above (default none)")
    parser.add_argument("--bias", default="none", choices=BIASES, metavar="KIND", help="see above (default none)")
    size("--window", help="how many keys a query keeps; the length of segments (default 256)")
    parser.add_argument("--density", type=float, default=0.5, help="of a random mask (default 0.5)")
    parser.add_argument("--not-causal", action="store_true", help="without the causal rule, which holds otherwise")
    parser.add_argument("--forward-only", action="store_true", help="leave the backward pass out")
    parser.add_argument("--only", action="append", metavar="NAME", help="only this implementation or peer (repeatable)")
    parser.add_argument("--repetitions", type=int, default=0, help="timed calls; default: by duration")
    parser.add_argument("--seed", type=int, default=0, help="of the random operands (default 0)")
    parser.add_argument("--plot", metavar="FILE", default="jax_dma_bench.png",
                        help="a chart, with matplotlib (default jax_dma_bench.png; '' for none)")  # fmt: skip


def _size(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it must be an integer, at least 1, and is {text!r}")
    return int(text)


# --- the problem -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Problem:
    """The call to be timed, in the words of the options."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    Hv: int
    dtype: str
    mask: str
    bias: str
    window: int
    density: float
    causal: bool

    @classmethod
    def of(cls, options):
        """The problem, with the defaults that depend on other options."""
        o = options
        K = o.K or o.N
        if o.N % K:
            o.error(f"-N {o.N} must be a multiple of -K {K}")
        if o.window and o.mask in WITHOUT_WINDOW:
            o.error(f"--mask {o.mask} has no --window")
        dtype = o.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
        window = o.window or 256
        return cls(
            o.B, o.T, o.S or o.T, o.N, K, o.H, o.Hv or o.H, dtype, o.mask, o.bias, window, o.density, not o.not_causal
        )


@functools.partial(jax.jit, static_argnums=0)
def _operands(problem, key):
    """q, k, v, mask, bias and a cotangent, random."""
    p, keys = problem, jax.random.split(key, 6)
    normal = lambda i, *shape: jax.random.normal(keys[i], shape, jnp.dtype(p.dtype))
    shapes = {
        "key": (p.B, p.K, 1, p.S), "kv": (p.B, p.K, p.T, p.S), "query": (p.B, p.N, p.T, p.S),
        "batch": (1, p.N, p.T, p.S), "one": (1, 1, p.T, p.S),
    }  # fmt: skip
    bias = None if p.bias == "none" else normal(0, *shapes[p.bias])
    q, k, v = normal(1, p.B, p.T, p.N, p.H), normal(2, p.B, p.S, p.K, p.H), normal(3, p.B, p.S, p.K, p.Hv)
    return (q, k, v, _mask(p, keys[4], bias), bias), normal(5, p.B, p.T, p.N, p.Hv)


def _mask(p, key, bias):
    masks = jax_dma.masks
    if p.mask == "none":
        return None
    if p.mask == "window":
        return masks.sliding_window(p.T, p.S, p.window - 1)
    if p.mask == "top_k":
        scores = bias[:, :, 0] if p.bias == "key" else jax.random.normal(key, (p.B, p.K, p.S))
        return masks.top_k(scores, p.window, p.T, is_causal=p.causal)
    if p.mask == "dense_top_k":
        scores = bias if p.bias in ("kv", "query") else jax.random.normal(key, (p.B, p.K, p.T, p.S), jnp.dtype(p.dtype))
        return masks.dense_top_k(scores, p.window, is_causal=p.causal)
    if p.mask == "random":
        return jax.random.bits(key, (p.B, p.K, p.T, p.S), jnp.uint16) < jnp.uint16(min(max(p.density, 0), 1) * 65535)
    if p.mask == "padding":
        return masks.lengths(jax.random.randint(key, (p.B,), -(-p.S // 2), p.S + 1), p.T, p.S)
    begins = jax.random.uniform(key, (p.B, p.S)) < 1 / p.window
    return masks.segments(jnp.cumsum(begins, -1, dtype=jnp.int32), p.T)


# --- who computes it -------------------------------------------------------------------------------------------------


def _ours(name, problem):
    def call(q, k, v, mask, bias):
        return jax_dma.attention(q, k, v, mask, bias, is_causal=problem.causal, implementation=name)

    return call, lambda *x: x


def _peer(function, problem, **more):
    """A peer with the signature of jax.nn.dot_product_attention: dense masks, all query heads, causal from the top."""
    p = problem
    causal = p.causal and p.T == p.S

    def prepare(q, k, v, mask, bias):
        if isinstance(mask, jax_dma.KeyIntervals):
            mask = mask.dense(p.T)
        if p.causal and not causal:
            rule = jax_dma.masks.causal(p.T, p.S).dense(p.T)
            mask = rule if mask is None else mask & rule
        all_heads = lambda x: x if x is None or x.shape[1] != p.K else jnp.repeat(x, p.N // p.K, 1)
        mask, bias = all_heads(mask), all_heads(bias)
        if more.get("implementation") == "cudnn":
            full = lambda x: x if x is None else jnp.broadcast_to(x, (*x.shape[:2], p.T, p.S))
            mask, bias = full(mask), full(bias)
        return q, k, v, mask, bias

    def call(q, k, v, mask, bias):
        return function(q, k, v, bias=bias, mask=mask, is_causal=causal, **more)

    return call, prepare


def _tokamax(problem):
    return _peer(importlib.import_module("tokamax").dot_product_attention, problem)


_PEERS = {
    "jax.nn xla": lambda p: _peer(jax.nn.dot_product_attention, p, implementation="xla"),
    "jax.nn cudnn": lambda p: _peer(jax.nn.dot_product_attention, p, implementation="cudnn"),
    "tokamax": _tokamax,
}
_MATERIALISE = ("reference", "jax.nn xla")  # [B, N, T, S] logits


def _candidates(options, problem):
    """{name: (call, prepare), or a text that says why it is not run}."""
    platform, status = default_platform(), jax_dma.status()
    found = {}
    for name, text in status.items():
        if text == "available" and name == "cpu" and platform != "cpu":
            text = f"the default device is {platform}"
        found[name] = _ours(name, problem) if text == "available" else text
    for name, build in _PEERS.items():
        if name == "jax.nn cudnn" and platform != "cuda":
            found[name] = "it runs on CUDA"
            continue
        try:
            found[name] = build(problem)
        except ImportError:
            found[name] = "it is not installed"
        except Exception as error:
            found[name] = output.one_line(error)
    for name in options.only or ():
        if name not in found:
            options.error(f"--only {name}: there are {', '.join(found)}")
        if isinstance(found[name], str):
            options.error(f"--only {name}: {found[name]}")
    logits = math.prod((problem.B, problem.N, problem.T, problem.S)) * (10 if options.forward_only else 20)
    for name in _MATERIALISE:
        if name in found and not isinstance(found[name], str) and logits > _free_memory():
            found[name] = f"its [B, N, T, S] logits would take about {logits / 1e9:.0f} GB"
    return {name: entry for name, entry in found.items() if not options.only or name in options.only}


def _free_memory():
    """Bytes that may be used on the default device."""
    stats = jax.devices()[0].memory_stats() or {}
    if jax.default_backend() != "cpu" and "bytes_limit" in stats:
        return 0.85 * stats["bytes_limit"]
    return 0.5 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _timed(call, which):
    """jitted (operands, cotangent) -> what a pass computes; gradients of q, k, v and bias, as in training."""
    if which == "forward":
        return jax.jit(lambda operands, dout: call(*operands))

    def both(operands, dout):
        q, k, v, mask, bias = operands
        trained = (q, k, v) if bias is None else (q, k, v, bias)
        out, vjp = jax.vjp(lambda q, k, v, bias=None: call(q, k, v, mask, bias), *trained)
        return out, vjp(dout)

    return jax.jit(both)


# --- the command -----------------------------------------------------------------------------------------------------


def run(options):
    """Times in milliseconds by implementation and pass, with what the call is and costs."""
    problem = Problem.of(options)
    (q, k, v, mask, bias), _ = _operands(problem, jax.random.key(options.seed))
    cost = jax_dma.cost(q, k, v, mask, bias, is_causal=problem.causal)
    explanation = jax_dma.explain(q, k, v, mask, bias, is_causal=problem.causal)
    del q, k, v, mask, bias
    candidates = _candidates(options, problem)
    rows = []
    for which in PASSES[: 1 if options.forward_only else 2]:
        flops = cost.forward.flops + (0 if which == "forward" else cost.backward.flops)
        rows += _time(options, problem, candidates, which, flops, cost.forward.bytes)
    result = {
        "call": dataclasses.asdict(problem),
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "jax_dma": jax_dma.__version__},
        "explanation": explanation.line,
        "cost": dataclasses.asdict(cost),
        "cost_text": str(cost),
        "rows": rows,
        "passed": not any(row["failed"] for row in rows) and any(row["ms"] for row in rows),
    }
    result["plot"] = _plot(result, options.plot) if options.plot else None
    return result


def _time(options, problem, candidates, which, flops, size):
    """Rows of one pass."""
    rows, ready = {}, {}
    in_turn = timing.default_timer() == "wall"
    for i, (name, entry) in enumerate(candidates.items()):
        why = entry if isinstance(entry, str) else None
        rows[name] = {"implementation": name, "pass": which, "ms": None, "note": why or "", "failed": False}
        if why is not None:
            continue
        output.progress(f"{which}, {i + 1} of {len(candidates)}: {name}")
        call, prepare = entry
        try:
            function, inputs = _timed(call, which), _inputs(options, problem, prepare, size)
            if in_turn:
                timing.warm_up(function, inputs)
                ready[name] = function, inputs
            else:
                _record(rows[name], timing.measure(function, inputs, "profile", options.repetitions), flops)
        except Exception as error:  # one that fails does not end the run
            rows[name]["note"] = output.one_line(error)
            rows[name]["failed"] = name not in _PEERS and "cannot serve this call" not in str(error)
    if ready:
        output.progress(f"{which}: {', '.join(ready)} in turn")
        for name, result in timing.measure_in_turn(ready, options.repetitions).items():
            _record(rows[name], result, flops)
    output.progress()
    return list(rows.values())


def _inputs(options, problem, prepare, size):
    """Operands in the form that a function takes: several, where the device's cache would hold one."""
    count = 1 if jax.default_backend() == "cpu" else min(8, max(1, math.ceil(_CACHE_BYTES / size)))
    prepare = jax.jit(prepare)
    draws = (_operands(problem, jax.random.key(options.seed + i)) for i in range(count))
    return [(prepare(*operands), dout) for operands, dout in draws]


def _record(row, result, flops):
    row.update(ms=result.ms, low_ms=result.low_ms, high_ms=result.high_ms, calls=result.calls, method=result.method)
    row["tflops"] = flops / result.ms / 1e9


def render(result):
    """The result for people."""
    rows = sorted(result["rows"], key=lambda row: (row["pass"], row["ms"] or math.inf))
    fastest = {row["pass"]: row["ms"] for row in reversed(rows)}
    table = [
        [
            row["implementation"], row["pass"], row["ms"], row["ms"] / fastest[row["pass"]], row["tflops"],
            f"{row['low_ms']:.3f} .. {row['high_ms']:.3f}",
        ]
        for row in rows if row["ms"]
    ]  # fmt: skip
    notes = {(row["implementation"], row["note"]) for row in rows if row["note"]}
    lines = [result["explanation"], result["cost_text"], "", f"on {result['device']}, medians:"]
    lines += output.table(["implementation", "pass", "ms", "x fastest", "TFLOP/s", "min .. max ms"], table)
    lines += [f"not run: {name}: {note}" for name, note in sorted(notes)]
    return "\n".join(lines + ([f"chart: {result['plot']}"] if result["plot"] else []))


def _plot(result, path):
    """Writes a bar chart; None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in result["rows"] if row["ms"]]
    names, passes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("implementation", "pass"))
    figure, axes = pyplot.subplots(figsize=(max(5, 1.4 * len(names)), 4))
    for i, which in enumerate(passes):
        times = {row["implementation"]: row["ms"] for row in rows if row["pass"] == which}
        at = [j + (i - (len(passes) - 1) / 2) * 0.4 for j, name in enumerate(names) if name in times]
        axes.bar_label(axes.bar(at, [times[n] for n in names if n in times], 0.38, label=which), fmt="%.3g", fontsize=8)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("milliseconds")
    if rows:
        axes.set_yscale("log")
        axes.legend(fontsize=8)
    call = result["call"]
    unused = ["window"] * (call["mask"] in WITHOUT_WINDOW) + ["density"] * (call["mask"] != "random")
    text = ", ".join(f"{name} {value}" for name, value in call.items() if name not in unused)
    axes.set_title(f"{textwrap.fill(text, 64)}\non {result['device']}", fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
