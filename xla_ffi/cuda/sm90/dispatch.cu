// From run-time dtype and head dimension to the compiled kernels.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "launch.h"

namespace jax_dma::sm90 {

cudaError_t forward(const Problem& p, const ForwardScratch& scratch, cudaStream_t stream) {
  const int head_dim = std::max(p.H, p.Hv);
  const auto with_type = [&](auto element) {
    using T = decltype(element);
    if (head_dim <= 32) return sm90::launch_forward<T, 32>(p, scratch, stream);
    if (head_dim <= 64) return sm90::launch_forward<T, 64>(p, scratch, stream);
    if (head_dim <= 128) return sm90::launch_forward<T, 128>(p, scratch, stream);
    return sm90::launch_forward<T, 256>(p, scratch, stream);
  };
  return p.dtype == DType::kBF16 ? with_type(__nv_bfloat16()) : with_type(__half());
}

cudaError_t backward(const Problem& p, const BackwardBuffers& buffers, cudaStream_t stream) {
  const int head_dim = std::max(p.H, p.Hv);
  const auto with_type = [&](auto element) {
    using T = decltype(element);
    if (head_dim <= 64) return sm90::launch_backward<T, 64>(p, buffers, stream);
    if (head_dim <= 128) return sm90::launch_backward<T, 128>(p, buffers, stream);
    return sm90::launch_backward<T, 256>(p, buffers, stream);
  };
  return p.dtype == DType::kBF16 ? with_type(__nv_bfloat16()) : with_type(__half());
}

}  // namespace jax_dma::sm90
