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

// values, low, high [rows, S] -> result [rows, S], and scratch: five more of those, counts [rows, S + 1, 4], of chunks.
ffi::Error kth_smallest(cudaStream_t stream, int64_t k, Ints values, Ints low, Ints high, IntsOut result,
                        IntsOut ordered, IntsOut reordered, IntsOut from, IntsOut to, IntsOut remaining, IntsOut before,
                        IntsOut of_chunks) {
  const auto dims = values.dimensions();
  const auto has = [](const auto& x, int64_t count) { return static_cast<int64_t>(x.element_count()) == count; };
  const int64_t rows = dims.size() == 2 ? dims[0] : 0, S = dims.size() == 2 ? dims[1] : 0, all = rows * S;
  if (dims.size() != 2 || S >= INT32_MAX || k < 0 || k > INT32_MAX || !has(low, all) || !has(high, all) ||
      !has(*result, all) || !has(*ordered, all) || !has(*reordered, all) || !has(*from, all) || !has(*to, all) ||
      !has(*remaining, all) || !has(*before, 4 * rows * (S + 1)) ||
      !has(*of_chunks, 4 * rows * ((S + order_statistic::kChunk - 1) / order_statistic::kChunk)))
    return invalid("malformed order statistic");
  const order_statistic::Problem p{values.typed_data(),
                                   low.typed_data(),
                                   high.typed_data(),
                                   rows,
                                   static_cast<int>(S),
                                   static_cast<int>(k),
                                   result->typed_data(),
                                   ordered->typed_data(),
                                   reordered->typed_data(),
                                   reinterpret_cast<int4*>(before->typed_data()),
                                   reinterpret_cast<int4*>(of_chunks->typed_data()),
                                   from->typed_data(),
                                   to->typed_data(),
                                   remaining->typed_data()};
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
                           .Ret<Ints>()
                           .Ret<Ints>()
                           .Ret<Ints>()
                           .Ret<Ints>()
                           .Ret<Ints>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* kth_smallest_handler(XLA_FFI_CallFrame* frame) { return kKthSmallest(frame); }

}  // namespace jax_dma::cuda
