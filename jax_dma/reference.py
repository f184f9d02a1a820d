"""The executable specification of attention: what every implementation must compute, in O(T * S) memory.

Conventions, each stated once:

* ``logits = scale * <q, k>``, then ``cap * tanh(logits / cap)`` under a soft cap, then ``+ bias``.
* A position is hidden if the mask is False there, if ``bias <= -1e30``, or under ``is_causal`` if ``s > t + (S - T)``.
  Whatever bias holds at a hidden position reaches no result and no gradient.
* ``lse`` is the natural log-sum-exp of the visible logits. A row that sees nothing has out 0, lse -inf and zero
  gradients, whatever its cotangents hold.
* Query head n uses key/value head ``n // G``; a mask or bias with K heads is read at ``n // G``.
"""

import jax
import jax.numpy as jnp

from jax_dma.masks import KeyIntervals
from jax_dma.plan import MaskPlan

HIDE_BELOW = -1e30


def compute_dtype(dtype):
    """float64 inputs are computed in float64, all others in float32."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def attention(q, k, v, mask=None, bias=None, *, is_causal=False, scale=None, logits_soft_cap=None):
    """out [*batch, T, N, Hv] and lse [*batch, T, N]; arguments as :func:`jax_dma.attention`."""
    dtype = compute_dtype(q.dtype)
    (T, N, H), (S, K) = q.shape[-3:], k.shape[-3:-1]
    batch_rank = q.ndim - 3
    scale = H**-0.5 if scale is None else scale
    per_query_head = lambda x: jnp.repeat(x, N // K, axis=batch_rank) if x.shape[batch_rank] == K != N else x
    to_heads_first = lambda x: jnp.moveaxis(x.astype(dtype), -2, batch_rank)  # [*batch, heads, length, channels]
    q_, k_, v_ = to_heads_first(q), to_heads_first(k), to_heads_first(v)
    k_, v_ = per_query_head(k_), per_query_head(v_)

    visible = jnp.ones((1,) * (batch_rank + 1) + (T, S), bool)
    if isinstance(mask, MaskPlan):
        mask = mask.dense()
    elif isinstance(mask, KeyIntervals):
        mask = mask.dense(T)
    if mask is not None:
        visible = visible & per_query_head(mask)
    if bias is not None:
        bias = per_query_head(bias.astype(dtype))
        visible = visible & ~(bias <= HIDE_BELOW)
    if is_causal:
        t, s = jnp.arange(T)[:, None], jnp.arange(S)[None, :]
        visible = visible & (s <= t + (S - T)).reshape((1,) * (batch_rank + 1) + (T, S))

    logits = scale * jnp.matmul(q_, jnp.swapaxes(k_, -1, -2), precision=jax.lax.Precision.HIGHEST)
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    if bias is not None:
        logits = logits + jnp.where(visible, bias, 0)  # the select keeps hidden values out of the gradient too

    # lse = m + log(sum(exp(logits - m))) for any m; a constant m keeps it out of the derivative.
    m = jnp.max(logits, axis=-1, keepdims=True, where=visible, initial=-jnp.inf)
    sees_something = m > -jnp.inf
    m = jax.lax.stop_gradient(jnp.where(sees_something, m, 0))
    weights = jnp.exp(jnp.where(visible, logits - m, -jnp.inf))
    total = jnp.where(sees_something, weights.sum(-1, keepdims=True), 1)
    lse = jnp.where(sees_something, m + jnp.log(total), -jnp.inf)
    out = jnp.matmul(weights / total, v_, precision=jax.lax.Precision.HIGHEST)
    out = jnp.where(sees_something, out, 0)
    return jnp.moveaxis(out, batch_rank, -2).astype(q.dtype), jnp.moveaxis(lse[..., 0], batch_rank, -1)
