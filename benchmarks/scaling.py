"""How forward + backward scale over the GPUs of one host: times on one device, on all, and how much of ideal that is.

    python benchmarks/scaling.py --json results.json
    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu python benchmarks/scaling.py --small

``batch``, ``heads``   workload A, several sequences, with the batch or the heads over the devices: no communication.
``causal``             one long sequence under the causal rule, queries and keys over the devices (context parallelism,
                       in zigzag order), by all-gather and by ring.
``top_k``              the same length with a dynamic mask, and a trainable bias, from one score per key; building the
                       mask is in the time.

The same problem is timed on one device and on all n; efficiency is t(1) / (n t(n)). Results are held against those of
one device. Every row is written to --json as soon as it is there.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import report
import workloads
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jax_dma
from jax_dma import context

TARGETS = {"batch": 0.95, "heads": 0.95, "causal": 0.85, "top_k": 0.75}


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to split a problem: a function of (q, k, v, bias) on the mesh, and how arrays come to it and go."""

    name: str
    attention: Callable
    specs: dict  # of "q" (q, k, v and out) and "bias"
    order: str = "contiguous"


def plain(workload, q, k, v, bias):
    """The workload on one device; a dynamic mask is made from the bias."""
    mask = workloads.dynamic_mask(workload, bias) if workloads.has_dynamic_mask(workload) else None
    return jax_dma.attention(q, k, v, mask, bias, is_causal=workload.causal)


def split_sequence(workload, method, order, q, k, v, bias):
    """The same on each device's part of the sequence, in a shard_map over the axis "x"."""
    options = dict(axis="x", order=order)
    mask = None
    if workloads.has_dynamic_mask(workload):
        mask = context.top_k(bias[:, :, 0], int(workload.mask.size), is_causal=workload.causal, **options)
    return context.attention(q, k, v, mask, bias, method=method, is_causal=workload.causal, **options)


def ways(kind, workload, mesh):
    """How a kind of problem is split."""
    if kind in ("batch", "heads"):
        spec = P("x") if kind == "batch" else P(None, None, "x")
        return [Way(kind, functools.partial(plain, workload), {"q": spec, "bias": P()})]
    # Top-k masks cost every query the same: there is nothing to even out. A ring would visit every tile.
    choices = [("all_gather", "zigzag"), ("ring", "zigzag")] if kind == "causal" else [("all_gather", "contiguous")]
    specs = {"q": P(None, "x"), "bias": P(None, None, None, "x")}
    result = []
    for method, order in choices:
        local = functools.partial(split_sequence, workload, method, order)
        bias = None if workload.bias is None else specs["bias"]
        mapped = jax.shard_map(local, mesh=mesh, in_specs=(*(specs["q"],) * 3, bias), out_specs=specs["q"])
        result.append(Way(f"{kind}, {method}", mapped, specs, order))
    return result


def training(attention):
    """A jitted function of (q, k, v, bias, dout) to out and all gradients."""

    def run(q, k, v, bias, dout):
        function = lambda q, k, v, *bias: attention(q, k, v, *(bias or (None,)))
        out, vjp = jax.vjp(function, q, k, v, *([] if bias is None else [bias]))
        return out, *vjp(dout)

    # Under this scheduler transfers overlap with kernels.
    options = {"xla_gpu_enable_latency_hiding_scheduler": True} if jax.default_backend() == "gpu" else None
    return jax.jit(run, compiler_options=options)


def milliseconds(run, operands, repetitions, seconds):
    """Median host time of a call, of several that are issued back to back; the first call compiles."""
    jax.block_until_ready(run(*operands))
    begin = time.perf_counter()
    jax.block_until_ready(run(*operands))
    once = time.perf_counter() - begin
    calls = int(np.clip(seconds / max(once, 1e-6) / repetitions, 1, 20))
    samples = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        for _ in range(calls):
            results = run(*operands)
        jax.block_until_ready(results)
        samples.append(1e3 * (time.perf_counter() - begin) / calls)
        del results
    return statistics.median(samples), samples


def relative_error(got, want):
    """Of the last arrays, on the device that holds ``want``; in parts, so that no float32 copy of all is needed."""

    @jax.jit
    def squares(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.sum((a - b) ** 2), jnp.sum(b**2)

    rows = max(1, want.shape[1] // 8)
    parts = [squares(got[:, i : i + rows], want[:, i : i + rows]) for i in range(0, want.shape[1], rows)]
    difference, norm = (sum(float(x) for x in column) for column in zip(*parts))
    return (difference / norm) ** 0.5 if norm else difference**0.5


def problems(options, n):
    """(kind, workload) in the order in which they are run."""
    if options.small:
        shape = dict(N=2 * n, K=n, H=16, Hv=16, dtype=options.dtype)
        short, long = (
            dict(name="A_small", T=128, S=128, B=n, **shape),
            dict(name="long_small", T=64 * n, S=64 * n, **shape),
        )
        window = 24
    else:
        short = dict(B=options.batch * n, dtype=options.dtype)
        long = dict(name=f"long_{options.tokens}", T=options.tokens, S=options.tokens, dtype=options.dtype)
        window = 2048
    short, long = (dataclasses.replace(workloads.WORKLOADS["A"], **changes) for changes in (short, long))
    found = {"batch": short, "heads": short, "causal": long}
    found["top_k"] = dataclasses.replace(long, mask=workloads.Mask("top_k", window), bias="key")
    return [(kind, workload) for kind, workload in found.items() if kind in options.only]


def measure(kind, workload, mesh, options, say):
    """The rows of one kind of problem."""
    devices = list(mesh.devices.flat)
    n = len(devices)
    with jax.default_device(devices[0]):
        q, k, v, _, bias = workloads.make(dataclasses.replace(workload, mask=None), jax.random.key(0))
        dout, _ = workloads.cotangents(workload, jax.random.key(1))
        operands = (q, k, v, bias, dout)
        one, want = None, None
        if not options.no_baseline:
            say(f"{kind}: {workload.shape_text()}, on one device")
            run = training(functools.partial(plain, workload))
            one, _ = milliseconds(run, operands, options.repetitions, options.seconds)
            want = run(*operands)
            say(f"{kind}: {one:.3f} ms on one device")
    rows = []
    for way in ways(kind, workload, mesh):
        row = dict(kind=kind, way=way.name, devices=n, workload=workload.name, shape=workload.shape_text(), one_ms=one)
        say(f"{way.name}: on {n} devices")
        try:
            row |= measure_way(way, operands, want, mesh, options)
        except jax.errors.JaxRuntimeError as error:  # out of memory, most likely: the next way may still fit
            row["error"] = str(error).splitlines()[0][:200]
        if row.get("ms") and one:
            row["efficiency"] = one / (n * row["ms"])
            row["target"] = TARGETS[kind]
        say(f"{way.name}: " + (row.get("error") or f"{row['ms']:.3f} ms"))
        rows.append(row)
    return rows


def measure_way(way, operands, want, mesh, options):
    n = mesh.devices.size
    axes = dict(zip("qkv", (1, 1, 1))) | {"bias": -1, "dout": 1}
    moved = []
    for (name, axis), x in zip(axes.items(), operands):
        spec = way.specs["bias" if name == "bias" else "q"]
        move = functools.partial(context.reorder, shards=n, axis=axis, order=way.order)
        place = jax.jit(move, out_shardings=NamedSharding(mesh, spec))
        moved.append(None if x is None else place(jax.device_put(x, NamedSharding(mesh, P()))))
    run = training(way.attention)
    ms, samples = milliseconds(run, moved, options.repetitions, options.seconds)
    row = dict(ms=ms, samples_ms=samples)
    if want is not None:
        got = run(*moved)
        errors = {}
        for name, x, y in zip(("out", "dq", "dk", "dv", "dbias"), got, want):
            back = context.restore(x, n, -1 if name == "dbias" else 1, order=way.order)
            errors[name] = relative_error(jax.device_put(back, y.sharding), y)
        row["largest_error"], row["errors"] = max(errors.values()), errors
    memory = mesh.devices.flat[0].memory_stats() or {}
    row["peak_memory_gib"] = memory["peak_bytes_in_use"] / 2**30 if "peak_bytes_in_use" in memory else None
    return row


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, help="how many (default: all)")
    parser.add_argument("--only", default=",".join(TARGETS), metavar="KINDS", help="default: %(default)s")
    parser.add_argument(
        "--batch", type=int, default=2, help="sequences of workload A per device (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=131072, help="of the long sequence (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    parser.add_argument("--repetitions", type=int, default=3, help="samples of each time (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="to spend on each time (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=170, help="seconds after which nothing is begun any more")
    parser.add_argument("--no-baseline", action="store_true", help="do not run on one device (nor compare with it)")
    parser.add_argument("--small", action="store_true", help="tiny shapes: does it run at all?")
    parser.add_argument("--json", metavar="FILE", help="also write the results, with device, versions and commit")
    parser.add_argument("--commit", help="recorded in the results where git cannot tell")
    options = parser.parse_args(argv)
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(TARGETS):
        parser.error(f"--only takes {', '.join(TARGETS)}, not {', '.join(sorted(unknown))}")
    begin = time.monotonic()
    say = lambda text: print(f"[{time.monotonic() - begin:5.0f} s] {text}", flush=True)

    devices = jax.devices()[: options.devices]
    if len(devices) < 2:
        sys.exit(f"needs two devices or more, and there is {len(devices)}; see --help for a run on virtual ones")
    mesh = jax.make_mesh((len(devices),), ("x",), axis_types=(AxisType.Auto,), devices=devices)
    say(f"{len(devices)} x {devices[0].device_kind}, implementations {', '.join(jax_dma.available_implementations())}")
    rows, left_out = [], []
    for kind, workload in problems(options, len(devices)):
        if time.monotonic() - begin > options.budget:
            left_out.append(kind)
            continue
        rows += measure(kind, workload, mesh, options, say)
        if options.json:
            report.write_json(options.json, rows, options.commit)
    print()
    report.show(rows, [
        ("split", lambda r: r["way"]), ("problem", lambda r: r["shape"]), ("1 device ms", lambda r: r["one_ms"]),
        (f"{len(devices)} devices ms", lambda r: r.get("ms")), ("efficiency", lambda r: r.get("efficiency")),
        ("target", lambda r: r.get("target")), ("largest error", lambda r: r.get("largest_error")),
    ])  # fmt: skip
    for row in rows:
        if "error" in row:
            print(f"{row['way']}: {row['error']}")
    if left_out:
        print("not begun within the budget:", ", ".join(left_out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
