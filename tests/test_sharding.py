"""Inside ``jax.shard_map``, manual axes: values and all gradients are those of one device."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jax_dma
import oracle
from cases import Case, as_jax_mask, make
from meshes import MESHES, assert_same, collectives, make_mesh, operands_of, put, specs_of
from support import TOLERANCE, assert_close, attend, fit, judge, relative_error, values_and_gradients, weighted_sum

CASE = Case((4,), 33, 140, 8, 4, 16)
KINDS = [(None, "11TS"), (None, "B1TS"), ("BNTS", "1NTS"), ("11TS", "1K1S"), ("BK", "BKTS"), ("1N", "1111")]


@pytest.fixture
def mesh(device):
    devices = jax.devices(device.platform)[:8]
    size = len(devices)
    shape = (size // 2, 2) if size % 2 == 0 else (1, 1)
    return Mesh(np.array(devices[: shape[0] * shape[1]]).reshape(shape), ("data", "heads"))


def by_data_and_heads(case, inputs):
    """A PartitionSpec for each field of Inputs: what is broadcast along an axis is replicated along it."""
    axis = lambda size, name: name if size > 1 else None
    array, vector = P("data", None, "heads", None), P("data", None, "heads")
    of_mask = lambda x: P(axis(x.shape[0], "data"), axis(x.shape[1], "heads"))
    mask = inputs.mask[0] if isinstance(inputs.mask, tuple) else inputs.mask
    return inputs._replace(
        q=array,
        k=array,
        v=array,
        dout=array,
        dlse=vector,
        mask=None if mask is None else of_mask(mask),
        bias=of_mask(inputs.bias),
    )


def by_queries(case, inputs):
    """Only what has a query axis is sharded; keys and values are replicated."""
    rows, vector = P(None, "data"), P(None, "data")
    of_mask = lambda x: P(None, None, "data" if x.shape[2] > 1 else None)
    return inputs._replace(
        q=rows,
        k=P(),
        v=P(),
        dout=rows,
        dlse=vector,
        mask=None if inputs.mask is None else of_mask(inputs.mask),
        bias=of_mask(inputs.bias),
    )


def differentiate_through(implementation, case, mesh, specs, check_vma):
    """The gradient of a loss over the result of a shard_map."""

    def run(q, k, v, mask, bias, dout, dlse):
        body = lambda q, k, v, mask, bias: attend(implementation, mask, case.options)(q, k, v, bias)
        sharded = jax.shard_map(
            body, mesh=mesh, in_specs=tuple(specs[:5]), out_specs=(specs.dout, specs.dlse), check_vma=check_vma
        )

        def loss(q, k, v, bias):
            out, lse = sharded(q, k, v, mask, bias)
            return weighted_sum(out, jnp.where(lse > -jnp.inf, lse, 0), dout, dlse), (out, lse)

        gradients, results = jax.grad(loss, (0, 1, 2, 3), has_aux=True)(q, k, v, bias)
        return *results, *gradients

    return run


def differentiate_inside(implementation, case, mesh, specs, check_vma):
    """The gradient taken in the body. With check_vma its types sum a replicated operand's gradient; without, we do."""
    outputs = (specs.dout, specs.dlse, specs.q, specs.k, specs.v, specs.bias)

    def body(*operands):
        *results, dq, dk, dv, dbias = values_and_gradients(implementation, case)(*operands)
        if not check_vma:
            dk, dv, dbias = (
                sum_over_missing(x, spec, mesh) for x, spec in ((dk, specs.k), (dv, specs.v), (dbias, specs.bias))
            )
        return *results, dq, dk, dv, dbias

    return jax.shard_map(body, mesh=mesh, in_specs=tuple(specs), out_specs=outputs, check_vma=check_vma)


def sum_over_missing(x, spec, mesh):
    missing = [name for name in mesh.axis_names if name not in spec]
    used = [name for name in missing if mesh.shape[name] > 1 and name in ("data", "heads")]
    return jax.lax.psum(x, tuple(used)) if used else x


def run_sharded(how, implementation, case, mesh, specs_of, check_vma):
    inputs = make(case)
    specs = specs_of(case, inputs)
    operands = inputs._replace(mask=as_jax_mask(inputs.mask))
    function = how(implementation, case, mesh, specs, check_vma)
    assert_close(oracle.Results(*map(np.asarray, jax.jit(function)(*operands))), judge(case, inputs), case.dtype)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("mask, bias", KINDS)
def test_differentiated_through_shard_map(implementation, mesh, mask, bias, check_vma):
    """Bias and mask replicated or sharded, of every kind (CASES 5, 6, 7, 29)."""
    case = fit(CASE.with_(mask=mask, bias=bias, is_causal=mask is None), implementation)
    run_sharded(differentiate_through, implementation, case, mesh, by_data_and_heads, check_vma)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("mask, bias", [(None, "11TS"), ("BK", "1K1S"), ("BNTS", "BNTS")])
def test_differentiated_inside_shard_map(implementation, mesh, mask, bias, check_vma):
    """Varying-axes types survive the backward pass, and a replicated bias gets the sum (CASES 7, 29)."""
    case = fit(CASE.with_(mask=mask, bias=bias), implementation)
    run_sharded(differentiate_inside, implementation, case, mesh, by_data_and_heads, check_vma)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("how", [differentiate_through, differentiate_inside])
def test_only_the_queries_sharded(implementation, mesh, how, check_vma):
    """dk, dv and a replicated bias's gradient are sums over devices (CASES 29)."""
    one_axis = Mesh(mesh.devices.reshape(-1), ("data",))
    case = fit(Case((2,), 40, 90, 4, 2, 16, mask="11TS", bias="1K1S"), implementation)
    run_sharded(how, implementation, case, one_axis, by_queries, check_vma)


def test_checkpointed_scan_inside_shard_map(implementation, mesh):
    """Layers in a loop, rematerialised, with a replicated bias that all of them share."""
    case = fit(CASE.with_(T=40, S=40, bias="11TS"), implementation)
    inputs = make(case)
    specs = by_data_and_heads(case, inputs)

    def loss(q, k, v, bias, mapped):
        def layer(x, _):
            return x + attend(implementation, None, dict(is_causal=True))(x, k, v, bias)[0], None

        layers = lambda q: jax.lax.scan(jax.checkpoint(layer), q, None, length=3)[0]
        total = (layers(q).astype(jnp.float32) ** 2).sum()
        return jax.lax.psum(total, ("data", "heads")) if mapped else total

    sharded = jax.shard_map(
        functools.partial(jax.grad(loss, (0, 1, 2, 3)), mapped=True),
        mesh=mesh,
        in_specs=(specs.q, specs.k, specs.v, specs.bias),
        out_specs=(specs.q, specs.k, specs.v, specs.bias),
    )
    operands = (*inputs[:3], inputs.bias)
    got = jax.jit(sharded)(*operands)
    want = jax.jit(jax.grad(functools.partial(loss, mapped=False), (0, 1, 2, 3)))(*operands)
    for a, b in zip(got, want):
        assert relative_error(a, np.asarray(b).astype(np.float64)) <= TOLERANCE[case.dtype][2]


def test_vmap_inside_shard_map(implementation, mesh):
    case = fit(CASE.with_(batch=(8,), mask="BNTS", bias="11TS"), implementation)
    inputs = make(case)
    specs = by_data_and_heads(case, inputs)

    def body(q, k, v, mask, bias):
        one = lambda q, k, v, mask: attend(implementation, mask, case.options)(q, k, v, bias[0])
        return jax.vmap(one)(q, k, v, mask)

    sharded = jax.shard_map(body, mesh=mesh, in_specs=tuple(specs[:5]), out_specs=(specs.dout, specs.dlse))
    out, lse = jax.jit(sharded)(*inputs[:5])
    want = judge(case, inputs)
    assert_close(oracle.Results(np.asarray(out), np.asarray(lse)), oracle.Results(want.out, want.lse), case.dtype)


BIASES = ["BNTS", "1NTS", "BKTS", "11TS", "1N1S", "B11S", "1111", None]
MASKS = [None, "B1TS", "1NTS", "B11S", "11T1"]
COMBINATIONS = [
    (name, bias, MASKS[(i + j) % len(MASKS)], (i + j) % 2 == 0)
    for (i, name), (j, bias) in itertools.product(enumerate(MESHES), enumerate(BIASES))
]


def through_shard_map(mesh, case, inputs, split, **options):
    """(values and gradients, compiled) through a shard_map over some axes of a mesh; queries may be split, keys not."""
    specs = specs_of(case, inputs, split, whole=False)
    manual = options.get("axis_names", set(mesh.axis_names))
    names = lambda axis: (axis,) if isinstance(axis, str) else axis or ()
    of = lambda spec: P(*(tuple(a for a in names(axis) if a in manual) or None for axis in spec))
    mask_spec, *in_specs = [jax.tree.map(of, spec, is_leaf=lambda x: isinstance(x, P)) for spec in specs[:5]]
    out_specs = tuple(map(of, specs[5:]))

    def run(mask, q, k, v, bias, dout, dlse):
        body = lambda mask, q, k, v, *bias: jax_dma.attention(q, k, v, mask, *bias, return_lse=True, **case.options)
        biases, chosen = ([], in_specs[:3]) if bias is None else ([bias], in_specs)
        function = jax.shard_map(body, mesh=mesh, in_specs=(mask_spec, *chosen), out_specs=out_specs, **options)
        values, vjp = jax.vjp(functools.partial(function, mask), q, k, v, *biases)
        return *values, *vjp((dout, dlse))

    operands = put(mesh, operands_of(inputs), specs)
    compiled = jax.jit(run).lower(*operands).compile()
    return compiled(*operands), compiled


@pytest.fixture
def eight_devices():
    if len(jax.devices("cpu")) < 8:
        pytest.skip("needs eight devices")


@pytest.mark.parametrize("name, bias, mask, check_vma", COMBINATIONS)
def test_every_mesh_and_pattern(eight_devices, name, bias, mask, check_vma):
    """Fully manual: nothing is moved but sums of the gradients of operands that several devices have."""
    sizes, split, batch = MESHES[name]
    case = Case(batch, 32, 140, 8, 2, 16, bias=bias, mask=mask)
    inputs = make(case)
    got, compiled = through_shard_map(make_mesh(sizes), case, inputs, split, check_vma=check_vma)
    assert_same(got, judge(case, inputs))
    *of_batch, queries, heads = split
    split_by = list(zip((*of_batch, heads, queries), () if bias is None else case.shape(bias)))
    summed = 2 * (queries is not None) + any(size == 1 and axis is not None for axis, size in split_by)
    found = collectives(compiled)  # XLA may do several sums in one
    assert set(found) == ({"all-reduce"} if summed else set()) and found.get("all-reduce", 0) <= summed


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("bias, mask", [("1NTS", "B1TS"), ("BKTS", None)])
def test_partly_manual(eight_devices, name, bias, mask):
    """Manual over some mesh axes, automatic over the others: right, but the others' parts are gathered."""
    sizes, split, batch = MESHES[name]
    case = Case(batch, 32, 140, 8, 2, 16, bias=bias, mask=mask)
    inputs = make(case)
    got, _ = through_shard_map(make_mesh(sizes), case, inputs, split, axis_names={"d"})
    assert_same(got, judge(case, inputs))


def test_operands_whose_types_differ_are_refused_below():
    """The primitive raises rather than type a gradient after its own operand, silently wrong (CASES 29)."""
    from jax_dma import op
    from jax_dma.tiles import Visibility

    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("data",))
    call = op.Call(1.0, 0.0, False, False, ("xla",))
    struct = jnp.ones((2, 4, 1, 8))
    body = lambda q, k: op.attend(call, q, k, k, Visibility(), None)[0]
    sharded = jax.shard_map(body, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    with pytest.raises(ValueError, match="manual mesh axes"):
        jax.jit(sharded)(struct, struct[:1])
