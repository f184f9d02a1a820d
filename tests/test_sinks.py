"""Attention sinks: one more logit in every row, without a value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dma
from cases import Case, as_jax_mask, make
from support import TOLERANCE, fit, lse_error, relative_error

CASES = {
    "plain": Case(),
    "causal, bias, grouped": Case(is_causal=True, bias="BK1S", T=60, S=90),
    "empty rows": Case(mask="B1TS", bias="1NTS"),
    "intervals": Case(mask="BK", bias="B11S"),
    "bfloat16": Case(dtype="bfloat16", mask="1KTS", bias="1N1S"),
    "soft cap": Case(softcap=2.0, scale=0.4),
    "no batch axis": Case((), mask="11TS"),
}


def by_definition(q, k, v, mask, bias, sinks, case):
    """A softmax over one more column, in float64, written without the log-sum-exp."""
    T, S, N, K = q.shape[-3], k.shape[-3], q.shape[-2], k.shape[-2]
    heads = lambda x: jnp.repeat(x, N // K, -3) if x.shape[-3] == K else x
    rows = lambda x: jnp.swapaxes(x, -2, -3)
    q, k, v = rows(q), heads(rows(k)), heads(rows(v))
    logits = q @ jnp.swapaxes(k, -1, -2) * (case.H**-0.5 if case.scale is None else case.scale)
    logits = logits if case.softcap is None else case.softcap * jnp.tanh(logits / case.softcap)
    logits = logits if bias is None else logits + heads(bias)
    if isinstance(mask, tuple):
        mask = np.asarray(jax_dma.KeyIntervals(*map(jnp.asarray, mask)).dense(T))
    seen = np.ones((T, S), bool) if mask is None else heads(mask)
    seen = seen & (np.arange(S) <= np.arange(T)[:, None] + S - T) if case.is_causal else seen
    logits = jnp.where(seen, logits, -jnp.inf)
    column = jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([logits, column], -1), axis=-1)[..., :-1]
    lse = jnp.log(jnp.exp(logits).sum(-1) + jnp.exp(column[..., 0]))
    return rows(weights @ v), jnp.swapaxes(lse, -1, -2)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(implementation, name):
    case = fit(CASES[name], implementation)
    inputs = make(case)
    q, k, v, mask, bias, dout, dlse = inputs
    sinks = np.random.default_rng(1).standard_normal(case.N).astype(np.float32)

    @jax.jit
    def run(q, k, v, bias, sinks):
        call = lambda q, k, v, bias, sinks: jax_dma.attention(
            q, k, v, as_jax_mask(mask), bias, sinks=sinks, return_lse=True, implementation=implementation,
            **case.options,
        )  # fmt: skip
        results, vjp = jax.vjp(call, q, k, v, bias, sinks)
        return *results, *vjp((dout, dlse))

    got = run(q, k, v, bias, sinks)
    with jax.enable_x64(True):
        wide = lambda x: None if x is None else jnp.asarray(np.asarray(x, np.float64))
        reference = lambda q, k, v, bias, sinks: by_definition(q, k, v, mask, bias, sinks, case)
        results, vjp = jax.vjp(reference, *map(wide, (q, k, v, bias, sinks)))
        want = [None if x is None else np.asarray(x) for x in (*results, *vjp(tuple(map(wide, (dout, dlse)))))]
    out, lse, gradient = TOLERANCE[case.dtype]
    assert relative_error(got[0], want[0]) <= out
    assert lse_error(got[1], want[1]) <= lse
    for a, b in zip(got[2:], want[2:], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert relative_error(a, b) <= gradient


def test_a_row_that_sees_no_key(implementation):
    """out 0 and lse the sink, and no cotangent of its out reaches anything."""
    dtype = jnp.float16 if implementation == "cuda" else jnp.float32
    q, k, v = (jnp.ones((1, 4, 2, 8), dtype) for _ in range(3))
    mask = jnp.ones((1, 1, 4, 4), bool).at[..., 1, :].set(False)
    sinks = jnp.asarray([0.5, -jnp.inf])

    def call(q, k, v, sinks):
        return jax_dma.attention(q, k, v, mask, sinks=sinks, return_lse=True, implementation=implementation)

    (out, lse), vjp = jax.vjp(call, q, k, v, sinks)
    assert not out[0, 1].any()
    np.testing.assert_array_equal(lse[0, 1], sinks)
    poison = jnp.ones_like(out).at[0, 1].set(jnp.nan)
    for gradient in vjp((poison, jnp.zeros_like(lse))):
        assert jnp.isfinite(gradient).all()
    dsinks = vjp((jnp.zeros_like(out), jnp.zeros_like(lse).at[0, 1].set(1.0)))[-1]
    np.testing.assert_array_equal(dsinks[0], 1.0)


def test_minus_infinity_is_no_sink(implementation):
    case = fit(Case(bias="1NTS", mask="B1TS"), implementation)
    q, k, v, mask, bias, *_ = make(case)
    call = lambda **more: jax_dma.attention(q, k, v, mask, bias, return_lse=True, implementation=implementation, **more)
    for got, want in zip(call(sinks=jnp.full(case.N, -jnp.inf)), call()):
        np.testing.assert_array_equal(got, want)


def test_vmap_over_sinks(implementation):
    case = fit(Case((1,), T=20, S=30), implementation)
    q, k, v, *_ = make(case)
    sinks = jnp.asarray(np.random.default_rng(0).standard_normal((3, case.N)), jnp.float32)
    call = lambda sinks: jax_dma.attention(q, k, v, sinks=sinks, implementation=implementation)
    each = jnp.stack([call(x) for x in sinks])
    assert relative_error(jax.vmap(call)(sinks), each) <= TOLERANCE[case.dtype][0]


def test_replicated_sinks_in_shard_map():
    """Their gradient is the sum over devices, in float32."""
    mesh = jax.make_mesh((4,), ("b",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:4])
    P = jax.sharding.PartitionSpec
    case = Case((4,), T=20, S=20)
    q, k, v, *_ = make(case)
    sinks = jnp.linspace(-1, 1, case.N)
    loss = lambda q, k, v, sinks: (jax_dma.attention(q, k, v, sinks=sinks) ** 2).sum()
    split = jax.shard_map(
        lambda *x: jax.lax.psum(loss(*x), "b"), mesh=mesh, in_specs=(P("b"), P("b"), P("b"), P()), out_specs=P()
    )
    got = jax.jit(jax.grad(split, argnums=(0, 3)))(q, k, v, sinks)
    for a, b in zip(got, jax.grad(loss, argnums=(0, 3))(q, k, v, sinks)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "sinks, error, text",
    [
        ([0.0, 0.0], TypeError, "sinks must be an array"),
        (np.zeros(3, np.float32), ValueError, r"sinks must have shape \[N\] = \(2,\)"),
        (np.zeros((1, 2), np.float32), ValueError, r"got shape \(1, 2\)"),
        (np.zeros(1, np.float32), ValueError, "one logit for each query head"),
        (np.zeros(2, np.int32), TypeError, "sinks must be bfloat16.*int32"),
        (np.zeros(2, bool), TypeError, "sinks must be .*bool"),
    ],
)
def test_errors(sinks, error, text):
    q = np.zeros((1, 3, 2, 4), np.float32)
    with pytest.raises(error, match=text):
        jax_dma.attention(q, q, q, sinks=sinks)


def test_a_row_far_below_its_sink():
    """lse is that of the sink then, not 0."""
    q = k = v = jnp.ones((1, 3, 2, 8))
    bias, sinks = jnp.full((1, 1, 3, 1), -9e29), jnp.asarray([1.5, -2.0])
    out, lse = jax_dma.attention(q, k, v, None, bias, sinks=sinks, return_lse=True)
    np.testing.assert_allclose(lse, np.broadcast_to(sinks, lse.shape), rtol=1e-6)
    assert not np.asarray(out).any()
