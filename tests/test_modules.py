"""jax_dma.flax.DynamicMaskAttention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dma
import jax_dma.flax
from jax_dma import masks
from support import largest_array

pytest.importorskip("flax")
from flax import nnx  # noqa: E402

FEATURES, N, K, WINDOW = 24, 4, 2, 6


def module(window=WINDOW, **options):
    """With an A that tells keys apart, as a trained one does."""
    options = {"rotary": jax_dma.flax.rotary, "norm_epsilon": 1e-6, "num_kv_heads": K, **options}
    a_init = lambda key, shape, dtype: jax.random.normal(key, shape, dtype)
    return jax_dma.flax.DynamicMaskAttention(FEATURES, N, window, a_init=a_init, rngs=nnx.Rngs(0), **options)


def inputs(length, batch=(2,), seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((*batch, length, FEATURES)), dtype)


def by_definition(layer, x, valid=None, window=WINDOW):
    """The same from the layer's parts, with a dense mask that a loop over queries makes."""
    T, heads = x.shape[-2], lambda y: y.reshape(*y.shape[:-1], -1, layer.head_dim)
    q, k, v = layer.query_norm(heads(layer.query(x))), layer.key_norm(heads(layer.key(x))), heads(layer.value(x))
    q, k = (layer.rotary(y, jnp.arange(T)) for y in (q, k))
    steps = jax.nn.softplus(v.reshape(*v.shape[:-2], -1) @ layer.score.kernel[...])
    score = jnp.swapaxes(steps * layer.A[...], -1, -2)
    score = jnp.exp(score) if layer.score_function == "exp" else score
    seen, numbers = np.zeros((*score.shape[:-1], T, T), bool), np.asarray(score)
    if layer.recency is not None:
        numbers = numbers + np.array(layer.recency)[:, None] * np.arange(T)
    allowed = np.ones((*x.shape[:-2], T), bool) if valid is None else np.asarray(valid)
    for *at, t in np.ndindex(*score.shape[:-1], T):
        keys = [s for s in range(t + 1) if allowed[(*at[:-1], s)]]
        ranked = sorted(keys, key=lambda s: (-numbers[(*at, s)], s))
        seen[(*at, t, ranked[:window])] = True
    out = jax_dma.attention(q, k, v, seen, score[..., None, :], implementation="reference")
    return layer.out(out.reshape(*x.shape[:-1], -1))


@pytest.mark.parametrize("score, recency", [("exp", None), ("linear", None), ("linear", (0.1, 0.0))])
@pytest.mark.parametrize("batch", [(), (2,), (2, 1)])
def test_the_formula(score, recency, batch):
    layer, x = module(score=score, recency=recency), inputs(17, batch)
    np.testing.assert_allclose(layer(x), by_definition(layer, x), rtol=1e-5, atol=1e-5)


def test_recency():
    """Large enough, it makes a window of the last keys; the bias does not have it."""
    layer, x = module(recency=(100.0, 100.0)), inputs(17)
    valid = jnp.ones((2, 17), bool)
    last = by_definition(layer, x)
    np.testing.assert_allclose(layer(x), last, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(layer(x[:, :WINDOW]), module()(x[:, :WINDOW]), rtol=1e-5, atol=1e-5)
    later = layer(x, valid=valid.at[:, 0].set(False))  # the first token is seen by the first queries only
    np.testing.assert_allclose(later[:, WINDOW:], last[:, WINDOW:], rtol=1e-5, atol=1e-5)


def test_padding_and_segments():
    layer, x = module(), inputs(17)
    valid = jnp.asarray(np.random.default_rng(1).random((2, 17)) < 0.7)
    want = by_definition(layer, x, valid)
    np.testing.assert_allclose(layer(x, valid=valid), want, rtol=1e-5, atol=1e-5)
    packed = layer(x, segment_ids=jnp.array([[0] * 9 + [1] * 8] * 2), positions=jnp.array([*range(9), *range(8)]))
    for part in (slice(0, 9), slice(9, 17)):
        np.testing.assert_allclose(packed[:, part], layer(x[:, part]), rtol=1e-5, atol=1e-5)


def test_a_window_for_all_is_full_attention_with_the_bias():
    x = inputs(13)
    for window in (13, 50):
        layer = module(window)
        valid = jnp.ones((2, 13), bool)
        np.testing.assert_allclose(layer(x), by_definition(layer, x, window=13), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(layer(x, valid=valid), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("score", ["exp", "linear"])
def test_gradients_reach_all_parameters(score):
    layer, x = module(score=score, use_bias=True), inputs(17)
    gradients = nnx.grad(lambda layer: (layer(x) ** 2).sum())(layer)
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    assert len(leaves) == 6 + 5 + 2  # projections and A, their biases, norms
    for path, gradient in leaves:
        if "key" in str(path) and "bias" in str(path):
            continue  # nearly invisible to a softmax
        assert jnp.abs(gradient).max() > 1e-6, path


def decode(layer, x, cache, valid=None):
    """One token at a time under lax.scan."""
    graph, state = nnx.split(layer)

    @jax.jit
    def run(state, x, cache, valid):
        def step(cache, token):
            x, valid = token
            out, cache = nnx.merge(graph, state)(x[..., None, :], cache=cache, valid=valid[..., None])
            return cache, out[..., 0, :]

        return jax.lax.scan(step, cache, (jnp.moveaxis(x, -2, 0), jnp.moveaxis(valid, -1, 0)))

    valid = jnp.ones(x.shape[:-1], bool) if valid is None else valid
    cache, out = run(state, x, cache, valid)
    return jnp.moveaxis(out, 0, -2), cache


@pytest.mark.parametrize("batch, padded, recency", [((), False, None), ((2,), True, None), ((2,), True, (0.1, 2.0))])
def test_decoding_is_the_full_pass(batch, padded, recency):
    layer, x = module(recency=recency), inputs(30, batch)
    valid = jnp.asarray(np.random.default_rng(2).random(x.shape[:-1]) < 0.7) if padded else None
    out, cache = decode(layer, x, layer.empty_cache(*batch), valid)
    np.testing.assert_allclose(out, layer(x, valid=valid), rtol=1e-4, atol=1e-5)
    assert cache.key.shape == (*batch, WINDOW, K, FEATURES // N) and cache.length == 30


@pytest.mark.parametrize("parts", [(3, 27), (12, 1, 1, 16)])
def test_a_prompt_in_parts(parts):
    """Prefill of any length, then more, token by token or in chunks."""
    layer, x = module(recency=(0.0, 0.1)), inputs(30)
    valid = jnp.asarray(np.random.default_rng(3).random((2, 30)) < 0.8)
    cache, outs, at = layer.empty_cache(2), [], 0
    for length in parts:
        part = slice(at, at + length)
        out, cache = layer(x[:, part], valid=valid[:, part], cache=cache)
        outs.append(out)
        at += length
    np.testing.assert_allclose(jnp.concatenate(outs, 1), layer(x, valid=valid), rtol=1e-4, atol=1e-5)
    _, one_by_one = decode(layer, x, layer.empty_cache(2), valid)
    np.testing.assert_array_equal(*(jnp.sort(x.position, -1) for x in (cache, one_by_one)))


def test_ties_in_decoding():
    """A = 0: all scores are equal, and the oldest keys stay."""
    layer = jax_dma.flax.DynamicMaskAttention(FEATURES, N, WINDOW, num_kv_heads=K, rngs=nnx.Rngs(0))
    x = inputs(20)
    out, cache = decode(layer, x, layer.empty_cache(2))
    np.testing.assert_allclose(out, layer(x), rtol=1e-4, atol=1e-5)
    assert (jnp.sort(cache.position, -1) == jnp.arange(WINDOW)).all()
    first, cache = layer(x[:, :9], cache=layer.empty_cache(2))
    second, cache = layer(x[:, 9:], cache=cache)
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), out, rtol=1e-4, atol=1e-5)


def test_a_short_cache():
    layer, x = module(window=50), inputs(9)
    cache = layer.empty_cache(2, max_length=9)
    assert cache.score.shape == (2, K, 9)
    out, _ = decode(layer, x, cache)
    np.testing.assert_allclose(out, layer(x), rtol=1e-4, atol=1e-5)


def test_sixteen_bits():
    layer, x = module(dtype=jnp.bfloat16), inputs(20, dtype=jnp.bfloat16)
    out = layer(x)
    assert out.dtype == jnp.bfloat16 and layer.scores(jnp.zeros((2, 5, K, 6), jnp.bfloat16)).dtype == jnp.float32
    cache = layer.empty_cache(2)
    assert cache.key.dtype == jnp.bfloat16
    decoded, _ = decode(layer, x, cache)
    np.testing.assert_allclose(decoded.astype(jnp.float32), out.astype(jnp.float32), rtol=0.05, atol=0.05)


def test_long_contexts_gather():
    """No array of T * T: the largest one grows with T."""
    layer = module(window=64)
    graph, state = nnx.split(layer)

    def largest(T):
        step = jax.jit(jax.grad(lambda state, x: nnx.merge(graph, state)(x).sum()))
        return largest_array(step.lower(state, jax.ShapeDtypeStruct((1, T, FEATURES), jnp.float32)).compile())

    assert largest(4096) <= 2.1 * largest(2048)
    q, k = (jax.ShapeDtypeStruct((1, 2048, heads, 6), jnp.float32) for heads in (N, K))
    kept = masks.top_k(jnp.zeros((1, K, 2048)), 64)
    assert jax_dma.explain(q, k, k, kept).path.kind == "kept keys"


def test_linen():
    """Flax's own bridge makes a linen module of it."""
    layer = nnx.bridge.to_linen(jax_dma.flax.DynamicMaskAttention, FEATURES, N, WINDOW, num_kv_heads=K)
    x = inputs(17)
    variables = layer.init(jax.random.key(0), x)
    out = jax.jit(layer.apply)(variables, x)
    assert out.shape == x.shape and set(variables["params"]) == {"A", "query", "key", "value", "score", "out"}


def test_rotary_depends_on_the_distance_alone():
    x, y = (jnp.asarray(np.random.default_rng(i).standard_normal((1, 1, 1, 8)), jnp.float32) for i in (0, 1))
    dot = lambda i, j: (jax_dma.flax.rotary(x, jnp.array([i])) * jax_dma.flax.rotary(y, jnp.array([j]))).sum()
    np.testing.assert_allclose(dot(3, 11), dot(103, 111), rtol=1e-4)
    assert abs(dot(3, 11) - dot(3, 12)) > 1e-4


@pytest.mark.parametrize(
    "options, text",
    [
        (dict(score="softmax"), "score must be one of"),
        (dict(num_kv_heads=3), "multiple of num_kv_heads"),
        (dict(num_heads=5), "name head_dim"),
        (dict(window=0), "window must be at least 1"),
        (dict(recency=[0.1] * 3), "a number for each of the 4 key/value heads"),
    ],
)
def test_errors(options, text):
    options = {"num_heads": N, "window": 3, **options}
    with pytest.raises(ValueError, match=text):
        jax_dma.flax.DynamicMaskAttention(FEATURES, rngs=nnx.Rngs(0), **options)
    with pytest.raises(TypeError, match="rotary must be a function"):
        module(rotary=True)
    layer = module()
    with pytest.raises(ValueError, match="in_features = 24"):
        layer(jnp.zeros((2, 5, 23)))
    with pytest.raises(ValueError, match="segment_ids cannot be combined with a cache"):
        layer(inputs(2), segment_ids=jnp.zeros((2, 2), jnp.int32), cache=layer.empty_cache(2))
