"""The plan of a dense mask: packed bits and tile classes against brute force."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dma
from cases import PATTERNS, Case, make, per_query_head
from jax_dma.plan import plan_for
from jax_dma.tiles import interval_bounds, pack_bits, queries_per_tile, unpack_bits
from support import check, fit

KEY_TILE = 128
# Plain JAX on the CPU; on a GPU, a kernel analyses masks that vary over queries and keys.
on_each_platform = pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.mark.parametrize("length", [1, 31, 32, 33, 127, 128, 129, 300])
def test_bits_round_trip(length):
    mask = np.random.default_rng(length).random((2, 3, length)) < 0.5
    bits = np.asarray(pack_bits(mask))
    assert bits.dtype == np.uint32 and bits.shape == (2, 3, 4 * -(-length // KEY_TILE))
    assert np.array_equal(unpack_bits(bits, length), mask)
    for key in {0, length // 2, length - 1}:  # bit i of word w is key 32 * w + i
        assert np.array_equal((bits[..., key // 32] >> (key % 32)) & 1, mask[..., key])
    assert not np.asarray(unpack_bits(bits, bits.shape[-1] * 32))[..., length:].any()


@pytest.mark.parametrize(
    "group, queries", [(1, 128), (2, 64), (3, 32), (4, 32), (5, 16), (7, 16), (8, 16), (128, 1), (200, 1)]
)
def test_queries_per_tile(group, queries):
    assert queries_per_tile(group) == queries


def classes(case, mask, queries):
    """[*batch, K, query tiles, key tiles], seen and full, by looking at every tile of the mask in full."""
    full_shape = (*case.batch, case.N, case.T, case.S)
    mask = np.broadcast_to(per_query_head(case, mask), full_shape)
    mask = mask.reshape(*case.batch, case.K, case.N // case.K, case.T, case.S)
    rows, columns = range(0, case.T, queries), range(0, case.S, KEY_TILE)
    of = lambda reduce: np.stack(
        [
            np.stack([reduce(mask[..., i : i + queries, j : j + KEY_TILE], (-3, -2, -1)) for j in columns], -1)
            for i in rows
        ],
        -2,
    )
    return of(np.any), of(np.all)


def bitmap(words, plane, outer, inner, case):
    """A tile map as bool [*batch, K, outer, inner], its broadcast axes filled in."""
    words = np.asarray(words)[..., plane, :]
    if words.shape[-1] == 1 and inner > 32:
        words = np.repeat(words, -(-inner // 32), -1)
    bits = (words[..., None] >> np.arange(32, dtype=np.uint32)) & 1
    bits = bits.reshape(bits.shape[:-2] + (-1,))[..., :inner].astype(bool)
    return np.broadcast_to(bits, (*case.batch, case.K, outer, inner))


@on_each_platform
@pytest.mark.parametrize("pattern", PATTERNS)
def test_tile_classes(platform, pattern):
    """Tiles that have a visible position, and tiles that have no hidden one, in both directions."""
    case = Case((2,), 100, 300, 8, 2, 8, mask=pattern)
    queries = queries_per_tile(4)
    rng = np.random.default_rng(1)
    mask = make(case).mask
    # Whole tiles of each class.
    for index in np.ndindex(mask.shape[:-2]):
        for i in range(0, mask.shape[-2], queries):
            for j in range(0, mask.shape[-1], KEY_TILE):
                kind = rng.integers(3)
                if kind < 2:
                    mask[index][i : i + queries, j : j + KEY_TILE] = bool(kind)
    plan = jax.jit(lambda m: jax_dma.plan(m, *shapes(case)))(mask)
    assert np.array_equal(plan.dense(), mask)
    seen, full = classes(case, mask, queries)
    query_tiles, key_tiles = seen.shape[-2:]
    for plane, expected in enumerate((seen, full)):
        assert np.array_equal(bitmap(plan.tiles_by_query, plane, query_tiles, key_tiles, case), expected)
        by_key = bitmap(plan.tiles_by_key, plane, key_tiles, query_tiles, case)
        assert np.array_equal(np.swapaxes(by_key, -1, -2), expected)


@on_each_platform
@pytest.mark.parametrize("T, S", [(100, 700), (300, 300), (700, 200), (65, 1056)])
@pytest.mark.parametrize("pattern", ["11TS", "1NTS"])
def test_tiles_hidden_by_the_causal_rule(platform, T, S, pattern):
    """The kernel takes them as hidden, and does not write their bits; plain JAX analyses the whole mask."""
    case = Case((2,), T, S, 8, 2, 8, mask=pattern)
    mask = np.random.default_rng(T).random(case.shape(pattern)) < 0.5
    mask[..., :128] = True
    last_queries = np.minimum(np.arange(T) // 32 * 32 + 31, T - 1)
    seen = np.arange(S) // KEY_TILE * KEY_TILE <= last_queries[:, None] + S - T
    assert not seen.all()
    causal = jax.jit(lambda m: plan_for(m, *shapes(case), causal=True))(mask)
    if platform == "cuda":
        causal = dataclasses.replace(causal, bits=jnp.where(pack_bits(jnp.asarray(seen)) != 0, causal.bits, 0))
    assert_same_plan(causal, jax_dma.plan(mask & seen if platform == "cuda" else mask, *shapes(case)))


def test_bits_of_tiles_that_the_causal_rule_hides_do_not_matter(implementation):
    """They may be anything in a causal call: the same results and gradients with zeros and with ones there."""
    case = fit(Case((2,), 230, 700, 8, 2, 16, mask="1KTS", bias="1KTS"), implementation)
    inputs = make(case)
    last_queries = np.minimum(np.arange(case.T) // 32 * 32 + 31, case.T - 1)
    hidden = np.arange(case.S) // KEY_TILE * KEY_TILE > last_queries[:, None] + case.S - case.T
    assert hidden.any()
    zeros = jax_dma.plan(inputs.mask & ~hidden, *inputs[:2])
    ones = dataclasses.replace(zeros, bits=zeros.bits | pack_bits(jnp.asarray(hidden)))

    @jax.jit
    def both(plan, q, k, v, bias):
        options = dict(is_causal=True, deterministic=True, implementation=implementation)
        attend = lambda *x: jax_dma.attention(*x[:3], plan, x[3], **options)
        out, vjp = jax.vjp(attend, q, k, v, bias)
        return out, *vjp(out)

    for got, want in zip(both(ones, *inputs[:3], inputs.bias), both(zeros, *inputs[:3], inputs.bias)):
        np.testing.assert_array_equal(got, want)


def shapes(case):
    struct = lambda length, heads: jax.ShapeDtypeStruct((*case.batch, length, heads, case.H), jnp.float32)
    return struct(case.T, case.N), struct(case.S, case.K)


@on_each_platform
@pytest.mark.parametrize(
    "T, keys_past_35_tiles, pattern", [(10, 3, "11TS"), (140, 16, "BKTS"), (35 * 32 + 7, 16, "11TS")]
)
def test_more_tiles_than_a_word_has_bits(platform, T, keys_past_35_tiles, pattern):
    """In either direction, with rows that are and are not whole chunks of 16 bytes."""
    case = Case((2,), T, 35 * KEY_TILE + keys_past_35_tiles, 4, 1 if T > 1000 else 2, 8, mask=pattern)
    queries = queries_per_tile(case.N // case.K)
    mask = np.zeros(case.shape(pattern), bool)
    mask[..., T - 1, 33 * KEY_TILE + 5] = True
    mask[..., 34 * KEY_TILE : 35 * KEY_TILE] = True
    mask[..., 1, :] = True
    plan = jax.jit(lambda m: jax_dma.plan(m, *shapes(case)))(mask)
    assert np.array_equal(plan.dense(), mask)
    tiles = -(-T // queries), 36
    for plane, want in enumerate(classes(case, mask, queries)):
        assert np.array_equal(bitmap(plan.tiles_by_query, plane, *tiles, case), want)
        assert np.array_equal(bitmap(plan.tiles_by_key, plane, *tiles[::-1], case), np.swapaxes(want, -1, -2))


@pytest.mark.parametrize("heads", ["1", "K", "N"])
def test_interval_bounds(heads):
    """Per key tile: smallest start, largest end of what is not empty; largest start, smallest end for fullness."""
    case = Case((2,), 60, 300, 4, 2, 8, mask="B" + heads)
    start, end = make(case).mask
    end[:, :, 128:256] = start[:, :, 128:256]  # a tile that nobody sees
    bounds = np.asarray(interval_bounds(start, end, case.N, case.K))
    assert bounds.shape == (2, case.K if heads != "1" else 1, 4, 3)
    group = case.N // case.K if heads == "N" else 1
    for b, head, tile in np.ndindex(2, bounds.shape[1], 3):
        part = np.s_[b, head * group : (head + 1) * group, tile * 128 : (tile + 1) * 128]
        a, z = start[part], end[part]
        first, last, latest, earliest = bounds[b, head, :, tile]
        live = a < z
        if not live.any():
            assert first > last  # no query at all
            continue
        assert (first, last) == (a[live].min(), z[live].max())
        for t in range(case.T):
            everywhere = ((a <= t) & (t < z)).all()
            assert (latest <= t < earliest) == everywhere


def test_interval_bounds_of_words():
    """Where there are more than 128 key tiles, each 32 of them have bounds too, after those of the tiles."""
    rng = np.random.default_rng(0)
    start = rng.integers(0, 1000, (2, 1, 160 * KEY_TILE + 3)).astype(np.int32)
    end = start + rng.integers(-200, 200, start.shape).astype(np.int32)
    end[0, 0, 32 * KEY_TILE : 64 * KEY_TILE] = 0  # a word that nobody sees
    bounds = np.asarray(interval_bounds(jnp.asarray(start), jnp.asarray(end), 4, 2))
    assert bounds.shape == (2, 1, 4, 161 + 6)
    first = (jnp.asarray(x[..., : 128 * KEY_TILE]) for x in (start, end))
    short = np.asarray(interval_bounds(*first, 4, 2))
    np.testing.assert_array_equal(bounds[..., :128], short)
    for word in range(6):
        tiles = bounds[..., 32 * word : min(32 * word + 32, 161)]
        want = [reduce(tiles[:, :, i], -1) for i, reduce in enumerate((np.min, np.max, np.max, np.min))]
        np.testing.assert_array_equal(bounds[..., 161 + word], np.stack(want, -1))


def test_one_plan_serves_many_layers(implementation):
    """Made once outside, passed as the mask of two calls: the same results as from the mask."""
    case = fit(Case((2,), 70, 150, 4, 2, 16, mask="1KTS", bias="11TS"), implementation)
    inputs = make(case)
    call = lambda mask: (
        lambda q, k, v: jax_dma.attention(
            jax_dma.attention(q, k, v, mask, implementation=implementation), k, v, mask, implementation=implementation
        )
    )
    by_mask = jax.jit(call(inputs.mask))(*inputs[:3])
    by_plan = jax.jit(lambda q, k, v, plan: call(plan)(q, k, v))(*inputs[:3], jax_dma.plan(inputs.mask, *inputs[:2]))
    assert np.array_equal(by_mask, by_plan)


def test_planning_inside_jit(implementation):
    """A plan of a mask that is computed in the same program."""
    case = fit(Case((2,), 70, 150, 4, 2, 16, mask="1KTS"), implementation)
    inputs = make(case)
    check(implementation, case.with_(plan=True), inputs)
    inside = jax.jit(
        lambda q, k, v, m: jax_dma.attention(q, k, v, jax_dma.plan(m, q, k), implementation=implementation)
    )
    outside = jax.jit(lambda q, k, v, m: jax_dma.attention(q, k, v, m, implementation=implementation))
    assert np.array_equal(inside(*inputs[:4]), outside(*inputs[:4]))


@on_each_platform
@pytest.mark.parametrize(
    "T, S, dtype, pattern, masked",
    [(100, 300, "float32", "BKTS", False), (70, 1000, "bfloat16", "1NTS", True), (1, 513, "float16", "B1TS", False)]
    + [(40, 1, "float32", "BKTS", False), (9, 9000, "float32", "11TS", True), (700, 128, "bfloat16", "11TS", False)],
)
def test_top_k_planned_at_once(platform, T, S, dtype, pattern, masked):
    """The same plan as that of the bool mask, whatever the lengths; also under vmap."""
    case = Case((2,), T, S, 4, 2, 8)
    rng = np.random.default_rng(T)
    bias = rng.integers(-3, 4, case.shape(pattern)).astype(jnp.dtype(dtype))
    mask = rng.random((T, S)) < 0.7 if masked else None
    window = max(1, S // 5)
    options = dict(is_causal=True, mask=mask)
    at_once = lambda x: jax_dma.plan_top_k(x, window, *shapes(case), **options)
    in_turn = lambda x: jax_dma.plan(jax_dma.masks.dense_top_k(x, window, **options), *shapes(case))
    assert_same_plan(jax.jit(at_once)(bias), jax.jit(in_turn)(bias))
    if T == 70:
        stacked = np.stack([bias, -bias])
        assert_same_plan(jax.jit(jax.vmap(at_once))(stacked), jax.jit(jax.vmap(in_turn))(stacked))


def assert_same_plan(a, b):
    """Equal but for what stands behind the last tile of a bitmap, which is left open."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    tiles = -(-a.query_length // queries_per_tile(a.num_heads // a.num_kv_heads)), -(-a.key_length // KEY_TILE)
    assert np.array_equal(a.bits, b.bits)
    for x, y, inner in [(a.tiles_by_query, b.tiles_by_query, tiles[1]), (a.tiles_by_key, b.tiles_by_key, tiles[0])]:
        assert x.shape == y.shape and np.array_equal(unpack_bits(x, inner), unpack_bits(y, inner))


def test_top_k_is_planned_for_whole_scores_only():
    case = Case((2,), 10, 20, 4, 2, 8)
    for shape in [(2, 2, 1, 20), (2, 2, 10, 1), (2, 3, 10, 20)]:
        with pytest.raises(ValueError, match="bias"):
            jax_dma.plan_top_k(np.zeros(shape, np.float32), 2, *shapes(case))
