"""Primitives that are plain JAX on every platform but one, where a compiled kernel does the same faster."""

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_dma.implementations import ffi


def with_cuda_kernel(name, plain, kernel):
    """A primitive of several results.

    Args:
      name: of the primitive.
      plain: the function of (arrays, static keyword arguments) in JAX, to a tuple of arrays. Leading batch axes of its
        operands may be full or 1, each for itself, and its results are full.
      kernel: the same by a custom call, for CUDA where the compiled kernels are there; None where they cannot serve the
        operands.

    Returns:
      A function to bind it.
    """
    primitive = Primitive(f"jax_dma_{name}")
    primitive.multiple_results = True

    @primitive.def_abstract_eval
    def types(*operands, **static):
        results = jax.eval_shape(
            functools.partial(plain, **static), *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
        )
        like = operands[0]
        sharding = lambda rank: like.sharding.update(spec=(None,) * rank)
        return [
            like.update(shape=x.shape, dtype=x.dtype, weak_type=False, sharding=sharding(len(x.shape))) for x in results
        ]

    @functools.cache
    def compiled(static):
        return jax.jit(functools.partial(primitive.bind, **dict(static)))

    primitive.def_impl(lambda *operands, **static: compiled(tuple(static.items()))(*operands))

    def lower(platform, *operands, **static):
        results = kernel(*operands, **static) if platform == "cuda" and ffi.load("cuda") is None else None
        return list(plain(*operands, **static) if results is None else results)

    for platform in (None, "cuda"):
        rule = mlir.lower_fun(functools.partial(lower, platform), multiple_results=True)
        mlir.register_lowering(primitive, rule, **({} if platform is None else {"platform": platform}))

    def batch(operands, dims, **static):
        in_front = [x[None] if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims)]
        results = primitive.bind(*in_front, **static)
        return results, [0] * len(results)

    batching.primitive_batchers[primitive] = batch
    return primitive.bind
