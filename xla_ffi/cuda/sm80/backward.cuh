// Backward attention with mma.sync and cp.async, for compute capability 8.0 and newer.
//
// One block per (tile of kKeys keys, key/value head, batch entry). It walks the query tiles that see its keys, all G
// heads of the group in each, and so owns dk, dv and its columns of dbias:
//
//   s = q k^T, p = exp2(logits - lse)       dp = dout v^T, ds = p (dp - delta)
//   dv += p^T dout, dk += ds^T q            dq += ds k (f32, added in device memory), dbias = ds summed over what was
//   broadcast
//
// p and ds go through shared memory in 16 bits, so that warps can share the second products out differently.
//
//   shape       rows x keys  stages  warps  shared memory: k, v + stages (q, dout) + p, ds
//   64          64 x 128     2       8      32 + 32 + 32 = 96 KB
//   128         64 x 128     2       8      64 + 64 + 32 = 160 KB
//   128 small   64 x 64      1       8      32 + 32 + 16 = 80 KB
//   256         32 x 64      2       8      64 + 64 + 8 = 136 KB
//   256 small   32 x 32      1       4      32 + 32 + 8 = 72 KB
// "small" is for devices with 99 KB a block (8.6, 8.9, 12.0). Where shared memory is left (9.0, 10.0), mask bits and
// bias of the next tile are loaded with its q and dout, `ahead`; otherwise a bias tile is staged where p and ds will
// be, behind two more barriers. What is rare has an instance of its own (kGeneral), so that the loop of the others is
// short: see is_general(). dq is kept in fragment order, so that a warp's additions are contiguous; a kernel after this
// one puts it in order.
#pragma once

#include "../live_tiles.cuh"
#include "../tile_order.h"
#include "logits.cuh"
#include "tile.cuh"

namespace jax_dma::sm80 {

// kSM x kSN warps share out s and dp, kKM x kKN dk and dv, kQM x kQN dq.
template <int kRows_, int kKeys_, int kStages_, int kWarps_, int kSM_, int kKM_, int kQM_, int kHeadDim>
struct BackwardShapeOf {
  static constexpr int kRows = kRows_, kKeys = kKeys_, kStages = kStages_, kWarps = kWarps_, kThreads = 32 * kWarps_;
  static constexpr int kSM = kSM_, kSN = kWarps / kSM_, kKM = kKM_, kKN = kWarps / kKM_, kQM = kQM_,
                       kQN = kWarps / kQM_;
  static constexpr int kKVBytes = 2 * kKeys * kHeadDim, kQBytes = 2 * kRows * kHeadDim;
  static constexpr int kPBytes = 2 * kRows * (kKeys < 64 ? 64 : kKeys);
  static constexpr int kTileBytes = 2 * kKVBytes + 2 * kStages * kQBytes + 2 * kPBytes;
  static constexpr int kStatsBytes = 8 * kStages * kRows;  // lse and delta
  // After those: bias per key, mask bits, intervals.
  __host__ __device__ static int key_bias_bytes(const Problem& p) {
    return p.bias.present() && p.bias.row == 0 && p.bias.group == 0 ? 4 * kKeys : 0;
  }
  __host__ __device__ static int bits_bytes(const Problem& p) {
    return p.bits.present() ? MaskTile<kRows, kKeys>::kBytes : 0;
  }
  __host__ __device__ static int bias_tile_bytes(const Problem& p) {
    const int rows = p.bias.group != 0 ? kRows : queries_per_tile(p.G) * kRows / kTileRows;
    return p.bias.present() && key_bias_bytes(p) == 0 ? rows * kKeys * (p.bias_dtype == DType::kF32 ? 4 : 2) : 0;
  }
  static int shared_bytes(const Problem& p, bool ahead) {
    return kTileBytes + kStatsBytes + key_bias_bytes(p) + IntervalTile<kKeys>::bytes(p) +
           bits_bytes(p) * (ahead ? 2 : 1) + (ahead ? 2 * bias_tile_bytes(p) : 0);
  }
};
template <int kHeadDim, bool kSmall>
struct BackwardShape;
template <bool kSmall>
struct BackwardShape<64, kSmall> : BackwardShapeOf<64, 128, 2, 8, 2, 4, 2, 64> {};
template <>
struct BackwardShape<128, false> : BackwardShapeOf<64, 128, 2, 8, 2, 4, 2, 128> {};
template <>
struct BackwardShape<128, true> : BackwardShapeOf<64, 64, 1, 8, 2, 2, 2, 128> {};
template <>
struct BackwardShape<256, false> : BackwardShapeOf<32, 64, 2, 8, 2, 2, 1, 256> {};
template <>
struct BackwardShape<256, true> : BackwardShapeOf<32, 32, 1, 4, 2, 1, 1, 256> {};

// Scratch of the backward pass; rows are in tile order (tile * kRows + row).
struct BackwardScratch {
  float2* row_stats;  // [B, K, rows]: log-sum-exp (+inf where the row sees nothing or is padding), delta
  float* dq;          // [B, K, rows, head dim], fragment order
  int* turn;          // [B, K, row tiles]: under `deterministic`, how many key tiles have added to dq
  float* dbias;       // f32, dbias's shape, where several blocks add to one element; otherwise null
  int64_t rows;       // per (batch entry, key/value head)
  // The blocks of a launch: (batch entry, key/value head)s from first_head on, key tiles from first_part on.
  TileOrder order;
  int first_head, first_part;
};

// How this block's dbias leaves it.
enum class DBias : int {
  kNone,
  kKey,       // bias per key: column sums, kept in registers
  kPerQuery,  // sum over the group, one row per query
  kPerRow,    // one row per (query, head)
  kPerHead,   // bias [.., N, 1, S]: sum over queries, one row per head
};

__device__ __forceinline__ void store_bias_value(void* base, int64_t index, float value, DType dtype) {
  if (dtype == DType::kF32) static_cast<float*>(base)[index] = value;
  else if (dtype == DType::kBF16) static_cast<__nv_bfloat16*>(base)[index] = __float2bfloat16(value);
  else static_cast<__half*>(base)[index] = __float2half(value);
}

// Where dbias goes: rows of kKeys values of this block's key tile.
template <class T, int kRows, int kKeys, int kThreads>
struct DBiasWriter {
  const Problem& p;
  const RowTable<kRows>& table;
  DBias mode;
  char* direct;  // in bias's dtype, at (batch, kv_head), or null
  float* summed;
  int key;
  bool whole_chunks;  // 16-byte stores are aligned

  __device__ void put(int64_t index, float value) const {
    if (summed != nullptr) ptx::reduce_add(summed + index, value);
    else store_bias_value(direct, index, value, p.bias_dtype);
  }

  // Eight neighbouring keys of one row.
  __device__ void put8(int64_t row, int column, const float (&value)[8]) const {
    const int64_t index = row + key + column;
    if (summed == nullptr && whole_chunks && key + column + 8 <= p.S) {
      if (p.bias_dtype == DType::kF32) {
        float4* target = reinterpret_cast<float4*>(reinterpret_cast<float*>(direct) + index);
        target[0] = make_float4(value[0], value[1], value[2], value[3]);
        target[1] = make_float4(value[4], value[5], value[6], value[7]);
      } else {
        const auto packed = [&](auto element) {
          using Element = decltype(element);
          return uint4{ptx::pack<Element>(value[0], value[1]), ptx::pack<Element>(value[2], value[3]),
                       ptx::pack<Element>(value[4], value[5]), ptx::pack<Element>(value[6], value[7])};
        };
        *reinterpret_cast<uint4*>(reinterpret_cast<uint16_t*>(direct) + index) =
            p.bias_dtype == DType::kBF16 ? packed(__nv_bfloat16()) : packed(__half());
      }
      return;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e)
      if (key + column + e < static_cast<int>(p.S)) put(index + e, value[e]);
  }

  // The rows of one tile, from ds in shared memory.
  __device__ void write(uint32_t ds_tile, int t0, int queries) const {
    constexpr int kChunks = kKeys / 8;
    const int rows = mode == DBias::kPerQuery ? queries : mode == DBias::kPerRow ? queries * p.G : p.G;
    const int summands = mode == DBias::kPerQuery ? p.G : mode == DBias::kPerRow ? 1 : queries;
    const int first = mode == DBias::kPerQuery ? p.G : 1, step = mode == DBias::kPerHead ? p.G : 1;
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * kChunks; i += kThreads) {
      const int r = i / kChunks, column = (i % kChunks) * 8;
      const int64_t t = t0 + (mode == DBias::kPerQuery ? r : mode == DBias::kPerRow ? table.query(r) : 0);
      if (t >= p.T) continue;
      const int g = mode == DBias::kPerRow ? table.head(r) : mode == DBias::kPerHead ? r : 0;
      float sum[8] = {};
      for (int j = 0; j < summands; ++j) {
        uint32_t packed[4];
        const uint32_t address = chunk_address<kRows>(ds_tile, r * first + j * step, column / 8);
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(packed[0]), "=r"(packed[1]), "=r"(packed[2]), "=r"(packed[3])
                     : "r"(address));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float2 pair = ptx::unpack_bits<T>(packed[e]);
          sum[2 * e] += pair.x, sum[2 * e + 1] += pair.y;
        }
      }
      const int64_t row = t * p.dbias.row + g * p.dbias.group;
      if (p.dbias.col != 0) put8(row, column, sum);
    }
    if (p.dbias.col == 0) write_row_sums(ds_tile, t0, queries, rows, summands, first, step);
  }

  // A bias that is the same for all keys: one thread sums a row, so that the order is fixed.
  __device__ void write_row_sums(uint32_t ds_tile, int t0, int queries, int rows, int summands, int first,
                                 int step) const {
    for (int r = threadIdx.x; r < rows; r += kThreads) {
      const int64_t t = t0 + (mode == DBias::kPerQuery ? r : mode == DBias::kPerRow ? table.query(r) : 0);
      if (t >= p.T) continue;
      const int g = mode == DBias::kPerRow ? table.head(r) : mode == DBias::kPerHead ? r : 0;
      float sum = 0.0f;
      for (int j = 0; j < summands; ++j)
        for (int c = 0; c < kKeys; c += 2) {
          uint32_t packed;
          asm volatile("ld.shared.u32 %0, [%1];"
                       : "=r"(packed)
                       : "r"(chunk_address<kRows>(ds_tile, r * first + j * step, c / 8) + (c % 8) * 2));
          const float2 pair = ptx::unpack<T>(packed);
          sum += pair.x + pair.y;
        }
      put(t * p.dbias.row + g * p.dbias.group, sum);
    }
  }

  // Zeros for a tile that was skipped.
  __device__ void clear(int t0, int queries) const {
    constexpr int kChunks = kKeys / 8;
    const int rows = mode == DBias::kPerQuery ? queries : queries * p.G;
    const float zeros[8] = {};
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * kChunks; i += kThreads) {
      const int r = i / kChunks;
      const int64_t t = t0 + (mode == DBias::kPerQuery ? r : table.query(r));
      if (t < p.T)
        put8(t * p.dbias.row + (mode == DBias::kPerQuery ? 0 : table.head(r)) * p.dbias.group, (i % kChunks) * 8,
             zeros);
    }
  }
};

// What a dbias that is not general needs (see is_general()): sums over the heads of a group by products, with ones.
template <class T, int kRows, int kKeys, int kThreads>
struct PlainDBias {
  const Problem& p;
  const RowTable<kRows>& table;
  DBias mode;
  T* base;  // at (batch, kv_head)
  int key;

  static constexpr int kSteps = kRows / 16;

  __device__ bool sums() const { return mode == DBias::kPerQuery && p.G > 1; }

  // The sum is [16 queries x rows] of ones and zeros times ds. Of each step of 16 rows, a thread holds eight of the
  // former: bits here, those of one register 16 apart.
  __device__ uint32_t ones(int queries) const {
    uint32_t bits = 0;
    const int lane = threadIdx.x % 32;
    for (int e = 0; e < 8 * kSteps; ++e) {
      const int step = e / 8, j = e / 2 % 4, query = table.query(16 * step + 2 * (lane % 4) + 8 * (j / 2) + e % 2);
      if (query < queries && query % 16 == lane / 4 + 8 * (j % 2)) bits |= 1u << (4 * step + j + 16 * (e % 2));
    }
    return bits;
  }

  // The rows of one tile, from ds in shared memory. A warp has 16 keys.
  __device__ void write_sums(uint32_t ones, uint32_t ds_tile, int t0, int queries) const {
    const int lane = threadIdx.x % 32, column = threadIdx.x / 32 * 16;
    if (column >= kKeys) return;
    constexpr uint32_t kOne = std::is_same_v<T, __half> ? 0x3c00 : 0x3f80;
    const auto source = OperandB<kRows>::template at<true>(ds_tile, column);
    const int s = key + column + lane % 2 * 8 + lane % 4 / 2 * 4;
#pragma unroll 1
    for (int first = 0; first < queries; first += 16) {  // once, or where G is 2 twice: for each half of the rows
      const uint32_t these = queries > 16 ? ones & (first == 0 ? 0x00ff00ff : 0xff00ff00) : ones;
      float sum[2][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t a[4], b[4];
        source.template load<true>(b, 0, 16 * step);
#pragma unroll
        for (int j = 0; j < 4; ++j) a[j] = ((these >> (4 * step + j)) & 0x10001) * kOne;
        ptx::mma<T>(sum[0], a, b[0], b[1]);
        ptx::mma<T>(sum[1], a, b[2], b[3]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Lanes swap pairs, so that each has four neighbouring keys.
        const uint32_t pair0 = ptx::pack_bits<T>(sum[0][2 * half], sum[0][2 * half + 1]),
                       pair1 = ptx::pack_bits<T>(sum[1][2 * half], sum[1][2 * half + 1]);
        const uint32_t other = __shfl_xor_sync(~0u, lane % 2 ? pair0 : pair1, 1);
        const int query = first + lane / 4 + 8 * half;
        if (query < queries && t0 + query < static_cast<int>(p.T) && s < static_cast<int>(p.S))
          ptx::store_global(base + (t0 + query) * p.dbias.row + s, lane % 2 ? other : pair0, lane % 2 ? pair1 : other);
      }
    }
  }

  // The same where nothing is summed.
  __device__ void write_rows(uint32_t ds_tile, int t0, int queries) const {
    constexpr int kChunks = kKeys / 8, kRowsPerPass = kThreads / kChunks;
    const int s = key + threadIdx.x % kChunks * 8;
#pragma unroll
    for (int pass = 0; pass < kRows / kRowsPerPass; ++pass) {
      const int r = pass * kRowsPerPass + threadIdx.x / kChunks, query = table.query(r), t = t0 + query;
      if (query >= queries || t >= static_cast<int>(p.T) || s >= static_cast<int>(p.S)) continue;
      ptx::store_global(base + t * p.dbias.row + table.head(r) * p.dbias.group + s,
                        ptx::load_shared(chunk_address<kRows>(ds_tile, r, threadIdx.x % kChunks)));
    }
  }
};

// Of 16 columns of a tile, from `column` on, the sums over rows: lane l < 16 gets column summed_column(l).
template <class T, int kRows>
__device__ __forceinline__ float sum_of_rows(uint32_t tile, int column) {
  constexpr uint32_t kOnes = std::is_same_v<T, __half> ? 0x3c003c00 : 0x3f803f80;
  const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
  const auto source = OperandB<kRows>::template at<true>(tile, column);
  float sum[2][4] = {};
#pragma unroll
  for (int k = 0; k < kRows; k += 16) {
    uint32_t b[4];
    source.template load<true>(b, 0, k);
    ptx::mma<T>(sum[0], ones, b[0], b[1]);
    ptx::mma<T>(sum[1], ones, b[2], b[3]);
  }
  const int which = threadIdx.x / 4 % 4;
  const float low = which % 2 ? sum[0][1] : sum[0][0], high = which % 2 ? sum[1][1] : sum[1][0];
  return which / 2 ? high : low;
}
__device__ __forceinline__ int summed_column(int lane) { return lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2; }

template <class T, int kM, int kN>
__device__ __forceinline__ void pack_fragments(uint32_t (&packed)[kM][kN][2], const float (&x)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) packed[m][n][i] = ptx::pack_bits<T>(x[m][n][2 * i], x[m][n][2 * i + 1]);
}

// Where a thread's first pair goes in a tile of 16-bit elements; the pair of rows + 8 * i and columns + 8 * n is an
// exclusive or (of chunks: `column` is a multiple of what n stays below) and a constant away.
template <int kRows>
__device__ __forceinline__ uint32_t fragment_address(uint32_t tile, int row, int column) {
  const int lane = threadIdx.x % 32;
  return chunk_address<kRows>(tile, row + lane / 4, column / 8) + (lane % 4) * 4;
}
__device__ __forceinline__ void store_pair(uint32_t first, uint32_t pair, int i, int n) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"((first ^ (n * 16)) + i * (8 * 128)), "r"(pair));
}

// Stores a warp's fragments to a tile of 16-bit elements.
template <int kM, int kN>
__device__ __forceinline__ void store_fragments(uint32_t first, const uint32_t (&packed)[kM][kN][2]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) store_pair(first, packed[m][n][i], 2 * m + i, n);
}

// Whether a call needs a general instance: one that takes any mask, any bias and dbias of its kind, soft caps, scales
// that are not positive, and does not load `ahead`. `summed`: dbias is added up in a buffer of its own.
template <class T>
bool is_general(const Problem& p, bool bias_aligned, bool dbias_aligned, bool summed, bool ahead) {
  if (!ahead || has_rare_logits<T>(p, bias_aligned)) return true;
  if (!p.bias.present() || (p.bias.row == 0 && p.bias.group == 0)) return false;
  return p.dbias.present() && (p.dbias.row == 0 || p.dbias.col == 0 || !dbias_aligned || summed || p.S % 8 != 0);
}

template <class T, int kHeadDim, bool kSmall, bool kGeneral, class MaskKind, class BiasKind>
__global__ void __launch_bounds__(BackwardShape<kHeadDim, kSmall>::kThreads, 1)
    jax_dma_sm80_backward(const __grid_constant__ Problem p, BackwardScratch scratch, DBias dbias_mode,
                          bool bias_aligned, bool dbias_aligned, bool ahead_if_general) {
  using Shape = BackwardShape<kHeadDim, kSmall>;
  constexpr Mask kMask = MaskKind::kind;
  constexpr Bias kBias = BiasKind::kind;
  constexpr int kRows = Shape::kRows, kKeys = Shape::kKeys, kThreads = Shape::kThreads, kStages = Shape::kStages;
  static_assert(kGeneral || kStages == 2);
  const bool ahead = !kGeneral || ahead_if_general, softcap = kGeneral && p.softcap != 0.0f;
  const bool has_bits = kGeneral ? p.bits.present() : kMask == Mask::kBits,
             has_intervals = kGeneral ? p.start.present() : kMask == Mask::kIntervals;
  // Masks as a word of bits a row, and bias added beside dp. Intervals and masks by position alone are -inf in s.
  constexpr bool kWords = !kGeneral && kMask != Mask::kIntervals && (kMask == Mask::kBits || kBias != Bias::kNone);
  // dbias per key is summed by products, of ds in 16 bits; small ds would lose too much of it in float16.
  constexpr bool kKeySums = !kGeneral && kBias == Bias::kKey && std::is_same_v<T, __nv_bfloat16>;
  constexpr int kQueryParts = kTileRows / kRows, kKeyParts = kKeyTile / kKeys;
  constexpr bool kLogits = kMask == Mask::kBits || kBias == Bias::kTile;  // something is loaded for each tile of logits
  constexpr int kSM = kRows / (16 * Shape::kSM), kSN = kKeys / (8 * Shape::kSN);     // blocks of a warp's s and dp
  constexpr int kKM = kKeys / (16 * Shape::kKM), kKN = kHeadDim / (8 * Shape::kKN);  // of its dk and dv
  constexpr int kQM = kRows / (16 * Shape::kQM), kQN = kHeadDim / (8 * Shape::kQN);  // of its dq

  extern __shared__ __align__(128) char shared[];
  const uint32_t k_tile = ptx::shared_address(shared), v_tile = k_tile + Shape::kKVBytes,
                 q_tiles = v_tile + Shape::kKVBytes;
  const uint32_t dout_tiles = q_tiles + kStages * Shape::kQBytes, p_tile = dout_tiles + kStages * Shape::kQBytes,
                 ds_tile = p_tile + Shape::kPBytes;
  float2* const stats = reinterpret_cast<float2*>(shared + Shape::kTileBytes);
  float* const key_bias = reinterpret_cast<float*>(stats + kStages * kRows);
  const uint32_t interval_tile = ptx::shared_address(key_bias) + (kBias == Bias::kKey ? Shape::key_bias_bytes(p) : 0);
  const uint32_t mask_tiles = interval_tile + (kMask == Mask::kNone ? 0 : IntervalTile<kKeys>::bytes(p));
  const auto mask_tile = [&](int stage) { return mask_tiles + (ahead ? stage * Shape::bits_bytes(p) : 0); };
  const int bias_bytes = kBias == Bias::kTile && ahead ? Shape::bias_tile_bytes(p) : 0;
  const auto bias_tile = [&](int stage) {
    if (!ahead) return shared + Shape::kTileBytes - 2 * Shape::kPBytes;  // over p and ds
    return shared + (mask_tiles - k_tile) + (kMask == Mask::kBits ? 2 * Shape::bits_bytes(p) : 0) + stage * bias_bytes;
  };

  const int tile_queries = queries_per_tile(p.G), queries = tile_queries / kQueryParts;
  // The first keys of all heads first, because under a causal mask the most queries see them, and a long block that
  // starts late is waited for.
  const auto place = scratch.order.at(blockIdx.x);
  const int part = scratch.first_part + place.tile, head = scratch.first_head + place.head;
  const int key = part * kKeys, key_tile = part / kKeyParts;
  __shared__ BlockOperands<T> operands;
  __shared__ RowTable<kRows> table;
  if (threadIdx.x == 0) operands.fill(p, head / p.K, head % p.K);
  table.template fill<kThreads>(p.G);
  __syncthreads();
  const bool dbias_tiles = kBias == Bias::kTile && dbias_mode != DBias::kNone;
  const auto dbias_writer = [&] {
    return DBiasWriter<T, kRows, kKeys, kThreads>{
        p,
        table,
        dbias_mode,
        operands.dbias,
        scratch.dbias == nullptr ? nullptr : scratch.dbias + operands.dbias_offset,
        key,
        dbias_aligned};
  };

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int s_row = (warp % Shape::kSM) * 16 * kSM, s_column = (warp / Shape::kSM) * 8 * kSN;
  const int k_row = (warp % Shape::kKM) * 16 * kKM, k_column = (warp / Shape::kKM) * 8 * kKN;
  const int q_row = (warp % Shape::kQM) * 16 * kQM, q_column = (warp / Shape::kQM) * 8 * kQN;
  const ThreadRows<kRows> rows(table, s_row);
  const uint32_t p_first = fragment_address<kRows>(p_tile, s_row, s_column), ds_first = p_first + Shape::kPBytes;

  const auto load_queries = [&](int tile, int stage) {
    const int t0 = tile * queries, rows = min(queries, static_cast<int>(p.T) - t0) * p.G;
    load_query_rows<T, kRows, kHeadDim, kThreads>(q_tiles + stage * Shape::kQBytes, operands.q + t0 * p.q.row, p.q,
                                                  table, rows, p.H);
    load_query_rows<T, kRows, kHeadDim, kThreads>(dout_tiles + stage * Shape::kQBytes, operands.dout + t0 * p.dout.row,
                                                  p.dout, table, rows, p.Hv);
    if (threadIdx.x < kRows / 2)
      ptx::copy_async_16(ptx::shared_address(stats + stage * kRows + 2 * threadIdx.x),
                         scratch.row_stats + head * scratch.rows + int64_t{tile} * kRows + 2 * threadIdx.x, 16);
  };
  // Mask bits (unless the tile is full) and bias of a query tile.
  const auto load_logits = [&](int tile, int stage, bool full) {
    if (kMask == Mask::kBits && has_bits && !full)
      MaskTile<kRows, kKeys>::template load<kThreads>(mask_tile(stage), p, table, operands.bits, tile * queries, key,
                                                      queries);
    if constexpr (kBias == Bias::kTile)
      BiasTile{p, operands.bias, bias_aligned}.template load<kRows, kKeys, kThreads>(bias_tile(stage), table,
                                                                                     tile * queries, key, queries);
  };

  // The same a little at a time beside a product, as long as nothing is general. Where tile < 0, zeros are loaded.
  constexpr int kPasses = ThreadLoad<kRows, kHeadDim, kThreads>::kPasses, kBiasRows = kThreads / (kKeys / 8);
  struct QueryLoads {  // of one thread
    const T *q, *dout;
    uint32_t where[kPasses];
  };
  const auto query_loads = [&](int tile) {
    using Load = ThreadLoad<kRows, kHeadDim, kThreads>;
    const int64_t t0 = tile * queries;
    QueryLoads loads{operands.q + t0 * p.q.row + Load::chunk() * 8,
                     operands.dout + t0 * p.dout.row + Load::chunk() * 8};
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
      loads.where[pass] = ptx::load_shared_word(ptx::shared_address(table.packed + Load::row(pass)));
    asm volatile("" : "+l"(loads.q), "+l"(loads.dout));  // computed here, not before each use
    return loads;
  };
  const auto load_bias_row = [&](int tile, int stage, int r) {
    const bool per_head = p.bias.group != 0;
    if (r >= (per_head ? kRows : queries)) return;
    const int t0 = tile * queries, query = per_head ? table.query(r) : r, head = per_head ? table.head(r) : 0;
    const int c = threadIdx.x % (kKeys / 8) * 8, left = min(static_cast<int>(p.S) - (key + c), 8);
    const bool inside = tile >= 0 && query < queries && t0 + query < static_cast<int>(p.T) && left > 0;
    ptx::copy_async_16(ptx::shared_address(bias_tile(stage)) + bias_offset<kKeys>(r, c, 2),
                       operands.bias + 2 * ((t0 + query) * p.bias.row + head * p.bias.group + key + c),
                       inside ? 2 * left : 0);
  };
  const auto load_beside = [&](const QueryLoads& loads, int tile, int stage, bool full, int step) {
    const int t0 = tile * queries, rows = tile >= 0 ? min(queries, static_cast<int>(p.T) - t0) * p.G : 0;
    if (step < kPasses) {
      load_query_pass<T, kRows, kHeadDim, kThreads>(q_tiles + stage * Shape::kQBytes, loads.q, p.q, loads.where[step],
                                                    rows, p.H, step);
    } else if (step < 2 * kPasses) {
      load_query_pass<T, kRows, kHeadDim, kThreads>(dout_tiles + stage * Shape::kQBytes, loads.dout, p.dout,
                                                    loads.where[step - kPasses], rows, p.Hv, step - kPasses);
    } else if (step == 2 * kPasses) {
      if (threadIdx.x < kRows / 2)
        ptx::copy_async_16(ptx::shared_address(stats + stage * kRows + 2 * threadIdx.x),
                           scratch.row_stats + head * scratch.rows + int64_t{tile} * kRows + 2 * threadIdx.x,
                           tile >= 0 ? 16 : 0);
    } else if (kMask == Mask::kBits && step == 2 * kPasses + 1) {
      const bool per_head = p.bits.group != 0;
      const int r = threadIdx.x;
      if (r < (per_head ? kRows : queries)) {
        const int query = per_head ? table.query(r) : r, head = per_head ? table.head(r) : 0;
        const bool inside = tile >= 0 && !full && query < queries && t0 + query < static_cast<int>(p.T);
        ptx::copy_async<kKeys / 8>(
            mask_tile(stage) + r * (kKeys / 8),
            operands.bits + (t0 + query) * p.bits.row + head * p.bits.group + (key / 32) * p.bits.col, inside);
      }
    } else if (kBias == Bias::kTile && step == 2 * kPasses + 2) {
      load_bias_row(tile, stage, threadIdx.x / (kKeys / 8));
    }
  };
  const auto load_more_bias = [&](int tile, int stage) {
    if constexpr (kBias == Bias::kTile && kBiasRows < kRows) {
      if (p.bias.group == 0 && queries <= kBiasRows) return;
#pragma unroll 1
      for (int r = kBiasRows + threadIdx.x / (kKeys / 8); r < kRows; r += kBiasRows) load_bias_row(tile, stage, r);
    }
  };

  const auto next_tile = [&](LiveTiles<kQueryParts>& live) {
    return live.next(
        static_cast<int>(p.query_tiles),
        [&](int word) {
          const WordRange reached = query_words(p, operands.bounds, key_tile, tile_queries);
          return word > reached.last ? static_cast<int>(p.query_tiles) : max(word, reached.first);
        },
        [&](int word) { return query_tiles_word(p, operands, key_tile, word, tile_queries); },
        [&](int tile) {
          const int t0 = tile * queries, t1 = min(t0 + queries, static_cast<int>(p.T));
          if (t0 >= static_cast<int>(p.T)) return false;
          // Under `deterministic` the turns below count whole tiles, so that every block can tell its own.
          return p.deterministic || !p.causal || key <= t1 - 1 + static_cast<int>(p.causal_offset());
        });
  };

  float dk[kKM][kKN][4], dv[kKM][kKN][4], column_sum[kSN][2];
  [[maybe_unused]] float key_sum = 0.0f;
  clear(dk), clear(dv);
#pragma unroll
  for (int n = 0; n < kSN; ++n) column_sum[n][0] = column_sum[n][1] = 0.0f;
  // From the units of x, below, to log2.
  const float log2_factor =
      kBias == Bias::kNone && !softcap && (!kGeneral || p.scale > 0.0f) ? p.scale * kLog2e : kLog2e;

  const PlainDBias<T, kRows, kKeys, kThreads> plain_dbias{p, table, dbias_mode, reinterpret_cast<T*>(operands.dbias),
                                                          key};
  const uint32_t ones = !kGeneral && dbias_tiles && plain_dbias.sums() ? plain_dbias.ones(queries) : 0;

  // The rows that this thread reads of a tile of bits, a byte each, and of a tile of bias, by ldmatrix: there lane / 8
  // is the row i of its fragments, and where there are but two of those, also the next column block.
  [[maybe_unused]] uint32_t bits_rows = 0, bias_row = 0;
  if constexpr (kWords) {
    const auto row_of = [&](const View& view, int r) {
      const int query = table.query(r);
      return view.group != 0 ? r : query < queries ? query : 0;
    };
    for (int i = 0; i < 2 * kSM; ++i) bits_rows |= row_of(p.bits, rows.row(i)) << (8 * i);
    bias_row = row_of(p.bias, s_row + lane / 8 % (2 * kSM) * 8 + lane % 8);
  }

  LiveTiles<kQueryParts> live;
  int tile = next_tile(live), stage = 0;
  if (tile >= 0) {
    load_rows<T, kKeys, kHeadDim, kThreads>(k_tile, operands.k + key * p.k.row, p.k.row, static_cast<int>(p.S) - key,
                                            p.H);
    load_rows<T, kKeys, kHeadDim, kThreads>(v_tile, operands.v + key * p.v.row, p.v.row, static_cast<int>(p.S) - key,
                                            p.Hv);
    if (kMask != Mask::kNone && has_intervals)
      IntervalTile<kKeys>::template load<kThreads>(interval_tile, p, operands.start, operands.end, key);
    if constexpr (kBias == Bias::kKey) load_key_bias<kKeys, kThreads>(key_bias, p, operands.bias, key);
    load_queries(tile, 0);
    if (kLogits && ahead) load_logits(tile, 0, live.tile_full);
    ptx::copy_async_commit();
  }
  // Unless general, the tile after the next is looked for where products hide it.
  bool full = live.tile_full;
  [[maybe_unused]] int following = !kGeneral && tile >= 0 ? next_tile(live) : -1;
  while (tile >= 0) {
    const int this_tile = tile, t0 = tile * queries;
    const bool tile_full = kGeneral ? live.tile_full : full;
    const uint32_t q_tile = q_tiles + stage * Shape::kQBytes, dout_tile = dout_tiles + stage * Shape::kQBytes;
    float2* const row_stat = stats + stage * kRows;
    [[maybe_unused]] QueryLoads loads;
    if constexpr (!kGeneral) {
      tile = following, full = live.tile_full;
      loads = query_loads(tile);
    }
    ptx::copy_async_wait<0>();
    __syncthreads();  // the tile is there; the previous one's p and ds have been read
    if constexpr (kGeneral) tile = next_tile(live);
    if (kLogits && !ahead) {
      load_logits(this_tile, stage, tile_full);
      ptx::copy_async_commit();
    }
    if (kGeneral && kStages == 2 && tile >= 0) {
      load_queries(tile, stage ^ 1);
      if (kLogits && ahead) load_logits(tile, stage ^ 1, live.tile_full);
      ptx::copy_async_commit();
    }
    if (kBias == Bias::kTile && !ahead && tile >= 0)
      BiasTile{p, operands.bias, bias_aligned}.template prefetch<kRows, kKeys, kThreads>(table, tile * queries, key,
                                                                                         queries);

    float x[kSM][kSN][4];
    [[maybe_unused]] uint32_t words[2 * kSM];  // which of a row's keys are visible, of those of this warp
    if constexpr (!kGeneral) {
      clear(x);
      multiply<T, kSM, kSN, kHeadDim, kRows, kKeys, false, false>(
          x, q_tile, k_tile, s_row, s_column, [&](int step, int steps) {
            load_beside(loads, tile, stage ^ 1, full, step);
            const int i = step - (steps - 4);
            if (kMask == Mask::kBits && i >= 0 && i < 2 * kSM)
              words[i] = ptx::load_shared_word(mask_tile(stage) + ((bits_rows >> (8 * i)) & 0xff) * (kKeys / 8) +
                                               s_column / 32 * 4);
          });
      load_more_bias(tile, stage ^ 1);
      ptx::copy_async_commit();
    }

    // Rows that see nothing or are padding, and rows of very large logits, need care that others are spared.
    bool special = false;
    for (int r = lane; r < kRows; r += 32) special |= fabsf(row_stat[r].x) > kLarge;
    special = __any_sync(~0u, special);  // the same for every warp
    if (special) {
      // Whatever the cotangents of a row that sees nothing hold must not reach the products, in which 0 * NaN is NaN.
      for (int i = threadIdx.x; i < kRows * (kHeadDim / 8); i += kThreads) {
        const int r = i / (kHeadDim / 8), c = i % (kHeadDim / 8);
        const float lse = row_stat[r].x;
        if (lse == INFINITY) {
          ptx::store_shared(chunk_address<kRows>(dout_tile, r, c), make_uint4(0, 0, 0, 0));
        } else if (kBias != Bias::kNone && fabsf(lse) > kLarge) {
          const float factor = operands.weight_factor(p, t0 + table.query(r), table.head(r));
          ptx::scale_shared<T>(chunk_address<kRows>(dout_tile, r, c), factor);
          if (c == 0) row_stat[r].y *= factor;
        }
      }
      __syncthreads();
    }

    if constexpr (kGeneral) {
      clear(x);
      multiply<T, kSM, kSN, kHeadDim, kRows, kKeys, false, false>(x, q_tile, k_tile, s_row, s_column);
    }
    float factor = p.scale;
    if (softcap) soft_cap(x, p.scale, p.softcap), factor = 1.0f;
    if (kLogits && !ahead) {
      if (kStages == 2 && tile >= 0) ptx::copy_async_wait<1>();
      else ptx::copy_async_wait<0>();
      __syncthreads();  // bits and bias are there
    }
    const bool at_edge =
        key + kKeys > static_cast<int>(p.S) || (p.causal && key + kKeys - 1 > t0 + static_cast<int>(p.causal_offset()));
    if constexpr (kWords) {
#pragma unroll
      for (int i = 0; i < 2 * kSM; ++i) {
        if (kMask != Mask::kBits || tile_full) words[i] = ~0u;
        else if (kSN < 4) words[i] >>= s_column % 32;
      }
      if (at_edge) {
        const int first = key + s_column, offset = static_cast<int>(p.causal_offset()) + t0 + 1 - first;
#pragma unroll
        for (int i = 0; i < 2 * kSM; ++i) {
          int visible = min(static_cast<int>(p.S) - first, 32);
          if (p.causal) visible = min(visible, offset + rows.query(i));
          words[i] &= (uint64_t{1} << max(visible, 0)) - 1;
        }
      }
    }
    if (kWords && !special) {
      // beside dp
    } else if constexpr (kBias == Bias::kTile) {
      if constexpr (kGeneral) {
        BiasTile{p, operands.bias, bias_aligned}.template add<T, kKeys>(x, bias_tile(stage), rows, s_column, queries,
                                                                        factor);
      } else {
        BiasTile{p, operands.bias, bias_aligned}.template add_elements<uint32_t, kKeys>(
            x, bias_tile(stage), rows, s_column, queries, factor,
            [](uint32_t pair) { return ptx::unpack_bits<T>(pair); });
      }
      if (!ahead) __syncthreads();  // p and ds go where bias was
    } else if constexpr (kBias == Bias::kKey) {
      add_key_bias(x, key_bias, s_column, factor);
    } else if (kGeneral && factor <= 0.0f) {
      scale_by(x, factor);  // so that -inf stays -inf below
    }
    if (!kWords && kMask != Mask::kNone && !tile_full) {
      if (kMask == Mask::kBits && has_bits)
        MaskTile<kRows, kKeys>::hide(x, mask_tile(stage), p, rows, queries, s_column);
      if (has_intervals) IntervalTile<kKeys>::hide(x, interval_tile, p, rows, t0, s_column);
    }
    if (!kWords && at_edge) hide_by_position(x, p, rows, t0, key + s_column);
    if (special) {
#pragma unroll
      for (int i = 0; i < 2 * kSM; ++i) {
        const float lse = row_stat[rows.row(i)].x;
        const bool blank =
            lse == INFINITY;  // in a padded row x may be NaN: it meets biases that are hidden from all others
        const bool large = kBias != Bias::kNone && fabsf(lse) > kLarge;
        if (kWords && blank) words[i] = 0;
#pragma unroll
        for (int n = 0; n < kSN; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& y = x[i / 2][n][2 * (i % 2) + e];
            y = blank ? -INFINITY : large ? y - lse : y;
          }
      }
    }
    float shift[2 * kSM];
#pragma unroll
    for (int i = 0; i < 2 * kSM; ++i) {
      const float lse = row_stat[rows.row(i)].x;
      shift[i] = kBias != Bias::kNone && fabsf(lse) > kLarge ? 0.0f : lse * kLog2e;
      if constexpr (kWords) words[i] <<= 6 - 2 * (lane % 4);
    }

    uint32_t packed[kSM][kSN][2];  // p as the products see it; half the registers while dp is computed
    float dp[kSM][kSN][4];
    clear(dp);
    if constexpr (kGeneral) {
#pragma unroll
      for (int m = 0; m < kSM; ++m)
#pragma unroll
        for (int n = 0; n < kSN; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) x[m][n][e] = ptx::exp2(x[m][n][e] * log2_factor - shift[2 * m + e / 2]);
      pack_fragments<T>(packed, x);
      store_fragments(p_first, packed);
      multiply<T, kSM, kSN, kHeadDim, kRows, kKeys, false, false>(dp, dout_tile, v_tile, s_row, s_column);
    } else {
      constexpr int kPairs = 2 * kSM * kSN;
      if (special) factor = 1.0f;  // x is logits already
      // Bias is read a step ahead: four pairs of a tile, or a pair of keys.
      [[maybe_unused]] uint32_t tile_pairs[2][4];
      [[maybe_unused]] float2 key_pairs[2];
      const auto read_tile_bias = [&](int j) {
        if (j < kPairs)
          ptx::load_matrix(
              tile_pairs[j / 4 % 2],
              ptx::shared_address(bias_tile(stage)) +
                  bias_offset<kKeys>(bias_row, s_column + (j / (2 * kSM) + (kSM == 1 ? lane / 16 : 0)) * 8, 2));
      };
      const auto read_key_bias = [&](int n) {
        if (n >= kSN) return;
        const float2 pair = *reinterpret_cast<const float2*>(key_bias + s_column + 8 * n + 2 * (lane % 4));
        key_pairs[n % 2] = special ? make_float2(0.0f, 0.0f) : pair;
      };
      if constexpr (kWords && kBias == Bias::kTile) read_tile_bias(0);
      if constexpr (kWords && kBias == Bias::kKey) read_key_bias(0);
      multiply<T, kSM, kSN, kHeadDim, kRows, kKeys, false, false>(
          dp, dout_tile, v_tile, s_row, s_column, [&](int step, int steps) {
            for_each_index<kPairs>([&](auto index) {
              constexpr int j = decltype(index)::value, i = j % (2 * kSM), n = j / (2 * kSM), e = 2 * (i % 2);
              if (j * steps / kPairs != step) return;
              float low = x[i / 2][n][e], high = x[i / 2][n][e + 1];
              if constexpr (kWords && kBias != Bias::kNone) {
                float2 b;
                if constexpr (kBias == Bias::kTile) {
                  if (j % 4 == 0) read_tile_bias(j + 4);
                  b = ptx::unpack_bits<T>(special ? 0 : tile_pairs[j / 4 % 2][j % 4]);
                } else {
                  if (i == 0) read_key_bias(n + 1);
                  b = key_pairs[n % 2];
                }
                low = low * factor + b.x, high = high * factor + b.y;
              }
              uint32_t pair =
                  ptx::pack_bits<T>(ptx::exp2(low * log2_factor - shift[i]), ptx::exp2(high * log2_factor - shift[i]));
              if constexpr (kWords) pair &= MaskTile<kRows, kKeys>::template pair_mask<n>(words[i]);
              packed[i / 2][n][i % 2] = pair;
              store_pair(p_first, pair, i, n);
            });
          });
    }
#pragma unroll
    for (int i = 0; i < 2 * kSM; ++i) {
      const float delta = row_stat[rows.row(i)].y;
#pragma unroll
      for (int n = 0; n < kSN; ++n) {
        const float2 weight = ptx::unpack_bits<T>(packed[i / 2][n][i % 2]);
        float* const ds = &dp[i / 2][n][2 * (i % 2)];
        ds[0] = weight.x * (ds[0] - delta), ds[1] = weight.y * (ds[1] - delta);
        if constexpr (kBias == Bias::kKey && !kKeySums) column_sum[n][0] += ds[0], column_sum[n][1] += ds[1];
      }
    }
    if (softcap) {
      // dbias is the gradient of the capped logits; dq and dk need that of the logits before the cap.
      if (dbias_tiles) {
        pack_fragments<T>(packed, dp);
        store_fragments(ds_first, packed);
        __syncthreads();
        dbias_writer().write(ds_tile, t0, queries);
        __syncthreads();
      }
      float again[kSM][kSN][4];
      clear(again);
      multiply<T, kSM, kSN, kHeadDim, kRows, kKeys, false, false>(again, q_tile, k_tile, s_row, s_column);
#pragma unroll
      for (int m = 0; m < kSM; ++m)
#pragma unroll
        for (int n = 0; n < kSN; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float capped = ptx::tanh(again[m][n][i] * (p.scale / p.softcap));
            dp[m][n][i] *= 1.0f - capped * capped;
          }
    }
    pack_fragments<T>(packed, dp);
    store_fragments(ds_first, packed);
    __syncthreads();  // p and ds are there

    multiply<T, kKM, kKN, kRows, kRows, kRows, true, true>(dv, p_tile, dout_tile, k_row, k_column);
    if constexpr (kKeySums) {
      if (16 * warp < kKeys && dbias_mode != DBias::kNone) key_sum += sum_of_rows<T, kRows>(ds_tile, 16 * warp);
    } else if constexpr (!kGeneral) {
      if (dbias_tiles && plain_dbias.sums()) plain_dbias.write_sums(ones, ds_tile, t0, queries);
      else if (dbias_tiles) plain_dbias.write_rows(ds_tile, t0, queries);
    } else if (dbias_tiles && !softcap) dbias_writer().write(ds_tile, t0, queries);
    {
      float part_dq[kQM][kQN][4];
      clear(part_dq);
      multiply<T, kQM, kQN, kKeys, kRows, kKeys, false, true>(part_dq, ds_tile, k_tile, q_row, q_column);
      if (!kGeneral && tile >= 0) following = next_tile(live);
      if (p.deterministic) {  // key tiles add in their own order
        int* const turn = scratch.turn + head * (scratch.rows / kRows) + this_tile;
        constexpr bool kIntervals = kGeneral || kMask == Mask::kIntervals;
        const int before = key_tiles_before<kIntervals>(p, operands, this_tile / kQueryParts, key_tile, tile_queries);
        const int mine = before * kKeyParts + static_cast<int>(part % kKeyParts);
        if (threadIdx.x == 0)
          while (ptx::load_acquire(turn) != mine) __nanosleep(64);
        __syncthreads();
      }
      // Fragment order: [block of 16 x 8][warp][lane] of 4 values, so that a warp adds 512 neighbouring bytes.
      float* const target = scratch.dq + (head * scratch.rows + int64_t{this_tile} * kRows) * kHeadDim;
      const auto add = [&](int block) {
        float* const at = target + (block * kThreads + threadIdx.x) * 4;
        const float (&y)[4] = part_dq[block / kQN][block % kQN];
#if __CUDA_ARCH__ >= 900
        asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(y[0]), "f"(y[1]),
                     "f"(y[2]), "f"(y[3]));
#else
#pragma unroll
        for (int i = 0; i < 4; ++i) ptx::reduce_add(at + i, y[i]);
#endif
      };
      constexpr int kBlocks = kQM * kQN;
      multiply<T, kKM, kKN, kRows, kRows, kRows, true, true>(dk, ds_tile, q_tile, k_row, k_column,
                                                             [&](int step, int steps) {
#pragma unroll
                                                               for (int block = 0; block < kBlocks; ++block)
                                                                 if (block * steps / kBlocks == step) add(block);
                                                             });
      if (p.deterministic) {
        __threadfence();
        __syncthreads();
        int* const turn = scratch.turn + head * (scratch.rows / kRows) + this_tile;
        if (threadIdx.x == 0) ptx::store_release(turn, ptx::load_acquire(turn) + 1);
      }
    }
    if (kStages == 1 && tile >= 0) {
      __syncthreads();
      load_queries(tile, 0);
      ptx::copy_async_commit();
    }
    if (kStages == 2) stage ^= 1;
  }

  // dk and dv, straight from the fragments.
  T* const dk_out = static_cast<T*>(p.dk.data) + offset_of(p, p.dk, head / p.K, head % p.K, 0);
  T* const dv_out = static_cast<T*>(p.dv.data) + offset_of(p, p.dv, head / p.K, head % p.K, 0);
#pragma unroll
  for (int i = 0; i < 2 * kKM; ++i) {
    const int s = key + k_row + 16 * (i / 2) + 8 * (i % 2) + lane / 4;
    if (s >= p.S) continue;
#pragma unroll
    for (int n = 0; n < kKN; ++n) {
      const int c = k_column + 8 * n + 2 * (lane % 4);
      const int e = 2 * (i % 2);
      if (c < p.H)
        *reinterpret_cast<uint32_t*>(dk_out + s * p.dk.row + c) =
            ptx::pack<T>(dk[i / 2][n][e] * p.scale, dk[i / 2][n][e + 1] * p.scale);
      if (c < p.Hv)
        *reinterpret_cast<uint32_t*>(dv_out + s * p.dv.row + c) = ptx::pack<T>(dv[i / 2][n][e], dv[i / 2][n][e + 1]);
    }
  }

  if (kBias == Bias::kKey && dbias_mode != DBias::kNone) {
    // Sum over the lanes that hold other rows, then over the warps that do, in a fixed order.
    __syncthreads();
    float* const sums = reinterpret_cast<float*>(shared);  // [kParts][kKeys]
    constexpr int kParts = kKeySums ? 1 : Shape::kSM;
    if constexpr (kKeySums) {
      if (16 * warp < kKeys && lane < 16) sums[16 * warp + summed_column(lane)] = key_sum;
    } else {
#pragma unroll
      for (int n = 0; n < kSN; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float sum = column_sum[n][e];
          sum += __shfl_xor_sync(~0u, sum, 4);
          sum += __shfl_xor_sync(~0u, sum, 8);
          sum += __shfl_xor_sync(~0u, sum, 16);
          if (lane < 4) sums[(warp % Shape::kSM) * kKeys + s_column + 8 * n + 2 * lane + e] = sum;
        }
    }
    __syncthreads();
    if (p.dbias.col == 0) {
      if (threadIdx.x == 0) {
        float sum = 0.0f;
        for (int i = 0; i < kParts * kKeys; ++i) sum += sums[i];
        dbias_writer().put(0, sum);
      }
    } else {
      for (int c = threadIdx.x; c < kKeys; c += kThreads) {
        float sum = 0.0f;
        for (int w = 0; w < kParts; ++w) sum += sums[w * kKeys + c];
        if (key + c < p.S) dbias_writer().put(key + c, sum);
      }
    }
  } else if (dbias_tiles && scratch.dbias == nullptr) {
    // Zeros in the tiles that were skipped.
    LiveTiles<kQueryParts> again;
    int next = 0;
    const int end_tile = static_cast<int>(ceil_div(p.T, queries));
    while (next < end_tile) {
      const int visited = next_tile(again);
      for (const int stop = visited < 0 ? end_tile : visited; next < stop; ++next)
        dbias_writer().clear(next * queries, queries);
      ++next;
    }
  }
}

// Per row, in tile order: log-sum-exp and delta = <out, dout> - dlse. One warp a row.
template <class T>
__global__ void jax_dma_sm80_row_stats(const __grid_constant__ Problem p, float2* stats, int64_t rows, int tile_rows,
                                       int queries) {
  const int64_t index = blockIdx.x * int64_t{blockDim.x / 32} + threadIdx.x / 32;
  if (index >= p.B * p.K * rows) return;
  const int64_t head = index / rows, kv_head = head % p.K, batch = head / p.K;
  const int64_t tile = (index % rows) / tile_rows;
  const int row = static_cast<int>((index % rows) % tile_rows), query = row / p.G, g = row % p.G,
            lane = threadIdx.x % 32;
  const int64_t t = tile * queries + query;
  float2 result{INFINITY, 0.0f};
  if (query < queries && t < p.T) {
    const float lse = static_cast<const float*>(p.lse.data)[offset_of(p, p.lse, batch, kv_head, g) + t * p.lse.row];
    if (lse != -INFINITY) {
      const T* out = static_cast<const T*>(p.out.data) + offset_of(p, p.out, batch, kv_head, g) + t * p.out.row;
      const T* dout = static_cast<const T*>(p.dout.data) + offset_of(p, p.dout, batch, kv_head, g) + t * p.dout.row;
      float sum = 0.0f;
      for (int c = 2 * lane; c < p.Hv; c += 64) {
        const float2 a = ptx::unpack<T>(*reinterpret_cast<const uint32_t*>(out + c)),
                     b = ptx::unpack<T>(*reinterpret_cast<const uint32_t*>(dout + c));
        sum += a.x * b.x + a.y * b.y;
      }
      for (int mask = 16; mask > 0; mask >>= 1) sum += __shfl_xor_sync(~0u, sum, mask);
      const float dlse =
          static_cast<const float*>(p.dlse.data)[offset_of(p, p.dlse, batch, kv_head, g) + t * p.dlse.row];
      result = make_float2(lse, sum - dlse);
    }
  }
  if (lane == 0) stats[index] = result;
}

// dq from fragment order to its own, times scale. One thread per four values.
template <class T, int kHeadDim, bool kSmall>
__global__ void jax_dma_sm80_reorder_dq(const __grid_constant__ Problem p, const float4* dq, int64_t rows,
                                        int queries) {
  using Shape = BackwardShape<kHeadDim, kSmall>;
  constexpr int kQM = Shape::kRows / (16 * Shape::kQM), kQN = kHeadDim / (8 * Shape::kQN),
                kQuads = Shape::kRows * kHeadDim / 4;
  const int64_t index = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  const int64_t tiles = rows / Shape::kRows;
  if (index >= p.B * p.K * tiles * kQuads) return;
  const int quad = static_cast<int>(index % kQuads);
  const int64_t tile = index / kQuads % tiles, head = index / kQuads / tiles, kv_head = head % p.K, batch = head / p.K;
  const int thread = quad % Shape::kThreads, block = quad / Shape::kThreads, warp = thread / 32, lane = thread % 32;
  static_assert(kQM * kQN * Shape::kThreads == kQuads);
  const int row = (warp % Shape::kQM) * 16 * kQM + 16 * (block / kQN) + lane / 4;
  const int column = (warp / Shape::kQM) * 8 * kQN + 8 * (block % kQN) + 2 * (lane % 4);
  if (column >= p.H) return;
  const float4 value = dq[index];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int query = (row + 8 * i) / p.G, g = (row + 8 * i) % p.G;
    const int64_t t = tile * queries + query;
    if (query >= queries || t >= p.T) continue;
    T* target = static_cast<T*>(p.dq.data) + offset_of(p, p.dq, batch, kv_head, g) + t * p.dq.row + column;
    *reinterpret_cast<uint32_t*>(target) = i == 0 ? ptx::pack<T>(value.x * p.scale, value.y * p.scale)
                                                  : ptx::pack<T>(value.z * p.scale, value.w * p.scale);
  }
}

}  // namespace jax_dma::sm80
