"""Compiled kernels as a library: loading, versions, and every refusal of the FFI layer, reached on purpose."""

import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dma
from cases import Case
from jax_dma.implementations import ffi
from jax_dma.tiles import interval_bounds
from support import check

# Loading and versions


@pytest.mark.parametrize("built, runtime", [((0, 3), (0, 3)), ((0, 3), (0, 5)), ((0, 0), (0, 1))])
def test_an_older_or_equal_header_version_is_taken(built, runtime):
    assert ffi.refuse_newer(built, runtime) is None


@pytest.mark.parametrize("built, runtime", [((0, 5), (0, 3)), ((0, 4), (0, 3)), ((1, 0), (0, 5)), ((0, 5), (1, 0))])
def test_a_newer_header_version_is_refused(built, runtime):
    """Both versions are named (CASES 31)."""
    text = ffi.refuse_newer(built, runtime)
    assert "{}.{}".format(*built) in text and "{}.{}".format(*runtime) in text and jax.lib.__version__ in text


def test_the_runtime_version_is_read_from_jaxlib():
    major, minor = ffi.runtime_api_version()
    assert major == 0 and minor >= 3


class Registrations:
    """Stands in for a compiled module; registering anything from it is an error."""

    def __init__(self, version):
        self.ffi_api_version = lambda: version

    def registrations(self):
        raise AssertionError("a refused module was registered")


@pytest.fixture
def fresh(monkeypatch):
    """ffi.load as if it had never been called, undone afterwards; returns how to set what import gives."""
    import functools

    monkeypatch.setattr(ffi, "load", functools.cache(ffi.load.__wrapped__))
    monkeypatch.setattr(ffi, "find_spec", lambda name: name)

    def importing(outcome):
        def import_module(name):
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setattr(ffi, "importlib", types.SimpleNamespace(import_module=import_module))

    return importing


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_kernels_built_for_a_newer_runtime_are_not_registered(fresh, name):
    """They would take the backend down; the rest works on (CASES 31)."""
    fresh(Registrations((0, 99)))
    assert "0.99" in ffi.load(name)
    assert "0.99" in jax_dma.status()[name] and name not in jax_dma.available_implementations()
    q = jnp.ones((1, 3, 1, 8), jnp.bfloat16)
    with pytest.raises(ValueError, match="0.99"):
        jax_dma.attention(q, q, q, implementation=name)
    check(None, Case((1,), 9, 20, 2, 1, 8, mask="11TS", bias="1NTS", scale=0.123))  # a program not compiled before
    check("xla", Case((1,), 9, 20, 2, 1, 8))


def test_missing_kernels_are_explained(fresh):
    """An import error is a status, not a crash (CASES 27)."""
    fresh(ImportError("libcudart.so.13: cannot open shared object file"))
    for name, needed in (("cpu", "C++ compiler"), ("cuda", "nvcc")):
        assert needed in jax_dma.status()[name] and "libcudart.so.13" in jax_dma.status()[name]
    check(None, Case((1,), 9, 20, 2, 1, 8, mask="11TS", bias="1NTS", scale=0.321))


def test_the_source_in_place_of_the_package_is_explained(fresh, monkeypatch):
    """Python, started in a clone after `pip install .`, imports the clone."""
    fresh(ImportError("No module named 'jax_dma._cpu'"))
    monkeypatch.setattr(ffi, "find_spec", lambda name: None)
    assert "start Python in another folder" in jax_dma.status()["cpu"]


PROGRAM = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("jax_dma._cpu", "jax_dma._cuda"):
            raise ImportError(f"{name} is not there", name=name)

sys.meta_path.insert(0, Missing())
import jax_dma

assert not any(name.startswith("jax_dma._c") for name in sys.modules)
import jax

try:  # importing has initialised no backend, so the platform can still be chosen
    jax.config.update("jax_platforms", "cpu")
    assert len(jax.devices()) == 3
finally:
    pass
assert jax_dma.available_implementations() == ("xla", "reference"), jax_dma.status()
assert "jax_dma._cpu is not there" in jax_dma.status()["cpu"]
import jax.numpy as jnp
q = jnp.ones((1, 4, 2, 8))
print(jax.jit(jax_dma.attention)(q, q, q).sum())
"""


def test_import_without_the_compiled_parts_and_without_a_device():
    """Importing needs no compiled module and touches no backend; then plain JAX serves (CASES 27)."""
    root = str(Path(jax_dma.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    environment.update(JAX_PLATFORMS="no_such_platform", XLA_FLAGS="--xla_force_host_platform_device_count=3")
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 64.0


# The calls themselves

T, S, N, K, H, HV = 5, 300, 4, 2, 8, 16
CONFIG = dict(has_bits=0, has_intervals=0, has_bias=0, causal=0, want_dbias=0, deterministic=0, scale=1.0, softcap=0.0)


def zeros(*shape, dtype="bfloat16"):
    return np.zeros(shape, jnp.dtype(dtype))


def operands(backward=False, bits=False, intervals=False, bias=None):
    """Well-formed operands by name, in order."""
    named = dict(q=zeros(2, T, N, H), k=zeros(2, S, K, H), v=zeros(2, S, K, HV))
    if bits:
        plan = jax_dma.plan(np.ones((2, N, T, S), bool), named["q"], named["k"])
        named.update(bits=plan.bits, tiles_by_query=plan.tiles_by_query, tiles_by_key=plan.tiles_by_key)
    if intervals:
        start, end = zeros(1, K, S, dtype="int32"), zeros(1, K, S, dtype="int32") + 3
        named.update(start=start, end=end, bounds=interval_bounds(start, end, N, K))
    if bias:
        named.update(bias=zeros(*bias))
    if backward:
        named.update(out=zeros(2, T, N, HV), lse=zeros(2, T, N, 2, dtype="float32"))
        named.update(dout=zeros(2, T, N, HV), dlse=zeros(2, T, N, dtype="float32"))
    return named


def call(named, results, **changes):
    """The raw custom call."""
    config = {**CONFIG, "has_bits": "bits" in named, "has_intervals": "start" in named, "has_bias": "bias" in named}
    if "dbias" in results:
        config["want_dbias"] = 1
    config.update(changes)
    typed = {k: np.float32(x) if k in ("scale", "softcap") else np.int64(x) for k, x in config.items() if x is not None}
    target = "jax_dma_backward" if "dq" in results else "jax_dma_forward"
    types_ = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results.values()]
    run = jax.jit(lambda *x: jax.ffi.ffi_call(target, types_)(*x, config=typed))
    return jax.block_until_ready(run(*named.values()))


FORWARD = dict(out=zeros(2, T, N, HV), lse=zeros(2, T, N, 2, dtype="float32"))
BACKWARD = dict(dq=zeros(2, T, N, H), dk=zeros(2, S, K, H), dv=zeros(2, S, K, HV))
BIAS = (1, K, 1, S)

REFUSED = {  # operands to build, what to change about them, about the results, about the config, words of the error
    "q_rank": ({}, dict(q=zeros(N, H)), {}, {}, "q must have shape"),
    "k_rank": ({}, dict(k=zeros(S, K, H)), {}, {}, "k and v must have q's rank"),
    "k_head_dimension": ({}, dict(k=zeros(2, S, K, H + 1)), {}, {}, "k must have q's head dimension"),
    "v_length": ({}, dict(v=zeros(2, S - 1, K, HV)), {}, {}, "v must have k's length"),
    "heads": ({}, dict(q=zeros(2, T, 3, H)), {}, {}, "N must be a multiple of K"),
    "q_dtype": ({}, dict(q=zeros(2, T, N, H, dtype="int32")), {}, {}, "q must be"),
    "k_dtype": ({}, dict(k=zeros(2, S, K, H, dtype="float16")), {}, {}, "one dtype"),
    "k_batch": ({}, dict(k=zeros(3, S, K, H)), {}, {}, "batch axis 0"),
    "out_shape": ({}, {}, dict(out=zeros(2, T, N, HV + 1)), {}, "out has shape"),
    "out_batch": ({}, {}, dict(out=zeros(1, T, N, HV)), {}, "out: batch axis 0"),
    "out_dtype": ({}, {}, dict(out=zeros(2, T, N, HV, dtype="float32")), {}, "out has the wrong dtype"),
    "lse_dtype": ({}, {}, dict(lse=zeros(2, T, N, 2)), {}, "lse has the wrong dtype"),
    "lse_shape": ({}, {}, dict(lse=zeros(2, T, N, dtype="float32")), {}, "lse has shape"),
    "bits_dtype": (dict(bits=True), dict(bits=zeros(2, N, T, 12, dtype="int32")), {}, {}, "bits has the wrong dtype"),
    "bits_words": (dict(bits=True), dict(bits=zeros(2, N, T, 10, dtype="uint32")), {}, {}, "bits has shape"),
    "bits_rank": (dict(bits=True), dict(bits=zeros(N, T, 12, dtype="uint32")), {}, {}, "bits"),
    "tiles_by_query": (
        dict(bits=True),
        dict(tiles_by_query=zeros(2, K, 2, 2, 1, dtype="uint32")),
        {},
        {},
        "tiles_by_query has shape",
    ),
    "tiles_by_query_dtype": (
        dict(bits=True),
        dict(tiles_by_query=zeros(2, K, 1, 2, 1, dtype="int32")),
        {},
        {},
        "tiles_by_query must be u32",
    ),
    "tiles_by_key": (
        dict(bits=True),
        dict(tiles_by_key=zeros(2, K, 4, 2, 1, dtype="uint32")),
        {},
        {},
        "tiles_by_key has shape",
    ),
    "start_dtype": (dict(intervals=True), dict(start=zeros(1, K, S, dtype="uint32")), {}, {}, "start must be s32"),
    "start_length": (dict(intervals=True), dict(start=zeros(1, K, S - 1, dtype="int32")), {}, {}, "start has shape"),
    "end_heads": (dict(intervals=True), dict(end=zeros(1, 3, S, dtype="int32")), {}, {}, "end has shape"),
    "bounds": (dict(intervals=True), dict(bounds=zeros(1, K, 4, 2, dtype="int32")), {}, {}, "bounds has shape"),
    "bounds_dtype": (
        dict(intervals=True),
        dict(bounds=zeros(1, K, 4, 3, dtype="uint32")),
        {},
        {},
        "bounds must be s32",
    ),
    "bias_dtype": (dict(bias=BIAS), dict(bias=zeros(*BIAS, dtype="int32")), {}, {}, "bias must be"),
    "bias_heads": (dict(bias=BIAS), dict(bias=zeros(1, 3, 1, S)), {}, {}, "bias has shape"),
    "bias_keys": (dict(bias=BIAS), dict(bias=zeros(1, K, 1, S + 1)), {}, {}, "bias has shape"),
    "bias_batch": (dict(bias=BIAS), dict(bias=zeros(5, K, 1, S)), {}, {}, "batch axis 0"),
    "operand_count": ({}, {}, {}, dict(has_bias=1), "expected 4 operands, got 3"),
    "flags": ({}, {}, {}, dict(has_bits=2, has_intervals=-2), "config"),
    "dbias_without_bias": (dict(backward=True), {}, dict(dbias=zeros(*BIAS)), {}, "without a bias"),
    "dq_shape": (dict(backward=True), {}, dict(dq=zeros(2, T, N, H + 8)), {}, "dq has shape"),
    "dq_dtype": (dict(backward=True), {}, dict(dq=zeros(2, T, N, H, dtype="float16")), {}, "dq has the wrong dtype"),
    "dk_batch": (dict(backward=True), {}, dict(dk=zeros(1, S, K, H)), {}, "dk: batch axis 0"),
    "dk_dtype": (dict(backward=True), {}, dict(dk=zeros(2, S, K, H, dtype="float32")), {}, "dk has the wrong dtype"),
    "dv_heads": (dict(backward=True), {}, dict(dv=zeros(2, S, N, HV)), {}, "dv has shape"),
    "dv_dtype": (dict(backward=True), {}, dict(dv=zeros(2, S, K, HV, dtype="float32")), {}, "dv has the wrong dtype"),
    "dout_shape": (dict(backward=True), dict(dout=zeros(2, T, N, H)), {}, {}, "dout has shape"),
    "dout_dtype": (
        dict(backward=True),
        dict(dout=zeros(2, T, N, HV, dtype="float16")),
        {},
        {},
        "dout has the wrong dtype",
    ),
    "dlse_shape": (dict(backward=True), dict(dlse=zeros(2, T, K, dtype="float32")), {}, {}, "dlse has shape"),
    "dlse_dtype": (dict(backward=True), dict(dlse=zeros(2, T, N)), {}, {}, "dlse has the wrong dtype"),
    "residual_out": (
        dict(backward=True),
        dict(out=zeros(2, T, N, HV, dtype="float32")),
        {},
        {},
        "out has the wrong dtype",
    ),
    "dbias_shape": (dict(backward=True, bias=BIAS), {}, dict(dbias=zeros(1, 3, 1, S)), {}, "dbias"),
    "dbias_dtype": (
        dict(backward=True, bias=BIAS),
        {},
        dict(dbias=zeros(*BIAS, dtype="float32")),
        {},
        "dbias must have bias's dtype",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_malformed_call_is_an_error_that_names_the_operand(kernels, name):
    """Nothing is read or written with a wrong shape or dtype."""
    build, changed, changed_results, config, words = REFUSED[name]
    named = {**operands(**build), **changed}
    results = {**(BACKWARD if build.get("backward") else FORWARD), **changed_results}
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        call(named, results, **config)
    assert words in str(caught.value), str(caught.value)


@pytest.mark.skipif("cpu" not in jax_dma.available_implementations(), reason="the host kernels were not built")
@pytest.mark.parametrize("config, count", [(dict(scale=None), 7), (dict(dropout=1), 9)])
def test_a_missing_or_unknown_attribute_is_an_error(config, count):
    """XLA's own check, below ours. On the host only: for CUDA, jaxlib 0.11.2 crashes while it makes this error."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"expected 8 attributes but got {count}"):
        call(operands(), FORWARD, **config)


def test_a_result_too_few_is_an_error(kernels):
    with pytest.raises(jax.errors.JaxRuntimeError, match="expected at least 2 results, got 1"):
        call(operands(), dict(out=FORWARD["out"]))
    with pytest.raises(jax.errors.JaxRuntimeError, match="expected at least 4 results, got 3"):
        call(operands(backward=True, bias=BIAS), BACKWARD, want_dbias=1)


def test_well_formed_raw_calls_are_served(kernels):
    """The same builders without a fault: or the tests above would prove nothing."""
    out, lse = call(operands(bits=True, intervals=True, bias=BIAS), FORWARD)
    lse = lse[..., 0]
    assert not np.asarray(out).any() and np.allclose(lse[:, 3:], -np.inf) and np.allclose(lse[:, :3], np.log(S))
    if kernels == "cpu":  # the CUDA call has workspace results besides
        gradients = call(
            operands(backward=True, bits=True, intervals=True, bias=BIAS), {**BACKWARD, "dbias": zeros(*BIAS)}
        )
        assert [x.shape for x in gradients] == [x.shape for x in (*BACKWARD.values(), zeros(*BIAS))]
