// Chooses the instantiation of the forward kernel for a problem and launches it.
#pragma once

#include "forward.cuh"
#include "launch.h"
#include "launch_common.cuh"

namespace jax_dma::sm80 {

template <class T, int kHeadDim>
cudaError_t launch_forward(const Problem& p, cudaStream_t stream) {
  using Shape = ForwardShape<kHeadDim>;
  const BiasKind bias_kind = bias_kind_of(p);
  const int shared = Shape::kTileBytes + Shape::bias_bytes(bias_kind, p.bias_dtype == DType::kF32 ? 4 : 2);
  const int64_t tiles = ceil_div(p.T, queries_per_tile(p.G) * Shape::kRows / kTileRows), blocks = tiles * p.K * p.B;
  if (blocks == 0) return cudaSuccess;
  const auto kernel = p.bits.present()    ? jax_dma_sm80_forward<T, kHeadDim, Mask::kBits>
                      : p.start.present() ? jax_dma_sm80_forward<T, kHeadDim, Mask::kIntervals>
                                          : jax_dma_sm80_forward<T, kHeadDim, Mask::kNone>;
  return launch(kernel, blocks, Shape::kThreads, shared, stream, p, bias_kind, bias_is_aligned(p, p.bias));
}

}  // namespace jax_dma::sm80
