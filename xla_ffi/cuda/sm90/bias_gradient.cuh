// The gradient of a bias that batch entries (or key/value heads) share, summed in a fixed order, for Hopper.
//
// A block of the backward kernel adds its tile of ds to float32 sums in memory. In a fixed order it would have to wait
// for that of the batch entry before. Here a block owns a tile of dbias instead, walks the entries that share it, and
// keeps the sum in registers:
//
//   s = q k^T, p = exp2(logits - lse)       dp = dout v^T, dbias += p (dp - delta)
//
// which repeats two of the backward pass's five products. The tile of bias is loaded once.
//
// A tile is 192 rows (queries x heads, head fastest) by 128 keys; each of three warpgroups computes 64 rows, 64 keys at
// a time. A fourth loads: its first warp finds the entries in which something of the tile is visible, and asks TMA for
// q and k with the row statistics, and for dout and v, each in stages of their own. The entries are cut into ranges, so
// that there are blocks enough for all multiprocessors; the blocks of a tile add to it in turn.
//
// Shared memory, head dim 64: two stages of q, k, dout and v 160 KB, bias 48 KB, row statistics 3 KB.
//
// What causality, T or S hide is hidden in all entries: whatever was summed there, NaN perhaps, is dropped at the end.
#pragma once

#include "backward.cuh"

namespace jax_dma::sm90 {

// kHeadDim: at least as many channels as q and v have.
template <int kHeadDim>
struct BiasGradientShape {
  static constexpr int kGroups = 3, kRows = 64 * kGroups, kKeys = kKeyTile, kThreads = 128 * (kGroups + 1);
  static constexpr int kParts = 2, kColumns = kKeys / kParts;  // keys at a time
  // Operands are panels of up to 64 channels, swizzled.
  static constexpr int kRowBytes = kHeadDim < 64 ? 2 * kHeadDim : 128, kPanels = 2 * kHeadDim / kRowBytes;
  static constexpr int kQPanel = kRows * kRowBytes, kKPanel = kKeys * kRowBytes, kBiasPanel = kRows * 128;
  static constexpr int kQBytes = kPanels * kQPanel, kKBytes = kPanels * kKPanel, kStatBytes = kRows * 8;
  static constexpr int kStages = 128 / kHeadDim;
  static constexpr int kQ = 0, kK = kQ + kStages * kQBytes, kDout = kK + kStages * kKBytes,
                       kV = kDout + kStages * kQBytes, kBias = kV + kStages * kKBytes, kStats = kBias + 2 * kBiasPanel,
                       kBytes = kStats + kStages * kStatBytes;
};

struct BiasGradientPlan {
  int entries;    // that share an element of bias: batch entries, times key/value heads if those share it too
  int ranges;     // parts of them
  int outer;      // batch entries that do not share
  int kept_axis;  // the batch axis along which those differ, or -1
  int heads;      // key/value heads that do not share: K or 1
  int query_tiles, key_tiles;
  int group_shift, bias_shift;  // of a row: its query, and its row in a tile of bias
  bool q_batch, dout_batch, k_batch, v_batch, bias_batch;
};

// q and dout: [channel, head of the group, query, key/value head, batch entry] in boxes of a tile's rows; k and v:
// [channel, key, key/value head, batch entry] in boxes of its keys; bias in boxes of its rows and 64 keys.
struct BiasGradientMaps {
  CUtensorMap q, dout, k, v, bias;
};

// Where the consumers find what TMA does not bring of an entry.
struct EntryInfo {
  const uint32_t* bits;
  const float* lse;  // null: there are no more entries
};

template <int kStages>
struct BiasGradientShared {
  EntryInfo info[kStages];
  // Of q, k and statistics; of dout and v.
  uint64_t s_full[kStages], s_free[kStages], dp_full[kStages], dp_free[kStages], bias_full;
};

// The batch entry that is `index`-th of those that share bias and `outer`-th of those that do not.
__device__ __forceinline__ int batch_of(const Problem& p, int kept_axis, int outer, int index) {
  int batch = 0, stride = 1;
#pragma unroll 1
  for (int axis = p.batch_rank - 1; axis >= 0; --axis) {
    const int size = static_cast<int>(p.batch_size[axis]), rest = axis == kept_axis ? outer : index;
    batch += rest % size * stride, stride *= size;
    (axis == kept_axis ? outer : index) = rest / size;
  }
  return batch;
}

template <class T, int kHeadDim, bool kBits>
__global__ void __launch_bounds__(BiasGradientShape<kHeadDim>::kThreads, 1)
    jax_dma_sm90_bias_gradient(const __grid_constant__ Problem p, const __grid_constant__ BiasGradientMaps maps,
                               const __grid_constant__ BackwardScratch scratch,
                               const __grid_constant__ BiasGradientPlan plan) {
  using Shape = BiasGradientShape<kHeadDim>;
  constexpr int kRows = Shape::kRows, kColumns = Shape::kColumns, kParts = Shape::kParts, kStages = Shape::kStages,
                kRowBytes = Shape::kRowBytes, kGroups = Shape::kGroups;
  extern __shared__ __align__(1024) char dynamic[];
  __shared__ BiasGradientShared<kStages> shared;
  const uint32_t base = ptx::shared_address(dynamic);

  // Range by range; tiles that read the same q, k, v and dout are neighbours.
  const int blocks = gridDim.x / plan.ranges, block = blockIdx.x % blocks, range = blockIdx.x / blocks;
  const int query_tile = block % plan.query_tiles, key_tile = block / plan.query_tiles % plan.key_tiles;
  const int bias_head = block / plan.query_tiles / plan.key_tiles % plan.heads,
            outer = block / plan.query_tiles / plan.key_tiles / plan.heads;
  const int tile_queries = kRows >> plan.group_shift, t0 = query_tile * tile_queries, key = key_tile * Shape::kKeys;
  const int length = static_cast<int>(p.T), keys = static_cast<int>(p.S), offset = static_cast<int>(p.causal_offset());
  if (p.causal && key > min(t0 + tile_queries, length) - 1 + offset) return;
  const int first = static_cast<int>(int64_t{plan.entries} * range / plan.ranges),
            end = static_cast<int>(int64_t{plan.entries} * (range + 1) / plan.ranges);
  // Tiles of 64 rows that there are statistics for.
  const int stat_tiles = min(kGroups, static_cast<int>(scratch.tiles) - query_tile * kGroups);

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&shared.s_full[i], 1), barrier_init(&shared.dp_full[i], 1);
      barrier_init(&shared.s_free[i], 4 * kGroups), barrier_init(&shared.dp_free[i], 4 * kGroups);
    }
    barrier_init(&shared.bias_full, 1);
    barrier_init_fence();
  }
  for (int i = threadIdx.x; i < kStages * 2 * kRows; i += Shape::kThreads)  // rows that are not there see nothing
    reinterpret_cast<float*>(dynamic + Shape::kStats)[i] = i % 128 < 64 ? INFINITY : 0.0f;
  fence_async_proxy();
  __syncthreads();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < 4) {
    give_registers<32>();
    if (warp != 0) return;
    if (lane == 0) {
      arrive_expecting(&shared.bias_full, 2 * Shape::kBiasPanel >> plan.bias_shift);
      for (int panel = 0; panel < 2; ++panel)
        load_box(base + Shape::kBias + panel * Shape::kBiasPanel, &maps.bias, &shared.bias_full, key + 64 * panel, 0,
                 t0, p.bias.kv != 0 ? bias_head : 0, plan.bias_batch ? outer : 0);
    }
    int i = 0;
#pragma unroll 1
    for (int begin = first; begin < end; begin += 32) {
      // 32 entries at a time, one a lane: where they are, and whether the plan knows anything visible in the tile.
      const int index = begin + lane;
      int batch = 0, head = bias_head;
      bool seen = index < end;
      EntryInfo info{};
      if (seen) {
        if (plan.heads == 1) head = index % p.K;
        batch = batch_of(p, plan.kept_axis, outer, plan.heads == 1 ? index / p.K : index);
        info.lse = static_cast<const float*>(p.lse.data) + offset_of(p, p.lse, batch, head, 0);
        if constexpr (kBits) {
          info.bits =
              static_cast<const uint32_t*>(p.bits.data) + offset_of(p, p.bits, batch, head, 0) + key / 32 * p.bits.col;
          const uint32_t* const map = static_cast<const uint32_t*>(p.tiles_by_query.data) +
                                      offset_of(p, p.tiles_by_query, batch, head, 0) +
                                      key_tile / kTilesPerWord * p.tiles_by_query.col;
          const int plan_queries = queries_per_tile(p.G);
          uint32_t word = 0;
          for (int t = t0 / plan_queries; t * plan_queries < min(t0 + tile_queries, length); ++t)
            word |= map[t * p.tiles_by_query.row];
          seen = (word >> key_tile % kTilesPerWord & 1) != 0;
        }
      }
      uint32_t left = __ballot_sync(~0u, seen);
#pragma unroll 1
      for (; left != 0; left &= left - 1, ++i) {
        const int stage = i % kStages, parity = (i / kStages & 1) ^ 1;
        if (lane == __ffs(left) - 1) {  // the lane of the entry
          const auto load_rows = [&](int at, const CUtensorMap* map, uint64_t* barrier, bool has_batch) {
            for (int panel = 0; panel < Shape::kPanels; ++panel)
              load_box(base + at + stage * Shape::kQBytes + panel * Shape::kQPanel, map, barrier, 64 * panel, 0, t0,
                       head, has_batch ? batch : 0);
          };
          const auto load_keys = [&](int at, const CUtensorMap* map, uint64_t* barrier, bool has_batch) {
            for (int panel = 0; panel < Shape::kPanels; ++panel)
              load_box(base + at + stage * Shape::kKBytes + panel * Shape::kKPanel, map, barrier, 64 * panel, key, head,
                       has_batch ? batch : 0, 0);
          };
          wait(&shared.s_free[stage], parity);
          shared.info[stage] = info;
          arrive_expecting(&shared.s_full[stage], Shape::kQBytes + Shape::kKBytes + 512 * stat_tiles);
          load_rows(Shape::kQ, &maps.q, &shared.s_full[stage], plan.q_batch);
          load_keys(Shape::kK, &maps.k, &shared.s_full[stage], plan.k_batch);
          load_bytes(
              base + Shape::kStats + stage * Shape::kStatBytes,
              scratch.row_stats + ((int64_t{batch} * p.K + head) * scratch.tiles + query_tile * kGroups) * (2 * 64),
              512 * stat_tiles, &shared.s_full[stage]);
          wait(&shared.dp_free[stage], parity);
          arrive_expecting(&shared.dp_full[stage], Shape::kQBytes + Shape::kKBytes);
          load_rows(Shape::kDout, &maps.dout, &shared.dp_full[stage], plan.dout_batch);
          load_keys(Shape::kV, &maps.v, &shared.dp_full[stage], plan.v_batch);
        }
        __syncwarp();
      }
    }
    if (lane == 0) {
      wait(&shared.s_free[i % kStages], (i / kStages & 1) ^ 1);
      shared.info[i % kStages].lse = nullptr;
      arrive(&shared.s_full[i % kStages]);
    }
    return;
  }

  take_registers<160>();
  // By votes: what is made of it the compiler then knows to be the same for all lanes, as descriptors must be.
  const int group = (__any_sync(~0u, threadIdx.x >= 256) ? 1 : 0) + (__any_sync(~0u, threadIdx.x >= 384) ? 1 : 0);
  const int row = 64 * group + 16 * (warp % 4) + lane / 4;                             // and the one 8 further on
  const int bias_row = (64 * group + 16 * (warp % 4) + lane % 16) >> plan.bias_shift;  // that the lane reads
  const uint32_t bias_address = base + Shape::kBias + bias_row * 128;
  // Whether any of these 64 rows may see any key of a part.
  const int first_query = t0 + (64 * group >> plan.group_shift),
            last_query = min(t0 + ((64 * group + 63) >> plan.group_shift), length - 1);
  const auto is_live = [&](int part) {
    const int k = key + kColumns * part;
    return first_query < length && k < keys && (!p.causal || k <= last_query + offset);
  };
  const auto release = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) arrive(barrier);
  };
  const auto described = [](uint32_t address) {
    constexpr uint64_t kHigh = 8 * kRowBytes >> 4 | (kRowBytes == 128 ? 1u : 2u) << 30;
    return kHigh << 32 | (address >> 4 | 1u << 16);
  };
  // d = rows columns^T, for this warpgroup's rows of the operand at a and a part's keys of that at b.
  const auto multiply = [&](float (&d)[kColumns / 2], uint32_t a, uint32_t b, int part) __attribute__((always_inline)) {
    const uint64_t rows = described(a + group * (64 * kRowBytes)), columns = described(b + part * kColumns * kRowBytes);
    constexpr int kSteps = kRowBytes / 32;  // of 16 channels, in a panel
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kHeadDim / 16; ++c)
      wgmma_shared<T>(d, rows + c / kSteps * (Shape::kQPanel / 16) + c % kSteps * 2,
                      columns + c / kSteps * (Shape::kKPanel / 16) + c % kSteps * 2, c > 0);
    wgmma_commit();
  };

  float sum[kParts][kColumns / 2], s[kColumns / 2], dp[kColumns / 2];
#pragma unroll
  for (int part = 0; part < kParts; ++part)
#pragma unroll
    for (int c = 0; c < kColumns / 2; ++c) sum[part][c] = 0.0f;
  wait(&shared.bias_full, 0);
#pragma unroll 1
  for (int i = 0;; ++i) {
    const int stage = i % kStages, parity = i / kStages & 1;
    wait(&shared.s_full[stage], parity);
    const EntryInfo info = shared.info[stage];
    if (info.lse == nullptr) break;
    const float* const stats = reinterpret_cast<const float*>(dynamic + Shape::kStats + stage * Shape::kStatBytes) +
                               128 * group + 16 * (warp % 4) + lane / 4;
    const float lse[2] = {stats[0], stats[8]}, minus_delta[2] = {stats[64], stats[72]};
    const bool special = __any_sync(~0u, RowStat{lse[0]}.special() || RowStat{lse[1]}.special());
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const bool last = part == kParts - 1;
      if (!is_live(part)) {
        if (part == 0) wait(&shared.dp_full[stage], parity);
        if (last) release(&shared.s_free[stage]), release(&shared.dp_free[stage]);
        continue;
      }
      multiply(s, base + Shape::kQ + stage * Shape::kQBytes, base + Shape::kK + stage * Shape::kKBytes, part);
      if (part == 0) wait(&shared.dp_full[stage], parity);
      multiply(dp, base + Shape::kDout + stage * Shape::kQBytes, base + Shape::kV + stage * Shape::kKBytes, part);
      uint32_t bits[2][kColumns / 32];
      if constexpr (kBits) {  // those of this thread's keys, beside the products
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int r = row + 8 * j, t = min(t0 + (r >> plan.group_shift), length - 1);
          const uint32_t* const words = info.bits + t * p.bits.row + (r & (p.G - 1)) * p.bits.group;
#pragma unroll
          for (int w = 0; w < kColumns / 32; ++w) bits[j][w] = words[(kColumns / 32 * part + w) * p.bits.col];
        }
      }
      wgmma_wait<1>();
      hold(s);
      if (last) release(&shared.s_free[stage]);
      const int l = fresh_lane();
#pragma unroll
      for (int n = 0; n < kColumns / 8; n += 2) {
        uint32_t pairs[4];
        ptx::load_matrix(pairs, bias_address + part * Shape::kBiasPanel + (((n + l / 16) ^ (bias_row & 7)) << 4));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 b = ptx::unpack_bits<T>(pairs[j]);
          float* const x = s + 4 * n + 2 * j;
          x[0] = fmaf(x[0], p.scale, b.x), x[1] = fmaf(x[1], p.scale, b.y);
        }
      }
      float reference[2] = {lse[0], lse[1]}, factor[2] = {1.0f, 1.0f};
      if (special) {  // rows of very large logits, and those that see nothing: whatever dout is there, nothing is added
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const RowStat stat{lse[j]};
          const bool blank = stat.blank(), large = !blank && stat.special();
          const float low = large ? stat.large() : 0.0f, most = blank ? -INFINITY : INFINITY;
          if (large) {
            const int r = row + 8 * j, t = t0 + (r >> plan.group_shift);
            reference[j] = 0.0f;
            factor[j] = ptx::exp2(-kLog2e * info.lse[t * p.lse.row + (r & (p.G - 1)) * p.lse.group + 1]);
          }
          if (blank) factor[j] = 0.0f;
#pragma unroll
          for (int c = 2 * j; c < kColumns / 2; c += 4)
            s[c] = fminf(s[c] - low, most), s[c + 1] = fminf(s[c + 1] - low, most);
        }
      }
#pragma unroll
      for (int c = 0; c < kColumns / 2; ++c) s[c] = ptx::exp2(fmaf(s[c], kLog2e, -reference[c / 2 % 2]));
      wgmma_wait<0>();
      hold(dp);
      if (last) release(&shared.dp_free[stage]);
      if (special) {
#pragma unroll
        for (int c = 0; c < kColumns / 2; ++c) {
          const float f = factor[c / 2 % 2];
          s[c] *= f, dp[c] = f == 0.0f ? 0.0f : dp[c];
        }
      }
#pragma unroll
      for (int c = 0; c < kColumns / 2; ++c) {
        const float d = dp[c] + minus_delta[c / 2 % 2];
        if (!kBits || (bits[c / 2 % 2][c / 16] >> 2 * (lane % 4) & 1u << (c / 4 % 4 * 8 + c % 2)) != 0)
          sum[part][c] = fmaf(s[c], d, sum[part][c]);
      }
    }
  }

  // Heads that share a row of bias are neighbouring rows.
  if (plan.bias_shift > 0) {
#pragma unroll 1
    for (int lanes = 4; lanes < 4 << plan.bias_shift; lanes *= 2)
#pragma unroll
      for (int part = 0; part < kParts; ++part)
#pragma unroll
        for (int c = 0; c < kColumns / 2; ++c) sum[part][c] += __shfl_xor_sync(~0u, sum[part][c], lanes);
  }
  if (range > 0)
    while (ptx::load_acquire(scratch.turn + block) != range) __nanosleep(32);
  // Four neighbouring keys at a time: lanes 2 i and 2 i + 1 exchange, and have one of the two rows each.
  const bool upper = lane % 2 != 0;
  const int r = row + (upper ? 8 : 0), t = t0 + (r >> plan.group_shift);
  const int visible =
      t < length && (r & ((1 << plan.bias_shift) - 1)) == 0 ? min(p.causal ? t + offset + 1 : keys, keys) : 0;
  float* const out = scratch.dbias + (plan.kept_axis >= 0 ? outer * p.dbias.batch[plan.kept_axis] : 0) +
                     bias_head * p.dbias.kv + t * p.dbias.row + (r & (p.G - 1)) * p.dbias.group;
#pragma unroll
  for (int part = 0; part < kParts; ++part)
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const float* const x = sum[part] + 4 * n;
      const float a = __shfl_xor_sync(~0u, upper ? x[0] : x[2], 1), b = __shfl_xor_sync(~0u, upper ? x[1] : x[3], 1);
      float y[4] = {upper ? a : x[0], upper ? b : x[1], upper ? x[2] : a, upper ? x[3] : b};
      const int column = key + kColumns * part + 8 * n + lane % 4 / 2 * 4;
      if (column >= visible) continue;
#pragma unroll
      for (int e = 1; e < 4; ++e) y[e] = column + e < visible ? y[e] : 0.0f;
      reduce_add(out + column, y[0], y[1], y[2], y[3]);
    }
  if (plan.ranges > 1) {
    __threadfence();
    named_sync(1, 128 * kGroups);
    if (threadIdx.x == 128) ptx::store_release(scratch.turn + block, range + 1);
  }
}

}  // namespace jax_dma::sm90
