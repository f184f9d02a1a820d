"""The argument checks of :func:`jax_dma.attention`: what is rejected is named, with what it was and what it may be."""

import jax
import jax.numpy as jnp

LETTERS = "B batch, T queries, S keys, N query heads, K key/value heads, H head dimension"


def check_arrays(q, k, v):
    """Shapes and dtypes of q [*batch, T, N, H], k [*batch, S, K, H], v [*batch, S, K, Hv]."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_is_array(name, x)
        if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.finfo(x.dtype).bits < 16:
            raise TypeError(f"{name} must be bfloat16, float16, float32 or float64, got {x.dtype}")
        if x.ndim < 3:
            raise ValueError(f"{name} must have at least 3 axes, {_expected(name)}, got shape {x.shape}")
    if not (q.dtype == k.dtype == v.dtype):
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    for name, x in (("k", k), ("v", v)):
        if x.ndim != q.ndim or x.shape[:-3] != q.shape[:-3]:
            raise ValueError(
                f"{name} must have the batch axes of q, got {name} {x.shape} and q {q.shape}; {_expected(name)}"
            )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have one head dimension H, got q {q.shape} and k {k.shape}")
    if k.shape[-3:-1] != v.shape[-3:-1]:
        raise ValueError(f"k and v must have the same S and K, got k {k.shape} and v {v.shape}")
    N, K = q.shape[-2], k.shape[-2]
    if K == 0 or N == 0 or N % K != 0:
        raise ValueError(
            f"the {N} query heads of q must be a multiple of the {K} heads of k and v, got q {q.shape} and k {k.shape}"
        )
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise ValueError(f"head dimensions must be at least 1, got q {q.shape} and v {v.shape}")


def check_dense_mask(mask, q_shape, k_shape):
    """bool [*batch|1, N|K|1, T|1, S|1]."""
    _check_is_array("mask", mask)
    if mask.dtype != jnp.bool_:
        if jnp.issubdtype(mask.dtype, jnp.floating) or jnp.issubdtype(mask.dtype, jnp.integer):
            raise TypeError(
                f"mask must be bool, got {mask.dtype}. For a 0/1 mask pass `mask != 0`; "
                "an additive mask (0 and large negative numbers) is a `bias`."
            )
        raise TypeError(f"mask must be bool, got {mask.dtype}")
    _check_broadcast("mask", mask.shape, q_shape, k_shape)


def check_bias(bias, q_shape, k_shape):
    """float [*batch|1, N|K|1, T|1, S|1]."""
    _check_is_array("bias", bias)
    if bias.dtype == jnp.bool_:
        raise TypeError(
            "bias must be floating point, got bool: a bool array is a `mask` (arguments are q, k, v, mask, bias)"
        )
    if not jnp.issubdtype(bias.dtype, jnp.floating) or jnp.finfo(bias.dtype).bits < 16:
        raise TypeError(f"bias must be bfloat16, float16, float32 or float64, got {bias.dtype}")
    _check_broadcast("bias", bias.shape, q_shape, k_shape)


def check_sinks(sinks, q_shape):
    """float [N]."""
    _check_is_array("sinks", sinks)
    if not jnp.issubdtype(sinks.dtype, jnp.floating) or jnp.finfo(sinks.dtype).bits < 16:
        raise TypeError(f"sinks must be bfloat16, float16, float32 or float64, got {sinks.dtype}")
    if sinks.shape != (q_shape[-2],):
        raise ValueError(
            f"sinks must have shape [N] = ({q_shape[-2]},), one logit for each query head, got shape {sinks.shape}"
        )


def check_intervals(start, end, live, q_shape, k_shape):
    """int32 [*batch|1, N|K|1, S], after axes of size 1 were added or dropped to match q's rank."""
    for name, x in (("mask.start", start), ("mask.end", end)):
        if x.dtype != jnp.int32:
            raise TypeError(f"{name} must be int32, got {x.dtype}")
        full = (*q_shape[:-3], q_shape[-2], k_shape[-3])
        heads = {q_shape[-2], k_shape[-2], 1}
        ok = x.ndim == len(full) and x.shape[-1] == full[-1] and x.shape[-2] in heads
        ok = ok and all(a in (1, b) for a, b in zip(x.shape[:-2], full[:-2]))
        if not ok:
            raise ValueError(
                f"{name} has shape {x.shape}; with q {q_shape} and k {k_shape} it must be [*batch|1, N|K|1, S] = "
                f"{_alternatives(q_shape[:-3])}[{_heads(q_shape, k_shape)}, {full[-1]}]"
            )
    if start.shape[-2] != end.shape[-2] and 1 not in (start.shape[-2], end.shape[-2]):
        raise ValueError(
            f"mask.start and mask.end must have the same heads axis, or 1, got {start.shape} and {end.shape}"
        )
    if live is not None and (not isinstance(live, int) or isinstance(live, bool) or live < 0):
        raise TypeError(f"mask.live must be None or a non-negative Python integer, got {live!r}")


def check_plan(plan, q_shape, k_shape):
    """A plan made for these shapes."""
    made_for = (plan.query_length, plan.key_length, plan.num_heads, plan.num_kv_heads)
    called_with = (q_shape[-3], k_shape[-3], q_shape[-2], k_shape[-2])
    if made_for != called_with:
        raise ValueError(
            f"the mask plan was made for (T, S, N, K) = {made_for}, but q and k have {called_with}; "
            "make it with jax_dma.plan(mask, q, k) from arrays of these shapes"
        )
    batch = q_shape[:-3]
    if plan.bits.ndim != len(batch) + 3 or any(a not in (1, b) for a, b in zip(plan.bits.shape, batch)):
        raise ValueError(
            f"the mask plan has batch axes {plan.bits.shape[:-3]}, but q has {batch} (each may be 1 in the plan)"
        )


def check_scalar(name, value, positive=False):
    """A Python number (or a 0-d concrete value) as a float."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} must be a Python number, not a traced value: fold a learned factor into q or the bias")
    try:
        if isinstance(value, (str, bytes)):  # float("0.5") would take it
            raise TypeError
        value = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {value!r}") from None
    if value != value or value in (float("inf"), float("-inf")) or (positive and value <= 0):
        raise ValueError(f"{name} must be a finite{' positive' if positive else ''} number, got {value}")
    return value


def _check_is_array(name, x):
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")


def _expected(name):
    return {"q": "q is [*batch, T, N, H]", "k": "k is [*batch, S, K, H]", "v": "v is [*batch, S, K, Hv]"}[
        name
    ] + f" ({LETTERS})"


def _alternatives(sizes):
    return "".join(f"[{n}|1]" if n != 1 else "[1]" for n in sizes)


def _heads(q_shape, k_shape):
    return "|".join(str(n) for n in sorted({q_shape[-2], k_shape[-2], 1}, reverse=True))


def _check_broadcast(name, shape, q_shape, k_shape):
    batch, T, N, S, K = q_shape[:-3], q_shape[-3], q_shape[-2], k_shape[-3], k_shape[-2]
    want = f"[*batch|1, N|K|1, T|1, S|1] = {_alternatives(batch)}[{_heads(q_shape, k_shape)}, {T}|1, {S}|1]"
    if len(shape) != len(batch) + 3:
        raise ValueError(f"{name} must have {len(batch) + 3} axes, {want}, got shape {shape}")
    for axis, (got, full) in enumerate(zip(shape[: len(batch)], batch)):
        if got not in (1, full):
            raise ValueError(f"{name} axis {axis} (batch) must be {full} or 1, got shape {shape}; {name} is {want}")
    heads, rows, cols = shape[len(batch) :]
    for got, allowed, what in ((heads, {N, K, 1}, "heads"), (rows, {T, 1}, "T"), (cols, {S, 1}, "S")):
        if got not in allowed:
            raise ValueError(
                f"{name}'s {what} axis must be one of {sorted(allowed)}, got {got} in shape {shape}; {name} is {want}"
            )
