"""Every rejected input is an error at trace time that names the argument, what it got and what it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dma
from cases import Case, make
from jax_dma import KeyIntervals, attention
from support import check, fit

# B 2, T 5, S 7, N 4, K 2, H 8.
Q, KV = np.zeros((2, 5, 4, 8), np.float32), np.zeros((2, 7, 2, 8), np.float32)


def intervals(shape=(1, 1, 7), dtype=np.int32, live=None, end_shape=None):
    return KeyIntervals(np.zeros(shape, dtype), np.zeros(end_shape or shape, dtype), live)


def plan_for(T, S, N, K, batch=(2,)):
    struct = lambda *shape: jax.ShapeDtypeStruct((*batch, *shape), np.float32)
    return jax_dma.plan(np.ones((*batch, 1, T, S), bool), struct(T, N, 8), struct(S, K, 8))


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


REJECTED = {
    "q_list": (dict(q=[1.0]), TypeError, ["q must be an array", "list"]),
    "q_int": (dict(q=Q.astype(np.int32)), TypeError, ["q must be", "float32", "int32"]),
    "q_float8": (dict(q=Q.astype(jnp.float8_e4m3fn)), TypeError, ["q must be", "float8_e4m3fn"]),
    "q_complex": (dict(q=Q.astype(np.complex64)), TypeError, ["q must be", "complex64"]),
    "q_rank_2": (dict(q=zeros(5, 8)), ValueError, ["q must have at least 3 axes", "[*batch, T, N, H]", "(5, 8)"]),
    "k_dtype": (dict(k=KV.astype(jnp.bfloat16)), TypeError, ["k", "float32", "bfloat16"]),
    "v_dtype": (dict(v=KV.astype(np.float16)), TypeError, ["v", "float32", "float16"]),
    "k_batch": (
        dict(k=zeros(3, 7, 2, 8)),
        ValueError,
        ["k must have the batch axes of q", "(3, 7, 2, 8)", "(2, 5, 4, 8)"],
    ),
    "k_batch_1": (dict(k=zeros(1, 7, 2, 8)), ValueError, ["k must have the batch axes of q", "(1, 7, 2, 8)"]),
    "v_rank": (
        dict(v=zeros(7, 2, 8)),
        ValueError,
        ["v must have the batch axes of q", "(7, 2, 8)", "[*batch, S, K, Hv]"],
    ),
    "head_dimension": (
        dict(k=zeros(2, 7, 2, 9)),
        ValueError,
        ["q and k", "head dimension", "(2, 7, 2, 9)", "(2, 5, 4, 8)"],
    ),
    "v_length": (dict(v=zeros(2, 6, 2, 8)), ValueError, ["k and v", "(2, 7, 2, 8)", "(2, 6, 2, 8)"]),
    "v_heads": (dict(v=zeros(2, 7, 4, 8)), ValueError, ["k and v", "(2, 7, 4, 8)"]),
    "heads_not_a_multiple": (
        dict(q=zeros(2, 5, 3, 8)),
        ValueError,
        ["3 query heads", "multiple", "2 heads", "(2, 5, 3, 8)"],
    ),
    "fewer_query_heads": (dict(q=zeros(2, 5, 1, 8)), ValueError, ["1 query heads", "multiple", "2 heads"]),
    "no_heads": (dict(k=zeros(2, 7, 0, 8), v=zeros(2, 7, 0, 8)), ValueError, ["heads", "(2, 7, 0, 8)"]),
    "no_channels": (dict(q=zeros(2, 5, 4, 0), k=zeros(2, 7, 2, 0)), ValueError, ["head dimension", "at least 1"]),
    "mask_float": (dict(mask=zeros(1, 1, 5, 7)), TypeError, ["mask must be bool", "float32", "mask != 0", "`bias`"]),
    "mask_int": (
        dict(mask=zeros(1, 1, 5, 7, dtype=np.int32)),
        TypeError,
        ["mask must be bool", "int32", "mask != 0", "`bias`"],
    ),
    "mask_uint8": (
        dict(mask=zeros(1, 1, 5, 7, dtype=np.uint8)),
        TypeError,
        ["mask must be bool", "uint8", "mask != 0"],
    ),
    "mask_complex": (dict(mask=zeros(1, 1, 5, 7, dtype=np.complex64)), TypeError, ["mask must be bool", "complex64"]),
    "mask_name": (dict(mask="causal"), TypeError, ["mask must be an array", "str"]),
    "mask_rank": (
        dict(mask=zeros(5, 7, dtype=bool)),
        ValueError,
        ["mask must have 4 axes", "(5, 7)", "[*batch|1, N|K|1, T|1, S|1]"],
    ),
    "mask_batch": (
        dict(mask=zeros(3, 1, 5, 7, dtype=bool)),
        ValueError,
        ["mask axis 0 (batch)", "2 or 1", "(3, 1, 5, 7)"],
    ),
    "mask_heads": (dict(mask=zeros(2, 3, 5, 7, dtype=bool)), ValueError, ["mask", "heads axis", "[1, 2, 4]", "got 3"]),
    "mask_queries": (dict(mask=zeros(2, 1, 4, 7, dtype=bool)), ValueError, ["mask", "T axis", "[1, 5]", "got 4"]),
    "mask_keys": (dict(mask=zeros(2, 1, 5, 6, dtype=bool)), ValueError, ["mask", "S axis", "[1, 7]", "got 6"]),
    "bias_bool": (
        dict(bias=zeros(1, 1, 5, 7, dtype=bool)),
        TypeError,
        ["bias must be floating point", "bool", "`mask`"],
    ),
    "bias_int": (dict(bias=zeros(1, 1, 5, 7, dtype=np.int32)), TypeError, ["bias must be", "int32"]),
    "bias_rank": (dict(bias=zeros(1, 5, 7)), ValueError, ["bias must have 4 axes", "(1, 5, 7)"]),
    "bias_batch": (dict(bias=zeros(4, 1, 5, 7)), ValueError, ["bias axis 0 (batch)", "2 or 1", "(4, 1, 5, 7)"]),
    "bias_heads": (dict(bias=zeros(1, 8, 5, 7)), ValueError, ["bias", "heads axis", "[1, 2, 4]", "got 8"]),
    "bias_queries": (dict(bias=zeros(1, 1, 7, 7)), ValueError, ["bias", "T axis", "[1, 5]", "got 7"]),
    "bias_keys": (dict(bias=zeros(1, 1, 5, 5)), ValueError, ["bias", "S axis", "[1, 7]", "got 5"]),
    "bias_list": (dict(bias=[0.0]), TypeError, ["bias must be an array", "list"]),
    "swapped": (dict(mask=zeros(1, 1, 5, 7), bias=zeros(1, 1, 5, 7, dtype=bool)), TypeError, ["bool"]),
    "interval_dtype": (dict(mask=intervals(dtype=np.float32)), TypeError, ["mask.start", "int32", "float32"]),
    "interval_length": (
        dict(mask=intervals((1, 1, 6))),
        ValueError,
        ["mask.start", "(1, 1, 6)", "[*batch|1, N|K|1, S]"],
    ),
    "interval_heads": (dict(mask=intervals((1, 3, 7))), ValueError, ["mask.start", "(1, 3, 7)"]),
    "interval_batch": (dict(mask=intervals((3, 1, 7))), ValueError, ["mask.start", "(3, 1, 7)"]),
    "interval_end": (dict(mask=intervals(end_shape=(1, 1, 5))), ValueError, ["mask.end", "(1, 1, 5)"]),
    "interval_mixed_heads": (
        dict(mask=intervals((1, 2, 7), end_shape=(1, 4, 7))),
        ValueError,
        ["mask", "(1, 2, 7)", "(1, 4, 7)"],
    ),
    "interval_rank": (dict(mask=intervals((2, 2, 1, 7))), ValueError, ["mask.start", "(2, 2, 1, 7)"]),
    "interval_live": (dict(mask=intervals(live=-1)), TypeError, ["mask.live", "-1"]),
    "interval_live_float": (dict(mask=intervals(live=2.0)), TypeError, ["mask.live", "2.0"]),
    "plan_of_other_shapes": (dict(mask=plan_for(5, 6, 4, 2)), ValueError, ["plan", "(5, 6, 4, 2)", "(5, 7, 4, 2)"]),
    "plan_of_other_heads": (dict(mask=plan_for(5, 7, 4, 4)), ValueError, ["plan", "(5, 7, 4, 4)", "(5, 7, 4, 2)"]),
    "plan_of_another_batch": (dict(mask=plan_for(5, 7, 4, 2, (3,))), ValueError, ["plan", "batch", "(3,)", "(2,)"]),
    "scale_text": (dict(scale="0.5"), TypeError, ["scale must be a number", "0.5"]),
    "scale_array": (dict(scale=np.ones(2)), TypeError, ["scale must be a number"]),
    "scale_nan": (dict(scale=float("nan")), ValueError, ["scale", "finite", "nan"]),
    "scale_infinite": (dict(scale=float("inf")), ValueError, ["scale", "finite", "inf"]),
    "softcap_zero": (dict(logits_soft_cap=0.0), ValueError, ["logits_soft_cap", "positive", "0.0"]),
    "softcap_negative": (dict(logits_soft_cap=-1.0), ValueError, ["logits_soft_cap", "positive", "-1.0"]),
    "softcap_text": (dict(logits_soft_cap="none"), TypeError, ["logits_soft_cap", "none"]),
    "is_causal": (dict(is_causal=1), TypeError, ["is_causal", "True or False", "1"]),
    "return_lse": (dict(return_lse=None), TypeError, ["return_lse", "None"]),
    "deterministic": (dict(deterministic="yes"), TypeError, ["deterministic", "yes"]),
    "implementation_unknown": (dict(implementation="flash"), ValueError, ["implementation", "flash", "xla", "cuda"]),
    "implementation_unknown_of_two": (dict(implementation=("xla", "flash")), ValueError, ["implementation", "flash"]),
    "implementation_none_of": (dict(implementation=()), ValueError, ["implementation", "()"]),
    "implementation_number": (dict(implementation=5), (TypeError, ValueError), ["implementation", "5"]),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejected(name):
    """Type, argument, what it got, what it takes; while tracing, so that nothing was compiled for it (CASES 1, 18)."""
    changes, error, words = REJECTED[name]
    arguments = {"q": Q, "k": KV, "v": KV, **changes}
    with pytest.raises(error) as caught:
        attention(**arguments)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_rejected_while_tracing():
    """Abstract values are enough."""
    with pytest.raises(ValueError, match="mask's S axis"):
        jax.eval_shape(attention, Q, KV, KV, np.ones((1, 1, 5, 6), bool))


@pytest.mark.parametrize("name", ["scale", "logits_soft_cap"])
def test_a_traced_number_is_refused(name):
    with pytest.raises(TypeError, match=f"{name} must be a Python number, not a traced value"):
        jax.jit(lambda x: attention(Q, KV, KV, **{name: x}))(0.5)


def test_numbers_of_any_kind_are_taken():
    expected = attention(Q, KV, KV, scale=0.5, implementation="reference")
    for scale in (np.float32(0.5), jnp.float32(0.5), np.array(0.5)):
        assert jnp.array_equal(attention(Q, KV, KV, scale=scale, implementation="reference"), expected)


def test_positional_arguments_end_at_bias():
    with pytest.raises(TypeError, match="positional"):
        attention(Q, KV, KV, None, None, True)


@pytest.mark.parametrize(
    "mask", [intervals((7,)), intervals((1, 7)), intervals((1, 1, 1, 7)), intervals((2, 2, 7)), intervals((1, 4, 7))]
)
def test_intervals_of_fitting_rank_are_taken(mask):
    """Builders cannot know how many batch axes q has: axes of size 1 come and go."""
    assert jax.eval_shape(lambda: attention(Q, KV, KV, mask)).shape == Q.shape


def test_intervals_of_several_heads_without_a_batch():
    """Scores [B, S], the heads axis forgotten, would be one mask for all of the batch."""
    for call in (attention, jax_dma.explain):
        with pytest.raises(ValueError, match=r"\(2, 7\).*fewer batch axes than q.*scores\[None\]"):
            call(Q, KV, KV, jax_dma.masks.top_k(zeros(2, 7), 3, 5))
    assert attention(Q, KV, KV, jax_dma.masks.top_k(zeros(1, 7), 3, 5)).shape == Q.shape


def test_intervals_are_combined_with_intervals():
    mask, dense = jax_dma.masks.causal(5, 7), np.ones((1, 1, 5, 7), bool)
    for wrong in (lambda: mask & dense, lambda: mask & True, lambda: True & mask):
        with pytest.raises(TypeError, match=r"mask.dense\(T\) & other"):
            wrong()
    for wrong in (lambda: mask | mask, lambda: mask | dense):
        with pytest.raises(TypeError, match=r"a.dense\(T\) \| b.dense\(T\)"):
            wrong()
    with pytest.raises(TypeError, match="needs no plan"):
        jax_dma.plan(mask, Q, KV)


def test_plan_of_shapes_it_does_not_fit():
    with pytest.raises(ValueError, match="mask"):
        jax_dma.plan(np.ones((1, 1, 5, 6), bool), Q, KV)
    with pytest.raises(TypeError, match="mask"):
        jax_dma.plan(np.ones((1, 1, 5, 7)), Q, KV)


# Implementations


def test_a_named_implementation_that_is_not_there_says_why():
    for name, text in jax_dma.status().items():
        if text != "available":
            q, kv = (x.astype(jnp.bfloat16) for x in (Q, KV))
            with pytest.raises(ValueError, match=name):
                jax.block_until_ready(jax.jit(lambda q: attention(q, kv, kv, implementation=name))(q))


def test_cuda_on_a_cpu_says_why():
    """The kernels are missing, or the program is being lowered for another platform; never a fallback."""
    q, kv = (jnp.asarray(x, jnp.bfloat16) for x in (Q, KV))
    with pytest.raises(ValueError, match="cuda.*(not built|lowered for cpu)"):
        jax.jit(lambda q: attention(q, kv, kv, implementation="cuda"))(q)


def test_the_first_of_several_that_can_serve():
    """A sequence is an order of preference; what cannot serve is passed over."""
    case = Case((1,), 9, 20, 2, 1, 300)
    check(("cuda", "cpu", "xla"), case)
    q, k, v = make(case)[:3]
    assert jnp.array_equal(
        attention(q, k, v, implementation=["pallas", "xla"]), attention(q, k, v, implementation="xla")
    )
    with pytest.raises(ValueError, match="cuda.*cpu|cpu.*cuda"):
        attention(q, k, v, implementation=("cuda", "cpu"))


@pytest.mark.parametrize("H, Hv", [(257, 8), (8, 257), (300, 300)])
def test_a_kernel_refuses_a_head_dimension_above_256(kernels, H, Hv):
    case = fit(Case((1,), 9, 20, 2, 1, H, Hv, dtype="bfloat16"), kernels)
    with pytest.raises(ValueError, match=rf"{kernels}.*256.*H is {H}, Hv {Hv}"):
        attention(*make(case)[:3], implementation=kernels)


def test_the_default_serves_a_head_dimension_above_256():
    check(None, Case((1,), 9, 20, 2, 1, 300, 280, mask="11TS", bias="1NTS"))


def test_a_kernel_refuses_float64(kernels):
    with jax.enable_x64(True):
        q, kv = Q.astype(np.float64), KV.astype(np.float64)
        with pytest.raises(ValueError, match=f"{kernels}.*float64"):
            attention(q, kv, kv, implementation=kernels)
        half = {"cpu": np.float32, "cuda": np.float16}[kernels]
        with pytest.raises(ValueError, match=f"{kernels}.*bias.*float64"):
            attention(
                q.astype(half), kv.astype(half), kv.astype(half), bias=np.zeros((1, 1, 5, 7)), implementation=kernels
            )


@pytest.mark.gpu
def test_the_cuda_kernels_refuse_float32_and_large_groups():
    with pytest.raises(ValueError, match="cuda.*float32"):
        attention(Q, KV, KV, implementation="cuda")
    q, kv = np.zeros((1, 3, 129, 8), np.float16), np.zeros((1, 4, 1, 8), np.float16)
    with pytest.raises(ValueError, match="cuda.*G is 129"):
        attention(q, kv, kv, implementation="cuda")


def test_many_batch_axes(kernels):
    """More than a kernel can walk is an error for a named one and plain JAX for the default."""
    case = fit(Case((1, 2, 1, 2, 1, 2, 2), 3, 5, 2, 1, 8, dtype="bfloat16", bias="1NTS"), kernels)
    with pytest.raises(ValueError, match=f"{kernels}.*batch axes"):
        attention(*make(case)[:3], implementation=kernels)
    check(None, case)


def test_available_implementations_and_status():
    status = jax_dma.status()
    assert set(status) == set(jax_dma.choice.IMPLEMENTATIONS) >= {"cuda", "cpu", "pallas", "xla", "reference"}
    assert jax_dma.available_implementations() == tuple(name for name, text in status.items() if text == "available")
    assert {"xla", "reference"} <= set(jax_dma.available_implementations())
    assert all(text for text in status.values())
