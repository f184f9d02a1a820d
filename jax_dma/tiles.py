"""Tiles: what kernels read of a mask, computed in JAX.

This is the one place in Python that knows what a tile is; ``xla_ffi/common/problem.h`` is the one place in C++. A tile
is ``queries_per_tile(G)`` queries, all G query heads of one key/value head, and 128 keys. Kernels with other tile
shapes merge or split these.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

KEY_TILE = 128
TILE_ROWS = 128
_WORD = 32
MOST_TILES_WITHOUT_WORDS = 128  # kMostTilesWithoutWords in xla_ffi/common/problem.h
_INT32 = jnp.iinfo(jnp.int32)
_ALL_ONES = 0xFFFFFFFF


def queries_per_tile(group):
    """The largest power of two q with q * group <= 128; 1 for larger groups."""
    return 1 << (max(1, TILE_ROWS // group).bit_length() - 1)


class Visibility(NamedTuple):
    """What a kernel is told about the mask; absent parts are None. Shapes as in ``xla_ffi/common/parse.h``."""

    bits: jax.Array | None = None
    tiles_by_query: jax.Array | None = None
    tiles_by_key: jax.Array | None = None
    start: jax.Array | None = None
    end: jax.Array | None = None
    bounds: jax.Array | None = None


def analyse(mask, T, S, N, K):
    """bits, tiles_by_query, tiles_by_key (as in :class:`Visibility`) of a dense mask [*batch, N|K|1, T|1, S|1]."""
    bits = pack_bits(mask) if mask.shape[-1] > 1 else jnp.where(mask, jnp.uint32(_ALL_ONES), jnp.uint32(0))
    return bits, *tile_maps(bits, T, S, N, K)


def tile_maps(bits, T, S, N, K):
    """tiles_by_query and tiles_by_key (as in :class:`Visibility`) of bits."""
    seen, full = _tile_classes(bits, T, S, N, K)
    return _tile_map(seen, full), _tile_map(*(jnp.swapaxes(x, -1, -2) for x in (seen, full)))


def pack_bits(mask):
    """bool [..., S] to uint32 [..., 4 * ceil(S / 128)], hidden past S."""
    mask = _pad_last(mask, KEY_TILE, False)
    return _sum_bits(_split_last(mask, _WORD).astype(jnp.uint32))


def unpack_bits(bits, length):
    """uint32 [..., words] to bool [..., length]."""
    shift = jnp.arange(_WORD, dtype=jnp.uint32).reshape((1,) * bits.ndim + (_WORD,))
    mask = ((bits[..., None] >> shift) & 1) != 0
    return mask.reshape(bits.shape[:-1] + (bits.shape[-1] * _WORD,))[..., :length]


def _sum_bits(words):
    """0/1 uint32 [..., 32] to uint32 [...]."""
    shift = jnp.arange(_WORD, dtype=jnp.uint32).reshape((1,) * (words.ndim - 1) + (_WORD,))
    return jnp.sum(words << shift, axis=-1, dtype=jnp.uint32)


def _pad_last(x, multiple, value):
    pad = -x.shape[-1] % multiple
    return x if pad == 0 else jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)], constant_values=value)


def _split_last(x, size):
    """[..., n * size] to [..., n, size]; n is spelled out because -1 cannot be inferred where another axis is empty."""
    return x.reshape(x.shape[:-1] + (x.shape[-1] // size, size))


def _tile_classes(bits, T, S, N, K):
    """Which tiles have a visible position, and which no hidden one: bool [*batch, K|1, query tiles|1, key tiles|1]."""
    *batch, heads, rows, words = bits.shape
    queries = queries_per_tile(N // K)
    # Past S the bits are 0; a tile is full if every bit before S is set.
    expected = pack_bits(jnp.ones(S, bool)) if words > 1 else jnp.asarray([_ALL_ONES], jnp.uint32)
    expected = expected.reshape((1,) * (bits.ndim - 1) + (-1,))
    seen, full = bits != 0, bits == expected
    if words > 1:  # four words make a key tile
        seen = _split_last(seen, KEY_TILE // _WORD).any(-1)
        full = _split_last(full, KEY_TILE // _WORD).all(-1)
    if rows > 1:
        pad = [(0, 0)] * (seen.ndim - 2) + [(0, -rows % queries), (0, 0)]
        tiled = lambda x: x.reshape(x.shape[:-2] + (x.shape[-2] // queries, queries, x.shape[-1]))
        seen = tiled(jnp.pad(seen, pad, constant_values=False)).any(-2)
        full = tiled(jnp.pad(full, pad, constant_values=True)).all(-2)
    if heads not in (1, K):  # one tile holds all heads of a group
        grouped = lambda x: x.reshape((*batch, K, N // K) + x.shape[-2:])
        seen, full = grouped(seen).any(-3), grouped(full).all(-3)
    return seen, full


def _tile_map(seen, full):
    """Two bitmaps over the last axis, [..., tiles, 2, words]. An axis of size 1 becomes a word of equal bits."""
    planes = jnp.stack([seen, full], axis=-2)
    if planes.shape[-1] == 1:
        return jnp.where(planes, jnp.uint32(_ALL_ONES), jnp.uint32(0))
    planes = _pad_last(planes, _WORD, False)
    return _sum_bits(_split_last(planes, _WORD).astype(jnp.uint32))


def interval_bounds(start, end, N, K):
    """Per key tile: smallest start and largest end over non-empty intervals, largest start, smallest end.

    Args:
      start, end: int32 [*batch, N|K|1, S].

    Returns:
      int32 [*batch, K|1, 4, tiles]; where there are more than 128 tiles, the bounds of each 32 of them follow.
    """
    *batch, heads, S = start.shape

    def reduce(x, padding, reducer):
        x = _pad_last(x, KEY_TILE, padding)
        x = reducer(_split_last(x, KEY_TILE), -1)
        x = x if heads in (1, K) else reducer(x.reshape((*batch, K, N // K) + x.shape[-1:]), -2)
        if x.shape[-1] <= MOST_TILES_WITHOUT_WORDS:
            return x
        return jnp.concatenate([x, reducer(_split_last(_pad_last(x, _WORD, padding), _WORD), -1)], axis=-1)

    empty = start >= end
    smallest_start = reduce(jnp.where(empty, _INT32.max, start), _INT32.max, jnp.min)
    largest_end = reduce(jnp.where(empty, _INT32.min, end), _INT32.min, jnp.max)
    largest_start = reduce(jnp.where(empty, _INT32.max, start), _INT32.min, jnp.max)
    smallest_end = reduce(jnp.where(empty, _INT32.min, end), _INT32.max, jnp.min)
    return jnp.stack([smallest_start, largest_end, largest_start, smallest_end], axis=-2)
