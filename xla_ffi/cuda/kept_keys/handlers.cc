// The XLA FFI handlers of the kept keys: shapes and strides from buffers. jax_dma/kept_keys.py makes the calls.
#include "../handlers.h"

#include <cuda_runtime_api.h>

#include <string>

#include "../../common/parse.h"
#include "../errors.h"
#include "kept_keys.h"

namespace jax_dma::cuda {
namespace {

using Dims = ffi::Span<const int64_t>;
using Ints = ffi::Buffer<ffi::S32>;
using IntsOut = ffi::Result<Ints>;

int64_t product(Dims dims, size_t first, size_t last) {
  int64_t product = 1;
  for (size_t i = first; i < last; ++i) product *= dims[i];
  return product;
}

// How an operand's batch axes, all before its last `rest` ones, are addressed by a batch entry of `full` (which has
// `full_rest` axes after them). False where an axis is neither 1 nor full.
bool batch_offset(Dims dims, size_t rest, Dims full, size_t full_rest, int64_t unit, kept_keys::BatchOffset* offset) {
  const size_t rank = full.size() - full_rest;
  if (dims.size() != rank + rest || rank > kMaxBatchDims + 1) return false;
  offset->rank = static_cast<int>(rank);
  int64_t stride = product(dims, rank, dims.size()) / unit;
  for (size_t axis = rank; axis-- > 0;) {
    if (dims[axis] != 1 && dims[axis] != full[axis]) return false;
    offset->size[axis] = full[axis], offset->stride[axis] = dims[axis] == 1 ? 0 : stride;
    stride *= dims[axis];
  }
  return true;
}

// start, end [*batch, heads, S] -> keys, first, last [*batch, runs, heads, length], bounds of tiles [*batch, runs,
// heads, 4, length / 128], counts [*batch, runs, heads, 2], offsets [*batch, heads, S], places [*batch, heads, runs *
// length], and scratch.
ffi::Error list_keys(cudaStream_t stream, int64_t T, int64_t R, Ints start, Ints end, IntsOut keys, IntsOut first,
                     IntsOut last, IntsOut bounds_of_tiles, IntsOut counts, IntsOut offsets, IntsOut places,
                     IntsOut entries, IntsOut bounds, IntsOut chunk_counts) {
  const Dims dims = start.dimensions(), list = keys->dimensions();
  if (dims.size() < 2 || list.size() != dims.size() + 1 || T < 1 || R < 1)
    return invalid("malformed list of kept keys");
  const size_t rank = dims.size() - 2;
  kept_keys::ListsProblem p{};
  p.start = start.typed_data(), p.end = end.typed_data();
  p.outer = product(dims, 0, rank), p.heads = static_cast<int>(dims[rank]), p.S = dims[rank + 1];
  p.T = T, p.R = static_cast<int>(R), p.runs = static_cast<int>(ceil_div(T, R)),
  p.length = static_cast<int>(list[rank + 2]);
  p.keys = keys->typed_data(), p.first = first->typed_data(), p.last = last->typed_data();
  p.bounds_of_tiles = bounds_of_tiles->typed_data();
  p.counts = counts->typed_data(), p.offsets = offsets->typed_data(), p.places = places->typed_data();
  p.entries = entries->typed_data(), p.bounds = reinterpret_cast<int2*>(bounds->typed_data());
  p.chunk_counts = reinterpret_cast<int2*>(chunk_counts->typed_data());
  const int64_t rows = p.outer * p.heads;
  const auto has = [](IntsOut& x, int64_t count) { return static_cast<int64_t>(x->element_count()) == count; };
  const int64_t listed = rows * p.runs * p.length;
  if (static_cast<int64_t>(end.element_count()) != rows * p.S || !has(keys, listed) || !has(first, listed) ||
      !has(last, listed) || p.length % kKeyTile != 0 || !has(bounds_of_tiles, listed / kKeyTile * 4) ||
      !has(counts, 2 * rows * p.runs) || !has(entries, 4 * rows * p.S) || !has(offsets, rows * p.S) ||
      !has(places, listed) || int64_t{p.runs} * p.length > INT32_MAX / 16 ||
      !has(bounds, 2 * rows * ceil_div(p.S, kept_keys::kGroup)) ||
      !has(chunk_counts, 2 * rows * (ceil_div(p.S, kept_keys::kChunk) + 1)))
    return invalid("a list of kept keys has the wrong size");
  return check_launch(kept_keys::launch_lists(p, stream), "kept keys' listing");
}

// keys [*batch, runs, key heads, length], x [*batch, S, heads|1, channels] -> [*batch, runs, length, heads, channels]
ffi::Error take_keys(cudaStream_t stream, int64_t fill, Ints keys, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> rows) {
  const Dims key_dims = keys.dimensions(), x_dims = x.dimensions(), dims = rows->dimensions();
  kept_keys::TakeProblem p{};
  if (dims.size() < 4 || !batch_offset(key_dims, 3, dims, 4, 1, &p.keys_at)) return invalid("malformed take: keys");
  const size_t rank = dims.size() - 4;
  if (!batch_offset(x_dims, 3, dims, 4, std::max<int64_t>(x_dims[x_dims.size() - 1], 1), &p.x_at))
    return invalid("malformed take: x");
  p.keys = keys.typed_data(), p.x = x.untyped_data(), p.rows = rows->untyped_data();
  p.outer = product(dims, 0, rank), p.S = x_dims[rank], p.runs = static_cast<int>(dims[rank]);
  p.length = static_cast<int>(dims[rank + 1]), p.heads = static_cast<int>(dims[rank + 2]);
  p.key_heads = static_cast<int>(key_dims[rank + 1]), p.x_heads = static_cast<int>(x_dims[rank + 1]);
  p.fill = fill != 0;
  p.row_bytes = static_cast<int>(dims[rank + 3] * ffi::ByteWidth(rows->element_type()));
  const bool right = key_dims[rank] == p.runs && key_dims[rank + 2] == p.length && x_dims[rank + 2] == dims[rank + 3] &&
                     p.key_heads > 0 && p.heads % p.key_heads == 0 && (p.x_heads == 1 || p.x_heads == p.heads) &&
                     x.element_type() == rows->element_type() && p.row_bytes % 2 == 0;
  return right ? check_launch(kept_keys::launch_take(p, stream), "kept keys' taking") : invalid("malformed take");
}

bool read_type(ffi::DataType type, DType* result) {
  if (type == ffi::DataType::F32) *result = DType::kF32;
  else if (type == ffi::DataType::BF16) *result = DType::kBF16;
  else if (type == ffi::DataType::F16) *result = DType::kF16;
  else return false;
  return true;
}

// offsets [*batch, key heads, S], places [*batch, key heads, runs * length], start, end [*batch, key heads, S],
// rows [*batch, runs, length, heads, channels] -> [*batch, S, heads, channels]
ffi::Error sum_keys(cudaStream_t stream, int64_t T, int64_t R, Ints offsets, Ints places, Ints start, Ints end,
                    ffi::AnyBuffer rows, ffi::Result<ffi::AnyBuffer> sums) {
  const Dims dims = rows.dimensions(), start_dims = start.dimensions(), sum_dims = sums->dimensions();
  kept_keys::SumProblem p{};
  if (dims.size() < 4 || T < 1 || R < 1 || !batch_offset(offsets.dimensions(), 2, dims, 4, 1, &p.offsets_at) ||
      !batch_offset(places.dimensions(), 2, dims, 4, 1, &p.places_at) ||
      !batch_offset(start_dims, 2, dims, 4, 1, &p.start_at) || sum_dims.size() != dims.size() - 1)
    return invalid("malformed sum over kept keys");
  const size_t rank = dims.size() - 4;
  p.offsets = offsets.typed_data(), p.places = places.typed_data();
  p.start = start.typed_data(), p.end = end.typed_data();
  p.rows = rows.untyped_data(), p.sums = sums->untyped_data();
  p.outer = product(dims, 0, rank), p.T = T, p.S = sum_dims[rank], p.R = static_cast<int>(R);
  p.runs = static_cast<int>(dims[rank]), p.length = static_cast<int>(dims[rank + 1]);
  p.key_heads = static_cast<int>(start_dims[rank]), p.heads = static_cast<int>(dims[rank + 2]);
  p.channels = static_cast<int>(dims[rank + 3]);
  const auto is = [&](Ints& x, int64_t size) {
    return x.dimensions()[rank] == p.key_heads && x.dimensions()[rank + 1] == size;
  };
  const bool right = read_type(rows.element_type(), &p.rows_type) && read_type(sums->element_type(), &p.sums_type) &&
                     p.channels <= 256 && p.key_heads > 0 && p.heads % p.key_heads == 0 && p.runs == ceil_div(T, R) &&
                     p.outer * p.S * p.heads <= INT32_MAX && is(offsets, p.S) && is(start, p.S) &&
                     is(places, int64_t{p.runs} * p.length) && end.element_count() == start.element_count() &&
                     static_cast<int64_t>(sums->element_count()) == p.outer * p.S * p.heads * p.channels &&
                     (p.sums_type == DType::kF32 || p.sums_type == p.rows_type);
  return right ? check_launch(kept_keys::launch_sum(p, stream), "kept keys' summing")
               : invalid("malformed sum over kept keys");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kListKeys, list_keys,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Attr<int64_t>("query_length")
                           .Attr<int64_t>("run_length")
                           .Arg<Ints>()
                           .Arg<Ints>()
                           .Ret<Ints>()
                           .Ret<Ints>()
                           .Ret<Ints>()
                           .Ret<Ints>()
                           .Ret<Ints>()
                           .Ret<Ints>()
                           .Ret<Ints>()
                           .Ret<Ints>()
                           .Ret<Ints>()
                           .Ret<Ints>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kTakeKeys, take_keys,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Attr<int64_t>("fill")
                           .Arg<Ints>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kSumKeys, sum_keys,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Attr<int64_t>("query_length")
                           .Attr<int64_t>("run_length")
                           .Arg<Ints>()
                           .Arg<Ints>()
                           .Arg<Ints>()
                           .Arg<Ints>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* list_keys_handler(XLA_FFI_CallFrame* frame) { return kListKeys(frame); }
XLA_FFI_Error* take_keys_handler(XLA_FFI_CallFrame* frame) { return kTakeKeys(frame); }
XLA_FFI_Error* sum_keys_handler(XLA_FFI_CallFrame* frame) { return kSumKeys(frame); }

}  // namespace jax_dma::cuda
