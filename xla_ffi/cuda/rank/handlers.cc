// The XLA FFI handler of the ranks. jax_dma/masks.py makes the call.
#include "../handlers.h"

#include <cuda_runtime_api.h>

#include <string>

#include "../../common/parse.h"
#include "../errors.h"
#include "rank.h"

namespace jax_dma::cuda {
namespace {

using IntsOut = ffi::Result<ffi::Buffer<ffi::S32>>;
using Words = ffi::Result<ffi::Buffer<ffi::U32>>;

// keys [rows, S] u16 or u32 -> order, ranks [rows, S], and scratch: twice [rows, S, 2], and words for the sort.
ffi::Error rank_keys(cudaStream_t stream, ffi::AnyBuffer keys, IntsOut order, IntsOut ranks, Words packed,
                     Words repacked, Words temporary) {
  const auto dims = keys.dimensions();
  const int key_bits = keys.element_type() == ffi::DataType::U16   ? 16
                       : keys.element_type() == ffi::DataType::U32 ? 32
                                                                   : 0;
  const auto has = [](const auto& x, int64_t count) { return static_cast<int64_t>(x.element_count()) == count; };
  const int64_t all = static_cast<int64_t>(keys.element_count());
  if (dims.size() != 2 || key_bits == 0 || !has(*order, all) || !has(*ranks, all) || !has(*packed, 2 * all) ||
      !has(*repacked, 2 * all) || !rank::serves(dims[0], dims[1], key_bits))
    return invalid("malformed ranks");
  const rank::Problem p{
      keys.untyped_data(),
      static_cast<int>(dims[0]),
      static_cast<int>(dims[1]),
      key_bits,
      order->typed_data(),
      ranks->typed_data(),
      {reinterpret_cast<uint64_t*>(packed->typed_data()), reinterpret_cast<uint64_t*>(repacked->typed_data())},
      temporary->typed_data(),
      4 * temporary->element_count()};
  return check_launch(rank::launch(p, stream), "top_k's sort");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kRank, rank_keys,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::U32>>()
                           .Ret<ffi::Buffer<ffi::U32>>()
                           .Ret<ffi::Buffer<ffi::U32>>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* rank_handler(XLA_FFI_CallFrame* frame) { return kRank(frame); }

}  // namespace jax_dma::cuda
