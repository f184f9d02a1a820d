// The XLA FFI handlers of the CUDA kernels.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jax_dma::cuda {

XLA_FFI_Error* plan_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* forward_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* backward_handler(XLA_FFI_CallFrame* frame);

}  // namespace jax_dma::cuda
