// Chooses the instantiation of the forward kernel for a problem and launches it.
#pragma once

#include "forward.cuh"
#include "launch.h"
#include "launch_common.cuh"

namespace jax_dma::sm80 {

template <class T, int kHeadDim>
cudaError_t launch_forward(const Problem& p, cudaStream_t stream) {
  return with_kinds(p, [&](auto mask, auto bias) {
    using Shape = ForwardShape<kHeadDim>;
    const int64_t tiles = ceil_div(p.T, queries_per_tile(p.G) * Shape::kRows / kTileRows);
    const bool bias_aligned = bias_is_aligned(p, p.bias);
    const auto run = [&](auto kernel) {
      return launch(kernel, tiles * p.K * p.B, Shape::kThreads, Shape::shared_bytes(p, bias.kind), stream, p,
                    tile_order(tiles, p.K * p.B, p.S * (p.H + p.Hv) * 2, processors()), bias_aligned);
    };
    // General instances are compiled once for all masks.
    if (is_general_forward<T>(p, bias_aligned))
      return run(jax_dma_sm80_forward<T, kHeadDim, true, dense_mask, decltype(bias)>);
    return run(jax_dma_sm80_forward<T, kHeadDim, false, decltype(mask), decltype(bias)>);
  });
}

}  // namespace jax_dma::sm80
