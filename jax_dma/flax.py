"""An attention function for Flax modules, and a module of our own.

    import jax_dma.flax
    flax.nnx.MultiHeadAttention(..., attention_fn=jax_dma.flax.attention_fn)
    flax.linen.MultiHeadDotProductAttention(..., attention_fn=jax_dma.flax.attention_fn)
    jax_dma.flax.DynamicMaskAttention(features, num_heads, window, rngs=rngs)

Flax itself is imported only with the module.
"""

import importlib

import jax.numpy as jnp

from jax_dma.dot_product import as_bias, as_mask, attend
from jax_dma.masks import KeyIntervals
from jax_dma.plan import MaskPlan

__all__ = ["attention_fn"]


def __getattr__(name):
    if name in ("DynamicMaskAttention", "DynamicMaskCache", "rotary"):
        return getattr(importlib.import_module("jax_dma.dynamic_mask"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Every parameter that Flax may pass is named: linen drops, without a word, those that the signature does not name.
def attention_fn(
    query,
    key,
    value,
    bias=None,
    mask=None,
    broadcast_dropout=True,
    dropout_rng=None,
    dropout_rate=0.0,
    deterministic=False,
    dtype=None,
    precision=None,
    module=None,
    promote_dtype=None,
    is_causal=False,
    *,
    force_fp32_for_softmax=False,
    einsum_dot_general=None,
    qk_attn_weights_einsum=None,
    attn_weights_value_einsum=None,
    input_positions=None,
    scale=None,
    logits_soft_cap=None,
    implementation=None,
):
    """``attention_fn`` for :class:`flax.nnx.MultiHeadAttention` and :class:`flax.linen.MultiHeadDotProductAttention`.

    Takes what Flax's own ``dot_product_attention`` takes. Set what the modules do not pass with
    :func:`functools.partial`: ``bias``, ``scale``, ``logits_soft_cap``, ``implementation``, and in linen ``is_causal``.

    A query that sees no key gets 0, where Flax gives the mean of all values.

    Args:
      query: ``[*batch, T, N, H]``.
      key: ``[*batch, S, K, H]``; N is a multiple of K.
      value: ``[*batch, S, K, Hv]``.
      bias: broadcastable to ``[*batch, N, T, S]``, with 1, K or N heads; trainable.
      mask: broadcastable to ``[*batch, N, T, S]``: bool, or 0 and 1 in any dtype, with leading axes of size 1 missing
        or in excess. Or a KeyIntervals of :mod:`jax_dma.masks`, in O(S) memory, or a MaskPlan; the modules hand both
        on, except with ``decode=True``.
      broadcast_dropout: not used.
      dropout_rng: not used.
      dropout_rate: must be 0 unless ``deterministic``.
      deterministic: whether dropout is off.
      dtype: of the computation; default, what query, key and value promote to.
      precision: not used. float32 is computed in float32, and 16-bit types are accumulated in float32.
      module: must be None. Flax passes the module to ask for the attention weights to be sown.
      promote_dtype: ``promote_dtype((query, key, value), dtype=dtype)`` in place of the default promotion.
      is_causal: query t sees only keys ``s <= t``, as in Flax. With one query and several keys, as in decoding, it
        hides nothing: there the mask of the cache says what has been written.
      force_fp32_for_softmax: not used, the softmax always is.
      einsum_dot_general: must be None.
      qk_attn_weights_einsum: must be None.
      attn_weights_value_einsum: must be None.
      input_positions: must be None.
      scale: default ``H ** -0.5``.
      logits_soft_cap: as in :func:`jax_dma.attention`.
      implementation: as in :func:`jax_dma.attention`.

    Returns:
      ``[*batch, T, N, Hv]``.

    Raises:
      ValueError: if dropout is active, weights are to be sown, or the products are to be computed by a given einsum.
    """
    if dropout_rate > 0 and not deterministic:
        raise ValueError(
            f"jax_dma has no dropout of weights, and dropout_rate is {dropout_rate} with deterministic=False. "
            "Set dropout_rate=0.0 (dropout of the module's output does no harm), or keep Flax's attention_fn"
        )
    if module is not None:
        raise ValueError(
            "attention weights cannot be sown: jax_dma never holds them. Call the module without sow_weights, or keep "
            "Flax's attention_fn where the weights are inspected"
        )
    for name, given in (
        ("einsum_dot_general", einsum_dot_general),
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        if given is not None:
            raise ValueError(
                f"{name} cannot be honoured: the products are in a kernel. Leave it unset, or keep Flax's attention_fn"
            )
    if input_positions is not None:
        raise ValueError(
            "input_positions are for rotary embeddings, which attention_fn does not apply. Pass as attention_fn "
            "a function that takes input_positions, rotates query and key, and calls jax_dma.flax.attention_fn without."
        )

    query, key, value = (promote_dtype or _promote)((query, key, value), dtype=dtype)
    T, rank = query.shape[-3], query.ndim
    if mask is not None:
        if not isinstance(mask, (KeyIntervals, MaskPlan)):
            mask = jnp.asarray(mask)
            mask = mask if mask.dtype == jnp.bool_ else mask != 0
        mask = as_mask(mask, rank)
    is_causal = bool(is_causal) and not (T == 1 and key.shape[-3] > 1)
    return attend(
        query, key, value, as_bias(bias, rank), mask, None, is_causal,
        scale=scale, logits_soft_cap=logits_soft_cap, implementation=implementation,
    )  # fmt: skip


def _promote(arrays, dtype):
    """To ``dtype``, or to what the arrays promote to, made floating point: Flax's rule."""
    arrays = tuple(jnp.asarray(x) for x in arrays)
    if dtype is None:
        dtype = jnp.result_type(*arrays)
        if not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(jnp.float32, dtype)
    return tuple(x.astype(dtype) for x in arrays)
