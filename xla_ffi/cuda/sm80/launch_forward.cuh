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
    return launch(jax_dma_sm80_forward<T, kHeadDim, decltype(mask), decltype(bias)>, tiles * p.K * p.B, Shape::kThreads,
                  Shape::shared_bytes(p, bias.kind), stream, p,
                  tile_order(tiles, p.K * p.B, p.S * (p.H + p.Hv) * 2, processors()), bias_is_aligned(p, p.bias));
  });
}

}  // namespace jax_dma::sm80
