// The sm_90a kernel family: its launches. They return cudaErrorNotSupported, having launched nothing, for calls that
// TMA cannot address or that do not fit in shared memory: the sm_80 class serves those. Scratch is the same.
#pragma once

#include <cuda_runtime.h>

#include "../../common/problem.h"
#include "../sm80/launch.h"
#include "forward_scratch.h"

namespace jax_dma::sm90 {

using sm80::BackwardBuffers;

cudaError_t forward(const Problem& problem, const ForwardScratch& scratch, cudaStream_t stream);
cudaError_t backward(const Problem& problem, const BackwardBuffers& buffers, cudaStream_t stream);

// Per (element type, head dim); each in a translation unit of its own, so that they compile in parallel.
template <class T, int kHeadDim>
cudaError_t launch_forward(const Problem& problem, const ForwardScratch& scratch, cudaStream_t stream);
template <class T, int kHeadDim>
cudaError_t launch_backward(const Problem& problem, const BackwardBuffers& buffers, cudaStream_t stream);

}  // namespace jax_dma::sm90
