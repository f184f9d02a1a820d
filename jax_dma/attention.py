"""The public function: check, bring to one form, choose, run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jax_dma import checks, choice, kept_keys, mesh, op, reference
from jax_dma.implementations import xla
from jax_dma.masks import KeyIntervals
from jax_dma.plan import MaskPlan, plan_for
from jax_dma.tiles import Visibility, interval_bounds


def attention(
    q,
    k,
    v,
    mask=None,
    bias=None,
    *,
    sinks=None,
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
      bias: bfloat16, float16, float32 or float64 (not necessarily q's dtype), ``[B|1, N|K|1, T|1, S|1]``, added to
        the logits. Its gradient has its shape and dtype and is summed in float32 over every broadcast axis; it is not
        computed when bias is not being differentiated.
      sinks: bfloat16, float16, float32 or float64 ``[N]``, a trainable logit for each query head that stands in every
        row beside those of the keys and has no value: ``lse = log(sum(exp(logits)) + exp(sinks))``, so the weights
        ``exp(logits - lse)`` sum to less than 1. lse includes it. A query that sees no key gets out 0 and lse = sinks.
        -inf is the same as no sink.
      is_causal: also hide the keys after each query.
      scale: a Python float; default ``H ** -0.5``. A learned factor belongs in q.
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
    call, mask = check(
        q, k, v, mask, bias, sinks=sinks, is_causal=is_causal, scale=scale, logits_soft_cap=logits_soft_cap,
        return_lse=return_lse, deterministic=deterministic,
    )  # fmt: skip
    names = choice.names_of(implementation)
    call = dataclasses.replace(call, implementations=choice.serving(names, call, q, k, v, bias))
    path = choice.path_of(mask, q, k, bias, is_causal)
    choice.log(names, call, mask, q, k, v, bias)

    with jax.named_scope("jax_dma.attention"):
        if call.implementations[0] == "reference":
            out, lse = reference.attention(
                q, k, v, mask, bias, is_causal=is_causal, scale=call.scale, logits_soft_cap=call.softcap or None
            )
        else:
            bias, bias_dtype = mesh.widen_if_summed(bias, (q, k, v, mask))
            call = dataclasses.replace(call, bias_dtype=bias_dtype)
            if path.kind == "kept keys":
                start, end = same_shape(mask.start, mask.end)
                q, k, v, start, end, bias = mesh.align_varying((q, k, v, start, end, bias))
                out, lse = kept_keys.attention(
                    functools.partial(_attend, dataclasses.replace(call, causal=False, unwritten=True)),
                    *(q, k, v, start, end, bias),
                    R=path.run_length,
                    live=mask.live,
                    causal=is_causal,
                    differentiable_in_every_mode=call.implementations[0] == "xla",
                )
            else:
                visibility = _visibility(mask, q, k, is_causal)
                q, k, v, visibility, bias = mesh.align_varying((q, k, v, visibility, bias))
                out, lse = _attend(call, q, k, v, visibility, bias)
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def check(
    q, k, v, mask, bias, *, sinks, is_causal, scale, logits_soft_cap, return_lse=False, deterministic
):  # fmt: skip
    """The arguments of :func:`attention`, checked: an op.Call that names no implementation, and the mask."""
    checks.check_arrays(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else checks.check_scalar("scale", scale)
    softcap = 0.0 if logits_soft_cap is None else checks.check_scalar("logits_soft_cap", logits_soft_cap, positive=True)
    for name, value in (("is_causal", is_causal), ("return_lse", return_lse), ("deterministic", deterministic)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    if bias is not None:
        checks.check_bias(bias, q.shape, k.shape)
    if sinks is not None:
        checks.check_sinks(sinks, q.shape)
    return op.Call(scale, softcap, is_causal, deterministic, ()), _check_mask(mask, q, k)


def add_sinks(out, lse, sinks):
    """out and lse of a softmax that has one more logit in every row, ``sinks`` [N], and nothing to add for it."""
    sinks = sinks.astype(lse.dtype)
    sees_something = lse > -jnp.inf  # selects, so that no cotangent of the other rows reaches sinks through out
    finite = jnp.where(sees_something, lse, 0)
    share = jnp.where(sees_something, jax.nn.sigmoid(finite - sinks), 0)
    out = (out.astype(lse.dtype) * share[..., None]).astype(out.dtype)
    return out, jnp.where(sees_something, jnp.logaddexp(finite, sinks), sinks)


def _attend(call, q, k, v, visibility, bias):
    if call.implementations[0] == "xla":  # plain JAX, differentiable in every mode
        settings = dict(causal=call.causal, scale=call.scale, softcap=call.softcap)
        out, lse = xla.attention(q, k, v, visibility, bias, **settings)
    else:
        out, lse = op.attend(call, q, k, v, visibility, bias)
    return out, lse[..., 0]


def _interval_visibility(start, end, q, k):
    return Visibility(start=start, end=end, bounds=interval_bounds(start, end, q.shape[-2], k.shape[-2]))


def _check_mask(mask, q, k):
    if mask is None:
        return None
    if isinstance(mask, MaskPlan):
        checks.check_plan(mask, q.shape, k.shape)
        return mask
    if isinstance(mask, KeyIntervals):
        start, end = (with_rank(x, q.ndim - 1) for x in (mask.start, mask.end))
        mask = dataclasses.replace(mask, start=start, end=end)
        checks.check_intervals(mask.start, mask.end, mask.live, q.shape, k.shape)
        return mask
    checks.check_dense_mask(mask, q.shape, k.shape)
    return mask


def with_rank(x, rank):
    """Adds or drops leading axes of size 1: builders cannot know how many batch axes q has."""
    while x.ndim > rank and x.shape[0] == 1:
        x = x[0]
    if 1 < x.ndim < rank and x.shape[-2] > 1:  # what is meant as [B, S] would be taken as [K, S]
        raise ValueError(
            f"the intervals of mask have shape {x.shape}, [*batch, heads, S], with fewer batch axes than q. Give top_k "
            "scores of shape [*batch, K, S], with 1 for a batch axis along which they are the same: scores[None]"
        )
    return x.reshape((1,) * (rank - x.ndim) + x.shape) if x.ndim < rank else x


def _visibility(mask, q, k, causal):
    """What kernels read, from any kind of mask."""
    if mask is None:
        return Visibility()
    if isinstance(mask, KeyIntervals):
        return _interval_visibility(*same_shape(mask.start, mask.end), q, k)
    if not isinstance(mask, MaskPlan):
        mask = plan_for(mask, q, k, causal=causal)
    return Visibility(mask.bits, mask.tiles_by_query, mask.tiles_by_key)


def same_shape(start, end):
    shape = jax.numpy.broadcast_shapes(start.shape, end.shape)
    return jax.numpy.broadcast_to(start, shape), jax.numpy.broadcast_to(end, shape)
