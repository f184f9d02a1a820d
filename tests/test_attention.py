"""Values and gradients of every implementation against the float64 oracle."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import jax_dma
from cases import INTERVAL_PATTERNS, NAMED, PATTERNS, Case, make, poison
from support import check, errors, evaluate, fit, judge, relative_error

DTYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("name", NAMED)
def test_named_case(implementation, name):
    """The faults of other libraries, by number (CASES 1, 2, 8, 11, 12, 13, 18, 20, 24, 25)."""
    if name == "group_of_128":  # more heads than the CUDA kernels take to a group: the next in line serves it
        implementation = (implementation, "xla")
    check(implementation, NAMED[name])


@pytest.mark.parametrize("index", range(len(PATTERNS)), ids=PATTERNS)
def test_every_broadcast_pattern_of_mask_and_bias(implementation, index):
    """Each axis of mask and bias is broadcast or full, independently: values and gradients (CASES 1, 2)."""
    mask, bias = PATTERNS[index], PATTERNS[(7 * index + 5) % len(PATTERNS)]
    dtype = DTYPES[index % 3]
    case = Case(mask=mask, bias=bias, dtype=dtype, bias_dtype=("float32", None)[index // 3 % 2], plan=index % 4 == 3)
    case = fit(case.with_(is_causal=index % 5 == 0), implementation)
    check(implementation, case, poison(case, make(case, seed=index)))


@pytest.mark.parametrize("bias", PATTERNS)
def test_every_broadcast_pattern_of_bias_alone(implementation, bias):
    """dbias is summed over each axis that was broadcast, without a mask to route the call elsewhere (CASES 2)."""
    check(implementation, Case((3,), 65, 130, 4, 2, 16, bias=bias))


@pytest.mark.parametrize(
    "case",
    [
        Case((12,), 200, 264, 2, 2, 64, dtype="bfloat16", bias="1KTS"),
        Case((20,), 70, 392, 2, 2, 40, dtype="bfloat16", mask="B11S", bias="1KTS"),
        Case((9,), 260, 200, 2, 2, 32, dtype="float16", mask="BK1S", bias="1KTS", is_causal=True),
        Case((4,), 230, 136, 4, 4, 24, dtype="bfloat16", bias="11TS"),
        Case((10,), 60, 264, 8, 2, 64, dtype="bfloat16", mask="B11S", bias="1KTS"),
        Case((10,), 60, 264, 8, 2, 64, dtype="bfloat16", bias="1NTS", is_causal=True),
        Case((3, 8), 60, 136, 2, 2, 16, dtype="bfloat16", mask="1K1S", bias="1KTS", plan=True),
        Case((9,), 70, 136, 2, 2, 64, dtype="bfloat16", mask="BKTS", bias="1KTS"),
        Case((3,), 210, 136, 4, 2, 128, dtype="bfloat16", mask="BNTS", bias="1KTS"),
    ],
    ids=["plain", "mask_of_keys", "causal", "one_head", "group", "heads_of_a_group", "two_batch_axes", "dense_mask"]
    + ["wide_heads"],
)
def test_sums_over_the_batch_in_a_fixed_order(kernels, case):
    """dbias is summed over the batch, and over heads; in a fixed order a kernel of its own does that (CASES 2, 28)."""
    check(kernels, case, poison(case, make(case)), deterministic=True)


@pytest.mark.parametrize("values", ["usual", "hidden", "large"])
@pytest.mark.parametrize(
    "case",
    [
        Case((64,), 70, 136, 1, 1, 64, dtype="bfloat16", bias="1KTS"),
        Case((2, 32), 40, 136, 1, 1, 32, dtype="bfloat16", mask="B11S", bias="1KTS"),
        Case((64,), 20, 136, 2, 1, 32, dtype="float16", mask="BKTS", bias="1NTS", is_causal=True),
    ],
    ids=["plain", "mask_of_keys", "heads_of_a_group"],
)
def test_bias_that_a_large_batch_shares(kernels, case, values):
    """On Hopper the matrix units add it where all of it is small; some of it may hide, and all of it be large."""
    inputs = make(case)
    bias = inputs.bias.copy()
    if values == "hidden":
        bias[..., 1::5] = -np.inf
    elif values == "large":
        bias -= 2e4
    check(kernels, case, inputs._replace(bias=bias.astype(inputs.bias.dtype)))


@pytest.mark.parametrize("mask", [None, "B11S"])
def test_sums_over_one_batch_axis_in_a_fixed_order(kernels, mask):
    """[2, 1, K, T, S] over a batch of [2, 10]: as many sums as the first axis has entries (CASES 2)."""
    case = Case((2, 10), 100, 136, 2, 2, 32, dtype="bfloat16", mask=mask, bias="BKTS")
    inputs = make(case)
    check(kernels, case, inputs._replace(bias=inputs.bias[:, :1]), deterministic=True)


@pytest.mark.parametrize(
    "case",
    [
        Case((66,), 70, 384, 2, 2, 64, dtype="bfloat16", mask="B11S", bias="1KTS"),
        Case((67,), 100, 376, 2, 2, 32, dtype="float16", bias="1KTS"),
        Case((33,), 130, 384, 4, 4, 64, dtype="bfloat16", mask="BKTS", bias="BKTS"),
        Case((132,), 256, 384, 4, 4, 24, dtype="bfloat16", bias="BKTS", is_causal=True),
    ],
    ids=["mask_of_keys", "last_keys", "dense_mask", "causal"],
)
def test_many_short_sequences(kernels, case):
    """Enough of them, and keys, for the Hopper backward kernel whose blocks have 192 keys (CASES 2)."""
    check(kernels, case, poison(case, make(case)))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_padding_of_many_short_sequences(kernels, dtype, is_causal):
    """Whole blocks of keys hidden before or behind those that are seen, and all of a sequence's (CASES 1, 2)."""
    case = Case((66,), 70, 384, 2, 2, 40, dtype=dtype, mask="B11S", bias="1KTS", is_causal=is_causal)
    inputs = make(case)
    inputs.mask[0::4, ..., :200] = False
    inputs.mask[1::4, ..., 180:] = False
    inputs.mask[2] = False
    check(kernels, case, poison(case, inputs))


@pytest.mark.parametrize(
    "case",
    [
        Case((2,), 150, 264, 4, 2, 64, dtype="bfloat16", bias="1N1S", is_causal=True),
        Case((3,), 70, 200, 8, 2, 128, dtype="float16", mask="BKTS", bias="BN1S"),
        Case((2,), 130, 392, 16, 2, 32, dtype="bfloat16", mask="BK", bias="1N1S", is_causal=True),
        Case((1,), 150, 264, 6, 2, 128, dtype="bfloat16", bias="1N1S", is_causal=True),
        Case((2,), 90, 264, 8, 2, 128, dtype="bfloat16", bias="1N1S", bias_dtype="float32"),
        Case((2,), 90, 260, 8, 2, 64, dtype="bfloat16", mask="B11S", bias="BN1S"),
        Case((2,), 1, 2056, 8, 2, 128, dtype="bfloat16", bias="1N1S"),
    ],
    ids=["pairs", "dense_mask", "eight", "three", "float32", "unaligned", "decode"],
)
def test_bias_per_key_and_query_head(kernels, case):
    """As slopes of distances (ALiBi) give it: the heads of a group share keys, but no bias (CASES 1, 2)."""
    check(kernels, case, poison(case, make(case)))


@pytest.mark.parametrize("mask", INTERVAL_PATTERNS)
def test_every_broadcast_pattern_of_key_intervals(implementation, mask):
    bias = PATTERNS[5 * INTERVAL_PATTERNS.index(mask) % len(PATTERNS)]
    case = fit(Case((3,), 140, 170, 4, 2, 16, mask=mask, bias=bias, dtype="bfloat16"), implementation)
    check(implementation, case, poison(case, make(case)))


@pytest.mark.parametrize(
    "H, Hv",
    [(1, 1), (3, 5), (8, 8), (40, 24), (64, 64), (72, 72), (80, 100), (96, 96), (100, 33)]
    + [(128, 64), (64, 128), (129, 7), (192, 192), (255, 256)],
)
def test_any_head_dimension(implementation, H, Hv):
    """Neither refused nor padded into the result: odd ones, and v's different from q's (CASES 23)."""
    check(implementation, Case((2,), 35, 140, 4, 2, H, Hv, dtype=DTYPES[H % 3], mask="1K1S", bias="1KTS"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias_dtype", DTYPES)
def test_bias_in_another_dtype(implementation, dtype, bias_dtype):
    """A float32 bias over bfloat16 operands and the rest: dbias comes in bias's dtype (CASES 2, 9)."""
    check(implementation, Case(T=40, dtype=dtype, bias="1KTS", bias_dtype=bias_dtype, mask="BN"))


@st.composite
def problems(draw):
    size = lambda low, high: draw(st.integers(low, high))
    K, G = size(1, 3), draw(st.sampled_from([1, 1, 2, 3, 4, 5, 7]))
    return Case(
        batch=tuple(draw(st.lists(st.integers(1, 3), max_size=2))),
        T=size(1, 200),
        S=size(1, 300),
        N=K * G,
        K=K,
        H=size(1, 70),
        Hv=size(1, 70),
        dtype=draw(st.sampled_from(DTYPES)),
        mask=draw(st.sampled_from([None] + PATTERNS + 3 * INTERVAL_PATTERNS)),
        bias=draw(st.sampled_from([None] + PATTERNS)),
        bias_dtype=draw(st.sampled_from([None, "float32"])),
        is_causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.2])),
        softcap=draw(st.sampled_from([None, None, 3.0])),
        plan=draw(st.booleans()),
    )


@hypothesis.given(case=problems(), seed=st.integers(0, 2**16))
def test_any_problem(implementation, case, seed):
    """Shapes that are multiples of nothing, any mask, any bias, any option."""
    case = fit(case, implementation)
    inputs = make(case, seed)
    check(implementation, case, poison(case, inputs) if case.bias else inputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # jax.nn has no float16 on a CPU; cuda's float32 is that
@pytest.mark.parametrize(
    "case",
    [Case((2,), 128, 128, 4, 2, 64, bias="BNTS"), Case((1,), 96, 96, 8, 1, 32, mask="11TS", is_causal=True)],
    ids=["bias", "mask_causal_multi_query"],
)
def test_at_most_twice_the_error_of_jax_nn(implementation, case, dtype):
    """Never more than twice the error of jax.nn.dot_product_attention(implementation="xla") in the same dtype."""
    case = fit(case.with_(dtype=dtype), implementation)
    inputs = make(case)
    if inputs.mask is not None:
        inputs = inputs._replace(mask=inputs.mask | np.eye(case.T, dtype=bool))  # jax.nn is not defined on empty rows
    inputs = inputs._replace(dlse=np.zeros_like(inputs.dlse))  # jax.nn gives no lse
    got, want = evaluate(implementation, case, inputs), judge(case, inputs)

    @jax.jit
    def peer(q, k, v, mask, bias, dout):
        function = lambda q, k, v, bias: jax.nn.dot_product_attention(
            q, k, v, bias, mask, is_causal=case.is_causal, implementation="xla"
        )
        out, vjp = jax.vjp(function, q, k, v, bias)
        return out, *vjp(dout)

    out, dq, dk, dv, dbias = peer(inputs.q, inputs.k, inputs.v, inputs.mask, inputs.bias, inputs.dout)
    ours, theirs = errors(got, want), errors(got._replace(out=out, dq=dq, dk=dk, dv=dv, dbias=dbias), want)
    assert all(ours[name] <= 2 * theirs[name] for name in ours if name != "lse"), f"ours {ours}, theirs {theirs}"


def test_gradients_of_a_group_are_summed_in_float32(implementation):
    """dk and dv of 64 query heads: bfloat16 partial sums would lose far more than is allowed here (CASES 20)."""
    case = Case((1,), 64, 64, 64, 1, 32, dtype="bfloat16")
    got, want = evaluate(implementation, case, make(case)), judge(case, make(case))
    assert relative_error(got.dk, want.dk) < 3.5e-3 and relative_error(got.dv, want.dv) < 3.5e-3


def test_softcap_leaves_the_bias_alone(implementation):
    """cap * tanh(logits / cap) + bias: a bias above the cap arrives whole (CASES 24)."""
    case = fit(Case((1,), 20, 30, 2, 1, 16, bias="1NTS", softcap=2.0, scale=2.0), implementation)
    inputs = make(case)
    check(implementation, case, inputs._replace(bias=(4 * inputs.bias).astype(inputs.bias.dtype)))


@pytest.mark.parametrize(
    "batch, T, S", [((2,), 5, 0), ((2,), 0, 7), ((2,), 0, 0), ((0,), 5, 7), ((2, 0), 5, 7), ((0,), 300, 600)]
)
@pytest.mark.parametrize("pattern", [None, "dense", "intervals"])
def test_nothing_to_attend_to(implementation, batch, T, S, pattern):
    """No keys, no queries or no batch: zeros of the right shape, lse -inf, zero gradients."""
    mask = {None: None, "dense": "BNTS", "intervals": "BK"}[pattern]
    check(implementation, Case(batch, T, S, 4, 2, 8, mask=mask, bias=pattern and "1KTS", is_causal=pattern == "dense"))


def test_interval_ends_may_be_any_integer(implementation):
    case = fit(Case((1,), 70, 150, 2, 2, 16, mask="1K"), implementation)
    low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    start = np.resize(np.array([low, 0, -5, 30, high, 69], np.int32), (1, 2, 150))
    end = np.resize(np.array([high, 40, low, 70], np.int32), (1, 2, 150))
    check(implementation, case, make(case)._replace(mask=(start, end)))


@pytest.mark.parametrize("bias", ["1K1S", "11TS"])
def test_deterministic_gradients_are_bitwise_the_same(implementation, bias):
    """Many tiles and a summed dbias, run after run (CASES 28)."""
    case = fit(Case((3,), 300, 700, 8, 2, 32, mask="BK", bias=bias), implementation)
    inputs = make(case)
    first, *others = (evaluate(implementation, case, inputs, deterministic=True) for _ in range(3))
    for again in others:
        for name in ("out", "lse", "dq", "dk", "dv", "dbias"):
            assert getattr(first, name).tobytes() == getattr(again, name).tobytes(), name
    check(implementation, case, inputs, deterministic=True)


@pytest.mark.parametrize("mask", [None, "B11S"])
def test_sums_over_the_batch_are_bitwise_the_same(kernels, mask):
    case = fit(Case((40,), 150, 264, 2, 2, 32, dtype="bfloat16", mask=mask, bias="1KTS"), kernels)
    inputs = make(case)
    first, again = (evaluate(kernels, case, inputs, deterministic=True) for _ in range(2))
    assert first.dbias.tobytes() == again.dbias.tobytes() and first.dq.tobytes() == again.dq.tobytes()
    check(kernels, case, inputs, deterministic=True)


def test_values_are_the_same_without_lse_and_gradients(implementation):
    case = fit(Case(mask="1KTS", bias="1N1S"), implementation)
    inputs = make(case)
    call = jax.jit(lambda *x: jax_dma.attention(*x, implementation=implementation))
    assert np.array_equal(call(*inputs[:5]), evaluate(implementation, case, inputs).out)


def test_float64_is_computed_in_float64():
    """Double precision goes to plain JAX and stays double; lse too."""
    case = Case(dtype="float64", mask="1KTS", bias="B1TS", softcap=2.0)
    with jax.enable_x64(True):
        for implementation in ("xla", "reference", None):
            check(implementation, case)
            check(implementation, case.with_(mask="BK", is_causal=True))


def test_float32_is_not_rounded_to_a_shorter_dtype():
    """Values that differ only below bfloat16's and tf32's precision give different results."""
    q = np.ones((1, 1, 1, 1), np.float32)
    k = np.array([1.0, 1.0 + 2.0**-18], np.float32).reshape(1, 2, 1, 1)
    for implementation in ("xla", "reference", None):
        out = jax.jit(lambda q, k: jax_dma.attention(q, k, k, scale=2.0**14, implementation=implementation))(q, k)
        weight = (float(out.item()) - 1.0) / 2.0**-18  # of the second key: 1 / (1 + exp(-1/16))
        assert abs(weight - 1 / (1 + np.exp(-(2.0**-4)))) < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", ["plain", "softcap (24)", "many_chunks", "many_chunks_intervals", "more_keys_causal (12)"]
)
def test_plain_jax_on_the_gpu(name, dtype):
    """``xla`` is what CUDA falls back on: as exact there, float32 included."""
    check("xla", NAMED[name].with_(dtype=dtype))
