// Plans and launches the kernel of bias_gradient.cuh.
#pragma once

#include "../sm80/launch_common.cuh"
#include "bias_gradient.cuh"
#include "launch.h"

namespace jax_dma::sm90 {

struct BiasGradient {
  BiasGradientPlan plan;
  BiasGradientMaps maps;
  int blocks;  // of one range
};

// How a call's dbias is summed by a kernel of its own, where the order of additions must be fixed. False where the
// backward kernel is to do it: for what is rare, and in any order, which is faster.
inline bool plan_bias_gradient(const Problem& p, const BackwardBuffers& buffers, BiasGradient* gradient) {
  using Shape = BiasGradientShape<64>;  // rows and keys of a tile are the same for all
  BiasGradientPlan& plan = gradient->plan;
  BiasGradientMaps& maps = gradient->maps;
  if (!p.deterministic || buffers.dbias == nullptr) return false;
  if (p.bias_dtype != p.dtype || p.softcap != 0.0f || p.start.present()) return false;
  if (p.dbias.row == 0 || p.dbias.col != 1 || p.bias.row == 0 || p.bias.col != 1) return false;
  if (p.G != 1 && p.G != 2 && p.G != 4 && p.G != 8) return false;
  plan.kept_axis = -1, plan.outer = 1;
  for (int axis = 0; axis < p.batch_rank; ++axis) {
    if (p.dbias.batch[axis] == 0) continue;
    if (plan.kept_axis >= 0) return false;
    plan.kept_axis = axis, plan.outer = static_cast<int>(p.batch_size[axis]);
  }
  const int64_t outer_stride = plan.kept_axis < 0 ? 0 : p.dbias.batch[plan.kept_axis],
                bias_stride = plan.kept_axis < 0 ? 0 : p.bias.batch[plan.kept_axis];
  for (const int64_t stride : {p.dbias.row, p.dbias.kv, p.dbias.group, outer_stride})  // additions of four keys
    if (stride % 4 != 0) return false;
  plan.heads = p.dbias.kv != 0 ? p.K : 1;
  plan.entries = static_cast<int>(p.B / plan.outer * (p.K / plan.heads));

  while (1 << plan.group_shift < p.G) ++plan.group_shift;
  plan.bias_shift = p.bias.group == 0 ? plan.group_shift : 0;
  const int queries = Shape::kRows >> plan.group_shift, group = p.bias.group != 0 ? p.G : 1;
  plan.query_tiles = static_cast<int>(ceil_div(p.T, queries)), plan.key_tiles = static_cast<int>(p.key_tiles);
  const int row_bytes = std::max(p.H, p.Hv) <= 32 ? 64 : 128;
  const auto by_query = [&](CUtensorMap* map, bool* has_batch, const View& view, int channels) {
    const int64_t batch = batch_stride(p, view);
    *has_batch = batch != 0;
    return batch >= 0 &&
           encode(map, p.dtype, view.data, channels,
                  {{p.G, view.group, p.G}, {p.T, view.row, queries}, {p.K, view.kv, 1}, {p.B, batch, 1}}, row_bytes);
  };
  const auto by_key = [&](CUtensorMap* map, bool* has_batch, const View& view, int channels) {
    const int64_t batch = batch_stride(p, view);
    *has_batch = batch != 0;
    return batch >= 0 &&
           encode(map, p.dtype, view.data, channels,
                  {{p.S, view.row, Shape::kKeys}, {p.K, view.kv, 1}, {p.B, batch, 1}, {1, 0, 1}}, row_bytes);
  };
  plan.bias_batch = bias_stride != 0;
  if (!by_query(&maps.q, &plan.q_batch, p.q, p.H) || !by_query(&maps.dout, &plan.dout_batch, p.dout, p.Hv) ||
      !by_key(&maps.k, &plan.k_batch, p.k, p.H) || !by_key(&maps.v, &plan.v_batch, p.v, p.Hv) ||
      !encode(&maps.bias, p.bias_dtype, p.bias.data, p.S,
              {{group, p.bias.group, group},
               {p.T, p.bias.row, queries},
               {p.K, p.bias.kv, 1},
               {plan.outer, bias_stride, 1}}))
    return false;

  // The ranges that take the least time, in entries; a block needs that of a few to begin and to end. The blocks of a
  // tile take turns, for which there is a counter if the tiles are no more than those of dq.
  const int64_t blocks = int64_t{plan.query_tiles} * plan.key_tiles * plan.heads * plan.outer;
  if (blocks > 1 << 24) return false;
  gradient->blocks = static_cast<int>(blocks);
  const int most = blocks <= 4 * p.B * p.K * p.query_tiles ? 64 : 1;
  int64_t least = INT64_MAX;
  for (int ranges = 1; ranges <= std::clamp(plan.entries / 8, 1, most); ++ranges) {
    const int64_t time = ceil_div(blocks * ranges, sm80::processors()) * (ceil_div(plan.entries, ranges) + 4);
    if (time < least) least = time, plan.ranges = ranges;
  }
  return true;
}

// Adds to the float32 sums, which are zeros so far. Row statistics are there; the turns of dq have been taken.
template <class T, int kHeadDim>
cudaError_t launch_bias_gradient(const Problem& p, const BackwardScratch& scratch, const BiasGradient& gradient,
                                 cudaStream_t stream) {
  if constexpr (kHeadDim == 64)
    if (std::max(p.H, p.Hv) <= 32) return launch_bias_gradient<T, 32>(p, scratch, gradient, stream);
  if (gradient.plan.ranges > 1) {
    const cudaError_t error = cudaMemsetAsync(scratch.turn, 0, gradient.blocks * sizeof(int), stream);
    if (error != cudaSuccess) return error;
  }
  using Shape = BiasGradientShape<kHeadDim>;
  return sm80::launch(
      p.bits.present() ? jax_dma_sm90_bias_gradient<T, kHeadDim, true> : jax_dma_sm90_bias_gradient<T, kHeadDim, false>,
      int64_t{gradient.blocks} * gradient.plan.ranges, Shape::kThreads, Shape::kBytes, stream, p, gradient.maps,
      scratch, gradient.plan);
}

}  // namespace jax_dma::sm90
