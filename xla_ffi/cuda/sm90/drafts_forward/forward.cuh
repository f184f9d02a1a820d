// Forward attention for compute capability 9.0a: TMA, wgmma, specialised warpgroups, persistent blocks.
//
// A block works through tiles of 128 rows (queries x heads of one key/value head, head fastest) one after another. Warpgroup 0
// produces: its first warp walks the live key tiles and loads q, k, v and the bias by TMA, its other warps fill what TMA cannot
// (intervals, per-key bias, unaligned bias). Warpgroups 1 and 2 consume: each computes 64 of the rows, q k^T from shared memory
// and p v with p in registers. A warpgroup issues the next q k^T before the current p v and runs its softmax meanwhile; the two
// take turns at issuing, so that the softmax of one overlaps the products of the other.
//
//   head dim   rows x keys   k and v stages   shared memory: q + k + v
//   64         128 x 128     3                16 + 48 + 48 = 112 KB
//   128        128 x 128     2                32 + 64 + 64 = 160 KB
//   256        128 x 64      2                64 + 64 + 64 = 192 KB
// plus one or two stages of bias (128 x 128 x 2 bytes = 32 KB at most where 16 bits, 64 KB in f32; G times less where heads share
// it) and of key vectors. Mask bits go from device memory straight to registers: 16 bytes a row, asked for before q k^T is
// issued and used after it.
#pragma once

#include "../live_tiles.cuh"
#include "../sm80/logits.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace jax_dma::sm90 {

// The kinds are shared with the sm_80 class, and so are the steps on logits that do not depend on how a tile is split.
using sm80::Bias, sm80::Mask;
using sm80::dense_mask, sm80::interval_mask, sm80::key_bias, sm80::no_bias, sm80::no_mask, sm80::tile_bias;
using sm80::is_hidden, sm80::kLarge;

constexpr int kSideStages = 2, kMaxBiasStages = 2;

template <int kStages>
struct ForwardBarriers {
  uint64_t q_full, q_empty;
  uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  uint64_t bias_full[kMaxBiasStages], bias_empty[kMaxBiasStages], side_full[kSideStages], side_empty[kSideStages];
  int part[kStages];  // what lies in a stage of k: 2 * part of the keys + whether the masks hide nothing there; -1: the list ends
};

template <int kHeadDim>
struct ForwardShape {
  static constexpr int kRows = 128, kThreads = 384, kConsumerWarps = 8;
  static constexpr int kKeys = kHeadDim <= 128 ? 128 : 64;
  static constexpr int kStages = kHeadDim <= 64 ? 3 : 2;
  // 3 x 168 registers a lane of the three warpgroups, shared out anew.
  static constexpr int kProducerRegisters = kHeadDim <= 128 ? 56 : 40, kConsumerRegisters = (504 - kProducerRegisters) / 2;
  static constexpr int kPanels = kHeadDim / 64;  // of 64 channels, 128 bytes a row
  static constexpr int kQueryBytes = 2 * kRows * kHeadDim, kTileBytes = 2 * kKeys * kHeadDim;
  static constexpr int kBiasAt = kQueryBytes + 2 * kStages * kTileBytes;
  using Barriers = ForwardBarriers<kStages>;
};

struct ForwardMaps {
  CUtensorMap q, k, v, bias;
};

// What the host works out for a call. Offsets and sizes are in bytes of shared memory.
struct ForwardPlan {
  int items, heads;  // items = query tiles x heads, heads = B x K
  int queries;       // of a tile
  int bias_rows, bias_panel, bias_stage, bias_stages;
  int side_at, side_stage, barriers_at;
  bool bias_by_tma, helpers;
  bool q_batch, k_batch, v_batch, bias_batch;  // whether the map's batch axis is the batch entry, or 0
};

// A position in a ring of stages.
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
};

// One tile of work: the last queries of all heads first, because under a causal mask they see the most keys.
struct Item {
  int batch, kv_head, t0;
  __device__ __forceinline__ Item(const Problem& p, const ForwardPlan& plan, int index) {
    const int head = index % plan.heads;
    batch = head / p.K, kv_head = head % p.K;
    t0 = (plan.items / plan.heads - 1 - index / plan.heads) * plan.queries;
  }
};

// The live parts of an item, in order.
template <int kKeys>
struct Walk {
  struct Operands {
    const uint32_t* by_query;
    const int32_t* bounds;
  } operands;
  LiveTiles<kKeyTile / kKeys> live;
  int tile, queries, limit;

  __device__ __forceinline__ Walk(const Problem& p, const ForwardPlan& plan, const Item& item) {
    operands.by_query = static_cast<const uint32_t*>(p.tiles_by_query.data) + offset_of(p, p.tiles_by_query, item.batch, item.kv_head, 0);
    operands.bounds = static_cast<const int32_t*>(p.bounds.data) + offset_of(p, p.bounds, item.batch, item.kv_head, 0);
    tile = item.t0 / plan.queries, queries = plan.queries;
    limit = static_cast<int>(p.S);  // keys at and past it are seen by no query of the tile
    if (p.causal) limit = min(limit, min(item.t0 + queries, static_cast<int>(p.T)) + static_cast<int>(p.causal_offset()));
  }
  __device__ __forceinline__ int next(const Problem& p) {
    return live.next(
        static_cast<int>(p.key_tiles), [&](int word) { return key_tiles_word(p, operands, tile, word, queries); }, [&](int part) { return part * kKeys < limit; });
  }
};

// Bias tiles in shared memory are panels of 128-byte rows, swizzled as TMA does: 16-byte chunk c of row r lies at c ^ (r % 8).
__device__ __forceinline__ int bias_offset(int row, int byte, int panel_bytes) { return byte / 128 * panel_bytes + row * 128 + (((byte % 128 / 16) ^ (row % 8)) * 16) + byte % 16; }

// Fills a bias tile by ordinary loads, where TMA cannot: broadcast over queries or keys, or unaligned. For 96 threads.
template <class Element, int kKeys>
__device__ __forceinline__ void fill_bias(const Problem& p, char* stage, const char* base, int t0, int key, int rows, int group, int panel_bytes) {
  const int helper = threadIdx.x - 32;
#pragma unroll 1
  for (int r = helper / 32; r < rows; r += 3) {
    const int query = r / group, g = r % group;
    const Element* source = reinterpret_cast<const Element*>(base) + (t0 + query) * p.bias.row + g * p.bias.group;
#pragma unroll 1
    for (int c = helper % 32; c < kKeys; c += 32) {
      const bool inside = t0 + query < static_cast<int>(p.T) && key + c < static_cast<int>(p.S);
      *reinterpret_cast<Element*>(stage + bias_offset(r, c * static_cast<int>(sizeof(Element)), panel_bytes)) = inside ? source[(key + c) * p.bias.col] : Element{};
    }
  }
}

// The rows of a thread's accumulators: elements 0, 1 of a block belong to row 0, elements 2, 3 to row 1.
struct ThreadRows {
  int first, packed[2];  // query | head of the group << 16
  __device__ __forceinline__ ThreadRows(int first_row, int group) {
    first = first_row + (threadIdx.x % 32) / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) packed[i] = (first + 8 * i) / group | ((first + 8 * i) % group) << 16;
  }
  __device__ __forceinline__ int row(int i) const { return first + 8 * i; }
  __device__ __forceinline__ int query(int i) const { return packed[i] & 0xffff; }
  __device__ __forceinline__ int head(int i) const { return packed[i] >> 16; }
};

// x = x * factor + the bias tile.
template <class Pair, int kBlocks, class Unpack>
__device__ __forceinline__ void add_bias(float (&x)[kBlocks][4], uint32_t stage, const ForwardPlan& plan, bool per_head, const ThreadRows& rows, float factor,
                                         const Unpack& unpack) {
  constexpr int kBytes = sizeof(Pair), kPerPanel = 128 / (4 * kBytes);  // blocks of a panel
  const int lane_byte = static_cast<int>(threadIdx.x % 4) * kBytes;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = min(per_head ? rows.row(i) : rows.query(i), plan.bias_rows - 1);
    const uint32_t row = stage + r * 128 + (((lane_byte / 16) ^ (r % 8)) * 16) + lane_byte % 16;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const uint32_t address = (row ^ (n % kPerPanel * 4 * kBytes)) + n / kPerPanel * plan.bias_panel;
      float2 b;
      if constexpr (kBytes == 4) {
        uint32_t pair;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(address));
        b = unpack(pair);
      } else {
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(b.x), "=f"(b.y) : "r"(address));
      }
      x[n][2 * i] = x[n][2 * i] * factor + b.x;
      x[n][2 * i + 1] = x[n][2 * i + 1] * factor + b.y;
    }
  }
}
template <class T, int kBlocks>
__device__ __forceinline__ void add_bias(float (&x)[kBlocks][4], uint32_t stage, const Problem& p, const ForwardPlan& plan, const ThreadRows& rows, float factor) {
  using Other = std::conditional_t<std::is_same_v<T, __half>, __nv_bfloat16, __half>;
  const DType same = std::is_same_v<T, __half> ? DType::kF16 : DType::kBF16;
  const bool per_head = p.bias.group != 0;
  if (p.bias_dtype == same) add_bias<uint32_t>(x, stage, plan, per_head, rows, factor, [](uint32_t pair) { return ptx::unpack<T>(pair); });
  else if (p.bias_dtype == DType::kF32) add_bias<float2>(x, stage, plan, per_head, rows, factor, [](uint32_t) { return float2{}; });
  else add_bias<uint32_t>(x, stage, plan, per_head, rows, factor, [](uint32_t pair) { return ptx::unpack<Other>(pair); });
}

// x = x * factor + a value per key (f32 in shared memory).
template <int kBlocks>
__device__ __forceinline__ void add_key_bias(float (&x)[kBlocks][4], uint32_t vector, float factor) {
  vector += 8 * (threadIdx.x % 4);
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    float b0, b1;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(b0), "=f"(b1) : "r"(vector + 32 * n));
    x[n][0] = x[n][0] * factor + b0, x[n][1] = x[n][1] * factor + b1;
    x[n][2] = x[n][2] * factor + b0, x[n][3] = x[n][3] * factor + b1;
  }
}

// The mask bits of a thread's two rows, for one part of the keys.
template <int kKeys>
struct MaskBits {
  static constexpr int kWords = kKeys / 32;
  uint32_t words[2][kWords];

  __device__ __forceinline__ void load(const uint32_t* const (&rows)[2], int key, int64_t col) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (col == 0) {  // one word stands for all keys
        const uint32_t word = __ldg(rows[i]);
#pragma unroll
        for (int w = 0; w < kWords; ++w) words[i][w] = word;
      } else if constexpr (kWords == 4) {
        const uint4 four = __ldg(reinterpret_cast<const uint4*>(rows[i] + key / 32));
        words[i][0] = four.x, words[i][1] = four.y, words[i][2] = four.z, words[i][3] = four.w;
      } else {
        const uint2 two = __ldg(reinterpret_cast<const uint2*>(rows[i] + key / 32));
        words[i][0] = two.x, words[i][1] = two.y;
      }
    }
  }
  __device__ __forceinline__ void hide(float (&x)[kKeys / 8][4]) const {
    const int first_bit = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint32_t word = words[i][w] >> first_bit;
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& y = x[4 * w + n][2 * i + e];
            y = (word & (1u << (8 * n + e))) != 0 ? y : -INFINITY;
          }
      }
  }
};

// x = -inf where t is outside [start, end): `vector` holds (start, end) of kKeys keys, or those of each head of the group.
template <int kBlocks>
__device__ __forceinline__ void hide_by_intervals(float (&x)[kBlocks][4], uint32_t vector, bool per_head, int group, const ThreadRows& rows, int t0) {
  constexpr int kKeys = 8 * kBlocks;
  vector += 16 * (threadIdx.x % 4);
  const auto read = [](uint32_t address) {
    int4 pair;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(pair.x), "=r"(pair.y), "=r"(pair.z), "=r"(pair.w) : "r"(address));
    return pair;
  };
  const auto hide = [](float* y, int4 pair, int t) {
    y[0] = t >= pair.x && t < pair.y ? y[0] : -INFINITY;
    y[1] = t >= pair.z && t < pair.w ? y[1] : -INFINITY;
  };
  const int t[2] = {t0 + rows.query(0), t0 + rows.query(1)};
  if (!per_head) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const int4 pair = read(vector + 64 * n);
      hide(x[n], pair, t[0]), hide(x[n] + 2, pair, t[1]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t row = vector + 8 * kKeys * min(rows.head(i), group - 1);
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) hide(x[n] + 2 * i, read(row + 64 * n), t[i]);
    }
  }
}

// x = -inf past S and, under the causal rule, past the query.
template <int kBlocks>
__device__ __forceinline__ void hide_by_position(float (&x)[kBlocks][4], const Problem& p, const ThreadRows& rows, int t0, int key) {
  const int columns = static_cast<int>(p.S) - key, offset = static_cast<int>(p.causal_offset()) + t0 - key + 1, lane_column = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int visible = columns;
    if (p.causal) visible = min(visible, offset + rows.query(i));
    visible -= lane_column;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (8 * n + e >= visible) x[n][2 * i + e] = -INFINITY;
  }
}

// Word j of lane q of a quad becomes word q of lane j: then a lane holds 16 bytes of a row of the output.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (threadIdx.x & bit) != 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if ((j & bit) != 0) continue;
      const uint32_t received = __shfl_xor_sync(~0u, upper ? words[j] : words[j | bit], bit);
      if (upper) words[j] = received;
      else words[j | bit] = received;
    }
  }
}

template <class T, int kHeadDim, class MaskKind, class BiasKind>
__global__ void __launch_bounds__(ForwardShape<kHeadDim>::kThreads, 1)
    jax_dma_sm90_forward(const __grid_constant__ Problem p, const __grid_constant__ ForwardMaps maps, const __grid_constant__ ForwardPlan plan) {
  using Shape = ForwardShape<kHeadDim>;
  constexpr Mask kMask = MaskKind::kind;
  constexpr Bias kBias = BiasKind::kind;
  constexpr int kKeys = Shape::kKeys, kStages = Shape::kStages, kPanels = Shape::kPanels, kRows = Shape::kRows;
  constexpr int kS = kKeys / 8, kO = kHeadDim / 8;  // column blocks of logits and output
  constexpr int kQueryPanel = kRows * 128, kKeyPanel = kKeys * 128;

  extern __shared__ __align__(1024) char shared[];
  const uint32_t q_tile = ptx::shared_address(shared), k_tiles = q_tile + Shape::kQueryBytes, v_tiles = k_tiles + kStages * Shape::kTileBytes;
  auto& bar = *reinterpret_cast<typename Shape::Barriers*>(shared + plan.barriers_at);

  if (threadIdx.x == 0) {
    if (q_tile % 1024 != 0) __trap();  // the swizzle goes by address
    constexpr int kConsumers = Shape::kConsumerWarps;  // one arrival a warp
    barrier_init(&bar.q_full, 1), barrier_init(&bar.q_empty, kConsumers);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&bar.k_full[i], 1), barrier_init(&bar.v_full[i], 1);
      barrier_init(&bar.k_empty[i], kConsumers), barrier_init(&bar.v_empty[i], kConsumers);
    }
    for (int i = 0; i < kMaxBiasStages; ++i) barrier_init(&bar.bias_full[i], plan.bias_by_tma ? 1 : 96), barrier_init(&bar.bias_empty[i], kConsumers);
    for (int i = 0; i < kSideStages; ++i) barrier_init(&bar.side_full[i], 96), barrier_init(&bar.side_empty[i], kConsumers);
    barrier_init_fence();
    prefetch_map(&maps.q), prefetch_map(&maps.k), prefetch_map(&maps.v);
    if (kBias == Bias::kTile && plan.bias_by_tma) prefetch_map(&maps.bias);
  }
  // Rows of q that no query takes stay 0.
  const int used_rows = plan.queries * p.G, unused = (kRows - used_rows) * 32;
  for (int i = threadIdx.x; i < unused * kPanels; i += Shape::kThreads)
    reinterpret_cast<uint32_t*>(shared)[i / unused * (kQueryPanel / 4) + used_rows * 32 + i % unused] = 0;
  fence_async_proxy();
  __syncthreads();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < 4) {
    give_registers<Shape::kProducerRegisters>();
    if (warp == 0) {
      // Loads by TMA. Lane 0 waits and issues; all lanes walk.
      Ring k_ring, v_ring, bias_ring;
      uint32_t q_phase = 0;
#pragma unroll 1
      for (int index = blockIdx.x; index < plan.items; index += gridDim.x) {
        const Item item(p, plan, index);
        Walk<kKeys> walk(p, plan, item);
        int part = walk.next(p);
        if (part >= 0 && lane == 0) {
          wait(&bar.q_empty, q_phase ^ 1);
          arrive_expecting(&bar.q_full, kPanels * used_rows * 128);
          for (int c = 0; c < kPanels; ++c)
            load_box(q_tile + c * kQueryPanel, &maps.q, &bar.q_full, 64 * c, 0, item.t0, item.kv_head, plan.q_batch ? item.batch : 0);
          q_phase ^= 1;
        }
#pragma unroll 1
        while (part >= 0) {
          if (lane == 0) {
            const int key = part * kKeys;
            wait(&bar.k_empty[k_ring.stage], k_ring.phase ^ 1);
            bar.part[k_ring.stage] = 2 * part + (kMask == Mask::kNone || walk.live.tile_full);
            arrive_expecting(&bar.k_full[k_ring.stage], Shape::kTileBytes);
            for (int c = 0; c < kPanels; ++c)
              load_box(k_tiles + k_ring.stage * Shape::kTileBytes + c * kKeyPanel, &maps.k, &bar.k_full[k_ring.stage], 64 * c, key, item.kv_head, plan.k_batch ? item.batch : 0, 0);
            k_ring.advance(kStages);
            if (kBias == Bias::kTile && plan.bias_by_tma) {
              wait(&bar.bias_empty[bias_ring.stage], bias_ring.phase ^ 1);
              const int bytes = p.bias_dtype == DType::kF32 ? 4 : 2, panels = kKeys * bytes / 128;
              arrive_expecting(&bar.bias_full[bias_ring.stage], panels * plan.bias_rows * 128);
              const uint32_t target = q_tile + Shape::kBiasAt + bias_ring.stage * plan.bias_stage;
#pragma unroll 1
              for (int c = 0; c < panels; ++c)
                load_box(target + c * plan.bias_panel, &maps.bias, &bar.bias_full[bias_ring.stage], key + c * (128 / bytes), 0, item.t0, p.bias.kv != 0 ? item.kv_head : 0,
                         plan.bias_batch ? item.batch : 0);
              bias_ring.advance(plan.bias_stages);
            }
            wait(&bar.v_empty[v_ring.stage], v_ring.phase ^ 1);
            arrive_expecting(&bar.v_full[v_ring.stage], Shape::kTileBytes);
            for (int c = 0; c < kPanels; ++c)
              load_box(v_tiles + v_ring.stage * Shape::kTileBytes + c * kKeyPanel, &maps.v, &bar.v_full[v_ring.stage], 64 * c, key, item.kv_head, plan.v_batch ? item.batch : 0, 0);
            v_ring.advance(kStages);
          }
          __syncwarp();
          part = walk.next(p);
        }
        if (lane == 0) {
          wait(&bar.k_empty[k_ring.stage], k_ring.phase ^ 1);
          bar.part[k_ring.stage] = -1;
          arrive(&bar.k_full[k_ring.stage]);
          k_ring.advance(kStages);
        }
        __syncwarp();
      }
    } else if (plan.helpers) {
      Ring bias_ring, side_ring;
      const int helper = threadIdx.x - 32;
#pragma unroll 1
      for (int index = blockIdx.x; index < plan.items; index += gridDim.x) {
        const Item item(p, plan, index);
        Walk<kKeys> walk(p, plan, item);
        const int32_t *start = nullptr, *end = nullptr;
        const char* bias = nullptr;
        if (kMask != Mask::kNone && p.start.present()) {
          start = static_cast<const int32_t*>(p.start.data) + offset_of(p, p.start, item.batch, item.kv_head, 0);
          end = static_cast<const int32_t*>(p.end.data) + offset_of(p, p.end, item.batch, item.kv_head, 0);
        }
        if (kBias != Bias::kNone) bias = static_cast<const char*>(p.bias.data) + offset_of(p, p.bias, item.batch, item.kv_head, 0) * (p.bias_dtype == DType::kF32 ? 4 : 2);
#pragma unroll 1
        for (int part = walk.next(p); part >= 0; part = walk.next(p)) {
          const int key = part * kKeys;
          const bool intervals = kMask != Mask::kNone && p.start.present() && !walk.live.tile_full;
          if (kBias == Bias::kKey || intervals) {
            wait(&bar.side_empty[side_ring.stage], side_ring.phase ^ 1);
            char* const side = shared + plan.side_at + side_ring.stage * plan.side_stage;
            if (kBias == Bias::kKey) {
#pragma unroll 1
              for (int c = helper; c < kKeys; c += 96) {
                const int64_t at = (key + c) * p.bias.col;
                float value = 0.0f;
                if (key + c < static_cast<int>(p.S))
                  value = p.bias_dtype == DType::kF32    ? reinterpret_cast<const float*>(bias)[at]
                          : p.bias_dtype == DType::kBF16 ? __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(bias)[at])
                                                         : __half2float(reinterpret_cast<const __half*>(bias)[at]);
                reinterpret_cast<float*>(side)[c] = value;
              }
            }
            if (intervals) {
              int2* const pairs = reinterpret_cast<int2*>(side + (kBias == Bias::kKey ? 4 * kKeys : 0));
              const int count = (p.start.group != 0 ? p.G : 1) * kKeys;
#pragma unroll 1
              for (int i = helper; i < count; i += 96) {
                const int c = key + i % kKeys, g = i / kKeys;
                const bool inside = c < static_cast<int>(p.S);
                pairs[i] = inside ? make_int2(start[c + g * p.start.group], end[c + g * p.end.group]) : make_int2(0, 0);
              }
            }
            arrive(&bar.side_full[side_ring.stage]);
            side_ring.advance(kSideStages);
          }
          if (kBias == Bias::kTile && !plan.bias_by_tma) {
            wait(&bar.bias_empty[bias_ring.stage], bias_ring.phase ^ 1);
            char* const stage = shared + Shape::kBiasAt + bias_ring.stage * plan.bias_stage;
            const int group = p.bias.group != 0 ? p.G : 1;
            if (p.bias_dtype == DType::kF32) fill_bias<float, kKeys>(p, stage, bias, item.t0, key, plan.bias_rows, group, plan.bias_panel);
            else fill_bias<uint16_t, kKeys>(p, stage, bias, item.t0, key, plan.bias_rows, group, plan.bias_panel);
            arrive(&bar.bias_full[bias_ring.stage]);
            bias_ring.advance(plan.bias_stages);
          }
        }
      }
    }
    return;
  }

  // ---- Consumers.
  take_registers<Shape::kConsumerRegisters>();
  // Rescaling rarely costs a branch: see sm80/forward.cuh, whose choice this is until it is measured here.
  constexpr bool kRareRescale = kMask != Mask::kNone || kBias != Bias::kNone;
  constexpr float kSlack = kRareRescale ? 8.0f : 0.0f;

  const int group = warp / 4 - 1;  // 0, 1: which 64 rows
  const ThreadRows rows(64 * group + warp % 4 * 16, p.G);
  const int first_query = 64 * group / p.G;
  const uint32_t q_rows = q_tile + 64 * 128 * group;
  // Logits are x * p.scale where scaling is left to the exponential, and otherwise x.
  const bool scaled_late = kBias == Bias::kNone && p.softcap == 0.0f && p.scale > 0.0f;
  const float log2_factor = scaled_late ? p.scale * kLog2e : kLog2e;

  Ring k_ring, v_ring, bias_ring, side_ring;
  uint32_t q_phase = 0;
  float o[kO][4], x[kS][4], m[2], l[2], rescale[2];
  uint32_t a[kS / 2][4];  // p, as operand fragments: two column blocks to one k block
  bool moved;
  const uint32_t* bits[2] = {};
  MaskBits<kKeys> mask;

  // A stage is given back when all lanes of the warp have read it.
  const auto release = [&](uint64_t* empty) {
    __syncwarp();
    if (lane == 0) arrive(empty);
  };
  // Which keys come next (-1: none), waiting until they are there. Asks for their mask bits.
  const auto next_part = [&](uint32_t nothing = 0) {
    wait(&bar.k_full[k_ring.stage], k_ring.phase ^ nothing);
    const int part = *const_cast<volatile int*>(&bar.part[k_ring.stage]);
    if constexpr (kMask == Mask::kBits)
      if (part >= 0 && !(part & 1) && p.bits.present()) mask.load(bits, (part >> 1) * kKeys, p.bits.col);
    return part;
  };
  const auto multiply_keys = [&] {
    // Descriptors count in 16 bytes. The compiler must not keep those of q in registers from one tile to the next.
    uint32_t q_address = q_rows;
    asm volatile("" : "+r"(q_address));
    const uint64_t q = operand(q_address), k = operand(k_tiles + k_ring.stage * Shape::kTileBytes);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kHeadDim / 16; ++c) wgmma_shared<T>(x, q + (c / 4 * kQueryPanel + c % 4 * 32) / 16, k + (c / 4 * kKeyPanel + c % 4 * 32) / 16, c > 0);
    wgmma_commit();
  };
  const auto multiply_values = [&] {
    const uint64_t v = operand(v_tiles + v_ring.stage * Shape::kTileBytes, kKeyPanel);
    wait(&bar.v_full[v_ring.stage], v_ring.phase);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kKeys / 16; ++c) wgmma_registers<T>(o, a[c][0], a[c][1], a[c][2], a[c][3], v + c * (16 * 128 / 16));
    wgmma_commit();
  };
  // From products to logits to (unnormalised) probabilities in x; m and l follow, and o is to be multiplied by rescale.
  const auto softmax = [&](int part, int t0) {
    const int key = (part >> 1) * kKeys;
    const bool full = part & 1;
    const bool intervals = kMask != Mask::kNone && p.start.present() && !full;
    const uint32_t side = q_tile + plan.side_at + side_ring.stage * plan.side_stage;
    if (kBias == Bias::kKey || intervals) wait(&bar.side_full[side_ring.stage], side_ring.phase);

    float factor = p.scale;
    if (p.softcap != 0.0f) {
      const float inner = p.scale / p.softcap;
#pragma unroll
      for (int n = 0; n < kS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[n][i] = p.softcap * ptx::tanh(x[n][i] * inner);
      factor = 1.0f;
    }
    if constexpr (kBias == Bias::kTile) {
      wait(&bar.bias_full[bias_ring.stage], bias_ring.phase);
      add_bias<T>(x, q_tile + Shape::kBiasAt + bias_ring.stage * plan.bias_stage, p, plan, rows, factor);
      release(&bar.bias_empty[bias_ring.stage]);
      bias_ring.advance(plan.bias_stages);
    } else if constexpr (kBias == Bias::kKey) {
      add_key_bias(x, side, factor);
    } else if (factor <= 0.0f) {  // so that the largest product is the largest logit
#pragma unroll
      for (int n = 0; n < kS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[n][i] *= factor;
    }
    if constexpr (kMask == Mask::kBits)
      if (!full && p.bits.present()) mask.hide(x);
    if constexpr (kMask != Mask::kNone)
      if (intervals) hide_by_intervals(x, side + (kBias == Bias::kKey ? 4 * kKeys : 0), p.start.group != 0, p.G, rows, t0);
    if (kBias == Bias::kKey || intervals) {
      release(&bar.side_empty[side_ring.stage]);
      side_ring.advance(kSideStages);
    }
    if (key + kKeys > static_cast<int>(p.S) || (p.causal && key + kKeys - 1 > t0 + first_query + static_cast<int>(p.causal_offset()))) hide_by_position(x, p, rows, t0, key);

    // Online softmax. A row's logits are spread over the four lanes of a quad. The reference m that is subtracted from them
    // moves only when a logit is 2^kSlack above it: any m gives the same result, and the output is hardly ever rescaled.
    moved = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float peak = m[i];
#pragma unroll
      for (int n = 0; n < kS; ++n) peak = fmaxf(peak, fmaxf(x[n][2 * i], x[n][2 * i + 1]));
      peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
      peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
      if (is_hidden(peak)) peak = -INFINITY;
      const bool move = (peak - m[i]) * log2_factor > kSlack;  // false where both are -inf
      rescale[i] = move ? ptx::exp2((m[i] - peak) * log2_factor) : 1.0f;
      if (move) m[i] = peak, moved = true;
      l[i] *= rescale[i];
    }
    bool large = false;
    if constexpr (kBias != Bias::kNone) {  // rows of very large logits are shifted before they are multiplied
#pragma unroll
      for (int i = 0; i < 2; ++i) large |= m[i] != -INFINITY && fabsf(m[i]) > kLarge;
      large = __any_sync(~0u, large);
      if (large) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float shift = m[i] == -INFINITY ? 0.0f : m[i];
#pragma unroll
          for (int n = 0; n < kS; ++n) x[n][2 * i] -= shift, x[n][2 * i + 1] -= shift;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float shift = large || m[i] == -INFINITY ? 0.0f : m[i] * log2_factor;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kS; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& y = x[n][2 * i + e];
          y = ptx::exp2(y * log2_factor - shift);
          sum += y;
        }
      l[i] += sum;
    }
  };
  const auto rescale_output = [&] {
    if (!kRareRescale || __any_sync(~0u, moved)) {
#pragma unroll
      for (int n = 0; n < kO; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[n][i] *= rescale[i / 2];
    }
  };
  const auto pack = [&] {
#pragma unroll
    for (int c = 0; c < kS / 2; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[c][i] = ptx::pack<T>(x[2 * c + i / 2][2 * (i % 2)], x[2 * c + i / 2][2 * (i % 2) + 1]);
  };
  // The two warpgroups issue in turns: one waits at barrier 1 + group and opens the other's.
  const auto begin_turn = [&] { named_sync(1 + group); };
  const auto end_turn = [&] { named_arrive(2 - group); };
  if (group == 1) end_turn();

#pragma unroll 1
  for (int index = blockIdx.x; index < plan.items; index += gridDim.x) {
    const Item item(p, plan, index);
    const int t0 = item.t0;
    if constexpr (kMask == Mask::kBits) {
      const uint32_t* const base = static_cast<const uint32_t*>(p.bits.data) + offset_of(p, p.bits, item.batch, item.kv_head, 0);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        bits[i] = base + min(t0 + min(rows.query(i), plan.queries - 1), static_cast<int>(p.T) - 1) * p.bits.row + rows.head(i) * p.bits.group;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) m[i] = -INFINITY, l[i] = 0.0f;
#pragma unroll
    for (int n = 0; n < kO; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] = 0.0f;

    int part = next_part();
    if (part >= 0) {
      wait(&bar.q_full, q_phase);
      q_phase ^= 1;
      begin_turn();
      multiply_keys();
      end_turn();
      wgmma_wait<0>();
      hold(x);
      release(&bar.k_empty[k_ring.stage]);
      k_ring.advance(kStages);
      softmax(part, t0);
      part = next_part();
      pack();
#pragma unroll 1
      while (part >= 0) {
        begin_turn();
        multiply_keys();
        multiply_values();
        end_turn();
        wgmma_wait<1>();
        hold(x);
        release(&bar.k_empty[k_ring.stage]);
        k_ring.advance(kStages);
        softmax(part, t0);
        // The exponentials belong above the wait for p v, and ptxas likes them below it. A branch on something that depends on
        // all of them (sums are never negative) stands between: the one of looking for the next keys. See check_sass.py.
        part = next_part(l[0] + l[1] < 0.0f);
        wgmma_wait<0>();
        hold(o);
        release(&bar.v_empty[v_ring.stage]);
        v_ring.advance(kStages);
        rescale_output();
        pack();
      }
      release(&bar.q_empty);
      multiply_values();
      release(&bar.k_empty[k_ring.stage]);
      wgmma_wait<0>();
      hold(o);
      release(&bar.v_empty[v_ring.stage]);
      v_ring.advance(kStages);
    } else {
      release(&bar.k_empty[k_ring.stage]);
    }
    k_ring.advance(kStages);

    T* const out = static_cast<T*>(p.out.data) + offset_of(p, p.out, item.batch, item.kv_head, 0);
    float* const lse = static_cast<float*>(p.lse.data) + offset_of(p, p.lse, item.batch, item.kv_head, 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float total = l[i];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      const int t = t0 + rows.query(i);
      const bool inside = rows.query(i) < plan.queries && t < p.T;
      const float inverse = total > 0.0f ? 1.0f / total : total == 0.0f ? 0.0f : total;  // NaN stays NaN
      T* const target = out + t * p.out.row + rows.head(i) * p.out.group;
#pragma unroll
      for (int n = 0; n < kO; n += 4) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = ptx::pack<T>(o[n + j][2 * i] * inverse, o[n + j][2 * i + 1] * inverse);
        transpose_quad(words);
        const int c = 8 * (n + lane % 4);
        if (inside && c < p.Hv) *reinterpret_cast<uint4*>(target + c) = make_uint4(words[0], words[1], words[2], words[3]);
      }
      if (inside && lane % 4 == 0) lse[t * p.lse.row + rows.head(i) * p.lse.group] = total == 0.0f ? -INFINITY : m[i] * (scaled_late ? p.scale : 1.0f) + logf(total);
    }
  }
  if (group == 0) begin_turn();  // the turn that the other opened last
}

}  // namespace jax_dma::sm90
