"""Gathering the kept keys: the same values and gradients as the dense mask, at O(T * w) cost."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dma
import oracle
from jax_dma import kept_keys, masks
from support import assert_close, largest_array


def operands(seed, batch, T, S, N, K, H, bias_heads, dtype, bias_batch=None):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    bias = None if bias_heads is None else draw(*(batch if bias_batch is None else bias_batch), bias_heads, 1, S)
    return draw(*batch, T, N, H), draw(*batch, S, K, H), draw(*batch, S, K, H), bias


def scores(pattern, rng, shape):
    """Score patterns that make keys enter and leave in different ways."""
    s = np.arange(shape[-1])
    return {
        "random": lambda: rng.standard_normal(shape),
        "rising": lambda: np.broadcast_to(s, shape),
        "falling": lambda: np.broadcast_to(-s, shape),
        "constant": lambda: np.zeros(shape),
        "sawtooth": lambda: np.broadcast_to(s % 37, shape),
        "one long-lived key per tile": lambda: np.where(s % 128 == 5, 1e3 - s * 1e-3, rng.standard_normal(shape)),
        "heads differ": lambda: rng.standard_normal(shape) + np.arange(shape[-2])[:, None] * s,
    }[pattern]()


def check(mask, q, k, v, bias, implementation, **options):
    """Values and all gradients against the float64 oracle with the dense mask."""
    T = q.shape[-3]
    assert kept_keys.serves(mask, q, k, bias) is not None, "the call does not gather: the test would show nothing"
    rng = np.random.default_rng(7)
    dout = jnp.asarray(rng.standard_normal((*q.shape[:-1], v.shape[-1])), q.dtype)
    dlse = jnp.asarray(rng.standard_normal(q.shape[:-1]), jnp.float32)

    @jax.jit
    def run(q, k, v, bias):
        call = lambda q, k, v, bias: jax_dma.attention(
            q, k, v, mask, bias, return_lse=True, implementation=implementation, **options
        )
        results, vjp = jax.vjp(call, q, k, v, bias)
        return *results, *vjp((dout, dlse))

    got = oracle.Results(*(None if x is None else np.asarray(x) for x in run(q, k, v, bias)))
    seen = mask.dense(T)
    names = {"is_causal": "is_causal", "scale": "scale", "logits_soft_cap": "softcap"}
    oracle_options = {names[name]: value for name, value in options.items() if name in names}
    want = oracle.attention(q, k, v, np.asarray(seen), bias, dout=dout, dlse=dlse, **oracle_options)
    assert_close(got, want, q.dtype.name)


def dtype_of(implementation):
    return "float16" if implementation == "cuda" else "float32"


PATTERNS = ("random", "rising", "falling", "constant", "sawtooth", "one long-lived key per tile", "heads differ")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_score_patterns(linear, pattern):
    T = S = 801
    q, k, v, bias = operands(1, (2,), T, S, 4, 2, 24, 2, dtype_of(linear))
    mask = masks.top_k(jnp.asarray(scores(pattern, np.random.default_rng(2), (2, 2, S)), jnp.float32), 40)
    check(mask, q, k, v, bias, linear)


@pytest.mark.parametrize("pattern", ["random", "sawtooth"])
def test_longer_runs(linear, pattern, monkeypatch):
    """As where there are many keys, heads or batch entries."""
    T = S = 801
    q, k, v, bias = operands(1, (2,), T, S, 4, 2, 24, 2, dtype_of(linear))
    mask = masks.top_k(jnp.asarray(scores(pattern, np.random.default_rng(2), (2, 2, S)), jnp.float32), 100)
    assert kept_keys.serves(mask, q, k, bias) == 64
    monkeypatch.setattr(kept_keys, "_ENOUGH_TILES", 0)
    assert kept_keys.serves(mask, q, k, bias) == 128
    check(mask, q, k, v, bias, linear)


def test_what_the_kernel_leaves_unwritten_reaches_no_result(linear, monkeypatch):
    """NaN in each key tile of a list that has no key, in gradients of gradients too."""
    whole = kept_keys.take_by_kernel

    def take(listed, x, fill=True):
        rows = whole(listed, x)
        first_of_tile = jnp.repeat(listed.keys[..., ::128], 128, -1)
        unseen = jnp.swapaxes(first_of_tile == x.shape[-3], -1, -2)[..., None]
        poisoned.append(unseen.any())
        return rows if fill else jnp.where(unseen, jnp.nan, rows)

    S = 801
    q, k, v, bias = operands(5, (2,), S, S, 4, 2, 16, 1, dtype_of(linear), (1,))
    drawn = np.random.default_rng(6).standard_normal((1, 1, S))
    mask = masks.top_k(jnp.asarray(drawn, jnp.float32), 100)

    def first(*x):
        call = lambda *x: jax_dma.attention(*x[:3], mask, x[3], implementation=linear)
        return jax.vjp(call, *x)[1](q)

    second = lambda *x: jax.vjp(first, *x)[1]((q, k, v, bias))
    want, poisoned = [first(q, k, v, bias), second(q, k, v, bias)], []
    monkeypatch.setattr(kept_keys, "take_by_kernel", take)
    got = [first(q, k, v, bias), second(q, k, v, bias)]
    close = lambda x, y: np.testing.assert_allclose(x.astype(jnp.float32), y.astype(jnp.float32), rtol=2e-2, atol=2e-2)
    jax.tree.map(close, got, want)
    assert linear == "xla" or poisoned[0], "no tile was empty: the test would show nothing"


CASES = {
    "one mask for all heads and entries": dict(mask_shape=(1, 1), bias_heads=1, bias_batch=(1,)),
    "one mask, a bias for each query head": dict(mask_shape=(1, 1), bias_heads=4),
    "bias of each query head": dict(bias_heads=4),
    "bias shared by heads": dict(bias_heads=1),
    "bias shared by the batch": dict(bias_heads=2, bias_batch=(1,)),
    "no bias": dict(bias_heads=None),
    "T < S": dict(T=333),
    "decoding": dict(T=1),
    "a few queries": dict(T=5, options={"is_causal": True}),
    "T > S": dict(T=700, S=500),
    "w = 1": dict(window=1),
    "not causal, with the causal rule": dict(is_causal=False, options={"is_causal": True}),
    "soft cap and scale": dict(options={"logits_soft_cap": 3.0, "scale": -0.3}),
    "no batch": dict(batch=()),
    "two batch axes": dict(batch=(2, 1)),
    "deterministic": dict(options={"deterministic": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_named_cases(linear, name):
    case = dict(batch=(2,), T=601, S=601, window=30, bias_heads=2, bias_batch=None, is_causal=True, options={})
    case |= CASES[name]
    batch, T, S = case["batch"], case["T"], case["S"]
    q, k, v, bias = operands(3, batch, T, S, 4, 2, 40, case["bias_heads"], dtype_of(linear), case["bias_batch"])
    mask_shape = case.get("mask_shape", (*batch, 2))
    drawn = jnp.asarray(np.random.default_rng(4).standard_normal((*mask_shape, S)), jnp.float32)
    mask = masks.top_k(drawn, case["window"], T, is_causal=case["is_causal"])
    check(mask, q, k, v, bias, linear, **case["options"])


def test_segments_and_padding(linear):
    T = S = 700
    q, k, v, bias = operands(5, (1,), T, S, 4, 2, 16, 2, dtype_of(linear))
    rng = np.random.default_rng(6)
    ids = jnp.asarray(np.repeat([0, 1, 2, -1], [200, 7, 393, 100])[None], jnp.int32)
    valid = jnp.asarray(rng.random((1, S)) < 0.8)
    drawn = jnp.asarray(rng.integers(0, 9, (1, 2, S)), jnp.float32)
    mask = masks.top_k(drawn, 25, segment_ids=ids, valid=valid) & masks.sliding_window(T, S, 300)
    assert mask.scattered and mask.live == 25
    check(mask, q, k, v, bias, linear)


def test_vmap_keeps_what_is_not_mapped_shared(linear):
    T = S = 450
    dtype = dtype_of(linear)
    q, k, v, bias = operands(8, (3, 1), T, S, 2, 2, 16, 2, dtype)
    mask = masks.top_k(jnp.asarray(np.random.default_rng(9).standard_normal((1, 2, S)), jnp.float32), 20)
    call = lambda q, k, bias: jax_dma.attention(q, k, v[0], mask, bias, implementation=linear)
    loss = lambda *x: (call(*x).astype(jnp.float32) ** 2).sum()
    mapped = lambda f: jax.jit(jax.vmap(f, in_axes=(0, None, 0)))(q, k[0], bias)
    together = mapped(call), *mapped(jax.grad(loss, argnums=(0, 1, 2)))
    each = [(call(q[i], k[0], bias[i]), *jax.grad(loss, argnums=(0, 1, 2))(q[i], k[0], bias[i])) for i in range(3)]
    for got, want in zip(together, zip(*each)):
        tolerance = 1e-2 if dtype == "float16" else 1e-5  # p is rounded, and its scale depends on which keys come first
        np.testing.assert_allclose(got, np.stack(want), rtol=tolerance, atol=tolerance)


def test_a_broken_promise_is_not_silent(linear):
    T = S = 600
    q, k, v, _ = operands(10, (1,), T, S, 2, 2, 16, None, dtype_of(linear))
    mask = dataclasses.replace(masks.causal(T, S), live=20, scattered=True)
    assert kept_keys.serves(mask, q, k, None)
    out = np.asarray(jax_dma.attention(q, k, v, mask, implementation=linear))
    R = kept_keys.run_length(T, S, 20)
    whole = S // R  # runs that are long enough to overflow
    assert np.isnan(out[0, 3 * R : whole * R]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_kernels_do_what_plain_jax_does(seed):
    """Lists bit by bit, rows taken and sums, on random intervals and broadcast patterns."""
    rng = np.random.default_rng(seed)
    S, T = (int(n) for n in rng.integers(1, [9000, 900]))
    R, heads, group = int(rng.choice([64, 100, 512])), int(rng.choice([1, 2, 3])), int(rng.choice([1, 2]))
    batch = ((2,), (3, 1), ())[seed % 3]
    start = rng.integers(-T, T + 5, (*batch, heads, S))
    end = start + rng.integers(-3, rng.choice([4, T // 4 + 1, 2 * T]), start.shape)
    start, end = jnp.asarray(start, jnp.int32), jnp.asarray(end, jnp.int32)
    length = int(rng.choice([128, 1024, 9088]))
    on_gpu = kept_keys.Lists.of(start, end, T=T, R=R, length=length)
    want = kept_keys._list_keys_plain(start, end, T=T, R=R, length=length)
    for got, want in zip((on_gpu.keys, on_gpu.first, on_gpu.last, on_gpu.bounds, on_gpu.counts), want):
        np.testing.assert_array_equal(got, want)

    dtype = (jnp.bfloat16, jnp.float16, jnp.float32)[seed % 3]
    for channels, x_heads, x_batch in ((128, heads, batch), (1, heads * group, batch), (3, 1, (1,) * len(batch))):
        x = jnp.asarray(rng.standard_normal((*x_batch, S, x_heads, channels)), dtype)
        rows = kept_keys.take_by_kernel(on_gpu, x)
        np.testing.assert_array_equal(rows.astype(jnp.float32), kept_keys.take(on_gpu, x).astype(jnp.float32))
        has_key = np.repeat(np.asarray(on_gpu.keys)[..., ::128] < S, 128, -1)[..., :length].swapaxes(-1, -2)[..., None]
        has_key = np.broadcast_to(np.repeat(has_key, rows.shape[-2] // heads, -2), rows.shape)
        written = np.asarray(kept_keys.take_by_kernel(on_gpu, x, False).astype(jnp.float32))
        np.testing.assert_array_equal(written[has_key], np.asarray(rows.astype(jnp.float32))[has_key])
        overflow = np.asarray(on_gpu.counts)[..., 1].max() > length
        if not overflow:
            weights = jnp.asarray(rng.standard_normal(rows.shape), dtype)
            gradient = lambda take: jax.vjp(lambda x: take(on_gpu, x), x)[1](weights)[0].astype(jnp.float32)
            tolerance = 1e-2 if dtype != jnp.float32 else 1e-5
            got, want = gradient(kept_keys.take_by_kernel), gradient(kept_keys.take)
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=1e-4)


def test_the_lists():
    start = jnp.asarray([[0, 0, 3, 5, 4, 2, 0]], jnp.int32)
    end = jnp.asarray([[9, 2, 9, 5, 6, 6, 4]], jnp.int32)
    lists = kept_keys.Lists.of(start, end, T=8, R=4, length=6)
    # Queries 0-3: keys 0 and 6 are seen by all, 1, 2 and 5 by some; queries 4-7: 0, 2 by all, 4, 5 by some.
    np.testing.assert_array_equal(lists.keys[:, 0], [[0, 6, 1, 2, 5, 7], [0, 2, 4, 5, 7, 7]])
    np.testing.assert_array_equal(lists.first[:, 0], [[0, 0, 0, 3, 2, 0], [0, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(lists.last[:, 0], [[4, 4, 2, 4, 4, 0], [4, 4, 2, 2, 0, 0]])
    np.testing.assert_array_equal(lists.counts[:, 0], [[2, 5], [2, 4]])


def test_keys_that_leave_together_are_listed_together():
    """First what every query sees, then what the first one sees, from the last to leave on, then the others."""
    start = jnp.asarray([[0, 0, 0, 1, 0, 0]], jnp.int32)
    end = jnp.asarray([[1, 3, 9, 9, 2, 3]], jnp.int32)
    lists = kept_keys.Lists.of(start, end, T=4, R=4, length=8)
    np.testing.assert_array_equal(lists.keys[0, 0], [2, 1, 5, 4, 0, 3, 6, 6])


def test_nothing_to_gather(linear):
    """An empty batch, and no keys at all."""
    for batch, S in ((0, 600), (1, 0)):
        q, k, v, bias = operands(12, (batch,), 3, S, 2, 2, 16, 2, dtype_of(linear))
        mask = masks.top_k(jnp.zeros((batch, 2, S)), 20, 3)
        out = jax_dma.attention(q, k, v, mask, bias, implementation=linear)
        assert out.shape == q.shape and not np.asarray(out).any()


def test_when_it_gathers():
    """Only where two thirds of the work are saved; windows and documents stay in place."""
    q = k = jnp.zeros((1, 4096, 2, 8))
    drawn = jnp.zeros((1, 2, 4096))
    serves = lambda mask, bias=None: kept_keys.serves(mask, q, k, bias) is not None
    assert serves(masks.top_k(drawn, 512))
    assert not serves(masks.top_k(drawn, 2048))
    assert not serves(masks.sliding_window(4096, 4096, 100))
    assert not serves(masks.top_k(drawn, 512), jnp.zeros((1, 1, 4096, 4096)))


def test_run_length():
    """About `live`, twice that if it is short, or half of it where there would be few tiles, or lists too long."""
    for (T, live, heads), want in {
        (131_072, 2048, 8): 2048,
        (131_072, 4096, 8): 4096,
        (131_072, 1024, 8): 2048,
        (131_072, 512, 8): 1024,
        (131_072, 9000, 8): 4096,
        (131_072, 2048, 1): 1024,
        (12_000, 2048, 64): 1024,
        (8192, 512, 8): 256,
        (8192, 512, 64): 1024,
        (8192, 4096, 64): None,
    }.items():
        assert kept_keys.run_length(T, T, live, heads) == want, (T, live, heads)
    assert kept_keys.run_length(1, 131_072, 2048, 8) == 1


def test_no_array_is_larger_than_the_lists(linear):
    """O(T) memory at fixed w: doubling T doubles the largest array."""

    def largest(T):
        q, k, v, bias = operands(11, (1,), T, T, 2, 2, 8, 2, dtype_of(linear))
        drawn = jnp.zeros((1, 2, T))

        def loss(q, k, v, bias):
            return jax_dma.attention(q, k, v, masks.top_k(drawn, 64), bias, implementation=linear).sum()

        return largest_array(jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(q, k, v, bias).compile())

    assert largest(8192) <= 2.1 * largest(4096)
