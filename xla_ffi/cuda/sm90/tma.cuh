// Tensor maps (host) and the instructions of asynchronous tile loads: TMA, mbarriers, named barriers (device).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "../../common/problem.h"
#include "../ptx.cuh"

namespace jax_dma::sm90 {

// ---------------------------------------------------------------------------------------------------------------------
// Host.

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's function, or null: nothing is linked against the driver.
inline EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &pointer, cudaEnableDefault, &result);
#endif
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(pointer)
                                                                         : nullptr;
  }();
  return function;
}

// A map's axis: extent, stride in elements (0: the axis is not there) and how much of it a box takes.
struct Axis {
  int64_t size, stride;
  int box;
};

// The batch axes of a view as one axis: 0 where it does not vary, -1 where they are not a single stride.
inline int64_t batch_stride(const Problem& p, const View& view) {
  bool varies = false;
  for (int axis = 0; axis < p.batch_rank; ++axis) varies |= view.batch[axis] != 0;
  if (!varies) return 0;
  for (int axis = 0; axis + 1 < p.batch_rank; ++axis)
    if (view.batch[axis] != view.batch[axis + 1] * p.batch_size[axis + 1]) return -1;
  return view.batch[p.batch_rank - 1];
}

// A map of five axes over `data`; the first is contiguous, and boxes of 128 or 64 bytes of it (not 16) are swizzled in
// shared memory. What lies outside reads as 0. Returns false where TMA cannot address it.
inline bool encode(CUtensorMap* map, DType dtype, void* data, int64_t columns, const Axis (&axes)[4],
                   int row_bytes = 128) {
  const EncodeTiled function = encode_tiled();
  const int bytes = dtype == DType::kF32 ? 4 : 2;
  if (function == nullptr || columns < 1 || reinterpret_cast<uintptr_t>(data) % 16 != 0) return false;
  cuuint64_t sizes[5] = {static_cast<cuuint64_t>(columns)}, strides[4];
  cuuint32_t box[5] = {static_cast<cuuint32_t>(row_bytes / bytes)}, step[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < 4; ++i) {
    const bool there = axes[i].stride != 0 && axes[i].size > 1;
    const int64_t stride = there ? axes[i].stride * bytes : (columns * bytes + 15) / 16 * 16;
    if (stride % 16 != 0 || stride < 0 || stride >= int64_t{1} << 40 || axes[i].size < 1 || axes[i].size > INT32_MAX ||
        axes[i].box > 256)
      return false;
    sizes[i + 1] = there ? axes[i].size : 1, strides[i] = stride, box[i + 1] = axes[i].box;
  }
  const CUtensorMapDataType type = dtype == DType::kF32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                           : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return function(map, type, 5, data, sizes, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                  : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                    : CU_TENSOR_MAP_SWIZZLE_NONE,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------------------------
// Device.

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(ptx::shared_address(barrier)), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the asynchronous proxy.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Makes this thread's ordinary writes to shared memory visible to TMA and wgmma.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Orders this thread's ordinary accesses to device memory before the bulk copies that it issues.
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(ptx::shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void arrive_expecting(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(ptx::shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Arrives once this thread's cp.async copies so far have landed.
__device__ __forceinline__ void arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(ptx::shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@done bra DONE;\nbra "
      "WAIT;\nDONE:\n}" ::"r"(ptx::shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// Whether wait() would return at once.
__device__ __forceinline__ bool is_over(uint64_t* barrier, uint32_t parity) {
  uint32_t over;
  asm volatile("{\n.reg .pred over;\nmbarrier.test_wait.parity.shared.b64 over, [%1], %2;\nselp.b32 %0, 1, 0, over;\n}"
               : "=r"(over)
               : "r"(ptx::shared_address(barrier)), "r"(parity)
               : "memory");
  return over != 0;
}

// Loads a box of a map of five (four) axes; its bytes count towards the barrier's phase.
__device__ __forceinline__ void load_box(uint32_t target, const CUtensorMap* map, uint64_t* barrier, int c0, int c1,
                                         int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(target),
      "l"(map), "r"(ptx::shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void load_box(uint32_t target, const CUtensorMap* map, uint64_t* barrier, int c0, int c1,
                                         int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(target),
      "l"(map), "r"(ptx::shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
// Loads contiguous bytes (a multiple of 16, as are the addresses).
__device__ __forceinline__ void load_bytes(uint32_t target, const void* source, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(ptx::shared_address(barrier))
               : "memory");
}
// Stores a box of a map of five axes, of this thread's group of copies that commit_boxes ends.
__device__ __forceinline__ void write_box(const CUtensorMap* map, uint32_t source, int c0, int c1, int c2, int c3,
                                          int c4) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
               "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}
__device__ __forceinline__ void commit_boxes() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// True in one lane of the warp, always the same, as ptxas knows: it needs no loops over lanes around TMA's
// instructions.
__device__ __forceinline__ bool elected() {
  uint32_t chosen;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(chosen)::"memory");
  return chosen != 0;
}
// Adds f32 in shared memory to f32 in global memory.
__device__ __forceinline__ void bulk_reduce_add(float* target, uint32_t source, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target), "r"(source),
               "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until the sources of this thread's bulk reductions can be overwritten, and until the sums are in memory.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// `count` threads of the block meet at named barrier `id`.
__device__ __forceinline__ void named_sync(int id, int count) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}
// Counts as having come, without waiting.
__device__ __forceinline__ void named_arrive(int id, int count) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace jax_dma::sm90
