"""The library under JAX's strict modes: it passes where users have them on."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dma
from cases import Case, make
from jax_dma import masks, partition, select
from jax_dma.plan import analyse
from support import check, count_primitive

MODES = {
    "rank_promotion_raise": lambda: jax.numpy_rank_promotion("raise"),
    "x64": lambda: jax.enable_x64(True),
    "dtype_promotion_strict": lambda: jax.numpy_dtype_promotion("strict"),
    "leak_checker": lambda: jax.checking_leaks(),
    "all_at_once": lambda: stack(
        jax.numpy_rank_promotion("raise"), jax.enable_x64(True), jax.numpy_dtype_promotion("strict")
    ),
}

CASES = {
    "dense": Case(mask="1KTS", bias="BN1S", dtype="bfloat16", bias_dtype="float32", is_causal=True),
    "intervals_softcap": Case((), 40, 150, 4, 2, 16, mask="BK", bias="11TS", softcap=2.0),
    "plan": Case((2, 1), 40, 150, 4, 2, 16, mask="1NT1", bias="B1T1", plan=True),
    "many_chunks": Case((1,), 300, 600, 2, 1, 8, mask="11TS", bias="1NTS", dtype="float16"),
}


@contextlib.contextmanager
def stack(*managers):
    with contextlib.ExitStack() as all_of_them:
        for manager in managers:
            all_of_them.enter_context(manager)
        yield


@pytest.fixture(params=MODES)
def mode(request):
    with MODES[request.param]():
        yield request.param


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(implementation, mode, name):
    check(implementation, CASES[name])


def test_values_keep_their_dtype(implementation, mode):
    """x64 promotes nothing: lse of float16 operands is float32."""
    inputs = make(Case((1,), 5, 7, 2, 1, 8, dtype="float16"))
    out, lse = jax.eval_shape(
        lambda *x: jax_dma.attention(*x, return_lse=True, implementation=implementation), *inputs[:3]
    )
    assert out.dtype == jnp.float16 and lse.dtype == jnp.float32


def test_vmap_and_second_derivative(implementation, mode):
    """Traced only: promotion errors are raised while tracing."""
    inputs = make(Case((2,), 20, 30, 4, 2, 8, mask="B1TS", bias="11TS", dtype="float16"))
    loss = lambda q, bias: jax_dma.attention(
        q, inputs.k, inputs.v, inputs.mask, bias, implementation=implementation
    ).sum()
    one = lambda q, k, v, mask: jax_dma.attention(q, k, v, mask, inputs.bias[0], implementation=implementation)
    mapped = jax.eval_shape(jax.vmap(one), *inputs[:4])
    assert mapped.shape == inputs.q.shape
    second = jax.eval_shape(jax.grad(lambda *x: jax.grad(loss)(*x).sum(), (0, 1)), inputs.q, inputs.bias)
    assert second[0].dtype == jnp.float16 and second[1].shape == inputs.bias.shape


def test_mask_builders(mode):
    scores = np.linspace(-1, 1, 24, dtype=np.float32).reshape(1, 2, 12)
    ids = np.repeat(np.arange(3, dtype=np.int32), 4)[None]
    built = jax.jit(
        lambda s, i, v: (
            masks.top_k(s, 3, 9, segment_ids=i, valid=v) & masks.sliding_window(9, 12, 4) & masks.causal(9, 12),
            masks.segments(i, 9) & masks.lengths(jnp.array([7]), 9, 12),
            masks.top_k(s, 3, 9, is_causal=False),
            masks.dense_top_k(jnp.broadcast_to(s[:, :, None], (1, 2, 9, 12)), 3, is_causal=True, mask=v[:, None, None]),
        )
    )(scores, ids, np.ones((1, 12), bool))
    for mask in built[:3]:
        assert mask.start.dtype == mask.end.dtype == jnp.int32 and mask.dense(9).dtype == jnp.bool_
    assert built[3].dtype == jnp.bool_


def test_counting_primitives_finds_inner_jaxprs():
    """The helper that other tests count with."""
    inner = jax.jit(lambda x: jnp.sin(jnp.sin(x)))
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0])(1.0)
    assert count_primitive(jaxpr, "sin") == 2


@pytest.mark.parametrize("wraps", ["plan", "dense_top_k", "other kernels"])
def test_what_splits_a_kernel_leaks_nothing(wraps):
    """The sharding rules outlive the trace they are made in. Around plain JAX here: a CPU has none of these kernels."""
    x = np.random.default_rng(0).random((2, 1, 40, 60)) < 0.5
    split = {
        "plan": lambda x: partition.partitioned_plan(lambda x, shape: analyse(x, *shape), x, (40, 60, 4, 2)),
        "dense_top_k": lambda x: select._split_rows(lambda x: [x], False, x.astype(jnp.float32)),
        "other kernels": lambda x: partition.partitioned_along(lambda x: [~x], [x], ("nr.",), ("nr.",)),
    }[wraps]
    with jax.checking_leaks():
        jax.block_until_ready(jax.jit(split)(x))
