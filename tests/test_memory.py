"""Memory is O(T + S) beside the operands, and what nobody asked for is never computed."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dma
from cases import Case
from support import calls, count_primitive, fit, largest_array

LONG = 4096
FLAT = Case((1,), LONG, LONG, 2, 1, 16)  # float32: XLA emulates bfloat16 on a CPU, with whole arrays in float32


def compiled_program(implementation, case, differentiate):
    """The compiled forward or gradient (with respect to the arguments numbered) on abstract operands."""
    case = fit(case, implementation)
    struct = lambda shape, dtype=case.dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    q, k = struct((*case.batch, case.T, case.N, case.H)), struct((*case.batch, case.S, case.K, case.H))
    bias = None if case.bias is None else struct(case.shape(case.bias))
    mask = None
    if case.mask is not None:
        shape = case.shape(case.mask)
        mask = (
            struct(shape, "bool")
            if len(case.mask) == 4
            else jax_dma.KeyIntervals(struct(shape, "int32"), struct(shape, "int32"))
        )

    def call(q, k, v, bias, mask):
        out, lse = jax_dma.attention(
            q, k, v, mask, bias, is_causal=case.is_causal, return_lse=True, implementation=implementation
        )
        return out.astype(jnp.float32).sum() + lse.sum()

    function = jax.grad(call, differentiate) if differentiate else call
    jax.clear_caches()  # or JAX may reuse a trace in which the bias was differentiated
    return jax.jit(function).lower(q, k, k, bias, mask).compile()


@pytest.mark.parametrize("mask, bias", [(None, "1N1S"), ("1K", "111S"), (None, "11T1")])
@pytest.mark.parametrize("differentiate", [(), (0, 1, 2, 3)], ids=["forward", "gradient"])
def test_linear_memory(linear, mask, bias, differentiate):
    """Workspace far below T * S numbers, with masks and biases that are themselves O(T + S), dbias included."""
    compiled = compiled_program(linear, FLAT.with_(mask=mask, bias=bias, is_causal=True), differentiate)
    assert compiled.memory_analysis().temp_size_in_bytes < LONG * LONG * 4 / 4
    assert largest_array(compiled) < LONG * LONG / 4


@pytest.mark.parametrize("T", [2048, 8192])
def test_workspace_grows_no_faster_than_the_length(linear, T):
    case = FLAT.with_(T=T, S=T, bias="1N1S", is_causal=True)
    compiled = compiled_program(linear, case, (0, 1, 2, 3))
    assert compiled.memory_analysis().temp_size_in_bytes < 16e6 + 2000 * T


def test_a_bool_mask_has_no_gradient(linear):
    """[1, 1, T, S] comes in as bits: nothing of that size but the mask itself exists (CASES 3)."""
    compiled = compiled_program(linear, FLAT.with_(mask="11TS"), (0, 1, 2))
    wide = [size for size in floats_of(compiled) if size >= LONG * LONG / 4]
    assert not wide
    # The mask as bool, and once more while its bits are shifted into place.
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * LONG * LONG


def floats_of(compiled):
    shapes = re.findall(r"\b(?:bf16|f\d+)\[([\d,]+)\]", compiled.as_text())
    return [int(np.prod([int(n) for n in shape.split(",")], dtype=np.int64)) for shape in shapes]


def test_a_bias_that_is_not_differentiated_costs_nothing(linear):
    """No dbias is computed or allocated: no float array as large as the bias but the bias (CASES 3, 30)."""
    case = FLAT.with_(bias="11TS")
    without, with_ = (compiled_program(linear, case, argnums) for argnums in ((0, 1, 2), (0, 1, 2, 3)))
    size = LONG * LONG
    assert with_.memory_analysis().output_size_in_bytes >= without.memory_analysis().output_size_in_bytes + 2 * size
    assert without.memory_analysis().temp_size_in_bytes < size
    assert floats_of(without).count(size) < floats_of(with_).count(size)


@pytest.mark.parametrize("argnums, results", [((0, 1, 2), 3), ((0, 1, 2, 3), 4), ((3,), 4), ((0,), 3)])
def test_dbias_is_an_output_only_when_asked_for(argnums, results):
    """Read off the backward primitive of the default path."""
    struct = jax.ShapeDtypeStruct((1, 30, 2, 8), jnp.float32)
    bias = jax.ShapeDtypeStruct((1, 1, 30, 30), jnp.float32)
    jax.clear_caches()
    loss = lambda q, k, v, bias: jax_dma.attention(q, k, v, None, bias).sum()
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums))(struct, struct, struct, bias)
    assert count_primitive(jaxpr, "jax_dma_backward") == 1
    assert backward_results(jaxpr.jaxpr) == results


def backward_results(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "jax_dma_backward":
            return len(equation.outvars)
        for inner in equation.params.values():
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns") and (found := backward_results(inner)):
                return found
    return None


@pytest.mark.parametrize("bias", ["11TS", "1N1S", "B1T1"])
def test_a_broadcast_dbias_needs_no_partial_sums_of_full_size(linear, bias):
    """At most one float32 copy of the bias's own shape, never [B, N, T, S] (CASES 30)."""
    case = Case((4,), 512, 512, 4, 4, 16, bias=bias)
    compiled = compiled_program(linear, case, (0, 1, 2, 3))
    assert largest_array(compiled) <= 4 * 4 * 512 * 512 / 2
    chunk = 4 * 4 * 256 * 512 * 4  # `xla` works on one chunk of queries and keys at a time, all heads together
    assert compiled.memory_analysis().temp_size_in_bytes < 512 * 512 * 4 + 6 * chunk


def test_vmap_does_not_tile_what_is_shared(linear):
    """100 elements share a bias and a mask of [1, 1, T, S] (CASES 30)."""
    struct = lambda *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    T = 512
    q = struct(100, 1, T, 1, 8)
    call = lambda q, mask, bias: jax_dma.attention(q, q, q, mask, bias, implementation=linear)
    compiled = (
        jax.jit(jax.vmap(call, (0, None, None)))
        .lower(q, struct(1, 1, T, T, dtype="bool"), struct(1, 1, T, T))
        .compile()
    )
    if linear != "xla":  # it computes a [100, chunk, chunk] array of logits
        assert calls(compiled, "forward") == 1
        assert largest_array(compiled) < 100 * T * T / 10


def test_the_default_calls_a_kernel_where_there_is_one(kernels):
    """implementation=None lowers to the compiled kernels of the platform."""
    compiled = compiled_program(None, fit(FLAT.with_(T=64, S=64, bias="1N1S"), kernels), (0, 1, 2, 3))
    assert calls(compiled, "forward") == 1 and calls(compiled, "backward") == 1


def test_names_in_a_profile():
    """The scopes by which a profile can be read."""
    struct = jax.ShapeDtypeStruct((1, 64, 2, 8), jnp.float32)
    text = jax.jit(lambda q: jax_dma.attention(q, q, q)).lower(struct).as_text(debug_info=True)
    assert "jax_dma.attention" in text and "jax_dma.forward." in text
