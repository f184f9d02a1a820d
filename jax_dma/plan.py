"""A dense mask, analysed once: packed bits and bitmaps of tiles."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh

from jax_dma import partition
from jax_dma.checks import check_bias, check_dense_mask
from jax_dma.implementations import ffi
from jax_dma.masks import KeyIntervals, top_k_operands
from jax_dma.select import select
from jax_dma.tiles import analyse, tile_maps, unpack_bits


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["bits", "tiles_by_query", "tiles_by_key"],
    meta_fields=["query_length", "key_length", "num_heads", "num_kv_heads"],
)
@dataclasses.dataclass(frozen=True)
class MaskPlan:
    """A dense mask, analysed. Made by :func:`plan`; pass it to :func:`jax_dma.attention` as ``mask``.

    Attributes:
      bits: uint32 ``[*batch|1, N|K|1, T|1, 4 * ceil(S / 128) | 1]``; bit i of word w is key ``32 * w + i``.
      tiles_by_query: uint32 ``[*batch|1, K|1, query_tiles|1, 2, ceil(key_tiles / 32) | 1]``: which tiles have a visible
        position (plane 0), which have no hidden one (plane 1).
      tiles_by_key: the same, by key tile.
      query_length, key_length, num_heads, num_kv_heads: T, S, N and K that it was made for.
    """

    bits: jax.Array
    tiles_by_query: jax.Array
    tiles_by_key: jax.Array
    query_length: int
    key_length: int
    num_heads: int
    num_kv_heads: int

    def dense(self):
        """The mask as a bool array ``[*batch|1, N|K|1, T|1, S|1]``."""
        if self.bits.shape[-1] == 1:
            return (self.bits & 1) != 0
        return unpack_bits(self.bits, self.key_length)


def plan(mask, q, k):
    """Analyses a dense mask once, for use in many calls with the same shapes.

    ``attention`` does this by itself for every dense mask; a model that uses one mask in all its layers saves the work
    by doing it once::

        mask = jax_dma.plan(mask, q, k)
        for layer in layers:
            x = layer(x, mask)   # attention(q, k, v, mask)

    Args:
      mask: bool ``[*batch|1, N|K|1, T|1, S|1]``.
      q: an array ``[*batch, T, N, H]``, or anything with its shape (``jax.ShapeDtypeStruct``).
      k: an array ``[*batch, S, K, H]``, or anything with its shape.

    Returns:
      A :class:`MaskPlan`, to be passed to ``attention`` as ``mask``.
    """
    if isinstance(mask, KeyIntervals):
        raise TypeError("mask is a KeyIntervals, which needs no plan: pass it to attention as it is")
    check_dense_mask(mask, q.shape, k.shape)
    return plan_for(mask, q, k, causal=False)


def plan_for(mask, q, k, *, causal):
    """The plan of a checked mask, for calls with this causal rule: what it hides from a whole tile need not be read."""
    (T, N), (S, K) = q.shape[-3:-1], k.shape[-3:-1]
    with jax.named_scope("jax_dma.plan"):
        # Masks that are broadcast along queries or keys are small: plain JAX will do.
        run = _bind if min(mask.shape[-2:]) > 1 else analyse_all
        return MaskPlan(*run(mask, shape=(T, S, N, K), causal=causal), T, S, N, K)


def plan_top_k(bias, window, q, k, *, is_causal=False, mask=None):
    """``plan(masks.dense_top_k(bias, window, is_causal=is_causal, mask=mask), q, k)`` without the bool array.

    On a GPU the choice is written as bits, an eighth of the memory, and need not be read again to be packed::

        chosen = jax_dma.plan_top_k(bias, 1024, q, k, is_causal=True)
        out = jax_dma.attention(q, k, v, chosen, bias, is_causal=True)

    Args:
      bias: float ``[*batch|1, N|K|1, T, S]``, the scores. No gradient flows through the choice.
      window: how many keys each query keeps, at least 1.
      q: an array ``[*batch, T, N, H]``, or anything with its shape (``jax.ShapeDtypeStruct``).
      k: an array ``[*batch, S, K, H]``, or anything with its shape.
      is_causal: hide keys ``s > t + (S - T)``.
      mask: optional bool that broadcasts against bias; False hides.

    Returns:
      A :class:`MaskPlan`, to be passed to ``attention`` as ``mask``.
    """
    bias, mask, window = top_k_operands(bias, window, mask)
    check_bias(bias, q.shape, k.shape)
    (T, N), (S, K) = q.shape[-3:-1], k.shape[-3:-1]
    if bias.shape[-2:] != (T, S):
        raise ValueError(f"bias must have all of [T, S] = {(T, S)} as its last axes, got {bias.shape}")
    if S == 1:  # one word, which stands for all keys
        return plan(select(bias, mask, window, causal=is_causal), q, k)
    bits = select(bias, mask, window, causal=is_causal, packed=True)
    with jax.named_scope("jax_dma.plan"):
        return MaskPlan(bits, *tile_maps(bits, T, S, N, K), T, S, N, K)


def analyse_all(mask, *, shape, causal):
    return analyse(mask, *shape)


# The analysis of a mask that varies over queries and keys, as a primitive: a kernel reads the mask once on a GPU, where
# plain JAX reads it several times over. Under `causal` the result may leave out whole tiles that this rule hides: they
# have nothing visible then, and their bits may be anything.
plan_p = Primitive("jax_dma_plan")
plan_p.multiple_results = True


@plan_p.def_abstract_eval
def _plan_types(mask, *, shape, causal, devices):
    like = lambda x: mask.update(shape=x.shape, dtype=x.dtype, weak_type=False, sharding=_sharding(mask, len(x.shape)))
    results = jax.eval_shape(
        functools.partial(analyse, T=shape[0], S=shape[1], N=shape[2], K=shape[3]),
        jax.ShapeDtypeStruct(mask.shape, jnp.bool_),
    )
    return [like(x) for x in results]


def _sharding(mask, rank):
    """The mask's sharding along its batch axes; what is made of the others is not typed as sharded."""
    batch = tuple(mask.sharding.spec)[: len(mask.shape) - 3]
    return mask.sharding.update(spec=(batch + (None,) * rank)[:rank])


def _bind(mask, *, shape, causal):
    return plan_p.bind(mask, shape=shape, causal=causal, devices=partition.marker())


@functools.cache
def _compiled(shape, causal):
    return jax.jit(functools.partial(_bind, shape=shape, causal=causal))


plan_p.def_impl(lambda mask, *, shape, causal, devices: _compiled(shape, causal)(mask))


def _lower(platform, mask, *, shape, causal, devices):
    if platform != "cuda" or ffi.load("cuda") is not None:
        return list(analyse(mask, *shape))
    if jax.typeof(mask).sharding.mesh.manual_axes:  # inside shard_map: local already
        return ffi.plan(mask, *shape, causal)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        # A part of the queries does not know where its first one is.
        run = lambda mask, part: ffi.plan(mask, *part, causal and part[0] == shape[0])
        return partition.partitioned_plan(run, mask, shape)


# What the kernel's lowering traces is split by `partition`; plain JAX is split by XLA, which may see types.
mlir.register_lowering(plan_p, mlir.lower_fun(functools.partial(_lower, None), multiple_results=True))
mlir.register_lowering(
    plan_p,
    partition.without_shardings(mlir.lower_fun(functools.partial(_lower, "cuda"), multiple_results=True)),
    platform="cuda",
)


def _batch(operands, dims, **parameters):
    results = plan_p.bind(jnp.moveaxis(operands[0], dims[0], 0), **parameters)
    return results, [0] * len(results)


batching.primitive_batchers[plan_p] = _batch
