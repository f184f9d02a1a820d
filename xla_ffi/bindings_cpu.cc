// The Python module jax_dma._cpu: the host handlers as capsules, for jax.ffi.register_ffi_target.
#include <nanobind/nanobind.h>

#include "xla/ffi/api/c_api.h"

namespace nb = nanobind;

extern "C" XLA_FFI_Error* jax_dma_cpu_forward(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jax_dma_cpu_backward(XLA_FFI_CallFrame*);

NB_MODULE(_cpu, module) {
  module.def("registrations", [] {
    nb::dict targets;
    targets["jax_dma_forward"] = nb::capsule(reinterpret_cast<void*>(jax_dma_cpu_forward));
    targets["jax_dma_backward"] = nb::capsule(reinterpret_cast<void*>(jax_dma_cpu_backward));
    return targets;
  });
  module.def("ffi_api_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
}
