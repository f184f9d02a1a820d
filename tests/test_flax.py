"""jax_dma.flax.attention_fn in the attention modules of Flax, against Flax's own attention function."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dma
import jax_dma.flax

pytest.importorskip("flax")
from flax import linen, nnx  # noqa: E402

B, T, FEATURES, N = 2, 8, 12, 4
OURS = jax_dma.flax.attention_fn


def inputs(seed=0, length=T, lead=(B,), dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((*lead, length, FEATURES)), dtype)


def nnx_module(attention_fn=None, **options):
    """Always the same parameters."""
    function = {} if attention_fn is None else {"attention_fn": attention_fn}
    options = {"decode": False, **options}
    return nnx.MultiHeadAttention(N, FEATURES, 16, rngs=nnx.Rngs(0), **function, **options)


def nnx_results(attention_fn, *x, rows=True, dtype=None, num_kv_heads=None, **call):
    """Output, and gradients of parameters and inputs; only ``rows`` enter the loss."""
    module = nnx_module(attention_fn, dtype=dtype, num_kv_heads=num_kv_heads)
    graph, state = nnx.split(module)
    weight = inputs(9, x[0].shape[-2], x[0].shape[:-2])

    @jax.jit
    def run(state, *x):
        def loss(state, *x):
            out = nnx.merge(graph, state)(*x, **call)
            return jnp.sum(jnp.where(rows, out * weight, 0).astype(jnp.float32)), out

        return jax.value_and_grad(loss, argnums=tuple(range(1 + len(x))), has_aux=True)(state, *x)

    (_, out), gradients = run(state, *x)
    return out, gradients


def linen_results(attention_fn, *x, rows=True, dtype=None, **call):
    function = {} if attention_fn is None else {"attention_fn": attention_fn}
    module = linen.MultiHeadDotProductAttention(N, dtype=dtype, qkv_features=16, **function)
    variables = module.init(jax.random.key(0), *x)
    weight = inputs(9, x[0].shape[-2], x[0].shape[:-2])

    @jax.jit
    def run(variables, *x):
        def loss(variables, *x):
            out = module.apply(variables, *x, **call)
            return jnp.sum(jnp.where(rows, out * weight, 0).astype(jnp.float32)), out

        return jax.value_and_grad(loss, argnums=tuple(range(1 + len(x))), has_aux=True)(variables, *x)

    (_, out), gradients = run(variables, *x)
    return out, gradients


def assert_same(results, *x, rows=True, ours=OURS, theirs=None, tolerance=1e-5, **options):
    """The module gives the same with either attention function, gradients included."""
    got, got_gradients = results(ours, *x, rows=rows, **options)
    want, want_gradients = results(theirs, *x, rows=rows, **options)
    assert got.dtype == want.dtype and got.shape == want.shape
    flat = lambda tree: [np.asarray(x, np.float32) for x in jax.tree.leaves(tree)]
    np.testing.assert_allclose(*flat([jnp.where(rows, x, 0) for x in (got, want)]), atol=tolerance, rtol=tolerance)
    for a, b in zip(flat(got_gradients), flat(want_gradients), strict=True):
        np.testing.assert_allclose(a, b, atol=10 * tolerance * max(1, abs(b).max()), rtol=10 * tolerance)


BOTH = pytest.mark.parametrize("results", [nnx_results, linen_results], ids=["nnx", "linen"])
VALID = np.arange(T) < np.array([[T], [5]])  # the first tokens of each example


def helper_masks():
    """Masks as the helpers of Flax make them (nnx's and linen's are the same)."""
    tokens = jnp.ones((B, T))
    causal, padding = nnx.make_causal_mask(tokens), nnx.make_attention_mask(VALID, VALID)
    return {
        "causal": causal,
        "padding": padding,
        "both": nnx.combine_masks(causal, padding),
        "both, bool": nnx.combine_masks(causal, padding, dtype=bool),
        "causal, integers": linen.make_causal_mask(tokens, dtype=jnp.int32),
        "keys": jnp.asarray(VALID)[:, None, None, :],
        "keys as floats": jnp.asarray(VALID, jnp.float32)[:, None, None, :],
        "per head": jnp.asarray(np.random.default_rng(3).random((1, N, T, T)) < 0.7) | jnp.eye(T, dtype=bool),
    }


@BOTH
@pytest.mark.parametrize("name", [None, *helper_masks()])
def test_masks(results, name):
    """Without a mask and with those of Flax's helpers. Padding queries see nothing and are left out of the loss."""
    mask = None if name is None else helper_masks()[name]
    rows = VALID[..., None] if name is not None and ("padding" in name or "both" in name) else True
    assert_same(results, inputs(), rows=rows, mask=mask)


@BOTH
def test_cross_attention(results):
    mask = nnx.make_attention_mask(jnp.ones((B, T)), np.arange(11) < np.array([[11], [3]]))
    assert_same(results, inputs(), inputs(1, 11), inputs(2, 11), mask=mask)


@BOTH
@pytest.mark.parametrize("lead", [(), (2, 3)], ids=["no batch axis", "two batch axes"])
def test_batch_axes(results, lead):
    """Masks too have as many batch axes, made by the helpers."""
    x = inputs(lead=lead)
    mask = nnx.make_causal_mask(jnp.ones((*lead, T)))
    # nnx's own function takes only masks and batches of 4 axes here; linen's takes all.
    theirs = linen.dot_product_attention if results is linen_results else _without_is_causal
    assert_same(results, x, mask=mask, theirs=theirs)


def _without_is_causal(query, key, value, *, is_causal, **options):
    return linen.dot_product_attention(query, key, value, **options)


@BOTH
def test_extra_leading_axes(results):
    """Axes of size 1 in front of the batch, as extra_batch_dims makes, and missing ones."""
    want, _ = results(OURS, inputs(), mask=nnx.make_causal_mask(jnp.ones((B, T))))
    for mask in (
        nnx.make_causal_mask(jnp.ones((B, T)), extra_batch_dims=2),
        jnp.tril(jnp.ones((T, T))),
        jnp.tril(jnp.ones((1, T, T), bool)),
    ):
        got, _ = results(OURS, inputs(), mask=mask)
        assert got.shape == want.shape and jnp.allclose(got, want, atol=1e-6)
    with pytest.raises(ValueError, match="mask must broadcast to 4 axes"):
        results(OURS, inputs(), mask=jnp.ones((3, B, 1, T, T)))


@BOTH
def test_intervals_in_place_of_a_mask(results):
    """The modules hand KeyIntervals on: no [T, T] array is made."""
    got, _ = results(OURS, inputs(), mask=jax_dma.masks.sliding_window(T, T, 2))
    t = np.arange(T)
    band = jnp.asarray((t[:, None] - 2 <= t) & (t <= t[:, None]))[None, None]
    want, _ = results(None, inputs(), mask=band)
    assert jnp.allclose(got, want, atol=1e-5)


@BOTH
@pytest.mark.parametrize("shape", [(1, N, T, T), (N, 1, T), (T, T)])
def test_bias_through_partial(results, shape):
    """A bias in functools.partial, beside a mask; Flax's own function takes it the same way."""
    bias = jnp.asarray(np.random.default_rng(4).standard_normal(shape), jnp.float32)
    full = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    default = linen.dot_product_attention if results is linen_results else nnx.dot_product_attention
    mask = nnx.make_causal_mask(jnp.ones((B, T)))
    ours, theirs = functools.partial(OURS, bias=bias), functools.partial(default, bias=full)
    assert_same(results, inputs(), mask=mask, ours=ours, theirs=theirs)


def test_the_gradient_of_a_bias():
    """A trained bias of a module that owns both: the gradient reaches it through functools.partial."""

    def loss(bias, function):
        module = nnx_module(functools.partial(function, bias=bias))
        return jnp.sum(module(inputs(), is_causal=True) * inputs(9))

    bias = jnp.asarray(np.random.default_rng(5).standard_normal((1, N, T, T)), jnp.float32)
    ours, theirs = (jax.grad(loss)(bias, function) for function in (OURS, nnx.dot_product_attention))
    assert jnp.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("mask", [None, "keys", "per head"])
def test_is_causal(mask):
    """With and without masks of padding."""
    mask = None if mask is None else helper_masks()[mask]
    assert_same(nnx_results, inputs(), mask=mask, is_causal=True)


def test_is_causal_in_linen():
    """linen does not pass is_causal; functools.partial does."""
    got, _ = linen_results(functools.partial(OURS, is_causal=True), inputs())
    want, _ = linen_results(None, inputs(), mask=linen.make_causal_mask(jnp.ones((B, T))))
    assert jnp.allclose(got, want, atol=1e-5)


def test_is_causal_with_other_lengths():
    """Aligned to the first key, as in Flax."""
    assert_same(nnx_results, inputs(), inputs(1, 11), is_causal=True)
    assert_same(nnx_results, inputs(), inputs(1, 5), is_causal=True)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_grouped_heads(num_kv_heads):
    mask = helper_masks()["keys"]
    assert_same(nnx_results, inputs(), mask=mask, is_causal=True, num_kv_heads=num_kv_heads)


@BOTH
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dtypes(results, dtype):
    """The module's dtype; Flax rounds its weights to it, so the tolerance is Flax's error."""
    # nnx's own function takes no float16 under jit on a CPU; linen's does.
    theirs = _without_is_causal if results is nnx_results and dtype == jnp.float16 else None
    assert_same(results, inputs(), mask=helper_masks()["causal"], dtype=dtype, theirs=theirs, tolerance=0.03)


def test_promotion():
    """Mixed and integer inputs promote as in Flax, and dtype rules them all."""
    shape = (B, T, N, 4)
    q, k, v = (jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 3))
    mixed = (q.astype(jnp.bfloat16), k, v.astype(jnp.float16))
    whole = tuple(jnp.round(3 * x).astype(jnp.int32) for x in (q, k, v))
    for x, dtype in ((mixed, None), (mixed, jnp.bfloat16), (whole, None), ((q, k, v), jnp.float16)):
        got, want = OURS(*x, dtype=dtype), linen.dot_product_attention(*x, dtype=dtype)
        assert got.dtype == want.dtype
        assert jnp.allclose(got.astype(jnp.float32), want.astype(jnp.float32), atol=2e-2)
    got = OURS(*mixed, promote_dtype=lambda arrays, dtype: tuple(x.astype(jnp.float16) for x in arrays))
    assert got.dtype == jnp.float16
    assert jnp.allclose(OURS(q, k, v, precision="highest", force_fp32_for_softmax=True), OURS(q, k, v))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_kv_heads", [N, 2])
def test_decoding_in_nnx(num_kv_heads, is_causal):
    """One token at a time with the module's cache gives what the causal forward pass gives, is_causal given or not."""
    x = inputs()
    module = nnx_module(OURS, decode=True, num_kv_heads=num_kv_heads)
    module.init_cache(x.shape)
    graph, state = nnx.split(module)

    @jax.jit
    def step(state, token):
        module = nnx.merge(graph, state)
        out = module(token, is_causal=is_causal)
        return nnx.split(module)[1], out

    rows = []
    for t in range(T):
        state, out = step(state, x[:, t : t + 1])
        rows.append(out)
    whole = nnx_module(OURS, num_kv_heads=num_kv_heads)(x, is_causal=True)
    assert jnp.allclose(jnp.concatenate(rows, 1), whole, atol=1e-5)


@pytest.mark.parametrize("padding", [False, True])
def test_decoding_in_linen(padding):
    """The same, also with a mask of the keys that are padding, which the module combines with that of its cache."""
    x = inputs()
    mask = jnp.asarray(np.arange(T) >= np.array([[0], [3]]))[:, None, None, :] if padding else None  # left padding
    make = functools.partial(linen.MultiHeadDotProductAttention, N, qkv_features=16, attention_fn=OURS)
    decoder = make(decode=True)
    variables = decoder.init(jax.random.key(0), x)
    parameters, cache = {"params": variables["params"]}, variables["cache"]

    @jax.jit
    def step(cache, token):
        return decoder.apply({**parameters, "cache": cache}, token, mask=mask, mutable=["cache"])

    rows = []
    for t in range(T):
        out, changed = step(cache, x[:, t : t + 1])
        cache = changed["cache"]
        rows.append(out)
    causal = linen.make_causal_mask(jnp.ones((B, T)))
    whole = make().apply(parameters, x, mask=causal if mask is None else linen.combine_masks(causal, mask))
    assert jnp.allclose(jnp.concatenate(rows, 1), whole, atol=1e-5)


def test_active_dropout():
    """Raises; and not where it is off."""
    x = inputs()
    module = nnx_module(OURS, dropout_rate=0.1)
    with pytest.raises(ValueError, match="jax_dma has no dropout.*Set dropout_rate=0.0"):
        module(x, deterministic=False, rngs=nnx.Rngs(1))
    assert jnp.allclose(module(x, deterministic=True), nnx_module(OURS)(x))
    module = linen.MultiHeadDotProductAttention(N, dropout_rate=0.1, attention_fn=OURS)
    variables = module.init(jax.random.key(0), x, deterministic=True)
    with pytest.raises(ValueError, match="jax_dma has no dropout"):
        module.apply(variables, x, deterministic=False, rngs={"dropout": jax.random.key(1)})
    module.apply(variables, x, deterministic=True)


def test_sowing():
    x = inputs()
    with pytest.raises(ValueError, match="attention weights cannot be sown.*sow_weights"):
        nnx_module(OURS)(x, sow_weights=True)
    module = linen.MultiHeadDotProductAttention(N, attention_fn=OURS)
    variables = module.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="attention weights cannot be sown"):
        module.apply(variables, x, sow_weights=True, mutable=["intermediates"])


def test_what_a_kernel_cannot_honour():
    q = jnp.ones((B, T, N, 4))
    for name in ("einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum"):
        with pytest.raises(ValueError, match=f"{name} cannot be honoured"):
            OURS(q, q, q, **{name: jnp.einsum})
    with pytest.raises(ValueError, match="input_positions are for rotary embeddings"):
        OURS(q, q, q, input_positions=jnp.arange(T))
    einsum = lambda: jnp.einsum  # linen passes what these return
    module = linen.MultiHeadDotProductAttention(
        N, attention_fn=OURS, qk_attn_weights_einsum_cls=einsum, attn_weights_value_einsum_cls=einsum
    )
    with pytest.raises(ValueError, match="qk_attn_weights_einsum cannot be honoured"):
        module.init(jax.random.key(0), inputs())


def test_every_parameter_of_flax_is_named():
    """linen silently drops what the signature does not name; nnx raises."""
    import inspect

    ours = inspect.signature(OURS).parameters
    for theirs in (linen.dot_product_attention, nnx.dot_product_attention):
        for position, parameter in enumerate(inspect.signature(theirs).parameters.values()):
            assert parameter.name in ours
            if position < 13 and parameter.name != "force_fp32_for_softmax":  # those that both modules' functions share
                assert list(ours)[position] == parameter.name
    assert not any(x.kind in (x.VAR_KEYWORD, x.VAR_POSITIONAL) for x in ours.values())


def test_rows_that_see_nothing():
    """0, where Flax gives the mean of the values."""
    q, k, v = (jax.random.normal(key, (B, T, N, 4)) for key in jax.random.split(jax.random.key(1), 3))
    mask = nnx.make_attention_mask(VALID, VALID)
    got, want = OURS(q, k, v, mask=mask), linen.dot_product_attention(q, k, v, mask=mask)
    assert not got[1, 5:].any() and jnp.allclose(want[1, 5:], v[1].mean(0), atol=1e-5)
    assert jnp.allclose(got[1, :5], want[1, :5], atol=1e-5)


def test_options_of_attention():
    """scale, soft cap and implementation go on to jax_dma.attention."""
    q, k, v = (jax.random.normal(key, (B, T, N, 4)) for key in jax.random.split(jax.random.key(2), 3))
    options = dict(scale=0.2, logits_soft_cap=1.5, implementation="reference")
    assert jnp.allclose(OURS(q, k, v, is_causal=True, **options), jax_dma.attention(q, k, v, is_causal=True, **options))
    with pytest.raises(ValueError, match="implementation must be one or several of"):
        OURS(q, k, v, implementation="flash")


def test_flax_is_not_imported():
    """Neither jax_dma nor jax_dma.flax needs Flax."""
    code = "import sys; sys.modules['flax'] = None; import jax_dma, jax_dma.flax; jax_dma.flax.attention_fn"
    subprocess.run([sys.executable, "-c", code], check=True)
