"""Every implementation that a benchmark can run: those of jax_dma, and other attention functions for JAX.

A peer that is not installed, does not serve a workload or fails is reported as text; it never stops a run. Peers get
their operands in the form that they take (masks and biases repeated to all query heads, intervals made dense, a mask
replaced by a window argument where there is one), and in performance runs that conversion is not timed.
"""

import dataclasses
import fnmatch
import functools
import importlib
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jax_dma
from jax_dma.masks import KeyIntervals
from workloads import FORWARD, Operands, Workload, make


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute attention.

    Attributes:
      name: what tables and ``--implementations`` call it.
      ours: whether it belongs to jax_dma.
      refuses: (workload, pass) -> why it does not serve that, or None.
      prepare: (workload, operands) -> operands in the form that it takes, in differentiable JAX.
      call: (workload, prepared operands) -> (out, lse or None).
      lse_gradient: whether lse, if there is one, can be differentiated.
    """

    name: str
    ours: bool
    refuses: Callable[[Workload, str], str | None]
    prepare: Callable[[Workload, Operands], Operands]
    call: Callable[[Workload, Operands], tuple[jax.Array, jax.Array | None]]
    lse_gradient: bool = False


def forward_function(implementation, workload):
    """jitted (prepared operands, dout) -> out."""
    return jax.jit(lambda operands, dout: implementation.call(workload, operands)[0])


def training_function(implementation, workload):
    """jitted (prepared operands, dout) -> (out, dq, dk, dv[, dbias]): one forward and one backward pass."""

    def run(operands, dout):
        trained = {"q": operands.q, "k": operands.k, "v": operands.v}
        if operands.bias is not None:
            trained["bias"] = operands.bias
        out, vjp = jax.vjp(lambda x: implementation.call(workload, operands._replace(**x))[0], trained)
        return out, vjp(dout)[0]

    return jax.jit(run)


def timed_function(implementation, workload, which):
    """The function that a performance benchmark times for a pass."""
    return (forward_function if which == FORWARD else training_function)(implementation, workload)


def platform():
    """The default device's platform as jax_dma calls it: "cpu", "cuda" or another."""
    name = jax.default_backend()
    return "cuda" if name == "gpu" else name


def memory_limit():
    """Bytes that a benchmark may use on the default device."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats and platform() != "cpu":
        return 0.85 * stats["bytes_limit"]
    return 0.5 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _too_large(bytes_needed, what):
    limit = memory_limit()
    if bytes_needed > limit:
        return f"{what} would take {bytes_needed / 1e9:.0f} GB, and {limit / 1e9:.0f} GB are free"
    return None


def _holds_logits(w, which):
    """Refuses where [B, N, T, S] logits do not fit: float32 logits, weights, and their cotangents."""
    return _too_large(w.B * w.N * w.T * w.S * (10 if which == FORWARD else 20), "its [B, N, T, S] logits")


# --- jax_dma ---------------------------------------------------------------------------------------------------------


def _ours(name):
    def refuses(w, which):
        if name == "reference" and (reason := _holds_logits(w, which)):
            return reason
        try:
            jax.eval_shape(lambda: call(w, make(w, jax.random.key(0))))
        except (TypeError, ValueError) as error:
            return str(error)
        return None

    def call(w, x):
        return jax_dma.attention(
            x.q, x.k, x.v, x.mask, x.bias, is_causal=w.causal, return_lse=True, implementation=name
        )  # fmt: skip

    return Implementation(name, True, refuses, lambda w, x: x, call, lse_gradient=True)


# --- what several peers need -----------------------------------------------------------------------------------------


def _is_window(w):
    """Whether the mask can be said as a window argument: peers count windows from the start, so only for T == S."""
    return w.mask is not None and w.mask.kind == "window" and w.T == w.S and w.causal


def _needs_causal_mask(w):
    """jax.nn and tokamax align causal masks to the first query, jax_dma to the last: they differ where T != S."""
    return w.causal and w.T not in (1, w.S)


def _is_causal(w):
    return w.causal and w.T == w.S and w.T > 1


def _all_query_heads(w, x):
    return jnp.repeat(x, w.N // w.K, axis=1) if x.shape[1] == w.K != w.N else x


def _dense(w, x, full=False):
    """Operands with a dense mask and all query heads; ``full`` also spells out T and S of mask and bias."""
    mask, bias = x.mask, x.bias
    if _is_window(w):
        mask = None
    elif isinstance(mask, KeyIntervals):
        mask = mask.dense(w.T)
    if mask is not None:
        mask = _all_query_heads(w, mask)
    if _needs_causal_mask(w):
        causal = jax_dma.masks.causal(w.T, w.S).dense(w.T)
        mask = causal if mask is None else mask & causal
    if bias is not None:
        bias = _all_query_heads(w, bias)
    if full:
        mask, bias = (None if a is None else jnp.broadcast_to(a, a.shape[:2] + (w.T, w.S)) for a in (mask, bias))
    return x._replace(mask=mask, bias=bias)


def _window_arguments(w):
    return {"local_window_size": (int(w.mask.size) - 1, 0)} if _is_window(w) else {}


# --- peers -----------------------------------------------------------------------------------------------------------


def _jax_nn_xla():
    def refuses(w, which):
        return _one_head_dimension(w) or _holds_logits(w, which)

    def call(w, x):
        out, lse = jax.nn.dot_product_attention(
            x.q, x.k, x.v, bias=x.bias, mask=x.mask, is_causal=_is_causal(w), implementation="xla",
            return_residual=True, **_window_arguments(w),
        )  # fmt: skip
        # The residual comes in q's dtype; it can be compared with ours only where that is as precise.
        return out, lse if w.dtype == "float32" else None

    return Implementation("jax.nn-xla", False, refuses, _dense, call)


def _one_head_dimension(w):
    return None if w.H == w.Hv else f"it takes one head dimension, not H {w.H} and Hv {w.Hv}"


def _jax_nn_cudnn():
    def refuses(w, which):
        if reason := _one_head_dimension(w):
            return reason
        if w.dtype not in ("bfloat16", "float16"):
            return f"it takes bf16 and f16, not {w.dtype}"
        if w.H % 8 or w.H > 256:
            return f"it takes head dimensions up to 256 that are multiples of 8, not {w.H}"
        if (w.bias or w.mask) and which != FORWARD and (w.T % 2 or w.S % 2):
            return "with a bias it takes even lengths only in training"
        if not (w.bias or (w.mask and not _is_window(w))):
            return None
        heads = w.B * w.N if w.bias != "batch" else w.N
        copies = 2 if which == FORWARD else 3  # the bias, the bias with the mask in it, and its gradient
        return _too_large(copies * heads * w.T * w.S * 2, "a bias spelled out for all heads")

    def call(w, x):
        out = jax.nn.dot_product_attention(
            x.q, x.k, x.v, bias=x.bias, mask=x.mask, is_causal=_is_causal(w), implementation="cudnn",
            **_window_arguments(w),
        )  # fmt: skip
        return out, None

    return Implementation("jax.nn-cudnn", False, refuses, functools.partial(_dense, full=True), call)


def _tokamax(backend):
    tokamax = importlib.import_module("tokamax")

    def call(w, x):
        out = tokamax.dot_product_attention(
            x.q, x.k, x.v, bias=x.bias, mask=x.mask, is_causal=_is_causal(w), implementation=backend,
            **_window_arguments(w),
        )  # fmt: skip
        return out, None

    refuses = lambda w, which: None if w.dtype in ("bfloat16", "float16", "float32") else f"it does not take {w.dtype}"
    return Implementation(f"tokamax-{backend}", False, refuses, _dense, call)


def _fa4_jax():
    fa4_jax = importlib.import_module("fa4_jax")

    def refuses(w, which):
        if w.bias:
            return "it takes no bias"
        if w.mask is not None and w.mask.kind != "window":
            return f"it takes mask functions, not arrays: no {w.mask.kind} mask"
        return None if w.dtype in ("bfloat16", "float16") else f"it takes bf16 and f16, not {w.dtype}"

    def call(w, x):
        window = (int(w.mask.size) - 1, 0) if w.mask else None
        out, lse = fa4_jax.flash_attn(x.q, x.k, x.v, causal=w.causal, window_size=window, return_lse=True)
        return out, jnp.swapaxes(lse, 1, 2)

    return Implementation("fa4-jax", False, refuses, lambda w, x: x._replace(mask=None), call, lse_gradient=True)


def _pallas_mosaic_gpu():
    module = importlib.import_module("jax.experimental.pallas.ops.gpu.attention_mgpu")
    block_q = 64

    def refuses(w, which):
        if w.bias or w.mask:
            return "it takes no mask and no bias"
        if which != FORWARD and w.causal:
            return "its backward pass is not causal"
        if w.dtype not in ("bfloat16", "float16") or w.H % 64 or w.H != w.Hv or w.H > 128:
            return "it takes bf16 and f16 with head dimensions 64 and 128"
        if w.causal and w.T != w.S or w.T % (2 * block_q) or w.S % 128:
            return "it takes lengths that are multiples of its blocks"
        return None

    def prepare(w, x):  # it does not scale the logits
        return x._replace(q=x.q * jnp.asarray(w.H**-0.5, x.q.dtype))

    def call(w, x):
        backward = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64)
        config = module.TuningConfig(block_q, 128, max_concurrent_steps=2, causal=w.causal, **backward)
        return module.attention(x.q, x.k, x.v, config), None

    return Implementation("pallas-mosaic-gpu", False, refuses, prepare, call)


_PEERS = {
    "jax.nn-xla": (_jax_nn_xla, ("cpu", "cuda")),
    "jax.nn-cudnn": (_jax_nn_cudnn, ("cuda",)),
    "tokamax-mosaic": (functools.partial(_tokamax, "mosaic"), ("cuda",)),
    "tokamax-triton": (functools.partial(_tokamax, "triton"), ("cuda",)),
    "fa4-jax": (_fa4_jax, ("cuda",)),
    "pallas-mosaic-gpu": (_pallas_mosaic_gpu, ("cuda",)),
}
BASELINE = "jax.nn-xla"  # what accuracy is compared with


def implementations(patterns=("*",)):
    """(those that can run here, {name: why not} for the others), restricted to names that match a glob pattern."""
    found, missing = [], {}
    wanted = lambda name: any(fnmatch.fnmatchcase(name, p) for p in patterns)
    for name, text in jax_dma.status().items():
        if name == "cpu" and platform() != "cpu" and text == "available":
            text = f"the default device is {platform()}"
        if not wanted(name):
            continue
        if text == "available":
            found.append(_ours(name))
        else:
            missing[name] = text
    for name, (build, platforms) in _PEERS.items():
        if not wanted(name):
            continue
        if platform() not in platforms:
            missing[name] = f"it runs on {', '.join(platforms)}"
            continue
        try:
            found.append(build())
        except Exception as error:  # a peer that is absent or broken is a fact to report
            missing[name] = one_line(error)
    return found, missing


def one_line(error, length=160):
    """An exception as a short line of text."""
    text = " ".join(str(error).split()) or "no message"
    text = f"{type(error).__name__}: {text}"
    return text if len(text) <= length else text[: length - 3] + "..."
