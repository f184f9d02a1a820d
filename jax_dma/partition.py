"""How a call is split over a mesh: which mesh axes each operand keeps, what a shard computes, what is summed.

XLA cannot see into a kernel: left alone it gathers every operand. So what the primitives lower to is wrapped in
``jax.experimental.custom_partitioning``, which asks :func:`_layout` at compile time. Batch axes and heads are
independent; queries are too, once a shard knows its row offset. Keys, and the head dimension, are kept whole.

Shardy's own means for the rest are not used because they are silently ignored: ``reduction_factors`` insert no
all-reduce, and ``need_replication_factors`` leave an operand sharded. Specs are enforced here, and sums made here.
"""

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jax_dma.tiles import Visibility, interval_bounds, pack_bits, queries_per_tile, unpack_bits

# The axes after the batch axes: t queries, u tiles of queries, n heads (N, K or 1), "." whole on every device.
_AXES = {
    "q": "tn.",
    "k": ".n.",
    "v": ".n.",
    "bits": "nt.",
    "tiles_by_query": "nu..",
    "tiles_by_key": "n...",
    "start": "n.",
    "end": "n.",
    "bounds": "n..",
    "bias": "nt.",
    "out": "tn.",
    "lse": "tn",
}


def operand_names(call, backward):
    """What each operand of a primitive is."""
    visibility = [name for name, present in zip(Visibility._fields, call.visibility) if present]
    return ["q", "k", "v", *visibility, *["bias"] * call.has_bias, *["out", "lse", "out", "lse"] * backward]


def result_names(call, backward):
    """What each result of a primitive is shaped like."""
    return ["q", "k", "v", *["bias"] * call.want_dbias] if backward else ["out", "lse"]


class _Layout(NamedTuple):
    """The mesh axes that split a call."""

    batch: tuple  # for each batch axis
    queries: tuple
    kv_heads: tuple  # query and key/value heads together
    group: tuple  # the query heads of one key/value head, which is then on several devices

    def of(self, name, shape, sizes):
        """The PartitionSpec of an array: an axis that is broadcast is on every device."""
        leading = [axes if size == full else () for size, full, axes in zip(shape, sizes.batch, self.batch)]
        trailing = zip(_AXES[name], shape[len(sizes.batch) :])
        return PartitionSpec(*(axes or None for axes in (*leading, *(self._axis(*x, sizes) for x in trailing))))

    def _axis(self, letter, size, sizes):
        if letter == "." or size == 1:
            return ()
        if letter in "tu":
            return self.queries
        return self.kv_heads if size == sizes.K else self.kv_heads + self.group

    def missing(self, spec):
        """The axes that split the call but not the array with this spec: over them it is copied, or to be summed."""
        used = {name for axes in spec for name in axes or ()}
        return tuple(a for a in (*sum(self.batch, ()), *self.queries, *self.kv_heads, *self.group) if a not in used)


class _Sizes(NamedTuple):
    batch: tuple
    T: int
    S: int
    N: int
    K: int


def _sizes(operands):
    q, k, *_ = operands
    batch = jnp.broadcast_shapes(*(x.shape[: len(q.shape) - 3] for x in operands))
    return _Sizes(batch, T=q.shape[-3], S=k.shape[-3], N=q.shape[-2], K=k.shape[-2])


def _layout(call, mesh, operands):
    """How to split a call whose operands come sharded so. What cannot be split is left whole, and XLA reshards."""
    sizes = _sizes(operands)
    q, _, _, visibility, _, _ = call.unflatten(operands)
    taken = set()

    def claim(axes, fits):
        """The longest prefix of the axes that fits, none of which splits anything else."""
        axes = list(itertools.takewhile(lambda a: a not in taken, axes))
        while axes and not fits(math.prod(mesh.shape[a] for a in axes)):
            axes.pop()
        taken.update(axes)
        return tuple(axes)

    batch = []
    for axis, size in enumerate(sizes.batch):
        full = next(x for x in operands if x.shape[axis] == size)  # q, but for an axis that vmap added without it
        batch.append(claim(_spec(full, mesh)[axis], lambda n: size > 1 and size % n == 0))
    # Bitmaps of tiles can be cut between tiles only, and a tile is made for all heads of a group.
    tiled = visibility.bits is not None and visibility.bits.shape[-2] > 1
    rows = queries_per_tile(sizes.N // sizes.K) if tiled else 1
    queries = claim(_spec(q, mesh)[-3], lambda n: sizes.T > 1 and sizes.T % (n * rows) == 0)
    heads = _spec(q, mesh)[-2]
    kv_heads = claim(heads, lambda n: sizes.K % n == 0)
    group = ()
    if math.prod(mesh.shape[a] for a in kv_heads) == sizes.K and not tiled:
        group = claim(heads[len(kv_heads) :], lambda n: sizes.N // sizes.K % n == 0)
    return _Layout(tuple(batch), queries, kv_heads, group)


def _spec(x, mesh):
    """For each axis of an array the mesh axes that it is split over.

    Read off where each device's part begins, because JAX's own decoding fails where a mesh axis splits an array axis
    in part only (heads that came out of a reshape, say). Such an axis counts as not splitting it.
    """
    if x.sharding is None or 0 in x.shape:
        return [()] * len(x.shape)
    parts = x.sharding.devices_indices_map(tuple(x.shape))
    starts = np.array([[part.start or 0 for part in parts[device]] for device in mesh.devices.flat])
    starts = starts.reshape(*mesh.devices.shape, len(x.shape))
    strides = {}
    for position, name in enumerate(mesh.axis_names):
        along = np.moveaxis(starts, position, 0).reshape(mesh.shape[name], -1, len(x.shape))[:, 0]
        for axis in range(len(x.shape)):
            if len(along) > 1 and len(set(along[:, axis])) == len(along):
                strides[axis, name] = along[1, axis] - along[0, axis]
    in_order = sorted(strides, key=strides.get, reverse=True)
    return [tuple(name for a, name in in_order if a == axis) for axis in range(len(x.shape))]


def partitioned(run, call, operands, backward):
    """``run(call, *operands)``, split over whatever mesh the program is compiled for.

    On one device, and inside a fully manual ``jax.shard_map``, JAX puts the function itself in the program.
    """
    names = operand_names(call, backward)

    def specs(mesh, operands, results):
        layout, sizes = _layout(call, mesh, operands), _sizes(operands)
        in_specs = [layout.of(name, x.shape, sizes) for name, x in zip(names, operands)]
        return layout, in_specs, [layout.of(n, x.shape, sizes) for n, x in zip(result_names(call, backward), results)]

    def partition(mesh, operands, results):
        mesh = _some_mesh(mesh, operands)
        layout, in_specs, out_specs = specs(mesh, operands, results)
        sums = [layout.missing(spec) if backward else () for spec in out_specs]
        shards = math.prod(mesh.shape[a] for a in layout.queries)

        def shard(*operands):
            # Tracing must not see the mesh of an enclosing jax.set_mesh: a sum over its axes would be refused.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                local, operands = _localise(call, operands, layout.queries, shards)
                return tuple(_sum_over(run(local, *operands), sums))

        named = lambda specs: tuple(NamedSharding(mesh, spec) for spec in specs)
        return mesh, shard, named(out_specs), named(in_specs)

    def infer(mesh, operands, results):
        mesh = _some_mesh(mesh, operands)
        return tuple(NamedSharding(mesh, spec) for spec in specs(mesh, operands, results)[2])

    whole = custom_partitioning(lambda *operands: tuple(run(call, *operands)))
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]  # the rule outlives this trace
    rule = lambda *_: _sharding_rule(call, types, backward)
    whole.def_partition(
        partition=partition, infer_sharding_from_operands=infer, sharding_rule=rule, decode_shardings=False
    )
    return list(whole(*operands))


def _some_mesh(mesh, operands):
    """The mesh; where shardings name none, one to keep everything whole on."""
    if not mesh.empty:
        return mesh
    devices = sorted(operands[0].sharding.device_set, key=lambda device: device.id)
    return Mesh(devices, ("jax_dma",))


def _sum_over(results, axes):
    """Each result summed over its axes; those with the same axes in one go, in f32 where it is a bias's gradient."""
    results = list(results)
    for some in dict.fromkeys(a for a in axes if a):
        chosen = [i for i, a in enumerate(axes) if a == some]
        wide = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))
        summed = jax.lax.psum([wide(results[i]) for i in chosen], some)
        for i, x in zip(chosen, summed):
            results[i] = x.astype(results[i].dtype)
    return results


def _localise(call, operands, axes, shards):
    """The call, and its operands, as a shard of the queries sees them: rows are counted from the shard's first."""
    if not axes:
        return call, operands
    q, k, v, visibility, bias, rest = call.unflatten(operands)
    (T, N), (S, K) = q.shape[-3:-1], k.shape[-3:-1]
    offset = jax.lax.axis_index(axes) * T
    if visibility.bits is not None and visibility.bits.shape[-2] > 1:
        visibility = visibility._replace(tiles_by_key=_transpose_tiles(visibility))
    if call.causal or visibility.start is not None:
        start, end = visibility.start, visibility.end
        if start is None:
            start, end = jnp.int32(0), jnp.int32(T * shards)
        if call.causal:  # key s is visible from row s - (S - T) on
            first = jnp.arange(S, dtype=jnp.int32) - (S - T * shards)
            start = jnp.maximum(start, first.reshape((1,) * (q.ndim - 2) + (S,)))
        start, end = (jnp.clip(x, offset, offset + T) - offset for x in (start, jnp.broadcast_to(end, start.shape)))
        visibility = visibility._replace(start=start, end=end, bounds=interval_bounds(start, end, N, K))
        call = dataclasses.replace(call, causal=False, visibility=tuple(x is not None for x in visibility))
    return call, [x for x in (q, k, v, *visibility, bias, *rest) if x is not None]


def _transpose_tiles(visibility):
    """tiles_by_key of a shard's rows, from its tiles_by_query (both as :func:`jax_dma.tiles.analyse` makes them)."""
    by_query, key_tiles = visibility.tiles_by_query, visibility.tiles_by_key.shape[-3]
    classes = unpack_bits(by_query, key_tiles) if key_tiles > 1 else (by_query[..., :1] & 1) != 0
    classes = jnp.moveaxis(classes, -1, -3).swapaxes(-1, -2)  # [..., query tiles, 2, key tiles] to [..., key, 2, query]
    query_tiles = by_query.shape[-3]
    if query_tiles == 1:
        return jnp.where(classes, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
    return pack_bits(classes)[..., : -(-query_tiles // 32)]


def _sharding_rule(call, operands, backward):
    """What Shardy may propagate: an einsum over batch axes, queries and heads; every other axis stands for itself."""
    sizes = _sizes(operands)
    names, results = operand_names(call, backward), result_names(call, backward)
    fresh = (f"x{i}" for i in itertools.count())
    heads = {sizes.N: "(k g)", sizes.K: "k"} if 1 < sizes.K < sizes.N else {sizes.N: "n"}

    def term(name, shape):
        rank = len(sizes.batch)
        factors = [f"b{i}" if size == sizes.batch[i] > 1 else next(fresh) for i, size in enumerate(shape[:rank])]
        for letter, size in zip(_AXES[name], shape[rank:]):
            known = {"t": "t", "n": heads.get(size)}.get(letter) if size > 1 else None
            factors.append(known or next(fresh))
        return " ".join(factors)

    shapes = dict(zip(names, (x.shape for x in operands)))
    left = ", ".join(term(name, x.shape) for name, x in zip(names, operands))
    # Results have every batch axis in full, but for dbias, which has those in full that vmap added.
    full = {"q": 3, "k": 3, "v": 3, "bias": 3, "out": 3, "lse": 2}
    shapes["out"], shapes["lse"] = (sizes.T, sizes.N, shapes["v"][-1]), (sizes.T, sizes.N)
    shapes = {name: (*sizes.batch, *shapes[name][-rank:]) for name, rank in full.items() if name in shapes}
    if call.want_dbias:
        bias = operands[names.index("bias")].shape
        shapes["bias"] = (*sizes.batch[: call.vmapped], *bias[call.vmapped :])
    right = ", ".join(term(name, shapes[name]) for name in results)
    rule = f"{left} -> {right}"
    return rule, ({"g": sizes.N // sizes.K} if "(k g)" in rule else {})


@functools.cache
def marker():
    """A jaxpr with a custom_partitioning in it, for a static parameter of the primitives.

    JAX tells a custom_partitioning the devices only if it finds one in the program before lowering it, and ours come
    into being as the primitives are lowered.
    """

    @custom_partitioning
    def identity(x):
        return x

    identity.def_partition(
        partition=lambda mesh, operands, result: (mesh, lambda x: x, result.sharding, (operands[0].sharding,)),
        infer_sharding_from_operands=lambda mesh, operands, result: operands[0].sharding,
        sharding_rule="i -> i",
    )
    return jax.make_jaxpr(identity)(jax.ShapeDtypeStruct((1,), jnp.float32))
