"""Under ``jax.jit`` on a mesh, automatic or explicit axes: one device's results, no collectives but the promised."""

import collections
import contextlib
import functools
import itertools
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jax_dma
import oracle
from cases import Case, as_jax_mask, make
from support import errors, judge

CASE = Case((4,), 128, 140, 8, 2, 16)  # a tile is 32 queries
BIASES = ["BNTS", "1NTS", "BKTS", "11TS", "1N1S", "B11S", "1111", None]
MASKS = [(None, False), ("B1TS", False), ("1K", False), (None, True), ("BN", True), ("1NTS", True), ("B11S", False)]

# Axis names and sizes; how q is split along batch, queries and heads; the batch shape.
MESHES = {
    "data x tensor": (dict(d=4, h=2), ("d", None, "h"), (4,)),
    "data x context": (dict(d=2, c=4), ("d", "c", None), (4,)),
    "data x context x tensor": (dict(d=2, c=2, h=2), ("d", "c", "h"), (4,)),
    "two mesh axes for the batch": (dict(d=2, e=2, h=2), (("d", "e"), None, "h"), (4,)),
    "two batch axes": (dict(d=2, e=2, c=2), ("d", "e", "c", None), (2, 2)),
}
# Every mesh with every bias and with every mask; in every other one mask and bias come unsharded.
COMBINATIONS = [
    (name, bias, *MASKS[(i + j) % len(MASKS)], (i + j) % 2 == 0)
    for (i, name), (j, bias) in itertools.product(enumerate(MESHES), enumerate(BIASES))
]


@pytest.fixture(autouse=True)
def eight_devices():
    if len(jax.devices("cpu")) < 8:
        pytest.skip("needs eight devices")


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


def run_on(mesh, split, case, whole=False, specs=None, around=contextlib.nullcontext):
    """The compiled program and its results, having held them against the oracle for two pairs of cotangents."""
    inputs = make(case)
    specs = specs or specs_of(case, inputs, split, whole)
    run = functools.partial(results, dict(is_causal=case.is_causal))
    with around():
        operands = put(mesh, operands_of(inputs), specs)
        compiled = jax.jit(run).lower(*operands).compile()
        got = compiled(*operands)
        ones = tuple(np.ones_like(x) for x in inputs[5:])
        got_for_ones = compiled(*operands[:5], *put(mesh, ones, specs[5:]))
    assert_same(got, judge(case, inputs))
    assert_same(got_for_ones, judge(case, inputs._replace(dout=ones[0], dlse=ones[1])))
    return compiled, got


@pytest.mark.parametrize("name, bias, mask, is_causal, whole", COMBINATIONS)
def test_automatic_axes(name, bias, mask, is_causal, whole):
    """CASES 5, 6, 7, 29 without a shard_map: values, gradients, and exactly the promised collectives."""
    sizes, split, batch = MESHES[name]
    case = CASE.with_(batch=batch, bias=bias, mask=mask, is_causal=is_causal)
    compiled, _ = run_on(make_mesh(sizes), split, case, whole)
    assert collectives(compiled) == promised(case, split)


@pytest.mark.parametrize("name, bias, mask, is_causal, _", COMBINATIONS[::4])
def test_explicit_axes(name, bias, mask, is_causal, _):
    """The same, and results are typed as sharded like their operands."""
    sizes, split, batch = MESHES[name]
    case = CASE.with_(batch=batch, bias=bias, mask=mask, is_causal=is_causal)
    mesh = make_mesh(sizes, AxisType.Explicit)
    compiled, got = run_on(mesh, split, case, around=lambda: jax.set_mesh(mesh))
    _, q, k, v, b, dout, dlse = specs_of(case, make(case), split, whole=False)
    for x, spec in zip(got, (dout, dlse, q, k, v, b)):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)
    assert collectives(compiled) == promised(case, split)


@pytest.mark.parametrize("bias", ["1NTS", "1KTS", "1111"])
@pytest.mark.parametrize("K, axes", [(1, ("h",)), (2, ("g", "h"))])
def test_fewer_key_value_heads_than_devices(K, axes, bias):
    """The queries of one key/value head on several devices: dk and dv are then summed over these, once."""
    sizes = dict(g=2, h=4) if K == 2 else dict(h=8)
    case = CASE.with_(K=K, bias=bias, is_causal=True)
    heads = P(None, None, axes, None)
    kv = P(None, None, axes[:-1] or None, None)
    of_bias = P(None, {"1NTS": axes, "1KTS": axes[:-1] or None, "1111": None}[bias])
    specs = (None, heads, kv, kv, of_bias, heads, P(None, None, axes))
    compiled, _ = run_on(make_mesh(sizes), None, case, specs=specs)
    assert collectives(compiled) == {"all-reduce": 2 if bias == "1111" and K == 2 else 1}


NOT_SPLIT = {
    "key/value heads that the axis does not divide": (CASE, P("a", None, "b", None), P("a")),
    "a head dimension": (CASE.with_(bias="1NTS"), P(None, None, None, "b"), P(None, None, None, "b")),
    "keys": (CASE.with_(bias="BKTS", mask="BN"), P("a"), P("a", "b")),
    "queries within a tile of a mask": (CASE.with_(T=64, mask="B1TS", bias="B1TS"), P("a", "b"), P("a")),
    "queries within a tile, and causal": (CASE.with_(T=64, mask="BNTS", is_causal=True), P("a", "b"), P("a")),
}


@pytest.mark.parametrize("what", NOT_SPLIT)
def test_what_cannot_be_split_is_whole(what):
    """An answer that is right, at the price of collectives."""
    case, q, k = NOT_SPLIT[what]
    inputs = make(case)
    mask = jax.tree.map(lambda _: P(), as_jax_mask(inputs.mask))
    bias = None if case.bias is None else P()
    run_on(make_mesh(dict(a=2, b=4)), None, case, specs=(mask, q, k, k, bias, q, P(*q[:3])))


def test_heads_from_a_reshape():
    """A projection split over more devices than there are heads: each has a part of one."""
    mesh = make_mesh(dict(h=8))
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((2, 40, heads * 16)).astype(np.float32) for heads in (4, 2))

    def loss(x, y):
        k = y.reshape(2, 40, 2, 16)
        return (jax_dma.attention(x.reshape(2, 40, 4, 16), k, k, is_causal=True) ** 2).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    for a, b in zip(gradient(*put(mesh, (x, y), [P(None, None, "h")] * 2)), gradient(x, y)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_under_scan_checkpoint_and_vmap():
    """Layers in a scan, each rematerialised; a vmapped axis that only some operands have."""
    mesh = make_mesh(dict(d=2, c=2, h=2))
    case = CASE.with_(batch=(2,), bias="1NTS", is_causal=True)
    q, k, v, _, bias, *_ = make(case)
    q = np.stack([q, q[::-1] / 2])

    def loss(q, k, v, bias):
        layer = lambda x, _: (jax_dma.attention(x, k, v, None, bias, is_causal=True), None)
        run = lambda x: jax.lax.scan(jax.checkpoint(layer), x, None, length=2)[0]
        return (jax.vmap(run)(q) ** 2).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    specs = P(None, "d", "c", "h"), P("d", None, "h"), P("d", None, "h"), P(None, "h", "c")
    got = gradient(*put(mesh, (q, k, v, bias), specs))
    for x, y in zip(got, gradient(q, k, v, bias)):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_one_device_does_not_pay():
    """No wrapper in the program, with or without a mesh, and none inside shard_map."""
    q, k, v, *_ = make(CASE)
    text = lambda f: jax.jit(f).lower(q, k, v).as_text()
    assert "CustomSPMDPartitioning" not in text(jax_dma.attention)
    mesh = make_mesh(dict(d=4, h=2))
    spec = P("d", None, "h")
    local = jax.shard_map(jax_dma.attention, mesh=mesh, in_specs=spec, out_specs=spec)
    assert "CustomSPMDPartitioning" not in text(local)
    sharded = jax.jit(jax_dma.attention, in_shardings=NamedSharding(mesh, spec)).lower(q, k, v).as_text()
    assert "CustomSPMDPartitioning" in sharded
