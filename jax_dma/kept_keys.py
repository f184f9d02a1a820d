"""Attention in O(T * w) where every query keeps w keys that lie scattered: gather them, then attend as usual.

Queries are cut into runs of R consecutive ones. The keys that any query of a run sees number at most ``live + R - 1``
(the promise of :attr:`jax_dma.KeyIntervals.live`), so a run's keys, values and per-key biases fit in a list of fixed
length, and with R between a quarter of ``live`` and all of it the lists together are two to five times as long as the
queries: O(T) memory. The runs become a batch axis, the intervals are shifted to each run's first query, and the
ordinary kernels do the rest. They compute on ``live + R`` keys a query instead of S, and within a run they skip tiles
as they always do.

A list begins with the keys that all queries of its run see, so nearly all tiles of a long list need no masking. Then
come the others that its first query sees, from those that stay longest to those that leave first, and then those that
enter later, in order: keys that are seen at the same time lie side by side, and tiles before and after are skipped.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from jax_dma.implementations import ffi
from jax_dma.primitives import with_cuda_kernel
from jax_dma.tiles import KEY_TILE, MOST_TILES_WITHOUT_WORDS, Visibility, interval_bounds

_LONGEST_RUN, _LONG_RUN = 4096, 2048
_ENOUGH_TILES = 2048  # 16 for each processor of an H200
_STEPS = 128  # kSteps in xla_ffi/cuda/kept_keys/kept_keys.cu


def run_length(query_length, key_length, live, heads=1):
    """R for a call of so many (batch entry, key/value head)s.

    About ``live``, or twice that up to 2,048, if it leaves enough tiles of keys to fill a device; otherwise less, down
    to half of ``live``: longer runs gather less. None where gathering would not save at least two thirds of the work.
    """
    if live is None or min(query_length, key_length, live) < 1:
        return None
    half = 1 << max(live // 2, KEY_TILE // 2).bit_length() - 1
    R = max(2 * half, min(4 * half, _LONG_RUN))
    while R >= half:
        run = min(R, _LONGEST_RUN, query_length)
        tiles = heads * -(-query_length // run) * -(-live // KEY_TILE)
        if (R == half or tiles >= _ENOUGH_TILES) and 3 * list_length(key_length, live, run) <= key_length:
            return run
        R //= 2
    return None


def list_length(key_length, live, R):
    """The length of a run's list: whole tiles that hold every key that the run can see."""
    return -(-min(live + R - 1, key_length) // KEY_TILE) * KEY_TILE


def serves(mask, q, k, bias):
    """The run length to gather with, or None where a call keeps its keys in place."""
    T, (S, K) = q.shape[-3], k.shape[-3:-1]
    if not mask.scattered or q.size == 0 or mask.start.shape[-2] not in (1, K) or mask.end.shape[-2] not in (1, K):
        return None
    if bias is not None and bias.shape[-2] > 1:  # O(T * S) by itself
        return None
    if any(jax.typeof(x).sharding.mesh.explicit_axes for x in (q, k, mask.start)):
        return None
    return run_length(T, S, mask.live, math.prod(jnp.broadcast_shapes(q.shape[:-3], k.shape[:-3])) * K)


def attention(attend, q, k, v, start, end, bias, *, R, live, causal, differentiable_in_every_mode):
    """Attention over the kept keys only.

    Args:
      attend: a function of (q, k, v, visibility, bias) to (out, lse), without a causal rule, for arrays with one more
        batch axis (the runs). Key tiles of which nothing is seen may hold anything in k and v.
      q, k, v, bias: as for :func:`jax_dma.attention`; bias does not vary over queries.
      start, end: int32 ``[*batch|1, K|1, S]``, of one shape.
      R: queries of a run.
      live: the static bound of the intervals.
      causal: whether the causal rule holds as well.
      differentiable_in_every_mode: plain JAX only, also where there are kernels.

    Returns:
      out and lse. Where the intervals break the promise of ``live``, the results of that run are NaN.
    """
    T, S = q.shape[-3], k.shape[-3]
    if causal:
        start = jnp.maximum(start, (jnp.arange(S, dtype=jnp.int32) - (S - T)).reshape((1,) * (start.ndim - 1) + (S,)))
    length = list_length(S, live, R)
    listed = Lists.of(start, end, T=T, R=R, length=length)
    gather = gather_rows = take
    if not differentiable_in_every_mode:
        gather, gather_rows = take_by_kernel, functools.partial(take_by_kernel, fill=_fills())
    k, v = gather_rows(listed, k), gather_rows(listed, v)
    if bias is not None:
        bias = _runs_of_bias(gather, listed, bias)
    visibility = Visibility(start=listed.first, end=listed.last, bounds=listed.bounds)
    out, lse = attend(_split_runs(q, R), k, v, visibility, bias)
    return _join_runs(out, T, 2), _join_runs(lse, T, 1)


def _fills():
    """Whether rows that no kernel reads are written: half of k and v, but a search for NaN looks at them."""
    return jax.config.jax_debug_nans or jax.config.jax_debug_infs


def _split_runs(x, R):
    """[*batch, T, N, H] to [*batch, runs, R, N, H]."""
    pad = -x.shape[-3] % R
    if pad:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [(0, pad), (0, 0), (0, 0)])
    return x.reshape((*x.shape[:-3], x.shape[-3] // R, R, *x.shape[-2:]))


def _join_runs(x, T, rest):
    """[*batch, runs, R, ...] to [*batch, T, ...], with ``rest`` axes after R."""
    at = x.ndim - rest - 2
    return jax.lax.slice_in_dim(x.reshape((*x.shape[:at], -1, *x.shape[at + 2 :])), 0, T, axis=at)


def _runs_of_bias(gather, listed, bias):
    """bias [*batch|1, N|K|1, 1, S|1] for the keys of each run: [*batch|1, runs|1, heads, 1, length|1]."""
    if bias.shape[-1] == 1:
        return bias[..., None, :, :, :]
    rows = gather(listed, jnp.moveaxis(bias[..., 0, :], -1, -2)[..., None])
    return jnp.moveaxis(rows[..., 0], -1, -2)[..., None, :]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "first", "last", "bounds", "counts", "offsets", "places", "start", "end"],
    meta_fields=["T", "R"],
)
@dataclasses.dataclass(frozen=True)
class Lists:
    """Which keys the queries of each run see.

    Attributes:
      keys: int32 ``[*batch, runs, heads, length]``: first those that every query of the run sees; then the others that
        its first query sees, from the last to leave to the first, to a 128th of the run; then those that enter later.
        Among equals in order. Then S. The first is -1 in a run that sees more than ``length``.
      first, last: int32, the same shape, the intervals of these keys, counted from the run's first query.
      bounds: theirs, as in :class:`jax_dma.tiles.Visibility`.
      counts: int32 ``[*batch, runs, heads, 2]``: how many keys the whole run sees, and how many there are in all.
      offsets, places: for the kernel that sums, where each key is listed (xla_ffi/cuda/kept_keys/kept_keys.h); int32
        ``[*batch, heads, S]`` and ``[*batch, heads, runs * length]``. 0 where that kernel is not used.
      start, end: int32 ``[*batch, heads, S]``, what the lists were made of.
      T, R: queries, and queries of a run.
    """

    keys: jax.Array
    first: jax.Array
    last: jax.Array
    bounds: jax.Array
    counts: jax.Array
    offsets: jax.Array
    places: jax.Array
    start: jax.Array
    end: jax.Array
    T: int
    R: int

    @classmethod
    def of(cls, start, end, *, T, R, length):
        start, end = jax.lax.stop_gradient((start, end))
        return cls(*_list_keys(start, end, T=T, R=R, length=length), start, end, T, R)


def _list_keys_plain(start, end, *, T, R, length):
    start, end = jnp.broadcast_arrays(start, end)
    *batch, S = start.shape
    runs = -(-T // R)

    def of_run(start, end, run):
        t0, t1 = run * R, jnp.minimum((run + 1) * R, T)
        seen = (start < jnp.minimum(end, t1)) & (end > t0)
        whole = seen & (start <= t0) & (end >= t1)
        counts = jnp.stack([jnp.sum(x, dtype=jnp.int32) for x in (whole, seen)])
        place = jnp.where(seen, jnp.cumsum(seen, dtype=jnp.int32) - 1, length)
        keys = jnp.full(length, S, jnp.int32).at[place].set(jnp.arange(S, dtype=jnp.int32), mode="drop")
        at = jnp.minimum(keys, S - 1)
        by_end = _STEPS - (end[at] - t0 - 1) // -(-R // _STEPS)
        order = jnp.where(start[at] > t0, _STEPS + 1, jnp.where(end[at] >= t1, 0, by_end))
        keys = keys[jnp.argsort(jnp.where(keys < S, order, _STEPS + 2), stable=True)]
        at = jnp.minimum(keys, S - 1)
        first = jnp.where(keys < S, jnp.clip(start[at] - t0, 0, R), 0)
        last = jnp.where(keys < S, jnp.clip(end[at] - t0, 0, R), 0)
        poison = lambda x, value: x.at[0].set(jnp.where(counts[1] > length, value, x[0]))
        return poison(keys, -1), poison(first, 0), poison(last, R), counts

    of_row = lambda start, end: jax.lax.map(functools.partial(of_run, start, end), jnp.arange(runs, dtype=jnp.int32))
    results = jax.vmap(of_row)(start.reshape(-1, S), end.reshape(-1, S))
    lists = (jnp.moveaxis(x.reshape((*batch, runs, x.shape[-1])), -2, -3) for x in results)
    keys, first, last, counts = lists
    bounds = interval_bounds(first, last, first.shape[-2], first.shape[-2])
    offsets, places = jnp.zeros_like(start), jnp.zeros_like(start, shape=(*batch, runs * length))
    return keys, first, last, bounds, counts, offsets, places


def _list_keys_kernel(start, end, *, T, R, length):
    start, end = jnp.broadcast_arrays(start, end)
    *batch, S = start.shape
    listed = (*batch[:-1], -(-T // R), batch[-1])
    groups, chunks = -(-S // 128), -(-S // 1024)  # xla_ffi/cuda/kept_keys/kept_keys.h
    shapes = [(*listed, length)] * 3 + [(*listed, 4, -(-length // KEY_TILE)), (*listed, 2)]
    shapes += [(*batch, S), (*batch, listed[-2] * length)]
    shapes += [(*batch, 4, S), (*batch, groups, 2), (*batch, chunks + 1, 2)]  # scratch
    results = ffi.custom_call(
        "list_keys", [(shape, jnp.int32) for shape in shapes], start, end, query_length=T, run_length=R
    )
    keys, first, last, bounds, *rest = results[:7]
    if bounds.shape[-1] > MOST_TILES_WITHOUT_WORDS:
        bounds = interval_bounds(first, last, batch[-1], batch[-1])
    return keys, first, last, bounds, *rest


_list_keys = with_cuda_kernel(
    "list_keys", _list_keys_plain, _list_keys_kernel, (("n.", "n."), (*[".n."] * 3, ".n..", ".n.", "n.", "n."))
)


def take(listed, x):
    """The rows of an array that the lists name, in plain JAX.

    Args:
      listed: :class:`Lists`, of as many batch axes as x, each 1 or full.
      x: ``[*batch|1, S, heads, channels]``; heads N, K or 1.

    Returns:
      ``[*batch, runs, length, heads, channels]``, with at least as many heads as there are lists: 0 where a list has no
      key, NaN where it says that it is too short. The gradient is summed in float32.
    """
    return _take_plain(listed.keys, x)[0]


def _take_plain(keys, x, *, fill=True):
    if x.shape[-2] > 1 and keys.shape[-2] > 1:  # lists of key/value heads, rows of query heads
        keys = jnp.repeat(keys, x.shape[-2] // keys.shape[-2], axis=-2)
    *_, runs, heads, length = keys.shape
    keys = jnp.swapaxes(keys, -1, -2).reshape((*keys.shape[:-3], runs * length, heads, 1))
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    rows = jnp.take_along_axis(wide, keys, axis=-3, mode="clip")
    rows = jnp.where(keys < x.shape[-3], rows, 0)
    rows = jnp.where(keys < 0, jnp.nan, rows)
    return (rows.astype(x.dtype).reshape((*rows.shape[:-3], runs, length, *rows.shape[-2:])),)


def _take_kernel(keys, x, *, fill):
    batch = jnp.broadcast_shapes(keys.shape[:-3], x.shape[:-3])
    heads = max(keys.shape[-2], x.shape[-2])
    shape = (*batch, keys.shape[-3], keys.shape[-1], heads, x.shape[-1])
    return ffi.custom_call("take_keys", [(shape, x.dtype)], keys, x, fill=fill)


_take = with_cuda_kernel("take_keys", _take_plain, _take_kernel, (("rn.", ".n."), ("r.n.",)))


def _sum_plain(keys, offsets, places, start, end, rows, *, T, R, dtype):
    """The sum over all places where a key is listed: [*batch, S, heads, channels]; computed in float32 or wider."""
    S = start.shape[-1]
    batch = jnp.broadcast_shapes(keys.shape[:-3], rows.shape[:-4])
    # As varying as the rows: the transpose would be a sum over mesh axes too.
    like = ffi.result_type((*batch, S, *rows.shape[-2:]), jnp.promote_types(rows.dtype, jnp.float32), rows)
    transpose = jax.linear_transpose(lambda x: _take_plain(keys, x)[0], like)
    (sums,) = transpose(jnp.broadcast_to(rows, (*batch, *rows.shape[-4:])).astype(like.dtype))
    return (sums.astype(dtype),)


def _sum_kernel(keys, offsets, places, start, end, rows, *, T, R, dtype):
    if rows.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return None
    batch = jnp.broadcast_shapes(keys.shape[:-3], rows.shape[:-4])
    rows = jnp.broadcast_to(rows, (*batch, *rows.shape[-4:]))
    start, end = jnp.broadcast_arrays(start, end)
    shape = (*batch, start.shape[-1], *rows.shape[-2:])
    if math.prod(shape[:-1]) >= 2**31:
        return None
    return ffi.custom_call(
        "sum_keys", [(shape, dtype)], offsets, places, start, end, rows, query_length=T, run_length=R
    )


_sum = with_cuda_kernel("sum_keys", _sum_plain, _sum_kernel, ((".n.", *["n."] * 4, "..n."), (".n.",)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def take_by_kernel(listed, x, fill=True):
    """:func:`take`, by a kernel where there is one. Its gradient is summed run by run, in a fixed order.

    Unless ``fill``, the kernel leaves those key tiles of a list unwritten that have no key.
    """
    return _take(listed.keys, x, fill=fill)[0]


def _take_forward(listed, x, fill):
    return take_by_kernel(listed, x, fill), (listed, x)


def _take_backward(fill, residuals, rows):
    listed, x = residuals
    return None, _sum_by_kernel(listed, jax.ShapeDtypeStruct(x.shape, x.dtype), rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum_by_kernel(listed, x, rows):
    batch = jnp.broadcast_shapes(listed.keys.shape[:-3], rows.shape[:-4])
    full = (*batch, x.shape[-3], *rows.shape[-2:])
    dtype = x.dtype if x.shape == full else jnp.promote_types(x.dtype, jnp.float32)
    lists = listed.keys, listed.offsets, listed.places, listed.start, listed.end
    sums = _sum(*lists, rows, T=listed.T, R=listed.R, dtype=dtype)[0]
    broadcast = [axis for axis, size in enumerate(x.shape) if size == 1 and full[axis] > 1]
    return jnp.sum(sums, axis=broadcast, keepdims=True).astype(x.dtype) if broadcast else sums


def _sum_forward(listed, x, rows):
    return _sum_by_kernel(listed, x, rows), listed


def _sum_backward(x, listed, sums):
    return None, take_by_kernel(listed, sums)


take_by_kernel.defvjp(_take_forward, _take_backward)
_sum_by_kernel.defvjp(_sum_forward, _sum_backward)
