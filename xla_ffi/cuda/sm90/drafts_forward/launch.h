// The sm_90a kernel family: its launches.
#pragma once

#include <cuda_runtime.h>

#include "../../common/problem.h"

namespace jax_dma::sm90 {

// Returns cudaErrorNotSupported, having launched nothing, for calls that TMA cannot address or that do not fit in shared
// memory: run sm80::forward then.
cudaError_t forward(const Problem& problem, cudaStream_t stream);

// Per (element type, head dim); each in a translation unit of its own, so that they compile in parallel.
template <class T, int kHeadDim>
cudaError_t launch_forward(const Problem& problem, cudaStream_t stream);

}  // namespace jax_dma::sm90
