// Plans a forward call, makes its tensor maps, chooses the kernel and launches it.
#pragma once

#include "../sm80/launch_common.cuh"
#include "forward.cuh"
#include "launch.h"

namespace jax_dma::sm90 {

inline bool encode_forward_maps(const Problem& p, Bias bias_kind, int keys, ForwardMaps* maps, ForwardPlan* plan) {
  const int64_t qb = batch_stride(p, p.q), kb = batch_stride(p, p.k), vb = batch_stride(p, p.v), bb = batch_stride(p, p.bias);
  if (qb < 0 || kb < 0 || vb < 0) return false;
  plan->q_batch = qb != 0, plan->k_batch = kb != 0, plan->v_batch = vb != 0, plan->bias_batch = bb > 0;
  const auto keyed = [&](CUtensorMap* map, const View& view, int64_t channels, int64_t batch) {
    return encode(map, p.dtype, view.data, channels, {{p.S, view.row, keys}, {p.K, view.kv, 1}, {p.B, batch, 1}, {1, 0, 1}});
  };
  if (!encode(&maps->q, p.dtype, p.q.data, p.H, {{p.G, p.q.group, p.G}, {p.T, p.q.row, plan->queries}, {p.K, p.q.kv, 1}, {p.B, qb, 1}})) return false;
  if (!keyed(&maps->k, p.k, p.H, kb) || !keyed(&maps->v, p.v, p.Hv, vb)) return false;
  if (bias_kind != Bias::kTile) return true;
  const int group = p.bias.group != 0 ? p.G : 1;
  plan->bias_by_tma = bb >= 0 && p.bias.row != 0 && sm80::bias_is_aligned(p, p.bias) &&
                      encode(&maps->bias, p.bias_dtype, p.bias.data, p.S, {{group, p.bias.group, group}, {p.T, p.bias.row, plan->queries}, {p.K, p.bias.kv, 1}, {p.B, bb, 1}});
  return true;
}

template <class T, int kHeadDim>
cudaError_t launch_forward(const Problem& p, cudaStream_t stream) {
  using Shape = ForwardShape<kHeadDim>;
  if (p.T == 0 || p.S == 0 || p.B == 0 || p.G > kTileRows) return cudaErrorNotSupported;
  int device = 0, shared = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;

  return sm80::with_kinds(p, [&](auto mask, auto bias) {
    ForwardMaps maps{};
    ForwardPlan plan{};
    plan.queries = queries_per_tile(p.G);
    const int64_t items = p.query_tiles * p.K * p.B;
    if (items > INT32_MAX / 2) return cudaErrorNotSupported;
    plan.items = static_cast<int>(items), plan.heads = static_cast<int>(p.K * p.B);
    if (!encode_forward_maps(p, bias.kind, Shape::kKeys, &maps, &plan)) return cudaErrorNotSupported;

    const bool intervals = p.start.present();
    plan.helpers = intervals || bias.kind == Bias::kKey || (bias.kind == Bias::kTile && !plan.bias_by_tma);
    plan.side_stage = (bias.kind == Bias::kKey ? 4 * Shape::kKeys : 0) + (intervals ? 8 * Shape::kKeys * (p.start.group != 0 ? p.G : 1) : 0);
    const int rest = kSideStages * plan.side_stage + static_cast<int>(sizeof(typename Shape::Barriers));
    plan.bias_stages = kMaxBiasStages;
    if (bias.kind == Bias::kTile) {
      plan.bias_rows = plan.queries * (p.bias.group != 0 ? p.G : 1);
      plan.bias_panel = (plan.bias_rows * 128 + 1023) / 1024 * 1024;
      plan.bias_stage = plan.bias_panel * (Shape::kKeys * (p.bias_dtype == DType::kF32 ? 4 : 2) / 128);
      while (plan.bias_stages > 1 && Shape::kBiasAt + plan.bias_stages * plan.bias_stage + rest > shared) --plan.bias_stages;
    }
    plan.side_at = Shape::kBiasAt + plan.bias_stages * plan.bias_stage;
    plan.barriers_at = plan.side_at + kSideStages * plan.side_stage;
    const int bytes = plan.barriers_at + static_cast<int>(sizeof(typename Shape::Barriers));
    if (bytes > shared) return cudaErrorNotSupported;

    // A block takes every blocks-th tile: neighbours in the order have lists of much the same length.
#ifdef JAX_DMA_SM90_BLOCK_PER_TILE  // to measure: the hardware balances, but nothing overlaps the start and end of a tile
    const int64_t blocks = items;
#else
    const int64_t blocks = std::min<int64_t>(items, processors);
#endif
    return sm80::launch(jax_dma_sm90_forward<T, kHeadDim, decltype(mask), decltype(bias)>, blocks, Shape::kThreads, bytes, stream, p, maps, plan);
  });
}

}  // namespace jax_dma::sm90
