// From run-time dtype and head dimension to the compiled kernels.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "launch.h"

namespace jax_dma::sm80 {
namespace {

// Calls `run` with a value of the element type and the head dimension that the kernels are compiled for.
template <class Run>
cudaError_t dispatch(const Problem& p, const Run& run) {
  const int head_dim = std::max(p.H, p.Hv);
  const auto with_type = [&](auto element) {
    if (head_dim <= 64) return run(element, std::integral_constant<int, 64>());
    if (head_dim <= 128) return run(element, std::integral_constant<int, 128>());
    return run(element, std::integral_constant<int, 256>());
  };
  return p.dtype == DType::kBF16 ? with_type(__nv_bfloat16()) : with_type(__half());
}

}  // namespace

cudaError_t forward(const Problem& p, cudaStream_t stream) {
  return dispatch(
      p, [&](auto element, auto head_dim) { return launch_forward<decltype(element), head_dim()>(p, stream); });
}

cudaError_t backward(const Problem& p, const BackwardBuffers& buffers, cudaStream_t stream) {
  return dispatch(p, [&](auto element, auto head_dim) {
    return launch_backward<decltype(element), head_dim()>(p, buffers, stream);
  });
}

}  // namespace jax_dma::sm80
