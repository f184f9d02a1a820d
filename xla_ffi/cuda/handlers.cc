// The XLA FFI handlers of the CUDA kernels: parse the call, check what the kernels need, launch the family for the
// device.
#include "handlers.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>

#include "../common/parse.h"
#include "errors.h"
#include "plan/plan.h"
#include "select/select.h"
#include "sm80/launch.h"
#ifdef JAX_DMA_SM90
#include "sm90/launch.h"
#endif

namespace jax_dma::cuda {
namespace {

#ifdef JAX_DMA_SM90
// Whether the kernels for Hopper serve the current device. JAX_DMA_CUDA_FAMILY=sm80 in the environment keeps them out,
// to compare the families.
bool use_sm90() {
  const char* const family = std::getenv("JAX_DMA_CUDA_FAMILY");
  if (family != nullptr && std::strcmp(family, "sm80") == 0) return false;
  int device = 0, major = 0, minor = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 &&
         minor == 0;
}
#endif

// The kernels for the device. A family that cannot serve a call says so before it launches anything.
// `scratch` is described in sm90/forward_scratch.h; they do without where it is too small.
cudaError_t launch_forward(const Problem& p, [[maybe_unused]] float* scratch, [[maybe_unused]] int64_t floats,
                           cudaStream_t stream) {
#ifdef JAX_DMA_SM90
  if (use_sm90())
    if (const cudaError_t error = sm90::forward(p, {scratch, floats}, stream); error != cudaErrorNotSupported)
      return error;
#endif
  return sm80::forward(p, stream);
}
cudaError_t launch_backward(const Problem& p, const sm80::BackwardBuffers& buffers, cudaStream_t stream) {
#ifdef JAX_DMA_SM90
  if (use_sm90())
    if (const cudaError_t error = sm90::backward(p, buffers, stream); error != cudaErrorNotSupported) return error;
#endif
  return sm80::backward(p, buffers, stream);
}

// The kernels take rows of whole 16-byte chunks and groups that fit a tile; jax_dma/implementations/ffi.py sends others
// elsewhere.
ffi::Error check_limits(const Problem& p) {
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

ffi::Error forward(cudaStream_t stream, Config config, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  auto problem = Parser(config, args, rets).parse(/*backward=*/false);
  if (problem.has_error()) return problem.error();
  if (ffi::Error error = check_limits(*problem); error.failure()) return error;
  float* scratch = nullptr;
  int64_t floats = 0;
  if (rets.size() > 2) {
    const ffi::AnyBuffer result = **rets.get<ffi::AnyBuffer>(2);
    scratch = static_cast<float*>(result.untyped_data()), floats = result.element_count();
  }
  return check_launch(launch_forward(*problem, scratch, floats, stream), "forward");
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
  return check_launch(launch_backward(*problem, buffers, stream), "backward");
}

// mask [*batch, N|K|1, T, S] pred -> bits, tiles_by_query, tiles_by_key, as in common/parse.h.
using Words = ffi::Result<ffi::Buffer<ffi::U32>>;
ffi::Error plan_mask(cudaStream_t stream, int64_t num_heads, int64_t num_kv_heads, int64_t causal,
                     ffi::Buffer<ffi::PRED> mask, Words bits, Words by_query, Words by_key) {
  const auto dims = mask.dimensions();
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
                            causal != 0,
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

// scores [..., T, S] bf16, f16 or f32, and perhaps a mask of the same rank, pred, each axis full or 1 -> pred [..., T,
// S], or bits uint32 [..., T, 4 * ceil(S / 128)].
ffi::Error select_scores(cudaStream_t stream, int64_t window, int64_t causal, ffi::RemainingArgs args,
                         ffi::RemainingRets rets) {
  const auto scores = args.get<ffi::AnyBuffer>(0);
  auto result = rets.get<ffi::AnyBuffer>(0);
  if (!scores || !result || args.size() > 2) return invalid("select takes scores and a mask, and has one result");
  const auto dims = scores->dimensions();
  if (dims.size() < 2 || window < 1) return invalid("select takes scores [..., T, S] and a window");
  const size_t last = dims.size() - 1;
  select::SelectProblem problem{};
  if (const auto type = scores->element_type(); type == ffi::DataType::F32) problem.dtype = DType::kF32;
  else if (type == ffi::DataType::BF16) problem.dtype = DType::kBF16;
  else if (type == ffi::DataType::F16) problem.dtype = DType::kF16;
  else return invalid("select takes scores in f32, bf16 or f16");
  problem.scores = scores->untyped_data();
  problem.T = dims[last - 1], problem.S = dims[last], problem.rows = 1;
  for (size_t axis = 0; axis < last; ++axis) problem.rows *= dims[axis];
  problem.window = window, problem.causal = causal != 0;

  if (args.size() == 2) {
    const auto mask = args.get<ffi::Buffer<ffi::PRED>>(1);
    if (!mask || mask->dimensions().size() != dims.size()) return invalid("the mask must be pred, of the scores' rank");
    const auto mask_dims = mask->dimensions();
    problem.mask = static_cast<const uint8_t*>(mask->untyped_data());
    problem.mask_col = mask_dims[last] > 1 ? 1 : 0;
    // From the last axis on, so that each stride is the product of what came before; neighbours that are both full, or
    // both broadcast, are one axis.
    int64_t stride = mask_dims[last];
    int rank = 0;
    bool full_before = false;
    for (size_t axis = last; axis-- > 0;) {
      if (mask_dims[axis] != 1 && mask_dims[axis] != dims[axis])
        return invalid("the mask does not broadcast to the scores: " + shape_text(mask_dims) + ", " + shape_text(dims));
      if (dims[axis] == 1) continue;
      const bool full = mask_dims[axis] != 1;
      if (rank > 0 && full == full_before) {
        problem.mask_size[rank - 1] *= static_cast<int>(dims[axis]);
      } else {
        if (rank == select::kMaxMaskAxes) return invalid("the mask has too many axes");
        problem.mask_size[rank] = static_cast<int>(dims[axis]), problem.mask_stride[rank] = full ? stride : 0;
        ++rank;
      }
      full_before = full, stride *= mask_dims[axis];
    }
    problem.mask_rank = rank;
    if (mask_dims[last] != 1 && mask_dims[last] != dims[last])
      return invalid("the mask does not broadcast to the scores: " + shape_text(mask_dims) + ", " + shape_text(dims));
  }

  const ffi::AnyBuffer out = **result;
  const bool packed = out.element_type() == ffi::DataType::U32;
  const int64_t expected = problem.rows * (packed ? 4 * ceil_div(problem.S, kKeyTile) : problem.S);
  if ((!packed && out.element_type() != ffi::DataType::PRED) || static_cast<int64_t>(out.element_count()) != expected)
    return invalid("select writes pred of the scores' shape, or u32 words of bits");
  if (packed) problem.bits = static_cast<uint32_t*>(out.untyped_data());
  else problem.chosen = static_cast<uint8_t*>(out.untyped_data());
  return check_launch(select::launch(problem, stream), "select");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kSelect, select_scores,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Attr<int64_t>("window")
                           .Attr<int64_t>("causal")
                           .RemainingArgs()
                           .RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kPlan, plan_mask,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Attr<int64_t>("num_heads")
                           .Attr<int64_t>("num_kv_heads")
                           .Attr<int64_t>("causal")
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
XLA_FFI_Error* select_handler(XLA_FFI_CallFrame* frame) { return kSelect(frame); }
XLA_FFI_Error* forward_handler(XLA_FFI_CallFrame* frame) { return kForward(frame); }
XLA_FFI_Error* backward_handler(XLA_FFI_CallFrame* frame) { return kBackward(frame); }

}  // namespace jax_dma::cuda
