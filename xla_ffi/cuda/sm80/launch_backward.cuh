// Chooses the instantiations of the backward kernels for a problem and launches them.
#pragma once

#include "backward.cuh"
#include "launch.h"
#include "launch_common.cuh"

namespace jax_dma::sm80 {

inline DBias dbias_mode_of(const Problem& p) {
  if (!p.dbias.present()) return DBias::kNone;
  if (p.dbias.row == 0) return p.dbias.group == 0 ? DBias::kKey : DBias::kPerHead;
  return p.dbias.group == 0 ? DBias::kPerQuery : DBias::kPerRow;
}

template <class T>  // the element type of the call: one such kernel for each translation unit
__global__ void jax_dma_sm80_round_dbias(const float* sums, void* dbias, int64_t elements, DType dtype) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < elements) store_bias_value(dbias, i, sums[i], dtype);
}

template <class T, int kHeadDim, bool kSmall>
cudaError_t launch_backward_shape(const Problem& p, const BackwardBuffers& buffers, bool ahead, cudaStream_t stream) {
  using Shape = BackwardShape<kHeadDim, kSmall>;
  const int queries = queries_per_tile(p.G) * Shape::kRows / kTileRows;
  BackwardScratch scratch{reinterpret_cast<float2*>(buffers.row_stats),
                          buffers.dq,
                          buffers.turn,
                          buffers.dbias,
                          ceil_div(p.T, queries) * Shape::kRows,
                          {},
                          0,
                          0};
  const int64_t rows = p.B * p.K * scratch.rows;
  constexpr int kThreads = 256;
  cudaError_t error = cudaSuccess;
  if (rows > 0) {
    error = cudaMemsetAsync(buffers.dq, 0, rows * kHeadDim * sizeof(float), stream);
    if (error == cudaSuccess && p.deterministic)
      error = cudaMemsetAsync(buffers.turn, 0, rows / Shape::kRows * sizeof(int), stream);
    if (error == cudaSuccess)
      error = launch(jax_dma_sm80_row_stats<T>, ceil_div(rows, kThreads / 32), kThreads, 0, stream, p,
                     scratch.row_stats, scratch.rows, Shape::kRows, queries);
  }
  if (error == cudaSuccess && buffers.dbias != nullptr)
    error = cudaMemsetAsync(buffers.dbias, 0, buffers.dbias_elements * sizeof(float), stream);

  // Blocks that add to one element of dbias are launched one after another where the order of additions must be fixed.
  const int parts = static_cast<int>(ceil_div(p.S, Shape::kKeys)), heads = static_cast<int>(p.B * p.K);
  const bool in_order = p.deterministic && buffers.dbias != nullptr;
  const int heads_per_launch = in_order ? 1 : heads, parts_per_launch = in_order && p.dbias.col == 0 ? 1 : parts;
  const int64_t shared_bytes = p.T * p.G * ((p.H + p.Hv) * 2 + kHeadDim * 4);  // q, dout and dq of a head
  const bool bias_aligned = bias_is_aligned(p, p.bias), dbias_aligned = bias_is_aligned(p, p.dbias);
  const bool general = kSmall || is_general<T>(p, bias_aligned, dbias_aligned, buffers.dbias != nullptr, ahead);
  scratch.order = tile_order(parts_per_launch, heads_per_launch, shared_bytes, processors());
  for (scratch.first_head = 0; scratch.first_head < heads; scratch.first_head += heads_per_launch)
    for (scratch.first_part = 0; scratch.first_part < parts && error == cudaSuccess;
         scratch.first_part += parts_per_launch)
      error = with_kinds(p, [&](auto mask, auto bias) {
        const auto run = [&](auto kernel) {
          return launch(kernel, int64_t{parts_per_launch} * heads_per_launch, Shape::kThreads,
                        Shape::shared_bytes(p, ahead), stream, p, scratch, dbias_mode_of(p), bias_aligned,
                        dbias_aligned, ahead);
        };
        if constexpr (!kSmall)
          if (!general) return run(jax_dma_sm80_backward<T, kHeadDim, false, false, decltype(mask), decltype(bias)>);
        // General instances, and so small shapes, are compiled once for all masks.
        return run(jax_dma_sm80_backward<T, kHeadDim, kSmall, true, dense_mask, decltype(bias)>);
      });
  if (error == cudaSuccess && rows > 0)
    error = launch(jax_dma_sm80_reorder_dq<T, kHeadDim, kSmall>, ceil_div(rows * (kHeadDim / 4), kThreads), kThreads, 0,
                   stream, p, reinterpret_cast<const float4*>(buffers.dq), scratch.rows, queries);
  if (error == cudaSuccess && buffers.dbias_elements > 0)
    error = launch(jax_dma_sm80_round_dbias<T>, ceil_div(buffers.dbias_elements, kThreads), kThreads, 0, stream,
                   static_cast<const float*>(buffers.dbias), p.dbias.data, buffers.dbias_elements, p.bias_dtype);
  return error;
}

template <class T, int kHeadDim>
cudaError_t launch_backward(const Problem& p, const BackwardBuffers& buffers, cudaStream_t stream) {
  int device = 0, shared = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
#ifdef JAX_DMA_TEST_SMALL_SHAPES  // what a device with 99 KB runs, on one with more
  shared = 99 * 1024;
#endif
  using Shape = BackwardShape<kHeadDim, false>;
  const auto fits = [&](int bytes) {
    return bytes + static_cast<int>(sizeof(BlockOperands<T>) + sizeof(RowTable<Shape::kRows>)) <= shared;
  };
  if (fits(Shape::shared_bytes(p, true))) return launch_backward_shape<T, kHeadDim, false>(p, buffers, true, stream);
  if (kHeadDim == 64 || fits(Shape::shared_bytes(p, false)))
    return launch_backward_shape<T, kHeadDim, false>(p, buffers, false, stream);
  return launch_backward_shape<T, kHeadDim, kHeadDim != 64>(p, buffers, false, stream);
}

}  // namespace jax_dma::sm80
