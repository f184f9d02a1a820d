// What the launches of both directions share.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "logits.cuh"

namespace jax_dma::sm80 {

// Calls `run` with the mask and bias kinds of a problem, as the types in logits.cuh.
template <class Run>
cudaError_t with_kinds(const Problem& p, const Run& run) {
  const auto with_mask = [&](auto bias) {
    return p.bits.present()    ? run(dense_mask(), bias)
           : p.start.present() ? run(interval_mask(), bias)
                               : run(no_mask(), bias);
  };
  if (!p.bias.present()) return with_mask(no_bias());
  if (p.bias.row == 0 && p.bias.group == 0) return with_mask(key_bias());
  return with_mask(tile_bias());
}

// Whether eight neighbouring keys of any row start at a multiple of 16 bytes.
inline bool bias_is_aligned(const Problem& p, const View& view) {
  bool aligned = view.present() && view.col == 1 && reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  aligned = aligned && view.row % 8 == 0 && view.group % 8 == 0 && view.kv % 8 == 0;
  for (int axis = 0; axis < p.batch_rank; ++axis) aligned = aligned && view.batch[axis] % 8 == 0;
  return aligned;
}

// Multiprocessors of the current device; some number where it does not say.
inline int processors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) == cudaSuccess) cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return std::max(count, 1);
}

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared, cudaStream_t stream,
                   Arguments... arguments) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (shared > 40 * 1024) {  // with the static part, above what a block gets without asking
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
  }
  kernel<<<static_cast<unsigned>(blocks), threads, shared, stream>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace jax_dma::sm80
