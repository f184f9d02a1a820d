"""How long a jitted function takes: device time from a profile, or host-clock methods to check it against.

``profile``  device time: calls are issued back to back under ``jax.profiler``, and the kernels on the GPU's streams are
             summed per call. Dispatch and gaps between kernels do not count; gaps are in ``span_ms``.
``batch``    host clock over n back-to-back calls, slope between two values of n: what a loop on the host sees.
``loop``     host clock over a ``lax.fori_loop`` inside one jitted function, each step depending on the one before,
             slope between two trip counts: no dispatch at all.
``wall``     host clock of single calls that are waited for; several functions take turns, so that a change of the
             machine's speed meets all of them. For CPUs.
"""

import collections
import dataclasses
import glob
import statistics
import tempfile
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

TIMERS = ("profile", "batch", "loop", "wall")
_WARM_UP_SECONDS = 0.2  # long enough for clocks to rise
_PROFILE_SECONDS = 0.15
_MIN_CALLS, _MAX_CALLS = 5, 50


@dataclasses.dataclass(frozen=True)
class Timing:
    """Medians over calls, in milliseconds; ``kernels`` is (name, launches per call, microseconds per call)."""

    ms: float
    low_ms: float
    high_ms: float
    calls: int
    method: str
    span_ms: float | None = None
    kernels: tuple[tuple[str, float, float], ...] = ()

    @classmethod
    def of(cls, samples, method, **rest):
        return cls(statistics.median(samples), min(samples), max(samples), len(samples), method, **rest)


def default_timer():
    """``wall`` on a CPU; ``profile`` on an accelerator, where profiling works."""
    return "wall" if jax.default_backend() == "cpu" else "profile"


def checkable():
    """The timers that mean something on this platform; a profile of a CPU holds no streams."""
    return tuple(t for t in TIMERS if t != "profile" or default_timer() == "profile")


def measure(function, input_sets, timer, repetitions=0):
    """Times ``function(*inputs)``.

    Args:
      function: jitted; everything that it computes must be in what it returns.
      input_sets: a list of argument tuples, used in turn (several, so that no cache holds what a call reads).
      timer: one of TIMERS.
      repetitions: how many samples; 0 chooses by duration.

    Returns:
      A Timing. ``profile`` falls back to ``batch`` where the profiler gives no kernels, and says so in ``method``.
    """
    seconds = warm_up(function, input_sets)
    if timer == "wall":
        return measure_in_turn({"": (function, input_sets)}, repetitions)[""]
    if timer == "loop":
        return _measure_loop(function, input_sets[0], seconds, repetitions)
    if timer == "profile":
        calls = repetitions or int(min(max(_PROFILE_SECONDS / seconds, _MIN_CALLS), _MAX_CALLS))
        events = _profile(function, input_sets, calls)
        if events:
            return _timing_of_events(events, calls)
    timing = _measure_batch(function, input_sets, seconds, repetitions)
    return timing if timer == "batch" else dataclasses.replace(timing, method="batch (no kernels in the profile)")


def warm_up(function, input_sets, seconds=_WARM_UP_SECONDS):
    """Compiles, runs for a while, and returns the host seconds of the fastest call."""
    jax.block_until_ready(function(*input_sets[0]))
    best, begin = float("inf"), time.perf_counter()
    while True:
        for inputs in input_sets:
            start = time.perf_counter()
            jax.block_until_ready(function(*inputs))
            best = min(best, time.perf_counter() - start)
        if time.perf_counter() - begin > seconds:
            return best


def measure_in_turn(functions, repetitions=0, seconds=1.0):
    """Host-clock medians of warmed-up functions that take turns: {name: (function, input_sets)} -> {name: Timing}."""
    samples = {name: [] for name in functions}
    least, most = (repetitions, repetitions) if repetitions else (_MIN_CALLS, _MAX_CALLS)
    end = time.perf_counter() + seconds * len(functions)
    for round_ in range(most):
        if round_ >= least and time.perf_counter() > end:
            break
        for name, (function, input_sets) in functions.items():
            inputs = input_sets[round_ % len(input_sets)]
            start = time.perf_counter()
            jax.block_until_ready(function(*inputs))
            samples[name].append(1e3 * (time.perf_counter() - start))
    return {name: Timing.of(x, "wall") for name, x in samples.items()}


def _issue(function, input_sets, calls):
    """Back-to-back calls; earlier results are dropped as they come, so memory holds a few of them at most."""
    result = None
    for i in range(calls):
        result = function(*input_sets[i % len(input_sets)])
    jax.block_until_ready(result)


def _slope(run, seconds, repetitions, method):
    """Milliseconds per step of ``run(n)``, from the difference between a short and a long run."""
    few = max(2, min(100, int(0.02 / seconds)))
    many = 4 * few
    run(few)
    samples = []
    for _ in range(repetitions or 5):
        times = []
        for n in (few, many):
            start = time.perf_counter()
            run(n)
            times.append(time.perf_counter() - start)
        samples.append(1e3 * (times[1] - times[0]) / (many - few))
    return Timing.of(samples, method)


def _measure_batch(function, input_sets, seconds, repetitions):
    return _slope(lambda n: _issue(function, input_sets, n), seconds, repetitions, "batch")


def _measure_loop(function, inputs, seconds, repetitions):
    leaves, tree = jax.tree.flatten(inputs)
    chained = next(i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating))

    # Each step's results change one element of the next step's input by `epsilon * sum`, with epsilon 0 at run time but
    # unknown to the compiler; the barrier keeps it from computing only the elements that the sum reads.
    @jax.jit
    def run(n, epsilon, leaves):
        def step(_, x):
            results = function(*jax.tree.unflatten(tree, [*leaves[:chained], x, *leaves[chained + 1 :]]))
            results = jax.lax.optimization_barrier(results)
            total = sum(y[(0,) * y.ndim].astype(jnp.float32) for y in jax.tree.leaves(results))
            return x.at[(0,) * x.ndim].add((epsilon * total).astype(x.dtype))

        return jax.lax.fori_loop(0, n, step, leaves[chained])

    epsilon = jnp.float32(0)
    return _slope(lambda n: jax.block_until_ready(run(n, epsilon, leaves)), seconds, repetitions, "loop")


class Event(NamedTuple):
    """One kernel or copy on the device, in nanoseconds."""

    start: float
    duration: float
    name: str


def _profile(function, input_sets, calls):
    """The device's events during back-to-back calls, in order; empty where the profiler does not see the device."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    with tempfile.TemporaryDirectory() as directory:
        try:
            jax.profiler.start_trace(directory, profiler_options=options)
            try:
                _issue(function, input_sets, calls)
            finally:
                jax.profiler.stop_trace()
        except RuntimeError:  # no profiler here, or one is already running
            return []
        files = glob.glob(f"{directory}/**/*.xplane.pb", recursive=True)
        return device_events(jax.profiler.ProfileData.from_file(files[0])) if files else []


def device_events(profile):
    """Events on the streams of the first GPU of a ``jax.profiler.ProfileData``, by start time."""
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        # Streams hold what ran; other lines of the plane repeat it by module and by operation.
        streams = [line for line in plane.lines if line.name.startswith("Stream")]
        events = [Event(e.start_ns, e.duration_ns, e.name) for line in streams for e in line.events]
        return sorted(events)
    return []


def _timing_of_events(events, calls):
    """Per-call device time. Every call launches the same kernels, so the events divide evenly among the calls."""
    kernels = collections.defaultdict(lambda: [0, 0.0])
    for event in events:
        kernels[event.name][0] += 1
        kernels[event.name][1] += event.duration
    table = sorted(((name, n / calls, ns / calls / 1e3) for name, (n, ns) in kernels.items()), key=lambda x: -x[2])
    per_call, rest = divmod(len(events), calls)
    chunks = [events[i * per_call : (i + 1) * per_call] for i in range(calls)] if rest == 0 else []
    if not chunks or any(sorted(e.name for e in c) != sorted(e.name for e in chunks[0]) for c in chunks):
        mean = _busy(events) / calls / 1e6
        return Timing(mean, mean, mean, calls, "profile (mean: calls differ in their kernels)", kernels=tuple(table))
    samples = [_busy(chunk) / 1e6 for chunk in chunks]
    spans = [(max(e.start + e.duration for e in c) - c[0].start) / 1e6 for c in chunks]
    return Timing.of(samples, "profile", span_ms=statistics.median(spans), kernels=tuple(table))


def _busy(events):
    """Nanoseconds during which at least one of the events (sorted by start) ran."""
    total, until = 0.0, float("-inf")
    for start, duration, _ in events:
        end = start + duration
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
