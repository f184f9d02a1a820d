"""jax_dma.dot_product_attention against jax.nn.dot_product_attention, argument by argument."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dma
from support import count_primitive, largest_array, relative_error

ERROR = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}  # of out; 3 times that of gradients. Both sides round


def make(rng, dtype, B=2, T=9, S=9, N=4, K=2, H=8, bias=None, rank=4):
    """q, k, v, bias, dout; bias is a shape."""
    lead = (B,) if rank == 4 else ()
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    q, k, v, dout = draw(*lead, T, N, H), draw(*lead, S, K, H), draw(*lead, S, K, H), draw(*lead, T, N, H)
    return q, k, v, None if bias is None else draw(*bias), dout


def seen(
    B, T, S, N, mask=None, is_causal=False, query_seq_lengths=None, key_value_seq_lengths=None, local_window_size=None,
    scale=None,
):  # fmt: skip
    """bool [B, N, T, S], from the words of jax's documentation."""
    t, s = np.arange(T)[:, None], np.arange(S)[None, :]
    result = np.ones((B, N, T, S), bool)
    if mask is not None:
        result &= np.asarray(mask)
    if is_causal:
        result &= s <= t
    if local_window_size is not None:
        left, right = np.broadcast_to(local_window_size, 2)
        result &= (t - left <= s) & (s <= t + right)
    if query_seq_lengths is not None:
        result &= t < np.asarray(query_seq_lengths)[:, None, None, None]
    if key_value_seq_lengths is not None:
        result &= s < np.asarray(key_value_seq_lengths)[:, None, None, None]
    return result


def compare(inputs, mask=None, *, implementation=None, **options):
    """Values, residual and gradients; rows that see nothing are exactly 0 here, and differ by convention."""
    q, k, v, bias, dout = inputs
    (B, T, N, _), S = (1,) * (4 - q.ndim) + q.shape, k.shape[-3]
    sees = seen(B, T, S, N, mask, **options).any(-1).swapaxes(1, 2).reshape(q.shape[:-1])
    dout = jnp.where(sees[..., None], dout, 0)

    def run(function, implementation):
        def call(q, k, v, bias):
            return function(q, k, v, bias, mask, implementation=implementation, return_residual=True, **options)

        @jax.jit
        def both(q, k, v, bias):
            (out, residual), vjp = jax.vjp(call, q, k, v, bias)
            return out, residual, vjp((dout, jnp.ones_like(residual)))  # the residual has no gradient

        return both(q, k, v, bias)

    out, residual, gradients = run(jax_dma.dot_product_attention, implementation)
    want, want_residual, want_gradients = run(jax.nn.dot_product_attention, "xla")
    assert out.dtype == want.dtype and residual.dtype == want_residual.dtype and residual.shape == want_residual.shape
    assert not np.asarray(out)[~sees].any() and np.isneginf(np.asarray(residual, np.float32))[~sees].all()
    allowed, natural = ERROR[str(q.dtype)], np.linalg.norm(np.float32(dout).ravel())  # some gradients are 0 in theory
    assert relative_error(out, np.where(sees[..., None], np.float32(want), 0)) <= allowed
    assert relative_error(np.asarray(residual)[sees], np.float32(want_residual)[sees]) <= allowed
    for name, got, expected in zip(("dq", "dk", "dv", "dbias"), gradients, want_gradients):
        if expected is not None:
            assert got.dtype == expected.dtype
            assert relative_error(got, np.float32(expected), at_least=0.3 * natural) <= 3 * allowed, name


def test_signature():
    """Every parameter of the installed jax, in its place, with its kind and its default."""
    described = lambda f: [(x.name, x.kind, x.default) for x in inspect.signature(f).parameters.values()]
    assert described(jax_dma.dot_product_attention) == described(jax.nn.dot_product_attention)


LENGTHS = dict(query_seq_lengths=jnp.array([7, 0], jnp.int32), key_value_seq_lengths=jnp.array([3, 9], jnp.int32))
KEYS_OF_ONE = dict(key_value_seq_lengths=jnp.array([4], jnp.int32))
KEYS = dict(key_value_seq_lengths=jnp.array([4, 1], jnp.int32))


@pytest.mark.parametrize(
    "shapes, mask, options",
    [
        ({}, None, {}),
        ({}, None, dict(scale=0.3)),
        (dict(K=4), None, dict(is_causal=True)),
        (dict(K=1), None, dict(is_causal=True)),
        (dict(T=5, S=12), None, dict(is_causal=True)),  # aligned to the first key
        (dict(T=12, S=5), None, dict(is_causal=True)),
        (dict(T=1, S=6), None, dict(is_causal=True)),
        ({}, None, dict(query_seq_lengths=jnp.array([9, 4], jnp.int32))),
        ({}, None, dict(key_value_seq_lengths=jnp.array([0, 20], jnp.int32))),  # none, and more than there are
        ({}, None, LENGTHS),
        (dict(S=12), None, dict(is_causal=True, **LENGTHS)),
        ({}, None, dict(local_window_size=(3, 2))),
        ({}, None, dict(local_window_size=(3, 2), is_causal=True)),
        (dict(T=12, S=7), None, dict(local_window_size=(3, 0))),
        (dict(T=7, S=12), None, dict(local_window_size=2)),
        ({}, None, dict(local_window_size=(0, 0))),
        ({}, None, dict(local_window_size=(100, 1))),
        ({}, None, dict(local_window_size=(-1, 2))),
        ({}, None, dict(local_window_size=(1, 1), is_causal=True, **LENGTHS)),
        ({}, (2, 4, 9, 9), {}),
        ({}, (1, 1, 9, 9), dict(is_causal=True)),
        ({}, (9, 9), {}),
        (dict(S=11), (2, 1, 1, 11), dict(is_causal=True)),  # key padding
        (dict(S=11), (1, 1, 11), {}),
        (dict(S=11), (11,), {}),
        ({}, (4, 1, 9), KEYS),
        ({}, (2, 1, 9, 1), dict(is_causal=True)),  # query padding
        ({}, (1, 4, 1, 1), {}),
        (dict(S=12), (1, 4, 9, 12), dict(is_causal=True, local_window_size=5, **LENGTHS)),
        (dict(bias=(2, 4, 9, 9)), None, dict(is_causal=True)),
        (dict(bias=(1, 4, 9, 9)), (2, 1, 9, 9), LENGTHS),
        (dict(bias=(1, 1, 1, 9)), None, KEYS),
        (dict(bias=(9, 9)), None, {}),
        (dict(bias=(4, 9, 1)), (1, 9), {}),
        (dict(dtype="bfloat16", S=12), None, dict(is_causal=True, **LENGTHS)),
        (dict(dtype="bfloat16", T=12, S=7), None, dict(local_window_size=(3, 0))),
        (dict(dtype="bfloat16", bias=(1, 4, 9, 9)), (2, 1, 9, 9), LENGTHS),
        (dict(dtype="bfloat16", bias=(1, 1, 1, 9)), None, dict(is_causal=True, scale=0.3)),
        (dict(dtype="bfloat16", S=11), (2, 1, 1, 11), dict(is_causal=True)),
        (dict(dtype="bfloat16", rank=3, B=1), (4, 9, 9), KEYS_OF_ONE),
        (dict(rank=3, B=1), None, dict(is_causal=True)),
        (dict(rank=3, B=1, bias=(4, 9, 9)), (9, 9), dict(query_seq_lengths=jnp.array([5], jnp.int32))),
        (dict(rank=3, B=1, T=3), (1, 1, 3, 9), dict(local_window_size=(2, 2))),
    ],
)  # fmt: skip
def test_like_jax(shapes, mask, options):
    options, shapes = dict(options), dict(shapes)
    dtype = shapes.pop("dtype", "float32")
    rng = np.random.default_rng(len(str((shapes, mask, list(options)))))
    mask = None if mask is None else jnp.asarray(rng.random(mask) < 0.6)
    compare(make(rng, jnp.dtype(dtype), **shapes), mask, **options)


@pytest.mark.parametrize("seed", range(12))
def test_any_arguments(seed):
    """Arguments drawn together."""
    rng = np.random.default_rng(seed)
    B, T, S, K = (int(rng.integers(1, n)) for n in (4, 14, 14, 4))
    N = K * int(rng.integers(1, 4))
    full = (B, N, T, S)
    broadcast = lambda: tuple(int(n) if rng.random() < 0.6 else 1 for n in full)[int(rng.integers(0, 3)) :]
    maybe = lambda value: value if rng.random() < 0.5 else None
    mask = maybe(jnp.asarray(rng.random(broadcast()) < 0.7))
    lengths = lambda n: jnp.asarray(rng.integers(0, n + 2, B), jnp.int32)
    options = dict(
        is_causal=bool(rng.random() < 0.5),
        query_seq_lengths=maybe(lengths(T)),
        key_value_seq_lengths=maybe(lengths(S)),
        local_window_size=maybe(tuple(int(n) for n in rng.integers(0, 6, 2))),
    )
    dtype = jnp.dtype(rng.choice(["float32", "bfloat16"]))  # under jit on a CPU jax's own takes no float16
    compare(make(rng, dtype, B, T, S, N, K, bias=maybe(broadcast())), mask, **options)


def test_every_implementation(implementation):
    rng = np.random.default_rng(1)
    dtype = jnp.bfloat16 if implementation == "cuda" else jnp.float32
    inputs = make(rng, dtype, bias=(1, 4, 9, 9))
    compare(inputs, implementation=implementation, is_causal=True, local_window_size=(4, 0), **LENGTHS)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("N, K, use_vmap", [(4, 4, False), (4, 2, True), (4, 1, False), (4, 1, True)])
def test_cases_of_jax_groups(dtype, N, K, use_vmap):
    """The shapes, groups and tolerances of jax's own testDotProductAttention, which repeats heads."""
    q, k, v, _, dout = make(np.random.default_rng(0), jnp.dtype(dtype), 2, 128, 128, N, K, 32)
    ours = jax_dma.dot_product_attention
    if use_vmap:
        ours = jax.vmap(ours, in_axes=(0, 0, 0, None, None))
    wide = jnp.float32 if dtype == "float16" else q.dtype  # jax's own takes no float16 under jit on a CPU
    repeat = lambda x: jnp.repeat(x.astype(wide), N // K, axis=2)
    reference = jax.nn.dot_product_attention
    theirs = lambda q, k, v, *rest: reference(q.astype(wide), repeat(k), repeat(v), *rest).astype(dtype)
    results = []
    for function in (ours, theirs):

        @jax.jit
        def run(q, k, v, function=function):
            out, vjp = jax.vjp(function, q, k, v, None, None)
            return out, *vjp(dout)[:3]

        results.append(run(q, k, v))
    for got, want in zip(*results):
        np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=0.02, atol=0.02)


MODES = ["bias", "causal", "padding", "custom", "window"]
MODES += ["causal padding", "custom padding", "bias causal", "causal window"]


@pytest.mark.parametrize("mode", MODES)
def test_cases_of_jax_masks(mode):
    """The mask modes of jax's own testDotProductAttentionMask, its tolerances, and vjp of every operand."""
    T = S = 128
    causal, shape = "causal" in mode, (1, 4, T, S) if "bias" in mode else None
    inputs = make(np.random.default_rng(0), jnp.bfloat16, 2, T, S, 4, 4, 32, bias=shape)
    *operands, dout = inputs
    lengths = [None, None]
    if "padding" in mode:
        lengths = [jnp.array([T // 2, T // 4], jnp.int32), jnp.array([S // 4, S // 2], jnp.int32)]
    mask = jnp.tril(jnp.ones((1, 1, T, S), bool)) if "custom" in mode else None
    window = ((3, 2) if causal else (3, 0)) if "window" in mode else None
    results = []
    for function in (jax_dma.dot_product_attention, jax.nn.dot_product_attention):

        def call(q, k, v, bias, mask, query_lengths, key_lengths):
            return function(
                q, k, v, bias, mask, is_causal=causal, query_seq_lengths=query_lengths,
                key_value_seq_lengths=key_lengths, local_window_size=window,
            )  # fmt: skip

        @jax.jit
        def run(*operands):
            out, vjp = jax.vjp(call, *operands)
            return out, *vjp(dout)[:4]

        results.append(run(*operands, mask, *lengths))
    for got, want in zip(*results):
        if want is not None:
            np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("batch, use_vmap", [(1, False), (16, False), (16, True)])
def test_cases_of_jax_bias_gradient(batch, use_vmap):
    """As in jax's own testDotProductAttentionBiasGradient, also for the batches that cuDNN refuses there."""
    rng = np.random.default_rng(0)
    x, _, _, bias, _ = make(rng, jnp.bfloat16, batch, 128, 128, 4, 4, 32, bias=(batch, 4, 128, 128))
    mask = jnp.ones((1, 1, 128), bool)
    results = []
    for function in (jax_dma.dot_product_attention, jax.nn.dot_product_attention):
        call = lambda x, bias, mask: function(query=x, key=x, value=x, bias=bias, mask=mask)
        call = jax.vmap(call, in_axes=(0, 0, None)) if use_vmap else call
        gradient = jax.jit(lambda x, bias, mask: jax.vjp(lambda x, b: call(x, b, mask), x, bias)[1](x))
        results.append(gradient(x, bias, mask))
    for got, want in zip(*results):
        assert relative_error(got, np.float32(want)) <= 0.03


def test_what_differs_from_jax():
    """Rows that see nothing: 0 and zero gradients for the mean of the values. Nothing of them reaches anything."""
    q, k, v, bias, dout = make(np.random.default_rng(2), jnp.float32, bias=(1, 1, 9, 9))
    mask = jnp.ones((2, 1, 9, 9), bool).at[:, :, 3].set(False)
    call = lambda function: lambda q, k, v, bias: function(q, k, v, bias, mask)
    out, vjp = jax.vjp(call(jax_dma.dot_product_attention), q, k, v, bias)
    theirs = call(jax.nn.dot_product_attention)(q, k, v, bias)
    mean = jnp.repeat(v.mean(1), 2, axis=1)
    assert not out[:, 3].any() and jnp.allclose(theirs[:, 3], mean, atol=1e-6)
    dq, dk, dv, dbias = vjp(jnp.zeros_like(dout).at[:, 3].set(jnp.nan))
    assert not any(x.any() for x in (dq, dk, dv, dbias))
    hidden = jnp.where(jnp.arange(9) < 4, bias, -jnp.inf)  # a bias that hides, one row of it everything
    hidden = hidden.at[:, :, 3].set(-jnp.inf)
    out = jax_dma.dot_product_attention(q, k, v, hidden)
    theirs = jax.nn.dot_product_attention(q, k, v, hidden)
    assert not out[:, 3].any() and jnp.isnan(theirs[:, 3]).all()
    assert jnp.allclose(jnp.delete(out, 3, 1), jnp.delete(theirs, 3, 1), atol=1e-5)


def test_what_jax_does_not_take():
    """K heads in mask and bias, KeyIntervals and plans, any head dimension of values, any integer lengths."""
    q, k, v, bias, _ = make(np.random.default_rng(3), jnp.float32, bias=(1, 2, 9, 9))
    out = jax_dma.dot_product_attention(q, k, v, bias, bias > -0.5)
    twice = jnp.repeat(bias, 2, axis=1)
    assert jnp.allclose(out, jax.nn.dot_product_attention(q, k, v, twice, twice > -0.5), atol=1e-5)
    want = jax.nn.dot_product_attention(q, k, v, is_causal=True, key_value_seq_lengths=KEYS["key_value_seq_lengths"])
    lengths = np.array([4, 1])
    got = jax_dma.dot_product_attention(q, k, v, mask=jax_dma.masks.causal(9, 9), key_value_seq_lengths=lengths)
    assert jnp.allclose(got, want, atol=1e-5)
    plan = jax_dma.plan(jnp.tril(jnp.ones((1, 1, 9, 9), bool)), q, k)
    got = jax_dma.dot_product_attention(q, k, v, mask=plan, is_causal=True)
    assert jnp.allclose(got, jax.nn.dot_product_attention(q, k, v, is_causal=True), atol=1e-5)
    assert jax_dma.dot_product_attention(q, k, v[..., :3]).shape == (2, 9, 4, 3)


def test_a_bias_of_integers():
    """jax adds whatever it is given."""
    q, k, v, *_ = make(np.random.default_rng(4), jnp.float32)
    bias = jnp.arange(9) % 3
    got, want = jax_dma.dot_product_attention(q, k, v, bias), jax.nn.dot_product_attention(q, k, v, bias)
    assert jnp.allclose(got, want, atol=1e-5)


def test_a_learned_scale():
    """A traced scale is differentiable, as in jax; a concrete array of no axes is a number."""
    q, k, v, _, dout = make(np.random.default_rng(5), jnp.float32)
    loss = lambda function: lambda scale: (function(q, k, v, scale=scale, is_causal=True) * dout).sum()
    functions = (jax_dma.dot_product_attention, jax.nn.dot_product_attention)
    ours, theirs = (jax.value_and_grad(loss(function))(0.7) for function in functions)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    concrete = jax_dma.dot_product_attention(q, k, v, scale=jnp.float32(0.7))
    assert jnp.allclose(concrete, jax.nn.dot_product_attention(q, k, v, scale=0.7), atol=1e-5)


def test_windows_of_any_size():
    """Beyond int32 too, where jax's own overflow."""
    q, k, v, *_ = make(np.random.default_rng(6), jnp.float32)
    got, want = (jax_dma.dot_product_attention(q, k, v, local_window_size=(n, 1)) for n in (2**40, 100))
    assert (got == want).all()


def test_numpy_arrays():
    q, k, v, *_ = (np.asarray(x) for x in make(np.random.default_rng(6), jnp.float32, bias=(1, 1, 9, 9)))
    got = jax_dma.dot_product_attention(q, k, v, mask=np.tri(9, dtype=bool))
    assert jnp.allclose(got, jax.nn.dot_product_attention(q, k, v, is_causal=True), atol=1e-5)


def test_masks_that_are_intervals_take_linear_memory():
    """No [T, S] array for causal with T != S, windows, lengths and key padding, forward and backward."""
    T, S = 1024, 1536
    q, k, v, _, dout = make(np.random.default_rng(7), jnp.float32, 1, T, S, 1, 1, 4)
    mask = jnp.arange(S)[None] % 5 > 0
    lengths = jnp.array([1000], jnp.int32)

    def run(q, k, v, mask, lengths):
        call = lambda q, k, v: jax_dma.dot_product_attention(
            q, k, v, mask=mask, is_causal=True, local_window_size=(700, 3), query_seq_lengths=lengths,
            key_value_seq_lengths=lengths, implementation="xla",
        )  # fmt: skip
        return jax.vjp(call, q, k, v)[1](dout)

    assert largest_array(jax.jit(run).lower(q, k, v, mask, lengths).compile()) < T * S / 2
    dense = jax.make_jaxpr(lambda q: jax_dma.dot_product_attention(q, k, v, mask=mask, is_causal=True))(q)
    assert count_primitive(dense, "jax_dma_plan") == 0


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(mask=jnp.ones((9, 9))), TypeError, "mask must be bool, got float32.*`mask != 0`"),
        (dict(bias=jnp.ones((9, 9), bool)), TypeError, "bias must be floating point, got bool"),
        (dict(mask=jnp.ones((2, 3, 9, 9), bool)), ValueError, "mask's heads axis must be one of"),
        (dict(bias=jnp.ones((2, 1, 1, 9, 9))), ValueError, "bias must broadcast to 4 axes"),
        (dict(query=jnp.ones((2, 2, 9, 4, 8))), ValueError, "query must have 3 or 4 axes"),
        (dict(query_seq_lengths=jnp.ones(3, jnp.int32)), ValueError, r"query_seq_lengths must have shape \[B\]"),
        (dict(key_value_seq_lengths=jnp.ones(2)), TypeError, "key_value_seq_lengths must be integers"),
        (dict(local_window_size=1.5), TypeError, "local_window_size must be an integer or a pair"),
        (dict(local_window_size=(1, 2, 3)), TypeError, "local_window_size must be an integer or a pair"),
        (dict(implementation="flash"), ValueError, "implementation must be one or several of"),
        (dict(implementation="cudnn"), ValueError, "implementation='cuda' cannot serve this call"),  # float32
        (dict(query=jnp.ones((2, 9, 3, 8))), ValueError, "must be a multiple of the 2 heads"),
        (dict(key=jnp.ones((2, 9, 2, 8), jnp.bfloat16)), TypeError, "q, k and v must have one dtype"),
    ],
)  # fmt: skip
def test_errors(change, error, message):
    q, k, v, *_ = make(np.random.default_rng(8), jnp.float32)
    with pytest.raises(error, match=message):
        jax_dma.dot_product_attention(**{"query": q, "key": k, "value": v, **change})


def test_a_plan_is_not_combined():
    q, k, v, *_ = make(np.random.default_rng(9), jnp.float32)
    plan = jax_dma.plan(jnp.ones((1, 1, 9, 9), bool), q, k)
    with pytest.raises(ValueError, match="a MaskPlan cannot be combined"):
        jax_dma.dot_product_attention(q, k, v, mask=plan, local_window_size=3)
