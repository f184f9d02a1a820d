"""``python -m jax_dma status``: what is installed, which implementations work here, and whether they are right."""

import contextlib
import importlib
import platform
from importlib.metadata import PackageNotFoundError, version

import jax
import jax.numpy as jnp
import numpy as np

import jax_dma
from jax_dma.implementations import ffi

# Relative Frobenius error of (out, lse, gradients) against the reference on the same rounded inputs.
TOLERANCES = {"bfloat16": (5e-3, 1e-3, 1e-2), "float16": (1e-3, 1e-3, 2e-3), "float32": (1e-5, 1e-5, 1e-4)}
DTYPES = {"cuda": "bfloat16", "pallas": "bfloat16"}  # the others are checked in float32


HELP = "what is installed, which implementations work here and why not the others (the default)"
DESCRIPTION = (
    "Shows versions, devices and what was compiled, and checks one small forward and backward call of every available\n"
    "implementation against the reference. Exits with 1 if one of them is wrong."
)


def add_arguments(parser):
    """It has no options."""


def versions():
    """A dict from package (and "python") to its version, None where it is not installed."""
    found = {"jax_dma": jax_dma.__version__, "python": platform.python_version()}
    for package in ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "flax"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def compiled(name):
    """What the compiled module of an implementation was built for, or why it cannot be told."""
    try:
        module = importlib.import_module(f"jax_dma._{name}")
    except ImportError as error:
        return {"built": False, "why": str(error)}
    report = {"built": True, "ffi": ".".join(map(str, module.ffi_api_version()))}
    if hasattr(module, "architectures"):
        report["architectures"] = list(module.architectures())
    return report


def how_built():
    """What CMake wrote down about this installation; empty for a source tree that was never installed."""
    try:
        from jax_dma import _build
    except ImportError:
        return {}
    return {"compiler": _build.COMPILER, "cuda": _build.CUDA}


def check(name):
    """Runs one small call of an implementation, forward and backward, against the reference.

    Returns a dict: dtype; the errors of out, lse and the worst gradient; and whether all are within tolerance.
    """
    dtype = DTYPES.get(name, "float32")
    # Several tiles in each direction, multiples of nothing, and every feature at once.
    B, T, S, N, K, H = 2, 150, 210, 4, 2, 40
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.standard_normal(shape), dtype)
    operands = (draw(B, T, N, H), draw(B, S, K, H), draw(B, S, K, H), draw(1, K, T, S))
    cotangents = (draw(B, T, N, H).astype(jnp.float32), draw(B, T, N).astype(jnp.float32))
    mask = jnp.asarray(random.random((B, 1, T, S)) < 0.3)

    def run(implementation, operands):
        def loss(q, k, v, bias):
            out, lse = jax_dma.attention(
                q, k, v, mask, bias, is_causal=True, logits_soft_cap=8.0, return_lse=True, implementation=implementation
            )
            lse = jnp.where(lse > -jnp.inf, lse, 0)  # -inf where a query sees no key
            return (out.astype(jnp.float32) * cotangents[0]).sum() + (lse * cotangents[1]).sum(), (out, lse)

        (_, results), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*operands)
        return [np.asarray(x, np.float64) for x in (*results, *gradients)]

    got = run(name, operands)
    want = run("reference", [x.astype(jnp.float32) for x in operands])
    error = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(got, want, strict=True)]
    errors = {"out": error[0], "lse": error[1], "gradients": max(error[2:])}
    passed = all(e <= limit for e, limit in zip(errors.values(), TOLERANCES[dtype], strict=True))  # False for NaN
    return {"dtype": dtype, "errors": errors, "passed": passed}


def device_for(name):
    """A context in which an implementation's platform is the default one."""
    if name in ("cpu", "cuda"):
        return jax.default_device(jax.devices(name)[0])
    return contextlib.nullcontext()


def run(options):
    """Everything that the command prints, as a dict."""
    implementations = {}
    for name, text in jax_dma.status().items():
        entry = implementations[name] = {"available": text == "available", "status": text}
        if entry["available"]:
            try:
                with device_for(name):
                    entry["check"] = check(name)
            except Exception as error:  # a broken installation is what this command is there to show
                entry["check"] = {"passed": False, "error": f"{type(error).__name__}: {error}"}
    return {
        "versions": versions(),
        "devices": [f"{device.platform}: {device.device_kind}" for device in jax.devices()],
        "ffi_runtime": ".".join(map(str, ffi.runtime_api_version())),
        "compiled": {name: compiled(name) for name in ("cpu", "cuda")},
        "build": how_built(),
        "implementations": implementations,
        "passed": all(entry["check"]["passed"] for entry in implementations.values() if entry["available"]),
    }


def render(result):
    """The report for people."""
    found = result["versions"]
    lines = ["  ".join(f"{name} {text}" for name, text in found.items() if text), ""]
    devices = {text: result["devices"].count(text) for text in result["devices"]}
    lines.append("devices   " + ", ".join(text + (f" x {n}" if n > 1 else "") for text, n in devices.items()))
    lines.append(f"XLA FFI   {result['ffi_runtime']} spoken by the installed jaxlib")
    for name, built in result["compiled"].items():
        if built["built"]:
            text = f"built for FFI {built['ffi']}"
            if "architectures" in built:
                text += " and compute capability " + ", ".join(built["architectures"])
            elif result["build"]:
                text += f", by {result['build']['compiler']}"
        elif name == "cuda" and result["build"]:
            text = "not built: " + result["build"]["cuda"]
        else:
            text = "not built: " + built["why"]
        lines.append(f"{name:<9} {text}")
    lines.append("")
    for name, entry in result["implementations"].items():
        if not entry["available"]:
            lines.append(f"  {name:<10} unavailable: {entry['status']}")
        elif "error" in entry["check"]:
            lines.append(f"  {name:<10} FAILED  {entry['check']['error']}")
        else:
            outcome = entry["check"]
            errors = ", ".join(f"{what} {error:.1e}" for what, error in outcome["errors"].items())
            verdict = "ok" if outcome["passed"] else "WRONG"
            lines.append(f"  {name:<10} {verdict:<7} {outcome['dtype']} against the reference: {errors}")
    lines.append("")
    lines.append(f"{'every' if result['passed'] else 'NOT every'} available implementation is right")
    return "\n".join(lines)
