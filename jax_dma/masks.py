"""Masks: which keys each query sees.

A mask is a dense bool array ``[B|1, N|K|1, T|1, S|1]`` or a :class:`KeyIntervals`, the O(S) form in which every key is
visible to one contiguous run of queries. Causal masks, sliding windows, packed segments and, under a causal rule, the
``window`` highest-scored keys of every query (dynamic masks) are all of that kind.

Letters: B batch, T query length, S key length, N query heads, K key/value heads. Query ``t`` stands at key position
``t + (S - T)``, so that the last query sees the last key.
"""

import dataclasses
import functools
import math
import operator

import jax
import jax.numpy as jnp

from jax_dma import mesh
from jax_dma.implementations import ffi
from jax_dma.primitives import with_cuda_kernel
from jax_dma.select import ordered_bits, select

_NEVER = 0  # start and end of a key that nobody sees


@functools.partial(jax.tree_util.register_dataclass, data_fields=["start", "end"], meta_fields=["live", "scattered"])
@dataclasses.dataclass(frozen=True)
class KeyIntervals:
    """A mask in O(S) memory: key ``s`` is visible to query ``t`` iff ``start[s] <= t < end[s]``.

    A pytree, so it passes through jit, vmap and scan like an array. Shapes and dtypes are checked by
    :func:`jax_dma.attention`, not here. T is not stored: give the builders the T of the call.

    Attributes:
      start: int32 ``[*batch|1, N|K|1, S]``, the first query that sees each key.
      end: int32, the same shape rules, one past the last query that sees each key.
      live: a static bound, or None if unknown: any ``n`` consecutive queries see at most ``live + n - 1`` keys in all.
      scattered: a static hint: the keys that a query sees lie far apart, as :func:`~jax_dma.masks.top_k` leaves them,
        rather than next to each other as in a window. With ``live`` it lets :func:`jax_dma.attention` gather them
        (:mod:`jax_dma.kept_keys`), so that the cost is O(T * live).
    """

    start: jax.Array
    end: jax.Array
    live: int | None = None
    scattered: bool = False

    def __and__(self, other):
        """Visible in both. ``live`` is the smaller bound; scattered if either is."""
        if not isinstance(other, KeyIntervals):
            raise TypeError(
                f"& of a KeyIntervals takes another one, got {type(other).__name__}; for a dense mask: "
                "mask.dense(T) & other"
            )
        bounds = [x.live for x in (self, other) if x.live is not None]
        self, other = _same_rank(self, other)
        return KeyIntervals(
            jnp.maximum(self.start, other.start),
            jnp.minimum(self.end, other.end),
            min(bounds) if bounds else None,
            self.scattered or other.scattered,
        )

    __rand__ = __and__

    def __or__(self, other):
        """Not a KeyIntervals in general: an error that says what to do."""
        raise TypeError("the union of two KeyIntervals need not be one; make them dense: a.dense(T) | b.dense(T)")

    __ror__ = __or__

    def dense(self, query_length):
        """The same mask as a bool array ``[*batch|1, N|K|1, query_length, S]``. O(T * S) memory."""
        t = jnp.arange(query_length, dtype=jnp.int32)[:, None]
        start, end = self.start[..., None, :], self.end[..., None, :]
        t = t.reshape((1,) * (start.ndim - 2) + t.shape)
        return (start <= t) & (t < end)


def _same_rank(a, b):
    """Left-pads the shapes of two KeyIntervals with axes of size 1, so that they broadcast under any rank rule."""
    rank = max(a.start.ndim, b.start.ndim)
    pad = lambda x: x.reshape((1,) * (rank - x.ndim) + x.shape)
    return tuple(dataclasses.replace(x, start=pad(x.start), end=pad(x.end)) for x in (a, b))


def _length(name, value, minimum=0):
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a Python integer (it fixes shapes), got {value!r}") from None
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return value


def causal(query_length, key_length):
    """The causal rule: query ``t`` sees keys ``s <= t + (S - T)``.

    Args:
      query_length: T.
      key_length: S.

    Returns:
      KeyIntervals of shape ``[1, 1, S]``. ``attention(..., is_causal=True)`` is the same and needs no arrays.
    """
    T, S = _length("query_length", query_length), _length("key_length", key_length)
    start = jnp.arange(S, dtype=jnp.int32) - (S - T)
    return KeyIntervals(jnp.clip(start, 0, T)[None, None], jnp.full((1, 1, S), T, jnp.int32))


def sliding_window(query_length, key_length, left, right=0):
    """A band: the query at key position ``p = t + (S - T)`` sees keys ``p - left`` to ``p + right``, both included.

    Args:
      query_length: T.
      key_length: S.
      left: how many keys before its own position a query sees, at least 0.
      right: how many keys after its own position a query sees; 0 makes the window causal.

    Returns:
      KeyIntervals of shape ``[1, 1, S]`` with ``live = left + right + 1``.
    """
    T, S = _length("query_length", query_length), _length("key_length", key_length)
    left, right = _length("left", left), _length("right", right)
    own = jnp.arange(S, dtype=jnp.int32) - (S - T)  # the query that stands at each key's position
    # Past S the window is as good as unbounded; this keeps int32 arithmetic from overflowing.
    left_, right_ = min(left, S + T), min(right, S + T)
    start, end = jnp.clip(own - right_, 0, T), jnp.clip(own + left_ + 1, 0, T)
    return KeyIntervals(start[None, None], end[None, None], live=left + right + 1)


def lengths(key_lengths, query_length, key_length):
    """Right padding: only the first ``key_lengths[b]`` keys are visible.

    Args:
      key_lengths: integers ``[*batch]``.
      query_length: T.
      key_length: S.

    Returns:
      KeyIntervals of shape ``[*batch, 1, S]``.
    """
    T, S = _length("query_length", query_length), _length("key_length", key_length)
    key_lengths = _integers("key_lengths", key_lengths)
    s = jnp.arange(S, dtype=jnp.int32).reshape((1,) * (key_lengths.ndim + 1) + (S,))
    end = jnp.where(s < key_lengths[..., None, None], T, _NEVER).astype(jnp.int32)
    return KeyIntervals(jnp.zeros_like(end), end)


def prefix(prefix_lengths, query_length, key_length):
    """Prefix language model: both directions within the prefix, causal after it.

    A query sees key ``s`` if ``s < prefix_lengths[b]`` or ``s <= t + (S - T)``.

    Args:
      prefix_lengths: integers ``[*batch]``, how many keys of each example are its prefix.
      query_length: T.
      key_length: S.

    Returns:
      KeyIntervals of shape ``[*batch, 1, S]``. Not to be combined with ``is_causal=True``: that hides what the
      prefix opens.
    """
    T, S = _length("query_length", query_length), _length("key_length", key_length)
    prefix_lengths = _integers("prefix_lengths", prefix_lengths)
    s = jnp.arange(S, dtype=jnp.int32).reshape((1,) * (prefix_lengths.ndim + 1) + (S,))
    start = jnp.where(s < prefix_lengths[..., None, None], 0, jnp.clip(s - (S - T), 0, T))
    return KeyIntervals(start, jnp.full_like(start, T))


def block_causal(block_size, query_length, key_length):
    """Causal from block to block: a query sees every key of its own block and of those before it.

    Blocks hold ``block_size`` positions, counted from key 0; the query at key position ``p = t + (S - T)`` is in
    the block of p, and one before key 0 sees nothing.

    Args:
      block_size: at least 1; 1 is the causal rule.
      query_length: T.
      key_length: S.

    Returns:
      KeyIntervals of shape ``[1, 1, S]``. Not to be combined with ``is_causal=True``, which hides what a block opens.
    """
    block = _length("block_size", block_size, minimum=1)
    T, S = _length("query_length", query_length), _length("key_length", key_length)
    block = min(block, max(S, 1))  # the same blocks, and int32 holds it
    s = jnp.arange(S, dtype=jnp.int32)
    start = jnp.clip(s - s % block - (S - T), 0, T)
    return KeyIntervals(start[None, None], jnp.full((1, 1, S), T, jnp.int32))


def segments(segment_ids, query_length=None):
    """Packed sequences: a query sees the keys of its own run of equal ids.

    The same id in two separate runs is two segments. An id below 0 is padding: such keys are seen by nobody, and
    queries at such positions see nothing.

    Called as ``segments(query_ids, key_ids)``, queries and keys have their own ids, and a run of queries sees the run
    of keys with the same id. An id that has several runs is matched run by run from the last one backwards, so that
    each key is always seen by one run of queries. Where *all* queries and keys of equal id should see each other, but
    do not stand side by side, no intervals exist: pass the dense mask
    ``(query_ids[..., :, None] == key_ids[..., None, :])[..., None, :, :]``.

    Args:
      segment_ids: integers ``[*batch, S]``, one per key; or ``[*batch, T]``, one per query, if key ids follow.
      query_length: T, default S. The queries are the last T positions. Or the ids of the keys, ``[*batch, S]``.

    Returns:
      KeyIntervals of shape ``[*batch, 1, S]``. Combine with ``is_causal=True`` for packed causal training with one
      array of ids; with two, the causal rule goes by positions in the whole array, not within a segment.
    """
    segment_ids = _integers("segment_ids", segment_ids)
    if getattr(query_length, "ndim", 0) > 0 or isinstance(query_length, (list, tuple)):
        start, end = _segments_of_pairs(segment_ids, _integers("key_ids", query_length))
        return KeyIntervals(start[..., None, :], end[..., None, :])
    S = segment_ids.shape[-1]
    T = S if query_length is None else _length("query_length", query_length)
    first, last = _runs(segment_ids)
    start, end = jnp.clip(first - (S - T), 0, T), jnp.clip(last - (S - T), 0, T)
    padding = segment_ids < 0
    start, end = jnp.where(padding, _NEVER, start), jnp.where(padding, _NEVER, end)
    return KeyIntervals(start[..., None, :], end[..., None, :])


@functools.partial(jnp.vectorize, signature="(t),(s)->(s),(s)")
def _segments_of_pairs(query_ids, key_ids):
    """Which queries see each key, [start, end), by one sort of all ids: O((S + T) log(S + T)) time."""
    T, S = query_ids.shape[0], key_ids.shape[0]
    ids = jnp.concatenate([query_ids, key_ids])
    number = jnp.concatenate([_number_from_last(query_ids), _number_from_last(key_ids)])
    element = jnp.arange(T + S, dtype=jnp.int32)  # queries before keys, each in order of position
    ids, number, element = jax.lax.sort((ids, number, element), num_keys=3)
    differs = (ids[1:] != ids[:-1]) | (number[1:] != number[:-1])
    group = jnp.concatenate([jnp.zeros_like(element[:1]), jnp.cumsum(differs, dtype=jnp.int32)])  # one per pair of runs
    query = element < T
    first = jax.ops.segment_min(jnp.where(query, element, T), group, T + S)[group]
    count = jax.ops.segment_sum(query.astype(jnp.int32), group, T + S)[group]
    seen = (ids >= 0) & (count > 0)
    place = jnp.where(query, S, element - T)  # S: dropped
    write = lambda x: jnp.full(S, _NEVER, jnp.int32).at[place].set(jnp.where(seen, x, _NEVER), mode="drop")
    return write(first), write(first + count)


def _number_from_last(ids):
    """For each of ``[length]``: the number of its run among the runs of the same id, the last run being 1."""
    length = ids.shape[0]
    ends = jnp.concatenate([ids[1:] != ids[:-1], jnp.ones_like(ids[:1], bool)])
    position = jnp.arange(length, dtype=jnp.int32)
    ordered, order = jax.lax.sort((ids, position), num_keys=2)
    from_here = jnp.cumsum(ends[order][::-1], dtype=jnp.int32)[::-1]  # runs that end here or later, in sorted order
    from_here = jnp.concatenate([from_here, jnp.zeros_like(from_here[:1], shape=(1,))])
    next_id = jnp.searchsorted(ordered, ordered, side="right")
    return jnp.zeros_like(ids).at[order].set(from_here[:-1] - from_here[next_id])


def _integers(name, x):
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got dtype {x.dtype}")
    return x.astype(jnp.int32)


def _runs(ids):
    """For each element of ``[..., S]`` the bounds [first, last) of its run of equal neighbours."""
    S, axis = ids.shape[-1], ids.ndim - 1
    position = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), ids.shape)
    edge = ids[..., 1:] != ids[..., :-1]
    true = jnp.ones_like(edge, shape=ids.shape[:-1] + (min(S, 1),))
    begins, ends = jnp.concatenate([true, edge], -1), jnp.concatenate([edge, true], -1)
    first = jax.lax.cummax(jnp.where(begins, position, 0), axis=axis)
    last = jax.lax.cummin(jnp.where(ends, position + 1, S), axis=axis, reverse=True)
    return first, last


def top_k(scores, window, query_length=None, *, is_causal=True, segment_ids=None, valid=None):
    """Dynamic mask: each query sees the ``window`` highest-scored of the keys that it may see.

    A query may see the keys of its own segment that are not padding and, under ``is_causal``, do not come after it.
    Ties are broken by the lower key index, NaN scores rank last, and a window at least as large as the number of keys
    that a query may see keeps them all. Masks carry no gradient: scores learn through ``bias``.

    Under the causal rule a key that ``window`` higher-scored keys have pushed out can never return, because the prefix
    only grows. So each key is visible to one run of queries, which ends at the position of the ``window``-th key that
    outranks it: an order statistic over a prefix of the ranked positions, read off a wavelet matrix. O(S log S) time
    and O(S) memory; no ``[T, S]`` array anywhere.

    Args:
      scores: float ``[*batch, K, S]``, one score per key (heads may also be N or 1).
      window: how many keys each query keeps, at least 1.
      query_length: T, default S. The queries are the last T positions.
      is_causal: whether a query sees only keys at or before its own position.
      segment_ids: optional integers ``[*batch|1, S]`` as in :func:`segments`.
      valid: optional bool ``[*batch|1, S]``; keys where it is False are seen by nobody and take no place in the window.

    Returns:
      KeyIntervals with the shape of ``scores``, ``live`` set and ``scattered``.
    """
    scores = jnp.asarray(scores)
    if not jnp.issubdtype(scores.dtype, jnp.floating):
        raise TypeError(f"scores must be floating point, got dtype {scores.dtype}")
    if scores.ndim < 2:
        raise ValueError(f"scores must have shape [*batch, K, S], got {scores.shape}")
    window = _length("window", window, minimum=1)
    S = scores.shape[-1]
    T = S if query_length is None else _length("query_length", query_length)
    per_key = scores.shape[:-2] + (S,)

    rows = math.prod(scores.shape[:-1])

    def operand(name, x):
        if x is None:
            return None
        allowed = [(1, size) for size in per_key[:-1]] + [(S,)]
        if x.ndim != len(per_key) or any(n not in sizes for n, sizes in zip(x.shape, allowed)):
            raise ValueError(f"{name} must have shape [*batch|1, S] = {per_key}, got {x.shape}")
        return jnp.broadcast_to(x[..., None, :], scores.shape).reshape(rows, S)

    valid = operand("valid", None if valid is None else _bools("valid", valid))
    segment_ids = operand("segment_ids", None if segment_ids is None else _integers("segment_ids", segment_ids))
    one_row = functools.partial(_top_k_row, window=window, T=T, is_causal=is_causal)
    start, end = jax.vmap(one_row)(jax.lax.stop_gradient(scores).reshape(rows, S), segment_ids, valid)
    # Non-causal segments: a query range can straddle two segments, each with `window` keys.
    live = window if is_causal or segment_ids is None else 2 * window - 1
    return KeyIntervals(start.reshape(scores.shape), end.reshape(scores.shape), live, scattered=True)


def _bools(name, x):
    x = jnp.asarray(x)
    if x.dtype != jnp.bool_:
        raise TypeError(f"{name} must be bool, got dtype {x.dtype}; for a 0/1 array pass `{name} != 0`")
    return x


def _top_k_row(scores, segment_ids, valid, *, window, T, is_causal):
    """start and end of every key of one row of scores [S]."""
    S = scores.shape[0]
    if S == 0:
        return jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.int32)
    position = jnp.arange(S, dtype=jnp.int32)
    eligible = jnp.ones(S, bool) if valid is None else valid
    if segment_ids is None:
        first, last = jnp.zeros(S, jnp.int32), jnp.full(S, S, jnp.int32)
        first_query, last_query = jnp.zeros(S, jnp.int32), jnp.full(S, T, jnp.int32)
    else:
        first, last = _runs(segment_ids)
        eligible = eligible & (segment_ids >= 0)
        first_query, last_query = jnp.clip(first - (S - T), 0, T), jnp.clip(last - (S - T), 0, T)
    # Rank within the segment: eligible before not, numbers before NaN, high before low, early before late.
    order, rank = _rank(_descending_key(scores, eligible))
    if segment_ids is not None:
        order = order[_rank(first[order].astype(jnp.uint32))[0]]
        rank = jnp.zeros(S, jnp.int32).at[order].set(position)
    outranked_by = rank - first  # how many keys of the segment outrank this one

    if not is_causal:
        keep = eligible & (outranked_by < window)
        return jnp.where(keep, first_query, _NEVER), jnp.where(keep, last_query, _NEVER)

    # With fewer than `window` keys above it a key stays to the end of its segment. Otherwise it leaves when the
    # window-th of the keys above it has come by, or never enters if that was before it.
    kth = _kth_smallest(*mesh.align_varying((order, first, rank)), k=min(window, S) - 1)[0]
    leaves = jnp.where(outranked_by >= window, jnp.maximum(kth, position), last)
    start, end = jnp.clip(position - (S - T), 0, T), jnp.clip(leaves - (S - T), 0, T)
    return jnp.where(eligible, start, _NEVER), jnp.where(eligible, jnp.maximum(start, end), _NEVER)


def _descending_key(scores, eligible):
    """Unsigned integers that sort from the highest score to the lowest, then NaN, then what is not eligible."""
    if scores.dtype not in (jnp.float64, jnp.bfloat16, jnp.float16):
        scores = scores.astype(jnp.float32)
    key = ~ordered_bits(scores)[0]
    return jnp.where(eligible, key, ~jnp.zeros_like(key))


def _rank_plain(keys):
    """The place of the r-th of ``[..., S]`` unsigned keys, equals in order, and the rank of the key at each place."""
    position = jax.lax.broadcasted_iota(jnp.int32, keys.shape, keys.ndim - 1)
    _, order = jax.lax.sort((keys, position), num_keys=1, is_stable=True)
    rank = jnp.put_along_axis(jnp.zeros_like(order), order, position, axis=-1, inplace=False)
    return order, rank


def _rank_kernel(keys):
    rows, S = math.prod(keys.shape[:-1]), keys.shape[-1]
    bits = sum(max(n - 1, 0).bit_length() for n in (rows, S)) + 8 * keys.dtype.itemsize
    if keys.dtype not in (jnp.uint16, jnp.uint32) or bits > 64 or not 0 < rows * S < 2**31 - 1:
        return None
    # Scratch: two arrays of 64-bit words, and what CUB's sort needs, which is less than a byte a key and 64 KiB.
    scratch = [((rows, S, 2), jnp.uint32)] * 2 + [((rows * S // 4 + 16384,), jnp.uint32)]
    order, rank, *_ = ffi.custom_call("rank", [((rows, S), jnp.int32)] * 2 + scratch, keys.reshape(rows, S))
    return order.reshape(keys.shape), rank.reshape(keys.shape)


_rank = with_cuda_kernel("rank", _rank_plain, _rank_kernel, ((".",), (".", ".")))


def _kth_smallest_row(values, low, high, k):
    """The k-th smallest (from 0) of ``values[low[i]:high[i]]`` for every i; values are a permutation of 0..S-1.

    A wavelet matrix walked while it is built: one stable partition of the values by each bit, most significant first.
    Only for what :func:`top_k` asks: ``values`` has segments of neighbours, each in another order, ``low[i]`` is where
    the segment of i begins, and ``values[high[i]] == i``. A result that is not above its own index i, or where the
    range holds fewer than k + 1 values, is unspecified: the kernel has something up to i there.
    """
    S = values.shape[0]
    position = jnp.arange(S, dtype=jnp.int32)
    k = jnp.full(S, k, jnp.int32)
    bits = max(1, (S - 1).bit_length())

    def level(i, carry):
        values, low, high, k, result = carry
        shift = bits - 1 - i
        bit = (values >> shift) & 1
        zeros_before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(1 - bit, dtype=jnp.int32)])
        zeros = zeros_before[S]
        zeros_low, zeros_high = zeros_before[low], zeros_before[high]
        in_zeros = zeros_high - zeros_low
        go_right = k >= in_zeros
        k = jnp.where(go_right, k - in_zeros, k)
        low = jnp.where(go_right, zeros + low - zeros_low, zeros_low)
        high = jnp.where(go_right, zeros + high - zeros_high, zeros_high)
        result = result | (go_right.astype(jnp.int32) << shift)
        target = jnp.where(bit == 0, zeros_before[:-1], zeros + position - zeros_before[:-1])
        return jnp.zeros(S, jnp.int32).at[target].set(values), low, high, k, result

    # The carry must be as varying as what feeds it, for shard_map's checker: derive the initial result from `low`.
    return jax.lax.fori_loop(0, bits, level, (values, low, high, k + 0 * low, 0 * low))[-1]


def _rows(values, low, high):
    shape = jnp.broadcast_shapes(values.shape, low.shape, high.shape)
    return shape, [jnp.broadcast_to(x, shape).reshape(-1, shape[-1]) for x in (values, low, high)]


def _kth_smallest_plain(values, low, high, *, k):
    shape, rows = _rows(values, low, high)
    return (jax.vmap(functools.partial(_kth_smallest_row, k=k))(*rows).reshape(shape),)


def _kth_smallest_kernel(values, low, high, *, k):
    shape, rows = _rows(values, low, high)
    count, S = rows[0].shape
    scratch = [(count, -(-S // 1024), 256), (count, S, 4), (count,)]  # xla_ffi/cuda/order_statistic/order_statistic.h
    results = [(size, jnp.int32) for size in [(count, S), *scratch]]
    return (ffi.custom_call("kth_smallest", results, *rows, k=k)[0].reshape(shape),)


_kth_smallest = with_cuda_kernel("kth_smallest", _kth_smallest_plain, _kth_smallest_kernel, ((".", ".", "."), (".",)))


def dense_top_k(bias, window, *, is_causal=False, mask=None):
    """Dynamic mask from a full score per (query, key): the recipe of the original dynamic-mask attention.

    Each query keeps the ``window`` highest-scored keys among those that it may see. Ties are broken by the lower key
    index, NaN ranks last, hidden keys are never selected, and a window at least as large as the number of visible keys
    keeps them all.

    Args:
      bias: float ``[..., T, S]``, the scores (usually the attention bias itself). No gradient flows through the mask.
      window: how many keys each query keeps, at least 1.
      is_causal: hide keys ``s > t + (S - T)``.
      mask: optional bool that broadcasts against bias; False hides.

    Returns:
      bool, the shape of bias.
    """
    return select(*top_k_operands(bias, window, mask), causal=is_causal)


def top_k_operands(bias, window, mask):
    """The arguments of :func:`dense_top_k`, checked; mask is None or has the rank of bias."""
    bias = jax.lax.stop_gradient(jnp.asarray(bias))
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"bias must be floating point, got dtype {bias.dtype}")
    if bias.ndim < 2:
        raise ValueError(f"bias must have shape [..., T, S], got {bias.shape}")
    window = _length("window", window, minimum=1)
    if mask is not None:
        mask = _bools("mask", mask)
        mask = mask.reshape((1,) * (bias.ndim - mask.ndim) + mask.shape)
        shape = jnp.broadcast_shapes(bias.shape, mask.shape)
        if shape != bias.shape:
            raise ValueError(f"mask must broadcast to bias's shape {bias.shape}, got {shape}")
    return bias, mask, window


def dense_relu(bias):
    """The mask ``bias > 0``.

    Args:
      bias: float, of any shape that a bias may have. NaN hides. No gradient flows through the mask.

    Returns:
      bool, the shape of bias.
    """
    bias = jnp.asarray(bias)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"bias must be floating point, got dtype {bias.dtype}")
    return jax.lax.stop_gradient(bias) > 0
