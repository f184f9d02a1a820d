"""Context parallelism: attention when the sequence itself, queries and keys, is split over a mesh axis.

Each of the n devices along the axis holds T / n queries and S / n keys, and computes the results of its queries.

* ``method="all_gather"`` brings all keys and values to every device, and sums and scatters their gradients.
* ``method="ring"`` sends them round from device to device. Each block of keys that arrives is an attention of its own;
  results are merged by their log-sum-exp. In the backward pass the gradients travel with the keys that they belong to.
  Memory is that of one block, and blocks travel while others are computed.

Under a causal rule the last queries see n times as many keys as the first. ``order="zigzag"`` evens that out: the
sequence is cut into 2n chunks, and device i holds chunks i and 2n - 1 - i. Arrays are brought into that order once, by
:func:`reorder`, and stay in it through all layers. Masks need no variants for it: a device's queries are in ascending
order, so whatever run of positions sees a key is one run of the device's queries too.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from jax_dma import checks, masks, op
from jax_dma.attention import add_sinks, check, same_shape, with_rank
from jax_dma.attention import attention as attention_of_one_device
from jax_dma.choice import names_of, serving
from jax_dma.implementations.xla import log_sum_exp
from jax_dma.masks import KeyIntervals
from jax_dma.mesh import align_varying, vary_over, varying_axes, widen_if_summed
from jax_dma.plan import MaskPlan, plan
from jax_dma.tiles import Visibility, interval_bounds

METHODS = ("all_gather", "ring")
ORDERS = ("contiguous", "zigzag")
_UNROLLED = 8  # a ring of up to so many devices is straight-line code


def attention(
    q,
    k,
    v,
    mask=None,
    bias=None,
    *,
    axis,
    method="all_gather",
    order="contiguous",
    mesh=None,
    batch_axes=None,
    head_axes=None,
    sinks=None,
    is_causal=False,
    scale=None,
    logits_soft_cap=None,
    return_lse=False,
    deterministic=False,
    implementation=None,
):
    """:func:`jax_dma.attention` of sequences that are split over a mesh axis: the same values and gradients.

    Inside a ``jax.shard_map`` in which ``axis`` is manual, arguments are this device's parts, and so are results.
    Elsewhere (under ``jax.jit``, or eagerly) arguments are whole arrays, and this function makes the ``shard_map``.

    Args:
      q, k, v: as in :func:`jax_dma.attention`; T and S are those of a device in a ``shard_map``, and n times that
        outside. With ``order="zigzag"`` the sequence is in the order that :func:`reorder` gives.
      mask: bool ``[*batch|1, N|K|1, T|1, S|1]``, or a :class:`~jax_dma.KeyIntervals` ``[*batch|1, N|K|1, S]`` with keys
        in the order of k. Its values remain positions of queries in the whole sequence, in the original order.
      bias: float ``[*batch|1, N|K|1, T|1, S|1]``, trainable. In a ``shard_map``, mask and bias that vary over queries
        have a device's queries and all keys; or all queries and a device's keys, which costs an all-to-all. Those that
        vary over keys only have either a device's keys or all.
      axis: the mesh axis (or a tuple of them) that queries and keys are split over.
      method: "all_gather" or "ring". The former is faster where all keys and values of a layer fit in memory.
      order: "contiguous", or "zigzag" for equal work under a causal rule.
      mesh: outside a ``shard_map``, the mesh; default is that of ``jax.set_mesh``.
      batch_axes, head_axes: outside a ``shard_map``, the mesh axes (a name, or a tuple of them) that the first batch
        axis and the heads are split over; arrays are resharded to fit. With explicit mesh axes the default is what q's
        type says.
      sinks: float ``[N]`` as in :func:`jax_dma.attention`; in a ``shard_map``, those of this device's heads.
      is_causal, scale, logits_soft_cap, return_lse, deterministic, implementation: as in :func:`jax_dma.attention`.

    Returns:
      out, or (out, lse), as :func:`jax_dma.attention`; split and ordered as q is.

    Raises:
      TypeError, ValueError: as :func:`jax_dma.attention`, and where the mesh does not divide a length or a number of
        heads. Second derivatives through a ring are a NotImplementedError.
    """
    for name, value, known in (("method", method, METHODS), ("order", order, ORDERS)):
        if value not in known:
            raise ValueError(f"{name} must be one of {known}, got {value!r}")
    if isinstance(mask, MaskPlan):
        raise TypeError("mask must be a bool array or KeyIntervals here, not a MaskPlan: devices plan their own parts")
    options = dict(is_causal=is_causal, scale=scale, logits_soft_cap=logits_soft_cap, deterministic=deterministic)
    call, _ = check(q, k, v, None, None, sinks=sinks, return_lse=return_lse, **options)
    call = dataclasses.replace(call, implementations=serving(names_of(implementation), call, q, k, v, bias))
    axis = _names(axis)
    if not axis:
        raise ValueError("axis must name at least one mesh axis")
    if isinstance(mask, KeyIntervals):
        start, end = same_shape(*(with_rank(x, q.ndim - 1) for x in (mask.start, mask.end)))
        mask = dataclasses.replace(mask, start=start, end=end)
    local = functools.partial(_attention, call=call, axis=axis, method=method, order=order)
    split = _Split.of(q, mesh, axis, batch_axes, head_axes)
    with jax.named_scope("jax_dma.context.attention"):
        arguments = (q, k, v, mask, bias, sinks)
        results = local(*arguments) if split is None else split.run(local, *arguments)
    return results if return_lse else results[0]


# ------------------------------------------------------------------------------------------------ order of the sequence


def reorder(x, shards, axis=None, *, order="zigzag"):
    """Brings a sequence into the order in which equal parts of it are equal work under a causal rule.

    Args:
      x: an array; or a :class:`~jax_dma.KeyIntervals`, whose keys are reordered.
      shards: n, over how many devices the sequence is going to be split.
      axis: which axis is the sequence, or a tuple of axes (``(-2, -1)`` for a mask or bias); those of size 1 are left
        alone.
      order: "zigzag", or "contiguous" for no change.

    Returns:
      x, reordered.
    """
    return _permute(x, axis, functools.partial(_chunk_order, shards=shards, order=order))


def restore(x, shards, axis=None, *, order="zigzag"):
    """The inverse of :func:`reorder`, with the same arguments: from that order back to the original one."""
    return _permute(x, axis, lambda length: np.argsort(_chunk_order(length, shards=shards, order=order)))


def positions(length, shards, *, order="zigzag"):
    """Where each place of a reordered sequence was, for position embeddings.

    Args:
      length: of the whole sequence, a multiple of 2n in zigzag order.
      shards: n, over how many devices it is split.
      order: "zigzag" or "contiguous".

    Returns:
      int32 ``[length]``.
    """
    chunks = _chunk_order(length, shards, order)
    places = chunks[:, None] * (length // len(chunks)) + np.arange(length // len(chunks))
    return jnp.asarray(places.reshape(-1), jnp.int32)


def local_positions(length, axis, *, order="zigzag"):
    """The positions of the part of the sequence that this device holds; to be called in a ``jax.shard_map``.

    Args:
      length: of this device's part.
      axis: the mesh axis (or a tuple of them) that the sequence is split over.
      order: "zigzag" or "contiguous".

    Returns:
      int32 ``[length]``.
    """
    names = _names(axis)
    return _positions_of(jax.lax.axis_index(names), length, jax.lax.axis_size(names), order)


def top_k(
    scores,
    window,
    *,
    axis,
    order="contiguous",
    mesh=None,
    query_length=None,
    is_causal=True,
    segment_ids=None,
    valid=None,
):
    """:func:`jax_dma.masks.top_k` of scores whose keys are split over a mesh axis and in the given order.

    Args:
      scores: float ``[*batch, K, S]``, S being that of a device inside a ``jax.shard_map`` (scores are gathered: one
        number per key), and the whole one elsewhere.
      window, query_length, is_causal: as in :func:`jax_dma.masks.top_k`; query_length is that of the whole sequence.
      axis, order, mesh: as in :func:`attention`.
      segment_ids, valid: as in :func:`jax_dma.masks.top_k`, split and ordered like scores.

    Returns:
      KeyIntervals of all S keys, in the given order, which are a mask for :func:`attention`.
    """
    names, scores = _names(axis), jax.lax.stop_gradient(jnp.asarray(scores))
    manual = set(names) <= _manual_axes()
    shards = jax.lax.axis_size(names) if manual else _size(_mesh(mesh), names)

    def whole(x):
        if x is None:
            return None
        x = jnp.asarray(x)
        x = jax.lax.all_gather(x, names, axis=x.ndim - 1, tiled=True) if manual else x
        return restore(x, shards, -1, order=order)

    scores, segment_ids, valid = whole(scores), whole(segment_ids), whole(valid)
    mask = masks.top_k(scores, window, query_length, is_causal=is_causal, segment_ids=segment_ids, valid=valid)
    return reorder(mask, shards, order=order)


def _chunk_order(length, shards, order):
    """The chunks of a sequence in the order in which devices hold them."""
    if order not in ORDERS:
        raise ValueError(f"order must be one of {ORDERS}, got {order!r}")
    per_shard = 2 if order == "zigzag" else 1
    if length % (per_shard * shards):
        raise ValueError(
            f"a sequence of {length} cannot be cut into {per_shard} equal chunks for each of {shards} devices; pad it"
        )
    own = [_chunks(i, shards, order) for i in range(shards)]
    return np.array(own, np.int32).reshape(-1)


def _chunks(i, shards, order):
    """The chunks that device i holds."""
    return (i, 2 * shards - 1 - i) if order == "zigzag" else (i,)


def _permute(x, axis, chunk_order):
    if isinstance(x, KeyIntervals):
        move = lambda x: _permute(x, -1, chunk_order)
        return dataclasses.replace(x, start=move(x.start), end=move(x.end))
    if axis is None:
        raise TypeError("axis must say which axis of the array is the sequence")
    for one in axis if isinstance(axis, tuple) else (axis,):
        length = x.shape[one]
        if length != 1:
            chunks, one = chunk_order(length), one % x.ndim
            cut = x.reshape(*x.shape[:one], len(chunks), length // len(chunks), *x.shape[one + 1 :])
            x = jnp.take(cut, chunks, axis=one).reshape(x.shape)
    return x


def _positions_of(i, length, shards, order):
    """The original positions of the part of ``length`` that device i holds."""
    chunks = _chunks(i, shards, order)
    within = jnp.arange(length // len(chunks), dtype=jnp.int32)
    return jnp.concatenate([chunk * len(within) + within for chunk in chunks])


def _places_before(position, i, length, shards, order):
    """How many places of device i's part (of ``length``) are before a position of the whole sequence."""
    chunks = _chunks(i, shards, order)
    size = length // len(chunks)
    return sum(jnp.clip(position - chunk * size, 0, size) for chunk in chunks)


# --------------------------------------------------------------------------------------------------- making a shard_map


def _names(axes):
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _manual_axes():
    return set(jax.sharding.get_abstract_mesh().manual_axes)


def _mesh(mesh):
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if mesh.empty:
        raise ValueError("outside a jax.shard_map, pass mesh=, or call this under jax.set_mesh(mesh)")
    return mesh


def _size(mesh, names):
    unknown = [name for name in names if name not in mesh.shape]
    if unknown:
        raise ValueError(f"the mesh has axes {tuple(mesh.axis_names)}, and not {unknown[0]!r}")
    return math.prod(mesh.shape[name] for name in names)


@dataclasses.dataclass(frozen=True)
class _Split:
    """The shard_map to be made."""

    mesh: object
    explicit: tuple  # of its axes
    axis: tuple
    batch: tuple
    heads: tuple

    @classmethod
    def of(cls, q, mesh, axis, batch_axes, head_axes):
        """None inside a shard_map."""
        manual = _manual_axes()
        batch, heads = _names(batch_axes), _names(head_axes)
        if manual:
            if missing := [name for name in (*axis, *batch, *heads) if name not in manual]:
                raise ValueError(
                    f"the enclosing jax.shard_map is manual over {sorted(manual)}, and not over {missing[0]!r}: make "
                    "it so (derivatives of nested ones fail in JAX), or call this outside"
                )
            return None
        mesh = _mesh(mesh)
        explicit = tuple(a for a, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit)
        if explicit:
            spec = (*jax.typeof(q).sharding.spec, *[None] * q.ndim)
            batch = _names(spec[0]) if batch_axes is None and q.ndim > 3 else batch
            heads = _names(spec[q.ndim - 2]) if head_axes is None else heads
        for names in (axis, batch, heads):
            _size(mesh, names)
        return cls(mesh, explicit, axis, batch, heads)

    def spec(self, *names):
        return P(*(axes or None for axes in names))

    def run(self, local, q, k, v, mask, bias, sinks):
        """``local`` of each device's part."""
        rank = q.ndim - 3
        if isinstance(mask, KeyIntervals):
            checks.check_intervals(mask.start, mask.end, mask.live, q.shape, k.shape)
        elif mask is not None:
            checks.check_dense_mask(mask, q.shape, k.shape)
        if bias is not None:
            checks.check_bias(bias, q.shape, k.shape)
        for name, length, axes in (
            ("T", q.shape[-3], self.axis), ("S", k.shape[-3], self.axis), ("N", q.shape[-2], self.heads),
            ("K", k.shape[-2], self.heads), ("the batch", q.shape[0] if rank else 1, self.batch),
        ):  # fmt: skip
            if length % _size(self.mesh, axes):
                raise ValueError(
                    f"{name} = {length} cannot be split over the {_size(self.mesh, axes)} devices of {axes}: pad it, "
                    "or split it over fewer"
                )
        leading = lambda shape: [self.batch if i == 0 and size > 1 else () for i, size in enumerate(shape[:rank])]
        array = self.spec(*leading(q.shape), self.axis, self.heads, ())
        rows = self.spec(*leading(q.shape), self.axis, self.heads)

        def broadcast(x):
            heads = self.heads if x.shape[rank] > 1 else ()
            if x.ndim == rank + 2:  # intervals: small, and needed whole or in turn by all
                return self.spec(*leading(x.shape), heads, ())
            T, S = x.shape[-2:]
            return self.spec(*leading(x.shape), heads, self.axis if T > 1 else (), self.axis if T == 1 < S else ())

        of_sinks = None if sinks is None else self.spec(self.heads)
        specs = (array, array, array, jax.tree.map(broadcast, mask), jax.tree.map(broadcast, bias), of_sinks)
        operands = (q, k, v, mask, bias, sinks)
        if self.explicit:
            typed = lambda spec: P(*(tuple(a for a in axes or () if a in self.explicit) or None for axes in spec))
            operands = jax.tree.map(lambda x, spec: jax.sharding.reshard(x, typed(spec)), operands, specs)
        mesh = None if isinstance(self.mesh, AbstractMesh) else self.mesh
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(array, rows))(*operands)


# ------------------------------------------------------------------------------------------------------ on each device


class _Keys(NamedTuple):
    """What belongs to the keys of one device, and moves with them."""

    k: jax.Array
    v: jax.Array
    mask: jax.Array | None  # [..., 1, S]
    start: jax.Array | None
    end: jax.Array | None
    bias: jax.Array | None  # [..., 1, S]


class _Rows(NamedTuple):
    """What does not move: it has a device's queries (or one for all), and all keys (or one for all)."""

    mask: jax.Array | None
    start: jax.Array | None
    end: jax.Array | None
    bias: jax.Array | None


@dataclasses.dataclass(frozen=True)
class _Context:
    """The static half of a call on one device of n. T and S are those of a device."""

    call: op.Call  # not causal: intervals say it
    causal: bool
    live: int | None  # of the mask's intervals, and
    scattered: bool
    axis: tuple
    order: str
    n: int
    T: int
    S: int

    def intervals(self, start, end, keys, rank):
        """Which of this device's queries see the keys at some positions: (start, end), or (None, None) for all."""
        if start is None and not self.causal:
            return None, None
        if start is None:
            start, end = jnp.int32(0), jnp.int32(self.n * self.T)
        if self.causal:
            first = keys - self.n * (self.S - self.T)  # the query at the position of each key
            start = jnp.maximum(start, first.reshape((1,) * (rank + 1) + first.shape))
        end = jnp.broadcast_to(end, start.shape)
        me = jax.lax.axis_index(self.axis)
        return tuple(_places_before(x, me, self.T, self.n, self.order) for x in (start, end))

    def visibility(self, mask, start, end, keys, q, k):
        """What kernels read, of a dense mask and of intervals."""
        visibility = Visibility()
        if mask is not None:
            planned = plan(mask, q, k)
            visibility = Visibility(planned.bits, planned.tiles_by_query, planned.tiles_by_key)
        start, end = self.intervals(start, end, keys, q.ndim - 3)
        if start is None:
            return visibility
        return visibility._replace(start=start, end=end, bounds=interval_bounds(start, end, q.shape[-2], k.shape[-2]))

    def positions(self, i):
        """Those of device i's keys."""
        return _positions_of(i, self.S, self.n, self.order)


def _attention(q, k, v, mask, bias, sinks, *, call, axis, method, order):
    """(out, lse) of this device's queries."""
    n = jax.lax.axis_size(axis)
    T, S = q.shape[-3], k.shape[-3]
    for name, length in (("T", T), ("S", S)):
        if order == "zigzag" and length % 2:
            raise ValueError(f'order="zigzag" needs an even {name} on each device, got {length}')
    live, scattered = getattr(mask, "live", None), getattr(mask, "scattered", False)
    # Below the primitives `xla` stands in for `reference`: the same function in less memory.
    names = tuple("xla" if name == "reference" else name for name in call.implementations)
    kernels = dataclasses.replace(call, causal=False, implementations=names)
    context = _Context(kernels, call.causal, live, scattered, axis, order, n, T, S)
    start, end, dense = None, None, None
    if isinstance(mask, KeyIntervals):
        start, end = mask.start, mask.end
        cols = n * S if start.shape[-1] == n * S else S
        checks.check_intervals(start, end, mask.live, q.shape, _with_keys(k, cols))
    elif mask is not None:
        dense = _own_rows("mask", mask, context)
        checks.check_dense_mask(dense, q.shape, _with_keys(k, _columns(dense, context)))
    if bias is not None:
        bias = _own_rows("bias", bias, context)
        checks.check_bias(bias, q.shape, _with_keys(k, _columns(bias, context)))
    moves = lambda x: x if x is not None and x.shape[-1] == S and (S > 1 or n == 1) else None
    stays = lambda x: x if moves(x) is None else None
    keys = _Keys(k, v, moves(dense), moves(start), moves(end), moves(bias))
    rows = _Rows(stays(dense), stays(start), stays(end), stays(bias))
    if method == "ring":
        out, lse = _ring(context, q, keys, rows)
        lse = lse[..., 0]
    else:
        # All keys and values are brought here again in the backward pass, rather than kept.
        kept = jax.checkpoint_policies.save_only_these_names("jax_dma_out", "jax_dma_lse", "jax_dma_plan")
        out, lse = jax.checkpoint(functools.partial(_all_gather, context), policy=kept)(q, keys, rows)
    return (out, lse) if sinks is None else add_sinks(out, lse, sinks)


def _with_keys(k, length):
    return (*k.shape[:-3], length, *k.shape[-2:])


def _columns(x, context):
    return context.S if x.shape[-1] in (1, context.S) else context.n * context.S


def _own_rows(name, x, context):
    """A mask or bias, with this device's queries if it varies over them."""
    n, T, S = context.n, context.T, context.S
    shape = getattr(x, "shape", ())
    if n == 1 or len(shape) < 2:  # what is no array at all is refused by the checks
        return x
    rows, cols = shape[-2:]
    if rows == n * T > 1:
        if cols == S > 1:
            return jax.lax.all_to_all(x, context.axis, x.ndim - 2, x.ndim - 1, tiled=True)
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(context.axis) * T, T, x.ndim - 2)
    if rows == T > 1 and cols == S > 1:
        raise ValueError(
            f"{name} has this device's {T} queries and only its {S} keys, of shape {shape}; queries see the keys of "
            f"all {n} devices. Split it along queries (all {n * S} keys) or along keys (all {n * T} queries)"
        )
    return x


# ---------------------------------------------------------------------------------------------------------- all-gather


def _all_gather(context, q, keys, rows):
    axis, n = context.axis, context.n
    gather = lambda x, dim: None if x is None else _gathered(x, axis, x.ndim + dim)
    k, v = gather(keys.k, -3), gather(keys.v, -3)
    mask = rows.mask if keys.mask is None else gather(keys.mask, -1)
    bias = rows.bias if keys.bias is None else gather(keys.bias, -1)
    start, end = (s if m is None else gather(m, -1) for s, m in ((rows.start, keys.start), (rows.end, keys.end)))
    places = positions(n * context.S, n, order=context.order)
    call = context.call
    if mask is None:  # intervals at most, for which there may be more than kernels
        start, end = context.intervals(start, end, places, q.ndim - 3)
        # Where two chunks meet, queries that stand side by side can see twice as many keys.
        live = None if context.live is None else context.live * len(_chunks(0, n, context.order))
        mask = None if start is None else KeyIntervals(start, end, live, context.scattered)
        return attention_of_one_device(
            q, k, v, mask, bias, scale=call.scale, logits_soft_cap=call.softcap or None, return_lse=True,
            deterministic=call.deterministic, implementation=call.implementations,
        )  # fmt: skip
    visibility = context.visibility(mask, start, end, places, q, k)
    bias, bias_dtype = widen_if_summed(bias, (q, k, v, visibility))
    q, k, v, visibility, bias = align_varying((q, k, v, visibility, bias))
    out, lse = op.attend(dataclasses.replace(call, bias_dtype=bias_dtype), q, k, v, visibility, bias)
    return out, lse[..., 0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(x, axis, dim):
    """The parts of all devices; its derivative sums in float32."""
    return jax.lax.all_gather(x, axis, axis=dim, tiled=True)


def _gathered_backward(axis, dim, _, cotangent):
    wide = cotangent.astype(jnp.promote_types(cotangent.dtype, jnp.float32))
    return (jax.lax.psum_scatter(wide, axis, scatter_dimension=dim, tiled=True).astype(cotangent.dtype),)


_gathered.defvjp(lambda x, axis, dim: (_gathered(x, axis, dim), None), _gathered_backward)


# ---------------------------------------------------------------------------------------------------------------- ring


def _ring(context, q, keys, rows):
    # dbias of what is not written to one block of columns is summed, over blocks or over devices: in float32.
    bias, which = (keys.bias, "keys") if keys.bias is not None else (rows.bias, "rows")
    summed = bias is not None and (which == "keys" or bias.shape[-1] == 1) and context.n > 1
    bias, bias_dtype = widen_if_summed(bias, (q, keys, rows), summed)
    keys, rows = (keys._replace(bias=bias), rows) if which == "keys" else (keys, rows._replace(bias=bias))
    me = jax.lax.axis_index(context.axis)
    q, keys, rows, _ = align_varying((q, keys, rows, me))
    call = dataclasses.replace(context.call, bias_dtype=bias_dtype)
    return _ring_attention(dataclasses.replace(context, call=call), q, keys, rows)


def _onwards(x, context):
    """What the neighbour sent: everything on the ring moves on by one device."""
    to_next = [(i, (i + 1) % context.n) for i in range(context.n)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, context.axis, to_next), x)


def _owner(context, step):
    """Whose keys are here after so many steps."""
    return (jax.lax.axis_index(context.axis) - step) % context.n


def _columns_of(x, owner, context):
    """The part of an array that belongs to one device's keys."""
    if x is None or x.shape[-1] == 1 or context.n == 1:
        return x
    return jax.lax.dynamic_slice_in_dim(x, owner * context.S, context.S, x.ndim - 1)


def _block(context, step, q, keys, rows):
    """k, v, visibility and bias of the block of keys that is here after so many steps."""
    owner = _owner(context, step)
    stays = jax.tree.map(lambda x: _columns_of(x, owner, context), rows)
    mask, start, end, bias = (s if m is None else m for s, m in zip(stays, keys[2:]))
    visibility = context.visibility(mask, start, end, context.positions(owner), q, keys.k)
    aligned = vary_over(bias, varying_axes(q)) if bias is not None else None
    return keys.k, keys.v, jax.tree.map(lambda x: vary_over(x, varying_axes(q)), visibility), aligned


def _steps(context, body, state):
    """state after body(state, step) for the steps 1 .. n - 1."""
    if context.n == 1:
        return state
    scan = jax.lax.scan(
        lambda state, step: (body(state, step), None), state, jnp.arange(1, context.n, dtype=jnp.int32),
        unroll=context.n - 1 if context.n <= _UNROLLED else 1,
    )  # fmt: skip
    return scan[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_attention(context, q, keys, rows):
    out, lse = _ring_forward(context, q, keys, rows)
    return out.astype(q.dtype), lse


def _ring_forward(context, q, keys, rows):
    """out, in float32, and lse [..., 2]."""

    def attend(keys, step):
        k, v, visibility, bias = _block(context, step, q, keys, rows)
        out, lse = op.attend(context.call, q, k, v, visibility, bias)
        return out.astype(lse.dtype), lse

    def body(state, step):
        keys, out, lse = state
        following = _onwards(keys, context)  # on its way while the block that is here is computed
        return following, *_merge(out, lse, *attend(keys, step))

    following = _onwards(keys, context) if context.n > 1 else keys
    _, out, lse = _steps(context, body, (following, *attend(keys, 0)))
    return out, lse


def _merge(out, lse, more_out, more_lse):
    """Attention to the keys of two disjoint blocks, from that to each."""
    base = jnp.maximum(lse[..., 0], more_lse[..., 0])
    empty = base == -jnp.inf
    base = jnp.where(empty, 0, base)
    share, more_share = (jnp.exp(x[..., 0] - base + x[..., 1]) for x in (lse, more_lse))
    total = jnp.where(empty, 1, share + more_share)
    merged = (out * share[..., None] + more_out * more_share[..., None]) / total[..., None]
    return merged, log_sum_exp(base, total, empty)


def _ring_attention_forward(context, *arguments):
    is_bias = lambda x: hasattr(x, "perturbed")
    biases = [x for tree in arguments[1:] for x in jax.tree.leaves(tree.bias, is_leaf=is_bias)]
    call = dataclasses.replace(context.call, want_dbias=any(x.perturbed for x in biases))
    q, keys, rows = jax.custom_derivatives.custom_vjp_primal_tree_values(arguments)
    out, lse = _ring_attention(context, q, keys, rows)
    out, lse = checkpoint_name(out, "jax_dma_out"), checkpoint_name(lse, "jax_dma_lse")
    keys, rows = (x._replace(bias=op.narrow(call, x.bias)) for x in (keys, rows))
    return (out, lse), (_Static(call), q, keys, rows, out, lse)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    call: op.Call


def _ring_attention_backward(context, residuals, cotangents):
    static, q, keys, rows, out, lse = residuals
    context = dataclasses.replace(context, call=static.call)
    dout, dlse = (vary_over(x, varying_axes(out)) for x in op.cotangents_of(cotangents))
    # Without a barrier XLA finds the blocks of the forward pass again, and keeps them all for it.
    q, keys, rows, dout = jax.lax.optimization_barrier((q, keys, rows, dout))
    dq, dk, dv, dbias_of_keys, dbias_of_rows = _ring_gradient(context, q, keys, rows, out, lse, dout, dlse)
    nothing = (None,) * 3
    return dq, _Keys(dk, dv, *nothing, dbias_of_keys), _Rows(*nothing, dbias_of_rows)


_ring_attention.defvjp(_ring_attention_forward, _ring_attention_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_gradient(context, q, keys, rows, out, lse, dout, dlse):
    """(dq, dk, dv, dbias of what moves, dbias of what stays)."""
    call = context.call
    dtype = lse.dtype
    f32 = lambda x: x.astype(dtype)
    moving_bias, staying_bias = (call.want_dbias and x.bias is not None for x in (keys, rows))
    by_columns = staying_bias and rows.bias.shape[-1] > 1 and context.n > 1

    def gradients(keys, step):
        k, v, visibility, bias = _block(context, step, q, keys, rows)
        return op.attend_gradient(call, q, k, v, visibility, op.wide(call, bias), out, lse, dout, dlse)

    def found(parts, dbias, step):
        """dq, what goes round the ring, and dbias of what stays, with one more block's part in the latter."""
        dq, dk, dv, *more = parts
        if by_columns:
            at = _owner(context, step) * context.S
            dbias = jax.lax.dynamic_update_slice_in_dim(dbias, more[0].astype(dbias.dtype), at, dbias.ndim - 1)
        elif staying_bias:
            dbias = f32(more[0]) if dbias is None else dbias + f32(more[0])
        return f32(dq), [f32(dk), f32(dv), *map(f32, more if moving_bias else [])], dbias

    def body(state, step):
        keys, dq, travelling, dbias = state
        following, travelling = _onwards((keys, travelling), context)  # on their way during the computation
        more_dq, more, dbias = found(gradients(keys, step), dbias, step)
        return following, dq + more_dq, [a + b for a, b in zip(travelling, more)], dbias

    empty = jnp.zeros_like(op.wide(call, rows.bias)) if by_columns else None
    following = _onwards(keys, context) if context.n > 1 else keys
    state = found(gradients(keys, 0), empty, 0)
    _, dq, travelling, dbias = _steps(context, body, (following, *state))
    dk, dv, *dbias_of_keys = _onwards(travelling, context) if context.n > 1 else travelling
    to = lambda x, like: None if x is None else x.astype(op.wide(call, like).dtype)
    return (
        dq.astype(q.dtype), dk.astype(keys.k.dtype), dv.astype(keys.v.dtype),
        to(dbias_of_keys[0] if dbias_of_keys else None, keys.bias), to(dbias, rows.bias),
    )  # fmt: skip


def _no_second_derivative(*_):
    raise NotImplementedError(
        'second derivatives of context-parallel attention need method="all_gather": a ring has none'
    )


_ring_gradient.defvjp(_no_second_derivative, _no_second_derivative)
