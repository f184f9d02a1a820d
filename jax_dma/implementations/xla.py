"""Attention in plain JAX, chunk by chunk: O(T + S) memory, any order of differentiation, any platform.

Queries are walked in chunks; for each, keys are walked in chunks with the usual running maximum, and chunks in which
nothing is visible are skipped. Each chunk is a ``jax.checkpoint``, so its derivative recomputes it instead of keeping
[T, S] arrays. The running maximum is a constant to the derivative (any constant gives the same result), which leaves
sums that are linear in what a chunk adds.

``attention_vjp`` is the derivative written out, for what calls it as an operation of its own: the same two walks, with
weights from lse. Reverse mode applied to ``attention`` gives the same numbers, but adds a cotangent of all of bias once
per chunk of queries. Both can be differentiated (again).
"""

import functools

import jax
import jax.numpy as jnp

from jax_dma.mesh import vary_over, varying_axes
from jax_dma.reference import HIDE_BELOW, compute_dtype
from jax_dma.tiles import KEY_TILE, unpack_bits

QUERY_CHUNK = 256
KEY_CHUNK = 4 * KEY_TILE  # a multiple of 32, so that chunks begin at a word of mask bits


def attention(q, k, v, visibility, bias, *, causal, scale, softcap):
    """out [*batch, T, N, Hv] and lse [*batch, T, N, 2]: the log-sum-exp, and what was lost when it was rounded.

    Args:
      q, k, v: [*batch|1, T, N, H], [*batch|1, S, K, H], [*batch|1, S, K, Hv].
      visibility: a :class:`jax_dma.tiles.Visibility`.
      bias: [*batch|1, N|K|1, T|1, S|1] or None.
      causal: whether s > t + (S - T) is hidden.
      scale, softcap: floats; softcap 0 means none.
    """
    out, lse = _attention(q, k, v, visibility, bias, causal=causal, scale=scale, softcap=softcap)
    return out.astype(q.dtype), lse


def _attention(q, k, v, visibility, bias, *, causal, scale, softcap):
    """:func:`attention` with an out that is not rounded to q's dtype."""
    (T, N, _), (S, K, Hv) = q.shape[-3:], v.shape[-3:]
    batch = jnp.broadcast_shapes(*(x.shape[: q.ndim - 3] for x in (q, k, v, bias, *visibility) if x is not None))
    dtype = compute_dtype(q.dtype)
    call = functools.partial(_Chunk, K=K, G=N // K, T=T, S=S, causal=causal, scale=scale, softcap=softcap, dtype=dtype)
    # Heads first, grouped: q [*batch, K, G, T, H], k and v [*batch, K, S, H].
    q = jnp.moveaxis(q.reshape(q.shape[:-2] + (K, N // K, q.shape[-1])), -4, -2)
    k, v = jnp.moveaxis(k, -3, -2), jnp.moveaxis(v, -3, -2)
    if bias is not None and 1 in bias.shape[-2:]:
        bias = bias.astype(dtype)  # small, and its gradient is then summed over chunks in full precision
    operands = (q, k, v, visibility, bias)

    def query_chunk(operands, t0, rows):
        q, k, v, visibility, bias = operands
        chunk = call(q=_take(q, -2, t0, rows), t0=t0, rows=rows)
        shape = (*batch, K, N // K, rows)
        state = (jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype), jnp.zeros((*shape, Hv), dtype))
        state = jax.tree.map(lambda x: _vary_like(x, operands), state)
        if _explicitly_sharded(operands):
            types = jax.eval_shape(lambda state: chunk.add(state, k, v, visibility, bias, 0, S), state)
            state = jax.tree.map(lambda x, type: jax.sharding.reshard(x, type.sharding), state, types)

        def key_chunk(state, s0, cols):
            return chunk.absorb(state, k, v, visibility, bias, s0, cols)

        m, total, out = _walk(S, KEY_CHUNK, key_chunk, state, checkpoint=True)
        empty = total == 0
        total = jnp.where(empty, 1, total)
        out = jnp.where(empty[..., None], 0, out / total[..., None])
        return out, log_sum_exp(jnp.where(empty, 0, m), total, empty)

    outs, lses = [], []
    whole = T // QUERY_CHUNK if T > QUERY_CHUNK else 0
    if whole:
        body = jax.checkpoint(lambda ops, t0: query_chunk(ops, t0, QUERY_CHUNK), prevent_cse=False)
        starts = jnp.arange(whole, dtype=jnp.int32) * QUERY_CHUNK
        _, (out, lse) = jax.lax.scan(lambda _, t0: (None, body(operands, t0)), None, starts)
        merged = (whole * QUERY_CHUNK,)  # spelled out: -1 cannot be inferred for an empty batch
        join = lambda x, axis: jnp.moveaxis(x, 0, axis).reshape(x.shape[1 : axis + 1] + merged + x.shape[axis + 2 :])
        axis = len(batch) + 2
        outs.append(join(out, axis)), lses.append(join(lse, axis))
    if T > whole * QUERY_CHUNK or T == 0:
        tail = jax.checkpoint(lambda ops: query_chunk(ops, whole * QUERY_CHUNK, T - whole * QUERY_CHUNK))
        out, lse = tail(operands)
        outs.append(out), lses.append(lse)
    ungroup = lambda x, axis: x.reshape(x.shape[: axis - 1] + (N,) + x.shape[axis + 1 :])
    join = lambda parts: ungroup(jnp.moveaxis(jnp.concatenate(parts, -2), -2, len(batch)), len(batch) + 2)
    return join(outs), join(lses)


def log_sum_exp(reference, total, empty):
    """[..., 2]: reference + log(total), -inf in empty rows, and what was lost when that was rounded."""
    log_total = jnp.log(total)
    lse = reference + log_total
    lost = jax.lax.stop_gradient(reference - lse + log_total)
    return jnp.stack([jnp.where(empty, -jnp.inf, lse), jnp.where(empty, 0, lost)], -1)


def _walk(length, size, body, state, *, checkpoint=False):
    """``body(state, start, extent)`` over consecutive chunks: a scan over whole ones, then the rest."""
    whole = length // size if length > size else 0
    if whole:
        step = lambda state, start: body(state, start, size)
        step = jax.checkpoint(step, prevent_cse=False) if checkpoint else step
        starts = jnp.arange(whole, dtype=jnp.int32) * size
        state, _ = jax.lax.scan(lambda state, start: (step(state, start), None), state, starts)
    if length > whole * size:
        state = body(state, whole * size, length - whole * size)
    return state


def _take(x, axis, start, extent):
    """A slice along an axis that may be broadcast (size 1)."""
    axis %= x.ndim
    if x.shape[axis] == 1 or x.shape[axis] == extent:
        return x
    return jax.lax.dynamic_slice_in_dim(x, start, extent, axis)


def _put(x, part, starts):
    """``part`` written into x at starts, a dict from axes; an axis that is not in it begins at 0."""
    starts = {axis % x.ndim: start for axis, start in starts.items()}
    return jax.lax.dynamic_update_slice(x, part, [jnp.int32(starts.get(axis, 0)) for axis in range(x.ndim)])


def _sum_to(x, shape):
    """x, summed over the axes that are 1 in a shape of the same rank."""
    axes = tuple(i for i, (size, wanted) in enumerate(zip(x.shape, shape)) if wanted == 1 != size)
    return x.sum(axes, keepdims=True) if axes else x


def _zeros(type, operands, dtype=None):
    """Zeros of a ShapeDtypeStruct's shape and sharding, varying like the operands."""
    x = _vary_like(jnp.zeros(type.shape, dtype or type.dtype), operands)
    return jax.sharding.reshard(x, type.sharding) if _explicitly_sharded(operands) else x


def _explicitly_sharded(operands):
    """Whether any operand's type says that it is sharded."""
    return any(axis is not None for x in jax.tree.leaves(operands) for axis in jax.typeof(x).sharding.spec)


def _vary_like(x, operands):
    """x, typed as varying over the mesh axes that any operand varies over (see ``mesh.align_varying``)."""
    return vary_over(x, varying_axes(operands))


class _Chunk:
    """The logits of one chunk of queries against chunks of keys."""

    def __init__(self, q, t0, rows, *, K, G, T, S, causal, scale, softcap, dtype):
        self.q, self.t0, self.rows = q, t0, rows
        self.K, self.G, self.T, self.S = K, G, T, S
        self.causal, self.scale, self.softcap, self.dtype = causal, scale, softcap, dtype

    def absorb(self, state, k, v, visibility, bias, s0, cols):
        """Adds the keys [s0, s0 + cols) to the running (maximum, sum, weighted values)."""
        live = self.anything_visible(visibility, s0, cols)
        compute = lambda state: self.add(state, k, v, visibility, bias, s0, cols)
        return compute(state) if live is None else jax.lax.cond(live, compute, lambda state: state, state)

    def add(self, state, k, v, visibility, bias, s0, cols):
        m, total, out = state
        k, v = _take(k, -2, s0, cols), _take(v, -2, s0, cols)
        logits, _, _ = self.logits(k, visibility, bias, s0, cols)
        new_m = jax.lax.stop_gradient(jnp.maximum(m, logits.max(-1)))
        shift = jnp.where(new_m == -jnp.inf, 0, new_m)
        weights = jnp.exp(logits - shift[..., None])
        rescale = jax.lax.stop_gradient(jnp.exp(m - shift))
        total = total * rescale + weights.sum(-1)
        out = out * rescale[..., None] + _matmul(weights.astype(v.dtype), v[..., None, :, :], self.dtype)
        return new_m, total, out

    def logits(self, k, visibility, bias, s0, cols):
        """Logits of the keys [s0, s0 + cols), -inf where hidden; where that is; d logits / d (scale * <q, k>).

        The latter two are None where nothing is hidden, and where there is no soft cap.
        """
        logits, slope = self.scale * _matmul(self.q, jnp.swapaxes(k, -1, -2)[..., None, :, :], self.dtype), None
        if self.softcap:
            capped = jnp.tanh(logits / self.softcap)
            logits, slope = self.softcap * capped, 1 - capped * capped
        hidden = self.hidden(visibility, s0, cols)
        if bias is not None:
            bias = _take(_take(self.grouped(bias, 2), -2, self.t0, self.rows), -1, s0, cols).astype(self.dtype)
            low = bias <= HIDE_BELOW
            hidden = low if hidden is None else hidden | low
            logits = logits + jnp.where(hidden, 0, bias)
        if hidden is not None:
            logits = jnp.where(hidden, -jnp.inf, logits)
        return logits, hidden, slope

    def gradients(self, k, v, visibility, bias, dout, lse, delta, s0, cols):
        """What the keys [s0, s0 + cols) add to dq, and what these queries add to their dk, dv and dbias.

        dk and dv are [*batch, K, H, cols]: on a CPU that product is several times faster than its transpose.
        """
        k, v = _take(k, -2, s0, cols), _take(v, -2, s0, cols)
        logits, hidden, slope = self.logits(k, visibility, bias, s0, cols)
        weights = jnp.exp(logits - lse[..., :1] - lse[..., 1:])
        dlogits = weights * (_matmul(dout, jnp.swapaxes(v, -1, -2)[..., None, :, :], self.dtype) - delta[..., None])
        if hidden is not None:
            dlogits = jnp.where(hidden, 0, dlogits)
        dproducts = self.scale * (dlogits if slope is None else dlogits * slope)
        # Products take two factors of one dtype. float16 has too little range for these gradients.
        dtype = self.dtype if k.dtype == jnp.float16 else k.dtype
        weights, dproducts, dout, q, k_ = (x.astype(dtype) for x in (weights, dproducts, dout, self.q, k))
        dq = _matmul(dproducts, k_[..., None, :, :], self.dtype)
        rows = lambda x: x.reshape(x.shape[:-3] + (x.shape[-3] * x.shape[-2], x.shape[-1]))  # of all heads of a group
        dk = _matmul(jnp.swapaxes(rows(q), -1, -2), rows(dproducts), self.dtype)
        dv = _matmul(jnp.swapaxes(rows(dout), -1, -2), rows(weights), self.dtype)
        k, v = jnp.swapaxes(k, -1, -2), jnp.swapaxes(v, -1, -2)
        found = {"q": _sum_to(dq, self.q.shape), "k": _sum_to(dk, k.shape), "v": _sum_to(dv, v.shape)}
        if bias is not None:
            found["bias"] = _sum_to(dlogits, self.grouped(bias, 2).shape)
        return found

    def grouped(self, x, trailing):
        """[*batch, N|K|1, *trailing] as [*batch, K|1, G|1, *trailing]."""
        axis = x.ndim - trailing - 1
        heads = {1: (1, 1), self.K: (self.K, 1), self.K * self.G: (self.K, self.G)}[x.shape[axis]]
        return x.reshape(x.shape[:axis] + heads + x.shape[axis + 1 :])

    def positions(self, s0, cols):
        t = self.t0 + jnp.arange(self.rows, dtype=jnp.int32)[:, None]
        s = s0 + jnp.arange(cols, dtype=jnp.int32)[None, :]
        return t, s

    def hidden(self, visibility, s0, cols):
        """bool that broadcasts against [*batch, K, G, rows, cols], or None where everything is visible."""
        hidden = None
        either = lambda a, b: b if a is None else a | b
        t, s = self.positions(s0, cols)
        leading = (1,) * (self.q.ndim - 2)
        if self.causal:
            hidden = either(hidden, (s > t + (self.S - self.T)).reshape(leading + (self.rows, cols)))
        if visibility.bits is not None:
            bits = self.bit_words(visibility.bits, s0, cols)
            seen = (bits & 1) != 0 if visibility.bits.shape[-1] == 1 else unpack_bits(bits, cols)
            hidden = either(hidden, ~seen)
        if visibility.start is not None:
            ends = visibility.start, visibility.end
            start, end = (_take(self.grouped(x, 1), -1, s0, cols)[..., None, :] for x in ends)
            t = t.reshape(leading + t.shape)
            hidden = either(hidden, (t < start) | (t >= end))
        return hidden

    def bit_words(self, bits, s0, cols):
        bits = _take(self.grouped(bits, 2), -2, self.t0, self.rows)
        if bits.shape[-1] == 1:
            return bits
        words = -(-cols // 32)
        return jax.lax.dynamic_slice_in_dim(bits, s0 // 32, words, bits.ndim - 1)

    def anything_visible(self, visibility, s0, cols):
        """Whether any position of the chunk is visible; None if that is certain."""
        live = None
        both = lambda a, b: b if a is None else a & b
        if self.causal:
            live = both(live, jnp.asarray(s0 <= self.t0 + self.rows - 1 + (self.S - self.T)))
        if visibility.bits is not None:
            live = both(live, (self.bit_words(visibility.bits, s0, cols) != 0).any())
        if visibility.start is not None:
            start, end = (_take(x, -1, s0, cols) for x in (visibility.start, visibility.end))
            meets = (start < end) & (start < self.t0 + self.rows) & (end > self.t0)
            live = both(live, meets.any())
        return live


def _matmul(a, b, dtype):
    """Batched product with broadcast batch axes, accumulated in ``dtype``."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=dtype)


def attention_vjp(
    q, k, v, visibility, bias, dout, dlse, *, want_dbias, causal, scale, softcap, out=None, lse=None
):  # fmt: skip
    """(dq, dk, dv[, dbias]) for cotangents of out and lse; the derivative of :func:`attention`.

    Given out and lse, it does not compute them again. It is then the derivative only to first order: differentiating
    it again does not see that they depend on the operands.
    """
    (T, N, _), (S, K, _) = q.shape[-3:], v.shape[-3:]
    G = N // K
    dtype = compute_dtype(q.dtype)
    if out is None or lse is None:
        out, lse = _attention(q, k, v, visibility, bias, causal=causal, scale=scale, softcap=softcap)
    empty = lse[..., 0] == -jnp.inf  # the cotangents of such rows may hold anything
    lse = jnp.where(empty[..., None], 0, lse)
    delta = jnp.where(empty, 0, (dout.astype(dtype) * out.astype(dtype)).sum(-1) - dlse)
    dout = jnp.where(empty[..., None], 0, dout)

    call = functools.partial(_Chunk, K=K, G=G, T=T, S=S, causal=causal, scale=scale, softcap=softcap, dtype=dtype)
    # Heads first, grouped: q, dout and lse [*batch, K, G, T, H | 2], delta [*batch, K, G, T], k, v [*batch, K, S, H].
    group = lambda x, axis: jnp.moveaxis(x.reshape(x.shape[: axis + 1] + (K, G) + x.shape[axis + 2 :]), axis, axis + 2)
    axis = q.ndim - 3  # of T
    operands = (
        group(q, axis), jnp.moveaxis(k, -3, -2), jnp.moveaxis(v, -3, -2), visibility, bias,
        group(dout, axis), group(lse, axis), group(delta, axis),
    )  # fmt: skip

    def block(operands, t0, s0, rows, cols):
        """Gradients, each of its operand's shape but for rows queries and cols keys (see ``_Chunk.gradients``)."""
        q, k, v, visibility, bias, dout, lse, delta = operands
        chunk = call(q=_take(q, -2, t0, rows), t0=t0, rows=rows)
        of_rows = (_take(dout, -2, t0, rows), _take(lse, -2, t0, rows), _take(delta, -1, t0, rows))

        def compute():
            found = chunk.gradients(k, v, visibility, bias, *of_rows, s0, cols)
            return found if want_dbias else {name: x for name, x in found.items() if name != "bias"}

        live = chunk.anything_visible(visibility, s0, cols)
        if live is None:
            return compute()
        types = jax.eval_shape(compute)
        return jax.lax.cond(live, compute, lambda: {name: _zeros(type, operands) for name, type in types.items()})

    # Which axis of a gradient is that of queries, and which that of keys.
    axes = {"q": (-2, None), "k": (None, -1), "v": (None, -1)}
    if want_dbias:
        axes["bias"] = tuple(axis if bias.shape[axis] > 1 else None for axis in (-2, -1))

    def types(rows):
        return jax.eval_shape(functools.partial(block, rows=rows, cols=S), operands, 0, 0)

    # A part of a gradient is complete, and rounded, once its queries have met all keys or its block is all there is to
    # it. It is then written in place, once. Everything else is summed. So nothing is read back from what was written:
    # differentiated again, that would cost an array of the whole shape each time.
    def query_chunk(totals, t0, rows):
        state = {
            name: totals[name] if None not in axes[name] else _zeros(type, operands)
            for name, type in types(rows).items()
        }

        def key_chunk(state, s0, cols):
            step = jax.checkpoint(functools.partial(block, rows=rows, cols=cols), prevent_cse=False)
            parts = step(operands, jnp.int32(t0), jnp.int32(s0))
            updated = {}
            for name, part in parts.items():
                of_queries, of_keys = axes[name]
                if of_keys is None:
                    updated[name] = state[name] + part
                elif of_queries is None:
                    updated[name] = _put(state[name], part, {of_keys: s0})
                else:
                    updated[name] = _put(state[name], part.astype(bias.dtype), {of_queries: t0, of_keys: s0})
            return updated

        updated = {}
        for name, found in _walk(S, KEY_CHUNK, key_chunk, state).items():
            of_queries, of_keys = axes[name]
            if of_queries is None:
                updated[name] = totals[name] + found
            elif of_keys is None:
                updated[name] = _put(totals[name], found.astype(totals[name].dtype), {of_queries: t0})
            else:
                updated[name] = found
        return updated

    given = {"q": q, "k": k, "v": v, "bias": bias}
    totals = {
        name: _zeros(type, operands, None if axes[name][0] is None else given[name].dtype)
        for name, type in types(T).items()
    }
    totals = _walk(T, QUERY_CHUNK, query_chunk, totals)
    dq = jnp.moveaxis(totals["q"], axis + 2, axis).reshape(q.shape)
    dk, dv = (jnp.moveaxis(totals[name], -1, -3) for name in ("k", "v"))
    results = {"q": dq, "k": dk, "v": dv}
    if want_dbias:
        results["bias"] = totals["bias"].reshape(bias.shape)
    return tuple(x.astype(given[name].dtype) for name, x in results.items())
