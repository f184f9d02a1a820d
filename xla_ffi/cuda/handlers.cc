// The XLA FFI handlers of the CUDA kernels: parse the call, check what the kernels need, launch the family for the
// device.
#include "handlers.h"

#include <cuda_runtime_api.h>

#include "../common/parse.h"
#include "plan/plan.h"
#include "sm80/launch.h"

namespace jax_dma::cuda {
namespace {

// The kernels take rows of whole 16-byte chunks and groups that fit a tile; jax_dma/implementations/ffi.py sends others
// elsewhere.
ffi::Error check_limits(const Problem& p) {
  const auto invalid = [](const std::string& message) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jax_dma: " + message);
  };
  if (p.dtype == DType::kF32) return invalid("the CUDA kernels compute in bf16 or f16, and q is f32");
  if (p.H % 8 != 0 || p.Hv % 8 != 0)
    return invalid("the CUDA kernels need head dimensions that are multiples of 8, got H=" + std::to_string(p.H) +
                   " Hv=" + std::to_string(p.Hv));
  const int head_dim = std::max(p.H, p.Hv), limit = head_dim <= 128 ? 64 : 32;
  if (head_dim > 256)
    return invalid("the CUDA kernels serve head dimensions up to 256, got " + std::to_string(head_dim));
  if (p.G > limit)
    return invalid("the CUDA kernels serve up to " + std::to_string(limit) +
                   " query heads per key head at this head dimension, got " + std::to_string(p.G));
  return ffi::Error::Success();
}

ffi::Error check_launch(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return ffi::Error::Success();
  std::string message =
      std::string("jax_dma: the ") + what + " kernels could not be launched: " + cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice)
    message += "; they were built for compute capability " JAX_DMA_CUDA_ARCH_LIST
               ", reinstall with JAX_DMA_CUDA_ARCHS naming this device's";
  return ffi::Error(ffi::ErrorCode::kInternal, message);
}

ffi::Error forward(cudaStream_t stream, Config config, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  auto problem = Parser(config, args, rets).parse(/*backward=*/false);
  if (problem.has_error()) return problem.error();
  if (ffi::Error error = check_limits(*problem); error.failure()) return error;
  return check_launch(sm80::forward(*problem, stream), "forward");
}

ffi::Error backward(cudaStream_t stream, Config config, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  auto problem = Parser(config, args, rets).parse(/*backward=*/true);
  if (problem.has_error()) return problem.error();
  if (ffi::Error error = check_limits(*problem); error.failure()) return error;

  const size_t first = 3 + config.want_dbias;
  if (rets.size() != first + 3 + config.want_dbias)
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jax_dma: scratch results are missing");
  const auto scratch = [&](size_t i) { return **rets.get<ffi::AnyBuffer>(first + i); };
  const int head_dim = std::max(problem->H, problem->Hv), kernel_head_dim = head_dim <= 64    ? 64
                                                                            : head_dim <= 128 ? 128
                                                                                              : 256;
  const size_t rows = problem->B * problem->K * problem->query_tiles * kTileRows;
  if (scratch(0).element_count() < 2 * rows || scratch(1).element_count() < rows * kernel_head_dim ||
      scratch(2).element_count() < rows / 32)
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jax_dma: a scratch result is too small");
  sm80::BackwardBuffers buffers{static_cast<float*>(scratch(0).untyped_data()),
                                static_cast<float*>(scratch(1).untyped_data()),
                                static_cast<int*>(scratch(2).untyped_data()), nullptr, 0};
  if (config.want_dbias && scratch(3).element_count() > 0) {
    buffers.dbias = static_cast<float*>(scratch(3).untyped_data());
    buffers.dbias_elements = scratch(3).element_count();
  }
  return check_launch(sm80::backward(*problem, buffers, stream), "backward");
}

// mask [*batch, N|K|1, T, S] pred -> bits, tiles_by_query, tiles_by_key, as in common/parse.h.
using Words = ffi::Result<ffi::Buffer<ffi::U32>>;
ffi::Error plan_mask(cudaStream_t stream, int64_t num_heads, int64_t num_kv_heads, ffi::Buffer<ffi::PRED> mask,
                     Words bits, Words by_query, Words by_key) {
  const auto dims = mask.dimensions();
  const auto invalid = [](const std::string& message) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jax_dma: " + message);
  };
  if (dims.size() < 3 || num_kv_heads < 1 || num_heads % std::max<int64_t>(num_kv_heads, 1) != 0)
    return invalid("mask must be [*batch, N|K|1, T, S], got " + shape_text(dims));
  const int64_t heads = dims[dims.size() - 3];
  if (heads != 1 && heads != num_kv_heads && heads != num_heads)
    return invalid("mask has " + std::to_string(heads) + " heads, expected N, K or 1");
  plan::PlanProblem problem{static_cast<const uint8_t*>(mask.untyped_data()),
                            1,
                            dims[dims.size() - 2],
                            dims[dims.size() - 1],
                            static_cast<int>(heads),
                            static_cast<int>(num_heads / num_kv_heads),
                            bits->typed_data(),
                            by_query->typed_data(),
                            by_key->typed_data()};
  for (size_t axis = 0; axis + 3 < dims.size(); ++axis) problem.outer *= dims[axis];
  const bool grouped = heads != 1 && heads != num_kv_heads;
  const int64_t groups = problem.outer * (grouped ? num_kv_heads : heads);
  const int64_t query_tiles = ceil_div(problem.T, queries_per_tile(problem.G)),
                key_tiles = ceil_div(problem.S, kKeyTile);
  const auto has = [](Words& words, int64_t count) { return static_cast<int64_t>(words->element_count()) == count; };
  if (!has(bits, problem.outer * heads * problem.T * 4 * key_tiles) ||
      !has(by_query, groups * query_tiles * 2 * ceil_div(key_tiles, kTilesPerWord)) ||
      !has(by_key, groups * key_tiles * 2 * ceil_div(query_tiles, kTilesPerWord)))
    return invalid("the results of a mask plan have the wrong sizes");
  return check_launch(plan::launch(problem, grouped, stream), "mask plan");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kPlan, plan_mask,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Attr<int64_t>("num_heads")
                           .Attr<int64_t>("num_kv_heads")
                           .Arg<ffi::Buffer<ffi::PRED>>()
                           .Ret<ffi::Buffer<ffi::U32>>()
                           .Ret<ffi::Buffer<ffi::U32>>()
                           .Ret<ffi::Buffer<ffi::U32>>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(
    kForward, forward,
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Attr<Config>("config").RemainingArgs().RemainingRets(),
    {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(
    kBackward, backward,
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Attr<Config>("config").RemainingArgs().RemainingRets(),
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* plan_handler(XLA_FFI_CallFrame* frame) { return kPlan(frame); }
XLA_FFI_Error* forward_handler(XLA_FFI_CallFrame* frame) { return kForward(frame); }
XLA_FFI_Error* backward_handler(XLA_FFI_CallFrame* frame) { return kBackward(frame); }

}  // namespace jax_dma::cuda
