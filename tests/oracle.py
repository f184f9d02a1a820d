"""What attention means, in float64 NumPy and one (batch, head) pair at a time: the judge of every implementation.

Written from the definition alone and sharing no code with ``jax_dma``: masks are given as a bool array or as a pair
(start, end) of integer arrays, and the gradients are closed formulas, not automatic differentiation.
"""

from typing import NamedTuple

import numpy as np

HIDE_BELOW = -1e30


class Results(NamedTuple):
    """Values, and the gradients for cotangents dout and dlse, None if there were none (dbias also without bias)."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray | None = None
    dk: np.ndarray | None = None
    dv: np.ndarray | None = None
    dbias: np.ndarray | None = None
    dbias_norm: float = 0.0  # the Frobenius norm of dbias before it was summed over broadcast axes


def attention(q, k, v, mask=None, bias=None, *, is_causal=False, scale=None, softcap=None, dout=None, dlse=None):
    """Attention of q [*batch, T, N, H], k [*batch, S, K, H] and v [*batch, S, K, Hv].

    Args:
      q, k, v: float arrays of any precision.
      mask: None, a bool array [*batch|1, N|K|1, T|1, S|1], or (start, end), int arrays [*batch|1, N|K|1, S].
      bias: None or a float array [*batch|1, N|K|1, T|1, S|1].
      dout, dlse: cotangents [*batch, T, N, Hv] and [*batch, T, N]; None for values only.
    """
    q, k, v, bias, dout, dlse = (
        None if x is None else np.asarray(x).astype(np.float64) for x in (q, k, v, bias, dout, dlse)
    )
    *batch, T, N, H = q.shape
    S, K, Hv = v.shape[-3:]
    scale = H**-0.5 if scale is None else scale
    want = dout is not None
    out, lse = np.zeros((*batch, T, N, Hv)), np.full((*batch, T, N), -np.inf)
    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    dbias = None if bias is None else np.zeros_like(bias)
    square = 0.0

    for b in np.ndindex(*batch):
        for n in range(N):
            kv = n // (N // K)
            seen = visible(mask, b, n, N, K, T, S)
            if is_causal:
                seen = seen & (np.arange(S)[None, :] <= np.arange(T)[:, None] + (S - T))
            if bias is not None:
                where = entry(bias, len(batch), b, n, N, K)
                added = np.broadcast_to(bias[where], (T, S))
                seen = seen & ~(added <= HIDE_BELOW)
            rows = seen.any(-1)
            raw = scale * (q[b][:, n] @ k[b][:, kv].T)
            logits = raw if softcap is None else softcap * np.tanh(raw / softcap)
            if bias is not None:
                logits = logits + np.where(seen, added, 0.0)
            logits = np.where(seen, logits, -np.inf)
            top = np.where(rows, logits.max(-1, initial=-np.inf), 0.0)
            weights = np.exp(logits - top[:, None])
            total = np.where(rows, weights.sum(-1), 1.0)
            p = weights / total[:, None]
            out[b][:, n] = p @ v[b][:, kv]
            lse[b][:, n] = np.where(rows, top + np.log(total), -np.inf)
            if not want:
                continue
            do = np.where(rows[:, None], dout[b][:, n], 0.0)
            dl = np.where(rows, dlse[b][:, n], 0.0)
            dp = do @ v[b][:, kv].T
            ds = p * (dp - (p * dp).sum(-1, keepdims=True) + dl[:, None])
            if bias is not None:
                summed = ds
                for axis in (0, 1):
                    if bias.shape[len(batch) + 1 + axis] == 1:
                        summed = summed.sum(axis, keepdims=True)
                dbias[where] += summed
                square += (ds**2).sum()
            draw = ds if softcap is None else ds * (1 - np.tanh(raw / softcap) ** 2)
            dq[b][:, n] = scale * (draw @ k[b][:, kv])
            dk[b][:, kv] += scale * (draw.T @ q[b][:, n])
            dv[b][:, kv] += p.T @ do
    if not want:
        return Results(out, lse)
    return Results(out, lse, dq, dk, dv, dbias, float(np.sqrt(square)))


def entry(x, batch_rank, b, n, N, K):
    """The index of the pair (batch b, query head n) in an array with axes [*batch|1, N|K|1, ...]."""
    heads = x.shape[batch_rank]
    head = {N: n, K: n // (N // K), 1: 0}[heads] if heads != 1 else 0
    return tuple(0 if size == 1 else i for size, i in zip(x.shape, b)) + (head,)


def visible(mask, b, n, N, K, T, S):
    """The bool array [T, S] of what query head n of batch entry b sees by the mask alone."""
    if mask is None:
        return np.ones((T, S), bool)
    if isinstance(mask, tuple):
        start, end = (np.asarray(x)[entry(x, len(b), b, n, N, K)] for x in mask)
        t = np.arange(T)[:, None]
        return (start[None, :] <= t) & (t < end[None, :])
    mask = np.asarray(mask)
    return np.broadcast_to(mask[entry(mask, len(b), b, n, N, K)], (T, S))
