// The XLA FFI handler of the order statistic. jax_dma/masks.py makes the call.
#include "../handlers.h"

#include <cuda_runtime_api.h>

#include <string>

#include "../../common/parse.h"
#include "../errors.h"
#include "order_statistic.h"

namespace jax_dma::cuda {
namespace {

using Ints = ffi::Buffer<ffi::S32>;
using IntsOut = ffi::Result<Ints>;

// order, first, rank [rows, S] -> result [rows, S], and scratch: counts [rows, chunks, parts], candidates [rows, S, 4],
// found [rows].
ffi::Error kth_smallest(cudaStream_t stream, int64_t k, Ints order, Ints first, Ints rank, IntsOut result,
                        IntsOut counts, IntsOut candidates, IntsOut found) {
  const auto dims = order.dimensions();
  const auto has = [](const auto& x, int64_t count) { return static_cast<int64_t>(x.element_count()) == count; };
  const int64_t rows = dims.size() == 2 ? dims[0] : 0, S = dims.size() == 2 ? dims[1] : 0, all = rows * S;
  if (dims.size() != 2 || S >= INT32_MAX || k < 0 || k > INT32_MAX || !has(first, all) || !has(rank, all) ||
      !has(*result, all) || !has(*candidates, 4 * all) || !has(*found, rows) ||
      !has(*counts, rows * ceil_div(S, order_statistic::kChunk) * order_statistic::kParts))
    return invalid("malformed order statistic");
  const order_statistic::Problem p{order.typed_data(),
                                   first.typed_data(),
                                   rank.typed_data(),
                                   rows,
                                   static_cast<int>(S),
                                   static_cast<int>(k),
                                   result->typed_data(),
                                   counts->typed_data(),
                                   reinterpret_cast<int4*>(candidates->typed_data()),
                                   found->typed_data()};
  return check_launch(order_statistic::launch(p, stream), "top_k");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kKthSmallest, kth_smallest,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Attr<int64_t>("k")
                           .Arg<Ints>()
                           .Arg<Ints>()
                           .Arg<Ints>()
                           .Ret<Ints>()
                           .Ret<Ints>()
                           .Ret<Ints>()
                           .Ret<Ints>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* kth_smallest_handler(XLA_FFI_CallFrame* frame) { return kKthSmallest(frame); }

}  // namespace jax_dma::cuda
