"""The workloads: named attention problems, their random operands, and the arithmetic and traffic they cannot avoid.

Shared by the benchmarks and by whoever wants a realistic problem under a name. Letters as in :func:`jax_dma.attention`:
B batch, T queries, S keys, N query heads, K key/value heads, H head dimension of q and k, Hv of v.
"""

import dataclasses
import fnmatch
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_dma

TILE = 128  # block-sparse masks are made of TILE x TILE blocks

MASK_KINDS = ("window", "dense_top_k", "random", "block_sparse", "top_k", "padding")
BIAS_KINDS = ("key", "kv", "query", "batch", "one")
FORWARD, TRAINING = "forward", "forward+backward"


@dataclasses.dataclass(frozen=True)
class Mask:
    """A mask to be made.

    ``window``: KeyIntervals, each query sees the last ``size`` keys up to its own position.
    ``top_k``: KeyIntervals, the ``size`` highest-scored keys of each query, from one score per key.
    ``dense_top_k``: bool, the same from one score per (query, key).
    ``random``: bool, each position visible with probability ``size``.
    ``block_sparse``: bool, a fraction ``size`` of the 128 x 128 blocks that causality leaves is visible.
    ``padding``: bool ``[B, 1, 1, S]``, lengths between ``size * S`` and S.
    """

    kind: str
    size: float

    def __str__(self):
        return f"{self.kind}({self.size:g})"


@dataclasses.dataclass(frozen=True)
class Workload:
    """One attention problem. ``bias`` is one of BIAS_KINDS:

    ``key`` [B, K, 1, S], ``kv`` [B, K, T, S], ``query`` [B, N, T, S], ``batch`` [1, N, T, S] over the whole batch,
    ``one`` [1, 1, T, S].
    """

    name: str
    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    Hv: int
    dtype: str = "bfloat16"
    causal: bool = True
    mask: Mask | None = None
    bias: str | None = None
    groups: tuple[str, ...] = ()
    description: str = ""

    def __post_init__(self):
        assert self.mask is None or self.mask.kind in MASK_KINDS, self.mask
        assert self.bias is None or self.bias in BIAS_KINDS, self.bias
        assert self.N % self.K == 0, self

    def bias_shape(self):
        """Shape of the bias, or None."""
        B, T, S, N, K = self.B, self.T, self.S, self.N, self.K
        shapes = {
            "key": (B, K, 1, S), "kv": (B, K, T, S), "query": (B, N, T, S), "batch": (1, N, T, S), "one": (1, 1, T, S)
        }  # fmt: skip
        return shapes.get(self.bias)

    def pairs(self):
        """(query, key) pairs of one head whose logits must be computed.

        Causality, windows, top-k intervals and empty blocks are taken off. Unstructured dense masks (dense top-k,
        random, padding) are not: they leave no block of 128 x 128 empty.
        """
        seen = np.full(self.T, self.S)
        if self.causal:
            seen = np.clip(np.arange(self.T) + 1 + self.S - self.T, 0, self.S)
        if self.mask is not None and self.mask.kind in ("window", "top_k"):
            seen = np.minimum(seen, int(self.mask.size))
        total = int(seen.sum())
        return int(total * self.mask.size) if self.mask is not None and self.mask.kind == "block_sparse" else total

    def flops(self, which):
        """Floating-point operations: 2 (H + Hv) per pair and query head forward, 2.5 times that more backward."""
        forward = 2 * (self.H + self.Hv) * self.pairs() * self.N * self.B
        return forward * (1 if which == FORWARD else 3.5)

    def bytes(self, which):
        """The fewest bytes that device memory must move, each operand once (masks as bool; packed once made)."""
        size = jnp.dtype(self.dtype).itemsize
        q = self.B * self.T * self.N * self.H * size
        out = self.B * self.T * self.N * self.Hv * size
        kv = self.B * self.S * self.K * (self.H + self.Hv) * size
        needed = self.pairs() / max(1, self.T * self.S)  # of a [T, S] array
        part = lambda shape: math.prod(shape) * (needed if shape[-2] > 1 else 1)
        bias = part(self.bias_shape()) * size if self.bias else 0
        mask = part(self.mask_shape()) if self.mask and self.mask_shape() else 0
        forward = q + kv + out + bias + mask
        if which == FORWARD:
            return forward
        dbias = math.prod(self.bias_shape()) * size if self.bias else 0  # hidden positions are written too
        return forward + (q + kv + 2 * out + bias + mask / 8) + (q + kv + dbias)

    def mask_shape(self):
        """Shape of a dense mask, or None for KeyIntervals and no mask."""
        if self.mask is None or self.mask.kind in ("window", "top_k"):
            return None
        if self.mask.kind == "padding":
            return (self.B, 1, 1, self.S)
        if self.mask.kind == "dense_top_k" and self.bias is not None:
            return self.bias_shape()
        return (self.B, self.K, self.T, self.S)

    def limit_ms(self, device_kind, which):
        """Milliseconds below which no implementation can run on a device, or None for a device that is not listed."""
        peak = peaks(device_kind)
        if peak is None or self.dtype not in ("bfloat16", "float16"):
            return None
        return 1e3 * max(self.flops(which) / peak.flops, self.bytes(which) / peak.bytes)

    def shape_text(self):
        """The shape in one short line."""
        length = f"T{self.T}" if self.T == self.S else f"T{self.T} S{self.S}"
        head = f"H{self.H}" if self.H == self.Hv else f"H{self.H} Hv{self.Hv}"
        parts = [f"B{self.B} N{self.N} K{self.K} {length} {head} {self.dtype}", "causal" if self.causal else ""]
        parts.append(f"mask {self.mask}" if self.mask else "")
        parts.append(f"bias {self.bias} {list(self.bias_shape())}" if self.bias else "")
        return " ".join(x for x in parts if x)


class Peak(NamedTuple):
    """Dense bf16 rate and memory bandwidth of a device, per second, and where the numbers come from."""

    flops: float
    bytes: float
    source: str


_PEAKS = {
    "H200": Peak(790e12, 4.3e12, "measured: 8192^3 bf16 product and device-to-device copy"),
    "H100": Peak(989e12, 3.35e12, "data sheet, SXM"),
    "A100": Peak(312e12, 2.04e12, "data sheet, 80 GB SXM"),
}


def peaks(device_kind):
    """The Peak of a device by its name, or None."""
    return next((peak for name, peak in _PEAKS.items() if name in device_kind), None)


class Operands(NamedTuple):
    """What an implementation is called with; ``mask`` is a bool array, a KeyIntervals or None."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    mask: jax.Array | jax_dma.KeyIntervals | None
    bias: jax.Array | None


@functools.partial(jax.jit, static_argnums=0)
def make(workload, key):
    """Random operands, standard normal, with the mask made from them where its kind says so."""
    w = workload
    keys = jax.random.split(key, 6)
    normal = lambda i, *shape: jax.random.normal(keys[i], shape, jnp.dtype(w.dtype))
    q, k, v = normal(0, w.B, w.T, w.N, w.H), normal(1, w.B, w.S, w.K, w.H), normal(2, w.B, w.S, w.K, w.Hv)
    bias = normal(3, *w.bias_shape()) if w.bias else None
    return Operands(q, k, v, _make_mask(w, keys[4], bias), bias)


@functools.partial(jax.jit, static_argnums=0)
def cotangents(workload, key):
    """Random cotangents of out and of lse (float32)."""
    w = workload
    first, second = jax.random.split(key)
    dout = jax.random.normal(first, (w.B, w.T, w.N, w.Hv), jnp.dtype(w.dtype))
    return dout, jax.random.normal(second, (w.B, w.T, w.N), jnp.float32)


def has_dynamic_mask(workload):
    """Whether the mask is a function of the bias."""
    kind = workload.mask.kind if workload.mask else None
    return (kind == "dense_top_k" and workload.bias is not None) or (kind == "top_k" and workload.bias == "key")


def dynamic_mask(workload, bias):
    """The mask that a workload makes from its bias."""
    w, window = workload, int(workload.mask.size)
    if w.mask.kind == "top_k":
        return jax_dma.masks.top_k(bias[:, :, 0, :], window, w.T, is_causal=w.causal)
    return jax_dma.masks.dense_top_k(bias, window, is_causal=w.causal)


def _make_mask(w, key, bias):
    if w.mask is None:
        return None
    kind, size = w.mask.kind, w.mask.size
    if kind == "window":
        return jax_dma.masks.sliding_window(w.T, w.S, int(size) - 1)
    if has_dynamic_mask(w):
        return dynamic_mask(w, bias)
    if kind == "top_k":
        scores = jax.random.normal(key, (w.B, w.K, w.S), jnp.float32)
        return jax_dma.masks.top_k(scores, int(size), w.T, is_causal=w.causal)
    if kind == "dense_top_k":
        scores = jax.random.normal(key, w.mask_shape(), jnp.dtype(w.dtype))
        return jax_dma.masks.dense_top_k(scores, int(size), is_causal=w.causal)
    if kind == "random":
        # 16 random bits a position: a float32 draw would take four times the memory.
        return jax.random.bits(key, w.mask_shape(), jnp.uint16) < jnp.uint16(round(size * 65535))
    if kind == "padding":
        lengths = jax.random.randint(key, (w.B,), max(1, int(size * w.S)), w.S + 1)
        return (jnp.arange(w.S) < lengths[:, None])[:, None, None, :]
    return _block_sparse(w, key, size)


def _block_sparse(w, key, fraction):
    """For each query block its own (diagonal) key block, and others at random until ``fraction`` of them is visible."""
    rows, columns = -(-w.T // TILE), -(-w.S // TILE)
    last_query = np.minimum((np.arange(rows) + 1) * TILE, w.T) - 1
    own = np.clip((last_query + w.S - w.T) // TILE, 0, columns - 1)
    allowed = own + 1 if w.causal else np.full(rows, columns)
    keep = np.maximum(1, np.round(fraction * allowed)).astype(np.int32)
    index = jnp.arange(columns)
    score = jax.random.uniform(key, (w.B, w.K, rows, columns))
    score = jnp.where(index == own[:, None], 2.0, score)
    score = jnp.where(index < allowed[:, None], score, -1.0)
    order = jnp.argsort(jnp.argsort(-score, axis=-1), axis=-1)
    blocks = order < keep[:, None]
    return jnp.repeat(jnp.repeat(blocks, TILE, axis=-2), TILE, axis=-1)[..., : w.T, : w.S]


def _workload(name, T, *, S=None, B=1, N=32, K=8, H=128, Hv=None, **rest):
    return Workload(name=name, B=B, T=T, S=T if S is None else S, N=N, K=K, H=H, Hv=H if Hv is None else Hv, **rest)


def _headline():
    """The problems that the project is judged by, on a GPU."""
    gpu = ("gpu",)
    top_k = Mask("dense_top_k", 1024)
    kv, query = "dynamic mask, K heads of scores", "dynamic mask, N heads of scores"
    yield _workload("A", 8192, groups=gpu, description="plain causal attention")
    yield _workload("A_bias_key", 8192, bias="key", groups=gpu, description="one trainable bias per key")
    yield _workload("A_mask_bias_kv", 8192, mask=top_k, bias="kv", groups=gpu, description=kv)
    yield _workload("A_mask_bias_query", 8192, mask=top_k, bias="query", groups=gpu, description=query)
    yield _workload("A_window", 8192, mask=Mask("window", 1024), groups=gpu, description="sliding window of 1024 keys")
    yield _workload("A_H64", 8192, H=64, groups=gpu, description="A with half the head dimension")
    yield _workload("A_H64_mask_bias_kv", 8192, H=64, mask=top_k, bias="kv", groups=gpu, description=kv)
    yield _workload("A_H256", 8192, N=16, K=4, H=256, groups=gpu, description="A with twice the head dimension")
    yield _workload("A_bias_kv", 8192, bias="kv", groups=("more",), description="bias without mask")
    yield _workload("A_mask_kv", 8192, mask=top_k, groups=("more",), description="mask without bias")
    for T in (16384, 32768):
        yield _workload(f"C_{T}", T, N=2, K=1, H=64, mask=top_k, bias="kv", groups=gpu,
                        description="few heads, dynamic mask")  # fmt: skip
    for length, H in ((384, 32), (768, 64)):
        yield _workload(f"E_{length}", length, B=length, N=4, K=4, H=H, causal=False, mask=Mask("padding", 0.9),
                        bias="batch", groups=gpu, description="pair-bias (triangle) attention")  # fmt: skip
    yield _workload("A_dense_mask_bias", 8192, mask=Mask("random", 0.5), bias="kv", groups=("gpu", "sparsity"),
                    description="no block is empty: what A_blocks would cost without skipping")  # fmt: skip
    for percent in (50, 75, 90, 95):
        groups = ("gpu", "sparsity") if percent == 90 else ("sparsity",)
        yield _workload(f"A_blocks_{percent}", 8192, mask=Mask("block_sparse", (100 - percent) / 100), bias="kv",
                        groups=groups, description=f"{percent} % of the 128 x 128 blocks are empty")  # fmt: skip
    for T in (1024, 2048, 4096, 16384, 32768):
        yield _workload(f"A_T{T}", T, groups=("length",), description="A at another length")
    for T in (32768, 131072):
        yield _workload(f"D_{T}", T, mask=Mask("top_k", 2048), bias="key", groups=("long",),
                        description="long context, dynamic mask from one score per key")  # fmt: skip
    for S in (131072, 524288):
        for B in (1, 8):
            yield _workload(f"decode_B{B}_S{S}", 1, S=S, B=B, groups=("decode",), description="one query per sequence")


def _original():
    """What the original dynamic-mask attention's own benchmarks measure: N 2, K 1, top-1024, bias [1, 1, T, T]."""

    def config(name, T, H=128, window=1024, **rest):
        mask = Mask("dense_top_k", window)
        return _workload(f"original_{name}", T, N=2, K=1, H=H, mask=mask, bias="kv", groups=("original",), **rest)

    for power in range(8, 16):
        yield config(f"T{2**power}", 2**power, description="length")
    for H in (32, 64, 96, 128, 192, 256):
        yield config(f"H{H}", 4096, H=H, description="head dimension")
    for power in range(5, 16):
        yield config(f"W{2**power}", 32768, window=2**power, description="window")
    for power in range(8, 20):
        yield config(f"decode_S{2**power}", 1, S=2**power, description="one query")


def _cpu():
    """float32 problems for the host kernels."""
    shape = dict(N=8, K=2, H=64, dtype="float32")
    yield _workload("cpu_2048", 2048, **shape, groups=("cpu",), description="plain causal attention")
    yield _workload("cpu_2048_window", 2048, **shape, mask=Mask("window", 256), groups=("cpu",),
                    description="sliding window of 256 keys")  # fmt: skip
    yield _workload("cpu_2048_mask_bias", 2048, **shape, mask=Mask("dense_top_k", 256), bias="kv", groups=("cpu",),
                    description="dynamic mask and bias")  # fmt: skip
    yield _workload("cpu_32768_window", 32768, **shape, mask=Mask("window", 512), groups=("cpu_long",),
                    description="long context, sliding window of 512 keys")  # fmt: skip


def _equivalence():
    """Small problems that cover every kind of mask and bias; each exists in three dtypes."""
    cases = {
        "causal": dict(T=192, N=4, K=2),
        "plain": dict(T=130, B=2, N=2, K=2, H=40, Hv=24, causal=False),
        "key_bias": dict(T=160, N=6, K=2, bias="key"),
        "mask_bias_kv": dict(T=256, N=4, K=1, mask=Mask("dense_top_k", 48), bias="kv"),
        "mask_bias_query": dict(T=200, B=2, N=4, K=2, H=32, mask=Mask("random", 0.5), bias="query"),
        "pair_bias": dict(T=72, B=6, N=4, K=4, H=32, causal=False, mask=Mask("padding", 0.5), bias="batch"),
        "one_bias": dict(T=96, S=160, B=2, N=4, K=2, bias="one"),
        "window": dict(T=300, S=333, N=4, K=2, mask=Mask("window", 50)),
        "top_k": dict(T=256, B=2, N=4, K=2, mask=Mask("top_k", 40), bias="key"),
        "blocks": dict(T=512, N=4, K=2, H=128, mask=Mask("block_sparse", 0.4), bias="kv"),
        "decode": dict(T=1, S=700, B=2, N=8, K=2, mask=Mask("dense_top_k", 100), bias="kv"),
    }
    for dtype in ("float32", "bfloat16", "float16"):
        for name, case in cases.items():
            yield _workload(f"eq_{name}_{dtype}", **{"H": 64, **case}, dtype=dtype, groups=("equivalence",))
    for dtype in ("bfloat16", "float16"):  # long enough for several tiles in flight
        yield _workload(f"eq_large_{dtype}", 1536, N=8, K=2, mask=Mask("dense_top_k", 256), bias="kv", dtype=dtype,
                        groups=("equivalence_large",))  # fmt: skip


def _quick():
    """Small enough for a smoke test anywhere."""
    shape = dict(N=4, K=2, H=64)
    for dtype in ("float32", "bfloat16"):
        groups = ("quick",)
        yield _workload(f"quick_causal_{dtype}", 256, **shape, dtype=dtype, groups=groups)
        yield _workload(f"quick_window_{dtype}", 256, **shape, dtype=dtype, mask=Mask("window", 64), groups=groups)
        yield _workload(f"quick_mask_bias_{dtype}", 256, **shape, dtype=dtype, mask=Mask("dense_top_k", 64), bias="kv",
                        groups=groups)  # fmt: skip


WORKLOADS = {w.name: w for w in (*_headline(), *_original(), *_cpu(), *_equivalence(), *_quick())}


def select(patterns=(), groups=()):
    """The workloads whose name matches any of the glob patterns or that belong to any of the groups, in list order."""
    chosen = [
        w for w in WORKLOADS.values()
        if any(fnmatch.fnmatchcase(w.name, p) for p in patterns) or set(groups) & set(w.groups)
    ]  # fmt: skip
    if not chosen:
        known = sorted({g for w in WORKLOADS.values() for g in w.groups})
        wanted = f"no workload matches {list(patterns)} or is in the groups {list(groups)}"
        raise ValueError(f"{wanted}; groups: {', '.join(known)}")
    return chosen
