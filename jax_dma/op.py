"""The two primitives, forward and backward, and the custom derivative over them.

Operands are flat: ``q, k, v, *visibility, [bias]`` and for the backward pass ``out, lse, dout, dlse`` after them. lse
is [*batch, T, N, 2], the log-sum-exp and what was lost when it was rounded: beside logits of -1e9 that is all of the
logarithm, and weights from the rounded one alone would be wrong by the number of keys. dlse is [*batch, T, N].

Each operand has any number of leading batch axes, the same number for all, each 1 or full; batching adds one more in
front and never tiles an operand. Which kernel runs is decided when a primitive is lowered, per platform; how a call is
split over a mesh is decided below that, in ``partition`` (the static parameter ``devices`` is only there for it).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh

from jax_dma import choice, partition
from jax_dma.implementations import ffi, xla
from jax_dma.mesh import vary_over, varying_axes
from jax_dma.reference import compute_dtype
from jax_dma.tiles import Visibility


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Call:
    """The static half of a call."""

    scale: float
    softcap: float  # 0: none
    causal: bool
    deterministic: bool
    implementations: tuple[str, ...]  # in order of preference
    visibility: tuple[bool, ...] = ()  # which parts of Visibility are among the operands
    has_bias: bool = False
    want_dbias: bool = False  # backward only
    vmapped: int = 0  # leading axes that batching added: gradients are never summed over them
    unwritten: bool = False  # k and v may hold anything in key tiles of which the intervals show nothing
    bias_dtype: str | None = None  # attend is given a wider bias than this, for the sake of its gradient's sums

    def unflatten(self, operands):
        """(q, k, v, visibility, bias, the rest)."""
        q, k, v, *rest = operands
        visibility = Visibility(*(rest.pop(0) if present else None for present in self.visibility))
        bias = rest.pop(0) if self.has_bias else None
        return q, k, v, visibility, bias, rest


def batch_shape(q, operands):
    """The full batch shape: every operand is 1 or full along each leading axis."""
    rank = len(q.shape) - 3
    return jnp.broadcast_shapes(*(x.shape[:rank] for x in operands))


def dbias_shape(call, bias, batch):
    """bias's shape, but full along the axes that batching added."""
    return (*batch[: call.vmapped], *bias.shape[call.vmapped :])


def _like(aval, shape, dtype):
    """The type of a result that is sharded as ``aval`` is, axis for axis."""
    spec = tuple(aval.sharding.spec) + (None,) * (len(aval.shape) - len(aval.sharding.spec))
    spec = (spec + (None,) * len(shape))[: len(shape)]
    return aval.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False, sharding=aval.sharding.update(spec=spec))


def _check_varying(operands):
    """Operands must have been aligned (mesh.align_varying): otherwise gradients would be silently wrong."""
    varying = {x.manual_axis_type.varying for x in operands}
    if len(varying) > 1:
        raise ValueError(f"jax_dma: operands vary over different manual mesh axes: {sorted(map(sorted, varying))}")


def _forward_types(*operands, call, devices):
    _check_varying(operands)
    q, _, v, *_ = operands
    batch = batch_shape(q, operands)
    lse = _like(q, (*batch, *q.shape[-3:-1], 2), compute_dtype(q.dtype))
    return [_like(q, (*batch, *q.shape[-3:-1], v.shape[-1]), q.dtype), lse]


def _backward_types(*operands, call, devices):
    _check_varying(operands)
    q, k, v, _, bias, _ = call.unflatten(operands)
    batch = batch_shape(q, operands)
    types = [_like(x, (*batch, *x.shape[-3:]), x.dtype) for x in (q, k, v)]
    if call.want_dbias:
        types.append(_like(bias, dbias_shape(call, bias, batch), bias.dtype))
    return types


def _without_unwritten(call, operands):
    """Operands for what multiplies hidden values by 0 where our kernels do not read them."""
    if not call.unwritten:
        return operands
    q, k, v, visibility, *_ = call.unflatten(operands)
    seen = jnp.swapaxes(visibility.start < visibility.end, -1, -2)[..., None]
    return [q, jnp.where(seen, k, 0), jnp.where(seen, v, 0), *operands[3:]]


def _forward_xla(*operands, call):
    q, k, v, visibility, bias, _ = call.unflatten(operands)
    return xla.attention(q, k, v, visibility, bias, causal=call.causal, scale=call.scale, softcap=call.softcap)


def _backward_xla(*operands, call, given=True):
    """The gradients, from the out and lse that are among the operands or, if these are not given, from new ones."""
    q, k, v, visibility, bias, (out, lse, dout, dlse) = call.unflatten(operands)
    batch = batch_shape(q, operands)
    full = lambda x: jnp.broadcast_to(x, (*batch, *x.shape[-3:]))  # so that each gradient comes out full
    rows = lambda x: jnp.broadcast_to(x, (*batch, *x.shape[-2:]))
    if call.want_dbias:
        bias = jnp.broadcast_to(bias, dbias_shape(call, bias, batch))
    dout, dlse, out, lse = full(dout), rows(dlse), full(out), full(lse)
    return xla.attention_vjp(
        *map(full, (q, k, v)), visibility, bias, dout, dlse, want_dbias=call.want_dbias, causal=call.causal,
        scale=call.scale, softcap=call.softcap, **(dict(out=out, lse=lse) if given else {}),
    )  # fmt: skip


def _make_primitive(name, types, on_xla, on_ffi):
    primitive = Primitive(f"jax_dma_{name}")
    primitive.multiple_results = True
    primitive.def_abstract_eval(types)

    @functools.cache
    def compiled(call):
        return jax.jit(functools.partial(primitive.bind, call=call, devices=partition.marker()))

    primitive.def_impl(lambda *operands, call, devices: compiled(call)(*operands))

    def run(platform, call, *operands):
        chosen = choice.choose(platform, call, operands)
        if chosen in ("pallas", "xla"):
            operands = _without_unwritten(call, operands)
        with jax.named_scope(f"jax_dma.{name}.{chosen}"):
            if chosen == "pallas" and all(x.size for x in operands):
                from jax_dma.implementations import pallas  # not before it is needed: it imports a compiler

                return getattr(pallas, name)(*operands, call=call, interpret=platform != "cuda")
            if chosen in ("pallas", "xla"):
                return list(on_xla(*operands, call=call))
            return list(on_ffi(chosen, *operands, call=call))

    def lower(platform, *operands, call, devices):
        on_platform = functools.partial(run, platform)
        if jax.typeof(operands[0]).sharding.mesh.manual_axes:  # inside shard_map: local already
            return on_platform(call, *operands)
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return partition.partitioned(on_platform, call, operands, backward=name == "backward")

    for platform in (None, "cpu", "cuda"):
        rule = partition.without_shardings(mlir.lower_fun(functools.partial(lower, platform), multiple_results=True))
        mlir.register_lowering(primitive, rule, **({} if platform is None else {"platform": platform}))

    def batch(operands, dims, *, call, devices):
        in_front = [x[None] if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims)]
        call = dataclasses.replace(call, vmapped=call.vmapped + 1)
        results = primitive.bind(*in_front, call=call, devices=devices)
        return results, [0] * len(results)

    batching.primitive_batchers[primitive] = batch
    return primitive


forward_p = _make_primitive("forward", _forward_types, _forward_xla, ffi.forward)
backward_p = _make_primitive("backward", _backward_types, _backward_xla, ffi.backward)


def _flatten(call, q, k, v, visibility, bias, *rest):
    """The call with its operand list described, and the operands."""
    call = dataclasses.replace(call, visibility=tuple(x is not None for x in visibility), has_bias=bias is not None)
    return call, [x for x in (q, k, v, *visibility, bias, *rest) if x is not None]


def narrow(call, bias):
    """The bias that kernels read in the forward pass, and that is kept for the backward pass."""
    return bias if bias is None or call.bias_dtype is None else bias.astype(call.bias_dtype)


def wide(call, bias):
    """The bias that kernels read in the backward pass, whose gradient has its dtype."""
    return bias if bias is None or call.bias_dtype is None else bias.astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(call, q, k, v, visibility, bias):
    """(out, lse [..., 2]) through the primitives. Operands must vary over the same manual mesh axes."""
    call, operands = _flatten(call, q, k, v, visibility, narrow(call, bias))
    return tuple(forward_p.bind(*operands, call=call, devices=partition.marker()))


def _attend_forward(call, *arguments):
    bias_perturbed = any(x.perturbed for x in jax.tree.leaves(arguments[-1], is_leaf=lambda x: hasattr(x, "perturbed")))
    q, k, v, visibility, bias = jax.custom_derivatives.custom_vjp_primal_tree_values(arguments)
    out, lse = attend(call, q, k, v, visibility, bias)
    # Named, so that a remat policy can keep them; without that a rematerialised layer runs the kernel twice.
    out, lse = checkpoint_name(out, "jax_dma_out"), checkpoint_name(lse, "jax_dma_lse")
    visibility = jax.tree.map(lambda x: checkpoint_name(x, "jax_dma_plan"), visibility)
    call = dataclasses.replace(call, want_dbias=bias_perturbed)
    return (out, lse), (call, q, k, v, visibility, narrow(call, bias), out, lse)


def _attend_backward(_, residuals, cotangents):
    call, q, k, v, visibility, bias, out, lse = residuals
    dout, dlse = cotangents_of(cotangents)
    dout, dlse = _same_mesh_axes(out, dout), _same_mesh_axes(out, dlse)
    dq, dk, dv, *dbias = attend_gradient(call, q, k, v, visibility, wide(call, bias), out, lse, dout, dlse)
    return dq, dk, dv, None, dbias[0] if dbias else None


def cotangents_of(cotangents):
    """(dout, dlse [..., T, N]), from what a custom derivative is given for (out, lse [..., T, N, 2])."""
    dout, dlse = (jnp.zeros(c.shape, c.dtype) if isinstance(c, SymbolicZero) else c for c in cotangents)
    return dout, dlse[..., 0]


def _same_mesh_axes(like, x):
    return vary_over(x, varying_axes(like))


attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_gradient(call, q, k, v, visibility, bias, out, lse, dout, dlse):
    """(dq, dk, dv[, dbias]) through the backward primitive; its own derivative goes through plain JAX."""
    call, operands = _flatten(call, q, k, v, visibility, bias, out, lse, dout, dlse)
    return tuple(backward_p.bind(*operands, call=call, devices=partition.marker()))


def _gradient_forward(call, *arguments):
    return attend_gradient(call, *arguments), arguments


def _gradient_backward(call, residuals, cotangents):
    q, k, v, visibility, bias, out, lse, dout, dlse = residuals

    # The gradient as a function of what it depends on; out and lse are functions of the same operands, and the
    # chain rule through them is in here.
    def gradient(q, k, v, bias, dout, dlse):
        described, operands = _flatten(call, q, k, v, visibility, bias, out, lse, dout, dlse)
        return tuple(_backward_xla(*_without_unwritten(described, operands), call=described, given=False))

    _, vjp = jax.vjp(gradient, q, k, v, bias, dout, dlse)
    dq, dk, dv, dbias, ddout, ddlse = vjp(cotangents)
    return dq, dk, dv, None, dbias, None, None, ddout, ddlse


attend_gradient.defvjp(_gradient_forward, _gradient_backward)
