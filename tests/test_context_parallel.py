"""Queries and keys split over a mesh axis: one device's values and gradients, and the promised collectives."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jax_dma
import oracle
from cases import Case, as_jax_mask, make
from jax_dma import context
from meshes import assert_same, collectives, make_mesh, operands_of, put
from support import assert_close, calls, errors, judge

CASE = Case((2,), 64, 64, 4, 2, 8)
MESHES = {
    "data x context": (dict(d=2, c=4), ("d", None)),
    "data x context x tensor": (dict(d=2, c=2, h=2), ("d", "h")),
    "two axes for the context": (dict(c=2, e=2, h=2), (None, "h")),
}
BIASES = ["BNTS", "1NTS", "BKTS", "11TS", "1N1S", "B11S", "11T1", "1111", None]
MASKS = [(None, True), ("B1TS", False), ("BK", True), ("B11S", True), (None, False), ("1NTS", True), ("1N", False)]
WAYS = list(itertools.product(context.METHODS, context.ORDERS))
# Every bias under every way, and with every mesh; each pair with another mask.
COMBINATIONS = [
    (list(MESHES)[(i + j) % 3], *WAYS[i], BIASES[j], *MASKS[(2 * i + j) % len(MASKS)])
    for i, j in itertools.product(range(len(WAYS)), range(len(BIASES)))
]


@pytest.fixture(autouse=True)
def eight_devices():
    if len(jax.devices("cpu")) < 8:
        pytest.skip("needs eight devices")


def in_order(change, case, operands, n, order):
    """``change`` (reorder or restore) of (mask, q, k, v, bias, dout, dlse), or of a part of these."""
    change = functools.partial(change, shards=n, order=order)
    mask, *rest = operands
    of_mask = mask if mask is None else change(mask, axis=None if len(case.mask) == 2 else (-2, -1))
    return [of_mask, *(x if x is None else change(x, axis=(-2, -1) if i == 3 else 1) for i, x in enumerate(rest))]


def forward_and_backward(function, operands):
    """The compiled forward pass, the compiled backward pass, and the results of both."""
    mask, q, k, v, bias, dout, dlse = operands
    differentiated = [q, k, v, *([] if bias is None else [bias])]
    forward = jax.jit(lambda mask, *xs: jax.vjp(functools.partial(function, mask), *xs))
    forward = forward.lower(mask, *differentiated).compile()
    values, vjp = forward(mask, *differentiated)
    backward = jax.jit(lambda vjp, cotangents: vjp(cotangents)).lower(vjp, (dout, dlse)).compile()
    return forward, backward, (*values, *backward(vjp, (dout, dlse))), vjp


def promised(case, method, n, summed):
    """Collectives of the forward and of the backward pass; ``summed``: the bias is on several devices."""
    travels = case.bias is not None and case.bias[2:] == "1S"
    all_reduce = {"all-reduce": 1} if summed else {}
    if method == "all_gather":
        gathered = 2 + travels
        mask = case.mask is not None and case.mask[2:] == "1S"
        return {"all-gather": gathered + mask}, {
            "all-gather": gathered, "reduce-scatter": gathered, **all_reduce,
        }  # fmt: skip
    mask = case.mask is not None and case.mask[2:] == "1S"
    steps = n - 1
    return {"collective-permute": steps * (2 + travels + mask)}, {
        "collective-permute": steps * (2 + travels + mask) + n * (2 + travels), **all_reduce,
    }  # fmt: skip


def run(name, method, order, case, kind=AxisType.Auto):
    sizes, (batch, heads) = MESHES[name]
    axis = ("c", "e") if "e" in sizes else "c"
    n = int(np.prod([sizes[a] for a in (axis if isinstance(axis, tuple) else (axis,))]))
    mesh = make_mesh(sizes, kind)
    inputs = make(case)
    function = lambda mask, q, k, v, *bias: context.attention(
        q, k, v, mask, *bias, axis=axis, method=method, order=order, batch_axes=batch, head_axes=heads,
        return_lse=True, **case.options,
    )  # fmt: skip
    array = P(batch, axis, heads)
    with jax.set_mesh(mesh):
        mask, q, k, v, bias, dout, dlse = in_order(context.reorder, case, operands_of(inputs), n, order)
        split = put(mesh, (q, k, v, dout, dlse), (array,) * 5)
        forward, backward, got, vjp = forward_and_backward(function, (mask, *split[:3], bias, *split[3:]))
        out, lse, dq, dk, dv, *dbias = got
        got = in_order(context.restore, case, (None, dq, dk, dv, *(dbias or [None]), out, lse), n, order)
    _, dq, dk, dv, dbias, out, lse = got
    assert_same((out, lse, dq, dk, dv, *([] if dbias is None else [dbias])), judge(case, inputs))
    replicated = case.bias is not None and (
        (batch and case.bias[0] == "1") or (heads and case.bias[1] == "1") or case.bias[2:] in ("11",)
    )
    return forward, backward, vjp, promised(case, method, n, replicated)


@pytest.mark.parametrize("name, method, order, bias, mask, is_causal", COMBINATIONS)
def test_one_devices_results(name, method, order, bias, mask, is_causal):
    """From jit, with automatic axes: values, all gradients (that of lse too), and exactly the promised collectives."""
    case = CASE.with_(bias=bias, mask=mask, is_causal=is_causal)
    forward, backward, _, (in_forward, in_backward) = run(name, method, order, case)
    assert collectives(forward) == in_forward
    assert collectives(backward) == in_backward


@pytest.mark.parametrize("method, order", WAYS)
def test_explicit_axes(method, order):
    """What batch and heads are split over is read off q's type; collectives are the same."""
    sizes, n = dict(d=2, c=2, h=2), 2
    case = CASE.with_(bias="1NTS", mask="BK", is_causal=True)
    inputs = make(case)
    function = lambda mask, q, k, v, bias: context.attention(
        q, k, v, mask, bias, axis="c", method=method, order=order, return_lse=True, is_causal=True
    )
    array, rows = P("d", "c", "h", None), P("d", "c", "h")
    mesh = make_mesh(sizes, AxisType.Explicit)
    with jax.set_mesh(mesh):
        mask, q, k, v, bias, dout, dlse = in_order(context.reorder, case, operands_of(inputs), n, order)
        q, k, v, bias, dout, dlse = put(mesh, (q, k, v, bias, dout, dlse), (array,) * 3 + (P(None, "h"), array, rows))
        forward, backward, got, _ = forward_and_backward(function, (mask, q, k, v, bias, dout, dlse))
        assert all(jax.typeof(x).sharding.spec == array for x in (got[0], *got[2:5]))
    out, lse, dq, dk, dv, dbias = map(np.asarray, got)
    _, dq, dk, dv, dbias, out, lse = in_order(context.restore, case, (None, dq, dk, dv, dbias, out, lse), n, order)
    assert_same((out, lse, dq, dk, dv, dbias), judge(case, inputs))
    in_forward, in_backward = promised(case, method, n, summed=True)
    assert collectives(forward) == in_forward
    # dbias goes from the devices' rows back to whole ones, as its operand is typed.
    assert collectives(backward) == {"all-gather": 1 + in_backward.pop("all-gather", 0), **in_backward}


def test_mixed_axes():
    """A mesh with an explicit axis, for the batch, and automatic ones."""
    q, k, v, _, bias, dout, _ = make(CASE.with_(bias="1NTS"))
    kinds = (AxisType.Explicit, AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((2, 2, 2), ("d", "c", "h"), axis_types=kinds, devices=jax.devices("cpu")[:8])

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(attention, q, k, v, bias, dout):
        out, vjp = jax.vjp(lambda q, k, v, bias: attention(q, k, v, None, bias, is_causal=True), q, k, v, bias)
        return out, *vjp(dout)

    want = gradients(jax_dma.attention, q, k, v, bias, dout)
    with jax.set_mesh(mesh):
        q, k, v, dout = put(mesh, (q, k, v, dout), (P("d"),) * 4)
        got = gradients(functools.partial(context.attention, axis="c", head_axes="h"), q, k, v, bias, dout)
    for x, y in zip(got, want):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


# How the parts of mask and bias come in a shard_map: what is said of the last two axes of an array.
PLACED = {
    "rows": P(None, None, "c", None),
    "columns": P(None, None, None, "c"),
    "whole": P(None, None, None, None),
}
IN_SHARD_MAP = [
    ("rows", "rows", "BNTS", "1NTS", True), ("columns", "rows", "1NTS", "B1TS", True),
    ("rows", "columns", "11TS", "BNTS", False), ("whole", "whole", "1NTS", "B1TS", True),
    ("whole", "columns", "B11S", "BK1S", True), ("columns", "whole", "B11S", "BK1S", False),
    ("columns", "columns", "BN", "1N1S", True), ("whole", "whole", "BK", "1111", True),
]  # fmt: skip


@pytest.mark.parametrize("method, order", WAYS)
@pytest.mark.parametrize("mask_is, bias_is, mask, bias, is_causal", IN_SHARD_MAP)
def test_inside_shard_map(method, order, mask_is, bias_is, mask, bias, is_causal):
    """Masks and biases split along queries or keys, or whole; check_vma on and off."""
    case = CASE.with_(bias=bias, mask=mask, is_causal=is_causal)
    n, inputs = 4, make(case)
    array, rows = P("d", "c"), P("d", "c")
    batched = lambda pattern, spec: P("d" if pattern[0] == "B" else None, *spec[1 : len(pattern) + 1])
    of_mask = P(None, None, "c" if mask_is == "columns" else None) if len(mask) == 2 else PLACED[mask_is]
    specs = (jax.tree.map(lambda _: batched(mask, of_mask), as_jax_mask(inputs.mask)), array, array, array)
    specs = (*specs, batched(bias, PLACED[bias_is]))
    local = lambda mask, q, k, v, bias: context.attention(
        q, k, v, mask, bias, axis="c", method=method, order=order, is_causal=is_causal, return_lse=True
    )
    check_vma = (mask_is == bias_is) == (method == "ring")
    function = jax.shard_map(
        local, mesh=make_mesh(dict(d=2, c=4)), in_specs=specs, out_specs=(array, rows), check_vma=check_vma
    )

    @jax.jit
    def run(mask, q, k, v, bias, dout, dlse):
        values, vjp = jax.vjp(functools.partial(function, mask), q, k, v, bias)
        return *values, *vjp((dout, dlse))

    out, lse, dq, dk, dv, dbias = run(*in_order(context.reorder, case, operands_of(inputs), n, order))
    _, dq, dk, dv, dbias, out, lse = in_order(context.restore, case, (None, dq, dk, dv, dbias, out, lse), n, order)
    assert_same((out, lse, dq, dk, dv, dbias), judge(case, inputs))


@pytest.mark.parametrize("method, order", WAYS)
def test_dynamic_mask_from_split_scores(method, order):
    """The window highest-scored keys of each query, in a shard_map and outside, with fewer queries than keys."""
    T, S, n = 32, 64, 4
    case = CASE.with_(T=T, S=S, is_causal=True)
    q, k, v, _, _, dout, _ = make(case)
    scores = np.random.default_rng(1).standard_normal((2, 2, S)).astype(np.float32)
    ids = np.repeat([[0, 0, 1, 2], [0, 3, 3, 3]], S // 4, axis=1)
    bias = scores[:, :, None]
    mesh = make_mesh(dict(d=2, c=4))
    options = dict(axis="c", order=order)
    top_k = functools.partial(context.top_k, window=9, query_length=T, **options)
    attention = functools.partial(context.attention, method=method, is_causal=True, **options)
    move = functools.partial(context.reorder, shards=n, order=order)
    back = functools.partial(context.restore, shards=n, order=order)
    moved = move(q, axis=1), move(k, axis=1), move(v, axis=1), move(bias, axis=-1), move(ids, axis=-1)

    def local(q, k, v, bias, ids):
        return attention(q, k, v, top_k(bias[:, :, 0], segment_ids=ids), bias)

    def outside(q, k, v, bias, ids):
        mask = top_k(bias[:, :, 0], mesh=mesh, segment_ids=ids)
        return attention(q, k, v, mask, bias, mesh=mesh, batch_axes="d")

    specs = (P("d", "c"),) * 3 + (P("d", None, None, "c"), P("d", "c"))
    inside = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("d", "c"))
    mask = jax_dma.masks.top_k(scores, 9, T, segment_ids=ids)
    plain = lambda q, k, v, bias, ids: jax_dma.attention(q, k, v, mask, bias, is_causal=True)

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(function, *operands):
        *operands, ids, dout = operands
        out, vjp = jax.vjp(lambda *xs: function(*xs, ids), *operands)
        return out, *vjp(dout)

    want = gradients(plain, q, k, v, bias, ids, dout)
    for function in (inside, outside):
        out, dq, dk, dv, dbias = gradients(function, *moved, move(dout, axis=1))
        got = *(back(x, axis=1) for x in (out, dq, dk, dv)), back(dbias, axis=-1)
        for x, y in zip(got, want):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("order", context.ORDERS)
def test_scattered_keys_are_gathered(order):
    """A small window of many keys: each device gathers the kept keys of its own queries (jax_dma.kept_keys)."""
    T, n = 512, 4
    q, k, v, _, bias, dout, _ = make(Case((1,), T, T, 4, 2, 8, bias="BK1S"))
    mesh = make_mesh(dict(c=n))

    def gradients(attention, top_k, q, k, v, bias, dout):
        function = lambda q, k, v, bias: attention(q, k, v, top_k(bias[:, :, 0], 8), bias, is_causal=True)
        out, vjp = jax.vjp(function, q, k, v, bias)
        return out, *vjp(dout)

    plain = jax.jit(functools.partial(gradients, jax_dma.attention, jax_dma.masks.top_k))
    split = functools.partial(
        gradients, *(functools.partial(f, axis="c", order=order) for f in (context.attention, context.top_k))
    )
    part, columns = P(None, "c"), P(None, None, None, "c")
    specs = (part, part, part, columns, part)
    split = jax.jit(jax.shard_map(split, mesh=mesh, in_specs=specs, out_specs=(*(part,) * 4, columns)))
    move, back = (functools.partial(f, shards=n, order=order) for f in (context.reorder, context.restore))
    operands = (*(move(x, axis=1) for x in (q, k, v)), move(bias, axis=-1), move(dout, axis=1))
    for i, (x, y) in enumerate(zip(split(*operands), plain(q, k, v, bias, dout))):
        np.testing.assert_allclose(back(x, axis=-1 if i == 4 else 1), y, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("method", context.METHODS)
def test_sinks(method):
    """A trainable logit for each head, of which heads and queries on several devices have the same."""
    q, k, v, _, _, dout, dlse = make(CASE)
    sinks = np.array([-1, 0.5, 2, -np.inf], np.float32)
    mesh = make_mesh(dict(d=2, c=2, h=2))
    options = dict(axis="c", method=method, order="zigzag", mesh=mesh, batch_axes="d", head_axes="h")

    def gradients(attention, *operands):
        *operands, dout, dlse = operands
        function = lambda q, k, v, sinks: attention(q, k, v, sinks=sinks, is_causal=True, return_lse=True)
        values, vjp = jax.vjp(function, *operands)
        return *values, *vjp((dout, dlse))

    run = jax.jit(gradients, static_argnums=0)
    move, back = (functools.partial(f, shards=2, axis=1, order="zigzag") for f in (context.reorder, context.restore))
    got = run(functools.partial(context.attention, **options), *map(move, (q, k, v)), sinks, *map(move, (dout, dlse)))
    for x, y in zip((*map(back, got[:5]), got[5]), run(jax_dma.attention, q, k, v, sinks, dout, dlse)):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def local_sizes(vjp):
    """The elements on one device of what is kept for the backward pass."""
    return [int(np.prod(x.sharding.shard_shape(x.shape))) for x in jax.tree.leaves(vjp)]


@pytest.mark.parametrize("method", context.METHODS)
def test_kept_for_the_backward_pass(method):
    """Nothing of all keys: no device keeps more than its own part of q, k, v, out and bias; the kernel runs once."""
    case = CASE.with_(bias="B11S", is_causal=True)
    forward, backward, vjp, _ = run("data x context", method, "zigzag", case)
    one_part = 64 // 4 * 4 * 8  # queries, heads, channels of one batch element
    assert max(local_sizes(vjp)) <= one_part
    if "cpu" in jax_dma.available_implementations():
        steps = 1 if method == "all_gather" else 4
        assert [calls(x, "forward") for x in (forward, backward)] == [steps, 0]
        assert [calls(x, "backward") for x in (forward, backward)] == [0, steps]


def test_unused_bias_gradient_is_not_computed():
    q, k, v, _, bias, *_ = make(CASE.with_(bias="1NTS"))
    mesh = make_mesh(dict(c=4))
    loss = lambda q, bias: context.attention(q, k, v, None, bias, axis="c", method="ring", mesh=mesh).sum()
    asked_for = lambda argnums: "want_dbias=True" in str(jax.make_jaxpr(jax.grad(loss, argnums))(q, bias))
    jax.clear_caches()
    assert not asked_for(0) and asked_for((0, 1))


@pytest.mark.parametrize("method, order", [("all_gather", "zigzag"), ("ring", "contiguous")])
def test_under_scan_checkpoint_and_vmap(method, order):
    """Layers in a scan, each rematerialised, with a bias that all share; a vmapped axis that not all operands have."""
    case = CASE.with_(bias="1N1S", is_causal=True)
    q, k, v, _, bias, *_ = make(case)
    mesh, n = make_mesh(dict(d=2, c=4)), 4

    def loss(attention, q, k, v, bias):
        layer = lambda x, _: (attention(x, k, v, None, bias, is_causal=True), None)
        run = lambda x: jax.lax.scan(jax.checkpoint(layer), x, None, length=2)[0]
        return (jax.vmap(run)(jnp.stack([q, q / 2])) ** 2).sum()

    split = functools.partial(
        context.attention, axis="c", method=method, order=order, mesh=mesh, batch_axes="d", implementation=None
    )
    gradient = jax.jit(jax.grad(loss, (1, 2, 3, 4)), static_argnums=0)
    operands = in_order(context.reorder, case, (None, q, k, v, bias), n, order)[1:]
    got = in_order(context.restore, case, (None, *gradient(split, *operands)), n, order)[1:]
    for x, y in zip(got, gradient(jax_dma.attention, q, k, v, bias)):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_longer_rings_are_loops(monkeypatch):
    monkeypatch.setattr(context, "_UNROLLED", 2)
    case = CASE.with_(bias="BKTS", mask="1N", is_causal=True)
    forward, *_ = run("data x context", "ring", "zigzag", case)
    assert collectives(forward) == {"collective-permute": 4}  # k and v, once beside and once in the loop


@pytest.mark.parametrize("method", context.METHODS)
def test_bfloat16(method):
    """Within what is promised for one device, a bfloat16 bias with a gradient from all devices included."""
    case = CASE.with_(T=128, S=128, H=16, dtype="bfloat16", bias="11T1", is_causal=True)
    inputs = make(case)
    mesh, n = make_mesh(dict(d=2, c=4)), 4
    function = lambda mask, q, k, v, bias: context.attention(
        q, k, v, mask, bias, axis="c", method=method, order="zigzag", mesh=mesh, batch_axes="d", is_causal=True,
        return_lse=True,
    )  # fmt: skip
    operands = in_order(context.reorder, case, operands_of(inputs), n, "zigzag")
    _, _, (out, lse, *gradients), _ = forward_and_backward(function, operands)
    restored = in_order(context.restore, case, (None, *gradients, out, lse), n, "zigzag")
    assert_close(oracle.Results(*restored[5:], *restored[1:5]), judge(case, inputs), "bfloat16")


def test_second_derivatives():
    """They exist with gathered keys, and are refused on a ring."""
    q, k, v, *_ = make(CASE.with_(batch=(1,), T=16, S=16, H=4))
    mesh = make_mesh(dict(c=2))

    def second(attention):
        first = lambda k: jax.grad(lambda q: (attention(q, k, v, is_causal=True) ** 2).sum())(q)
        return jax.jit(jax.grad(lambda k: (first(k) ** 2).sum()))(k)

    gathered = second(functools.partial(context.attention, axis="c", mesh=mesh))
    np.testing.assert_allclose(gathered, second(jax_dma.attention), rtol=1e-4, atol=1e-4)
    with pytest.raises(NotImplementedError, match="all_gather"):
        second(functools.partial(context.attention, axis="c", mesh=mesh, method="ring"))


@pytest.mark.parametrize("named", ["xla", "reference", ("cuda", "xla")])
def test_implementation_is_honoured(named):
    if "cuda" in jax_dma.available_implementations() and "cuda" in named:
        pytest.skip("CUDA kernels are no subject of this test")
    case = CASE.with_(bias="B11S")
    inputs = make(case)
    q, k, v, _, bias, *_ = inputs
    for method in context.METHODS:
        function = jax.jit(functools.partial(
            context.attention, axis="c", mesh=make_mesh(dict(c=4)), method=method, implementation=named
        ))  # fmt: skip
        compiled = function.lower(q, k, v, None, bias).compile()
        assert calls(compiled, "forward") == 0
        got = compiled(q, k, v, None, bias)
        want = judge(case, inputs)
        assert errors(oracle.Results(got, want.lse), oracle.Results(want.out, want.lse))["out"] <= 1e-5


def test_orders():
    """There and back; chunks as promised; every device has as much to do under a causal rule."""
    x = np.arange(48)
    assert context.reorder(x, 3, 0).tolist() == [*x[:8], *x[40:], *x[8:16], *x[32:40], *x[16:32]]
    np.testing.assert_array_equal(context.restore(context.reorder(x, 3, 0), 3, 0), x)
    np.testing.assert_array_equal(context.positions(48, 3), context.reorder(x, 3, 0))
    np.testing.assert_array_equal(context.reorder(x, 3, 0, order="contiguous"), x)
    mask = np.tri(48, dtype=bool)[None]
    moved = context.reorder(mask, 3, (-2, -1))
    assert len({int(part.sum()) for part in np.split(np.asarray(moved), 3, axis=-2)}) == 1
    np.testing.assert_array_equal(context.restore(moved, 3, (-2, -1)), mask)
    local = jax.shard_map(
        lambda: context.local_positions(12, "c"), mesh=make_mesh(dict(c=4)), in_specs=(), out_specs=P("c")
    )
    np.testing.assert_array_equal(local(), context.positions(48, 4))


ERRORS = {
    "method": (dict(method="tree"), ValueError, "method must be one of"),
    "order": (dict(order="striped"), ValueError, "order must be one of"),
    "axis": (dict(axis="x"), ValueError, "the mesh has axes .* and not 'x'"),
    "no axis": (dict(axis=()), ValueError, "at least one mesh axis"),
    "return_lse": (dict(return_lse=1), TypeError, "return_lse must be True or False"),
    "is_causal": (dict(is_causal=1), TypeError, "is_causal must be True or False"),
    "no mesh": (dict(mesh=None), ValueError, "pass mesh="),
    "heads": (dict(head_axes="c"), ValueError, "K = 2 cannot be split over the 4 devices"),
    "batch": (dict(batch_axes="c"), ValueError, "the batch = 2 cannot be split"),
    "implementation": (dict(implementation="fast"), ValueError, "implementation must be one"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_errors(what):
    options, error, message = ERRORS[what]
    q, k, v, *_ = make(CASE)
    with pytest.raises(error, match=message):
        context.attention(q, k, v, **{**dict(axis="c", mesh=make_mesh(dict(c=4))), **options})


def test_partly_manual_is_refused():
    q, k, v, *_ = make(CASE)
    function = lambda q, k, v: context.attention(q, k, v, axis="c", head_axes="h")
    mapped = jax.shard_map(
        function, mesh=make_mesh(dict(c=2, h=2)), in_specs=P(None, "c"), out_specs=P(None, "c"), axis_names={"c"}
    )
    with pytest.raises(ValueError, match="manual over \\['c'\\], and not over 'h'"):
        jax.jit(mapped)(q, k, v)


def test_errors_about_shapes():
    mesh = make_mesh(dict(c=4))
    q, k, v, *_ = make(CASE.with_(T=62))
    with pytest.raises(ValueError, match="T = 62 cannot be split over the 4 devices"):
        context.attention(q, k, v, axis="c", mesh=mesh)
    q, k, v, *_ = make(CASE.with_(S=68))
    with pytest.raises(ValueError, match="even S"):
        context.attention(q, k, v, axis="c", mesh=mesh, order="zigzag")
    with pytest.raises(ValueError, match="62 cannot be cut into 2 equal chunks for each of 4"):
        context.reorder(np.zeros(62), 4, 0)
    with pytest.raises(TypeError, match="axis must say"):
        context.reorder(np.zeros(64), 4)
    q, k, v, mask, *_ = make(CASE.with_(mask="11TS"))
    with pytest.raises(TypeError, match="MaskPlan"):
        context.attention(q, k, v, jax_dma.plan(mask, q, k), axis="c", mesh=mesh)
    with pytest.raises(TypeError, match="mask must be bool"):
        context.attention(q, k, v, mask.astype(np.float32), axis="c", mesh=mesh)
    both = jax.shard_map(
        lambda q, k, v, mask: context.attention(q, k, v, mask, axis="c"), mesh=make_mesh(dict(c=4, x=2)),
        in_specs=(P(None, "c"),) * 3 + (P(None, None, "c", "x"),), out_specs=P(None, "c"),
    )  # fmt: skip
    with pytest.raises(ValueError, match="this device's 16 queries and only"):
        both(q, k, v, mask[..., :32])
