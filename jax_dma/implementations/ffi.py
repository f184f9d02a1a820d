"""The compiled kernels: loading and registering them, which calls they serve, and the custom calls themselves."""

import functools
import importlib
import math
import re
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jax_dma.tiles import KEY_TILE, TILE_ROWS, analyse, queries_per_tile

_XLA_PLATFORM = {"cpu": "cpu", "cuda": "CUDA"}
_KERNEL_DTYPES = {"cpu": ("float32", "bfloat16", "float16"), "cuda": ("bfloat16", "float16")}
MAX_HEAD_DIM = 256
MAX_BATCH_AXES = 6  # xla_ffi/common/problem.h


def runtime_api_version():
    """(major, minor) of the FFI that the installed jaxlib speaks, from the header that it ships."""
    header = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    return tuple(int(re.search(rf"#define XLA_FFI_API_{part}\s+(\d+)", header)[1]) for part in ("MAJOR", "MINOR"))


def refuse_newer(built, runtime):
    """Why kernels built for one FFI version cannot be registered with another, or None.

    A handler with a newer minor version than the runtime's takes the whole backend down when it initialises.
    """
    if built[0] != runtime[0] or built[1] > runtime[1]:
        return (
            f"its kernels were built for XLA FFI {built[0]}.{built[1]}, but the installed jaxlib "
            f"{jax.lib.__version__} speaks {runtime[0]}.{runtime[1]}; reinstall jax_dma so that it is built against "
            "this jaxlib (or upgrade jaxlib)"
        )
    return None


@functools.cache
def load(name):
    """Imports and registers the compiled module of an implementation. None, or why it is unavailable."""
    try:
        module = importlib.import_module(f"jax_dma._{name}")
    except ImportError as error:
        if find_spec("jax_dma._build") is None:
            return (
                "its kernels are not built in this source folder: `pip install .` in it, then start Python in another "
                f"folder ({error})"
            )
        built = {"cpu": "a C++ compiler", "cuda": "nvcc (set JAX_DMA_CUDA_ARCHS, for example to 90a)"}[name]
        return f"its kernels were not built with this installation: install from source with {built} ({error})"
    refusal = refuse_newer(module.ffi_api_version(), runtime_api_version())
    if refusal is None:
        for target, handler in module.registrations().items():
            jax.ffi.register_ffi_target(target, handler, platform=_XLA_PLATFORM[name])
    return refusal


def unsupported(name, call, q, k, v, bias):
    """Why compiled kernels cannot serve a call with such operands (arrays or their types), or None."""
    dtypes = _KERNEL_DTYPES[name]
    if q.dtype.name not in dtypes:
        return f"it computes in {', '.join(dtypes)}, and q is {q.dtype}"
    if bias is not None and bias.dtype.name not in ("float32", "bfloat16", "float16"):
        return f"it takes a bias in float32, bfloat16 or float16, not {bias.dtype}"
    H, Hv = q.shape[-1], v.shape[-1]
    if max(H, Hv) > MAX_HEAD_DIM:
        return f"it serves head dimensions up to {MAX_HEAD_DIM}, and H is {H}, Hv {Hv}"
    if len(q.shape) - 3 > MAX_BATCH_AXES:
        found = len(q.shape) - 3
        return f"it takes at most {MAX_BATCH_AXES} batch axes (vmap included), and q has {found}; reshape them together"
    if name == "cuda":
        group, limit = q.shape[-2] // k.shape[-2], 64 if max(H, Hv) <= 128 else 32
        if group > limit:
            return f"it serves up to {limit} query heads per key head at this head dimension, and G is {group}"
    return None


def _config(call):
    return dict(
        has_bits=np.int64(call.visibility[0]),
        has_intervals=np.int64(call.visibility[3]),
        has_bias=np.int64(call.has_bias),
        causal=np.int64(call.causal),
        want_dbias=np.int64(call.want_dbias),
        deterministic=np.int64(call.deterministic),
        scale=np.float32(call.scale),
        softcap=np.float32(call.softcap),
    )


def result_type(shape, dtype, like):
    """The type of a result, varying over the mesh axes of ``like``."""
    aval = jax.typeof(like)
    if aval.sharding.mesh.empty:
        return jax.ShapeDtypeStruct(shape, dtype)
    # A lowering is traced outside the mesh that the axes belong to, so the type has to bring it along.
    sharding = aval.sharding.update(spec=jax.sharding.PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=aval.manual_axis_type)


def custom_call(name, results, *operands, **attributes):
    """The results, of the given (shape, dtype)s, of a CUDA kernel that takes these arrays and integers."""
    results = [result_type(shape, dtype, operands[0]) for shape, dtype in results]
    return jax.ffi.ffi_call(f"jax_dma_{name}", results)(*operands, **{n: np.int64(x) for n, x in attributes.items()})


def _pad_channels(name, x):
    """Rows of a multiple of 16 bytes, which the CUDA kernels load whole; other head dimensions are copied once."""
    pad = -x.shape[-1] % 8 if name == "cuda" else 0
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)]) if pad else x


def _kernel_head_dim(H, Hv):
    """The head dimension that the CUDA kernels are compiled for (xla_ffi/cuda/sm80/launch.h)."""
    return next(n for n in (64, 128, 256) if max(H, Hv) <= n)


def plan(mask, T, S, N, K, causal):
    """The analysis of a dense mask [*batch, N|K|1, T, S] by the CUDA kernel; see :func:`jax_dma.tiles.analyse`.

    Under ``causal`` tiles that the rule hides altogether are not read: they count as hidden, and their bits may be
    anything.
    """
    types = jax.eval_shape(lambda mask: analyse(mask, T, S, N, K), jax.ShapeDtypeStruct(mask.shape, jnp.bool_))
    return custom_call("plan", [(x.shape, x.dtype) for x in types], mask, num_heads=N, num_kv_heads=K, causal=causal)


def forward(name, *operands, call):
    """out and lse by the kernels of an implementation."""
    q, k, v, visibility, bias, _ = call.unflatten(operands)
    rank = q.ndim - 3
    batch = jnp.broadcast_shapes(*(x.shape[:rank] for x in operands))
    (T, N, _), Hv = q.shape[-3:], v.shape[-1]
    q, k, v = (_pad_channels(name, x) for x in (q, k, v))
    results = [result_type((*batch, T, N, v.shape[-1]), q.dtype, q), result_type((*batch, T, N, 2), jnp.float32, q)]
    if name == "cuda":
        dense = visibility.bits is not None
        results += cuda_forward_workspace(q, k, v, bias, batch, visibility.start is not None and not dense, dense)
    operands = [x for x in (q, k, v, *visibility, bias) if x is not None]
    out, lse, *_ = jax.ffi.ffi_call("jax_dma_forward", results)(*operands, config=_config(call))
    return out[..., :Hv], lse


def backward(name, *operands, call):
    """dq, dk, dv and, if asked for, dbias by the kernels of an implementation."""
    from jax_dma.op import batch_shape, dbias_shape

    q, k, v, visibility, bias, (out, lse, dout, dlse) = call.unflatten(operands)
    batch = batch_shape(q, operands)
    H, Hv = q.shape[-1], v.shape[-1]
    q, k, v, out, dout = (_pad_channels(name, x) for x in (q, k, v, out, dout))
    results = [result_type((*batch, *x.shape[-3:]), x.dtype, q) for x in (q, k, v)]
    if call.want_dbias:
        results.append(result_type(dbias_shape(call, bias, batch), bias.dtype, q))
    if name == "cuda":
        results += cuda_workspace(q, k, v, bias, call, batch, results)
    operands = [x for x in (q, k, v, *visibility, bias, out, lse, dout, dlse) if x is not None]
    gradients = jax.ffi.ffi_call("jax_dma_backward", results)(*operands, config=_config(call))
    dq, dk, dv, *dbias = gradients[: 3 + call.want_dbias]
    return [dq[..., :H], dk[..., :H], dv[..., :Hv], *dbias]


def cuda_forward_workspace(q, k, v, bias, batch, only_intervals, dense):
    """Scratch results of a forward call (xla_ffi/cuda/sm90/forward_scratch.h), one or none."""
    (T, N, _), (S, K) = q.shape[-3:], k.shape[-3:-1]
    tiles, key_tiles = -(-T // queries_per_tile(N // K)) * K * math.prod(batch), -(-S // KEY_TILE)
    # Few queries, whose keys are split over blocks: out and lse of each part. Two blocks for each of 132 processors, 8
    # tiles each.
    splits = min(264 // max(tiles, 1), key_tiles // 8)
    size = splits * math.prod(batch) * N * T * (v.shape[-1] + 2) if splits > 1 else 0
    # A bias per key, prepared for the kernel, where several tiles of queries use it. Beside intervals the kernel itself
    # does that at head dimensions up to 128.
    prepared = not only_intervals or max(q.shape[-1], v.shape[-1]) > 128
    if prepared and bias is not None and bias.shape[-2] == 1 and bias.shape[-3] in (1, K):
        rows = math.prod(bias.shape[:-2])
        if tiles >= 4 * rows:
            size = max(size, rows * key_tiles * 648)
    # What the kernel finds out about a bias tile that the entries of a batch share, before it uses it.
    if bias is not None and bias.shape[-2] > 1 and math.prod(bias.shape[:-3]) == 1 and math.prod(batch) >= 64:
        size = max(size, 128)
    size += dense  # the counter that blocks take their work from
    return [result_type((size,), jnp.float32, q)] if size else []


def cuda_workspace(q, k, v, bias, call, batch, results):
    """Scratch results of the CUDA backward pass, so that a handler never allocates (xla_ffi/cuda/sm80/launch.h)."""
    (T, N, H), K = q.shape[-3:], k.shape[-2]
    tiles = -(-T // queries_per_tile(N // K))
    rows = (*batch, K, tiles * TILE_ROWS)
    head_dim = _kernel_head_dim(H, v.shape[-1])
    # Per row log-sum-exp and delta; dq in f32; turn counters, one for each part of a query tile.
    scratch = [((*rows, 2), jnp.float32), ((*rows, head_dim), jnp.float32), ((*batch, K, 4 * tiles), jnp.int32)]
    if call.want_dbias:
        shape = results[3].shape
        summed = _dbias_is_summed(shape, batch, T, N, K, k.shape[-3])
        scratch.append((shape if summed else (0,), jnp.float32))
    return [result_type(shape, dtype, q) for shape, dtype in scratch]


def _dbias_is_summed(shape, batch, T, N, K, S):
    """Whether several tiles add to one element of dbias (then they add in f32)."""
    *dbias_batch, heads, rows, cols = shape
    # One block owns all queries of a key tile, and all heads of a group.
    owned = heads == K if rows == 1 else heads in (K, N)
    return not (tuple(dbias_batch) == tuple(batch) and owned and cols == S)
