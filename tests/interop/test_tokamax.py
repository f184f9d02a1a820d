"""The tests that tokamax ships for implementations of its attention, on jax_dma: ``make test-interop``.

``attention`` has tokamax's arguments and translates them; what cannot be translated is in ``NOT_RUN``.
"""

import functools

import jax.numpy as jnp
import pytest

import jax_dma

# Not among tokamax's public names. An ImportError: it is not installed, or does not support the installed jax.
test_base = pytest.importorskip("tokamax._src.ops.attention.test_base", exc_type=ImportError)
from tokamax._src.ops.attention import base  # noqa: E402

NOT_RUN = {
    "test_dropout": "jax_dma has no dropout",
    "test_tanh_clipping0": "jax_dma caps the logits before it adds the bias, tokamax after",
    "test_normalize_output": "an unnormalized output is relative to the row's maximum, which jax_dma does not return",
    "test_quantized_int4": "jax_dma takes no quantized arrays",
    "test_quantized_int8": "jax_dma takes no quantized arrays",
}


def attention(
    q, k, v, *, bias=None, mask=None, is_causal=False, q_indices=None, k_indices=None, logits_scale=base.AUTO,
    logits_soft_cap=None, normalize_output=True, return_residuals=False, logits_dtype=None, precision=None,
    implementation=None,
):  # fmt: skip
    """logits_dtype and precision are what jax_dma has at least: it computes logits and sums in float32."""
    T, S, scale = q.shape[-3], k.shape[-3], None if logits_scale is base.AUTO else logits_scale
    bias, mask, is_causal = translate(q.ndim, T, S, bias, mask, is_causal, q_indices, k_indices)
    out, lse = jax_dma.attention(
        q, k, v, mask, bias, is_causal=is_causal, scale=scale, logits_soft_cap=logits_soft_cap, return_lse=True,
        implementation=implementation,
    )  # fmt: skip
    if not return_residuals:
        assert normalize_output
        return out
    # An output and (m, l) mean out / l and the log-sum-exp m + log(l), so a normalized one goes with (lse, 1).
    lse = jnp.swapaxes(lse, -1, -2)
    return out, (lse, jnp.ones_like(lse))


def translate(rank, T, S, bias, mask, is_causal, q_indices, k_indices):
    """tokamax's bias, mask and is_causal as jax_dma takes them."""
    with_rank = lambda x: x.reshape((1,) * (rank - x.ndim) + x.shape)
    bias = None if bias is None else with_rank(bias)
    mask = base.Mask(is_causal=is_causal) if mask is None else base.Mask(is_causal=is_causal) & mask

    if q_indices is None and k_indices is None and T == S:
        # Only then is the first query at the first key and the last at the last, as both have it under is_causal.
        mask, is_causal = mask.take("is_causal")
        rest, start, end = mask.take("q_start", "q_end")
        if not rest and mask:
            start, end = jnp.int32(0) if start is None else start, jnp.int32(T) if end is None else end
            shape = jnp.broadcast_shapes(start.shape, end.shape, (1, S))
            start, end = (jnp.broadcast_to(x, shape) for x in (start, end))
            return bias, jax_dma.KeyIntervals(start, end), is_causal
    else:
        is_causal = False
    mask = mask.as_array(T if q_indices is None else q_indices, S if k_indices is None else k_indices)
    return bias, None if mask is None else with_rank(mask), is_causal


class AttentionTest(test_base.AttentionTestBase):
    implementation = None

    def __init__(self, *args):
        super().__init__(*args, attention_fn=functools.partial(attention, implementation=self.implementation))

    def setUp(self):
        name = self._testMethodName
        for prefix, reason in NOT_RUN.items():
            if name.startswith(prefix):
                self.skipTest(reason)
        super().setUp()

    def _run_test_with_inputs(self, *args, **kwargs):
        if self._testMethodName == "test_small_sequences1":
            # Logits near 18, and 256 queries to sum over: of float64's dv the reference is 1.4e-5 off, jax_dma 2.3e-5.
            kwargs["atol_grads"] = 5e-5
        super()._run_test_with_inputs(*args, **kwargs)


class XlaTest(AttentionTest):
    implementation = "xla"


def test_what_is_not_run_exists():
    for prefix in NOT_RUN:
        assert any(name.startswith(prefix) for name in dir(test_base.AttentionTestBase)), prefix
