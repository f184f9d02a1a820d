// How the CUDA handlers report what is wrong.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "xla/ffi/api/ffi.h"

namespace jax_dma::cuda {

inline xla::ffi::Error invalid(const std::string& message) {
  return xla::ffi::Error(xla::ffi::ErrorCode::kInvalidArgument, "jax_dma: " + message);
}

// Success, or why the kernels called `what` could not be launched.
inline xla::ffi::Error check_launch(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return xla::ffi::Error::Success();
  std::string message =
      std::string("jax_dma: the ") + what + " kernels could not be launched: " + cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice)
    message += "; they were built for compute capability " JAX_DMA_CUDA_ARCH_LIST
               ", reinstall with JAX_DMA_CUDA_ARCHS naming this device's";
  return xla::ffi::Error(xla::ffi::ErrorCode::kInternal, message);
}

}  // namespace jax_dma::cuda
