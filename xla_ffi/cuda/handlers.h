// The XLA FFI handlers of the CUDA kernels.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jax_dma::cuda {

XLA_FFI_Error* plan_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* select_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* forward_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* backward_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* rank_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* kth_smallest_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* list_keys_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* take_keys_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* sum_keys_handler(XLA_FFI_CallFrame* frame);

}  // namespace jax_dma::cuda
