"""Attention in plain JAX, chunk by chunk: O(T + S) memory, any order of differentiation, any platform.

Queries are walked in chunks; for each, keys are walked in chunks with the usual running maximum, and chunks in which
nothing is visible are skipped. Each chunk is a ``jax.checkpoint``, so its derivative recomputes it instead of keeping
[T, S] arrays. The running maximum is a constant to the derivative (any constant gives the same result), which leaves
sums that are linear in what a chunk adds.
"""

import functools

import jax
import jax.numpy as jnp

from jax_dma.reference import HIDE_BELOW, compute_dtype
from jax_dma.tiles import KEY_TILE, Visibility, unpack_bits

QUERY_CHUNK = 256
KEY_CHUNK = 4 * KEY_TILE  # a multiple of 32, so that chunks begin at a word of mask bits


def attention(q, k, v, visibility, bias, *, causal, scale, softcap):
    """out [*batch, T, N, Hv] and lse [*batch, T, N].

    Args:
      q, k, v: [*batch|1, T, N, H], [*batch|1, S, K, H], [*batch|1, S, K, Hv].
      visibility: a :class:`jax_dma.plan.Visibility`.
      bias: [*batch|1, N|K|1, T|1, S|1] or None.
      causal: whether s > t + (S - T) is hidden.
      scale, softcap: floats; softcap 0 means none.
    """
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

        def key_chunk(state, s0, cols):
            return chunk.absorb(state, k, v, visibility, bias, s0, cols)

        m, total, out = _walk(S, KEY_CHUNK, key_chunk, state)
        empty = total == 0
        total = jnp.where(empty, 1, total)
        out = jnp.where(empty[..., None], 0, out / total[..., None])
        lse = jnp.where(empty, -jnp.inf, jnp.where(empty, 0, m) + jnp.log(total))
        return out.astype(q.dtype), lse

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
    out, lse = jnp.concatenate(outs, -2), jnp.concatenate(lses, -1)
    ungroup = lambda x, axis: x.reshape(x.shape[: axis - 1] + (N,) + x.shape[axis + 1 :])
    out = ungroup(jnp.moveaxis(out, -2, len(batch)), len(batch) + 2)
    lse = ungroup(jnp.moveaxis(lse, -1, len(batch)), len(batch) + 2)
    return out, lse


def _walk(length, size, body, state):
    """``body(state, start, extent)`` over consecutive chunks: a scan over whole ones, then the rest."""
    whole = length // size if length > size else 0
    if whole:
        step = jax.checkpoint(lambda state, start: body(state, start, size), prevent_cse=False)
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


def _vary_like(x, operands):
    """x, typed as varying over the mesh axes that any operand varies over (see ``attention._align_varying``)."""
    from jax_dma.mesh import varying_axes, vary_over

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
        logits = self.scale * _matmul(self.q, jnp.swapaxes(k, -1, -2)[..., None, :, :], self.dtype)
        if self.softcap:
            logits = self.softcap * jnp.tanh(logits / self.softcap)
        hidden = self.hidden(visibility, s0, cols)
        if bias is not None:
            bias = _take(_take(self.grouped(bias, 2), -2, self.t0, self.rows), -1, s0, cols).astype(self.dtype)
            low = bias <= HIDE_BELOW
            hidden = low if hidden is None else hidden | low
            logits = logits + jnp.where(hidden, 0, bias)
        if hidden is not None:
            logits = jnp.where(hidden, -jnp.inf, logits)
        new_m = jax.lax.stop_gradient(jnp.maximum(m, logits.max(-1)))
        shift = jnp.where(new_m == -jnp.inf, 0, new_m)
        weights = jnp.exp(logits - shift[..., None])
        rescale = jax.lax.stop_gradient(jnp.exp(m - shift))
        total = total * rescale + weights.sum(-1)
        out = out * rescale[..., None] + _matmul(weights.astype(v.dtype), v[..., None, :, :], self.dtype)
        return new_m, total, out

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
            start, end = (_take(self.grouped(x, 1), -1, s0, cols)[..., None, :] for x in (visibility.start, visibility.end))
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


def attention_vjp(q, k, v, visibility, bias, dout, dlse, *, want_dbias, causal, scale, softcap):
    """(dq, dk, dv[, dbias]) for cotangents of out and lse; the derivative of :func:`attention`."""
    run = functools.partial(attention, causal=causal, scale=scale, softcap=softcap)
    if want_dbias:
        _, vjp = jax.vjp(lambda q, k, v, bias: run(q, k, v, visibility, bias), q, k, v, bias)
    else:
        _, vjp = jax.vjp(lambda q, k, v: run(q, k, v, visibility, bias), q, k, v)
    return vjp((dout, dlse))


__all__ = ["attention", "attention_vjp", "Visibility"]
