"""Selection: which scores of each row are among its highest. What :func:`jax_dma.masks.dense_top_k` runs on."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jax_dma import mesh, partition
from jax_dma.implementations import ffi
from jax_dma.primitives import with_cuda_kernel
from jax_dma.tiles import pack_bits

_MAX_MASK_AXES = 8  # xla_ffi/cuda/select/select.h
_MAX_KEYS = 2**30


def select(scores, mask, window, *, causal, packed=False):
    """Marks the ``window`` highest of the visible scores of each row; ties go to the lower index, NaN ranks last.

    Args:
      scores: float ``[..., T, S]``.
      mask: bool of the same rank, each axis full or 1, or None; False hides.
      window: a Python integer, at least 1.
      causal: hide keys ``s > t + (S - T)``.
      packed: whether to return bits.

    Returns:
      bool, the shape of scores; or uint32 ``[..., T, 4 * ceil(S / 128)]``, as from :func:`jax_dma.tiles.pack_bits`.
    """
    operands = mesh.align_varying([x for x in (scores, mask) if x is not None])
    # Without a search there is nothing for a kernel to do.
    run = _select_plain if window >= scores.shape[-1] else _select
    run = functools.partial(run, window=window, causal=causal, packed=packed, devices=partition.marker())
    if jax.typeof(scores).sharding.mesh.explicit_axes:  # rows stay where they are
        *rows, keys = jax.typeof(scores).sharding.spec
        run = jax.sharding.auto_axes(run, out_sharding=[PartitionSpec(*rows, None if packed else keys)])
    with jax.named_scope("jax_dma.select"):
        return run(*operands)[0]


def _select_plain(scores, *mask, window, causal, packed, devices=None):
    scores = jnp.broadcast_to(scores, jnp.broadcast_shapes(scores.shape, *(x.shape for x in mask)))
    T, S = scores.shape[-2:]
    index = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    visible = [jnp.broadcast_to(x, scores.shape) for x in mask]
    if causal:
        visible.append(index <= jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 2) + (S - T))
    visible = visible[0] & visible[-1] if visible else jnp.ones_like(scores, dtype=bool)
    chosen = visible if window >= S else _search(scores, visible, index, window)
    return (pack_bits(chosen) if packed else chosen,)


def _search(scores, visible, index, window):
    key, bits = ordered_bits(scores)
    key = jnp.where(visible, key, jnp.zeros_like(key))
    count = lambda chosen: chosen.sum(-1, keepdims=True, dtype=jnp.int32)
    # The window-th largest key, bit by bit: the largest threshold that at least `window` keys reach.
    one = jnp.ones((), key.dtype)

    def raise_threshold(i, threshold):
        candidate = threshold | (one << (bits - 1 - i).astype(key.dtype))
        return jnp.where(count(key >= candidate) >= window, candidate, threshold)

    threshold = jax.lax.fori_loop(0, bits, raise_threshold, jnp.zeros_like(key[..., :1]))
    above, tied = key > threshold, key == threshold
    room = window - count(above)  # at least 1: how many of the tied keys fit
    # The index of the last tied key that fits, by the same search from the other end.
    index_bits = max(1, scores.shape[-1].bit_length())

    def raise_cut(i, cut):
        candidate = cut | (jnp.int32(1) << (index_bits - 1 - i))
        return jnp.where(count(tied & (index < candidate)) <= room, candidate, cut)

    cut = jax.lax.fori_loop(0, index_bits, raise_cut, jnp.zeros_like(room))
    return (above | (tied & (index < cut))) & visible


def ordered_bits(x):
    """Unsigned integers that order as x does, and their width. -0 and +0 tie, NaN becomes 1 and nothing becomes 0.

    In integers alone: backends disagree on whether a comparison of floats takes subnormal ones for 0.
    """
    bits = jnp.finfo(x.dtype).bits
    unsigned = jnp.dtype(f"uint{bits}")
    raw = jax.lax.bitcast_convert_type(x, unsigned)
    zero = jnp.asarray(1 << (bits - 1), unsigned)
    infinity = jax.lax.bitcast_convert_type(jnp.asarray(jnp.inf, x.dtype), unsigned)
    magnitude = raw & ~zero
    ordered = jnp.where((raw & zero) != 0, zero - magnitude, zero + magnitude)
    return jnp.where(magnitude > infinity, jnp.ones_like(ordered), ordered), bits


def _select_kernel(scores, *mask, window, causal, packed, devices):
    *rows, S = scores.shape
    if scores.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16) or S > _MAX_KEYS:
        return None
    if mask and len(rows) > _MAX_MASK_AXES:
        return None

    def run(scores, *mask):
        shape, dtype = ((*scores.shape[:-1], 4 * -(-S // 128)), jnp.uint32) if packed else (scores.shape, jnp.bool_)
        return ffi.custom_call("select", [(shape, dtype)], scores, *mask, window=window, causal=causal)

    scores = jnp.broadcast_to(scores, jnp.broadcast_shapes(scores.shape, *(x.shape for x in mask)))
    if jax.typeof(scores).sharding.mesh.manual_axes:  # inside shard_map: local already
        return run(scores, *mask)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return _split_rows(run, causal, scores, *mask)


def _split_rows(run, causal, *operands):
    """``run(scores, *mask)``, split over whatever mesh the program is compiled for: rows are independent.

    Under the causal rule queries stay together, because a part would not know where it begins. Why XLA has to be told
    is said in ``partition.py``.
    """
    shapes = [x.shape for x in operands]  # the rule outlives this trace, so it must not hold the operands
    shape = shapes[0]
    whole = len(shape) - (2 if causal else 1)  # from this axis on

    def specs(mesh, operands):
        axes = partition.spec_of(operands[0], mesh)[:whole]
        divides = lambda names, size: names and size % math.prod(mesh.shape[a] for a in names) == 0
        axes = [names if divides(names, size) else None for names, size in zip(axes, shape)]
        of = lambda x: PartitionSpec(*(names if size > 1 else None for names, size in zip(axes, x.shape)))
        return [of(x) for x in operands]

    def partition_rows(mesh, operands, results):
        mesh = partition.some_mesh(mesh, operands)
        shardings = [NamedSharding(mesh, spec) for spec in specs(mesh, operands)]

        def shard(*operands):
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # not that of an enclosing jax.set_mesh
                return tuple(run(*operands))

        return mesh, shard, (shardings[0],), tuple(shardings)

    def infer(mesh, operands, results):
        mesh = partition.some_mesh(mesh, operands)
        return (NamedSharding(mesh, specs(mesh, operands)[0]),)

    def rule(*_):
        fresh = (f"x{i}" for i in range(4 * len(shape)))
        term = lambda x: " ".join(
            f"r{i}" if i < whole and x[i] == shape[i] > 1 else next(fresh) for i in range(len(shape))
        )
        return ", ".join(map(term, shapes)) + " -> " + term(shape)

    split = custom_partitioning(lambda *operands: tuple(run(*operands)))
    split.def_partition(
        partition=partition_rows, infer_sharding_from_operands=infer, sharding_rule=rule, decode_shardings=False
    )
    return split(*operands)


_select = with_cuda_kernel("select", _select_plain, _select_kernel)
