"""Dynamic-mask attention in one page: a mask from a random bias, the forward pass, and all four gradients.

    python examples/quickstart.py

The quick start of the original flash-dmattn (PyTorch), in JAX: each query keeps the 128 of 256 keys that a
bias scores highest.
"""

import argparse

import jax
import jax.numpy as jnp

import jax_dma

B, T, N, K, H = 1, 256, 2, 1, 64  # batch, length, query heads, key/value heads, head dimension
KEEP = 128
DTYPE = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
TOLERANCE = 1e-4 if DTYPE == jnp.float32 else 2e-2  # both sides are rounded to DTYPE


def relative_error(x, exact):
    x, exact = x.astype(jnp.float32), exact.astype(jnp.float32)
    return float(jnp.linalg.norm(x - exact) / jnp.linalg.norm(exact))


def main():
    keys = jax.random.split(jax.random.key(0), 5)
    q = jax.random.normal(keys[0], (B, T, N, H), DTYPE)
    k = jax.random.normal(keys[1], (B, T, K, H), DTYPE)
    v = jax.random.normal(keys[2], (B, T, K, H), DTYPE)
    bias = jax.random.normal(keys[3], (B, K, T, T), DTYPE)  # one per key/value head: no need to repeat it for N heads
    cotangent = jax.random.normal(keys[4], (B, T, N, H), DTYPE)

    # The mask carries no gradient. The bias does, and is what a model learns to choose keys with.
    mask = jax_dma.masks.dense_top_k(bias, KEEP, is_causal=True)
    available = ", ".join(jax_dma.available_implementations())
    print(f"device {jax.devices()[0].device_kind}, {jnp.dtype(DTYPE).name}; implementations here: {available}")
    visible, most = f"{mask.mean():.1%}", mask.sum(-1).max()
    print(f"mask {mask.shape}: {visible} of all (query, key) pairs are visible, {most} keys per query at most")

    def run(implementation):
        def loss(q, k, v, bias):
            out = jax_dma.attention(q, k, v, mask, bias, is_causal=True, implementation=implementation)
            return jnp.sum(out.astype(jnp.float32) * cotangent.astype(jnp.float32)), out

        gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(q, k, v, bias)
        return dict(zip(("out", "dq", "dk", "dv", "dbias"), (out, *gradients)))

    exact, results = run("reference"), run(None)
    for name, x in results.items():
        error = relative_error(x, exact[name])
        print(f"{name:>5} {x.dtype} {str(x.shape):>18}   relative error against the reference {error:.1e}")
        assert error < TOLERANCE, f"{name} differs from the reference"
    assert not jnp.any(jnp.where(mask, 0, results["dbias"])), "the gradient of a hidden bias is exactly 0"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
