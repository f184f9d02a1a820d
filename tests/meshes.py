"""What tests on meshes share: the meshes, how a case's arrays are split over them, and what collectives that costs."""

import collections
import functools
import re

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jax_dma
import oracle
from cases import as_jax_mask
from support import errors

# Axis names and sizes; how q is split along batch, queries and heads; the batch shape.
MESHES = {
    "data x tensor": (dict(d=4, h=2), ("d", None, "h"), (4,)),
    "data x context": (dict(d=2, c=4), ("d", "c", None), (4,)),
    "data x context x tensor": (dict(d=2, c=2, h=2), ("d", "c", "h"), (4,)),
    "two mesh axes for the batch": (dict(d=2, e=2, h=2), (("d", "e"), None, "h"), (4,)),
    "two batch axes": (dict(d=2, e=2, c=2), ("d", "e", "c", None), (2, 2)),
}


def make_mesh(sizes, kind=AxisType.Auto):
    devices = jax.devices("cpu")[: int(np.prod(list(sizes.values())))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=devices)


def results(options, mask, q, k, v, bias, dout, dlse):
    """(out, lse, dq, dk, dv[, dbias]) for cotangents of out and lse."""
    function = lambda q, k, v, *bias: jax_dma.attention(q, k, v, mask, *bias, return_lse=True, **options)
    values, vjp = jax.vjp(function, q, k, v, *([] if bias is None else [bias]))
    return *values, *vjp((dout, dlse))


def specs_of(case, inputs, split, whole):
    """PartitionSpecs of (mask, q, k, v, bias, dout, dlse); with ``whole``, mask and bias are on every device."""
    *batch, queries, heads = split

    def broadcast(pattern, x):
        if x is None or whole:
            return None if x is None else P()
        leading = [axis if size > 1 else None for axis, size in zip(batch, x.shape)]
        rows = [queries if pattern[2] == "T" else None, None] if len(pattern) == 4 else [None]
        return P(*leading, heads if pattern[1] != "1" else None, *rows)

    mask = jax.tree.map(functools.partial(broadcast, case.mask), as_jax_mask(inputs.mask))
    array, keys = P(*batch, queries, heads, None), P(*batch, None, heads, None)
    return mask, array, keys, keys, broadcast(case.bias, inputs.bias), array, P(*batch, queries, heads)


def operands_of(inputs):
    return as_jax_mask(inputs.mask), *inputs[:3], *inputs[4:]


def put(mesh, operands, specs):
    return tuple(
        jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), x, spec)
        for x, spec in zip(operands, specs)
    )


def collectives(compiled):
    kinds = r"\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast)(?:-start)?\("
    return dict(collections.Counter(re.findall(kinds, compiled.as_text())))


def promised(case, split):
    """The all-reduces of forward and backward pass: one for each set of axes that a gradient is summed over."""
    *batch, queries, heads = split
    flat = lambda axes: [a for x in axes for a in ((x,) if isinstance(x, str) else x or ())]
    sums = [frozenset(flat([queries]))]
    if case.bias is not None:
        split_by = list(zip((*batch, heads, queries), case.shape(case.bias)))
        sums.append(frozenset(flat(axis for axis, size in split_by if size == 1)))
    count = len({axes for axes in sums if axes})
    return {"all-reduce": count} if count else {}


def assert_same(got, want):
    """The same as one device to 1e-5 (the oracle stands in for it: no second program to compile)."""
    found = errors(oracle.Results(*map(np.asarray, got)), want)
    assert max(found.values()) <= 1e-5, found
