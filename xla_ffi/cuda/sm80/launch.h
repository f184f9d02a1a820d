// The sm_80-class kernel family: what a call needs, and its launches.
//
// Scratch is passed in by XLA as extra results (jax_dma/implementations/ffi.py sizes it), so that nothing is allocated
// here and calls can be captured in CUDA graphs.
#pragma once

#include <cuda_runtime.h>

#include "../../common/problem.h"

namespace jax_dma::sm80 {

struct BackwardBuffers {
  float* row_stats;  // [B, K, query tiles * 128, 2]
  float* dq;         // [B, K, query tiles * 128, kernel head dim]
  int* turn;         // [B, K, query tiles * 4]; also used without `deterministic` by sm90
  float* dbias;      // f32 sums of dbias's shape, or null where each element is written once
  int64_t dbias_elements;
};

cudaError_t forward(const Problem& problem, cudaStream_t stream);
cudaError_t backward(const Problem& problem, const BackwardBuffers& buffers, cudaStream_t stream);

// Per (element type, head dim); each in a translation unit of its own, so that they compile in parallel.
template <class T, int kHeadDim>
cudaError_t launch_forward(const Problem& problem, cudaStream_t stream);
template <class T, int kHeadDim>
cudaError_t launch_backward(const Problem& problem, const BackwardBuffers& buffers, cudaStream_t stream);

}  // namespace jax_dma::sm80
