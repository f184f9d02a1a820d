"""jit, grad, vmap, scan, checkpoint, higher derivatives and export, against the oracle."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dma
import oracle
from cases import Case, as_jax_mask, make
from support import (
    TOLERANCE,
    assert_close,
    attend,
    calls,
    count_primitive,
    fit,
    judge,
    relative_error,
    values_and_gradients,
    weighted_sum,
)

OPERANDS = ("q", "k", "v", "mask", "bias")
SMALL = Case((2,), 33, 140, 4, 2, 16, mask="1KTS", bias="BNTS")


def elementwise(case, size, mapped, first_seed=0):
    """Inputs in which the named fields have a leading axis of independent values, and the Inputs of each element."""
    elements = [make(case, seed) for seed in range(first_seed, first_seed + size)]
    first = elements[0]
    each = [first._replace(**{name: getattr(x, name) for name in mapped}) for x in elements]
    join = lambda *xs: None if xs[0] is None else jax.tree.map(lambda *y: np.stack(y), *xs)
    return first._replace(**{name: join(*(getattr(x, name) for x in each)) for name in mapped}), each


def axes(mapped, axis=0):
    """in_axes for the operands and the cotangents (which are always mapped)."""
    return tuple(axis if name in mapped else None for name in OPERANDS) + (0, 0)


def mapped_subsets():
    """All, each alone, each left out, and bias and mask shared (CASES 4)."""
    yield OPERANDS
    yield from ((name,) for name in OPERANDS)
    yield from (tuple(x for x in OPERANDS if x != name) for name in OPERANDS)
    yield ("q", "k", "v")


@pytest.mark.parametrize("mapped", list(mapped_subsets()), ids="_".join)
def test_vmap_with_some_operands_unmapped(implementation, mapped):
    """vmap of values and of gradients, element by element; then the gradient of vmap, summed where shared (CASES 4)."""
    case = fit(SMALL, implementation)
    together, each = elementwise(case, 3, (*mapped, "dout", "dlse"))
    run = values_and_gradients(implementation, case)

    def both(*operands):
        by_element = jax.vmap(run, axes(mapped))(*operands)
        q, k, v, mask, bias, dout, dlse = operands

        def loss(q, k, v, bias):
            mapped_call = jax.vmap(
                lambda q, k, v, m, b: attend(implementation, m, case.options)(q, k, v, b), axes(mapped)[:5]
            )
            return weighted_sum(*mapped_call(q, k, v, mask, bias), dout, dlse)

        return by_element, jax.grad(loss, (0, 1, 2, 3))(q, k, v, bias)

    by_element, of_vmap = jax.jit(both)(*together)
    wanted = [judge(case, x) for x in each]
    for i, want in enumerate(wanted):
        assert_close(oracle.Results(*(np.asarray(x)[i] for x in by_element)), want, case.dtype)
    for name, got in zip(("q", "k", "v", "bias"), of_vmap):
        gradients = [getattr(want, "d" + name) for want in wanted]
        want = np.stack(gradients) if name in mapped else sum(gradients)
        assert relative_error(got, want) <= TOLERANCE[case.dtype][2], f"d{name} of vmap"


@pytest.mark.parametrize("mask", ["BN", "1K", "11T1", None])
def test_vmap_of_any_kind_of_mask(implementation, mask):
    case = fit(SMALL.with_(mask=mask, bias="1K1S", is_causal=mask != "BN"), implementation)
    mapped = tuple(name for name in OPERANDS if mask or name != "mask")
    together, each = elementwise(case, 2, (*mapped, "dout", "dlse"), first_seed=3)
    together = together._replace(mask=as_jax_mask(together.mask))
    results = jax.jit(jax.vmap(values_and_gradients(implementation, case), axes(mapped)))(*together)
    for i, x in enumerate(each):
        assert_close(oracle.Results(*(np.asarray(r)[i] for r in results)), judge(case, x), case.dtype)


def test_vmap_over_a_plan(implementation):
    case = fit(SMALL.with_(plan=True), implementation)
    together, each = elementwise(case, 2, ("q", "dout", "dlse"))
    plan = as_jax_mask(together.mask, case)
    results = jax.jit(jax.vmap(values_and_gradients(implementation, case), axes(("q",))))(*together._replace(mask=plan))
    for i, x in enumerate(each):
        assert_close(oracle.Results(*(np.asarray(r)[i] for r in results)), judge(case, x), case.dtype)


def test_vmap_over_trailing_axes(implementation):
    """in_axes and out_axes other than 0."""
    case = fit(SMALL, implementation)
    together, each = elementwise(case, 2, ("q", "bias"))
    q, bias = np.moveaxis(together.q, 0, 2), np.moveaxis(together.bias, 0, -1)
    call = lambda q, bias: attend(implementation, together.mask, case.options)(q, together.k, together.v, bias)[0]
    out = jax.jit(jax.vmap(call, in_axes=(2, -1), out_axes=1))(q, bias)
    for i, x in enumerate(each):
        assert relative_error(np.asarray(out)[:, i], judge(case, x).out) <= TOLERANCE[case.dtype][0]


def test_nested_vmap(implementation):
    """Two levels, each operand mapped at other ones: q at both, bias at the outer, k at the inner, the rest at none."""
    case = fit(SMALL, implementation)
    base = make(case)
    more = [[make(case, 10 * i + j) for j in range(3)] for i in range(2)]
    q = np.stack([np.stack([x.q for x in row]) for row in more])
    bias, k = np.stack([row[0].bias for row in more]), np.stack([x.k for x in more[0]])
    dout, dlse = (np.stack([np.stack([getattr(x, name) for x in row]) for row in more]) for name in ("dout", "dlse"))

    def gradients(q, k, bias, dout, dlse):
        return values_and_gradients(implementation, case)(q, k, base.v, base.mask, bias, dout, dlse)

    inner = jax.vmap(gradients, (0, 0, None, 0, 0))
    results = jax.jit(jax.vmap(inner, (0, None, 0, 0, 0)))(q, k, bias, dout, dlse)
    for i, j in itertools.product(range(2), range(3)):
        element = base._replace(q=q[i, j], k=k[j], bias=bias[i], dout=dout[i, j], dlse=dlse[i, j])
        assert_close(oracle.Results(*(np.asarray(x)[i, j] for x in results)), judge(case, element), case.dtype)


def test_vmap_keeps_what_is_shared_as_one():
    """An unmapped bias and mask reach the primitives once, not tiled, and dbias is not batched before its sum
    (CASES 30). Shapes are read off the jaxpr of the default path."""
    case = Case((2,), 30, 40, 4, 2, 16, mask="11TS", bias="11TS")
    inputs = make(case)
    many = lambda x: np.stack([x] * 50)

    def loss(q, bias):
        out = jax.vmap(lambda q: jax_dma.attention(q, inputs.k, inputs.v, inputs.mask, bias))(q)
        return out.sum()

    jax.clear_caches()
    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(many(inputs.q), inputs.bias)
    operands = [shape for shape in primitive_shapes(jaxpr) if shape[-2:] == (30, 40)]
    assert operands and max(np.prod(shape) for shape in operands if shape[0] == 1) == 30 * 40
    forward = [shape for shape in primitive_shapes(jaxpr, "jax_dma_forward") if shape[-2:] == (30, 40)]
    assert forward == [(1, 1, 1, 30, 40)]


def primitive_shapes(jaxpr, name="jax_dma_"):
    """The shapes of all operands of our primitives in a jaxpr."""
    shapes = []
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name.startswith(name):
            shapes += [x.aval.shape for x in equation.invars]
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns") or hasattr(getattr(inner, "jaxpr", None), "eqns"):
                shapes += primitive_shapes(inner, name)
    return shapes


def test_jacobian(implementation):
    """Every row of the jacobians of out with respect to q and bias."""
    case = fit(Case((), 3, 5, 2, 1, 4, Hv=3, mask="11TS", bias="1KTS"), implementation)
    inputs = make(case)
    call = lambda q, bias: attend(implementation, inputs.mask, case.options)(q, inputs.k, inputs.v, bias)[0]
    by_q, by_bias = jax.jit(jax.jacrev(call, (0, 1)))(inputs.q, inputs.bias)
    assert by_q.shape == inputs.dout.shape + inputs.q.shape and by_bias.shape == inputs.dout.shape + inputs.bias.shape
    want_q, want_bias = np.zeros(by_q.shape), np.zeros(by_bias.shape)
    for index in np.ndindex(inputs.dout.shape):
        unit = np.zeros(inputs.dout.shape)
        unit[index] = 1
        want = judge(case, inputs._replace(dout=unit, dlse=np.zeros_like(inputs.dlse)))
        want_q[index], want_bias[index] = want.dq, want.dbias
    for got, want in ((by_q, want_q), (by_bias, want_bias)):
        assert relative_error(got, want) <= TOLERANCE[case.dtype][2]


def test_scan_with_constants_closed_over(implementation):
    """k, v, mask and bias are constants of the loop body: the same as the loop written out (CASES 10)."""
    case = fit(Case((2,), 40, 40, 4, 2, 16, mask="1KTS", bias="11TS", is_causal=True), implementation)
    inputs = make(case)
    layer = attend(implementation, inputs.mask, case.options)

    def loss(q, k, v, bias, steps):
        def body(carry, _):
            out, lse = layer(carry, k, v, bias)
            return carry + out, lse.mean(where=lse > -np.inf)

        if steps == "scan":
            q, means = jax.lax.scan(body, q, None, length=4)
        else:
            means = []
            for _ in range(4):
                q, mean = body(q, None)
                means.append(mean)
        return (q.astype(jnp.float32) * inputs.dout).sum() + sum(means)

    run = lambda steps: jax.jit(lambda *x: jax.value_and_grad(functools.partial(loss, steps=steps), (0, 1, 2, 3))(*x))
    operands = (inputs.q, inputs.k, inputs.v, inputs.bias)
    (value, gradients), (expected, written_out) = run("scan")(*operands), run("loop")(*operands)
    assert relative_error(value, expected) < TOLERANCE[case.dtype][0]
    for got, want in zip(gradients, written_out):
        assert relative_error(got, np.asarray(want).astype(np.float64)) <= TOLERANCE[case.dtype][2]


def test_scan_over_layers_closing_over_nothing_but_constants(implementation):
    """The forward alone, all operands but the carry NumPy constants (CASES 10)."""
    case = fit(Case((1,), 40, 200, 2, 1, 16, mask="1K", bias="1N1S"), implementation)
    inputs = make(case)
    layer = attend(implementation, as_jax_mask(inputs.mask), case.options)
    final, _ = jax.jit(
        lambda q: jax.lax.scan(lambda x, _: (layer(x, inputs.k, inputs.v, inputs.bias)[0], None), q, None, length=3)
    )(inputs.q)
    expected = inputs.q
    for _ in range(3):
        expected = judge(case, inputs._replace(q=expected)).out.astype(inputs.q.dtype)
    assert relative_error(final, expected.astype(np.float64)) <= 3 * TOLERANCE[case.dtype][0]


NAMES = ("jax_dma_out", "jax_dma_lse", "jax_dma_plan")


@pytest.mark.parametrize("policy, forwards", [("none", 2), ("plain", 4), ("named", 2)])
def test_checkpoint_runs_the_forward_no_oftener_than_it_must(policy, forwards):
    """Two layers: a policy that saves the named residuals needs no second forward (CASES 16)."""
    assert (
        count_primitive(
            jax.make_jaxpr(jax.grad(two_layers(None, policy)))(*two_layer_inputs("float32")), "jax_dma_forward"
        )
        == forwards
    )


@pytest.mark.parametrize("policy", ["none", "named"])
def test_checkpoint_runs_the_kernel_no_oftener_than_it_must(kernels, policy):
    """The same, counted in the compiled program (where XLA may merge what a plain checkpoint repeats)."""
    inputs = two_layer_inputs("bfloat16")
    compiled = jax.jit(jax.grad(two_layers(kernels, policy), (0, 1))).lower(*inputs).compile()
    assert calls(compiled, "forward") == 2 and calls(compiled, "backward") == 2


def two_layer_inputs(dtype):
    inputs = make(Case((1,), 60, 60, 4, 2, 16, dtype=dtype, mask="1KTS", bias="1NTS"))
    return inputs.q, inputs.bias, inputs.k, inputs.v, inputs.mask


def two_layers(implementation, policy):
    def layer(x, bias, k, v, mask):
        return jnp.sin(jax_dma.attention(x, k, v, mask, bias, implementation=implementation))

    if policy != "none":
        rule = jax.checkpoint_policies.save_only_these_names(*NAMES) if policy == "named" else None
        layer = jax.checkpoint(layer, policy=rule)
    return lambda q, *rest: layer(layer(q, *rest), *rest).astype(jnp.float32).sum()


@pytest.mark.parametrize("policy", ["plain", "named"])
@pytest.mark.parametrize("mask", ["1KTS", "BK"])
def test_checkpoint_changes_no_gradient(implementation, policy, mask):
    case = fit(SMALL.with_(mask=mask), implementation)
    inputs = make(case)
    rule = jax.checkpoint_policies.save_only_these_names(*NAMES) if policy == "named" else None
    mask = as_jax_mask(inputs.mask)
    call = jax.checkpoint(lambda q, k, v, bias: attend(implementation, mask, case.options)(q, k, v, bias), policy=rule)
    results, vjp = jax.vjp(jax.jit(call), *inputs[:3], inputs.bias)
    got = oracle.Results(*map(np.asarray, (*results, *vjp((inputs.dout, inputs.dlse)))))
    assert_close(got, judge(case, inputs), case.dtype)


def test_bias_alone_differentiated(implementation):
    """q, k and v are constants (CASES 26)."""
    case = fit(SMALL, implementation)
    inputs = make(case)
    call = lambda bias: weighted_sum(
        *attend(implementation, inputs.mask, case.options)(*inputs[:3], bias), inputs.dout, inputs.dlse
    )
    assert relative_error(jax.jit(jax.grad(call))(inputs.bias), judge(case, inputs).dbias) <= TOLERANCE[case.dtype][2]


@pytest.mark.parametrize("argument", range(3))
def test_one_operand_differentiated(implementation, argument):
    case = fit(SMALL.with_(bias="1K1S", is_causal=True), implementation)
    inputs = make(case)
    call = lambda *x: weighted_sum(*attend(implementation, inputs.mask, case.options)(*x), inputs.dout, inputs.dlse)
    got = jax.jit(jax.grad(call, argument))(*inputs[:3], inputs.bias)
    assert relative_error(got, judge(case, inputs)[2 + argument]) <= TOLERANCE[case.dtype][2]


@pytest.mark.parametrize("used", ["out", "lse"])
def test_one_result_differentiated(implementation, used):
    """The other one's cotangent is a symbolic zero."""
    case = fit(SMALL, implementation)
    inputs = make(case)
    zero = {"out": "dlse", "lse": "dout"}[used]
    want = judge(case, inputs._replace(**{zero: np.zeros_like(getattr(inputs, zero))}))

    def loss(q, k, v, bias):
        out, lse = attend(implementation, inputs.mask, case.options)(q, k, v, bias)
        return (
            (out.astype(jnp.float32) * inputs.dout).sum()
            if used == "out"
            else jnp.where(lse > -np.inf, lse * inputs.dlse, 0).sum()
        )

    gradients = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*inputs[:3], inputs.bias)
    for name, got in zip(("dq", "dk", "dv", "dbias"), gradients):
        expected = getattr(want, name)
        if used == "lse" and name == "dv":
            assert not np.asarray(got).any()
        else:
            assert relative_error(got, expected) <= TOLERANCE[case.dtype][2], name


def test_shared_operands(implementation):
    """q, k and v are one array: the three gradients add up."""
    case = fit(Case((2,), 50, 50, 2, 2, 16, bias="11TS", is_causal=True), implementation)
    inputs = make(case)._replace(k=make(case).q, v=make(case).q)
    call = lambda x: weighted_sum(
        *attend(implementation, None, case.options)(x, x, x, inputs.bias), inputs.dout, inputs.dlse
    )
    want = judge(case, inputs)
    assert relative_error(jax.jit(jax.grad(call))(inputs.q), want.dq + want.dk + want.dv) <= TOLERANCE[case.dtype][2]


def oracle_gradients(case, inputs):
    """The oracle's gradient of weighted_sum as one function of a list [q, k, v, bias]."""

    def gradients(operands):
        q, k, v, bias = operands
        want = judge(case, inputs._replace(q=q, k=k, v=v, bias=bias))
        return [want.dq, want.dk, want.dv, want.dbias]

    return gradients


def directional(function, at, direction, step=1e-5):
    """Central differences of a function of a list of arrays."""
    moved = lambda sign: function([np.asarray(x, np.float64) + sign * step * d for x, d in zip(at, direction)])
    return [(a - b) / (2 * step) for a, b in zip(moved(1), moved(-1))]


@pytest.mark.parametrize(
    "options", [dict(), dict(is_causal=True, softcap=2.0), dict(mask="BK")], ids=["mask", "causal_softcap", "intervals"]
)
def test_reverse_over_reverse(implementation, options):
    """A Hessian-vector product against differences of the oracle's gradient."""
    case = fit(Case((1,), 12, 17, 4, 2, 8, mask="11TS", bias="1KTS").with_(**options), implementation)
    inputs = make(case)
    mask = as_jax_mask(inputs.mask)
    operands = (*inputs[:3], inputs.bias)
    direction = [x.astype(np.float64) for x in (lambda y: (*y[:3], y.bias))(make(case, 7))]
    visible_rows = ~np.isneginf(judge(case, inputs).lse)

    def loss(*operands):
        out, lse = attend(implementation, mask, case.options)(*operands)
        return (out.astype(jnp.float32) * inputs.dout).sum() + jnp.where(visible_rows, lse * inputs.dlse, 0).sum()

    def along(*operands):
        gradients = jax.grad(loss, (0, 1, 2, 3))(*operands)
        return sum((g.astype(jnp.float32) * d.astype(np.float32)).sum() for g, d in zip(gradients, direction))

    products = jax.jit(jax.grad(along, (0, 1, 2, 3)))(*operands)
    wanted = directional(oracle_gradients(case, inputs), operands, direction)
    for got, want in zip(products, wanted):
        assert relative_error(got, want) <= 3 * TOLERANCE[case.dtype][2]


def test_third_derivative_of_the_default():
    """To any order: d/ds of a Hessian-vector product along s, against float64 differences of the oracle."""
    case = Case((1,), 5, 6, 2, 1, 4, bias="1NTS")
    inputs = make(case)
    loss = lambda q: weighted_sum(
        *attend(None, None, case.options)(q, *inputs[1:3], inputs.bias), inputs.dout, inputs.dlse
    )
    along = lambda f: lambda q: (jax.grad(f)(q) * direction).sum()
    direction = make(case, 5).q
    got = jax.jit(jax.grad(along(along(loss))))(inputs.q)
    gradient = lambda operands: [oracle_gradients(case, inputs)([operands[0], *inputs[1:3], inputs.bias])[0]]
    step = 1e-3
    at = lambda s: gradient([inputs.q.astype(np.float64) + s * step * direction])[0]
    want = (at(1) - 2 * at(0) + at(-1)) / step**2
    assert relative_error(got, want) < 1e-3


@pytest.mark.parametrize("name", ["xla", "reference"])
def test_forward_mode(name):
    """jvp and jacfwd work where no kernel is involved."""
    case = Case((1,), 12, 17, 4, 2, 8, mask="11TS", bias="1KTS")
    inputs = make(case)
    operands = (*inputs[:3], inputs.bias)
    tangents = tuple(make(case, 7)[:3]) + (make(case, 7).bias,)
    _, (dout, dlse) = jax.jit(lambda *x: jax.jvp(attend(name, inputs.mask, case.options), x, tangents))(*operands)
    values = lambda x: [np.where(np.isneginf(r), 0, r) for r in oracle.attention(*x[:3], inputs.mask, x[3])[:2]]
    want_out, want_lse = directional(values, operands, tangents)
    assert relative_error(dout, want_out) < 1e-4 and relative_error(dlse, want_lse) < 1e-4


def test_forward_mode_of_a_kernel_is_jax_s_own_error():
    inputs = make(Case((1,), 4, 5, 2, 1, 8))
    for name in (None, *(n for n in ("cpu", "cuda") if n in jax_dma.available_implementations())):
        q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in inputs[:3])
        with pytest.raises(TypeError, match="custom_vjp"):
            jax.jvp(lambda q: jax_dma.attention(q, k, v, implementation=name), (q,), (q,))


@pytest.mark.parametrize("mask", ["1KTS", "BK"])
def test_export_for_cpu_and_cuda_from_one_trace(mask):
    """Serialised, read back, and called here, with its gradient; a mask of intervals is made inside."""
    case = Case((2,), 20, 140, 4, 2, 16, mask=mask, bias="11TS")
    inputs = make(case)
    numbers = tuple(inputs.mask) if len(mask) == 2 else (inputs.mask,)

    def call(q, k, v, bias, *numbers):
        made = jax_dma.KeyIntervals(*numbers) if len(numbers) == 2 else numbers[0]
        return jax_dma.attention(q, k, v, made, bias, return_lse=True)

    checks = [jax.export.DisabledSafetyCheck.custom_call(f"jax_dma_{x}") for x in ("forward", "backward", "plan")]
    exported = jax.export.export(jax.jit(call), platforms=("cpu", "cuda"), disabled_checks=checks)(
        *inputs[:3], inputs.bias, *numbers
    )
    assert exported.platforms == ("cpu", "cuda")
    back = jax.export.deserialize(exported.serialize(vjp_order=1))
    operands = (*inputs[:3], inputs.bias, *numbers)
    results = jax.jit(back.call)(*operands)
    _, vjp = jax.vjp(lambda *x: back.call(*x, *numbers), *operands[:4])
    got = oracle.Results(*map(np.asarray, (*results, *jax.jit(vjp)((inputs.dout, inputs.dlse)))))
    assert_close(got, judge(case, inputs), case.dtype)


def test_export_with_a_symbolic_batch():
    checks = [jax.export.DisabledSafetyCheck.custom_call("jax_dma_forward")]
    (b,) = jax.export.symbolic_shape("b")
    struct = lambda length, heads: jax.ShapeDtypeStruct((b, length, heads, 8), jnp.float32)
    export = jax.export.export(
        jax.jit(lambda q, k, v: jax_dma.attention(q, k, v, is_causal=True)), disabled_checks=checks
    )
    exported = export(struct(5, 4), struct(9, 2), struct(9, 2))
    case = Case((3,), 5, 9, 4, 2, 8, is_causal=True)
    inputs = make(case)
    assert relative_error(jax.jit(exported.call)(*inputs[:3]), judge(case, inputs).out) < 1e-5


def test_jit_does_not_retrace_for_new_contents(implementation):
    """Same shapes, other masks and biases: one compilation."""
    case = fit(SMALL, implementation)
    run = jax.jit(values_and_gradients(implementation, case))
    for seed in range(2):
        inputs = make(case, seed)
        assert_close(oracle.Results(*map(np.asarray, run(*inputs))), judge(case, inputs), case.dtype)
    assert run._cache_size() == 1


def test_without_jit(implementation):
    """Called eagerly, values and gradients."""
    case = fit(Case((1,), 9, 20, 2, 1, 8, mask="11TS", bias="1N1S"), implementation)
    inputs = make(case)
    got = oracle.Results(*map(np.asarray, values_and_gradients(implementation, case)(*inputs)))
    assert_close(got, judge(case, inputs), case.dtype)
