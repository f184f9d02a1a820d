"""Mesh axes in types: what ``jax.shard_map`` calls varying.

Inside a manual region every value's type says over which mesh axes it varies. A gradient whose type is taken from its
own operand is silently wrong when that operand is replicated and another is not (a replicated bias, say). So all
operands are cast to vary over the union of their axes before the custom derivative; the transpose of that cast is the
sum over the axes, which is exactly what a replicated operand's gradient needs.
"""

import jax
import jax.numpy as jnp


def varying_axes(operands):
    """The union of the manual mesh axes over which the arrays of a pytree vary."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(operands)))


def vary_over(x, axes):
    """x, cast to vary over these axes as well."""
    missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def align_varying(operands):
    """All arrays of a pytree, cast to vary over the union of their axes."""
    axes = varying_axes(operands)
    return jax.tree.map(lambda x: vary_over(x, axes), operands) if axes else operands


def widen_if_summed(bias, operands, always=False):
    """(bias, None); or, if its gradient will be summed over mesh axes, bias in float32 and the dtype that it had."""
    if bias is None or jnp.finfo(bias.dtype).bits >= 32:
        return bias, None
    if not always and varying_axes(operands) <= jax.typeof(bias).manual_axis_type.varying:
        return bias, None
    return bias.astype(jnp.float32), bias.dtype.name
