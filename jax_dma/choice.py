"""Which implementation serves a call, and by which path: what ``attention`` acts on and ``explain`` tells."""

import dataclasses
import functools
import logging
import os

import jax

from jax_dma import kept_keys
from jax_dma.implementations import ffi
from jax_dma.masks import KeyIntervals
from jax_dma.plan import MaskPlan
from jax_dma.tiles import KEY_TILE, queries_per_tile

IMPLEMENTATIONS = ("cuda", "cpu", "pallas", "xla", "reference")
_DEFAULT = ("cuda", "cpu", "pallas", "xla")  # the first that serves the platform being lowered for
logger = logging.getLogger("jax_dma")


@dataclasses.dataclass(frozen=True)
class Path:
    """How the work of a call is laid out.

    Attributes:
      kind: "all" (nothing is masked), "causal", "intervals" (keys in place, tiles skipped by the bounds of intervals),
        "kept keys" (gathered, see :mod:`jax_dma.kept_keys`) or "dense" (tiles skipped by the plan of a dense mask).
      run_length: for "kept keys", how many consecutive queries share a list.
      list_length: for "kept keys", how many keys a list has room for.
    """

    kind: str
    run_length: int | None = None
    list_length: int | None = None


def path_of(mask, q, k, bias, is_causal):
    """The path of a call whose arguments have been checked."""
    if mask is None:
        return Path("causal" if is_causal else "all")
    if not isinstance(mask, KeyIntervals):
        return Path("dense")
    R = kept_keys.serves(mask, q, k, bias)
    return Path("intervals") if R is None else Path("kept keys", R, kept_keys.list_length(k.shape[-3], mask.live, R))


def names_of(implementation):
    """The argument ``implementation`` as a tuple of names, or None."""
    if implementation is None:
        return None
    names = tuple(implementation) if isinstance(implementation, (tuple, list)) else (implementation,)
    unknown = [name for name in names if name not in IMPLEMENTATIONS]
    if unknown or not names:
        raise ValueError(f"implementation must be one or several of {IMPLEMENTATIONS}, or None, got {implementation!r}")
    return names


def serving(names, call, q, k, v, bias):
    """Those of the named implementations that can serve the call; an error that says why if none can."""
    if names is None:
        return _DEFAULT
    found, reasons = [], []
    for name in names:
        reason = refusal(name, call, q, k, v, bias)
        if reason is not None:
            reasons.append(f"{name}: {reason}")
            continue
        found.append(name)
        if name in ("xla", "reference"):  # they serve everything: what stands behind them is never reached
            break
    if not found:
        raise ValueError(
            f"implementation={names[0] if len(names) == 1 else names!r} cannot serve this call. " + "; ".join(reasons)
        )
    if "reference" in found[1:]:  # below the primitives, `xla` stands in for it: the same function in less memory
        found[found.index("reference")] = "xla"
    return tuple(found)


def refusal(name, call, q, k, v, bias):
    """Why an implementation cannot serve a call on any platform, or None."""
    if name in ("xla", "reference"):
        return None
    # The limits of pallas are those of cuda.
    return unavailable(name) or ffi.unsupported("cuda" if name == "pallas" else name, call, q, k, v, bias)


def unavailable(name):
    """Why an implementation's code is not there at all, or None. Does not look for devices."""
    return ffi.load(name) if name in ("cpu", "cuda") else None


def choose(platform, call, operands):
    """The implementation that a call is lowered to on a platform: "cpu", "cuda", "pallas" or "xla"."""
    q, k, v, _, bias, _ = call.unflatten(operands)
    reasons = []
    for name in call.implementations:
        reason = misplaced(name, platform, call.implementations) or refusal(name, call, q, k, v, bias)
        if reason is None:
            return name
        reasons.append(f"{name}: {reason}")
    raise ValueError("no implementation asked for can serve this call of jax_dma.attention. " + "; ".join(reasons))


def misplaced(name, platform, names):
    """Why an implementation, one of several asked for, does not run on the platform that is lowered for, or None."""
    if name in ("xla", "reference"):
        return None
    if name == "pallas":
        if platform == "cuda":
            return None if _has_platform("cuda") else "programs with it are made only where there is a GPU"
        if platform == "cpu" and names and names[0] == "pallas" and os.environ.get("JAX_DMA_PALLAS_INTERPRET") == "1":
            return None  # slow: for tests
        name = "cuda"
    if name == platform:
        return None
    return f"it runs on {name}, and this program is being lowered for {platform or 'another platform'}"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """How a call of :func:`jax_dma.attention` is computed; ``print`` it.

    Attributes:
      call: the operands and options, in words.
      platform: what the answer is for: "cpu", "cuda" or another platform of JAX.
      runs: the name of the implementation that computes the call there; None if none of those asked for can.
      path: how its work is laid out, a :class:`~jax_dma.choice.Path`.
      layout: the same in words.
      refusals: for each implementation, why it does not serve the call on that platform, or None if it does.
      operands: the types of q, k, v and bias as kernels see them; those of gathered keys have one more batch axis.
    """

    call: str
    platform: str
    runs: str | None
    path: Path
    layout: str
    refusals: dict[str, str | None] = dataclasses.field(hash=False)
    operands: tuple = dataclasses.field(repr=False)

    @property
    def line(self):
        """All but the refusals, in one line."""
        return f"{self.call} on {self.platform}: {self.runs or 'nothing that was asked for serves it'}; {self.layout}"

    def __str__(self):
        rows = [f"  {name:<10} {'serves' if why is None else 'no: ' + why}" for name, why in self.refusals.items()]
        return "\n".join([self.line, *rows])


def explanation(platform, names, call, mask, q, k, v, bias):
    """What becomes of a call whose arguments have been checked; names as from :func:`names_of`."""
    path = path_of(mask, q, k, bias, call.causal)
    type_of = lambda x: None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype)
    given = tuple(map(type_of, (q, k, v, bias)))
    seen = _gathered(path, *given) if path.kind == "kept keys" else given
    refusals = {}
    for name in IMPLEMENTATIONS:
        reason = refusal(name, call, *seen)
        if reason is None and name in ("cpu", "cuda") and name != platform:
            reason = f"it runs on {name}, and this is for {platform}"
        if reason is None and name == "pallas":
            reason = misplaced(name, platform, names)
        refusals[name] = reason
    try:
        runs = _runs(platform, serving(names, call, q, k, v, bias), call, *seen)
    except ValueError:
        runs = None
    layout = "every pair of a query and a key at once" if runs == "reference" else _in_words(path, call, mask, q, k)
    return Explanation(_describe(call, mask, q, k, v, bias), platform, runs, path, layout, refusals, seen)


def _runs(platform, names, call, *operands):
    if names[0] in ("xla", "reference"):
        return names[0]
    operands = [x for x in operands if x is not None]
    call = dataclasses.replace(call, implementations=names, has_bias=len(operands) == 4)
    return choose(platform if platform in ("cpu", "cuda") else None, call, operands)


def _gathered(path, q, k, v, bias):
    """The types of what the kernels see of gathered keys."""
    runs, R, length = -(-q.shape[-3] // path.run_length), path.run_length, path.list_length
    of = lambda x, *shape: jax.ShapeDtypeStruct((*x.shape[:-3], *shape, *x.shape[-2:]), x.dtype)
    if bias is not None:
        per_key = (runs, bias.shape[-3], 1, length) if bias.shape[-1] > 1 else (1, *bias.shape[-3:])
        bias = jax.ShapeDtypeStruct((*bias.shape[:-3], *per_key), bias.dtype)
    return of(q, runs, R), of(k, runs, length), of(v, runs, length), bias


def _in_words(path, call, mask, q, k):
    (T, N), (S, K) = q.shape[-3:-1], k.shape[-3:-1]
    tile = f"tiles of {queries_per_tile(N // K)} queries and {KEY_TILE} keys"
    if path.kind == "kept keys":
        runs = -(-T // path.run_length)
        return (
            f"kept keys gathered, {runs} run{'s' * (runs != 1)} of {path.run_length} queries, "
            f"each with a list of {path.list_length} of the {S} keys"
        )
    what = {
        "all": "all keys, nothing to skip",
        "causal": f"causal, {tile}",
        "intervals": f"intervals in place, {tile}",
        "dense": f"dense mask{' planned before' if isinstance(mask, MaskPlan) else ''}, {tile}",
    }[path.kind]
    return what + (" and the causal rule" if call.causal and path.kind in ("intervals", "dense") else "")


def _describe(call, mask, q, k, v, bias):
    array = lambda x: f"{x.dtype}[{','.join(map(str, x.shape))}]"
    parts = [f"{name} {array(x)}" for name, x in (("q", q), ("k", k), ("v", v))]
    if isinstance(mask, KeyIntervals):
        live = "" if mask.live is None else f" live {mask.live}"
        shape = ",".join(map(str, jax.numpy.broadcast_shapes(mask.start.shape, mask.end.shape)))
        parts.append(f"mask KeyIntervals[{shape}]{live}{' scattered' * mask.scattered}")
    elif mask is not None:
        parts.append(f"mask MaskPlan {array(mask.bits)}" if isinstance(mask, MaskPlan) else f"mask {array(mask)}")
    parts += [] if bias is None else [f"bias {array(bias)}"]
    parts += ["causal"] * call.causal + ["deterministic"] * call.deterministic
    return f"attention({', '.join(parts)})"


def default_platform():
    """The platform of the default backend, by the name that XLA lowers for."""
    platform = jax.default_backend()
    return "cuda" if platform == "gpu" and _has_platform("cuda") else platform


def log(names, call, mask, q, k, v, bias):
    """One line at level DEBUG for each new combination of shapes, dtypes and options."""
    if logger.isEnabledFor(logging.DEBUG):
        _log_once(explanation(default_platform(), names, call, mask, q, k, v, bias).line)


@functools.lru_cache(maxsize=4096)
def _log_once(line):
    logger.debug(line)


def _has_platform(platform):
    try:
        return bool(jax.devices(platform))
    except RuntimeError:
        return False


def status():
    """What works here: a dict from each implementation's name to "available", or to why it is not."""
    report = {}
    for name in IMPLEMENTATIONS:
        reason = unavailable(name)
        if name == "pallas" and not _has_platform("cuda"):
            reason = "jax sees no cuda device (JAX_DMA_PALLAS_INTERPRET=1 interprets it on a CPU, slowly, for tests)"
        if reason is None and name in ("cpu", "cuda") and not _has_platform(name):
            reason = f"jax sees no {name} device (is the {name} build of jaxlib installed, and a device visible?)"
        if reason is None and name == "cuda":
            reason = _no_binary_for_device()
        report[name] = "available" if reason is None else reason
    return report


def _no_binary_for_device():
    """Why the kernels built here do not run on the first GPU, or None."""
    from jax_dma import _cuda

    capability = str(jax.devices("cuda")[0].compute_capability)
    number = int(capability.replace(".", ""))
    # Code for x.y runs on x.z with z >= y; architecture-specific code ("90a") on that one only.
    for arch in _cuda.architectures():
        plain = int(arch.rstrip("af"))
        if number == plain or (arch.isdigit() and number // 10 == plain // 10 and number >= plain):
            return None
    return (
        f"its kernels were built for compute capability {', '.join(_cuda.architectures())}, "
        f"and this GPU has {capability}; reinstall with JAX_DMA_CUDA_ARCHS={number}"
    )


def available_implementations():
    """The names of the implementations usable on this machine now, in order of preference."""
    return tuple(name for name, text in status().items() if text == "available")
