"""Every mask builder against its definition, by brute force in NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dma import KeyIntervals, masks, select
from jax_dma.implementations import ffi

# Plain JAX on the CPU; on a GPU, a kernel selects.
on_each_platform = pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
LENGTHS = [(9, 9), (5, 12), (12, 5), (1, 6), (6, 1)]  # (T, S)


def positions(T, S):
    """Key position of each query, as a column, and of each key, as a row."""
    return np.arange(T)[:, None] + (S - T), np.arange(S)[None, :]


def runs(ids):
    """For each position the number of its run of equal ids; -1 for padding."""
    number = np.cumsum(np.concatenate([[0], ids[1:] != ids[:-1]]))
    return np.where(ids < 0, -1, number)


def same_run(ids, T):
    """[T, S]: whether query t stands in the run of key s; queries before the first key stand nowhere."""
    S = len(ids)
    number = runs(ids)
    p = np.arange(T) + (S - T)
    of_query = np.where(p < 0, -1, number[np.maximum(p, 0)])
    return (of_query[:, None] == number[None, :]) & (number[None, :] >= 0)


def sorted_keys(scores, eligible):
    """The eligible keys, best first: high scores first, ties by the lower index, NaN last. -0 ties with +0."""
    keys = np.flatnonzero(eligible)
    return sorted(keys, key=lambda s: (np.isnan(scores[s]), 0.0 if np.isnan(scores[s]) else -scores[s] + 0.0, s))


def kept(scores, window, may_see):
    """[T, S]: the ``window`` best of the keys that each query may see; scores [S] or [T, S]."""
    T, S = may_see.shape
    scores = np.broadcast_to(np.asarray(scores, np.float64), (T, S))
    result = np.zeros((T, S), bool)
    for t in range(T):
        result[t, sorted_keys(scores[t], may_see[t])[:window]] = True
    return result


def assert_live_is_a_bound(seen, live):
    """Any n consecutive queries see at most live + n - 1 keys in all."""
    T = seen.shape[0]
    for first, last in itertools.combinations(range(T + 1), 2):
        assert seen[first:last].any(0).sum() <= live + (last - first) - 1


def top_k(scores, window, **options):
    """masks.top_k in one program (op by op it compiles dozens)."""
    return jax.jit(lambda x: masks.top_k(x, window, **options))(scores)


def nasty_scores(rng, shape, dtype=np.float32):
    """Few distinct values, so many ties; NaN, infinities and both zeros among them."""
    values = np.array([0.0, -0.0, 1.0, 1.0, -1.0, 2.5, np.inf, -np.inf, np.nan, 3.0], dtype)
    return np.where(
        rng.random(shape) < 0.8, rng.choice(values, shape), rng.standard_normal(shape).astype(dtype)
    ).astype(dtype)


def random_ids(rng, rows, S):
    """Runs of equal ids, some ids repeated in separate runs, some negative."""
    changes = rng.random((rows, S)) < 0.25
    values = rng.integers(-1, 3, (rows, S))
    return np.stack([v[np.maximum.accumulate(np.where(c, np.arange(S), 0))] for v, c in zip(values, changes)]).astype(
        np.int32
    )


@pytest.mark.parametrize("T, S", LENGTHS + [(0, 4), (4, 0)])
def test_causal(T, S):
    """Query t sees keys s <= t + (S - T) (CASES 12)."""
    p, s = positions(T, S)
    assert np.array_equal(masks.causal(T, S).dense(T)[0, 0], s <= p)


@pytest.mark.parametrize("T, S", LENGTHS)
@pytest.mark.parametrize("left, right", [(0, 0), (1, 0), (3, 0), (0, 1), (2, 3), (0, 100), (100, 0), (2**31, 2**40)])
def test_sliding_window(T, S, left, right):
    """Both ends included, neither edge off by one, windows beyond S and beyond int32 too (CASES 8)."""
    p, s = positions(T, S)
    mask = masks.sliding_window(T, S, left, right)
    seen = (p - left <= s) & (s <= p + right)
    assert np.array_equal(mask.dense(T)[0, 0], seen)
    assert mask.live == left + right + 1
    assert_live_is_a_bound(seen, mask.live)


def test_the_window_of_the_fault():
    """T 2048, S 2080, and a window that is causal on its right: query t sees exactly 64 keys (CASES 8)."""
    p, s = positions(2048, 2080)
    seen = np.asarray(masks.sliding_window(2048, 2080, 63).dense(2048)[0, 0])
    assert np.array_equal(seen, (p - 63 <= s) & (s <= p)) and (seen[63:].sum(-1) == 64).all()


def test_lengths():
    key_lengths = np.array([[0, 3], [7, 9]])
    mask = masks.lengths(key_lengths, 4, 7)
    assert mask.start.shape == (2, 2, 1, 7)
    seen = np.arange(7) < key_lengths[..., None]
    assert np.array_equal(mask.dense(4), np.broadcast_to(seen[:, :, None, None, :], (2, 2, 1, 4, 7)))


@pytest.mark.parametrize("T, S", [(14, 14), (6, 14), (17, 14), (1, 1)])
def test_segments(T, S):
    """A run of equal ids is a segment, the same id in two runs is two, a negative id is padding."""
    ids = random_ids(np.random.default_rng(0), 40, S)
    seen = masks.segments(ids, T).dense(T)
    assert seen.shape == (40, 1, T, S)
    for row, expected in zip(seen[:, 0], ids):
        assert np.array_equal(row, same_run(expected, T))


def test_segments_by_hand():
    seen = np.asarray(masks.segments(jnp.array([7, 7, -1, 7, 2])).dense(5)[0])
    assert seen.astype(int).tolist() == [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [0] * 5, [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]]


TOP_K = [  # T, S, window, segments, valid
    (19, 19, 1, False, False),
    (19, 19, 4, False, False),
    (19, 19, 19, False, True),
    (19, 19, 4, True, False),
    (11, 19, 3, False, False),
    (11, 19, 3, True, True),
    (24, 19, 5, True, False),
    (24, 19, 2, False, True),
    (16, 16, 40, True, True),
    (1, 33, 6, False, False),
    (3, 1, 1, True, True),
]


def test_top_k_of_segments_that_the_batch_shares():
    scores, ids, valid = jnp.sin(jnp.arange(66.0)).reshape(3, 2, 11), jnp.array([[0] * 4 + [1] * 7]), jnp.arange(11) > 1
    shared = masks.top_k(scores, 3, segment_ids=ids, valid=valid[None])
    repeated = masks.top_k(scores, 3, segment_ids=jnp.repeat(ids, 3, 0), valid=jnp.repeat(valid[None], 3, 0))
    assert (shared.start == repeated.start).all() and (shared.end == repeated.end).all()
    with pytest.raises(ValueError, match=r"segment_ids must have shape \[\*batch\|1, S\] = \(3, 11\), got \(2, 11\)"):
        masks.top_k(scores, 3, segment_ids=ids.repeat(2, 0))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("T, S, window, segmented, padded", TOP_K)
def test_top_k(T, S, window, segmented, padded, is_causal):
    """The `window` best of the keys that a query may see, with ties, zeros of both signs, NaN, infinities and padding;
    the bound `live` holds."""
    rng = np.random.default_rng(window)
    rows = 40
    scores = nasty_scores(rng, (rows, 2, S))
    segment_ids = random_ids(rng, rows, S) if segmented else None
    valid = rng.random((rows, S)) < 0.7 if padded else None
    build = jax.jit(lambda *x: masks.top_k(x[0], window, T, is_causal=is_causal, segment_ids=x[1], valid=x[2]))
    mask = build(scores, segment_ids, valid)
    assert mask.live == (2 * window - 1 if segmented and not is_causal else window)
    seen = np.asarray(mask.dense(T))
    p, s = positions(T, S)
    for row, head in np.ndindex(rows, 2):
        may_see = np.broadcast_to(s <= p if is_causal else np.array(True), (T, S))
        if segmented:
            may_see = may_see & same_run(segment_ids[row], T)
        if padded:
            may_see = may_see & valid[row]
        assert np.array_equal(seen[row, head], kept(scores[row, head], window, may_see)), (row, head)
    for row in range(8):
        assert_live_is_a_bound(seen[row, 0], mask.live)


def test_top_k_is_one_mask_per_head_and_batch_axis():
    scores = np.random.default_rng(0).standard_normal((2, 3, 4, 10)).astype(np.float32)
    together = top_k(scores, 3)
    assert together.start.shape == scores.shape
    alone = top_k(scores[1, 2], 3)
    assert np.array_equal(together.start[1, 2], alone.start) and np.array_equal(together.end[1, 2], alone.end)
    mapped = jax.jit(jax.vmap(jax.vmap(lambda x: masks.top_k(x, 3))))(scores)
    assert (
        np.array_equal(together.start, mapped.start) and np.array_equal(together.end, mapped.end) and mapped.live == 3
    )


def test_top_k_of_lower_precision_scores():
    scores = jnp.asarray(nasty_scores(np.random.default_rng(2), (1, 3, 21)), jnp.bfloat16)
    p, s = positions(21, 21)
    for head, seen in enumerate(np.asarray(top_k(scores, 4).dense(21)[0])):
        assert np.array_equal(seen, kept(np.asarray(scores[0, head], np.float64), 4, s <= p))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "nasty", "bits"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_top_k_by_kernels(dtype, kind):
    """The intervals that plain JAX finds, bit by bit."""
    rng = np.random.default_rng(11)
    build = jax.jit(lambda x, ids, window: masks.top_k(x, window, segment_ids=ids), static_argnums=2)
    for S, window, segmented in [(1, 1, 0), (700, 30, 1), (5000, 512, 0), (5000, 1, 1), (140_008, 2048, 0)]:
        scores = scores_of_a_kind(rng, kind, (2, 3, S), jnp.dtype(dtype))
        ids = np.sort(rng.integers(0, 5, (2, S))) if segmented else None
        by_kernel, plain = (
            build(*jax.device_put((scores, ids), jax.devices(name)[0]), window) for name in ("cuda", "cpu")
        )
        np.testing.assert_array_equal(by_kernel.start, plain.start)
        np.testing.assert_array_equal(by_kernel.end, plain.end)


def test_top_k_then_window():
    """`&` intersects: top-k first, then the window; live is the smaller of the two."""
    scores = np.random.default_rng(3).standard_normal((2, 1, 20)).astype(np.float32)
    top, window = top_k(scores, 6), masks.sliding_window(20, 20, 3)
    both = top & window
    assert both.live == 4
    assert np.array_equal(both.dense(20), np.asarray(top.dense(20)) & np.asarray(window.dense(20)))
    assert (window & masks.causal(20, 20)).live == 4 and (masks.causal(20, 20) & masks.causal(20, 20)).live is None
    with pytest.raises(TypeError):
        top & np.ones((20, 20), bool)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "T, S, window, is_causal, masked",
    [(7, 13, 4, False, False), (13, 13, 4, True, False), (7, 13, 5, True, True)]
    + [(6, 13, 1, False, True), (7, 13, 13, True, True), (5, 8, 30, False, False), (9, 4, 2, True, False)],
)
def test_dense_top_k(dtype, T, S, window, is_causal, masked):
    """The original recipe: `window` best of what is visible in each row, ties by the lower index, NaN last."""
    rng = np.random.default_rng(4)
    scores = nasty_scores(rng, (5, 2, T, S)).astype(jnp.dtype(dtype))
    mask = rng.random((5, 1, T, S)) < 0.6 if masked else None
    chosen = jax.jit(lambda x, m: masks.dense_top_k(x, window, is_causal=is_causal, mask=m))(scores, mask)
    assert chosen.shape == scores.shape and chosen.dtype == jnp.bool_
    p, s = positions(T, S)
    for b, n in np.ndindex(5, 2):
        may_see = np.broadcast_to(s <= p if is_causal else np.array(True), (T, S))
        may_see = may_see & mask[b, 0] if masked else may_see
        assert np.array_equal(chosen[b, n], kept(scores[b, n].astype(np.float64), window, may_see)), (b, n)


def highest(scores, window, visible):
    """What `kept` says, for all rows [..., S] at once."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        scores = np.asarray(scores).astype(np.float64)
    nan = np.isnan(scores)
    index = np.broadcast_to(np.arange(scores.shape[-1]), scores.shape)
    order = np.lexsort((index, np.where(nan, 0, -scores) + 0.0, nan, ~visible))[..., :window]
    result = np.zeros(scores.shape, bool)
    np.put_along_axis(result, order, True, axis=-1)
    return result & visible


def scores_of_a_kind(rng, kind, shape, dtype):
    if kind == "normal":
        return rng.standard_normal(shape).astype(np.float32).astype(dtype)
    if kind == "ties":
        return rng.integers(-2, 3, shape).astype(dtype)
    if kind == "equal":
        return np.full(shape, -1.5, dtype)
    if kind == "bits":  # NaN of either sign, subnormal numbers, everything
        unsigned = np.dtype(f"uint{8 * dtype.itemsize}")
        return rng.integers(0, np.iinfo(unsigned).max, shape, unsigned, endpoint=True).view(dtype)
    return nasty_scores(rng, shape).astype(dtype)


@pytest.mark.parametrize(
    "platform, S",
    [("cpu", S) for S in (33, 1500)]
    + [pytest.param("cuda", S, marks=pytest.mark.gpu) for S in (1, 31, 33, 1024, 4100, 8192, 16384, 40000, 140008)],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dense_top_k_of_rows_of_any_length(platform, S, dtype):
    """On a GPU one warp a row, several, and several blocks; whole 16-byte chunks and not."""
    rng = np.random.default_rng(S)
    T = 2 if S > 10000 else 5
    p, s = positions(T, S)
    mask = rng.random((2, 1, S)) < 0.5
    for window, is_causal, hidden in [(1, False, None), (S // 8 + 1, True, None), (S // 3 + 1, True, mask)]:
        choose = jax.jit(lambda x, m: masks.dense_top_k(x, window, is_causal=is_causal, mask=m))
        visible = np.broadcast_to(s <= p if is_causal else np.array(True), (2, T, S))
        visible = visible if hidden is None else visible & hidden
        for kind in ("normal", "ties", "equal", "nasty", "bits"):
            scores = scores_of_a_kind(rng, kind, (2, T, S), jnp.dtype(dtype))
            assert np.array_equal(choose(scores, hidden), highest(scores, window, visible)), (window, kind)


@on_each_platform
@pytest.mark.parametrize("T, S", [(1, 700), (300, 200), (257, 257)])
def test_dense_top_k_with_masks_that_broadcast(platform, T, S):
    rng = np.random.default_rng(T)
    scores = scores_of_a_kind(rng, "ties", (2, 3, T, S), np.dtype(np.float32))
    p, s = positions(T, S)
    for shape in [(S,), (T, S), (2, 1, T, 1), (3, 1, S), (2, 1, 1, S), (2, 3, T, S), (1, 1)]:
        mask = rng.random(shape) < 0.7
        chosen = jax.jit(lambda x, m: masks.dense_top_k(x, 20, is_causal=True, mask=m))(scores, mask)
        assert np.array_equal(chosen, highest(scores, 20, np.broadcast_to(mask & (s <= p), scores.shape))), shape


@on_each_platform
def test_dense_top_k_under_transformations(platform):
    """vmap over either operand or both, scan, and shard_map."""
    rng = np.random.default_rng(6)
    scores, mask = nasty_scores(rng, (4, 3, 20, 50)), rng.random((4, 3, 20, 50)) < 0.6
    call = lambda x, m: masks.dense_top_k(x, 7, is_causal=True, mask=m)
    p, s = positions(20, 50)
    want = lambda x, m: highest(x, 7, np.broadcast_to(m & (s <= p), x.shape))
    assert np.array_equal(jax.jit(jax.vmap(call))(scores, mask), want(scores, mask))
    assert np.array_equal(jax.jit(jax.vmap(call, (0, None)))(scores, mask[0]), want(scores, mask[0]))
    assert np.array_equal(jax.jit(jax.vmap(call, (1, None), 1))(scores, mask[:, 0]), want(scores, mask[:, :1]))
    one = np.broadcast_to(scores[:1], scores.shape)
    assert np.array_equal(jax.jit(jax.vmap(call, (None, 0)))(scores[0], mask), want(one, mask))
    _, scanned = jax.lax.scan(lambda c, x: (c, call(*x)), None, (scores, mask))
    assert np.array_equal(scanned, want(scores, mask))
    devices = jax.devices(platform)[:4]
    mesh = jax.sharding.Mesh(np.array(devices), "d")
    for specs in [(jax.P("d"), jax.P("d")), (jax.P("d"), jax.P())]:
        m = mask if specs[1] else mask[:1]
        sharded = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=jax.P("d")))(scores, m)
        assert np.array_equal(sharded, want(scores, m))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("mask_shape", [None, (4, 2, 8, 40), (4, 1, 1, 40), (1, 2, 8, 1)])
def test_rows_are_split_over_a_mesh(mask_shape, is_causal):
    """What wraps the kernel, around plain JAX here: no shard holds another's scores, nothing is gathered."""
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 2, 2), ("a", "b", "c"))
    rng = np.random.default_rng(7)
    scores = nasty_scores(rng, (4, 2, 8, 40))
    mask = None if mask_shape is None else rng.random(mask_shape) < 0.6
    split = jax.P("a", "b", None if is_causal else "c")
    local = set()

    def run(*operands):
        local.add(operands[0].shape)
        return select._select_plain(*operands, window=6, causal=is_causal, packed=False)

    def choose(scores, mask):
        operands = [x for x in (scores, mask) if x is not None]
        return select._split_rows(run, is_causal, *operands)[0]

    put = lambda x: jax.device_put(x, jax.NamedSharding(mesh, split))
    compiled = jax.jit(choose).lower(put(scores), mask).compile()
    chosen = compiled(put(scores), mask)
    p, s = positions(8, 40)
    visible = np.broadcast_to((s <= p if is_causal else True) & (True if mask is None else mask), scores.shape)
    assert np.array_equal(chosen, highest(scores, 6, visible))
    assert chosen.sharding.is_equivalent_to(jax.NamedSharding(mesh, split), 4)
    assert (2, 1, 8 if is_causal else 4, 40) in local and "all-gather" not in compiled.as_text()


def test_dense_top_k_keeps_an_explicit_sharding():
    mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices("cpu")[:4])
    scores = nasty_scores(np.random.default_rng(8), (4, 6, 9))
    with jax.set_mesh(mesh):
        spec = jax.P("a", None, None)
        sharded = jax.device_put(scores, jax.NamedSharding(mesh, spec))
        chosen = jax.jit(lambda x: masks.dense_top_k(x, 3, is_causal=True))(sharded)
        assert jax.typeof(chosen).sharding.spec == spec
    p, s = positions(6, 9)
    assert np.array_equal(chosen, highest(scores, 3, np.broadcast_to(s <= p, scores.shape)))


def test_dense_top_k_is_plain_jax_where_there_is_no_kernel_for_it():
    """Other platforms than CUDA, kernels not built, other precisions, and where there is nothing to search."""

    def has_kernel(platform, dtype, window=3):
        call = jax.jit(lambda x: masks.dense_top_k(x, window, is_causal=True))
        lowered = call.trace(jax.ShapeDtypeStruct((2, 8, 16), dtype)).lower(lowering_platforms=(platform,))
        return "jax_dma_select" in lowered.as_text()

    built = ffi.load("cuda") is None
    assert not has_kernel("cpu", jnp.float32) and not has_kernel("tpu", jnp.bfloat16)
    assert all(has_kernel("cuda", dtype) == built for dtype in (jnp.float32, jnp.bfloat16, jnp.float16))
    assert not has_kernel("cuda", jnp.float32, window=16) and not has_kernel("cuda", jnp.float8_e4m3fn)
    with jax.enable_x64(True):
        assert not has_kernel("cuda", jnp.float64)


def test_dense_top_k_in_double_precision():
    with jax.enable_x64(True):
        scores = 1 + np.array([[3.0, 1.0, 2.0, 1.0]]) * 2.0**-50
        assert np.array_equal(masks.dense_top_k(scores, 2), [[True, False, True, False]])


def test_dense_top_k_agrees_with_top_k_on_one_score_per_key():
    scores = nasty_scores(np.random.default_rng(5), (2, 2, 30))
    dense = jax.jit(lambda x: masks.dense_top_k(x, 7, is_causal=True))(
        np.broadcast_to(scores[..., None, :], (2, 2, 30, 30))
    )
    assert np.array_equal(top_k(scores, 7).dense(30), dense)


def test_dense_relu():
    bias = jnp.array([0.0, -0.0, 1e-30, -1.0, np.nan, np.inf, -np.inf])
    assert masks.dense_relu(bias).tolist() == [False, False, True, False, False, True, False]


def test_masks_carry_no_gradient():
    """Builders stop gradients: scores learn through the bias."""
    scores = jnp.linspace(0.1, 1, 8)

    def loss(scores):
        shown = [top_k(scores[None, None], 2).dense(8), masks.dense_top_k(scores[None], 2), masks.dense_relu(scores)]
        return sum((x * scores).sum() for x in shown)

    weights = jax.jit(jax.grad(loss))(scores)
    by_hand = np.asarray(top_k(scores[None, None], 2).dense(8))[0, 0].sum(0) + np.array([1.0] * 6 + [2.0] * 2)
    np.testing.assert_array_equal(weights, by_hand)


def test_a_mask_is_a_pytree():
    """Through jit, vmap, scan and tree.map, and equal after a round trip."""
    mask = masks.sliding_window(6, 6, 2)
    back = jax.jit(lambda m: m)(mask)
    assert isinstance(back, KeyIntervals) and back.live == 3 and np.array_equal(back.start, mask.start)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), mask, masks.sliding_window(6, 6, 2))
    dense = jax.vmap(lambda m: m.dense(6))(stacked)
    assert dense.shape == (2, 1, 1, 6, 6)
    _, scanned = jax.lax.scan(lambda carry, m: (carry, m.dense(6)), None, stacked)
    assert np.array_equal(dense, scanned)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: masks.causal(-1, 4), ValueError, ["query_length", "-1"]),
        (lambda: masks.causal(4, 4.0), TypeError, ["key_length", "4.0"]),
        (lambda: masks.sliding_window(4, 4, -1), ValueError, ["left", "-1"]),
        (lambda: masks.sliding_window(4, 4, 1, jnp.float32(2)), TypeError, ["right"]),
        (lambda: masks.lengths(np.array([1.0]), 4, 4), TypeError, ["key_lengths", "float32"]),
        (lambda: masks.segments(np.array([True])), TypeError, ["segment_ids", "bool"]),
        (lambda: masks.top_k(np.zeros((1, 4), np.int32), 2), TypeError, ["scores", "int32"]),
        (lambda: masks.top_k(np.zeros(4, np.float32), 2), ValueError, ["scores", "(4,)"]),
        (lambda: masks.top_k(np.zeros((1, 4), np.float32), 0), ValueError, ["window", "0"]),
        (
            lambda: masks.top_k(np.zeros((1, 4), np.float32), 2, valid=np.ones(4, np.int32)),
            TypeError,
            ["valid", "int32", "!= 0"],
        ),
        (
            lambda: masks.top_k(np.zeros((1, 4), np.float32), 2, valid=np.ones((2, 4), bool)),
            ValueError,
            ["valid", "(2, 4)", "(4,)"],
        ),
        (
            lambda: masks.top_k(np.zeros((1, 4), np.float32), 2, segment_ids=np.ones(5, int)),
            ValueError,
            ["segment_ids", "(5,)"],
        ),
        (lambda: masks.dense_top_k(np.zeros((4, 4), bool), 2), TypeError, ["bias", "bool"]),
        (lambda: masks.dense_top_k(np.zeros(4, np.float32), 2), ValueError, ["bias", "(4,)"]),
        (lambda: masks.dense_top_k(np.zeros((4, 4), np.float32), 0), ValueError, ["window"]),
        (
            lambda: masks.dense_top_k(np.zeros((4, 4), np.float32), 2, mask=np.ones((4, 4), np.float32)),
            TypeError,
            ["mask", "!= 0"],
        ),
        (
            lambda: masks.dense_top_k(np.zeros((4, 4), np.float32), 2, mask=np.ones((2, 4, 4), bool)),
            ValueError,
            ["mask", "(4, 4)"],
        ),
        (lambda: masks.dense_relu(np.zeros(4, np.int32)), TypeError, ["bias", "int32"]),
    ],
)
def test_a_rejected_argument_is_named(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_traced_window_is_a_type_error():
    with pytest.raises(TypeError, match="window"):
        jax.jit(lambda w: masks.top_k(jnp.zeros((1, 4)), w).start)(2)


@pytest.mark.parametrize("T, S", LENGTHS + [(0, 4), (4, 0)])
def test_prefix(T, S):
    """Every query sees the prefix, also those within it; beyond it the causal rule, whatever the length given."""
    p, s = positions(T, S)
    prefix_lengths = np.array([[0, 3, 4], [S, S + 5, -1]])
    mask = jax.jit(masks.prefix, static_argnums=(1, 2))(prefix_lengths, T, S)
    assert mask.start.shape == mask.end.shape == (2, 3, 1, S)
    seen = (s < prefix_lengths[..., None, None]) | (s <= p)
    assert np.array_equal(mask.dense(T), seen[..., None, :, :])
    assert np.array_equal(masks.prefix(2, T, S).dense(T)[0], (s < 2) | (s <= p))  # no batch axis


@pytest.mark.parametrize("T, S", LENGTHS + [(0, 4), (4, 0)])
@pytest.mark.parametrize("block", [1, 2, 3, 4, 100, 2**40])
def test_block_causal(T, S, block):
    """All of a query's own block and of the blocks before; queries before key 0 see nothing."""
    p, s = positions(T, S)
    seen = (s // block <= p // block) & (p >= 0)
    assert np.array_equal(masks.block_causal(block, T, S).dense(T)[0, 0], seen)
    if block == 1:
        assert np.array_equal(seen, masks.causal(T, S).dense(T)[0, 0])


def number_from_last(ids):
    """For each position (id, how many runs of that id follow, this one included), by walking backwards."""
    result, seen = [], {}
    for i in reversed(range(len(ids))):
        if i + 1 == len(ids) or ids[i] != ids[i + 1]:
            seen[ids[i]] = seen.get(ids[i], 0) + 1
        result.append((ids[i], seen[ids[i]]))
    return result[::-1]


@pytest.mark.parametrize("T, S", LENGTHS + [(0, 4), (4, 0), (40, 33)])
def test_segments_with_ids_of_queries_and_of_keys(T, S):
    """A run of queries sees the run of keys of its id; runs of a repeated id are matched from the last backwards."""
    rng = np.random.default_rng(T * 100 + S)
    query_ids, key_ids = random_ids(rng, 6, T), random_ids(rng, 6, S)
    mask = jax.jit(masks.segments)(query_ids, key_ids)
    assert mask.start.shape == (6, 1, S)
    for got, of_queries, of_keys in zip(mask.dense(T), query_ids, key_ids):
        a, b = number_from_last(list(of_queries)), number_from_last(list(of_keys))
        seen = np.array([[x == y and x[0] >= 0 for y in b] for x in a], bool).reshape(T, S)
        assert np.array_equal(got[0], seen)


def test_segments_of_unique_ids_are_equality():
    """With one run for each id (in any order, of any lengths, some on one side only) seeing is equality of ids."""
    query_ids, key_ids = np.array([[5, 5, 1, 1, 1, -1], [0, 0, 0, 7, 7, 7]]), np.array([[1, 5, 5, 9], [7, 0, -1, -1]])
    got = masks.segments(query_ids, key_ids).dense(6)
    seen = (query_ids[:, :, None] == key_ids[:, None, :]) & (key_ids >= 0)[:, None, :]
    assert np.array_equal(got[:, 0], seen)
    assert np.array_equal(masks.segments([5, 5, 1], [1, 5]).dense(3)[0], [[0, 1], [0, 1], [1, 0]])
    shared = masks.segments(query_ids, key_ids[:1])  # one axis of size 1: the same keys for every example
    assert np.array_equal(shared.dense(6)[0], got[0]) and shared.start.shape == (2, 1, 4)


def test_segments_of_the_same_ids_twice():
    """segments(ids, ids) is segments(ids), and segments(the last T ids, ids) is segments(ids, T)."""
    ids = random_ids(np.random.default_rng(5), 8, 30)
    for T in (30, 11, 1):
        got, want = masks.segments(ids[:, 30 - T :], ids).dense(T), masks.segments(ids, T).dense(T)
        assert np.array_equal(got, want)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: masks.prefix(np.float32(2), 4, 4), "prefix_lengths must be integers"),
        (lambda: masks.block_causal(0, 4, 4), "block_size must be at least 1"),
        (lambda: masks.segments(np.zeros(4, int), np.zeros(4)), "key_ids must be integers"),
    ],
)
def test_arguments_of_the_newer_builders(build, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build()
