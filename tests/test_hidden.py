"""What is hidden: empty rows, empty tiles, extreme biases, and garbage that must reach nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dma
import oracle
from cases import Case, make, poison
from support import TOLERANCE, assert_close, assert_exact_zeros, check, evaluate, fit, judge, lse_error, relative_error

KEY_TILE = 128


def queries_per_tile(group):
    """The largest power of two q with q * group <= 128 (a tile is 128 rows by 128 keys)."""
    return max(2**i for i in range(8) if 2**i * group <= 128 or i == 0)


def hide(how, case, inputs, seen):
    """Inputs in which only ``seen`` [T, S] is visible, said by a mask, by a plan, or by the bias."""
    heads = (1,) * len(case.batch) + (1,)
    seen = seen.reshape(heads + seen.shape)
    if how == "mask":
        return case.with_(mask="11TS"), inputs._replace(mask=seen)
    if how == "plan":
        return case.with_(mask="11TS", plan=True), inputs._replace(mask=seen)
    low = np.asarray({"bias": -np.inf, "bias_min": -3e38}[how], inputs.bias.dtype)
    return case, inputs._replace(bias=np.where(seen, inputs.bias, low))


def tile_pattern(rows, columns, tiles, rows_per_tile, kind, seed=0):
    """A bool array [rows, columns] made of visible and hidden tiles, visible ones partly or wholly so."""
    row_tiles, column_tiles = -(-rows // rows_per_tile), -(-columns // KEY_TILE)
    i, j = np.arange(row_tiles)[:, None], np.arange(column_tiles)[None, :]
    chosen = {
        "checkerboard": (i + j) % 2 == 0,
        "alternating_query_tiles": (i % 2 == 1) & (j >= 0),
        "alternating_key_tiles": (j % 2 == 0) & (i >= 0),
        "odd_key_tiles": (j % 2 == 1) & (i >= 0),
        "first_and_last_empty": (i > 0) & (i < row_tiles - 1) & (j > 0) & (j < column_tiles - 1),
        "one_tile": (i == 1) & (j == column_tiles - 1),
        "nothing": (i < 0) & (j < 0),
    }[kind]
    seen = np.repeat(np.repeat(chosen, rows_per_tile, 0), KEY_TILE, 1)[:rows, :columns]
    return seen if tiles == "full" else seen & (np.random.default_rng(seed).random((rows, columns)) < 0.5)


@pytest.mark.parametrize(
    "kind",
    ["checkerboard", "alternating_query_tiles", "alternating_key_tiles", "odd_key_tiles"]
    + ["first_and_last_empty", "one_tile", "nothing"],
)
@pytest.mark.parametrize("how", ["mask", "bias"])
def test_empty_tiles(implementation, kind, how):
    """Tiles skipped in either direction leave no stale data behind and lse set (CASES 19, 21, 22)."""
    group = 4
    rows = queries_per_tile(group)
    case = fit(Case((1,), 5 * rows - 7, 5 * KEY_TILE - 9, 2 * group, 2, 16, bias="11TS"), implementation)
    seen = tile_pattern(case.T, case.S, "partial", rows, kind)
    check(implementation, *hide(how, case, make(case), seen))


@pytest.mark.parametrize(
    "kind, how", [("checkerboard", "plan"), ("alternating_query_tiles", "mask"), ("odd_key_tiles", "mask")]
)
def test_empty_tiles_of_single_heads(implementation, kind, how):
    """The same with G = 1, where a tile is 128 queries, and tiles that are wholly visible (CASES 21)."""
    case = fit(Case((1,), 4 * 128 - 3, 3 * KEY_TILE + 5, 1, 1, 16, bias="1N1S"), implementation)
    seen = tile_pattern(case.T, case.S, "full", 128, kind)
    check(implementation, *hide(how, case, make(case), seen))


@pytest.mark.parametrize("is_causal", [False, True])
def test_key_tiles_that_no_query_sees(implementation, is_causal):
    """Key intervals with whole tiles of empty intervals between others, and tiles seen by few queries (CASES 21)."""
    case = fit(
        Case((1,), 150, 6 * KEY_TILE - 30, 4, 2, 16, mask="1K", bias="1K1S", is_causal=is_causal), implementation
    )
    tile = np.arange(case.S) // KEY_TILE
    start = np.where(tile % 2 == 0, 20 * tile, 7).astype(np.int32)
    end = np.where(tile % 2 == 0, start + 15, 7).astype(np.int32)
    mask = tuple(np.broadcast_to(x, (1, 2, case.S)) for x in (start, end))
    check(implementation, case, make(case)._replace(mask=mask))


@pytest.mark.parametrize(
    "mask, bias, is_causal",
    [("1NTS", "1NTS", False), ("11TS", "11TS", True), ("BK", "BNTS", False), (None, "1K1S", False)],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_see_no_key(implementation, mask, bias, is_causal, dtype):
    """out 0, lse -inf and zero gradients, whatever their cotangents hold: NaN here (CASES 19)."""
    case = fit(Case((2,), 70, 60, 4, 2, 16, mask=mask, bias=bias, is_causal=is_causal, dtype=dtype), implementation)
    inputs = make(case)
    if mask is None:
        inputs.bias[:, 1] = -np.inf  # all that the second key/value head's queries see
    if mask == "BK":
        start, end = inputs.mask
        inputs = inputs._replace(mask=(np.maximum(start, 5), np.where(start < 40, np.minimum(end, 40), end)))
    empty = np.isneginf(judge(case, inputs).lse)
    assert empty.any() and not empty.all()
    inputs = inputs._replace(
        dout=np.where(empty[..., None], np.nan, inputs.dout).astype(inputs.dout.dtype),
        dlse=np.where(empty, np.nan, inputs.dlse).astype(inputs.dlse.dtype),
    )
    check(implementation, case, inputs)


HIDING = {
    "finfo_min_f32": ("float32", float(jnp.finfo(jnp.float32).min)),
    "finfo_min_bf16": ("bfloat16", float(jnp.finfo(jnp.bfloat16).min)),
    "minus_infinity_f16": ("float16", -np.inf),
    "minus_infinity_bf16": ("bfloat16", -np.inf),
    "minus_1e30_f32": ("float32", -1e30),
}
JUST_ABOVE = float(np.nextafter(np.float32(-1e30), np.float32(0)))  # the lowest float32 that hides nothing
ORDINARY = {
    "finfo_min_f16": ("float16", -65504.0),
    "just_above_minus_1e30": ("float32", JUST_ABOVE),
    "large_f16": ("float16", 65504.0),
    "finfo_max_bf16": ("bfloat16", float(jnp.finfo(jnp.bfloat16).max)),
    "finfo_max_f32": ("float32", float(jnp.finfo(jnp.float32).max)),
}


@pytest.mark.parametrize("name", [*HIDING, *ORDINARY])
@pytest.mark.parametrize("where", ["some", "rows"])
def test_extreme_bias(implementation, name, where):
    """At single positions and filling whole rows: finite everywhere, and what the definition says (CASES 15)."""
    bias_dtype, value = {**HIDING, **ORDINARY}[name]
    case = Case((1,), 40, 150, 2, 1, 16, dtype="bfloat16" if bias_dtype == "bfloat16" else "float32")
    case = fit(case.with_(bias="1NTS", bias_dtype=bias_dtype), implementation)
    inputs = make(case)
    chosen = np.random.default_rng(1).random(inputs.bias.shape) < 0.1
    if where == "rows":
        chosen = chosen | (np.arange(case.T) % 3 == 0)[None, None, :, None]
    inputs = inputs._replace(bias=np.where(chosen, np.asarray(value, inputs.bias.dtype), inputs.bias))
    got, want = evaluate(implementation, case, inputs), judge(case, inputs)
    for x, name in zip((got.out, got.dq, got.dk, got.dv, got.dbias), ("out", "dq", "dk", "dv", "dbias")):
        assert np.isfinite(np.asarray(x).astype(np.float64)).all(), name
    assert lse_error(got.lse, want.lse) <= TOLERANCE[case.dtype][1]
    if name in HIDING or abs(value) > 1e20:  # beside numbers so large the oracle too loses the products
        assert_close(got, want, case.dtype)
        assert_exact_zeros(got, want)
    else:  # logits near 65504 are whole multiples of 2**-8 in float32, larger ones coarser still: only ties are exact
        coarse = np.isclose(np.abs(want.lse), abs(value), rtol=0.01)
        keep = lambda x: np.where(coarse[..., None], 0, np.asarray(x).astype(np.float64))
        assert relative_error(keep(got.out), keep(want.out)) <= TOLERANCE[case.dtype][0]
        assert relative_error(got.out, want.out) <= 2e-2


@pytest.mark.parametrize("value", [JUST_ABOVE, -9e29, -1e9, -1e6, 3e7])
@pytest.mark.parametrize("bias", ["1NTS", "1K1S"])
def test_rows_in_which_every_bias_is_huge(implementation, value, bias):
    """What is added to all logits of a row changes no gradient, also where float32 cannot hold log(sum) beside it."""
    case = fit(Case((1,), 41, 300, 4, 2, 16, mask="11TS", bias=bias, bias_dtype="float32"), implementation)
    inputs = make(case)
    rows = np.arange(case.T) % 3 == 0 if bias[2] == "T" else np.ones(case.T, bool)
    huge = np.where(rows[: inputs.bias.shape[2], None], np.asarray(value, inputs.bias.dtype), inputs.bias)
    # q is 0 in these rows: float32 would lose its products, which the oracle keeps.
    inputs = inputs._replace(bias=huge, q=np.where(rows[None, :, None, None], 0, inputs.q).astype(inputs.q.dtype))
    check(implementation, case, inputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mask, is_causal", [("1KTS", False), ("BN", False), (None, True), ("11TS", True)])
def test_garbage_in_a_hidden_bias_reaches_nothing(implementation, dtype, mask, is_causal):
    """NaN, infinities, finfo.min and finfo.max under the mask: results bitwise as with zeros there (CASES 15)."""
    case = fit(Case((2,), 90, 140, 4, 2, 16, dtype=dtype, mask=mask, bias="BNTS", is_causal=is_causal), implementation)
    poisoned = poison(case, make(case))
    assert np.isnan(poisoned.bias).any()
    clean = poisoned._replace(
        bias=np.where(np.isfinite(poisoned.bias) & (np.abs(poisoned.bias) < 1e4), poisoned.bias, 0)
    )
    run = functools.partial(evaluate, implementation, case, deterministic=True)
    got, expected = run(poisoned), run(clean)
    for name in ("out", "lse", "dq", "dk", "dv", "dbias"):
        assert np.array_equal(getattr(got, name), getattr(expected, name)), name
    assert_close(got, judge(case, poisoned), case.dtype)
    assert_exact_zeros(got, judge(case, poisoned))


@pytest.mark.parametrize("bias_value", [0.0, -np.inf, float(jnp.finfo(jnp.bfloat16).min)])
def test_zero_cotangents_give_zero_gradients(implementation, bias_value):
    """Exactly zero, with extreme biases and empty rows too (CASES 15)."""
    case = Case((1,), 40, 150, 2, 1, 16, dtype="bfloat16", bias="1NTS", mask="1NTS")
    inputs = make(case)
    bias = inputs.bias.copy()
    bias[:, :, ::2, ::3] = bias_value
    bias[:, :, 5] = bias_value
    inputs = inputs._replace(bias=bias, dout=np.zeros_like(inputs.dout), dlse=np.zeros_like(inputs.dlse))
    got = evaluate(implementation, case, inputs)
    assert not any(np.asarray(x).any() for x in (got.dq, got.dk, got.dv, got.dbias))


def test_large_logits_do_not_overflow(implementation):
    """Logits of several hundred, of both signs: the running maximum moves far between key tiles."""
    case = fit(Case((1,), 40, 400, 2, 1, 16, bias="111S"), implementation)
    inputs = make(case)
    ramp = (np.linspace(-600, 600, case.S) * np.where(np.arange(case.S) % 5 == 0, 1, 0.98)).astype(inputs.bias.dtype)
    inputs = inputs._replace(bias=ramp.reshape(inputs.bias.shape))
    got, want = evaluate(implementation, case, inputs), judge(case, inputs)
    assert_close(got, want, case.dtype, factor=20)  # float32 holds a logit of 600 to 3e-5


@pytest.mark.parametrize(
    "H, dtype", [(32, "bfloat16"), (64, "float16"), (128, "bfloat16"), (128, "float16"), (256, "bfloat16")]
)
@pytest.mark.parametrize(
    "mask, bias, is_causal, softcap",
    [(None, None, True, None), ("1KTS", None, False, None), ("BK", None, False, None)]
    + [(None, "1NTS", False, None), ("1KTS", "1KTS", True, None), ("11TS", "1NTS", False, 40.0)]
    + [(None, "1K1S", True, None), ("BK", "1K1S", False, None), ("1KTS", "1K1S", False, None)],
)
def test_logits_far_above_those_before(kernels, H, dtype, mask, bias, is_causal, softcap):
    """A few keys, others for each row and most of them late, outweigh all others by e^40 or so."""
    case = fit(Case((2,), 250, 420, 8, 2, H, None, dtype, mask, bias, None, is_causal, None, softcap), kernels)
    inputs, rng = make(case), np.random.default_rng(1)
    if bias is None:
        inputs.k[:, 130::37] *= 12
    else:
        far = (rng.random(inputs.bias.shape) < 0.01) & (np.arange(case.S) > 100)
        inputs = inputs._replace(bias=np.where(far, 40 + 20 * inputs.bias, inputs.bias))
    got, want = evaluate(kernels, case, inputs), judge(case, inputs)
    out, lse, _ = TOLERANCE[case.dtype]
    assert relative_error(got.out, want.out) <= out and lse_error(got.lse, want.lse) <= lse


def test_a_mask_hides_in_a_float_mask_s_place():
    """An additive mask passed as bias and the bool mask it stands for give the same results."""
    case = Case((1,), 30, 50, 2, 1, 8, mask="11TS")
    inputs = make(case)
    additive = np.where(inputs.mask, 0, jnp.finfo(jnp.float32).min).astype(np.float32)
    by_mask = jax_dma.attention(*inputs[:3], mask=inputs.mask, implementation="reference")
    by_bias = jax_dma.attention(*inputs[:3], bias=additive, implementation="reference")
    assert jnp.array_equal(by_mask, by_bias)
    assert relative_error(by_mask, oracle.attention(*inputs[:3], inputs.mask).out) < 1e-5
    assert jax.typeof(by_mask).dtype == jnp.float32
