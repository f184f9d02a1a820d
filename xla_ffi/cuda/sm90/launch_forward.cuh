// Plans a forward call, makes its tensor maps, chooses the kernel and launches it.
#pragma once

#include "../sm80/launch_common.cuh"
#include "forward.cuh"
#include "forward_scratch.h"
#include "launch.h"

namespace jax_dma::sm90 {

// bits_in_shared: whether TMA should load mask bits.
inline bool encode_forward_maps(const Problem& p, Bias bias_kind, bool bits_in_shared, int keys, int row_bytes,
                                ForwardMaps* maps, ForwardPlan* plan) {
  const int64_t kb = batch_stride(p, p.k), vb = batch_stride(p, p.v), bb = batch_stride(p, p.bias);
  if (kb < 0 || vb < 0) return false;
  plan->k_batch = kb != 0, plan->v_batch = vb != 0, plan->bias_batch = bb > 0;
  const auto keyed = [&](CUtensorMap* map, const View& view, int64_t channels, int64_t batch) {
    return encode(map, p.dtype, view.data, channels,
                  {{p.S, view.row, keys}, {p.K, view.kv, 1}, {p.B, batch, 1}, {1, 0, 1}}, row_bytes);
  };
  if (!keyed(&maps->k, p.k, p.H, kb) || !keyed(&maps->v, p.v, p.Hv, vb)) return false;
  if (bits_in_shared) {
    const int64_t mb = batch_stride(p, p.bits);
    const int group = p.bits.group != 0 ? p.G : 1, queries = p.bits.row != 0 ? plan->queries : 1;
    plan->bits_batch = mb > 0, plan->bits_bytes = 16 * group * queries;
    plan->bits_by_tma =
        mb >= 0 && p.bits.col != 0 &&
        encode(&maps->bits, DType::kF32, p.bits.data, 4 * p.key_tiles,
               {{group, p.bits.group, group}, {p.T, p.bits.row, queries}, {p.K, p.bits.kv, 1}, {p.B, mb, 1}}, 16);
  }
  if (bias_kind != Bias::kTile) return true;
  const int group = p.bias.group != 0 ? p.G : 1, queries = p.bias.row != 0 ? plan->queries : 1;
  plan->bias_by_tma =
      bb >= 0 && sm80::bias_is_aligned(p, p.bias) &&
      encode(&maps->bias, p.bias_dtype, p.bias.data, p.S,
             {{group, p.bias.group, group}, {p.T, p.bias.row, queries}, {p.K, p.bias.kv, 1}, {p.B, bb, 1}});
  plan->bias_by_head = plan->bias_by_tma && p.bias.row == 0;
  return true;
}

// Whether the rows of a tile can be in the order that goes with shared_tile_bias.
inline bool can_share_bias(const Problem& p) {
  if (p.G < 2 || kWarpRows % p.G != 0 || p.bias.group != 0 || p.bits.group != 0) return false;
  const auto in_order = [&](const View& view, int64_t entries) {  // of the batch
    return (p.K == 1 || view.kv == p.G * view.group) && (entries == 1 || batch_stride(p, view) == p.T * view.row);
  };
  return in_order(p.q, batch_stride(p, p.q) == 0 ? 1 : p.B) && in_order(p.out, p.B) && p.T * p.G % kWarpRows == 0 &&
         p.B * p.T * p.G < INT32_MAX;
}
// Rows of q or out in that order: both halves of the heads of a warp's queries, and so on for all queries of so many
// batch entries. A box has those of `warps` warps.
inline bool encode_in_order(const Problem& p, CUtensorMap* map, const View& view, int64_t channels, int64_t entries,
                            int warps, int row_bytes) {
  const int half = p.G / 2, queries = kWarpRows / p.G;
  return encode(map, p.dtype, view.data, channels,
                {{half, view.group, half},
                 {queries, view.row, queries},
                 {2 * p.K, half * view.group, 2},
                 {entries * p.T / queries, queries * view.row, warps}},
                row_bytes);
}
// `share_bias`: a box is in that order.
inline bool encode_queries(const Problem& p, bool share_bias, int rows, int row_bytes, ForwardMaps* maps,
                           ForwardPlan* plan) {
  const int64_t batch = batch_stride(p, p.q);
  plan->q_batch = batch > 0;
  if (batch < 0) return false;
  if (!share_bias)
    return encode(&maps->q, p.dtype, p.q.data, p.H,
                  {{p.G, p.q.group, p.G}, {p.T, p.q.row, plan->queries}, {p.K, p.q.kv, 1}, {p.B, batch, 1}}, row_bytes);
  return encode_in_order(p, &maps->q, p.q, p.H, batch > 0 ? p.B : 1, rows / kWarpRows, row_bytes);
}

// How many parts to divide the keys of each tile among, so that few tiles still fill the device. Partial results must
// fit in the scratch.
constexpr int kFewestKeyTiles = 8;  // of a split
inline int choose_splits(const Problem& p, int64_t tiles, int blocks, int64_t scratch_floats) {
  const int64_t a_split = p.B * p.N * p.T * (p.Hv + 2);
  const int64_t most = std::min<int64_t>({scratch_floats / a_split, p.key_tiles / kFewestKeyTiles, 2 * blocks / tiles});
  int best = 1;
  double best_use = 0;
  for (int splits = 1; splits <= most; ++splits) {
    const int64_t items = tiles * splits;
    const double use = static_cast<double>(items) / (ceil_div(items, blocks) * blocks);
    if (use > best_use + 0.02) best = splits, best_use = use;
  }
  return best;
}

// Whether the records of a bias per key are used often enough to pay for the kernel that makes them.
constexpr int kFewestUses = 4;            // of a record, by tiles of queries
constexpr int kFewestTilesOfABlock = 24;  // of keys: the gain is some 0.3 us each, the kernel takes about 4 us
inline bool use_records(const Problem& p, int64_t items, int blocks, int64_t parts, int64_t records) {
  return items * parts >= kFewestUses * records &&
         items * p.key_tiles >= int64_t{kFewestTilesOfABlock} * (p.causal ? 2 : 1) * blocks;
}

// Whether the products may add the biases of a tile (product_tile_bias): where each bias is used often enough to pay
// for looking at it first, each row has its own, and 1 / scale is a sum of `parts` numbers of type T.
constexpr int kFewestEntries = 64;  // of the batch; looking at the biases takes the time of one or two
template <class T>
bool can_multiply_bias(const Problem& p, int used_rows, int rows, int parts) {
  float rest = 1 / p.scale;
  for (int i = 0; i < parts; ++i) rest -= static_cast<float>(static_cast<T>(rest));
  return p.B >= kFewestEntries && batch_stride(p, p.bias) == 0 && p.bias.row != 0 && (p.G == 1 || p.bias.group != 0) &&
         used_rows == rows && std::abs(rest) <= 1e-6f / p.scale;
}

template <class T, int kHeadDim>
cudaError_t launch_forward(const Problem& p, const ForwardScratch& scratch, cudaStream_t stream) {
  if (p.T == 0 || p.S == 0 || p.B == 0 || p.G > kTileRows) return cudaErrorNotSupported;
  int device = 0, shared = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;

  const auto run = [&](auto mask, auto bias) {
    using MaskKind = decltype(mask);
    using BiasKind = decltype(bias);
    using Shape = ForwardShape<kHeadDim, MaskKind::kind, BiasKind::kind>;
    constexpr int kStages = Shape::kStages;
    constexpr bool kBitsShared = kBitsInShared<kHeadDim, MaskKind::kind, false>;
    ForwardMaps maps{};
    ForwardPlan plan{};
    const int tile_queries = queries_per_tile(p.G);
    plan.queries =
        Shape::kRows > kTileRows && tile_queries % 2 == 0 ? tile_queries * Shape::kRows / kTileRows : tile_queries;
    plan.consumers = std::min<int64_t>(p.T, plan.queries) * p.G <= 64 ? 128 : Shape::kConsumers;
    const int64_t tiles = ceil_div(p.T, plan.queries), heads = p.K * p.B, blocks = processors;
    plan.splits = choose_splits(p, tiles * heads, processors, scratch.floats);
    plan.split_tiles = static_cast<int>(ceil_div(p.key_tiles, plan.splits));
    plan.splits = static_cast<int>(ceil_div(p.key_tiles, plan.split_tiles));
    plan.partial = scratch.data;
    const int64_t items = tiles * heads * plan.splits;
    // Distances between rows of the packed mask are held in 32 bits.
    const int64_t mask_span = p.bits.group * (p.G - 1) + p.bits.row * Shape::kRows;
    if (items > INT32_MAX / 2 || mask_span > INT32_MAX) return cudaErrorNotSupported;
    plan.items = static_cast<int>(items);
    plan.order = tile_order(tiles, heads, p.S * (p.H + p.Hv) * 2, processors);
    plan.by_heads = Divisor(p.K), plan.by_group = Divisor(p.G);
    while (1 << plan.query_shift < tile_queries) ++plan.query_shift;
    if (!encode_forward_maps(p, bias.kind, kBitsShared, Shape::kKeys, Shape::kRowBytes, &maps, &plan))
      return cudaErrorNotSupported;

    const bool intervals = p.start.present();
    const int interval_bytes = intervals ? 8 * Shape::kKeys * (p.start.group != 0 ? p.G : 1) : 0;
    const bool rare = p.softcap != 0.0f || p.scale <= 0.0f ||
                      (p.bits.present() && (intervals || p.bits.col == 0 || (kBitsShared && !plan.bits_by_tma)));
    using Record = typename Shape::Record;
    constexpr bool kWritten = kWritesRecords<kHeadDim, MaskKind::kind>;
    bool in_product =
        bias.kind == Bias::kKey && !rare && p.scale >= kLeastScaleInProduct &&
        Shape::kRecordsEnd + kStages * interval_bytes + static_cast<int>(sizeof(ForwardBarriers)) <= shared;
    int64_t records = 0;  // that are brought
    if (in_product && !kWritten) {
      const int64_t parts = p.key_tiles * (kKeyTile / Shape::kKeys);
      plan.records = view_of_records(p, parts, scratch.data, &records);
      const int64_t floats = records * static_cast<int64_t>(sizeof(Record) / sizeof(float));
      in_product = plan.splits == 1 && floats <= scratch.floats && use_records(p, items, processors, parts, records);
    }
    plan.side_stage = (bias.kind == Bias::kKey && !in_product ? 4 * Shape::kKeys : 0) + interval_bytes;
    const int rest = kStages * plan.side_stage + static_cast<int>(sizeof(ForwardBarriers));
    int bias_stages = kBiasStages;
    if (bias.kind == Bias::kTile) {
      plan.bias_rows = (plan.bias_by_head ? 1 : plan.queries) * (p.bias.group != 0 ? p.G : 1);
      plan.bias_panel = (plan.bias_rows * 128 + 1023) / 1024 * 1024;
      plan.bias_stage = plan.bias_panel * (Shape::kKeys * (p.bias_dtype == DType::kF32 ? 4 : 2) / 128);
      if (Shape::kBiasAt + bias_stages * plan.bias_stage + rest > shared) bias_stages = 1;
    }
    plan.bias_two = bias_stages - 1;
    plan.side_at = in_product ? Shape::kRecordsEnd : Shape::kBiasAt + bias_stages * plan.bias_stage;
    plan.barriers_at = plan.side_at + kStages * plan.side_stage;
    int bytes = plan.barriers_at + static_cast<int>(sizeof(ForwardBarriers));

    const bool general =
        rare || (bias.kind == Bias::kKey && !in_product) ||
        (bias.kind == Bias::kTile && (!plan.bias_by_tma || p.bias_dtype != p.dtype || bias_stages == 1));
    if (kBitsShared && !general) {
      plan.bits_at = (bytes + 127) / 128 * 128, plan.bits_stage = (plan.bits_bytes + 127) / 128 * 128;
      bytes = plan.bits_at + kBitsStages * plan.bits_stage;
    }
    // (At larger head dimensions it gains nothing without a mask.)
    constexpr bool kMayShare = BiasKind::kind == Bias::kTile &&
                               (MaskKind::kind == Mask::kBits || (MaskKind::kind == Mask::kNone && kHeadDim <= 64));
    const bool share_bias = kMayShare && !general && can_share_bias(p);
    constexpr bool kMayMultiply = BiasKind::kind == Bias::kTile && MaskKind::kind != Mask::kIntervals && kHeadDim <= 64;
    const int diagonal_at = (bytes + 127) / 128 * 128, with_diagonal = diagonal_at + Shape::kDiagonals * kDiagonalBytes;
    const bool multiply_bias = kMayMultiply && !general && !share_bias && plan.splits == 1 &&
                               scratch.floats >= kJudges && with_diagonal <= shared &&
                               can_multiply_bias<T>(p, plan.queries * p.G, Shape::kRows, Shape::kDiagonals);
    if (multiply_bias) {
      plan.diagonal_at = diagonal_at, bytes = with_diagonal;
      plan.unfit = reinterpret_cast<uint32_t*>(scratch.data);
    }
    if (MaskKind::kind == Mask::kBits && kHeadDim == 128 && share_bias) {
      plan.second_query = (bytes + 1023) / 1024 * 1024, bytes = plan.second_query + Shape::kQueryBytes;
      if (!encode_in_order(p, &maps.out, p.out, p.Hv, p.B, 1, Shape::kRowBytes)) return cudaErrorNotSupported;
    }
    if (bytes > shared || !encode_queries(p, share_bias, Shape::kRows, Shape::kRowBytes, &maps, &plan))
      return cudaErrorNotSupported;
    if (MaskKind::kind == Mask::kBits && kHeadDim >= 128 && !general && plan.splits == 1 && p.bits.row != 0 &&
        items > 2 * blocks && scratch.floats > static_cast<int64_t>(records * sizeof(Record) / sizeof(float))) {
      plan.next_item = reinterpret_cast<int*>(scratch.data + scratch.floats - 1);
      error = cudaMemsetAsync(plan.next_item, 0, sizeof(int), stream);
      if (error != cudaSuccess) return error;
    }
    if (in_product && !kWritten) {
      error = fill_bias_records(p, static_cast<Record*>(plan.records.data), records, stream);
      if (error != cudaSuccess) return error;
    }
    if constexpr (kMayMultiply)
      if (multiply_bias) {
        error = sm80::launch(jax_dma_sm90_judge_bias<T>, kJudges, kJudgeThreads, 0, stream, p, plan.unfit);
        if (error != cudaSuccess) return error;
      }
    // A block takes every blocks-th tile or so: neighbours in the order have lists of much the same length.
    const auto launch = [&](auto kernel) {
      return sm80::launch(kernel, std::min(items, blocks), Shape::kThreads, bytes, stream, p, maps, plan);
    };
    const auto launch_instance = [&] {
      if (general) return launch(jax_dma_sm90_forward<T, kHeadDim, MaskKind, BiasKind, true>);
      if constexpr (kMayShare)
        if (share_bias) return launch(jax_dma_sm90_forward<T, kHeadDim, MaskKind, shared_tile_bias, false>);
      if constexpr (kMayMultiply)
        if (multiply_bias) return launch(jax_dma_sm90_forward<T, kHeadDim, MaskKind, product_tile_bias, false>);
      return launch(jax_dma_sm90_forward<T, kHeadDim, MaskKind, BiasKind, false>);
    };
    const cudaError_t launched = launch_instance();
    if (plan.splits == 1 || launched != cudaSuccess) return launched;
    return sm80::launch(jax_dma_sm90_combine<T>, ceil_div(p.B * p.N * p.T, 4), 128, 0, stream, p, plan.partial,
                        plan.splits);
  };
  return sm80::with_kinds(p, run);
}

}  // namespace jax_dma::sm90
