"""Checks the installed package on a machine that needs no GPU: ``python tests/check_installation.py [ARCHS]``.

The host kernels give the reference's results, forward and backward. With ARCHS, as in "80;90a": the CUDA module
imports, was built for exactly these, and is what a program lowered for cuda calls.
"""

import importlib
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import jax_dma
from jax_dma.command import status
from jax_dma.implementations import ffi


def check_host_kernels():
    assert jax_dma.status()["cpu"] == "available", jax_dma.status()["cpu"]
    result = status.check("cpu")
    assert result["passed"], result
    print("    the host kernels agree with the reference, forward and backward")


def check_cuda_module(archs):
    assert ffi.load("cuda") is None, ffi.load("cuda")
    built = importlib.import_module("jax_dma._cuda").architectures()
    assert list(built) == archs, f"asked for {archs}, built for {built}"

    def loss(q, k, v, mask, bias):
        return jax_dma.attention(q, k, v, mask, bias, is_causal=True).astype(jnp.float32).sum()

    array = lambda shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
    q, k, v = (array((2, 256, heads, 64)) for heads in (4, 2, 2))
    gradient = jax.jit(jax.grad(loss, (0, 1, 2, 4)))
    targets = [f"jax_dma_{name}" for name in ("forward", "backward", "plan")]
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in targets]
    export = jax.export.export(gradient, platforms=["cuda"], disabled_checks=allowed)
    program = export(q, k, v, array((2, 1, 256, 256), jnp.bool_), array((1, 4, 256, 256))).mlir_module()
    for name in targets:
        assert f"@{name}" in program, f"the program lowered for cuda does not call {name}"
    print(f"    the CUDA module for {', '.join(archs)} imports, and a program lowered for cuda calls it")


if __name__ == "__main__":
    assert Path(jax_dma.__file__).is_relative_to(sys.prefix), f"not the installed package: {jax_dma.__file__}"
    check_host_kernels()
    if sys.argv[1:]:
        check_cuda_module(re.split("[;, ]+", sys.argv[1]))
