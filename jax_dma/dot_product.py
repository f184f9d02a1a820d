"""The function of :func:`jax.nn.dot_product_attention`, on the kernels of this package."""

import operator

import jax
import jax.numpy as jnp

from jax_dma.attention import attention
from jax_dma.masks import KeyIntervals
from jax_dma.plan import MaskPlan


def dot_product_attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    implementation=None,
    return_residual=False,
):
    """Drop-in for :func:`jax.nn.dot_product_attention`: the same arguments, in the same order, with the same meaning.

    In particular ``bias`` stands before ``mask``, and causal masks and windows are aligned to the *first* key: query t
    stands at key position t, also with T != S. :func:`jax_dma.attention` aligns them to the last.

    Causal masks, windows, lengths and masks of shape ``[.., 1, S]`` become :class:`~jax_dma.KeyIntervals` and take O(S)
    memory. Only beside a dense mask that differs from query to query are they made dense, to be combined with it.

    What differs from jax: a query that sees no key gets out 0, residual -inf and zero gradients (jax: the mean of all
    values, about -0.7 of float32's largest number, and the gradients of that mean). A bias at or below -1e30 hides its
    position.

    Args:
      query: ``[B, T, N, H]`` or ``[T, N, H]``.
      key: ``[B, S, K, H]`` or ``[S, K, H]``; N is a multiple of K.
      value: ``[B, S, K, Hv]`` or ``[S, K, Hv]``. jax takes only Hv = H.
      bias: broadcastable to ``[B, N, T, S]``, added to the logits; missing leading axes are added. Also K heads.
      mask: bool, broadcastable in the same way; True: the key is seen. Or a KeyIntervals, or a MaskPlan.
      scale: default ``H ** -0.5``. A traced scalar is taken too, and multiplied into the query in its dtype.
      is_causal: query t sees only keys ``s <= t``.
      query_seq_lengths: integers ``[B]``. The output past them is 0.
      key_value_seq_lengths: integers ``[B]``. Keys past them are not seen.
      local_window_size: ``(left, right)`` or one integer for both: query t sees keys ``t - left`` to ``t + right``.
      implementation: None, or a name (or names) that :func:`jax_dma.attention` takes: "xla" is the chunked one. jax's
        "cudnn" is read as "cuda", the compiled kernels.
      return_residual: also return the log-sum-exp, ``[B, T, N]`` or ``[T, N]``, without gradient and in key's dtype, as
        jax does. ``jax_dma.attention(..., return_lse=True)`` gives it in float32 and differentiable.

    Returns:
      The output, of query's shape (its last axis Hv), or (output, residual).
    """
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    shape = (*query.shape[:-1], *value.shape[-1:])
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim not in (3, 4):
            raise ValueError(
                f"{name} must have 3 or 4 axes, got shape {x.shape}; jax_dma.attention takes any number of batch axes"
            )
    q, k, v = (x[None] if x.ndim == 3 else x for x in (query, key, value))
    (B, T, _, _), S = q.shape, k.shape[1]

    traced = isinstance(scale, jax.core.Tracer)
    if traced:
        if scale.shape != ():
            raise ValueError(f"scale must be a scalar, got shape {scale.shape}")
        q, scale = (q * scale.astype(jnp.promote_types(q.dtype, jnp.float32))).astype(q.dtype), 1.0

    intervals = None
    if local_window_size is not None:
        intervals = _window(local_window_size, T, S)
    if query_seq_lengths is not None or key_value_seq_lengths is not None:
        padding = _padding(query_seq_lengths, key_value_seq_lengths, B, T, S)
        intervals = padding if intervals is None else intervals & padding
    out, lse = attend(
        q, k, v, as_bias(bias, 4), mask if mask is None else as_mask(mask, 4), intervals, bool(is_causal),
        scale=scale, implementation="cuda" if implementation == "cudnn" else implementation, return_lse=True,
    )  # fmt: skip
    out = out.reshape(shape)
    return (out, jax.lax.stop_gradient(lse.astype(key.dtype)).reshape(shape[:-1])) if return_residual else out


def attend(q, k, v, bias, mask, intervals, is_causal, **options):
    """:func:`jax_dma.attention` with masks aligned to the first key.

    ``intervals`` is a KeyIntervals or None, beside ``mask``, which is None, a KeyIntervals, a MaskPlan, or bool with as
    many axes as q. Only a dense mask with a T axis is combined with intervals as a dense mask.
    """
    T, S = q.shape[-3], k.shape[-3]
    if is_causal and T != S:
        start = jnp.minimum(jnp.arange(S, dtype=jnp.int32), T).reshape((1,) * (q.ndim - 2) + (S,))
        causal = KeyIntervals(start, jnp.full_like(start, T))
        intervals = causal if intervals is None else intervals & causal
        is_causal = False
    dense = mask is not None and not isinstance(mask, (KeyIntervals, MaskPlan))
    if dense and mask.shape[-2] == 1 and mask.shape[-1] in (1, S):  # the same for every query
        seen = jnp.broadcast_to(mask[..., 0, :], (*mask.shape[:-2], S))
        end = jnp.where(seen, jnp.int32(T), jnp.int32(0))
        mask = KeyIntervals(jnp.zeros_like(end), end)
    if intervals is None:
        intervals = mask
    elif isinstance(mask, KeyIntervals):
        intervals = mask & intervals
    elif isinstance(mask, MaskPlan):
        raise ValueError(
            "a MaskPlan cannot be combined with lengths, a window, or is_causal with T != S: plan the mask that holds "
            "them all"
        )
    elif mask is not None:
        intervals = mask & intervals.dense(T)
    return attention(q, k, v, intervals, bias, is_causal=is_causal, **options)


def as_mask(mask, rank):
    """A dense mask with ``rank`` axes: leading axes of size 1 are added, or dropped. KeyIntervals and plans stay."""
    if isinstance(mask, (KeyIntervals, MaskPlan)):
        return mask
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise TypeError(
            f"mask must be bool, got {mask.dtype}. For a 0/1 mask pass `mask != 0`; "
            "an additive mask (0 and large negative numbers) is a `bias`."
        )
    return _with_rank("mask", mask, rank)


def as_bias(bias, rank):
    """A bias with ``rank`` axes, in a floating-point dtype that attention takes."""
    if bias is None:
        return None
    bias = jnp.asarray(bias)
    wide_enough = jnp.issubdtype(bias.dtype, jnp.floating) and jnp.finfo(bias.dtype).bits >= 16
    if bias.dtype != jnp.bool_ and not wide_enough:  # bool: attention says what is wrong with it
        bias = bias.astype(jnp.float32)
    return _with_rank("bias", bias, rank)


def _with_rank(name, x, rank):
    extra = x.ndim - rank
    if extra <= 0:
        return x.reshape((1,) * -extra + x.shape)
    if any(n != 1 for n in x.shape[:extra]):
        raise ValueError(f"{name} must broadcast to {rank} axes [*batch, N, T, S], got shape {x.shape}")
    return x.reshape(x.shape[extra:])


def _window(size, T, S):
    """Query t sees keys t - left to t + right."""
    try:
        left, right = (size, size) if hasattr(size, "__index__") else size
        left, right = operator.index(left), operator.index(right)
    except (TypeError, ValueError):
        raise TypeError(f"local_window_size must be an integer or a pair (left, right) of them, got {size!r}") from None
    bound = lambda n: max(-(S + T), min(n, S + T))  # past that nothing changes, and int32 could overflow
    own = jnp.arange(S, dtype=jnp.int32)
    start, end = jnp.clip(own - bound(right), 0, T), jnp.clip(own + bound(left) + 1, 0, T)
    return KeyIntervals(start[None, None], end[None, None], live=max(0, left + right + 1))


def _padding(query_lengths, key_lengths, B, T, S):
    """Queries and keys past their lengths see nothing and are not seen."""

    def lengths(name, x):
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name} must be integers, got dtype {x.dtype}")
        if x.shape != (B,):
            raise ValueError(f"{name} must have shape [B] = {(B,)}, got {x.shape}")
        return x.astype(jnp.int32)[:, None, None]

    end = jnp.full((1, 1, S), T, jnp.int32)
    if query_lengths is not None:
        end = jnp.broadcast_to(jnp.clip(lengths("query_seq_lengths", query_lengths), 0, T), (B, 1, S))
    if key_lengths is not None:
        s = jnp.arange(S, dtype=jnp.int32)
        end = jnp.where(s < lengths("key_value_seq_lengths", key_lengths), end, 0)
    return KeyIntervals(jnp.zeros_like(end), end)
