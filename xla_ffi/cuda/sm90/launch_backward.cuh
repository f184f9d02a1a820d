// Chooses the instantiations of the Hopper backward kernels for a problem and launches them.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "../sm80/launch_common.cuh"
#include "backward.cuh"
#include "backward_wide.cuh"
#include "launch.h"
#include "launch_bias_gradient.cuh"

namespace jax_dma::sm90 {

inline DBias dbias_mode_of(const Problem& p) {
  if (!p.dbias.present()) return DBias::kNone;
  if (p.dbias.row == 0) return p.dbias.group == 0 ? DBias::kKey : DBias::kPerHead;
  return p.dbias.group == 0 ? DBias::kPerQuery : DBias::kPerRow;
}

// [batch, position, head, channel] in boxes of `box_rows` positions x `box_heads` heads x 64 channels, 128-byte
// swizzle; what lies outside is read as 0. False if the view cannot be described.
inline bool make_map(const Problem& p, const View& view, int64_t length, int heads, int channels, int box_heads,
                     int box_rows, CUtensorMap* map, int64_t* entry) {
  const bool query = heads != p.K || p.G == 1;  // q and dout have K * G heads
  const int64_t head_stride = query && p.G > 1 ? view.group : view.kv;
  if (query && p.G > 1 && p.K > 1 && view.kv != p.G * view.group) return false;
  *entry = std::max<int64_t>(length * view.row, 8);
  int64_t entries = 1;
  for (int axis = 0; axis < p.batch_rank; ++axis) {
    if (view.batch[axis] % *entry != 0) return false;
    entries += (p.batch_size[axis] - 1) * (view.batch[axis] / *entry);
  }
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(channels), static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(length), static_cast<cuuint64_t>(entries)};
  const cuuint64_t strides[3] = {static_cast<cuuint64_t>(heads > 1 ? head_stride : channels) * 2,
                                 static_cast<cuuint64_t>(length > 1 ? view.row : heads * channels) * 2,
                                 static_cast<cuuint64_t>(*entry) * 2};
  for (const cuuint64_t stride : strides)
    if (stride == 0 || stride % 16 != 0 || stride >= (1ull << 40)) return false;
  if (reinterpret_cast<uintptr_t>(view.data) % 16 != 0) return false;
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_heads), static_cast<cuuint32_t>(box_rows), 1},
                   steps[4] = {1, 1, 1, 1};
  return encode_tiled()(
             map, p.dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
             view.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class T>  // the element type of the call: one such kernel for each translation unit
__global__ void jax_dma_sm90_round_dbias(const float* sums, void* dbias, int64_t elements, DType dtype) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < elements) store_value(dbias, i, sums[i], dtype);
}

// Whether biases vary by query, or in another way that threads cannot keep in registers, where each has two keys, and
// the rows of even or odd number of a tile have the same head of their group.
inline bool has_tiles_of_bias(const Problem& p, bool wide) {
  if (!p.bias.present() || p.bias.row != 0 || p.bias.group == 0) return p.bias.present() && p.bias.row != 0;
  return wide || p.bias.col == 0 || (p.G != 2 && p.G != 4 && p.G != 8);
}

// Whether two neighbouring keys, the first one even, lie at an aligned address (4 bytes, or 8 of f32).
inline bool pairs_are_aligned(const Problem& p, const View& view) {
  bool aligned = view.present() && view.col == 1 && reinterpret_cast<uintptr_t>(view.data) % 8 == 0;
  aligned = aligned && view.row % 2 == 0 && view.group % 2 == 0 && view.kv % 2 == 0;
  for (int axis = 0; axis < p.batch_rank; ++axis) aligned = aligned && view.batch[axis] % 2 == 0;
  return aligned;
}

// How a call's logits and dbias go through shared memory, and the maps of bias and dbias. False if it does not fit.
template <class Shape>
bool plan_logits(const Problem& p, float* dbias_sums, BackwardPlan* plan, BackwardMaps* maps) {
  constexpr int kLimit = 227 * 1024 - 1024;  // barriers and tables are beside it
  const int queries = queries_per_tile(p.G) / (kTileRows / Shape::kTile);
  const bool grouped = p.G == 1 || p.G == 2 || p.G == 4 || p.G == 8;  // query = row >> shift
  const int group_shift = p.G == 2 ? 1 : p.G == 4 ? 2 : p.G == 8 ? 3 : 0;
  const auto shift_of = [&](const View& view) { return grouped && view.group == 0 ? group_shift : 0; };
  const auto panel_of = [](int shift) { return std::max(Shape::kTile >> shift, 8) * 128; };
  const bool tile_bias = has_tiles_of_bias(p, Shape::kWide);
  // A map of boxes of 128 bytes of keys and a tile's rows.
  const auto map_of = [&](CUtensorMap* map, bool* has_batch, const View& view, void* data, DType dtype, int queries) {
    const int group = view.group != 0 ? p.G : 1;
    const int64_t batch = batch_stride(p, view);
    *has_batch = batch > 0;
    return view.row != 0 && (grouped || view.group != 0) && batch >= 0 && sm80::bias_is_aligned(p, view) &&
           encode(map, dtype, data, p.S,
                  {{group, view.group, group}, {p.T, view.row, queries}, {p.K, view.kv, 1}, {p.B, batch, 1}});
  };

  plan->queries = queries;
  plan->group_shift = grouped ? group_shift : -1;
  plan->dbias = dbias_mode_of(p);
  plan->dbias_pairs = pairs_are_aligned(p, p.dbias);
  if (p.bits.present()) {
    const bool one_row = p.bits.row == 0 && p.bits.group == 0;
    plan->bits_shift = !one_row ? shift_of(p.bits) : Shape::kTile == 64 ? 6 : 7;
    plan->bits_stage = (Shape::kTile >> plan->bits_shift) * (Shape::kKeys > 128 ? 32 : 16);
  }
  if (tile_bias) {
    plan->bias_shift = shift_of(p.bias), plan->bias_panel = panel_of(plan->bias_shift);
    plan->bias_stage = plan->bias_panel * (p.bias_dtype == DType::kF32 ? 4 : 2) * Shape::kKeys / 128;
    plan->bias_aligned = sm80::bias_is_aligned(p, p.bias);
    plan->bias_by_tma = map_of(&maps->bias, &plan->bias_batch, p.bias, p.bias.data, p.bias_dtype, queries);
    if (plan->dbias == DBias::kPerQuery || plan->dbias == DBias::kPerRow) {
      plan->dbias_shift = shift_of(p.dbias), plan->dbias_panel = panel_of(plan->dbias_shift);
      plan->dbias_f32 = dbias_sums != nullptr || p.bias_dtype == DType::kF32;
      void* const data = dbias_sums ? dbias_sums : p.dbias.data;
      const DType dtype = plan->dbias_f32 ? DType::kF32 : p.bias_dtype;
      plan->dbias_by_tma = map_of(&maps->dbias, &plan->dbias_batch, p.dbias, data, dtype, queries);
    }
  }
  // What is dearest goes first when space is short: the second stage, then dbias's.
  for (;; plan->dbias_by_tma = false) {
    const int dbias_bytes = plan->dbias_by_tma ? plan->dbias_panel * (plan->dbias_f32 ? 4 : 2) * Shape::kKeys / 128 : 0;
    for (plan->logit_stages = 2; plan->logit_stages > 0; --plan->logit_stages) {
      plan->dbias_at = Shape::kLogits;
      plan->bias_at = plan->dbias_at + dbias_bytes;
      plan->bits_at = plan->bias_at + plan->logit_stages * plan->bias_stage;
      plan->special_at = plan->bits_at + plan->logit_stages * plan->bits_stage;
      plan->shared = plan->special_at + (p.bias.present() ? kRows * sizeof(SpecialRow) : 0);
      if (plan->shared <= kLimit) return true;
    }
    if (!plan->dbias_by_tma) return false;
  }
}

// The maps and the plan of a kernel. False if the operands cannot be described or shared memory is too small.
template <class Shape>
bool prepare(const Problem& p, const BackwardBuffers& buffers, BackwardPlan* plan, BackwardMaps* maps) {
  const int queries = queries_per_tile(p.G) / (kTileRows / Shape::kTile);
  return make_map(p, p.q, p.T, p.N, p.H, p.G, queries, &maps->q, &maps->q_entry) &&
         make_map(p, p.dout, p.T, p.N, p.Hv, p.G, queries, &maps->dout, &maps->dout_entry) &&
         make_map(p, p.k, p.S, p.K, p.H, 1, Shape::kKeys, &maps->k, &maps->k_entry) &&
         make_map(p, p.v, p.S, p.K, p.Hv, 1, Shape::kKeys, &maps->v, &maps->v_entry) &&
         plan_logits<Shape>(p, buffers.dbias, plan, maps);
}

using BackwardKernel = void (*)(Problem, BackwardMaps, BackwardScratch, BackwardPlan);

// tall: tiles of 128 rows; staged: dq leaves by way of shared memory; three: blocks of 192 keys.
template <class T, int kHeadDim, class MaskKind, class BiasKind>
BackwardKernel kernel_of(Staging staging, bool tall, bool staged, bool three) {
  if constexpr (kHeadDim > 128) {
    if constexpr (BiasKind::kind == Bias::kTile) return nullptr;
    else
      return staged ? jax_dma_sm90_backward_wide<T, MaskKind, BiasKind, true>
                    : jax_dma_sm90_backward_wide<T, MaskKind, BiasKind, false>;
  } else {
    constexpr bool kAnyMask = MaskKind::kind == Mask::kBits;  // what is rare is compiled for all masks at once
    const auto of = [&](auto staging) -> BackwardKernel {
      if constexpr (kHeadDim == 64 && BiasKind::kind == Bias::kNone)
        if (tall) return jax_dma_sm90_backward<T, kHeadDim, MaskKind, BiasKind, staging.value, 2>;
      if constexpr (kHeadDim == 64 && BiasKind::kind == Bias::kTile && MaskKind::kind != Mask::kIntervals &&
                    (staging.value == Staging::k1 || staging.value == Staging::kF32))
        if (three) return jax_dma_sm90_backward<T, kHeadDim, MaskKind, BiasKind, staging.value, 1, 3>;
      return jax_dma_sm90_backward<T, kHeadDim, MaskKind, BiasKind, staging.value>;
    };
    if constexpr (kAnyMask)
      if (staging == Staging::kAny) return of(std::integral_constant<Staging, Staging::kAny>());
    if constexpr (BiasKind::kind != Bias::kNone)
      if (staging == Staging::k2) return of(std::integral_constant<Staging, Staging::k2>());
    if constexpr (BiasKind::kind == Bias::kTile) {
      if (staging == Staging::k4) return of(std::integral_constant<Staging, Staging::k4>());
      if (staging == Staging::k8) return of(std::integral_constant<Staging, Staging::k8>());
      if (staging == Staging::kF32) return of(std::integral_constant<Staging, Staging::kF32>());
    }
    return of(std::integral_constant<Staging, Staging::k1>());
  }
}

template <class T>
cudaError_t round_dbias(const Problem& p, const BackwardBuffers& buffers, cudaStream_t stream) {
  return sm80::launch(jax_dma_sm90_round_dbias<T>, ceil_div(buffers.dbias_elements, 256), 256, 0, stream,
                      static_cast<const float*>(buffers.dbias), p.dbias.data, buffers.dbias_elements, p.bias_dtype);
}

// All gradients but that of bias, and then that one.
template <class T, int kHeadDim>
cudaError_t launch_apart(const Problem& p, const BackwardBuffers& buffers, const BiasGradient& gradient,
                         cudaStream_t stream) {
  Problem others = p;
  others.dbias = {};
  cudaError_t error =
      launch_backward<T, kHeadDim>(others, {buffers.row_stats, buffers.dq, buffers.turn, nullptr, 0}, stream);
  if (error == cudaSuccess) error = cudaMemsetAsync(buffers.dbias, 0, buffers.dbias_elements * sizeof(float), stream);
  const BackwardScratch scratch{buffers.row_stats,
                                buffers.dq,
                                buffers.turn,
                                buffers.dbias,
                                ceil_div(p.T, queries_per_tile(p.G) / kQueryParts),
                                true};
  if (error == cudaSuccess) error = launch_bias_gradient<T, kHeadDim>(p, scratch, gradient, stream);
  return error == cudaSuccess ? round_dbias<T>(p, buffers, stream) : error;
}

// Whether blocks of three times 64 keys are better than of two, where a bias varies by query: few keys must be wasted,
// and there must be enough blocks for all multiprocessors (under a causal mask they differ in length).
inline bool takes_three(const Problem& p) {
  const int64_t keys = p.S, parts = ceil_div(keys, 192);
  return p.bias.present() && p.bias_dtype == p.dtype && !p.deterministic && p.softcap == 0.0f && !p.start.present() &&
         parts * 192 <= ceil_div(keys, 128) * 128 * 17 / 16 && p.B * p.K * parts >= (p.causal ? 8 : 2) * 132;
}

template <class T, int kHeadDim>
cudaError_t launch_backward(const Problem& p, const BackwardBuffers& buffers, cudaStream_t stream) {
  using sm80::launch;
  if (p.T == 0 || p.S == 0 || p.B == 0 || p.G > kRows || p.H % 8 != 0 || p.Hv % 8 != 0 || encode_tiled() == nullptr)
    return cudaErrorNotSupported;
  if constexpr (kHeadDim <= 128) {
    BiasGradient gradient{};
    if (plan_bias_gradient(p, buffers, &gradient)) return launch_apart<T, kHeadDim>(p, buffers, gradient, stream);
  }
  const int queries = queries_per_tile(p.G) / kQueryParts;
  BackwardMaps maps{};
  BackwardPlan plan{};
  constexpr bool kWide = kHeadDim > 128;
  const bool tile_bias = has_tiles_of_bias(p, kWide);
  if (kWide && tile_bias) return cudaErrorNotSupported;  // slower than the sm_80 class
  // dq of head dimensions above 128 is added from registers, but where the order must be fixed.
  const bool staged = !kWide || p.deterministic;
  bool three = false;
  if constexpr (kHeadDim == 64) {
    three = tile_bias && takes_three(p) && prepare<BackwardShape<64, 1, true, 3>>(p, buffers, &plan, &maps);
    const bool same_rows = plan.dbias_shift == 0 || plan.dbias_f32;  // what there are instances for
    three = three && plan.group_shift >= 0 && same_rows && plan.bias_by_tma &&
            (plan.dbias == DBias::kNone || plan.dbias_by_tma);
    if (!three) plan = BackwardPlan{};
  }
  // Tiles of 128 rows for 64 channels, if they are twice 64 rows.
  bool tall = false;
  if constexpr (kHeadDim == 64)
    tall = !p.bias.present() && kRows % p.G == 0 && prepare<BackwardShape<kHeadDim, 2>>(p, buffers, &plan, &maps);
  const bool fits = three || tall ||
                    (staged ? prepare<BackwardShape<kHeadDim>>(p, buffers, &plan, &maps)
                            : prepare<BackwardShape<kHeadDim, 1, false>>(p, buffers, &plan, &maps));
  if (!fits) return cudaErrorNotSupported;

  const int64_t row_tiles = tall ? kQueryParts * p.query_tiles : ceil_div(p.T, queries);
  // dq of a short sequence is set to 0 where it is added to, in the L2 cache.
  const bool zeroed = tall || kHeadDim != 64 || p.deterministic || row_tiles < 2 || row_tiles > 12;
  const BackwardScratch scratch{buffers.row_stats, buffers.dq, buffers.turn, buffers.dbias, row_tiles, zeroed};
  const int64_t tiles = p.B * p.K * scratch.tiles;
  // The kernels before and after have instances for half of 64 channels.
  constexpr int kHalf = kHeadDim == 64 ? 32 : kHeadDim;
  const bool few_channels = p.H <= kHalf, few_v_channels = p.Hv <= kHalf;
  cudaError_t error = launch(
      few_v_channels ? jax_dma_sm90_row_stats<T, kHeadDim, kHalf> : jax_dma_sm90_row_stats<T, kHeadDim, kHeadDim>,
      tiles, threads_for(few_v_channels ? kHalf : kHeadDim), 0, stream, p, scratch);
  if constexpr (!kWide) {
    const bool skips = p.causal || p.bits.present() || p.start.present();
    if (error == cudaSuccess && skips && buffers.dbias == nullptr &&
        (plan.dbias == DBias::kPerQuery || plan.dbias == DBias::kPerRow))
      error = launch(jax_dma_sm90_clear_dbias<T>, p.B * p.K * p.query_tiles, 256, 0, stream, p, three ? 192 : kKeys,
                     sm80::bias_is_aligned(p, p.dbias));
  }
  if (error == cudaSuccess && buffers.dbias != nullptr)
    error = cudaMemsetAsync(buffers.dbias, 0, buffers.dbias_elements * sizeof(float), stream);

  const bool rare = p.softcap != 0.0f || plan.group_shift < 0 || (p.start.present() && p.start.group != 0) ||
                    (tile_bias && p.bias_dtype != p.dtype);
  const bool key_bias = p.bias.present() && !tile_bias;
  const Staging staging = rare                            ? Staging::kAny
                          : key_bias && p.bias.group != 0 ? Staging::k2
                          : plan.dbias_f32                ? Staging::kF32
                                                          : static_cast<Staging>(plan.dbias_shift);

  const bool by_key = three && p.bits.row == 0 && p.bits.group == 0;  // a mask, if any, is the same for all queries

  // Blocks that add to one element of dbias are launched one after another where the order of additions must be fixed.
  const int parts = static_cast<int>(ceil_div(p.S, three ? 192 : BackwardShape<kHeadDim>::kKeys)),
            heads = static_cast<int>(p.B * p.K);
  const bool in_order = p.deterministic && buffers.dbias != nullptr;
  plan.heads = in_order ? 1 : heads;
  plan.parts = in_order && p.dbias.col == 0 ? 1 : parts;
  // Sums for which the L2 cache is too small: one head's are finished before the next one's.
  constexpr int64_t kLargeSums = int64_t{16} << 20;  // bytes
  plan.heads_apart = !in_order && p.dbias.kv != 0 && buffers.dbias_elements * 4 > kLargeSums;
  const int threads = tall || kWide ? kThreads : three ? 512 : BackwardShape<kHeadDim>::kThreads;
  plan.chunk = p.causal ? std::min(plan.heads, 16) : 1;
  for (plan.first_head = 0; plan.first_head < heads; plan.first_head += plan.heads)
    for (plan.first_part = 0; plan.first_part < parts && error == cudaSuccess; plan.first_part += plan.parts)
      error = sm80::with_kinds(p, [&](auto mask, auto bias) {
        const auto kernel_for = [&](auto bias) {
          return rare     ? kernel_of<T, kHeadDim, sm80::dense_mask, decltype(bias)>(staging, tall, staged, three)
                 : by_key ? kernel_of<T, kHeadDim, sm80::no_mask, decltype(bias)>(staging, tall, staged, three)
                          : kernel_of<T, kHeadDim, decltype(mask), decltype(bias)>(staging, tall, staged, three);
        };
        const BackwardKernel kernel = key_bias ? kernel_for(sm80::key_bias()) : kernel_for(bias);
        return launch(kernel, int64_t{plan.parts} * plan.heads, threads, plan.shared, stream, p, maps, scratch, plan);
      });
  if (error == cudaSuccess)
    error = launch(
        few_channels ? jax_dma_sm90_reorder_dq<T, kHeadDim, kHalf> : jax_dma_sm90_reorder_dq<T, kHeadDim, kHeadDim>,
        tiles, threads_for(few_channels ? kHalf : kHeadDim), 0, stream, p, scratch);
  if (error == cudaSuccess && buffers.dbias_elements > 0) error = round_dbias<T>(p, buffers, stream);
  return error;
}

}  // namespace jax_dma::sm90
