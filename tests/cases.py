"""Small attention problems: their shapes, what broadcasts in them, and random inputs for them.

A mask or bias is described by a pattern of four letters, one per axis: batch ``B`` or ``1``, heads ``N``, ``K`` or
``1``, queries ``T`` or ``1``, keys ``S`` or ``1``. ``"1KTS"`` is [1, K, T, S]. A mask pattern of two letters, such as
``"BK"``, stands for key intervals of shape [B, K, S].
"""

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import jax_dma

PATTERNS = ["".join(p) for p in itertools.product("B1", "NK1", "T1", "S1")]
INTERVAL_PATTERNS = ["".join(p) for p in itertools.product("B1", "NK1")]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of attention. ``plan``: the dense mask is passed as a MaskPlan."""

    batch: tuple[int, ...] = (2,)
    T: int = 75
    S: int = 141
    N: int = 6
    K: int = 2
    H: int = 24
    Hv: int | None = None
    dtype: str = "float32"
    mask: str | None = None
    bias: str | None = None
    bias_dtype: str | None = None
    is_causal: bool = False
    scale: float | None = None
    softcap: float | None = None
    plan: bool = False

    def with_(self, **changes):
        return dataclasses.replace(self, **changes)

    def shape(self, pattern):
        """The shape that a pattern stands for."""
        sizes = {"N": self.N, "K": self.K, "T": self.T, "S": self.S, "1": 1}
        batch = self.batch if pattern[0] == "B" else (1,) * len(self.batch)
        return (
            (*batch, *(sizes[letter] for letter in pattern[1:]))
            if len(pattern) == 4
            else (*batch, sizes[pattern[1]], self.S)
        )

    @property
    def options(self):
        """The keyword options of jax_dma.attention."""
        return dict(is_causal=self.is_causal, scale=self.scale, logits_soft_cap=self.softcap)

    @property
    def oracle_options(self):
        return dict(is_causal=self.is_causal, scale=self.scale, softcap=self.softcap)


class Inputs(NamedTuple):
    """NumPy arrays; mask is a bool array or a pair (start, end)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: Any
    bias: np.ndarray | None
    dout: np.ndarray
    dlse: np.ndarray


def dtype_of(name):
    return np.dtype(jnp.dtype(name))


def make(case, seed=0):
    """Random inputs. A mask that varies over queries has rows that see nothing; the cotangents are never zero."""
    rng = np.random.default_rng(seed)
    dtype = dtype_of(case.dtype)
    lse_dtype = np.float64 if case.dtype == "float64" else np.float32
    normal = lambda *shape: rng.standard_normal(shape)
    Hv = case.H if case.Hv is None else case.Hv
    q, k, v, dout = (
        normal(*case.batch, *shape).astype(dtype)
        for shape in ((case.T, case.N, case.H), (case.S, case.K, case.H), (case.S, case.K, Hv), (case.T, case.N, Hv))
    )
    dlse = normal(*case.batch, case.T, case.N).astype(lse_dtype)
    bias = None
    if case.bias is not None:
        bias = (1.5 * normal(*case.shape(case.bias))).astype(dtype_of(case.bias_dtype or case.dtype))
    return Inputs(q, k, v, make_mask(case, rng), bias, dout, dlse)


def make_mask(case, rng):
    if case.mask is None:
        return None
    shape = case.shape(case.mask)
    if len(case.mask) == 2:  # some intervals empty, some reaching past the queries at either end
        start = rng.integers(-case.T // 4 - 2, case.T + 1, shape, dtype=np.int32)
        return start, start + rng.integers(-2, case.T + 2, shape, dtype=np.int32)
    mask = rng.random(shape) < 0.6
    if case.mask[2] == "T" and case.T:
        mask[..., case.T // 2, :] = False
    return mask


def as_jax_mask(mask, case=None):
    """What jax_dma.attention takes for a mask of Inputs."""
    if isinstance(mask, tuple):
        return jax_dma.KeyIntervals(*map(jnp.asarray, mask))
    if mask is not None and case is not None and case.plan:
        q = np.empty((*case.batch, case.T, case.N, 1), bool)
        return jax_dma.plan(jnp.asarray(mask), q, np.empty((*case.batch, case.S, case.K, 1), bool))
    return mask


def hidden_everywhere(case, inputs):
    """Which elements of bias are hidden from every row that they are added to: bool of bias's shape."""
    batch, heads = case.batch, case.N
    seen = np.ones((*batch, heads, case.T, case.S), bool)
    if isinstance(inputs.mask, tuple):
        t = np.arange(case.T)[:, None]
        start, end = (per_query_head(case, x)[..., None, :] for x in inputs.mask)
        seen &= (start <= t) & (t < end)
    elif inputs.mask is not None:
        seen &= per_query_head(case, inputs.mask)
    if case.is_causal:
        seen &= np.tri(case.T, case.S, case.S - case.T, dtype=bool)
    rank = len(batch)
    shape = inputs.bias.shape
    if shape[rank] == case.K != case.N:
        seen = seen.reshape(*batch, case.K, case.N // case.K, case.T, case.S).any(rank + 1)
    axes = tuple(i for i, size in enumerate(shape) if size == 1)
    return ~np.broadcast_to(seen.any(axes, keepdims=True), shape)


def per_query_head(case, x):
    axis = len(case.batch)
    return np.repeat(x, case.N // case.K, axis) if x.shape[axis] == case.K else x


def poison(case, inputs):
    """The inputs, with NaN, infinities and finfo.min in bias wherever it is hidden anyway."""
    hidden = hidden_everywhere(case, inputs)
    finfo = jnp.finfo(inputs.bias.dtype)
    poisons = np.array([np.nan, np.inf, -np.inf, float(finfo.min), float(finfo.max)])
    chosen = poisons[np.arange(hidden.size).reshape(hidden.shape) % len(poisons)].astype(inputs.bias.dtype)
    return inputs._replace(bias=np.where(hidden, chosen, inputs.bias))


# Named problems, each the essence of a fault that another library shipped (the numbers are the kinds of CASES.md), or
# a path through the code that random small shapes do not reach.
NAMED = {
    "plain": Case(),
    "key_padding_mask (1)": Case((4,), 32, 32, 4, 4, 16, dtype="bfloat16", mask="B11S"),
    "f32_bias_over_bf16 (2)": Case((8,), 128, 128, 4, 4, 32, dtype="bfloat16", bias="1NTS", bias_dtype="float32"),
    "bias_per_key_and_kv_head": Case(bias="BK1S", dtype="bfloat16", is_causal=True),
    "cross_lengths_window_only (8)": Case((1,), 256, 288, 2, 2, 16, mask="1K"),
    "192_keys (11)": Case((1,), 192, 192, 2, 1, 32, bias="1NTS"),
    "4092_queries (11)": Case((1,), 4092, 70, 1, 1, 8, bias="11TS", is_causal=True),
    "4095_keys_f16_bias (11)": Case((1,), 40, 4095, 2, 1, 16, dtype="float16", bias="1NTS", mask="11TS"),
    "more_keys_causal (12)": Case(T=40, S=300, is_causal=True, bias="1KTS"),
    "more_queries_causal (12)": Case(T=290, S=130, is_causal=True, bias="B1TS"),
    "mask_and_causal (13)": Case(T=150, S=150, mask="1NTS", is_causal=True),
    "intervals_and_causal (13)": Case(T=150, S=170, mask="BN", is_causal=True, bias="11TS"),
    "plan_and_causal (13)": Case(T=150, S=150, mask="BKTS", is_causal=True, plan=True, bias="B11S"),
    "query_varying_mask (18)": Case(mask="B1TS"),
    "query_mask (18)": Case(mask="11T1"),
    "wide_group (20)": Case((1,), 40, 200, 32, 2, 16, bias="1N1S", mask="1KTS"),
    "one_kv_head": Case((1,), 33, 140, 24, 1, 16, bias="1KTS", is_causal=True),
    "group_of_128": Case((1,), 5, 130, 128, 1, 8, bias="1NT1", mask="1NTS"),
    "softcap (24)": Case(softcap=1.5, bias="BNTS", mask="B1TS", scale=0.7),
    "softcap_bf16 (24)": Case(softcap=20.0, bias="1N1S", dtype="bfloat16", is_causal=True, S=75),
    "softcap_bias_of_odd_rows (24)": Case(
        (1,), 200, 301, 8, 2, 128, dtype="bfloat16", bias="1KTS", is_causal=True, softcap=3.0
    ),
    "negative_scale": Case(scale=-0.3, bias="11TS"),
    "zero_scale": Case(scale=0.0, bias="1NTS"),
    "decode_grouped (25)": Case((3,), 1, 300, 8, 2, 32, mask="B11S", bias="BK1S"),
    "decode_grouped_full_mask (25)": Case((3,), 1, 300, 8, 2, 32, mask="BN1S", bias="1NTS", is_causal=True),
    "decode_intervals (25)": Case((3,), 1, 300, 8, 2, 32, mask="BK", bias="B11S", dtype="bfloat16"),
    "one_key": Case(T=70, S=1, mask="BNTS", bias="1KTS"),
    "one_of_each": Case((1,), 1, 1, 1, 1, 1, bias="1NTS"),
    "many_chunks": Case((1,), 700, 1300, 2, 1, 16, mask="1NTS", bias="1KTS", dtype="bfloat16"),
    "many_chunks_intervals": Case((1,), 600, 1100, 4, 2, 16, mask="1K", bias="111S", is_causal=True),
    "many_key_tiles": Case((1,), 20, 128 * 33 + 5, 2, 1, 8, mask="11TS", plan=True),
    "no_batch_axis": Case((), mask="1KTS", bias="1N1S", is_causal=True),
    "two_batch_axes": Case((2, 3), 30, 40, 4, 2, 8, mask="BKTS", bias="1NTS"),
    "three_batch_axes": Case((2, 1, 3), 30, 40, 4, 2, 8, mask="BN", bias="B1TS"),
}
