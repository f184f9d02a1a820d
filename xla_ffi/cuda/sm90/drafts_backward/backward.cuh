// Backward attention for Hopper: wgmma, TMA, warp specialisation.
//
// One block per (tile of 128 keys, key/value head, batch entry). It walks the live query tiles of its keys, 64 rows
// (64 / G queries x G heads, head fastest) at a time, with keys along M, so that p^T and ds^T stay in registers as the
// A operand of dv and dk:
//
//   s^T = k q^T, p^T = exp2(logits - lse)       dp^T = v dout^T, ds^T = p^T (dp^T - delta)
//   dv += p^T dout, dk += ds^T q                dq += ds k (f32, bulk reduce-add), dbias = ds summed over what was
//   broadcast
//
// Warps. 0: TMA of k, v, q, dout, row statistics. 1: mask bits and bias, by cp.async. 2 and 3: dbias, from ds in shared
// memory, and its zeros. 4 to 7 and 8 to 11: 64 keys each, and one half of dq's channels.
//
// Shared memory, head dim 128: k, v 64 KB; two stages of q, dout 64 KB; two of ds 32 KB; dq on its way out 32 KB; two
// of row statistics 1 KB; one or two of bits (<= 1 KB) and bias (64 rows at most: 16 KB, f32 32 KB).
#pragma once

#include "../live_tiles.cuh"
#include "../sm80/logits.cuh"
#include "hopper.cuh"

#ifndef AHEAD
#define AHEAD (kHeadDim == 64)
#endif

#ifndef WIDE_P
#define WIDE_P 40
#define WIDE_C 232
#endif
#ifndef LATE
#define LATE (kHeadDim == 128 && (kBias == Bias::kTile || (kBias == Bias::kKey && kMask != Mask::kNone)))
#endif

namespace jax_dma::sm90 {

using sm80::Bias;
using sm80::BlockOperands;
using sm80::kLarge;
using sm80::Mask;

constexpr int kRows = 64;  // of a tile
constexpr int kKeys = kKeyTile;
constexpr int kQueryParts = kTileRows / kRows;
constexpr int kThreads = 384, kConsumers = 256;

template <int kHeadDim>
struct BackwardShape {
  static constexpr int kPanels = kHeadDim / 64;  // tiles are panels of 64 channels, rows of 128 bytes, swizzled
  static constexpr int kKVPanel = kKeys * 128, kQPanel = kRows * 128;
  static constexpr int kKVBytes = kPanels * kKVPanel, kQBytes = kPanels * kQPanel;
  static constexpr int kDSBytes = kKeys * 128;  // [key][row]
  static constexpr int kDQRegs = kHeadDim / 4;  // of a thread: 64 rows x half the channels over a warpgroup
  static constexpr int kDQBytes = kRows * kHeadDim / 2 * 4;  // of a warpgroup
  static constexpr int kDS = 2 * kKVBytes + 4 * kQBytes, kDQ = kDS + 2 * kDSBytes, kStats = kDQ + 2 * kDQBytes,
                       kLogits = kStats + 2 * 8 * kRows;

  __host__ __device__ static int logit_rows(const Problem& p, const View& view) {
    return view.group != 0 ? kRows : queries_per_tile(p.G) / kQueryParts;
  }
  __host__ __device__ static int bits_bytes(const Problem& p) {
    return p.bits.present() ? (logit_rows(p, p.bits) * (kKeys / 8) + 127) / 128 * 128 : 0;
  }
  __host__ __device__ static int bias_bytes(const Problem& p) {
    const bool tile = p.bias.present() && (p.bias.row != 0 || p.bias.group != 0);
    return tile ? logit_rows(p, p.bias) * kKeys * (p.bias_dtype == DType::kF32 ? 4 : 2) : 0;
  }
  static int shared_bytes(const Problem& p, int logit_stages) {
    return kLogits + logit_stages * (bits_bytes(p) + bias_bytes(p));
  }
};

// Scratch of the backward pass; rows are in tile order (tile * kRows + row).
struct BackwardScratch {
  float* row_stats;  // [B, K, tiles, 2, kRows]: log-sum-exp (+inf where the row sees nothing or is padding; times
                     // log2(e) if there is no bias), delta
  float* dq;         // [B, K, tiles, kRows * head dim], fragment order
  int* turn;         // [B, K, tiles, 2]: under `deterministic`, how many key tiles have added to a half of dq
  float* dbias;      // f32, dbias's shape, where several blocks add to one element; otherwise null
  int64_t tiles;     // of 64 rows, per (batch entry, key/value head)
  // The blocks of a launch: `heads` (batch entry, key/value head)s from first_head on, key tiles from first_part on.
  int heads, first_head, first_part;
  int logit_stages;  // of bits and bias
};

// q and dout: [batch, position, head, channel] in boxes of a tile's rows; k and v: boxes of 128 keys. The batch
// coordinate of a batch entry is its offset divided by `entry`.
struct BackwardMaps {
  CUtensorMap q, dout, k, v;
  int64_t q_entry, dout_entry, k_entry, v_entry;
};

// How this block's dbias leaves it.
enum class DBias : int {
  kNone,
  kKey,       // bias per key: row sums of ds^T, kept in registers
  kPerQuery,  // sum over the group, one row per query
  kPerRow,    // one row per (query, head)
  kPerHead,   // bias [.., N, 1, S]: sum over queries, one row per head
};

__device__ __forceinline__ void store_value(void* base, int64_t index, float value, DType dtype) {
  if (dtype == DType::kF32) static_cast<float*>(base)[index] = value;
  else if (dtype == DType::kBF16) static_cast<__nv_bfloat16*>(base)[index] = __float2bfloat16(value);
  else static_cast<__half*>(base)[index] = __float2half(value);
}

// Query (low half) and head (high half) of each row of a tile; rows past queries x heads repeat the last query.
struct Rows {
  uint32_t packed[kRows];

  __device__ int query(int row) const { return packed[row] & 0xffff; }
  __device__ int head(int row) const { return packed[row] >> 16; }
};

// The live tiles of 64 rows of a key tile, in order or (under causal `deterministic`, where every key tile sees the last
// queries, so that they can start together) backwards.
struct Walk {
  bool backwards;
  int words, word = 0, done = 0, tile = 0, parts = 0;
  uint32_t seen = 0, full = 0;
  bool tile_full = false;

  __device__ Walk(const Problem& p)
      : backwards(p.deterministic && p.causal), words(static_cast<int>(ceil_div(p.query_tiles, kTilesPerWord))) {}

  template <class T>
  __device__ int next(const Problem& p, const BlockOperands<T>& operands, int key_tile) {
    const int tile_queries = queries_per_tile(p.G), queries = tile_queries / kQueryParts;
    while (true) {
      while (parts > 0) {
        --parts;
        const int index = tile * kQueryParts + (backwards ? parts : kQueryParts - 1 - parts);
        const int t0 = index * queries, t1 = min(t0 + queries, static_cast<int>(p.T));
        if (t0 >= static_cast<int>(p.T)) continue;
        // Turns count whole tiles, so that every block can tell its own.
        if (p.deterministic || !p.causal || key_tile * kKeys <= t1 - 1 + static_cast<int>(p.causal_offset()))
          return index;
      }
      while (seen == 0) {
        if (done == words) return -1;
        word = backwards ? words - 1 - done : done;
        ++done;
        const TileWord loaded = query_tiles_word(p, operands, key_tile, word, tile_queries);
        seen = loaded.seen, full = loaded.full;
      }
      const int bit = backwards ? 31 - __clz(seen) : __ffs(seen) - 1;
      seen &= ~(1u << bit);
      tile_full = (full >> bit) & 1;
      tile = word * kTilesPerWord + bit;
      parts = kQueryParts;
    }
  }
};

// What a consumer is told about a tile, beside q, dout and row statistics.
struct TileInfo {
  int tile;  // -1: there are no more
  int hidden;  // kTestBits, kTestPosition
  int turn;
  int unused;
};
constexpr int kTestBits = 1, kTestPosition = 2;  // positions hidden by mask bits; by S, causality or intervals

struct BackwardShared {
  Rows rows;
  TileInfo info[2];
  uint64_t kv_full, q_full[2], q_free[2], dout_full[2], dout_free[2], logits_full[2], logits_free[2], ds_full[2],
      ds_free[2];
  int q_batch, dout_batch, k_batch, v_batch;  // coordinates in the tensor maps
  int64_t dk, dv;                             // offsets of this block's
  int* turn_due[2];                           // what a warpgroup's last additions to dq will set, once they are done
  int turn_value[2];
};

// Mask bits and bias of one tile into shared memory, by one warp.
template <class T, Mask kMask, Bias kBias>
__device__ __forceinline__ void load_logits(const Problem& p, const BlockOperands<T>& operands, const Rows& rows,
                                            uint32_t bits_tile, uint32_t bias_tile, int t0, int key, bool bits,
                                            bool bias_aligned) {
  const int lane = threadIdx.x % 32, queries = queries_per_tile(p.G) / kQueryParts;
  if (kMask == Mask::kBits && bits) {
    const bool per_head = p.bits.group != 0;
    const int count = per_head ? kRows : queries;
#pragma unroll 1
    for (int r = lane; r < count; r += 32) {
      const int query = per_head ? rows.query(r) : r, head = per_head ? rows.head(r) : 0;
      const bool inside = t0 + query < static_cast<int>(p.T);
      const uint32_t* source =
          operands.bits + (inside ? (t0 + query) * p.bits.row + head * p.bits.group + (key / 32) * p.bits.col : 0);
      if (p.bits.col != 0) {
        ptx::copy_async_16(bits_tile + 16 * r, source, inside ? 16 : 0);
      } else {  // one word stands for all keys
        const uint32_t word = inside ? *source : 0;
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(bits_tile + 16 * r), "r"(word) : "memory");
      }
    }
  }
  if constexpr (kBias == Bias::kTile) {
    const bool per_head = p.bias.group != 0;
    const int count = per_head ? kRows : queries;
    const int bytes = p.bias_dtype == DType::kF32 ? 4 : 2, per_chunk = 16 / bytes, row_shift = bytes == 4 ? 5 : 4;
    const int chunk = lane & ((1 << row_shift) - 1), c = key + chunk * per_chunk;
    const int keys = max(min(static_cast<int>(p.S) - c, per_chunk), 0);
#pragma unroll 2
    for (int r = lane >> row_shift; r < count; r += 32 >> row_shift) {
      const int query = per_head ? rows.query(r) : r, head = per_head ? rows.head(r) : 0;
      const int valid = t0 + query < static_cast<int>(p.T) ? keys : 0;
      const char* source =
          operands.bias + (valid ? ((t0 + query) * p.bias.row + head * p.bias.group + c * p.bias.col) * bytes : 0);
      const uint32_t target = bias_tile + (r << row_shift) * 16 + ((chunk ^ (r & 7)) << 4);
      if (bias_aligned) {
        ptx::copy_async_16(target, source, valid * bytes);
      } else {
#pragma unroll 1
        for (int e = 0; e < per_chunk; ++e) {
          if (bytes == 4) {
            const uint32_t value = e < valid ? reinterpret_cast<const uint32_t*>(source)[e * p.bias.col] : 0;
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(target + 4 * e), "r"(value) : "memory");
          } else {
            const uint16_t value = e < valid ? reinterpret_cast<const uint16_t*>(source)[e * p.bias.col] : 0;
            asm volatile("st.shared.u16 [%0], %1;" ::"r"(target + 2 * e), "h"(value) : "memory");
          }
        }
      }
    }
  }
}

// x = x * factor + bias^T, from a tile in shared memory.
template <class T>
__device__ __forceinline__ void add_bias(float (&x)[32], const Problem& p, const Rows& rows, uint32_t tile, int key,
                                         float factor) {
  const int lane = threadIdx.x % 32;  // `key`: the first of this warp's 16, in the tile
  const bool per_head = p.bias.group != 0;
  if (p.bias_dtype == DType::kF32) {
    const int k = key + lane / 4;
#pragma unroll
    for (int c = 0; c < 8; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 8 * c + 2 * (lane % 4) + (e & 1), r = per_head ? row : rows.query(row), kk = k + 4 * (e & 2);
        float value;
        asm volatile("ld.shared.f32 %0, [%1];"
                     : "=f"(value)
                     : "r"(tile + r * (4 * kKeys) + (((kk / 4) ^ (r & 7)) << 4) + (kk % 4) * 4));
        x[4 * c + e] = fmaf(x[4 * c + e], factor, value);
      }
    return;
  }
  // ldmatrix gives each lane the address of a row of 8 keys and, transposed, two rows of one key.
  const auto add = [&](auto element) {
    using Element = decltype(element);
    const int chunk = key / 8 + (lane / 8) % 2;
#pragma unroll
    for (int c = 0; c < 8; c += 2) {
      const int row = 8 * (c + lane / 16) + lane % 8, r = per_head ? row : rows.query(row);
      uint32_t pair[4];
      ptx::load_matrix_transposed(pair, tile + r * (2 * kKeys) + ((chunk ^ (r & 7)) << 4));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 b = ptx::unpack<Element>(pair[i]);
        float* const y = x + 4 * c + 2 * i;
        y[0] = fmaf(y[0], factor, b.x), y[1] = fmaf(y[1], factor, b.y);
      }
    }
  };
  if (p.bias_dtype == DType::kBF16) add(__nv_bfloat16());
  else add(__half());
}

// Where dbias goes: rows of this block's 128 keys. By two warps, each thread with two neighbouring keys.
template <class T>
struct DBiasWriter {
  const Problem& p;
  const Rows& rows;
  DBias mode;
  char* direct;  // in bias's dtype, at (batch, kv_head)
  float* summed;  // or null
  int key;
  bool pairs;  // 4-byte stores of two keys are aligned

  __device__ void put(int64_t index, float value) const {
    if (summed != nullptr) ptx::reduce_add(summed + index, value);
    else store_value(direct, index, value, p.bias_dtype);
  }
  __device__ void put2(int64_t row, int column, float a, float b) const {
    const int64_t index = row + key + column;
    const int inside = static_cast<int>(p.S) - key - column;
    if (inside >= 2 && summed == nullptr && pairs) {
      if (p.bias_dtype == DType::kF32) *reinterpret_cast<float2*>(reinterpret_cast<float*>(direct) + index) = {a, b};
      else
        *reinterpret_cast<uint32_t*>(reinterpret_cast<uint16_t*>(direct) + index) =
            p.bias_dtype == DType::kBF16 ? ptx::pack<__nv_bfloat16>(a, b) : ptx::pack<__half>(a, b);
      return;
    }
    if (inside >= 1) put(index, a);
    if (inside >= 2) put(index + 1, b);
  }
  __device__ static uint32_t address(uint32_t ds, int k, int row) {
    return ds + k * 128 + (((row / 8) ^ (k & 7)) << 4) + (row % 8) * 2;
  }
  __device__ static float element(uint32_t ds, int k, int row) {
    uint16_t bits;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address(ds, k, row)));
    return ptx::unpack<T>(bits).x;
  }

  // `thread` is 0 to 63.
  __device__ void write(uint32_t ds, int t0, int thread) const {
    const int queries = min(queries_per_tile(p.G) / kQueryParts, static_cast<int>(p.T) - t0), count = queries * p.G;
    if (p.dbias.col == 0) {
      if (thread < 32) write_row_sums(ds, t0, queries, thread);
      return;
    }
    const int k = 2 * thread;
    if (mode == DBias::kPerHead) {
#pragma unroll 1
      for (int g = 0; g < p.G; ++g) {
        float a = 0.0f, b = 0.0f;
        for (int q = 0; q < queries; ++q) a += element(ds, k, q * p.G + g), b += element(ds, k + 1, q * p.G + g);
        put2(g * p.dbias.group, k, a, b);
      }
      return;
    }
    if (pairs && key + kKeys <= p.S) {
      if (summed != nullptr)
        write_rows(summed, ds, t0, count, k, [](float* at, float a, float b) {
          asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(at), "f"(a), "f"(b) : "memory");
        });
      else if (p.bias_dtype == DType::kF32)
        write_rows(reinterpret_cast<float*>(direct), ds, t0, count, k,
                   [](float* at, float a, float b) { *reinterpret_cast<float2*>(at) = {a, b}; });
      else if (p.bias_dtype == DType::kBF16)
        write_rows(reinterpret_cast<uint16_t*>(direct), ds, t0, count, k, [](uint16_t* at, float a, float b) {
          *reinterpret_cast<uint32_t*>(at) = ptx::pack<__nv_bfloat16>(a, b);
        });
      else
        write_rows(reinterpret_cast<uint16_t*>(direct), ds, t0, count, k, [](uint16_t* at, float a, float b) {
          *reinterpret_cast<uint32_t*>(at) = ptx::pack<__half>(a, b);
        });
      return;
    }
    const int step = mode == DBias::kPerQuery ? p.G : 1;
#pragma unroll 1
    for (int r = 0; r < count; r += step) {
      float a = 0.0f, b = 0.0f;
#pragma unroll 1
      for (int j = r; j < r + step; ++j) a += element(ds, k, j), b += element(ds, k + 1, j);
      put2((t0 + rows.query(r)) * p.dbias.row + (step == 1 ? rows.head(r) * p.dbias.group : 0), k, a, b);
    }
  }

  // All rows of the tile, where pairs are aligned and inside.
  template <class Element, class Store>
  __device__ __forceinline__ void write_rows(Element* base, uint32_t ds, int t0, int count, int k,
                                             Store store) const {
    // In order; a sum is complete after `step` rows.
    const int step = mode == DBias::kPerQuery ? p.G : 1;
    const int64_t next_query = p.dbias.row - int64_t{step == 1 ? p.G - 1 : 0} * p.dbias.group;
    Element* at = base + t0 * p.dbias.row + key + k;
    int left = step, heads_left = p.G;
    float a = 0.0f, b = 0.0f;
#pragma unroll 1
    for (int c = 0; 8 * c < count; ++c) {
      uint32_t x[4], y[4];
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                   : "r"(address(ds, k, 8 * c)));
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(y[0]), "=r"(y[1]), "=r"(y[2]), "=r"(y[3])
                   : "r"(address(ds, k + 1, 8 * c)));
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 u = ptx::unpack<T>(x[j / 2]), v = ptx::unpack<T>(y[j / 2]);
        a += j % 2 ? u.y : u.x, b += j % 2 ? v.y : v.x;
        if (--left == 0) {
          if (8 * c + j < count) store(at, a, b);
          left = step, a = b = 0.0f;
          if (step == 1 && --heads_left != 0) at += p.dbias.group;
          else at += next_query, heads_left = p.G;
        }
      }
    }
  }

  // A bias that is the same for all keys: one warp sums over them, in a fixed order.
  __device__ void write_row_sums(uint32_t ds, int t0, int queries, int lane) const {
    const int sums = mode == DBias::kPerQuery ? queries : mode == DBias::kPerRow ? queries * p.G : p.G;
    const int summands = mode == DBias::kPerQuery ? p.G : mode == DBias::kPerRow ? 1 : queries;
    const int first = mode == DBias::kPerQuery ? p.G : 1, step = mode == DBias::kPerHead ? p.G : 1;
#pragma unroll 1
    for (int r = 0; r < sums; ++r) {
      float sum = 0.0f;
#pragma unroll 1
      for (int j = 0; j < summands; ++j)
#pragma unroll
        for (int i = 0; i < kKeys / 32; ++i) sum += element(ds, lane + 32 * i, r * first + j * step);
      for (int mask = 16; mask > 0; mask >>= 1) sum += __shfl_xor_sync(~0u, sum, mask);
      const int t = t0 + (mode == DBias::kPerQuery ? r : mode == DBias::kPerRow ? rows.query(r) : 0);
      const int g = mode == DBias::kPerRow ? rows.head(r) : mode == DBias::kPerHead ? r : 0;
      if (lane == 0) put(t * p.dbias.row + g * p.dbias.group, sum);
    }
  }

  // Zeros for tiles `begin` to `end`, which were skipped.
  __device__ void clear(int begin, int end, int thread) const {
    const int queries = queries_per_tile(p.G) / kQueryParts, heads = mode == DBias::kPerRow ? p.G : 1;
    const int t_end = min(end * queries, static_cast<int>(p.T));
#pragma unroll 1
    for (int t = begin * queries; t < t_end; ++t)
#pragma unroll 1
      for (int g = 0; g < heads; ++g) put2(t * p.dbias.row + g * p.dbias.group, 2 * thread, 0.0f, 0.0f);
  }
};

template <class T, int kHeadDim, class MaskKind, class BiasKind>
__global__ void __launch_bounds__(kThreads, 1)
    jax_dma_sm90_backward(const __grid_constant__ Problem p, const __grid_constant__ BackwardMaps maps,
                          const __grid_constant__ BackwardScratch scratch, DBias dbias_mode, bool bias_aligned,
                          bool dbias_aligned) {
  using Shape = BackwardShape<kHeadDim>;
  constexpr Mask kMask = MaskKind::kind;
  constexpr Bias kBias = BiasKind::kind;
  constexpr int kPanels = Shape::kPanels, kQPanel = Shape::kQPanel, kKVPanel = Shape::kKVPanel;
  constexpr bool kLogits = kMask == Mask::kBits || kBias == Bias::kTile;  // something is loaded for each tile of logits
  // Whether s of the next tile is computed behind this tile's last products.
  constexpr bool kAhead = AHEAD;
  // Where registers are short dp is computed behind the exponentials only.
  constexpr bool kLate = LATE;
  // Where registers are short ds is made of p as the products see it, in 16 bits.
  constexpr bool kPackedP = kHeadDim == 128 && (kMask != Mask::kNone || kBias != Bias::kNone);
  constexpr bool kHideFirst = kBias != Bias::kNone;  // before the exponentials
  constexpr bool kWide = kLogits || kMask != Mask::kNone;  // the producers need more registers
  constexpr int kProducerRegs = kHeadDim == 64 ? 88 : kWide ? WIDE_P : 24,
                kConsumerRegs = kHeadDim == 64 ? 208 : kWide ? WIDE_C : 240;
  // What a block is launched with: 168 registers for each of 384 threads. More would be waited for forever.
  static_assert(kProducerRegs + 2 * kConsumerRegs <= 3 * 168);

  extern __shared__ __align__(1024) char dynamic[];
  __shared__ BackwardShared shared;
  __shared__ BlockOperands<T> operands;
  const uint32_t k_tile = shared_address(dynamic), v_tile = k_tile + Shape::kKVBytes, q_tiles = v_tile + Shape::kKVBytes,
                 dout_tiles = q_tiles + 2 * Shape::kQBytes, ds_tiles = k_tile + Shape::kDS;
  float* const stats = reinterpret_cast<float*>(dynamic + Shape::kStats);  // [stage][log-sum-exp, delta][row]
  const auto bias_tile = [&](int stage) { return k_tile + Shape::kLogits + stage * Shape::bias_bytes(p); };
  const auto bits_tile = [&](int stage) {
    return k_tile + Shape::kLogits + (kBias == Bias::kTile ? scratch.logit_stages * Shape::bias_bytes(p) : 0) +
           stage * Shape::bits_bytes(p);
  };

  // The first keys of all heads first, because under a causal mask the most queries see them, and a long block that
  // starts late is waited for.
  const int key_tile = scratch.first_part + blockIdx.x / scratch.heads,
            head = scratch.first_head + blockIdx.x % scratch.heads;
  const int key = key_tile * kKeys, queries = queries_per_tile(p.G) / kQueryParts;
  const bool dbias_tiles = kBias == Bias::kTile && dbias_mode != DBias::kNone;

  if (threadIdx.x == 0) {
    operands.fill(p, head / p.K, head % p.K);
    barrier_init(&shared.kv_full, 1);
    for (int i = 0; i < 2; ++i) {
      barrier_init(&shared.q_full[i], 1), barrier_init(&shared.dout_full[i], 1);
      barrier_init(&shared.q_free[i], 2), barrier_init(&shared.dout_free[i], 2);
      barrier_init(&shared.logits_full[i], 64), barrier_init(&shared.logits_free[i], 2);
      barrier_init(&shared.ds_full[i], 1), barrier_init(&shared.ds_free[i], 2);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  } else if (threadIdx.x == 32) {
    shared.q_batch = static_cast<int>(offset_of(p, p.q, head / p.K, 0, 0) / maps.q_entry);
    shared.dout_batch = static_cast<int>(offset_of(p, p.dout, head / p.K, 0, 0) / maps.dout_entry);
  } else if (threadIdx.x == 64) {
    shared.k_batch = static_cast<int>(offset_of(p, p.k, head / p.K, 0, 0) / maps.k_entry);
    shared.v_batch = static_cast<int>(offset_of(p, p.v, head / p.K, 0, 0) / maps.v_entry);
  } else if (threadIdx.x == 96) {
    shared.dk = offset_of(p, p.dk, head / p.K, head % p.K, 0), shared.dv = offset_of(p, p.dv, head / p.K, head % p.K, 0);
    shared.turn_due[0] = shared.turn_due[1] = nullptr;
  }
  for (int r = threadIdx.x; r < kRows; r += kThreads)
    shared.rows.packed[r] = r < queries * p.G ? r / p.G | (r % p.G) << 16 : queries - 1;
  // Rows of q and dout that no load reaches.
  for (int i = threadIdx.x + queries * p.G * 8; i < kQPanel / 16; i += kThreads)
    for (int panel = 0; panel < 4 * kPanels; ++panel)
      *reinterpret_cast<uint4*>(dynamic + 2 * Shape::kKVBytes + panel * kQPanel + 16 * i) = uint4{0, 0, 0, 0};
  fence_async_proxy();
  __syncthreads();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegs));
    if (warp == 0) {
      Walk walk(p);
      const int kv_head = head % p.K, bytes = kPanels * queries * p.G * 128;
      int i = 0;
      for (int tile = walk.next(p, operands, key_tile); tile >= 0; tile = walk.next(p, operands, key_tile), ++i) {
        const int stage = i & 1, parity = (i >> 1 & 1) ^ 1, t0 = tile * queries;
        int turn = 0;
        if (p.deterministic) {  // key tiles add to dq in their own order: how many come before
          for (int word = 0; word <= key_tile / kTilesPerWord; ++word) {
            uint32_t seen = key_tiles_word(p, operands, tile / kQueryParts, word, queries_per_tile(p.G)).seen;
            if (word == key_tile / kTilesPerWord) seen &= (1u << (key_tile % kTilesPerWord)) - 1;
            turn += __popc(seen);
          }
        }
        if (lane == 0) {
          if (i == 0) {
            barrier_expect(&shared.kv_full, 2 * Shape::kKVBytes);
            for (int panel = 0; panel < kPanels; ++panel) {
              tma_load(k_tile + panel * kKVPanel, &maps.k, &shared.kv_full, 64 * panel, kv_head, key, shared.k_batch);
              tma_load(v_tile + panel * kKVPanel, &maps.v, &shared.kv_full, 64 * panel, kv_head, key, shared.v_batch);
            }
          }
          barrier_wait(&shared.q_free[stage], parity);
          int hidden = kMask == Mask::kBits && p.bits.present() && !walk.tile_full ? kTestBits : 0;
          if (key + kKeys > static_cast<int>(p.S) ||
              (p.causal && key + kKeys - 1 > t0 + static_cast<int>(p.causal_offset())) ||
              (kMask != Mask::kNone && p.start.present() && !walk.tile_full))
            hidden |= kTestPosition;
          shared.info[stage] = TileInfo{tile, hidden, turn, 0};
          barrier_expect(&shared.q_full[stage], bytes + 8 * kRows);
          for (int panel = 0; panel < kPanels; ++panel)
            tma_load(q_tiles + stage * Shape::kQBytes + panel * kQPanel, &maps.q, &shared.q_full[stage], 64 * panel,
                     kv_head * p.G, t0, shared.q_batch);
          bulk_load(k_tile + Shape::kStats + stage * 8 * kRows,
                    scratch.row_stats + (head * scratch.tiles + tile) * (2 * kRows), 8 * kRows, &shared.q_full[stage]);
          barrier_wait(&shared.dout_free[stage], parity);
          barrier_expect(&shared.dout_full[stage], bytes);
          for (int panel = 0; panel < kPanels; ++panel)
            tma_load(dout_tiles + stage * Shape::kQBytes + panel * kQPanel, &maps.dout, &shared.dout_full[stage],
                     64 * panel, kv_head * p.G, t0, shared.dout_batch);
        }
        __syncwarp();
      }
      if (lane == 0) {
        barrier_wait(&shared.q_free[i & 1], (i >> 1 & 1) ^ 1);
        shared.info[i & 1].tile = -1;
        barrier_arrive(&shared.q_full[i & 1]);
      }
    } else if (warp == 1) {
      if constexpr (kLogits) {
        Walk walk(p);
        int stage = 0, parity = 1;
        for (int tile = walk.next(p, operands, key_tile); tile >= 0; tile = walk.next(p, operands, key_tile)) {
          barrier_wait(&shared.logits_free[stage], parity);
          load_logits<T, kMask, kBias>(p, operands, shared.rows, bits_tile(stage), bias_tile(stage), tile * queries, key,
                                       p.bits.present() && !walk.tile_full, bias_aligned);
          barrier_arrive_copies(&shared.logits_full[stage]);
          barrier_arrive(&shared.logits_full[stage]);
          if (++stage == scratch.logit_stages) stage = 0, parity ^= 1;
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
      }
    } else if (dbias_tiles) {
      if constexpr (kBias == Bias::kTile) {
        const DBiasWriter<T> writer{
            p,
            shared.rows,
            dbias_mode,
            operands.dbias,
            scratch.dbias == nullptr ? nullptr : scratch.dbias + operands.dbias_offset,
            key,
            dbias_aligned};
        const int thread = threadIdx.x - 64;
        {
          Walk walk(p);
          int i = 0;
          for (int tile = walk.next(p, operands, key_tile); tile >= 0; tile = walk.next(p, operands, key_tile), ++i) {
            barrier_wait(&shared.ds_full[i & 1], i >> 1 & 1);
            writer.write(ds_tiles + (i & 1) * Shape::kDSBytes, tile * queries, thread);
            __syncwarp();
            if (lane == 0) barrier_arrive(&shared.ds_free[i & 1]);
          }
        }
        if (scratch.dbias == nullptr) {  // zeros in the tiles that were skipped
          Walk walk(p);
          const int tiles = static_cast<int>(ceil_div(p.T, queries));
          int done = walk.backwards ? tiles : 0;
          for (bool more = true; more;) {
            const int tile = walk.next(p, operands, key_tile);
            more = tile >= 0;
            if (walk.backwards) {
              writer.clear(more ? tile + 1 : 0, done, thread);
              done = tile;
            } else {
              writer.clear(done, more ? tile : tiles, thread);
              done = tile + 1;
            }
          }
        }
      }
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegs));
  const int group = warp / 4 - 1, thread = threadIdx.x % 128;                 // warpgroup, thread of it
  const int warp_key = 64 * group + 16 * (warp % 4), k0 = warp_key + lane / 4;  // this thread's keys are k0 and k0 + 8
  float dk[kHeadDim / 2], dv[kHeadDim / 2], key_sum[2] = {0.0f, 0.0f}, key_bias[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = dv[i] = 0.0f;
  if constexpr (kBias == Bias::kKey) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int s = key + k0 + 8 * h;
      const int64_t index = s * p.bias.col;
      if (s < static_cast<int>(p.S))
        key_bias[h] = p.bias_dtype == DType::kF32 ? reinterpret_cast<const float*>(operands.bias)[index]
                      : p.bias_dtype == DType::kBF16
                          ? __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(operands.bias)[index])
                          : __half2float(reinterpret_cast<const __half*>(operands.bias)[index]);
    }
  }
  // From the units of x, below, to log2.
  const float log2_factor = kBias == Bias::kNone && p.softcap == 0.0f ? p.scale * kLog2e : kLog2e;
  const uint32_t k_group = k_tile + group * 64 * 128, v_group = v_tile + group * 64 * 128;
  // dq: 64 rows by this group's half of the channels.
  const uint32_t k_half = kPanels == 2 ? k_tile + group * kKVPanel : k_tile + group * 64;
  const uint32_t ds_at = k0 * 128 + (lane % 4) * 4, ds_swizzle = k0 & 7;
  float* const dq_stage = reinterpret_cast<float*>(dynamic + Shape::kDQ + group * Shape::kDQBytes);
  float x[32];

  const auto issue_s = [&](uint32_t q_tile) {
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kHeadDim / 16; ++c)
      wgmma_ss<T, false, false>(x, descriptor(k_group + (c / 4) * kKVPanel + (c % 4) * 32, 16, 1024),
                                descriptor(q_tile + (c / 4) * kQPanel + (c % 4) * 32, 16, 1024), c > 0);
    wgmma_commit();
  };

  barrier_wait(&shared.q_full[0], 0);
  int tile = shared.info[0].tile;
  if (tile >= 0) {
    barrier_wait(&shared.kv_full, 0);
    if constexpr (kAhead) {
      issue_s(q_tiles);
      wgmma_wait<0>();
      settle(x);
    }
  }
  for (int i = 0; tile >= 0; ++i) {
    const int stage = i & 1, parity = i >> 1 & 1;
    const int logit_stage = scratch.logit_stages == 2 ? stage : 0,
              logit_parity = scratch.logit_stages == 2 ? parity : stage;
    const uint32_t q_tile = q_tiles + stage * Shape::kQBytes, dout_tile = dout_tiles + stage * Shape::kQBytes;
    const uint32_t ds_tile = ds_tiles + stage * Shape::kDSBytes;
    const float* const lse = stats + stage * 2 * kRows;
    const float2* const lse2 = reinterpret_cast<const float2*>(lse) + lane % 4;  // of the rows in this thread's columns

    // Rows that see nothing or are padding, and rows of very large logits, need care that others are spared.
    bool special = false;
#pragma unroll
    for (int r = 0; r < kRows; r += 32)
      special |= fabsf(lse[r + lane]) > kLarge && (kBias != Bias::kNone || r + lane < queries * p.G);
    special = __any_sync(~0u, special);  // the same for every warp

    if constexpr (!kAhead) issue_s(q_tile);
    barrier_wait(&shared.dout_full[stage], parity);
    if (special) {
      // Whatever the cotangents of a row that sees nothing hold must not reach the products, in which 0 * NaN is NaN.
      for (int j = threadIdx.x - 128; j < kRows * 8 * kPanels; j += kConsumers) {
        const int panel = j / (kRows * 8), r = j / 8 % kRows;
        if (lse[r] == INFINITY)
          asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(dout_tile + panel * kQPanel + r * 128 +
                                                                       j % 8 * 16),
                       "r"(0)
                       : "memory");
      }
      fence_async_proxy();
      named_barrier(4, kConsumers);
    }
    float y[32];
    const auto issue_dp = [&] {
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < kHeadDim / 16; ++c)
        wgmma_ss<T, false, false>(y, descriptor(v_group + (c / 4) * kKVPanel + (c % 4) * 32, 16, 1024),
                                  descriptor(dout_tile + (c / 4) * kQPanel + (c % 4) * 32, 16, 1024), c > 0);
      wgmma_commit();
    };
    if constexpr (!kLate) issue_dp();
    if constexpr (!kAhead) {
      wgmma_wait<kLate ? 0 : 1>();
      settle(x);
    }

    if (kLogits) barrier_wait(&shared.logits_full[logit_stage], logit_parity);
    if (dbias_tiles) barrier_wait(&shared.ds_free[stage], parity ^ 1);
    float factor = p.scale;
    if (p.softcap != 0.0f) {
      // x: the capped logits; their derivative waits where ds will be.
      const float inner = p.scale / p.softcap;
      factor = 1.0f;
#pragma unroll
      for (int c = 0; c < 16; ++c) {
        const float a = ptx::tanh(x[2 * c] * inner), b = ptx::tanh(x[2 * c + 1] * inner);
        x[2 * c] = p.softcap * a, x[2 * c + 1] = p.softcap * b;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(ds_tile + ds_at + (c % 2) * 1024 + (((c / 2) ^ ds_swizzle) << 4)),
                     "r"(ptx::pack<T>(1.0f - a * a, 1.0f - b * b))
                     : "memory");
      }
    }
    if constexpr (kBias == Bias::kTile) {
      add_bias<T>(x, p, shared.rows, bias_tile(logit_stage), warp_key, factor);
    } else if constexpr (kBias == Bias::kKey) {
#pragma unroll
      for (int c = 0; c < 32; ++c) x[c] = fmaf(x[c], factor, key_bias[c / 2 % 2]);
    }
    if (kBias != Bias::kNone && special) {
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const float2 l = lse2[4 * c];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float row_lse = e & 1 ? l.y : l.x;
          float& z = x[4 * c + e];
          // In a row of padding x may be NaN: it meets biases that are hidden from all others.
          z = row_lse == INFINITY ? -INFINITY : fabsf(row_lse) > kLarge ? z - row_lse : z;
        }
      }
    }
    // Hidden positions are 0 in p, whatever they met on the way.
    const auto hide = [&](float value) {
      const int hidden = shared.info[stage].hidden;
      if (kMask == Mask::kBits && (hidden & kTestBits)) {
        const bool per_head = p.bits.group != 0;
        const uint32_t bits = bits_tile(logit_stage) + warp_key / 32 * 4;
        const int shift = k0 % 32;
#pragma unroll
        for (int c = 0; c < 8; ++c)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int row = 8 * c + 2 * (lane % 4) + e;
            uint32_t word;
            asm volatile("ld.shared.u32 %0, [%1];"
                         : "=r"(word)
                         : "r"(bits + 16 * (per_head ? row : shared.rows.query(row))));
            word >>= shift;
            if ((word & 1u) == 0) x[4 * c + e] = value;
            if ((word & 0x100u) == 0) x[4 * c + 2 + e] = value;
          }
      }
      if (hidden & kTestPosition) {
        const int t0 = tile * queries;
        const bool intervals = kMask != Mask::kNone && p.start.present();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          // Queries of the tile that see the key: first <= query < last.
          const int s = key + k0 + 8 * h;
          const bool inside = s < static_cast<int>(p.S);
          int first = !inside ? INT32_MAX : p.causal ? s - static_cast<int>(p.causal_offset()) - t0 : INT32_MIN;
          int last = INT32_MAX;
          if (intervals && inside) {
            first = max(first, max(operands.start[s], 0) - t0);
            last = max(operands.end[s], 0) - t0;
          }
#pragma unroll
          for (int c = 0; c < 8; ++c)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int query = shared.rows.query(8 * c + 2 * (lane % 4) + e);
              if (query < first || (kMask != Mask::kNone && query >= last)) x[4 * c + 2 * h + e] = value;
            }
        }
      }
    };
    if constexpr (kHideFirst) hide(-INFINITY);
    if constexpr (kLate) issue_dp();
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float2 l = lse2[4 * c];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float row_lse = e & 1 ? l.y : l.x;
        const float shift = kBias == Bias::kNone ? row_lse : fabsf(row_lse) > kLarge ? 0.0f : row_lse * kLog2e;
        x[4 * c + e] = ptx::exp2(fmaf(x[4 * c + e], log2_factor, -shift));
      }
    }
    if constexpr (!kHideFirst) hide(0.0f);
    uint32_t packed[16];
#pragma unroll
    for (int c = 0; c < 16; ++c) packed[c] = ptx::pack<T>(x[2 * c], x[2 * c + 1]);
    wgmma_wait<0>();
    settle(y);
    const auto weights = [&](int c) {  // two rows of p
      return kPackedP ? ptx::unpack<T>(packed[c]) : make_float2(x[2 * c], x[2 * c + 1]);
    };
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < 4; ++c)
      wgmma_rs<T, true>(dv, packed[4 * c], packed[4 * c + 1], packed[4 * c + 2], packed[4 * c + 3],
                        descriptor(dout_tile + c * 2048, kQPanel, 1024));
    wgmma_commit();

    uint32_t ds[16];
    if (p.softcap == 0.0f) {
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const float2 delta = lse2[kRows / 2 + 4 * c];
        const float2 p0 = weights(2 * c), p1 = weights(2 * c + 1);
        const float a = p0.x * (y[4 * c] - delta.x), b = p0.y * (y[4 * c + 1] - delta.y),
                    d = p1.x * (y[4 * c + 2] - delta.x), e = p1.y * (y[4 * c + 3] - delta.y);
        if constexpr (kBias == Bias::kKey) key_sum[0] += a + b, key_sum[1] += d + e;
        ds[2 * c] = ptx::pack<T>(a, b), ds[2 * c + 1] = ptx::pack<T>(d, e);
        const uint32_t target = ds_tile + ds_at + ((c ^ ds_swizzle) << 4);
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(target), "r"(ds[2 * c]) : "memory");
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(target + 1024), "r"(ds[2 * c + 1]) : "memory");
      }
    } else {
      // dbias is the gradient of the capped logits; dq and dk need that of the logits before the cap.
#pragma unroll
      for (int c = 0; c < 16; ++c) {
        const float2 delta = lse2[kRows / 2 + c / 2 * 4];
        const float2 weight = weights(c);
        const float a = weight.x * (y[2 * c] - delta.x), b = weight.y * (y[2 * c + 1] - delta.y);
        if constexpr (kBias == Bias::kKey) key_sum[c % 2] += a + b;
        const uint32_t target = ds_tile + ds_at + (c % 2) * 1024 + (((c / 2) ^ ds_swizzle) << 4);
        uint32_t slopes;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(slopes) : "r"(target) : "memory");
        const float2 slope = ptx::unpack<T>(slopes);
        ds[c] = ptx::pack<T>(a * slope.x, b * slope.y);
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(target), "r"(dbias_tiles ? ptx::pack<T>(a, b) : ds[c]) : "memory");
      }
      if (dbias_tiles) {
        named_barrier(1, kConsumers);
        if (threadIdx.x == 128) barrier_arrive(&shared.ds_full[stage]);
        barrier_wait(&shared.ds_free[stage], parity);
#pragma unroll
        for (int c = 0; c < 16; ++c)
          asm volatile(
              "st.shared.u32 [%0], %1;" ::"r"(ds_tile + ds_at + (c % 2) * 1024 + (((c / 2) ^ ds_swizzle) << 4)),
              "r"(ds[c])
              : "memory");
      }
    }
    fence_async_proxy();
    named_barrier(1, kConsumers);  // ds is there; statistics, bits and bias have been read
    if (kLogits && thread == 0) barrier_arrive(&shared.logits_free[logit_stage]);
    if (dbias_tiles && p.softcap == 0.0f && threadIdx.x == 128) barrier_arrive(&shared.ds_full[stage]);

    if constexpr (kAhead) {
      wgmma_wait<0>();  // dv
      settle(dv);
    }
    float dq[Shape::kDQRegs];
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kKeys / 16; ++c)
      wgmma_ss<T, true, true>(dq, descriptor(ds_tile + c * 2048, 8192, 1024),
                              descriptor(k_half + c * 2048, kKVPanel, 1024), c > 0);
    wgmma_commit();
#pragma unroll
    for (int c = 0; c < 4; ++c)
      wgmma_rs<T, true>(dk, ds[4 * c], ds[4 * c + 1], ds[4 * c + 2], ds[4 * c + 3],
                        descriptor(q_tile + c * 2048, kQPanel, 1024));
    wgmma_commit();

    // s of the next tile, behind those (of whatever is there, if there is no next tile).
    barrier_wait(&shared.q_full[stage ^ 1], (i + 1) >> 1 & 1);
    const int next = shared.info[stage ^ 1].tile;
    if constexpr (kAhead) {
      issue_s(q_tiles + (stage ^ 1) * Shape::kQBytes);
      wgmma_wait<2>();  // dq
      settle(dq);
    } else {
      wgmma_wait<1>();  // dv and dq
      settle(dq), settle(dv);
    }
    if (thread == 0) {
      barrier_arrive(&shared.dout_free[stage]);
      if (p.deterministic) {
        bulk_wait();
        if (shared.turn_due[group] != nullptr) {
          __threadfence();
          ptx::store_release(shared.turn_due[group], shared.turn_value[group]);
        }
      } else {
        bulk_wait_read();
      }
    }
    named_barrier(2 + group, 128);
#pragma unroll
    for (int c = 0; c < Shape::kDQRegs / 4; ++c)
      reinterpret_cast<float4*>(dq_stage)[c * 128 + thread] =
          make_float4(dq[4 * c], dq[4 * c + 1], dq[4 * c + 2], dq[4 * c + 3]);
    fence_async_proxy();
    named_barrier(2 + group, 128);
    if (thread == 0) {
      const int64_t half = 2 * (head * scratch.tiles + tile) + group;
      if (p.deterministic) {
        const int turn = shared.info[stage].turn;
        shared.turn_due[group] = scratch.turn + half, shared.turn_value[group] = turn + 1;
        while (ptx::load_acquire(scratch.turn + half) != turn) __nanosleep(32);
        asm volatile("fence.proxy.async;" ::: "memory");
      }
      bulk_reduce_add(scratch.dq + half * (kRows * kHeadDim / 2), shared_address(dq_stage),
                      Shape::kDQBytes);
    }
    wgmma_wait<0>();  // dk, and s of the next tile
    settle(dk);
    if constexpr (kAhead) settle(x);
    if (thread == 0) barrier_arrive(&shared.q_free[stage]);
    tile = next;
  }
  if (thread == 0) {
    bulk_wait();
    if (p.deterministic && shared.turn_due[group] != nullptr) {
      __threadfence();
      ptx::store_release(shared.turn_due[group], shared.turn_value[group]);
    }
  }

  // dk and dv, straight from the fragments.
  T* const dk_out = static_cast<T*>(p.dk.data) + shared.dk;
  T* const dv_out = static_cast<T*>(p.dv.data) + shared.dv;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t s = key + k0 + 8 * h;
    if (s >= p.S) continue;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      const int c = 8 * n + 2 * (lane % 4), e = 4 * n + 2 * h;
      if (c < p.H)
        *reinterpret_cast<uint32_t*>(dk_out + s * p.dk.row + c) = ptx::pack<T>(dk[e] * p.scale, dk[e + 1] * p.scale);
      if (c < p.Hv) *reinterpret_cast<uint32_t*>(dv_out + s * p.dv.row + c) = ptx::pack<T>(dv[e], dv[e + 1]);
    }
  }
  if constexpr (kBias == Bias::kKey) {
    if (dbias_mode != DBias::kNone) {
      const DBiasWriter<T> writer{p,
                                  shared.rows,
                                  dbias_mode,
                                  operands.dbias,
                                  scratch.dbias == nullptr ? nullptr : scratch.dbias + operands.dbias_offset,
                                  key,
                                  dbias_aligned};
      float* const sums = reinterpret_cast<float*>(dynamic + Shape::kDS);  // ds has been read
      named_barrier(1, kConsumers);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = key_sum[h];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const int k = k0 + 8 * h;
        if (lane % 4 == 0) {
          if (p.dbias.col == 0) sums[k] = sum;
          else if (key + k < p.S) writer.put(key + k, sum);
        }
      }
      if (p.dbias.col == 0) {
        named_barrier(1, kConsumers);
        if (threadIdx.x == 128) {
          float sum = 0.0f;
          for (int k = 0; k < kKeys; ++k) sum += sums[k];
          writer.put(0, sum);
        }
      }
    }
  }
}

// Per tile of 64 rows: log-sum-exp and delta = <out, dout> - dlse, dq = 0, turn = 0. One block a tile.
template <class T, int kHeadDim>
__global__ void __launch_bounds__(256)
    jax_dma_sm90_row_stats(const __grid_constant__ Problem p, const __grid_constant__ BackwardScratch scratch) {
  constexpr int kLanes = kHeadDim / 8;  // of a row: 16 bytes each
  const int64_t head = blockIdx.x / scratch.tiles;
  const int tile = static_cast<int>(blockIdx.x % scratch.tiles), kv_head = static_cast<int>(head % p.K);
  const int queries = queries_per_tile(p.G) / kQueryParts, c = threadIdx.x % kLanes * 8;
  const int64_t batch = head / p.K;
  const T* const out = static_cast<const T*>(p.out.data) + offset_of(p, p.out, batch, kv_head, 0);
  const T* const dout = static_cast<const T*>(p.dout.data) + offset_of(p, p.dout, batch, kv_head, 0);
  const float* const lse = static_cast<const float*>(p.lse.data) + offset_of(p, p.lse, batch, kv_head, 0);
  const float* const dlse = static_cast<const float*>(p.dlse.data) + offset_of(p, p.dlse, batch, kv_head, 0);
  float* const stats = scratch.row_stats + int64_t{blockIdx.x} * (2 * kRows);
  float4* const dq = reinterpret_cast<float4*>(scratch.dq) + int64_t{blockIdx.x} * (kRows * kHeadDim / 4);
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kHeadDim / 4; i += 256) dq[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (p.deterministic && threadIdx.x < 2) scratch.turn[2 * int64_t{blockIdx.x} + threadIdx.x] = 0;
#pragma unroll
  for (int r = threadIdx.x / kLanes; r < kRows; r += 256 / kLanes) {
    const int query = r / p.G, g = r % p.G;
    const int64_t t = int64_t{tile} * queries + query;
    float row_lse = -INFINITY, row_dlse = 0.0f, sum = 0.0f;
    if (query < queries && t < p.T) {
      row_lse = lse[g * p.lse.group + t * p.lse.row];
      if (p.dlse.present()) row_dlse = dlse[g * p.dlse.group + t * p.dlse.row];
      if (c < p.Hv) {
        const uint4 a = *reinterpret_cast<const uint4*>(out + g * p.out.group + t * p.out.row + c),
                    b = *reinterpret_cast<const uint4*>(dout + g * p.dout.group + t * p.dout.row + c);
        const uint32_t u[4] = {a.x, a.y, a.z, a.w}, v[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 x = ptx::unpack<T>(u[i]), y = ptx::unpack<T>(v[i]);
          sum += x.x * y.x + x.y * y.y;
        }
      }
    }
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask >>= 1) sum += __shfl_xor_sync(~0u, sum, mask);
    if (c == 0) {
      const bool blank = row_lse == -INFINITY;
      stats[r] = blank ? INFINITY : p.bias.present() ? row_lse : row_lse * kLog2e;
      stats[kRows + r] = blank ? 0.0f : sum - row_dlse;
    }
  }
}

// dq from fragment order to its own, times scale. A thread makes 8 channels of two rows.
template <class T, int kHeadDim>
__global__ void __launch_bounds__(256)
    jax_dma_sm90_reorder_dq(const __grid_constant__ Problem p, const __grid_constant__ BackwardScratch scratch) {
  constexpr int kBlocks = kHeadDim / 8;  // of 8 channels
  const int64_t head = blockIdx.x / scratch.tiles;
  const int tile = static_cast<int>(blockIdx.x % scratch.tiles), kv_head = static_cast<int>(head % p.K);
  const int queries = queries_per_tile(p.G) / kQueryParts;
  T* const out = static_cast<T*>(p.dq.data) + offset_of(p, p.dq, head / p.K, kv_head, 0);
  const float4* const dq = reinterpret_cast<const float4*>(scratch.dq) + int64_t{blockIdx.x} * (kRows * kHeadDim / 4);
#pragma unroll
  for (int i = threadIdx.x; i < kBlocks * 32; i += 256) {
    const int block = i % kBlocks, pair = i / kBlocks;  // pair: 8 * (warp of the warpgroup) + lane / 4
    const int group = block / (kBlocks / 2);
    const float4* const source = dq + (group * (kBlocks / 2) + block % (kBlocks / 2)) * 128 + pair * 4;
    float4 value[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) value[j] = source[j];
    if (8 * block >= p.H) continue;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = pair / 8 * 16 + pair % 8 + 8 * h, query = r / p.G, g = r % p.G;
      const int64_t t = int64_t{tile} * queries + query;
      if (query >= queries || t >= p.T) continue;
      uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        packed[j] = h == 0 ? ptx::pack<T>(value[j].x * p.scale, value[j].y * p.scale)
                           : ptx::pack<T>(value[j].z * p.scale, value[j].w * p.scale);
      *reinterpret_cast<uint4*>(out + g * p.dq.group + t * p.dq.row + 8 * block) =
          uint4{packed[0], packed[1], packed[2], packed[3]};
    }
  }
}

}  // namespace jax_dma::sm90
