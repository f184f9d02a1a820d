"""What a call costs, counted: XLA sees nothing of the inside of a custom call."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_dma import kept_keys
from jax_dma.explain import checked
from jax_dma.implementations import ffi, xla
from jax_dma.masks import KeyIntervals
from jax_dma.plan import MaskPlan
from jax_dma.reference import compute_dtype
from jax_dma.tiles import KEY_TILE, analyse, queries_per_tile, unpack_bits


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one pass.

    Attributes:
      flops: of the matrix products, a multiplication and an addition being two; in tiles that are not skipped.
      bytes: memory traffic if every array is read or written once, workspace included.
      workspace: bytes of memory beside the arrays given and returned.
    """

    flops: int
    bytes: int
    workspace: int

    def __str__(self):
        return f"{_si(self.flops)}FLOP, {_si(self.bytes)}B moved, workspace {_si(self.workspace)}B"


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a call of :func:`jax_dma.attention` costs.

    Attributes:
      forward, backward: a :class:`Work` each; the backward pass includes the gradient of bias, if there is one.
      pairs: of a query and a key, over all batch entries and query heads.
      visible: how many of these the mask and the causal rule let see each other.
      visited: how many lie in tiles that are not skipped.
      exact: whether ``visible`` and ``visited`` were counted; otherwise they are upper bounds from the shapes.
    """

    forward: Work
    backward: Work
    pairs: int
    visible: int
    visited: int
    exact: bool

    def __str__(self):
        share = lambda n: f"{100 * n / max(self.pairs, 1):.3g} %"
        at_most = "" if self.exact else "at most "
        return (
            f"forward   {self.forward}\nbackward  {self.backward}\n"
            f"of {self.pairs:,} pairs {at_most}{share(self.visible)} visible, {at_most}{share(self.visited)} computed"
        )


def cost(
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
    platform=None,
):
    """Counts the work of a call of :func:`jax_dma.attention`, forward and backward.

    Args:
      q, k, v, bias, sinks: as for ``attention``. Only shapes and dtypes are read: ``jax.ShapeDtypeStruct`` will do.
      mask: as for ``attention``. Of a concrete mask what is visible is counted, tile by tile; with
        ``jax.ShapeDtypeStruct`` in it, or while tracing, the counts are upper bounds.
      is_causal, scale, logits_soft_cap, return_lse, deterministic, implementation: as for ``attention``.
      platform: as for :func:`jax_dma.explain`.

    Returns:
      A :class:`~jax_dma.cost.Cost`. Positions that ``bias`` hides are not taken into account. Tiles are those of the
      compiled kernels, also for "xla", which skips coarser ones.
    """
    options = dict(is_causal=is_causal, scale=scale, logits_soft_cap=logits_soft_cap, deterministic=deterministic)
    explanation, call, types = checked(q, k, v, mask, bias, sinks, return_lse, implementation, platform, **options)
    concrete = all(
        hasattr(x, "__array__") and not isinstance(x, (jax.core.Tracer, jax.ShapeDtypeStruct))
        for x in jax.tree.leaves(mask)
    )
    mask = jax.tree.map(lambda x, like: np.asarray(x).reshape(like.shape), mask, types) if concrete else types
    path, (*batch, T, N, H), (S, K, Hv) = explanation.path, q.shape, v.shape[-3:]
    pairs = math.prod(batch) * N * T * S
    visible, visited, exact = _count(path, mask, batch, T, S, N, K, is_causal, concrete)
    if explanation.runs == "reference":
        visited = pairs
    forward, backward = _workspace(explanation, call, mask, q, k, v, bias)
    if sinks is not None:  # the out and lse that they are added to
        rows = math.prod(batch) * T * N
        forward += rows * (Hv * jnp.dtype(q.dtype).itemsize + jnp.dtype(compute_dtype(q.dtype)).itemsize)

    lse = jax.ShapeDtypeStruct((*batch, T, N, 2), compute_dtype(q.dtype))
    out = jax.ShapeDtypeStruct((*batch, T, N, Hv), q.dtype)
    read = _bytes(q, k, v, bias, mask)
    return Cost(
        Work(visited * 2 * (H + Hv), read + _bytes(out, lse) + 2 * forward, forward),
        Work(
            visited * (6 * H + 4 * Hv),
            2 * read - _bytes(mask) + 2 * _bytes(out, lse) + 2 * backward,
            backward,
        ),
        pairs, visible, visited, exact,
    )  # fmt: skip


def _bytes(*arrays):
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(arrays))


def _count(path, mask, batch, T, S, N, K, causal, concrete):
    """(visible pairs, pairs in tiles that are not skipped, whether they were counted)."""
    rows, copies = queries_per_tile(N // K), math.prod(batch) * N
    whole = copies * T * S
    query = np.arange(T)
    seen_by_query = np.clip(query + S - T + 1, 0, S)  # the keys that the causal rule lets each query see
    last = np.minimum((query // rows + 1) * rows, T) - 1
    to_tile = lambda n: np.minimum(-(-n // KEY_TILE) * KEY_TILE, S)
    under_causal = copies * int(seen_by_query.sum()), copies * int(to_tile(seen_by_query[last]).sum()) if T else 0
    bound = under_causal if causal else (whole, whole)
    if path.kind in ("all", "causal"):
        return *bound, True

    if path.kind == "dense":
        return (*_count_dense(mask, batch, T, S, N, K, causal, seen_by_query), True) if concrete else (*bound, False)

    if not concrete:
        visible = bound[0] if mask.live is None else min(bound[0], copies * T * min(mask.live, S))
        if path.kind == "kept keys":
            runs = -(-T // path.run_length)
            return visible, copies * runs * path.run_length * path.list_length, False
        if mask.live is None or mask.scattered:
            return visible, bound[1], False
        band = min(mask.live + rows - 1 + 2 * (KEY_TILE - 1), S)  # contiguous, and a tile cut at either end
        return visible, min(bound[1], copies * T * band), False

    start, end = np.broadcast_arrays(np.clip(mask.start, 0, T), np.clip(mask.end, 0, T))
    if causal:
        start = np.maximum(start, np.clip(np.arange(S) - (S - T), 0, T))
    each = copies // math.prod(start.shape[:-1]) if start.size else 0
    visible = each * int(np.maximum(end.astype(np.int64) - start, 0).sum())
    if path.kind == "kept keys":
        listed = kept_keys.Lists.of(
            jnp.asarray(start), jnp.asarray(end), T=T, R=path.run_length, length=path.list_length
        )
        first, last = np.asarray(listed.first), np.asarray(listed.last)
        return visible, _visited(first, last, path.run_length, each, N, K), True
    return visible, _visited(start, end, T, each, N, K), True


def _visited(start, end, T, each, N, K):
    """Pairs in tiles that the bounds of intervals [..., N|K|1, S] do not rule out."""
    rows, S = queries_per_tile(N // K), start.shape[-1]
    empty = start >= end
    tiled = lambda x, fill: np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -S % KEY_TILE)], constant_values=fill).reshape(
        *x.shape[:-1], -1, KEY_TILE
    )
    first = tiled(np.where(empty, T, start).astype(np.int64), T).min(-1)
    last = tiled(np.where(empty, 0, end).astype(np.int64), 0).max(-1)
    if start.shape[-2] not in (1, K):
        grouped = lambda x: x.reshape(*x.shape[:-2], K, N // K, x.shape[-1])
        first, last, each = grouped(first).min(-2), grouped(last).max(-2), each * (N // K)
    queries = np.maximum(np.minimum(-(-last // rows) * rows, T) - first // rows * rows, 0)
    keys = np.minimum(KEY_TILE, S - KEY_TILE * np.arange(first.shape[-1]))
    return each * int((queries * keys).sum())


def _count_dense(mask, batch, T, S, N, K, causal, seen_by_query):
    copies = math.prod(batch) * N
    if isinstance(mask, MaskPlan):
        dense = np.asarray(mask.dense())
        tiles = np.asarray(mask.tiles_by_query)
    else:
        dense, tiles = mask, np.asarray(analyse(jnp.asarray(mask), T, S, N, K)[1])
    each = copies // math.prod(dense.shape[:-2]) if dense.size else 0
    if not causal:
        visible = int(dense.sum(dtype=np.int64)) * (T // dense.shape[-2]) * (S // dense.shape[-1]) if dense.size else 0
    elif dense.shape[-2:] == (T, S):
        visible = sum(int(dense[..., t, :n].sum(dtype=np.int64)) for t, n in enumerate(seen_by_query))
    elif dense.shape[-2] == T:
        visible = int((dense[..., 0] * seen_by_query).sum())
    else:
        seen_by_key = np.clip(S - np.arange(S), 0, T)
        visible = int((dense[..., 0, :] * seen_by_key).sum())

    rows, key_tiles = queries_per_tile(N // K), -(-S // KEY_TILE)
    seen = tiles[..., 0, :]
    seen = (seen & 1) != 0 if dense.shape[-1] == 1 else np.asarray(unpack_bits(jnp.asarray(seen), key_tiles))
    first_query = rows * np.arange(-(-T // rows))
    queries, keys = np.minimum(rows, T - first_query), np.minimum(KEY_TILE, S - KEY_TILE * np.arange(key_tiles))
    area = queries[:, None] * keys
    if causal:
        area = area * (KEY_TILE * np.arange(key_tiles) <= (first_query + queries - 1 + S - T)[:, None])
    shape = (*seen.shape[:-2], *area.shape)
    visited = int((np.broadcast_to(seen, shape) * area).sum())
    return each * visible, copies // max(math.prod(seen.shape[:-2]), 1) * visited


def _workspace(explanation, call, mask, q, k, v, bias):
    """Bytes of scratch, forward and backward."""
    path, (*batch, T, N, _), (S, K, _) = explanation.path, q.shape, v.shape[-3:]
    logits = lambda rows, cols: math.prod(batch) * N * rows * cols * jnp.dtype(compute_dtype(q.dtype)).itemsize
    if explanation.runs == "reference":
        return 2 * logits(T, S), 4 * logits(T, S)
    forward = backward = 0
    operands = q, k, v, bias
    if isinstance(mask, KeyIntervals):
        forward += 16 * math.prod(mask.start.shape[:-2]) * min(mask.start.shape[-2], K) * -(-S // KEY_TILE)
    if path.kind == "kept keys":
        gathered = explanation.operands
        slots = -(-T // path.run_length) * path.list_length
        lists = math.prod(mask.start.shape[:-1]) * (4 * slots + S) * 4
        forward += _bytes(gathered[1:]) + lists
        backward += forward + _bytes(gathered[1:])  # the forward pass's are kept
        operands = gathered
    elif path.kind == "dense" and not isinstance(mask, MaskPlan):
        plan = jax.eval_shape(lambda x: analyse(x, T, S, N, K), jax.ShapeDtypeStruct(mask.shape, jnp.bool_))
        forward += _bytes(plan)
        backward += _bytes(plan)
    if explanation.runs == "xla":
        chunk = logits(min(T, xla.QUERY_CHUNK), min(S, xla.KEY_CHUNK))
        return forward + 2 * chunk, backward + 4 * chunk
    if explanation.runs == "cuda":
        q, k, v, bias = operands
        call = dataclasses.replace(call, has_bias=bias is not None, want_dbias=bias is not None)
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands if x is not None]
        kinds = path.kind in ("intervals", "kept keys"), path.kind == "dense"
        forward += _bytes(ffi.cuda_forward_workspace(q, k, v, bias, tuple(q.shape[:-3]), *kinds))
        backward += _bytes(ffi.cuda_workspace(q, k, v, bias, call, tuple(q.shape[:-3]), results))
    return forward, backward


def _si(n):
    for unit in ("", "k", "M", "G", "T"):
        if n < 1000:
            break
        n /= 1000
    else:
        unit = "P"
    return f"{n:.3g} {unit}"
