"""The backward pass in plain JAX, ``xla.attention_vjp``: what runs where no kernel serves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_dma
import oracle
from cases import NAMED, Case, as_jax_mask, make, poison
from jax_dma.implementations import xla
from jax_dma.mesh import align_varying
from jax_dma.tiles import Visibility
from support import assert_close, assert_exact_zeros, judge, largest_array, relative_error

LENGTHS = dict(batch=(1,), T=600, S=1100, N=2, K=1, H=16)  # two chunks of queries and of keys, and a rest of each
CASES = {
    "no_bias": Case(**LENGTHS, is_causal=True),
    "mask": Case(**LENGTHS, mask="1NTS", bias="1KTS"),
    "softcap": Case(**LENGTHS, softcap=1.5, bias="1NTS", mask="11T1", scale=0.7),
    "intervals": Case(**LENGTHS, mask="1N", bias="1NTS", is_causal=True),
    "bias_per_key": Case(**LENGTHS, mask="11TS", bias="1N1S", plan=True),
    "bias_per_query": Case(**LENGTHS, mask="1K1S", bias="1KT1"),
    "one_bias": Case(**LENGTHS, bias="1111", is_causal=True),
    "grouped": Case((2,), 70, 90, 6, 2, 24, Hv=40, mask="BKTS", bias="BNTS"),
    "shared_by_groups": Case((2,), 300, 90, 6, 2, 24, Hv=8, mask="B1TS", bias="1KTS", softcap=3.0),
    "bf16": Case(**LENGTHS, dtype="bfloat16", bias="1NTS", mask="1K"),
    "f16": Case(**LENGTHS, dtype="float16", bias="1NTS", bias_dtype="float32", is_causal=True),
    "two_batch_axes": Case((2, 3), 30, 40, 4, 2, 8, mask="BKTS", bias="1NTS"),
    "no_batch_axis": Case((), 300, 40, 4, 2, 8, mask="1KTS", bias="1N1S"),
    "no_keys": Case((2,), 30, 0, 4, 2, 8, bias="BNTS"),
    "no_queries": Case((2,), 0, 30, 4, 2, 8, bias="BN1S"),
    "wide_head": NAMED["plain"].with_(H=300, bias="11TS"),
}


def visibility_of(mask, q, k):
    if mask is None:
        return Visibility()
    if isinstance(mask, jax_dma.KeyIntervals):
        return Visibility(start=mask.start, end=mask.end)
    return Visibility(bits=(mask if hasattr(mask, "bits") else jax_dma.plan(mask, q, k)).bits)


def options_of(case):
    scale = case.H**-0.5 if case.scale is None else case.scale
    return dict(causal=case.is_causal, scale=scale, softcap=case.softcap or 0.0)


def explicit(case, want_dbias=None, given=False):
    """(q, k, v, mask, bias, dout, dlse) -> gradients, by attention_vjp."""
    want_dbias = case.bias is not None if want_dbias is None else want_dbias

    def run(q, k, v, mask, bias, dout, dlse):
        seen, options, more = visibility_of(mask, q, k), options_of(case), {}
        if given:
            more["out"], more["lse"] = xla.attention(q, k, v, seen, bias, **options)
        return xla.attention_vjp(q, k, v, seen, bias, dout, dlse, want_dbias=want_dbias, **options, **more)

    return run


def automatic(case):
    """The same by reverse mode applied to the forward pass."""

    def run(q, k, v, mask, bias, dout, dlse):
        seen = visibility_of(mask, q, k)

        def function(q, k, v, bias=None):
            out, lse = xla.attention(q, k, v, seen, bias, **options_of(case))
            return out, lse[..., 0]

        return jax.vjp(function, q, k, v, *([] if bias is None else [bias]))[1]((dout, dlse))

    return run


def on_jax(inputs, case):
    return inputs._replace(mask=as_jax_mask(inputs.mask, case))


def assert_same(got, want, tolerance, floor=1e-3):
    assert len(got) == len(want)
    for x, y in zip(got, want):
        assert x.shape == y.shape and x.dtype == y.dtype
        assert relative_error(x, np.asarray(y).astype(np.float64), floor) < tolerance


@pytest.mark.parametrize("given", [False, True], ids=["recomputed", "given"])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name, given):
    """Equal to the oracle's and to automatic ones, of the same shapes and dtypes; out and lse given or not."""
    case = CASES[name]
    inputs = make(case)
    found, want = jax.jit(explicit(case, given=given))(*on_jax(inputs, case)), judge(case, inputs)
    got = oracle.Results(want.out, want.lse, *map(np.asarray, found))
    assert_close(got, want, case.dtype)
    assert_exact_zeros(got, want)
    if not given:
        tolerance = {"bfloat16": 1e-2, "float16": 2e-3}.get(case.dtype, 1e-5)
        assert_same(found, jax.jit(automatic(case))(*on_jax(inputs, case)), tolerance)


@pytest.mark.parametrize("name", ["mask", "softcap", "intervals", "bias_per_key", "shared_by_groups"])
def test_garbage_reaches_nothing(name):
    """NaN and infinities in bias where it is hidden, and in the cotangents of rows that see nothing."""
    case = CASES[name]
    inputs = poison(case, make(case))
    want = judge(case, inputs)
    empty = np.isneginf(want.lse)
    assert empty.any() or name == "intervals"
    inputs = inputs._replace(
        dout=np.where(empty[..., None], np.nan, inputs.dout).astype(inputs.dout.dtype),
        dlse=np.where(empty, np.inf, inputs.dlse).astype(inputs.dlse.dtype),
    )
    got = oracle.Results(want.out, want.lse, *map(np.asarray, jax.jit(explicit(case))(*on_jax(inputs, case))))
    assert_close(got, want, case.dtype)
    assert_exact_zeros(got, want)
    assert not got.dq[empty].any()


def test_float64():
    with jax.enable_x64(True):
        case = CASES["softcap"].with_(dtype="float64")
        inputs = make(case)
        want = judge(case, inputs)
        found = jax.jit(explicit(case))(*on_jax(inputs, case))
        assert_close(oracle.Results(want.out, want.lse, *map(np.asarray, found)), want, "float64")


@pytest.mark.parametrize("shared", ["q", "k", "v", "bias", "qk"])
def test_gradients_have_the_shape_of_their_own_operand(shared):
    """Batch axes of size 1 broadcast, per operand; the gradient is then the sum over them."""
    case = Case((3,), 40, 50, 4, 2, 8, mask="1KTS", bias="BNTS")
    inputs = make(case)._asdict()
    inputs |= {name: inputs[name][:1] for name in (["bias"] if shared == "bias" else list(shared))}
    inputs = list(inputs.values())
    assert_same(jax.jit(explicit(case))(*inputs), jax.jit(automatic(case))(*inputs), 1e-5)


@pytest.mark.parametrize("name", ["mask", "softcap", "bias_per_key", "grouped"])
def test_second_derivatives(name):
    """Gradients of a function of the gradients, with respect to everything, the cotangents included."""
    case = CASES[name]
    inputs = on_jax(make(case), case)
    weights = [jnp.asarray(np.random.default_rng(i).standard_normal(x.shape), jnp.float32)
               for i, x in enumerate((inputs.q, inputs.k, inputs.v, inputs.bias))]  # fmt: skip

    def second(gradient):
        def loss(q, k, v, bias, dout, dlse):
            return sum((x * w).sum() for x, w in zip(gradient(q, k, v, inputs.mask, bias, dout, dlse), weights))

        return jax.jit(jax.grad(loss, tuple(range(6))))(
            inputs.q, inputs.k, inputs.v, inputs.bias, inputs.dout, inputs.dlse
        )

    # A bias per query changes nothing: its derivatives are 0, and what is computed of them is rounding.
    assert_same(second(explicit(case)), second(automatic(case)), 2e-5, floor=1.0)


def test_vmap():
    """Over operands and a mask that differ, with a bias that is shared."""
    case = Case((1,), 300, 90, 4, 2, 8, mask="1KTS", bias="1NTS")
    several = [make(case, seed) for seed in range(3)]
    bias = several[0].bias
    stacked = [None if x[0] is None else np.stack(x) for x in zip(*several)]
    stacked[4] = bias
    got = jax.jit(jax.vmap(explicit(case), (0, 0, 0, 0, None, 0, 0)))(*stacked)
    one = jax.jit(explicit(case))
    want = [one(*inputs._replace(bias=bias)) for inputs in several]
    assert_same(got, [jnp.stack(x) for x in zip(*want)], 1e-5)


@pytest.mark.parametrize("mask, causal", [(None, False), ("BKTS", True)])
def test_shard_map(mask, causal):
    case = Case((2,), 300, 600, 4, 2, 8, mask=mask, bias="1NTS", is_causal=causal)
    inputs = make(case)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    here, everywhere = P("data"), P()
    specs = (here, here, here, None if mask is None else here, everywhere, here, here)

    def run(*operands):
        dq, dk, dv, dbias = explicit(case)(*align_varying(operands))
        return dq, dk, dv, jax.lax.psum(dbias, "data")

    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(here, here, here, everywhere))
    assert_same(jax.jit(mapped)(*inputs), jax.jit(explicit(case))(*inputs), 1e-5)


@pytest.mark.parametrize("mask", ["BKTS", "BK"])
def test_explicit_mesh_axes(mask):
    """Types say how arrays are sharded; results and gradients are sharded as their operands are."""
    case = Case((2,), 300, 600, 4, 2, 8, mask=mask, bias="1NTS", is_causal=True)
    inputs = on_jax(make(case), case)

    def run(q, k, v, mask, bias, dout, dlse):
        call = functools.partial(jax_dma.attention, is_causal=True, return_lse=True, implementation="xla")
        results, vjp = jax.vjp(lambda q, k, v, bias: call(q, k, v, mask, bias), q, k, v, bias)
        return results[0], *vjp((dout, dlse)), *explicit(case)(q, k, v, mask, bias, dout, dlse)

    want = jax.jit(run)(*inputs)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        place = lambda x: jax.device_put(x, jax.NamedSharding(mesh, P("data") if x.shape[0] == 2 else P()))
        got = jax.jit(run)(*jax.tree.map(place, inputs))
    assert got[0].sharding.spec[0] == got[1].sharding.spec[0] == got[5].sharding.spec[0] == "data"
    assert_same(got, want, 1e-5)


LONG = Case((1,), 4096, 4096, 2, 2, 32, bias="1NTS")


def abstract(case):
    struct = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    x = struct((*case.batch, case.T, case.N, case.H))
    return x, x, x, None, struct(case.shape(case.bias)), x, struct((*case.batch, case.T, case.N))


@pytest.mark.parametrize("causal", [False, True])
def test_memory_of_a_dense_bias(causal):
    """Its gradient is written in place: beside it there is nothing that grows faster than the length."""
    case = LONG.with_(is_causal=causal)
    compiled = jax.jit(explicit(case)).lower(*abstract(case)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 20e6  # dbias: 134e6
    assert largest_array(compiled) == case.N * case.T * case.S


def work(jaxpr):
    """How many numbers a program writes, loops multiplied out; the larger branch of a choice; updates are in place."""
    total = 0
    for equation in jaxpr.eqns:
        inner = [getattr(x, "jaxpr", x) for x in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr)]
        inner = [work(x) for x in inner if hasattr(x, "eqns")]
        if inner:
            total += max(inner) * equation.params.get("length", 1)
        elif equation.primitive.name == "dynamic_update_slice":
            total += equation.invars[1].aval.size
        else:
            total += sum(x.aval.size for x in equation.outvars)
    return total


def is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def test_time_of_a_dense_bias():
    """Its gradient costs what it takes to write it once, not once per chunk of queries."""
    case = LONG.with_(T=2048, S=2048)
    of = lambda function: work(jax.make_jaxpr(function)(*abstract(case)).jaxpr)
    without, with_ = of(explicit(case, want_dbias=False)), of(explicit(case))
    assert without < with_ < 1.5 * without
    assert of(automatic(case)) > 1.5 * with_  # so this does measure it

    compiled = lambda want: jax.jit(explicit(case, want)).lower(*abstract(case)).compile().cost_analysis()
    assert compiled(True)["flops"] < 1.5 * compiled(False)["flops"]  # a loop's body counts once here
