// Python module `_cuda`: capsules of the CUDA handlers, and what they were built for.
#include <nanobind/nanobind.h>

#include <sstream>

#include "cuda/handlers.h"

namespace nb = nanobind;

NB_MODULE(_cuda, module) {
  module.def("registrations", [] {
    nb::dict handlers;
    handlers["jax_dma_plan"] = nb::capsule(reinterpret_cast<void*>(jax_dma::cuda::plan_handler));
    handlers["jax_dma_select"] = nb::capsule(reinterpret_cast<void*>(jax_dma::cuda::select_handler));
    handlers["jax_dma_forward"] = nb::capsule(reinterpret_cast<void*>(jax_dma::cuda::forward_handler));
    handlers["jax_dma_backward"] = nb::capsule(reinterpret_cast<void*>(jax_dma::cuda::backward_handler));
    handlers["jax_dma_rank"] = nb::capsule(reinterpret_cast<void*>(jax_dma::cuda::rank_handler));
    handlers["jax_dma_kth_smallest"] = nb::capsule(reinterpret_cast<void*>(jax_dma::cuda::kth_smallest_handler));
    handlers["jax_dma_list_keys"] = nb::capsule(reinterpret_cast<void*>(jax_dma::cuda::list_keys_handler));
    handlers["jax_dma_take_keys"] = nb::capsule(reinterpret_cast<void*>(jax_dma::cuda::take_keys_handler));
    handlers["jax_dma_sum_keys"] = nb::capsule(reinterpret_cast<void*>(jax_dma::cuda::sum_keys_handler));
    return handlers;
  });
  module.def("ffi_api_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
  module.def("architectures", [] {
    nb::list list;
    std::stringstream names(JAX_DMA_CUDA_ARCH_LIST);
    for (std::string name; std::getline(names, name, ',');) list.append(nb::cast(name.c_str()));
    return nb::tuple(list);
  });
}
