"""jax_dma.explain, the line that attention logs, and jax_dma.cost."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dma
from jax_dma import choice, masks
from jax_dma.tiles import KEY_TILE, queries_per_tile


def arrays(T=300, S=300, N=4, K=2, H=16, batch=(2,), dtype=np.float32):
    return tuple(np.zeros((*batch, *shape), dtype) for shape in ((T, N, H), (S, K, H), (S, K, H)))


def test_what_it_says_is_what_runs(linear):
    """The named implementation is the one whose scope stands in the compiled program."""
    q, k, v = arrays(dtype=np.float16 if linear == "cuda" else np.float32)
    found = jax_dma.explain(q, k, v, is_causal=True, implementation=linear)
    assert found.runs == linear and found.refusals[linear] is None
    if linear != "xla":
        call = lambda q, k, v: jax_dma.attention(q, k, v, is_causal=True, implementation=linear)
        assert "jax_dma_forward" in jax.jit(call).lower(q, k, v).compile().as_text()


def test_the_default_is_the_first_that_serves():
    q, k, v = arrays()
    for platform in ("cpu", "cuda", "tpu"):
        found = jax_dma.explain(q, k, v, platform=platform)
        assert found.runs == next(name for name in ("cuda", "cpu", "xla") if found.refusals[name] is None)
        assert found.platform == platform
    assert "float32" in jax_dma.explain(q, k, v, platform="cuda").refusals["cuda"] or "not built" in str(found)
    assert jax_dma.explain(*arrays(H=300)).runs == "xla"
    assert jax_dma.explain(q, k, v, implementation="reference").runs == "reference"


def test_nothing_serves():
    found = jax_dma.explain(*arrays(H=300), implementation="cpu", platform="cpu")
    assert found.runs is None and "nothing that was asked for" in str(found)
    found = jax_dma.explain(*arrays(), implementation=("cpu",), platform="cuda")
    assert found.runs is None and (found.refusals["cpu"] or "").strip()


def test_invalid_arguments_are_errors():
    q, k, v = arrays()
    with pytest.raises(TypeError, match="mask must be bool"):
        jax_dma.explain(q, k, v, np.zeros((1, 1, 1, 300)))
    with pytest.raises(ValueError, match="implementation must be one"):
        jax_dma.explain(q, k, v, implementation="fast")


def test_paths():
    q, k, v = arrays(T=4096, S=4096, batch=(1,))
    kind = lambda *mask, **options: jax_dma.explain(q, k, v, *mask, **options).path.kind
    dense = np.ones((1, 1, 4096, 4096), bool)
    assert kind() == "all"
    assert kind(is_causal=True) == "causal"
    assert kind(dense) == kind(jax_dma.plan(jnp.asarray(dense), q, k)) == "dense"
    assert kind(masks.sliding_window(4096, 4096, 100)) == "intervals"
    top = masks.top_k(jnp.zeros((1, 2, 4096)), 512)
    found = jax_dma.explain(q, k, v, top)
    assert found.path == choice.Path("kept keys", 256, 768)
    assert "16 runs of 256 queries, each with a list of 768 of the 4096 keys" in str(found)
    assert found.operands[0].shape == (1, 16, 256, 4, 16) and found.operands[1].shape == (1, 16, 768, 2, 16)
    assert hash(found) == hash(jax_dma.explain(q, k, v, top))


def test_types_in_place_of_arrays():
    q, k, v = arrays(T=4096, S=4096)
    mask, bias = masks.top_k(jnp.zeros((2, 2, 4096)), 64), np.zeros((2, 2, 1, 4096), np.float32)
    assert str(jax_dma.explain(*types_of((q, k, v, mask, bias)))) == str(jax_dma.explain(q, k, v, mask, bias))


def test_one_line_for_each_new_shape(caplog):
    choice._log_once.cache_clear()
    q, k, v = arrays(T=7, S=7)
    call = jax.jit(lambda q, k, v: jax_dma.attention(q, k, v, is_causal=True))
    with caplog.at_level(logging.INFO, "jax_dma"):
        call(q, k, v)
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, "jax_dma"):
        for _ in range(2):
            jax_dma.attention(q, k, v, is_causal=True)
        jax_dma.attention(q[:, :5], k, v, is_causal=True)
    lines = [record.getMessage() for record in caplog.records if record.name == "jax_dma"]
    assert len(lines) == 2 and lines[0] == jax_dma.explain(q, k, v, is_causal=True).line
    assert "float32[2,7,4,16]" in lines[0] and "causal, tiles of" in lines[0]


def by_hand(seen, N, K):
    """Visible pairs, and pairs in tiles with anything visible, of a bool array [batch, N|K|1, T, S]."""
    batch, heads, T, S = seen.shape
    rows, G = queries_per_tile(N // K), N // K
    seen = np.repeat(seen, N // heads, 1) if heads != N else seen
    visited = 0
    for t in range(0, T, rows):
        for s in range(0, S, KEY_TILE):
            tile = seen[:, :, t : t + rows, s : s + KEY_TILE]
            any_of_group = tile.reshape(batch, K, G, *tile.shape[2:]).any((2, 3, 4))
            visited += int(any_of_group.sum()) * G * tile.shape[2] * tile.shape[3]
    return int(seen.sum()), visited


def in_tiles(seen, rows=queries_per_tile(2)):
    """True in all of each tile in which anything is."""
    result = np.zeros_like(seen)
    for t in range(0, seen.shape[-2], rows):
        for s in range(0, seen.shape[-1], KEY_TILE):
            tile = np.s_[..., t : t + rows, s : s + KEY_TILE]
            result[tile] = seen[tile].any((-1, -2), keepdims=True)
    return result


def types_of(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def dense_masks():
    rng = np.random.default_rng(0)
    for heads, T, S in ((1, 300, 300), (2, 77, 300), (4, 300, 150), (2, 1, 300), (1, 300, 1), (4, 1, 1)):
        mask = rng.random((2, heads, T, S)) < 0.01
        mask[:, :, : T // 2] = False
        yield mask


@pytest.mark.parametrize("causal", [False, True])
def test_counts_of_dense_masks(causal):
    for mask in dense_masks():
        T, S = (n if n > 1 else 260 for n in mask.shape[-2:])
        q, k, v = arrays(T, S)
        full = np.broadcast_to(mask, (2, mask.shape[1], T, S))
        triangle = np.arange(S) <= np.arange(T)[:, None] + S - T
        seen = full & triangle if causal else full
        found = jax_dma.cost(q, k, v, mask, is_causal=causal)
        assert found.exact and found.visible == by_hand(seen, 4, 2)[0]
        # A tile is visited if the mask leaves something of it, and the rule does: they are not combined before.
        both = in_tiles(full) & in_tiles(triangle) if causal else in_tiles(full)
        assert found.visited == by_hand(both, 4, 2)[1]
        planned = jax_dma.cost(q, k, v, jax_dma.plan(jnp.asarray(mask), q, k), is_causal=causal)
        assert (planned.visible, planned.visited) == (found.visible, found.visited)
        assert planned.forward.workspace <= found.forward.workspace
        bound = jax_dma.cost(q, k, v, types_of(mask), is_causal=causal)
        assert not bound.exact and bound.visible >= found.visible and bound.visited >= found.visited


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(300, 300), (40, 300), (300, 140)])
def test_counts_of_intervals(causal, shape):
    T, S = shape
    q, k, v = arrays(T, S)
    rng = np.random.default_rng(1)
    start = jnp.asarray(rng.integers(-5, T, (2, 4, S)), jnp.int32)
    for mask in (
        masks.sliding_window(T, S, 20),
        masks.causal(T, S),
        masks.lengths(jnp.array([30, 140]), T, S),
        masks.KeyIntervals(start, start + 9),
    ):
        seen = np.asarray(mask.dense(T)) & (np.arange(S) <= np.arange(T)[:, None] + S - T if causal else True)
        seen = np.broadcast_to(seen, (2, *seen.shape[1:]))
        found = jax_dma.cost(q, k, v, mask, is_causal=causal)
        visible, visited = by_hand(seen, 4, 2)
        assert found.exact and found.visible == visible
        assert visited <= found.visited <= found.pairs  # bounds are of whole key tiles
        bound = jax_dma.cost(q, k, v, types_of(mask), is_causal=causal)
        assert not bound.exact and bound.visible >= found.visible and bound.visited >= found.visited


def test_counts_of_the_causal_rule():
    for T, S in ((300, 300), (40, 300), (300, 40), (1, 300)):
        q, k, v = arrays(T, S)
        seen = np.broadcast_to(np.arange(S) <= np.arange(T)[:, None] + S - T, (2, 1, T, S))
        found = jax_dma.cost(q, k, v, is_causal=True)
        assert found.exact and (found.visible, found.visited) == by_hand(seen, 4, 2)


def test_kept_keys_cost_in_proportion_to_the_window():
    rng = np.random.default_rng(2)
    costs = []
    for T in (4096, 8192):
        q, k, v = arrays(T, T, batch=(1,))
        mask = masks.top_k(jnp.asarray(rng.standard_normal((1, 2, T)), jnp.float32), 256)
        found = jax_dma.cost(q, k, v, mask)
        bound = jax_dma.cost(q, k, v, types_of(mask))
        assert found.visible <= found.visited <= bound.visited <= found.pairs / 3
        assert found.visible == 4 * sum(min(t + 1, 256) for t in range(T))
        costs.append(found)
    assert costs[1].forward.flops < 2.3 * costs[0].forward.flops


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_flops_bytes_and_workspace(platform):
    q, k, v = (x.astype(jnp.bfloat16) for x in arrays(256, 256, 4, 4, 32))
    bias = np.zeros((1, 4, 256, 256), np.float32)
    found = jax_dma.cost(q, k, v, None, bias, platform=platform)
    pairs = 2 * 4 * 256 * 256
    assert found.pairs == found.visible == found.visited == pairs
    assert found.forward.flops == 4 * 32 * pairs and found.backward.flops == 10 * 32 * pairs
    operands = 3 * q.nbytes + bias.nbytes
    if found.forward.workspace == 0:
        assert found.forward.bytes == operands + q.nbytes + 2 * 4 * 2 * 256 * 4
    assert found.backward.bytes >= 2 * operands
    assert "FLOP" in str(found) and "100 % visible" in str(found)
    reference = jax_dma.cost(q, k, v, None, bias, is_causal=True, implementation="reference")
    assert reference.visited == pairs and reference.forward.workspace == 2 * 4 * pairs


def test_unknown_platform():
    q, k, v = arrays(5, 5)
    with pytest.raises(ValueError, match="platform must be one of .* got 'abacus'"):
        jax_dma.explain(q, k, v, platform="abacus")


def test_empty_arrays():
    for T, S in ((0, 5), (5, 0), (0, 0)):
        q, k, v = arrays(T, S)
        for mask in (None, masks.causal(T, S), np.ones((1, 1, T, S), bool)):
            found = jax_dma.cost(q, k, v, mask, is_causal=True)
            assert found.visible == found.visited == 0 and found.forward.flops == 0
            assert str(found) and str(jax_dma.explain(q, k, v, mask))
