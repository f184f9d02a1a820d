"""The public function: check, bring to one form, choose, run."""

import jax

from jax_dma import checks, mesh, op, reference
from jax_dma.implementations import ffi, xla
from jax_dma.masks import KeyIntervals
from jax_dma.plan import MaskPlan, plan
from jax_dma.tiles import Visibility, interval_bounds

IMPLEMENTATIONS = ("cuda", "cpu", "pallas", "xla", "reference")
_DEFAULT = ("cuda", "cpu", "xla")  # the first that serves the platform being lowered for


def attention(
    q,
    k,
    v,
    mask=None,
    bias=None,
    *,
    is_causal=False,
    scale=None,
    logits_soft_cap=None,
    return_lse=False,
    deterministic=False,
    implementation=None,
):
    """Softmax attention with a mask, a trainable bias and grouped heads, that skips what the mask hides.

    Letters: B batch, T query length, S key length, N query heads, K key/value heads (N a multiple of K), G = N // K,
    H head dimension of q and k, Hv of v::

        logits = scale * <q, k>                        accumulated in float32
        logits = cap * tanh(logits / cap)              with logits_soft_cap
        logits = logits + bias
        logits = -inf where hidden
        lse    = logsumexp(logits);  out = exp(logits - lse) @ v

    A position is hidden where ``mask`` is False, where ``bias <= -1e30`` (so -inf and the finfo.min of bfloat16 and
    float32 hide), and under ``is_causal`` where ``s > t + (S - T)``: the last query sees every key. What bias holds at
    a hidden position reaches no result and no gradient. A query that sees no key gets out 0, lse -inf and zero
    gradients.

    Any number of leading batch axes may stand in the place of B (also none). Memory is O(T + S) beside the arrays given
    and returned, forward and backward.

    Args:
      q: ``[B, T, N, H]``, bfloat16, float16, float32 or float64.
      k: ``[B, S, K, H]``, q's dtype. Query head n uses key/value head ``n // G``.
      v: ``[B, S, K, Hv]``, q's dtype.
      mask: which keys each query sees: bool ``[B|1, N|K|1, T|1, S|1]``, or a :class:`~jax_dma.KeyIntervals` (see
        :mod:`jax_dma.masks`), or a :class:`~jax_dma.MaskPlan` from :func:`jax_dma.plan`. It has no gradient.
      bias: float ``[B|1, N|K|1, T|1, S|1]``, added to the logits. Its gradient has its shape and dtype and is summed in
        float32 over every broadcast axis; it is not computed when bias is not being differentiated.
      is_causal: also hide the keys after each query.
      scale: a Python float; default ``H ** -0.5``.
      logits_soft_cap: a positive Python float; None for no cap.
      return_lse: also return the log-sum-exp of the logits, which is differentiable.
      deterministic: gradients that are bitwise the same in every run on the same device.
      implementation: "cuda", "cpu", "pallas", "xla" or "reference", or a sequence of them in order of preference. None
        takes the best one for the platform that the program is compiled for. See
        :func:`jax_dma.available_implementations`.

    Returns:
      out ``[B, T, N, Hv]`` in q's dtype; with ``return_lse`` the pair (out, lse), where lse is the natural logarithm,
      float32 ``[B, T, N]`` (float64 for float64 inputs).

    Raises:
      TypeError, ValueError: at trace time, naming the argument, what it was and what it may be. A named implementation
        that cannot serve the call is a ValueError that says why.
    """
    checks.check_arrays(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else checks.check_scalar("scale", scale)
    softcap = 0.0 if logits_soft_cap is None else checks.check_scalar("logits_soft_cap", logits_soft_cap, positive=True)
    for name, value in (("is_causal", is_causal), ("return_lse", return_lse), ("deterministic", deterministic)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    if bias is not None:
        checks.check_bias(bias, q.shape, k.shape)
    mask = _check_mask(mask, q, k)
    call = op.Call(scale, softcap, is_causal, deterministic, ())
    names = _serving(_names(implementation), call, q, k, v, bias)

    with jax.named_scope("jax_dma.attention"):
        if names[0] == "reference":
            out, lse = reference.attention(
                q, k, v, mask, bias, is_causal=is_causal, scale=scale, logits_soft_cap=logits_soft_cap
            )
        else:
            visibility = _visibility(mask, q, k)
            q, k, v, visibility, bias = mesh.align_varying((q, k, v, visibility, bias))
            if names[0] == "xla":
                out, lse = xla.attention(q, k, v, visibility, bias, causal=is_causal, scale=scale, softcap=softcap)
            else:
                call = op.Call(scale, softcap, is_causal, deterministic, names)
                out, lse = op.attend(call, q, k, v, visibility, bias)
    return (out, lse) if return_lse else out


def _check_mask(mask, q, k):
    if mask is None:
        return None
    if isinstance(mask, MaskPlan):
        checks.check_plan(mask, q.shape, k.shape)
        return mask
    if isinstance(mask, KeyIntervals):
        mask = KeyIntervals(_with_rank(mask.start, q.ndim - 1), _with_rank(mask.end, q.ndim - 1), mask.live)
        checks.check_intervals(mask.start, mask.end, mask.live, q.shape, k.shape)
        return mask
    checks.check_dense_mask(mask, q.shape, k.shape)
    return mask


def _with_rank(x, rank):
    """Adds or drops leading axes of size 1: builders cannot know how many batch axes q has."""
    while x.ndim > rank and x.shape[0] == 1:
        x = x[0]
    return x.reshape((1,) * (rank - x.ndim) + x.shape) if x.ndim < rank else x


def _visibility(mask, q, k):
    """What kernels read, from any kind of mask."""
    if mask is None:
        return Visibility()
    if isinstance(mask, KeyIntervals):
        start, end = _same_shape(mask.start, mask.end)
        return Visibility(start=start, end=end, bounds=interval_bounds(start, end, q.shape[-2], k.shape[-2]))
    if not isinstance(mask, MaskPlan):
        mask = plan(mask, q, k)
    return Visibility(mask.bits, mask.tiles_by_query, mask.tiles_by_key)


def _same_shape(start, end):
    shape = jax.numpy.broadcast_shapes(start.shape, end.shape)
    return jax.numpy.broadcast_to(start, shape), jax.numpy.broadcast_to(end, shape)


def _names(implementation):
    if implementation is None:
        return None
    names = tuple(implementation) if isinstance(implementation, (tuple, list)) else (implementation,)
    unknown = [name for name in names if name not in IMPLEMENTATIONS]
    if unknown or not names:
        raise ValueError(f"implementation must be one or several of {IMPLEMENTATIONS}, or None, got {implementation!r}")
    return names


def _serving(names, call, q, k, v, bias):
    """Those of the named implementations that can serve the call; an error that says why if none can."""
    if names is None:
        return _DEFAULT
    serving, reasons = [], []
    for name in names:
        reason = unavailable(name) if name not in ("xla", "reference") else None
        if reason is None and name in ("cpu", "cuda"):
            reason = ffi.unsupported(name, call, q, k, v, bias)
        if reason is None and call.deterministic and name == "pallas":
            reason = "it is not deterministic"
        if reason is not None:
            reasons.append(f"{name}: {reason}")
            continue
        serving.append(name)
        if name in ("xla", "reference"):  # they serve everything: what stands behind them is never reached
            break
    if not serving:
        raise ValueError(
            f"implementation={names[0] if len(names) == 1 else names!r} cannot serve this call. " + "; ".join(reasons)
        )
    if "reference" in serving[1:]:  # below the primitives, `xla` stands in for it: the same function in less memory
        serving[serving.index("reference")] = "xla"
    return tuple(serving)


def unavailable(name):
    """Why an implementation's code is not there at all, or None. Does not look for devices."""
    if name == "pallas":
        return "it is not part of this version"
    return ffi.load(name) if name in ("cpu", "cuda") else None


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
