"""What the entry points share: their command line, and the two kinds of run (performance and accuracy)."""

import argparse
import dataclasses
import gc
import math
import sys

import jax
from tqdm import tqdm

import accuracy
import peers
import report
import workloads
from jax_dma.command import timing
from workloads import FORWARD, TRAINING

_CACHE_BYTES = 120e6  # twice the largest cache in use: smaller problems are timed on several input sets in turn
_MAX_INPUT_SETS = 8


def arguments(description, default_groups, argv=None, extend=lambda parser: None):
    """Parses the command line that all entry points have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--workload", action="append", default=[], metavar="GLOB", help="by name (repeatable)")
    parser.add_argument("--group", action="append", default=[], metavar="NAME", help="by group (repeatable)")
    parser.add_argument(
        "--implementations", default="*", metavar="NAMES",
        help="comma-separated names or globs, for example cuda,jax.nn-*; everything that runs here if left out",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small workloads and few repetitions: does it run at all?")
    parser.add_argument("--json", metavar="FILE", help="also write the results, with device, versions and commit")
    parser.add_argument("--seed", type=int, default=0, help="of the random operands")
    parser.add_argument("--commit", help="recorded in the results where git cannot tell")
    parser.add_argument("--list", action="store_true", help="list the workloads and implementations, and stop")
    extend(parser)
    options = parser.parse_args(argv)
    groups = options.group or ([] if options.workload else ["quick"] if options.quick else list(default_groups))
    try:
        options.workloads = workloads.select(options.workload, groups)
    except ValueError as error:
        parser.error(str(error))
    options.found, options.missing = peers.implementations(options.implementations.split(","))
    if options.list:
        _list(options)
        sys.exit(0)
    if not options.found:
        parser.error(f"no implementation that matches {options.implementations!r} runs here; see --list")
    return options


def add_timing_arguments(parser):
    """The options of the performance entry points."""
    parser.add_argument("--timer", choices=timing.TIMERS, help="default: profile on a GPU, wall on a CPU")
    parser.add_argument("--repetitions", type=int, default=0, help="timed calls; 0 chooses by duration")
    parser.add_argument("--kernels", action="store_true", help="also list the kernels of one call (timer profile)")
    parser.add_argument("--check-timer", action="store_true", help="compare the timer with the host-clock methods")


def _list(options):
    everything = list(workloads.WORKLOADS.values())
    report.show(everything, [
        ("workload", lambda w: w.name), ("groups", lambda w: ",".join(w.groups)), ("shape", lambda w: w.shape_text()),
        ("what it is", lambda w: w.description),
    ])  # fmt: skip
    print("\nimplementations that run here:", ", ".join(i.name for i in options.found))
    for name, reason in options.missing.items():
        print(f"  not {name}: {reason}")


# --- performance -----------------------------------------------------------------------------------------------------


def performance(options, passes):
    """Times every implementation on every workload and pass. Returns rows (dicts), fastest peer and limit filled in."""
    timer = options.timer or timing.default_timer()
    repetitions = options.repetitions or (3 if options.quick else 0)
    found = [i for i in options.found if i.name != "reference" or "reference" in options.implementations.split(",")]
    rows = []
    progress = tqdm(total=len(options.workloads) * len(passes) * len(found), unit="run", disable=None)
    for workload in options.workloads:
        for which in passes:
            fresh = _time_one(workload, which, found, timer, repetitions, options, progress)
            _compare(fresh)
            rows += fresh
    progress.close()
    _fill_in_backward(rows)
    return rows


def _fill_in_backward(rows):
    """Where both passes were timed, the backward pass alone is their difference."""
    forward = {(r["workload"], r["implementation"]): r["ms"] for r in rows if r["pass"] == FORWARD}
    for row in rows:
        before = forward.get((row["workload"], row["implementation"]))
        if row["pass"] == TRAINING and row["ms"] and before:
            row["backward_ms"] = row["ms"] - before


def _time_one(workload, which, found, timer, repetitions, options, progress):
    rows, ready = [], {}
    together = timer == "wall"  # functions take turns, so all are prepared first
    for implementation in found:
        progress.set_description(f"{workload.name} {which} {implementation.name}")
        row = _row(workload, which, implementation)
        rows.append(row)
        row["error"] = implementation.refuses(workload, which)
        if row["error"] is None:
            try:
                function, inputs = _prepared(implementation, workload, which, options.seed)
                if options.check_timer:
                    row["check"] = {t: timing.measure(function, inputs, t, repetitions).ms for t in timing.checkable()}
                if together:
                    timing.warm_up(function, inputs)
                    ready[implementation.name] = (function, inputs)
                else:
                    _record(row, workload, timing.measure(function, inputs, timer, repetitions))
                del function, inputs
            except Exception as error:  # one implementation that fails must not end the run
                row["error"] = peers.one_line(error)
        if not together:
            gc.collect()
            progress.update()
    if together:
        for name, result in timing.measure_in_turn(ready, repetitions).items():
            _record(next(r for r in rows if r["implementation"] == name), workload, result)
        progress.update(len(found))
    return rows


def _prepared(implementation, workload, which, seed):
    """The function to time and its input sets."""
    sets = 1
    if jax.default_backend() != "cpu":
        sets = min(_MAX_INPUT_SETS, max(1, math.ceil(_CACHE_BYTES / max(1, workload.bytes(FORWARD)))))
    prepare = jax.jit(lambda operands: implementation.prepare(workload, operands))
    inputs = []
    for i in range(sets):
        first, second = jax.random.split(jax.random.key(seed + i))
        inputs.append((prepare(workloads.make(workload, first)), workloads.cotangents(workload, second)[0]))
    return peers.timed_function(implementation, workload, which), inputs


def _row(workload, which, implementation):
    return {
        "workload": workload.name,
        "pass": which,
        "implementation": implementation.name,
        "ours": implementation.ours,
        "ms": None,
        "shape": dataclasses.asdict(workload),
        "pairs": workload.pairs(),
        "flops": workload.flops(which),
        "bytes": workload.bytes(which),
        "limit_ms": workload.limit_ms(report.device_name(), which),
    }


def _record(row, workload, result):
    row.update(
        ms=result.ms, low_ms=result.low_ms, high_ms=result.high_ms, calls=result.calls, method=result.method,
        span_ms=result.span_ms, tflops=row["flops"] / result.ms / 1e9, kernels=result.kernels,
    )  # fmt: skip
    if row["limit_ms"]:
        row["of_limit"] = result.ms / row["limit_ms"]


def _compare(rows):
    """Fills in the ratio to the fastest peer of the same workload and pass."""
    timed_peers = [r for r in rows if not r["ours"] and r["ms"]]
    if not timed_peers:
        return
    best = min(timed_peers, key=lambda r: r["ms"])
    for row in rows:
        row["best_peer"] = best["implementation"]
        if row["ms"]:
            row["of_best_peer"] = row["ms"] / best["ms"]


PERFORMANCE_COLUMNS = [
    ("workload", lambda r: r["workload"]),
    ("pass", lambda r: r["pass"]),
    ("implementation", lambda r: r["implementation"]),
    ("ms", lambda r: r["ms"]),
    ("backward alone", lambda r: r.get("backward_ms")),
    ("TFLOP/s", lambda r: r.get("tflops")),
    ("limit ms", lambda r: r["limit_ms"]),
    ("x limit", lambda r: r.get("of_limit")),
    ("x best peer", lambda r: r.get("of_best_peer")),
    ("min .. max ms", lambda r: f"{r['low_ms']:.3f} .. {r['high_ms']:.3f}" if r["ms"] else "-"),
    ("note", lambda r: r.get("error") or (r["method"] if "(" in r.get("method", "") else "")),
]


def show_performance(rows, options):
    """Prints the table, then kernels and timer checks if asked for."""
    without = [] if any(r.get("backward_ms") for r in rows) else ["backward alone"]
    report.show(rows, [column for column in PERFORMANCE_COLUMNS if column[0] not in without])
    _show_missing(options)
    if options.kernels:
        show_kernels(rows)
    if options.check_timer:
        checked = [r for r in rows if "check" in r]
        print("\nmilliseconds by each timer (profile: kernels only; wall includes dispatch and waiting)")
        columns = [(h, lambda r, h=h: r[h]) for h in ("workload", "pass", "implementation")]
        report.show(checked, columns + [(t, lambda r, t=t: r["check"][t]) for t in timing.checkable()])


def _show_missing(options):
    by_reason = {}
    for name, reason in options.missing.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        print(f"not run: {', '.join(names)}: {reason}")


def show_kernels(rows):
    """Prints the kernels of each row's call."""
    for row in rows:
        if not row.get("kernels"):
            continue
        print(f"\n{row['workload']} {row['pass']} {row['implementation']}: {row['ms']:.3f} ms, "
              f"span {row['span_ms'] or float('nan'):.3f} ms")  # fmt: skip
        report.show(row["kernels"], [
            ("us", lambda k: float(k[2])), ("launches", lambda k: float(k[1])), ("kernel", lambda k: k[0][:110]),
        ])  # fmt: skip


def run_performance(description, passes, argv=None):
    """The main function of the performance entry points."""
    group = "cpu" if jax.default_backend() == "cpu" else "gpu"
    options = arguments(description, [group], argv, add_timing_arguments)
    rows = performance(options, passes)
    show_performance(rows, options)
    if options.json:
        report.write_json(options.json, rows, options.commit)
    return 0


# --- accuracy --------------------------------------------------------------------------------------------------------


def run_accuracy(description, compute, *, lse_gradient=False, argv=None):
    """The main function of the equivalence entry points.

    Args:
      description: for --help.
      compute: (implementation, workload, operands, cotangents) -> {result name: array}; called with ``None`` for the
        implementation it must give the float64 truth of the same inputs (see :mod:`accuracy`).
      argv: the command line.

    Returns:
      The exit code: 1 if an implementation of jax_dma misses a tolerance or fails.
    """
    groups = ["equivalence"] if jax.default_backend() == "cpu" else ["equivalence", "equivalence_large"]
    options = arguments(description, groups, argv)
    rows = []
    for workload in tqdm(options.workloads, unit="workload", disable=None):
        rows += accuracy.check(workload, options.found, compute, options.seed, lse_gradient)
    failed = [r for r in rows if r["ours"] and not r["ok"]]
    report.show(rows, accuracy.columns(rows))
    _show_missing(options)
    print(f"{len(failed)} of {sum(r['ours'] for r in rows)} checks of jax_dma failed")
    if options.json:
        report.write_json(options.json, rows, options.commit)
    return 1 if failed else 0
