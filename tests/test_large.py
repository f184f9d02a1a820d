"""Arrays of more than 2**31 elements, on a GPU (CASES 17)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dma
import oracle
from support import TOLERANCE, relative_error

B, N, K, LENGTH, H = 8, 28, 4, 4096, 64  # 3.76e9 elements of mask and bias


def pattern(b, n, t, s):
    """A bias and a mask as functions of their index, cheap to make anywhere in the array (uint32 arithmetic)."""
    u = lambda x: x.astype(jnp.uint32)
    mixed = u(b) * 40503 + u(n) * 9973 + u(t) * 31337 + u(s) * 2654435
    mixed = (mixed ^ (mixed >> 7)) * np.uint32(2654435761)
    return ((mixed >> 16) % 1024).astype(jnp.float32) / 512 - 1, (mixed >> 9) % 4 != 0


@jax.jit
def large_mask_and_bias():
    index = [jax.lax.broadcasted_iota(jnp.int32, (B, N, LENGTH, LENGTH), axis) for axis in range(4)]
    bias, mask = pattern(*index)
    return mask, bias.astype(jnp.bfloat16)


@pytest.mark.gpu
def test_mask_and_bias_of_more_than_2_to_the_31_elements():
    """The last rows of the last heads are addressed with 64-bit offsets, forward and backward."""
    rng = np.random.default_rng(0)
    array = lambda heads: rng.standard_normal((B, LENGTH, heads, H), np.float32).astype(jnp.bfloat16)
    q, k, v, dout = array(N), array(K), array(K), array(N)
    mask, bias = large_mask_and_bias()
    assert bias.size > 2**31

    @jax.jit
    def run(q, k, v, mask, bias, dout):
        call = lambda q, bias: jax_dma.attention(q, k, v, mask, bias, return_lse=True, implementation="cuda")
        (out, lse), vjp = jax.vjp(call, q, bias)
        dq, dbias = vjp((dout, jnp.ones_like(lse)))
        rows = lambda x: x[:, -3:]  # of every batch entry and head
        return rows(out), rows(lse), rows(dq), dbias[:, :, -3:]

    got = [np.asarray(x) for x in run(q, k, v, mask, bias, dout)]
    for b in (0, B // 2, B - 1):  # whole problems of three queries each
        rows = np.s_[b : b + 1, LENGTH - 3 :]
        index = np.ix_([b], range(N), range(LENGTH - 3, LENGTH), range(LENGTH))
        some_bias, some_mask = (np.asarray(x) for x in pattern(*(jnp.asarray(i) for i in index)))
        want = oracle.attention(
            q[rows],
            k[b : b + 1],
            v[b : b + 1],
            some_mask,
            some_bias.astype(jnp.bfloat16),
            dout=dout[rows],
            dlse=np.ones((1, 3, N)),
        )
        allowed = dict(zip(("out", "lse", "dq", "dbias"), (*TOLERANCE["bfloat16"], TOLERANCE["bfloat16"][2])))
        for name, x in zip(allowed, got):
            assert relative_error(x[b : b + 1], getattr(want, name)) <= allowed[name], (name, b)


@pytest.mark.gpu
def test_a_long_row_of_keys():
    """One query over 524288 keys, bias and intervals per key and head."""
    S = 524288
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal(shape, np.float32).astype(np.float16)
        for shape in ((1, 1, 8, 64), (1, S, 2, 64), (1, S, 2, 64))
    )
    bias = rng.standard_normal((1, 2, 1, S), np.float32)
    start = (rng.random((1, 2, S)) < 0.5).astype(np.int32)
    mask = jax_dma.KeyIntervals(jnp.asarray(start), jnp.ones_like(start))
    out, lse = jax.jit(lambda *x: jax_dma.attention(*x, return_lse=True, implementation="cuda"))(q, k, v, mask, bias)
    want = oracle.attention(q, k, v, (start, np.ones_like(start)), bias)
    assert (
        relative_error(out, want.out) <= TOLERANCE["float16"][0]
        and relative_error(lse, want.lse) <= TOLERANCE["float16"][1]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("H", [32, 64, 128, 256])
@pytest.mark.parametrize("shape", [(1, 1), (6, 8)])
@pytest.mark.parametrize("mask", ["none", "causal", "dense", "window", "window per head"])
def test_a_bias_per_key_that_many_queries_use(H, shape, mask):
    """Small, large and hiding values (xla_ffi/cuda/sm90/bias_records.h); three queries are judged."""
    B, N, K, S = 6, 16, 8, 1500
    first = S - 3
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((B, S, heads, H), np.float32).astype(jnp.bfloat16) for heads in (N, K, K))
    bias = rng.standard_normal((*shape, 1, S), np.float32)
    bias[..., 1::2] *= 10
    bias[..., 300:310] = bias[..., 1200:1210] = -5000
    bias[:, 1:] += 700
    bias[..., ::7] = -np.inf
    heads = np.arange(N if mask == "window per head" else 1)[:, None]
    start = np.broadcast_to(np.arange(S) - 5 * heads, (1, heads.size, S)).astype(np.int32)
    end = start + 400
    seen = rng.random((1, 1, S, S)) < 0.5 if mask == "dense" else None

    @jax.jit
    def run(q, k, v, seen, start, end, bias):
        operand = jax_dma.KeyIntervals(start, end) if "window" in mask else seen
        causal = mask == "causal"
        return jax_dma.attention(q, k, v, operand, bias, is_causal=causal, return_lse=True, implementation="cuda")

    out, lse = run(q, k, v, seen, start, end, bias)
    its_mask = (start - first, end - first) if "window" in mask else None if seen is None else seen[:, :, first:]
    for b in (0, B - 1):
        rows = np.s_[b : b + 1, first:]
        its_bias = bias[min(b, len(bias) - 1)][None]
        want = oracle.attention(q[rows], k[b : b + 1], v[b : b + 1], its_mask, its_bias, is_causal=mask == "causal")
        assert relative_error(out[rows], want.out) <= TOLERANCE["bfloat16"][0]
        assert relative_error(lse[rows], want.lse) <= TOLERANCE["bfloat16"][1]


def test_windows_in_a_long_sequence(kernels):
    """Most tiles are far from the window: a query sees the same keys as in a short sequence, forward and backward."""
    T, window, rows, dtype = 50_000, 100, 64, "float32" if kernels == "cpu" else "bfloat16"
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        rng.standard_normal((1, T, heads, 16), np.float32).astype(jnp.dtype(dtype)) for heads in (2, 1, 1, 2)
    )
    starts = (0, 20_011, T - rows)  # only there the cotangent is not 0
    dout[:, [t for t in range(T) if not any(0 <= t - start < rows for start in starts)]] = 0
    mask = jax_dma.masks.sliding_window(T, T, window - 1)
    call = lambda q, k, v: jax_dma.attention(q, k, v, mask, is_causal=True, implementation=kernels)

    @jax.jit
    def run(q, k, v, dout):
        out, vjp = jax.vjp(call, q, k, v)
        return out, *vjp(dout)

    out, dq, dk, dv = (np.asarray(x) for x in run(q, k, v, dout))
    for start in starts:
        t, s = np.s_[:, start : start + rows], np.s_[:, max(0, start - window + 1) : start + rows]
        at, of = np.arange(T)[t[1], None], np.arange(T)[None, s[1]]
        seen = ((of <= at) & (of > at - window))[None, None]
        want = oracle.attention(q[t], k[s], v[s], seen, dout=dout[t], dlse=np.zeros((1, rows, 2)))
        for name, got in dict(out=out[t], dq=dq[t], dk=dk[s], dv=dv[s]).items():
            allowed = TOLERANCE[dtype][0 if name == "out" else 2]
            assert relative_error(got, getattr(want, name)) <= allowed, (name, start)
    far = np.ones(T, bool)
    for start in starts:
        far[max(0, start - window + 1) : start + rows] = False
    assert not np.asarray(dk[:, far]).any() and not np.asarray(dv[:, far]).any()
