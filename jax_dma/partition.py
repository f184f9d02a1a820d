"""How a call is split over a mesh: which mesh axes each operand keeps, what a shard computes, what is summed.

XLA cannot see into a kernel: left alone it gathers every operand. So what the primitives lower to is wrapped in
``jax.experimental.custom_partitioning``, which asks :func:`_layout` at compile time. Batch axes and heads are
independent; queries are too, once a shard knows its row offset. Keys are gathered, and so is the head dimension.

Shardy's own means for the rest are not used because they are silently ignored: ``reduction_factors`` insert no
all-reduce, and ``need_replication_factors`` leave an operand sharded. Specs are enforced here, and sums made here.
"""

import dataclasses
import functools
import itertools
import math
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jax_dma.tiles import Visibility, interval_bounds, pack_bits, queries_per_tile, unpack_bits

# The axes after the batch axes: t queries, u tiles of queries, n heads (N, K or 1), s keys of a gradient, "." whole on
# every device.
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
    "lse": "tn.",
    "dlse": "tn",
    "dk": "sn.",
    "dv": "sn.",
}


def operand_names(call, backward):
    """What each operand of a primitive is."""
    visibility = [name for name, present in zip(Visibility._fields, call.visibility) if present]
    return ["q", "k", "v", *visibility, *["bias"] * call.has_bias, *["out", "lse", "out", "dlse"] * backward]


def result_names(call, backward):
    """What each result of a primitive is shaped like."""
    return ["q", "dk", "dv", *["bias"] * call.want_dbias] if backward else ["out", "lse"]


class _Layout(NamedTuple):
    """The mesh axes that split a call."""

    batch: tuple  # for each batch axis
    queries: tuple
    keys: tuple  # the same as queries if k and v come split so; their gradients are then scattered as they are summed
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
        if letter == "s":
            return self.keys
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
    q, k, v, visibility, _, _ = call.unflatten(operands)
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
        batch.append(claim(spec_of(full, mesh)[axis], lambda n: size > 1 and size % n == 0))
    # Bitmaps of tiles can be cut between tiles only, and a tile is made for all heads of a group.
    tiled = visibility.bits is not None and visibility.bits.shape[-2] > 1
    rows = queries_per_tile(sizes.N // sizes.K) if tiled else 1
    queries = claim(spec_of(q, mesh)[-3], lambda n: sizes.T > 1 and sizes.T % (n * rows) == 0)
    split_alike = all(spec_of(x, mesh)[-3] == queries for x in (k, v))
    keys = queries if split_alike and sizes.S % math.prod(mesh.shape[a] for a in queries) == 0 else ()
    heads = spec_of(q, mesh)[-2]
    kv_heads = claim(heads, lambda n: sizes.K % n == 0)
    group = ()
    if math.prod(mesh.shape[a] for a in kv_heads) == sizes.K and not tiled:
        group = claim(heads[len(kv_heads) :], lambda n: sizes.N // sizes.K % n == 0)
    return _Layout(tuple(batch), queries, keys, kv_heads, group)


def _warn_of_gathers(call, mesh, operands, layout):
    """Says which mesh axes a call could not use, and what to do: they cost collectives, or the work is repeated."""
    sizes = _sizes(operands)
    q, k, v, *_ = operands
    of_q = spec_of(q, mesh)
    axes = lambda names: " x ".join(f"{name!r} ({mesh.shape[name]})" for name in names)
    unused = lambda given, used: tuple(name for name in given if name not in used)
    found = []
    if names := unused(of_q[-2], layout.kv_heads + layout.group):
        found.append(
            f"N = {sizes.N} query and K = {sizes.K} key/value heads are not split over {axes(names)}: their number "
            "must divide K (or, as the last of several mesh axes, N // K). Use fewer devices, or repeat k and v"
        )
    if names := unused(of_q[-3], layout.queries):
        found.append(
            f"T = {sizes.T} queries are not split over {axes(names)}: their number must divide T, and cut a dense mask "
            f"between tiles of {queries_per_tile(sizes.N // sizes.K)} queries. Pad the sequence, or use fewer devices"
        )
    for given, used in zip(of_q[: len(sizes.batch)], layout.batch):
        if names := unused(given, used):
            found.append(f"a batch axis of {sizes.batch} is not split over {axes(names)}, which do not divide it")
    if names := {name for x in (q, k, v) for name in spec_of(x, mesh)[-1]}:
        found.append(f"the head dimension is gathered over {axes(sorted(names))}: split heads, batch or queries")
    if names := {name for x in (k, v) for name in unused(spec_of(x, mesh)[-3], layout.queries)}:
        found.append(f"S = {sizes.S} keys are gathered over {axes(sorted(names))}: split queries over the same axes")
    for text in found:
        warnings.warn(f"jax_dma.attention, q {q.shape}, k {k.shape}: {text}.", stacklevel=2)


def spec_of(x, mesh):
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
        mesh = some_mesh(mesh, operands)
        layout, in_specs, out_specs = specs(mesh, operands, results)
        _warn_of_gathers(call, mesh, operands, layout)
        sums = [layout.missing(spec) if backward else () for spec in out_specs]
        shards = math.prod(mesh.shape[a] for a in layout.queries)
        dtypes = [x.dtype for x in results]

        def shard(*operands):
            # Tracing must not see the mesh of an enclosing jax.set_mesh: a sum over its axes would be refused.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                if call.want_dbias and sums[3]:  # what is summed must not have been rounded
                    bias = names.index("bias")
                    operands = (*operands[:bias], _wide(operands[bias]), *operands[bias + 1 :])
                local, operands = _localise(call, operands, layout.queries, shards)
                found = _sum_over(run(local, *operands), sums)
                if backward and layout.keys:
                    found[1:3] = (_scatter(x, layout.keys) for x in found[1:3])
                return tuple(x.astype(dtype) for x, dtype in zip(found, dtypes))

        named = lambda specs: tuple(NamedSharding(mesh, spec) for spec in specs)
        return mesh, shard, named(out_specs), named(in_specs)

    def infer(mesh, operands, results):
        mesh = some_mesh(mesh, operands)
        return tuple(NamedSharding(mesh, spec) for spec in specs(mesh, operands, results)[2])

    whole = custom_partitioning(lambda *operands: tuple(run(call, *operands)))
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]  # the rule outlives this trace
    rule = lambda *_: _sharding_rule(call, types, backward)
    whole.def_partition(
        partition=partition, infer_sharding_from_operands=infer, sharding_rule=rule, decode_shardings=False
    )
    return list(whole(*operands))


def some_mesh(mesh, operands):
    """The mesh; where shardings name none, one to keep everything whole on."""
    if not mesh.empty:
        return mesh
    devices = sorted(operands[0].sharding.device_set, key=lambda device: device.id)
    return Mesh(devices, ("jax_dma",))


def _wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _sum_over(results, axes):
    """Each result summed over its axes, in float32; those with the same axes in one go."""
    results = list(results)
    for some in dict.fromkeys(a for a in axes if a):
        chosen = [i for i, a in enumerate(axes) if a == some]
        for i, x in zip(chosen, jax.lax.psum([_wide(results[i]) for i in chosen], some)):
            results[i] = x
    return results


def _scatter(x, axes):
    """The part of this device's keys of a gradient summed over some axes."""
    return jax.lax.psum_scatter(_wide(x), axes, scatter_dimension=x.ndim - 3, tiled=True)


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


def partitioned_plan(run, mask, shape):
    """``run(mask, shape)``, the arrays of a :class:`jax_dma.MaskPlan`, each part made where that of the mask is.

    Args:
      run: a function of a dense mask ``[*batch, N|K|1, T, S]`` and (T, S, N, K) to bits, tiles_by_query, tiles_by_key.
      mask: the mask.
      shape: (T, S, N, K).
    """
    T, S, N, K = shape
    mask_shape = mask.shape  # the rule outlives this trace, so it must not hold the mask
    rank = len(mask_shape) - 3

    def axes(mesh, mask):
        """The mesh axes of each batch axis, of heads and of queries."""
        spec, size_of = spec_of(mask, mesh), lambda names: math.prod(mesh.shape[name] for name in names)
        fits = lambda names, length: names if length % size_of(names) == 0 else ()
        batch = [fits(names, length) for names, length in zip(spec, mask.shape[:rank])]
        heads = fits(spec[-3], K) if mask.shape[-3] > 1 else ()
        return batch, heads, spec[-2] if T % (size_of(spec[-2]) * queries_per_tile(N // K)) == 0 else ()

    def results(mesh, mask):
        batch, heads, rows = axes(mesh, mask)
        named = lambda *trailing: NamedSharding(mesh, PartitionSpec(*(names or None for names in (*batch, *trailing))))
        return named(heads, rows, ()), (named(heads, rows, ()), named(heads, rows, (), ()), named(heads, (), (), ()))

    def partition(mesh, operands, _):
        mesh = some_mesh(mesh, operands)
        _, heads, rows = axes(mesh, operands[0])
        parts = lambda names: math.prod(mesh.shape[name] for name in names)

        def shard(mask):
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                bits, by_query, by_key = run(mask, (T // parts(rows), S, N // parts(heads), K // parts(heads)))
                if rows:  # XLA leaves this out where attention is split alike: it makes these of its own queries then
                    by_query_of_all = jax.lax.all_gather(by_query, rows, axis=by_query.ndim - 3, tiled=True)
                    by_key = _transpose_tiles(Visibility(tiles_by_query=by_query_of_all, tiles_by_key=by_key))
                return bits, by_query, by_key

        in_sharding, out_shardings = results(mesh, operands[0])
        return mesh, shard, out_shardings, (in_sharding,)

    whole = custom_partitioning(lambda mask: tuple(run(mask, shape)))
    whole.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, operands, _: results(some_mesh(mesh, operands), operands[0])[1],
        sharding_rule=lambda *_: _plan_rule(mask_shape, shape),
        decode_shardings=False,
    )
    return list(whole(mask))


def partitioned_along(run, operands, terms, result_terms):
    """``run(*operands)``, a tuple, split over whatever mesh the program is compiled for, along independent axes.

    Args:
      run: a function of any part of the operands along these axes. Leading batch axes are independent.
      operands: arrays.
      terms: for each operand, what the axes after the batch axes are: a letter for an independent one, "." for one that
        is kept whole. An axis of size 1 is broadcast. Sizes under one letter may be multiples of each other (query and
        key/value heads).
      result_terms: the same for the results, whose batch axes are full.
    """
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    results = jax.eval_shape(lambda *operands: tuple(run(*operands)), *types)
    rank = operands[0].ndim - len(terms[0])
    shapes = [(x.shape, (*range(rank), *term)) for x, term in zip((*types, *results), (*terms, *result_terms))]
    sizes = {}  # of each batch axis and letter, but for 1
    for shape, names in shapes:
        for size, name in zip(shape, names):
            if size > 1 and name != ".":
                sizes.setdefault(name, set()).add(size)

    def layout(mesh, operands):
        """The mesh axes that split each batch axis and letter."""
        found, taken = {}, set()
        for x, (_, names) in zip(operands, shapes):
            for axes, size, name in zip(spec_of(x, mesh), x.shape, names):
                axes = tuple(itertools.takewhile(lambda a: a not in taken, axes))
                parts = math.prod(mesh.shape[a] for a in axes)
                if axes and name != "." and name not in found and all(size % parts == 0 for size in sizes[name]):
                    found[name] = axes
                    taken.update(axes)
        return found

    def shardings(mesh, found):
        axes = lambda size, name: found.get(name) if size > 1 else None
        return [NamedSharding(mesh, PartitionSpec(*map(axes, *x))) for x in shapes]

    def partition(mesh, operands, _):
        mesh = some_mesh(mesh, operands)
        of_all = shardings(mesh, layout(mesh, operands))

        def shard(*operands):
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return tuple(run(*operands))

        return mesh, shard, tuple(of_all[len(types) :]), tuple(of_all[: len(types)])

    def infer(mesh, operands, _):
        mesh = some_mesh(mesh, operands)
        return tuple(shardings(mesh, layout(mesh, operands))[len(types) :])

    def rule(*_):
        fresh, factors, groups = (f"x{i}" for i in itertools.count()), {}, {}
        for name, found in sizes.items():
            factor = f"b{name}" if isinstance(name, int) else name
            factors[name, min(found)] = factor
            if len(found) == 2:  # heads of two kinds
                factors[name, max(found)], groups[f"{factor}g"] = f"({factor} {factor}g)", max(found) // min(found)
        term = lambda shape, names: " ".join(factors.get((n, size)) or next(fresh) for size, n in zip(shape, names))
        left, right = (", ".join(term(*x) for x in some) for some in (shapes[: len(types)], shapes[len(types) :]))
        return f"{left} -> {right}", groups

    split = custom_partitioning(lambda *operands: tuple(run(*operands)))
    split.def_partition(
        partition=partition, infer_sharding_from_operands=infer, sharding_rule=rule, decode_shardings=False
    )
    return list(split(*operands))


def _plan_rule(mask, shape):
    """What Shardy may propagate from a mask to its plan: batch axes, heads and queries, to their tiles as well."""
    T, _, N, K = shape
    batch, tile, heads = [f"b{i}" for i in range(len(mask) - 3)], queries_per_tile(N // K), mask[-3]
    queries, sizes = ("(u r)", {"r": tile}) if T % tile == 0 and tile > 1 else ("u" if tile == 1 else "t", {})
    if heads not in (1, K):
        heads, sizes = "(k g)", {**sizes, "g": N // K}
    else:
        heads = "k"
    term = lambda *factors: " ".join((*batch, *factors))
    left, bits = term(heads, queries, "s"), term(heads, queries, "w")
    return f"{left} -> {bits}, {term('k', 'u', 'p', 'x')}, {term('k', 'y', 'z', 'a')}", sizes


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
            known = {"t": "t", "n": heads.get(size), "s": "s"}.get(letter) if size > 1 else None
            factors.append(known or next(fresh))
        return " ".join(factors)

    shapes = dict(zip(names, (x.shape for x in operands)))
    of_keys = {"k": "dk", "v": "dv"} if backward else {}  # so that gradients are split as their operands are
    left = ", ".join(term(of_keys.get(name, name), x.shape) for name, x in zip(names, operands))
    # Results have every batch axis in full, but for dbias, which has those in full that vmap added.
    full = {"q": 3, "dk": 3, "dv": 3, "bias": 3, "out": 3, "lse": 3}
    shapes["dk"], shapes["dv"] = shapes["k"], shapes["v"]
    shapes["out"], shapes["lse"] = (sizes.T, sizes.N, shapes["v"][-1]), (sizes.T, sizes.N, 2)
    shapes = {name: (*sizes.batch, *shapes[name][-rank:]) for name, rank in full.items() if name in shapes}
    if call.want_dbias:
        bias = operands[names.index("bias")].shape
        shapes["bias"] = (*sizes.batch[: call.vmapped], *bias[call.vmapped :])
    right = ", ".join(term(name, shapes[name]) for name in results)
    rule = f"{left} -> {right}"
    return rule, ({"g": sizes.N // sizes.K} if "(k g)" in rule else {})


def without_shardings(rule):
    """A lowering rule that is not shown explicit shardings: what it traces is split here, not by types."""

    def lower(ctx, *values, **params):
        plain = lambda avals: [a if a.sharding.mesh.manual_axes else ShapedArray(a.shape, a.dtype) for a in avals]
        return rule(ctx.replace(avals_in=plain(ctx.avals_in), avals_out=plain(ctx.avals_out)), *values, **params)

    return lower


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
