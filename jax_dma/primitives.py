"""Primitives that are plain JAX on every platform but one, where a compiled kernel does the same faster."""

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh

from jax_dma import partition
from jax_dma.implementations import ffi


def with_cuda_kernel(name, plain, kernel, terms=None):
    """A primitive of several results.

    Args:
      name: of the primitive.
      plain: the function of (arrays, static keyword arguments) in JAX, to a tuple of arrays. Leading batch axes of its
        operands may be full or 1, each for itself, and its results are full.
      kernel: the same by a custom call, for CUDA where the compiled kernels are there; None where they cannot serve the
        operands.
      terms: how the kernel is split over a mesh, the terms of its operands and of its results for
        :func:`jax_dma.partition.partitioned_along`. None: it sees to that itself.

    Returns:
      A function to bind it.
    """
    primitive = Primitive(f"jax_dma_{name}")
    primitive.multiple_results = True
    if terms is not None:
        plain, kernel = _without_devices(plain), _split(_without_devices(kernel), *terms)

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
        rule = rule if terms is None or platform is None else partition.without_shardings(rule)
        mlir.register_lowering(primitive, rule, **({} if platform is None else {"platform": platform}))

    def batch(operands, dims, **static):
        in_front = [x[None] if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims)]
        results = primitive.bind(*in_front, **static)
        return results, [0] * len(results)

    batching.primitive_batchers[primitive] = batch
    if terms is None:
        return primitive.bind
    return lambda *operands, **static: primitive.bind(*operands, **static, devices=partition.marker())


def _without_devices(function):
    """A function that ignores the static parameter that is there for jax alone (see ``partition.marker``)."""
    return lambda *operands, devices, **static: function(*operands, **static)


def _split(kernel, terms, result_terms):
    """A kernel that is split over whatever mesh the program is compiled for, or None where there is none."""

    def run(*operands, **static):
        if jax.typeof(operands[0]).sharding.mesh.manual_axes:  # inside shard_map: local already
            return kernel(*operands, **static)
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            if jax.eval_shape(functools.partial(kernel, **static), *operands) is None:
                return None
            return partition.partitioned_along(functools.partial(kernel, **static), operands, terms, result_terms)

    return run
