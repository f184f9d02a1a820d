"""Dynamic-mask attention as a Flax (nnx) module. Reached as ``jax_dma.flax.DynamicMaskAttention``.

A score for each key and key/value head is read off the values. It does two things: a query sees the ``window``
highest-scored keys of its past, and the score is added to their logits, through which it is trained.

Source: "Trainable Dynamic Mask Sparse Attention" (arXiv:2508.02124) and the Doge models that go with it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jax_dma import masks
from jax_dma.attention import attention
from jax_dma.select import ordered_bits

_SCORES = {"exp": jnp.exp, "linear": lambda x: x}


def rotary(x, positions, *, base=10_000.0):
    """Rotary position embedding that pairs channel i with channel i + H / 2.

    Args:
      x: ``[*batch, T, heads, H]``, H even.
      positions: integers ``[*batch|1, T]`` or ``[T]``.
      base: of the wavelengths.

    Returns:
      x, rotated; computed in float32.
    """
    half = x.shape[-1] // 2
    angle = positions[..., None, None] * base ** -(jnp.arange(half, dtype=jnp.float32) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DynamicMaskCache:
    """What decoding has to remember: the keys that the next query can see.

    A key that has been pushed out never returns, so a slot for each key of the window is enough, however long the
    sequence becomes.

    Attributes:
      key, value: ``[*batch, slots, K, H]``, in no order, each head with keys of its own.
      score: float32 ``[*batch, K, slots]``.
      position: int32 ``[*batch, K, slots]``, where in the sequence each key stands; -1 for an empty slot.
      length: int32, how many tokens have been fed, padding included.
    """

    key: jax.Array
    value: jax.Array
    score: jax.Array
    position: jax.Array
    length: jax.Array


class DynamicMaskAttention(nnx.Module):
    """Causal self-attention with a dynamic mask, in O(T * window)::

        score = exp(A * softplus(W v))       or, with score="linear", A * softplus(W v)
        out   = softmax(scale * <q, k> + score, over the `window` highest-scored keys of the past) v

    ``v`` are the values of all key/value heads, W gives one number for each of these heads, A has one for each.

    Attributes:
      query, key, value, out: projections (:class:`flax.nnx.Linear`).
      score: W, computed in float32, because equal scores are kept by age.
      A: ``[K]``.
      query_norm, key_norm: :class:`flax.nnx.RMSNorm` over head channels, before rotation; None without norm_epsilon.
    """

    def __init__(
        self,
        in_features,
        num_heads,
        window,
        *,
        num_kv_heads=None,
        head_dim=None,
        score="exp",
        recency=None,
        rotary=None,
        norm_epsilon=None,
        use_bias=False,
        kernel_init=nnx.initializers.lecun_normal(),
        a_init=nnx.initializers.zeros_init(),
        dtype=None,
        param_dtype=jnp.float32,
        implementation=None,
        rngs,
    ):
        """
        Args:
          in_features: channels of the input and of the output.
          num_heads: N, query heads.
          window: how many keys each query sees, at least 1.
          num_kv_heads: K, default N; N is a multiple of it.
          head_dim: H, default ``in_features // num_heads``.
          score: "exp" as published, or "linear", which cannot overflow.
          recency: K numbers, for each head by how much a key goes before one that is a token older, in the choice of
            keys alone: neither scores nor logits have it. With a large one a head sees the last ``window`` keys, with 0
            age does not count. None: in no head.
          rotary: a function of (x ``[*batch, T, heads, H]``, positions ``[*batch|1, T]`` or ``[T]``) that is applied to
            queries and keys, for example :func:`jax_dma.flax.rotary`; None for no position embedding.
          norm_epsilon: normalise queries and keys, with this epsilon; None: do not. Doge does.
          use_bias: whether the projections have a bias.
          kernel_init: of the projections.
          a_init: of A. As published 0: then all scores are equal, and until A has moved the oldest keys are kept.
          dtype: of the computation; default, what input and parameters promote to.
          param_dtype: of the parameters.
          implementation: as for :func:`jax_dma.attention`.
          rngs: :class:`flax.nnx.Rngs`.
        """
        if score not in _SCORES:
            raise ValueError(f"score must be one of {tuple(_SCORES)}, got {score!r}")
        if head_dim is None and in_features % num_heads:
            raise ValueError(f"{num_heads} heads do not divide {in_features} channels: name head_dim")
        N, K = num_heads, num_heads if num_kv_heads is None else num_kv_heads
        if K < 1 or N % K:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {N} and {K}")
        if rotary is not None and not callable(rotary):
            raise TypeError(f"rotary must be a function, such as jax_dma.flax.rotary, got {rotary!r}")
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        if recency is not None and len(recency) != K:
            raise ValueError(f"recency must be a number for each of the {K} key/value heads, got {recency!r}")
        H = in_features // N if head_dim is None else head_dim
        self.recency = None if recency is None else tuple(map(float, recency))
        self.in_features, self.num_heads, self.num_kv_heads, self.head_dim, self.window = in_features, N, K, H, window
        self.score_function, self.rotary, self.implementation, self.dtype = score, rotary, implementation, dtype
        linear = functools.partial(
            nnx.Linear, use_bias=use_bias, kernel_init=kernel_init, param_dtype=param_dtype, rngs=rngs
        )
        self.query, self.out = linear(in_features, N * H, dtype=dtype), linear(N * H, in_features, dtype=dtype)
        self.key, self.value = (linear(in_features, K * H, dtype=dtype) for _ in range(2))
        self.score = linear(K * H, K, dtype=jnp.float32)
        self.A = nnx.Param(a_init(rngs.params(), (K,), param_dtype))
        norm = lambda: nnx.RMSNorm(H, epsilon=norm_epsilon, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.query_norm, self.key_norm = (None, None) if norm_epsilon is None else (norm(), norm())

    def __call__(self, x, *, valid=None, segment_ids=None, positions=None, cache=None):
        """
        Args:
          x: ``[*batch, T, in_features]``.
          valid: bool ``[*batch, T]``; False is padding, which nobody sees and which takes no place in a window.
          segment_ids: integers ``[*batch, T]``, packed sequences, as for :func:`jax_dma.masks.top_k`.
          positions: integers ``[*batch|1, T]`` or ``[T]`` for ``rotary``; default, counted from the first token.
          cache: a :class:`DynamicMaskCache` of the tokens before x, for decoding; any T.

        Returns:
          ``[*batch, T, in_features]``; with a cache the pair of that and the cache with x in it.
        """
        if x.ndim < 2 or x.shape[-1] != self.in_features:
            raise ValueError(f"x must have shape [*batch, T, in_features = {self.in_features}], got {x.shape}")
        T = x.shape[-2]
        if positions is None:
            positions = jnp.arange(T, dtype=jnp.int32) + (0 if cache is None else cache.length)
        heads = lambda y, n: y.reshape(*y.shape[:-1], n, self.head_dim)
        q, k = heads(self.query(x), self.num_heads), heads(self.key(x), self.num_kv_heads)
        v = heads(self.value(x), self.num_kv_heads)
        if self.query_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        score = self.scores(v)

        attend = functools.partial(attention, implementation=self.implementation)
        if cache is None:
            if self.window >= T and valid is None and segment_ids is None:
                out = attend(q, k, v, None, score[..., None, :], is_causal=True)
            else:
                kept = masks.top_k(self._ranks(score, jnp.arange(T)), self.window, valid=valid, segment_ids=segment_ids)
                out = attend(q, k, v, kept, score[..., None, :])
        elif segment_ids is not None:
            raise ValueError(
                "segment_ids cannot be combined with a cache: decode each sequence as an entry of the batch"
            )
        elif T == 1:
            cache = _insert(cache, k, v, score, valid, self._ranks)
            filled = (cache.position >= 0).astype(jnp.int32)
            seen = masks.KeyIntervals(jnp.zeros_like(filled), filled)
            k, v = cache.key.astype(q.dtype), cache.value.astype(q.dtype)
            out = attend(q, k, v, seen, cache.score[..., None, :])
        else:
            k, v, score, position, valid = _append(cache, k, v, score, valid)
            slots = cache.position.shape[-1]
            ranks = self._ranks(score, position)
            out = attend(q, k, v, masks.top_k(ranks, slots, T, valid=valid), score[..., None, :])
            cache = _keep(k, v, score, ranks, position, valid, cache)
        out = self.out(out.reshape(*out.shape[:-2], -1))
        return out if cache is None else (out, cache)

    def scores(self, v):
        """float32 ``[*batch, K, T]`` for values ``[*batch, T, K, H]``."""
        steps = nnx.softplus(self.score(v.reshape(*v.shape[:-2], -1)))
        return jnp.swapaxes(_SCORES[self.score_function](self.A[...].astype(jnp.float32) * steps), -1, -2)

    def _ranks(self, score, position):
        """What keys are chosen by. Each position counts from the first token, so that no rank changes with time."""
        return score if self.recency is None else score + jnp.array(self.recency, jnp.float32)[:, None] * position

    def empty_cache(self, *batch, max_length=None, dtype=None):
        """A :class:`DynamicMaskCache` without any token.

        Args:
          *batch: the batch axes.
          max_length: how long sequences will become; below ``window`` it saves slots. Past it the cache goes on as with
            a window of this size.
          dtype: of the keys and values, default that of the computation, or else of the parameters.
        """
        slots = self.window if max_length is None else min(self.window, max_length)
        dtype = dtype or self.dtype or self.key.kernel.dtype
        # One array for each: they may be donated.
        array = lambda: jnp.zeros((*batch, slots, self.num_kv_heads, self.head_dim), dtype)
        score = jnp.zeros((*batch, self.num_kv_heads, slots), jnp.float32)
        return DynamicMaskCache(array(), array(), score, jnp.full(score.shape, -1, jnp.int32), jnp.int32(0))


def _insert(cache, key, value, score, valid, ranks):
    """The cache with one more token, if the keys that it competes with let it in."""
    order = jnp.where(cache.position >= 0, ordered_bits(ranks(cache.score, cache.position))[0], 0)
    lowest = order.min(-1, keepdims=True)
    # Of the lowest-ranked keys the latest leaves, as ties are kept by age.
    slot = jnp.argmax(jnp.where(order == lowest, cache.position, -2), -1)
    enters = ordered_bits(ranks(score, cache.length))[0] > lowest
    if valid is not None:
        enters = enters & valid[..., None, :]
    slot = jnp.where(enters[..., 0], slot, order.shape[-1])  # past the end: not written

    put = lambda x, slot, new: x.at[slot].set(new, mode="drop")
    for _ in range(slot.ndim):
        put = jax.vmap(put)

    rows = lambda x: jnp.swapaxes(x, -3, -2)
    key, value = (
        rows(put(rows(x), slot, rows(new)[..., 0, :].astype(x.dtype)))
        for x, new in ((cache.key, key), (cache.value, value))
    )
    score = put(cache.score, slot, score[..., 0])
    position = put(cache.position, slot, jnp.broadcast_to(cache.length, slot.shape))
    return DynamicMaskCache(key, value, score, position, cache.length + 1)


def _append(cache, key, value, score, valid):
    """(key, value, score, position, valid) of the cached tokens in the order of the sequence, then the new ones."""
    order = jnp.argsort(cache.position, axis=-1)  # empty slots come first
    take = lambda x: jnp.take_along_axis(x, jnp.swapaxes(order, -1, -2)[..., None], axis=-3)
    key = jnp.concatenate([take(cache.key).astype(key.dtype), key], -3)
    value = jnp.concatenate([take(cache.value).astype(value.dtype), value], -3)
    old, position = (jnp.take_along_axis(x, order, axis=-1) for x in (cache.score, cache.position))
    new = cache.length + jnp.arange(score.shape[-1], dtype=jnp.int32)
    filled = position[..., 0, :] >= 0  # as many in every head
    valid = jnp.ones((*filled.shape[:-1], *new.shape), bool) if valid is None else valid
    position = jnp.concatenate([position, jnp.broadcast_to(new, (*position.shape[:-1], *new.shape))], -1)
    return key, value, jnp.concatenate([old, score], -1), position, jnp.concatenate([filled, valid], -1)


def _keep(key, value, score, ranks, position, valid, cache):
    """The cache of those tokens that are kept."""
    slots = cache.position.shape[-1]
    order = jnp.where(valid[..., None, :], ordered_bits(ranks)[0], 0)
    order, chosen = jax.lax.top_k(order, slots)  # ties: the lower index
    take = lambda x: jnp.take_along_axis(x, jnp.swapaxes(chosen, -1, -2)[..., None], axis=-3)
    score, position = (jnp.take_along_axis(x, chosen, axis=-1) for x in (score, position))
    position = jnp.where(order > 0, position, -1)
    key, value = take(key).astype(cache.key.dtype), take(value).astype(cache.value.dtype)
    return DynamicMaskCache(key, value, score, position, cache.length + valid.shape[-1] - slots)
