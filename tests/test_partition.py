"""Under ``jax.jit`` on a mesh, automatic or explicit axes: one device's results, no collectives but the promised."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jax_dma
import oracle
from cases import Case, as_jax_mask, make
from jax_dma import partition
from jax_dma.tiles import analyse
from meshes import MESHES, assert_same, collectives, make_mesh, operands_of, promised, put, results, specs_of
from support import judge, relative_error

CASE = Case((4,), 128, 140, 8, 2, 16)  # a tile is 32 queries
BIASES = ["BNTS", "1NTS", "BKTS", "11TS", "1N1S", "B11S", "1111", None]
MASKS = [(None, False), ("B1TS", False), ("1K", False), (None, True), ("BN", True), ("1NTS", True), ("B11S", False)]

# Every mesh with every bias and with every mask; in every other one mask and bias come unsharded.
COMBINATIONS = [
    (name, bias, *MASKS[(i + j) % len(MASKS)], (i + j) % 2 == 0)
    for (i, name), (j, bias) in itertools.product(enumerate(MESHES), enumerate(BIASES))
]


@pytest.fixture(autouse=True)
def eight_devices():
    if len(jax.devices("cpu")) < 8:
        pytest.skip("needs eight devices")


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


@pytest.mark.parametrize("name, bias, mask, is_causal, _", COMBINATIONS)
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


@pytest.mark.parametrize("axes", ["c", ("b", "c")])
@pytest.mark.parametrize("bias, mask, is_causal", [("1NTS", "B1TS", True), ("B11S", "BK", False), (None, None, True)])
def test_queries_and_keys_split_alike(axes, bias, mask, is_causal):
    """Keys and values are gathered, and their gradients scattered as they are summed: no all-reduce of whole ones."""
    case = CASE.with_(S=144, bias=bias, mask=mask, is_causal=is_causal)
    split = P("d", axes, None, None)
    inputs = make(case)
    specs = list(specs_of(case, inputs, ("d", axes, None), whole=False))
    specs[2:4] = split, split
    compiled, got = run_on(make_mesh(dict(d=2, b=2, c=2)), None, case, specs=specs)
    found = collectives(compiled)
    assert found.pop("all-reduce", 0) == (bias is not None)
    assert found == {"all-gather": 2, "reduce-scatter": 2}
    assert all(x.sharding.is_equivalent_to(NamedSharding(x.sharding.mesh, split), 4) for x in got[2:5])


@pytest.mark.parametrize("mode", ["automatic", "explicit", "shard_map"])
def test_parts_of_a_bias_gradient_are_not_rounded(mode):
    """What two devices find for a bfloat16 bias nearly cancels: a sum in float32 has something left (CASES 2, 6)."""
    q, k, v, _, bias, dout, _ = make(Case((1,), 32, 40, 4, 2, 16, bias="11TS"))
    twice = lambda x, factor=1: np.concatenate([x, factor * x])
    bias = bias.astype(jnp.bfloat16)
    operands = twice(q), twice(k), twice(v), bias, twice(dout, -(1 + 2**-8)).astype(np.float32)
    gradient = lambda q, k, v, bias, dout: jax.vjp(lambda b: jax_dma.attention(q, k, v, None, b), bias)[1](dout)[0]
    mesh = make_mesh(dict(d=2), AxisType.Explicit if mode == "explicit" else AxisType.Auto)
    specs = (P("d"),) * 3 + (P(), P("d"))
    function = gradient
    if mode == "shard_map":
        function = jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=P())
    with jax.set_mesh(mesh):
        got = jax.jit(function)(*put(mesh, operands, specs))
    cotangents = dict(dout=operands[4], dlse=np.zeros((2, 32, 4)))
    want = oracle.attention(*operands[:3], None, bias.astype(np.float32), **cotangents).dbias
    assert got.dtype == jnp.bfloat16
    assert relative_error(got, want) < 4e-3


# What cannot be split; how q, and k and v, come; and what is said about it.
NOT_SPLIT = {
    "fewer key/value heads than devices": (CASE, P("a", None, "b", None), P("a"), "N = 8 query and K = 2"),
    "a head dimension": (CASE.with_(bias="1NTS"), P(None, None, None, "b"), P(None, None, None, "b"), "head dimension"),
    "keys": (CASE.with_(bias="BKTS", mask="BN"), P("a"), P("a", "b"), "split queries over the same"),
    "queries within a tile of a mask": (CASE.with_(T=64, mask="B1TS", bias="B1TS"), P("a", "b"), P("a"), "T = 64"),
    "queries within a tile, and causal": (CASE.with_(T=64, mask="BNTS", is_causal=True), P("a", "b"), P("a"), "T = 64"),
}


@pytest.mark.parametrize("what", NOT_SPLIT)
def test_what_cannot_be_split_is_whole(what):
    """An answer that is right, at the price of collectives, and a warning that says what to do."""
    case, q, k, message = NOT_SPLIT[what]
    inputs = make(case)
    mask = jax.tree.map(lambda _: P(), as_jax_mask(inputs.mask))
    bias = None if case.bias is None else P()
    specs = (mask, q, k, k, bias, q, P(*q[:3]))
    with pytest.warns(UserWarning, match=message):
        run_on(make_mesh(dict(a=2, b=4)), None, case, specs=specs)


@pytest.mark.parametrize("T, heads", [(128, 1), (128, 8), (100, 2)])
def test_plan_of_a_split_mask(T, heads):
    """What wraps a kernel that analyses masks: each device does its own part of the mask."""
    mask = np.random.default_rng(0).random((4, heads, T, 300)) < 0.02
    shape = (T, 300, 8, 2)
    split = lambda mask: partition.partitioned_plan(lambda mask, shape: analyse(mask, *shape), mask, shape)
    spec = P("d", "h" if heads > 1 else None, "c" if T == 128 else None)
    (operand,) = put(make_mesh(dict(d=2, c=2, h=2)), (mask,), (spec,))
    compiled = jax.jit(split).lower(operand).compile()
    for got, want in zip(compiled(operand), analyse(mask, *shape)):
        np.testing.assert_array_equal(got, want)
    # tiles_by_key of all queries; nothing once only the other two are used
    assert collectives(compiled) == ({"all-gather": 1} if T == 128 else {})
    assert collectives(jax.jit(lambda mask: split(mask)[:2]).lower(operand).compile()) == {}


def test_independent_axes():
    """What wraps other kernels: batch axes and what is called independent stay split, also heads of two kinds."""
    rng = np.random.default_rng(0)
    runs, x, rows = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((4, 8, 2, 5), (4, 7, 4, 3), (1, 7, 1, 3))
    )

    def run(runs, x, rows):  # [*batch, r, n, .], [*batch, ., n, .], [*batch|1, ., 1, .]
        group = x.shape[-2] // runs.shape[-2]
        x = (x * rows).sum((-3, -1))
        return jnp.repeat(runs, group, axis=-2).sum(-1) * x[..., None, :], x

    split = lambda *operands: partition.partitioned_along(run, operands, ("rn.", ".n.", ".n."), ("rn", "n"))
    mesh = make_mesh(dict(d=2, c=2, h=2))
    operands = put(mesh, (runs, x, rows), (P("d", "c", "h"), P("d", None, "h"), P()))
    compiled = jax.jit(split).lower(*operands).compile()
    for got, want in zip(compiled(*operands), run(runs, x, rows)):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    assert collectives(compiled) == {}
    assert [got.sharding.spec for got in compiled(*operands)] == [P("d", "c", "h"), P("d", "h")]


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


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", MESHES)
def test_under_scan_checkpoint_and_vmap(name, kind):
    """Layers in a scan, each rematerialised; a vmapped axis that only some operands have. Collectives as without."""
    sizes, split, batch = MESHES[name]
    mesh = make_mesh(sizes, kind)
    case = CASE.with_(batch=batch, bias="1NTS", is_causal=True)
    inputs = make(case)
    q, k, v, _, bias, *_ = inputs
    q = np.stack([q, q[::-1] / 2])
    _, q_spec, k_spec, v_spec, bias_spec, *_ = specs_of(case, inputs, split, whole=False)

    def loss(q, k, v, bias):
        layer = lambda x, _: (jax_dma.attention(x, k, v, None, bias, is_causal=True), None)
        run = lambda x: jax.lax.scan(jax.checkpoint(layer), x, None, length=2)[0]
        return (jax.vmap(run)(q) ** 2).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    want = gradient(q, k, v, bias)
    with jax.set_mesh(mesh):
        operands = put(mesh, (q, k, v, bias), (P(None, *q_spec), k_spec, v_spec, bias_spec))
        compiled = gradient.lower(*operands).compile()
        got = compiled(*operands)
    for x, y in zip(got, want):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    assert set(collectives(compiled)) == {"all-reduce"}


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
