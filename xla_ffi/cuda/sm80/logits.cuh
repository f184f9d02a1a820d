// From accumulators of q k^T to logits: scale, soft cap, bias and masks, in registers. Shared by forward and backward.
//
// Accumulators are mma fragments: element i of block (m, n) is row 16 m + lane / 4 + 8 (i / 2) and column
// 8 n + 2 (lane % 4) + i % 2 of a warp's part of a tile. A tile's rows are queries x heads, head fastest.
#pragma once

#include <type_traits>

#include "../../common/problem.h"
#include "../ptx.cuh"
#include "tile.cuh"

namespace jax_dma::sm80 {

enum class Mask { kNone, kIntervals, kBits };  // kBits: whatever is present, packed bits or intervals or both

// How bias reaches a tile of logits.
enum class Bias {
  kNone,
  kKey,   // one value per key (bias [.., K|1, 1, S]): a vector in shared memory
  kTile,  // anything else: a tile in shared memory, in bias's dtype
};

// The kinds as types, so that a profile shows kernels by name: jax_dma_sm80_forward<__nv_bfloat16, 128, dense_mask,
// key_bias>.
struct no_mask {
  static constexpr Mask kind = Mask::kNone;
};
struct interval_mask {
  static constexpr Mask kind = Mask::kIntervals;
};
struct dense_mask {
  static constexpr Mask kind = Mask::kBits;
};
struct no_bias {
  static constexpr Bias kind = Bias::kNone;
};
struct key_bias {
  static constexpr Bias kind = Bias::kKey;
};
struct tile_bias {
  static constexpr Bias kind = Bias::kTile;
};

// Beyond this a logit times log2(e) is rounded too coarsely, or overflows, to be subtracted after the multiplication,
// and a log-sum-exp to be subtracted as one number.
constexpr float kLarge = 1 << 12;

// Of a row whose exp(logit - reference) sum to total: what Problem::lse holds.
__device__ __forceinline__ float2 log_sum_exp(float reference, float total) {
  if (total == 0.0f) return make_float2(-INFINITY, 0.0f);
  // Rounded down, the backward pass begins with weights that are too large, not too small for float16, but never
  // above 1.
  const float log_total = logf(total), lse = __fadd_rd(reference, log_total);
  return make_float2(lse, (reference - lse) + log_total);
}

// A logit this low is hidden: see kHideBelow. What is added to the bias cannot move it across: it is under 1e22.
__device__ __forceinline__ bool is_hidden(float logit) { return logit <= kHideBelow; }

// A float32 bias, -inf where it hides. (Of 16 bits none is so near to kHideBelow that this would matter.)
__device__ __forceinline__ float hide_low(float bias) { return bias <= kHideBelow ? -INFINITY : bias; }

// The reference of a row that has seen nothing yet: all that is visible is above it.
constexpr float kUnseen = kHideBelow;

// Whether the logits of a call take what most do without: a soft cap, a scale that is not positive, intervals beside
// bits, a mask that is the same for all keys, or a tile of biases that are not aligned or not of q's type.
template <class T>
bool has_rare_logits(const Problem& p, bool bias_aligned) {
  if (p.softcap != 0.0f || !(p.scale > 0.0f)) return true;
  if (p.bits.present() && (p.start.present() || p.bits.col == 0)) return true;
  if (!p.bias.present() || (p.bias.row == 0 && p.bias.group == 0)) return false;
  return p.bias_dtype != (std::is_same_v<T, __half> ? DType::kF16 : DType::kBF16) || !bias_aligned;
}

// For each row of a tile its query and head, in shared memory: divisions are slow, and
// registers short.
template <int kRows>
struct RowTable {
  uint32_t packed[kRows];

  template <int kThreads>
  __device__ void fill(int group) {
    for (int r = threadIdx.x; r < kRows; r += kThreads) packed[r] = r / group | (r % group) << 16;
  }
  __device__ int query(int row) const { return packed[row] & 0xffff; }
  __device__ int head(int row) const { return packed[row] >> 16; }
};

// The rows of a thread's fragments.
template <int kRows>
struct ThreadRows {
  const RowTable<kRows>& table;
  int first;

  __device__ ThreadRows(const RowTable<kRows>& table, int first_row)
      : table(table), first(first_row + (threadIdx.x % 32) / 4) {}
  __device__ int row(int i) const { return first + 8 * i; }
  __device__ int query(int i) const { return table.query(row(i)); }
  __device__ int head(int i) const { return table.head(row(i)); }
};

// Where the operands of a block's (batch entry, key/value head) begin. Kept in shared memory: they are needed once a
// tile, and registers are short.
template <class T>
struct BlockOperands {
  const T *q, *k, *v, *dout;
  const uint32_t *bits, *by_query, *by_key;
  const int32_t *start, *end, *bounds;
  const char* bias;
  char* dbias;
  int64_t dbias_offset;
  const float* lse;

  __device__ void fill(const Problem& p, int64_t batch, int64_t kv_head) {
    const auto at = [&](const View& view) { return offset_of(p, view, batch, kv_head, 0); };
    q = static_cast<const T*>(p.q.data) + at(p.q), k = static_cast<const T*>(p.k.data) + at(p.k);
    v = static_cast<const T*>(p.v.data) + at(p.v), dout = static_cast<const T*>(p.dout.data) + at(p.dout);
    bits = static_cast<const uint32_t*>(p.bits.data) + at(p.bits);
    by_query = static_cast<const uint32_t*>(p.tiles_by_query.data) + at(p.tiles_by_query);
    by_key = static_cast<const uint32_t*>(p.tiles_by_key.data) + at(p.tiles_by_key);
    start = static_cast<const int32_t*>(p.start.data) + at(p.start),
    end = static_cast<const int32_t*>(p.end.data) + at(p.end);
    bounds = static_cast<const int32_t*>(p.bounds.data) + at(p.bounds);
    const int bytes = bias_bytes(p);
    bias = static_cast<const char*>(p.bias.data) + at(p.bias) * bytes;
    dbias_offset = at(p.dbias);
    dbias = static_cast<char*>(p.dbias.data) + dbias_offset * bytes;
    lse = static_cast<const float*>(p.lse.data) + at(p.lse);
  }
  // exp(logit - lse) times this is a row's weight. (All of a row's gradients are linear in dout and delta, so that
  // these can take the factor in its place.)
  __device__ float weight_factor(const Problem& p, int t, int head) const {
    return ptx::exp2(-kLog2e * lse[t * p.lse.row + head * p.lse.group + 1]);
  }
  __device__ static int bias_bytes(const Problem& p) { return p.bias_dtype == DType::kF32 ? 4 : 2; }
};

// Packed mask bits of a tile in shared memory: a row of kKeys bits per query, or per (query, head).
template <int kRows, int kKeys>
struct MaskTile {
  static constexpr int kRowBytes = kKeys / 8, kBytes = kRows * kRowBytes, kWords = kKeys / 32;

  template <int kThreads>
  __device__ static void load(uint32_t tile, const Problem& p, const RowTable<kRows>& table, const uint32_t* bits,
                              int t0, int key, int queries) {
    const bool per_head = p.bits.group != 0;
    const int rows = per_head ? kRows : queries;
    for (int r = threadIdx.x; r < rows; r += kThreads) {
      const int query = per_head ? table.query(r) : r, head = per_head ? table.head(r) : 0;
      const bool inside = query < queries && t0 + query < static_cast<int>(p.T);
      const uint32_t* source =
          inside ? bits + (t0 + query) * p.bits.row + head * p.bits.group + (key / 32) * p.bits.col : bits;
      if (p.bits.col != 0) {
        ptx::copy_async<kRowBytes>(tile + r * kRowBytes, source, inside);
      } else {  // one word stands for all keys
        const uint32_t word = inside ? *source : 0;
        for (int w = 0; w < kWords; ++w)
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(tile + r * kRowBytes + 4 * w), "r"(word) : "memory");
      }
    }
  }

  // Ones for the keys of a pair that are visible: bits 6 and 7 of byte kByte of a row's word.
  template <int kByte>
  __device__ static uint32_t pair_mask(uint32_t word) {
    uint32_t mask;  // each half is the sign of a byte, eight times twice
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(mask) : "r"(word << 1), "r"(word), "n"(0xcc88 + 0x1111 * kByte));
    return mask;
  }

  // A pair of 16-bit biases, -inf where hidden.
  template <class T, int kByte>
  __device__ static uint32_t hide_pair(uint32_t pair, uint32_t word) {
    constexpr uint32_t kHidden = std::is_same_v<T, __half> ? 0xfc00fc00 : 0xff80ff80;
    const uint32_t mask = pair_mask<kByte>(word);
    return (pair & mask) | (kHidden & ~mask);
  }

  // x = -inf where the bits are 0, for a warp whose columns begin at `column`.
  template <int kM, int kN>
  __device__ static void hide(float (&x)[kM][kN][4], uint32_t tile, const Problem& p, const ThreadRows<kRows>& rows,
                              int queries, int column) {
    static_assert(kN == 8 || kN <= 4);
    const bool per_head = p.bits.group != 0;
    const int first_bit = column % 32 + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const int query = rows.query(i);
      const uint32_t row = tile + (per_head ? rows.row(i) : query < queries ? query : 0) * kRowBytes + column / 32 * 4;
      uint32_t words[2];
      if constexpr (kN == 8)
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(row));
      else asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[0]) : "r"(row));
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const uint32_t word = words[n / 4] >> first_bit;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& y = x[i / 2][n][2 * (i % 2) + e];
          y = (word & (1u << (8 * (n % 4) + e))) != 0 ? y : -INFINITY;
        }
      }
    }
  }
};

// Key intervals of a tile in shared memory: (start, end) of kKeys keys, or of kKeys keys for each head of the group.
template <int kKeys>
struct IntervalTile {
  __host__ __device__ static int bytes(const Problem& p) {
    return !p.start.present() ? 0 : 8 * kKeys * (p.start.group != 0 ? p.G : 1);
  }

  template <int kThreads>
  __device__ static void load(uint32_t tile, const Problem& p, const int32_t* start, const int32_t* end, int key) {
    const int count = p.start.group != 0 ? p.G * kKeys : kKeys;
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const int c = key + i % kKeys, g = i / kKeys;
      const bool valid = c < static_cast<int>(p.S);
      ptx::copy_async<4>(tile + 8 * i, valid ? start + c + g * p.start.group : start, valid);
      ptx::copy_async<4>(tile + 8 * i + 4, valid ? end + c + g * p.end.group : end, valid);
    }
  }

  // x = -inf where t is outside [start, end), for a warp whose columns begin at `column`.
  template <int kM, int kN, int kRows>
  __device__ static void hide(float (&x)[kM][kN][4], uint32_t tile, const Problem& p, const ThreadRows<kRows>& rows,
                              int t0, int column) {
    tile += 8 * (column + 2 * (threadIdx.x % 4));
    if (p.start.group == 0) {
      int t[2 * kM];
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i) t[i] = t0 + rows.query(i);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const int4 pair = read(tile + 64 * n);
#pragma unroll
        for (int i = 0; i < 2 * kM; ++i) hide_pair(x[i / 2][n] + 2 * (i % 2), pair, t[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i) {
        const int t = t0 + rows.query(i);
        const uint32_t row = tile + 8 * kKeys * min(rows.head(i), p.G - 1);
#pragma unroll
        for (int n = 0; n < kN; ++n) hide_pair(x[i / 2][n] + 2 * (i % 2), read(row + 64 * n), t);
      }
    }
  }

 private:
  __device__ static int4 read(uint32_t address) {
    int4 pair;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pair.x), "=r"(pair.y), "=r"(pair.z), "=r"(pair.w)
                 : "r"(address));
    return pair;
  }
  __device__ static void hide_pair(float* x, int4 pair, int t) {
    x[0] = t >= pair.x && t < pair.y ? x[0] : -INFINITY;
    x[1] = t >= pair.z && t < pair.w ? x[1] : -INFINITY;
  }
};

// x = -inf past S and, under the causal rule, past the query.
template <int kM, int kN, int kRows>
__device__ __forceinline__ void hide_by_position(float (&x)[kM][kN][4], const Problem& p, const ThreadRows<kRows>& rows,
                                                 int t0, int key) {
  const int columns = static_cast<int>(p.S) - key, offset = static_cast<int>(p.causal_offset()) + t0 - key + 1;
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    int visible = columns;
    if (p.causal) visible = min(visible, offset + rows.query(i));
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (8 * n + 2 * (static_cast<int>(threadIdx.x) % 4) + e >= visible) x[i / 2][n][2 * (i % 2) + e] = -INFINITY;
  }
}

// x = the capped logits, for the accumulators of q k^T.
template <int kM, int kN>
__device__ __forceinline__ void soft_cap(float (&x)[kM][kN][4], float scale, float cap) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) x[m][n][i] = cap * ptx::tanh(x[m][n][i] * (scale / cap));
}

template <int kM, int kN>
__device__ __forceinline__ void scale_by(float (&x)[kM][kN][4], float factor) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) x[m][n][i] *= factor;
}

// ---------------------------------------------------------------------------------------------------------------------
// Bias tiles in shared memory: kRows rows of kColumns elements of 2 or 4 bytes, 16-byte chunks swizzled by row so that
// eight rows of a chunk are in different banks.

template <int kColumns>
__device__ __forceinline__ uint32_t bias_offset(int row, int column, int bytes) {
  const int chunks = kColumns * bytes / 16;  // a power of two, at least 4
  const int chunk = column * bytes / 16;
  return row * (kColumns * bytes) + ((chunk ^ (chunks < 8 ? row / 2 % 4 : row % 8)) * 16) + (column * bytes) % 16;
}

// A bias that varies over queries. `base` is where the block's (batch entry, key/value head) begins.
struct BiasTile {
  const Problem& p;
  const char* base;
  bool whole_chunks;  // 16-byte loads are aligned

  __device__ int bytes() const { return p.bias_dtype == DType::kF32 ? 4 : 2; }
  __device__ bool per_head() const { return p.bias.group != 0; }  // a row per (query, head) rather than per query

  // Loads the tile of queries t0 .. and keys key ..; rows and keys outside are zeros. Asynchronous where aligned.
  template <int kRows, int kColumns, int kThreads>
  __device__ void load(char* tile, const RowTable<kRows>& table, int t0, int key, int queries) const {
    if (bytes() == 4) load_elements<float, kRows, kColumns, kThreads>(tile, table, t0, key, queries);
    else load_elements<uint16_t, kRows, kColumns, kThreads>(tile, table, t0, key, queries);
  }
  template <class Element, int kRows, int kColumns, int kThreads>
  __device__ void load_elements(char* tile, const RowTable<kRows>& table, int t0, int key, int queries) const {
    constexpr int kBytes = sizeof(Element), kChunks = kColumns * kBytes / 16, kPerChunk = 16 / kBytes;
    const bool per_head = this->per_head();
    const int rows = per_head ? kRows : queries;
    const int c = threadIdx.x % kChunks * kPerChunk, keys = max(min(static_cast<int>(p.S) - (key + c), kPerChunk), 0);
    const char* const column = base + (t0 * p.bias.row + (key + c) * p.bias.col) * kBytes;
#pragma unroll 1
    for (int r = threadIdx.x / kChunks; r < rows; r += kThreads / kChunks) {
      const int query = per_head ? table.query(r) : r;
      const int valid = query < queries && t0 + query < static_cast<int>(p.T) ? keys : 0;
      const char* source = column + (query * p.bias.row + (per_head ? table.head(r) * p.bias.group : 0)) * kBytes;
      char* target = tile + bias_offset<kColumns>(r, c, kBytes);
      if (whole_chunks) {
        ptx::copy_async_16(ptx::shared_address(target), source, valid * kBytes);
      } else {
#pragma unroll 1
        for (int e = 0; e < kPerChunk; ++e)
          reinterpret_cast<Element*>(target)[e] =
              e < valid ? reinterpret_cast<const Element*>(source)[e * p.bias.col] : Element{};
      }
    }
  }

  // Brings the tile from device memory nearer, ahead of load().
  template <int kRows, int kColumns, int kThreads>
  __device__ void prefetch(const RowTable<kRows>& table, int t0, int key, int queries) const {
    if (p.bias.col == 0) return;
    const bool per_head = this->per_head();
    const int lines = max(kColumns * bytes() / 128, 1), c = key + threadIdx.x % lines * (128 / bytes());
    const int rows = min(queries, static_cast<int>(p.T) - t0) * (per_head ? p.G : 1);
    if (c >= static_cast<int>(p.S)) return;
#pragma unroll 1
    for (int r = threadIdx.x / lines; r < rows; r += kThreads / lines) {
      const int query = per_head ? table.query(r) : r, head = per_head ? table.head(r) : 0;
      ptx::prefetch_l2(base + ((t0 + query) * p.bias.row + head * p.bias.group + c) * bytes());
    }
  }

  // x = x * factor + bias, for a warp whose columns begin at `column`.
  template <class T, int kColumns, int kM, int kN, int kRows>
  __device__ void add(float (&x)[kM][kN][4], const char* tile, const ThreadRows<kRows>& rows, int column, int queries,
                      float factor) const {
    using Other = std::conditional_t<std::is_same_v<T, __half>, __nv_bfloat16, __half>;
    const DType same = std::is_same_v<T, __half> ? DType::kF16 : DType::kBF16;
    if (p.bias_dtype == same)
      add_elements<uint32_t, kColumns>(x, tile, rows, column, queries, factor,
                                       [](uint32_t pair) { return ptx::unpack<T>(pair); });
    else if (p.bias_dtype == DType::kF32)
      add_elements<float2, kColumns>(x, tile, rows, column, queries, factor,
                                     [](float2 pair) { return make_float2(hide_low(pair.x), hide_low(pair.y)); });
    else
      add_elements<uint32_t, kColumns>(x, tile, rows, column, queries, factor,
                                       [](uint32_t pair) { return ptx::unpack<Other>(pair); });
  }
  // A row is read whole before it is used, so that the latencies of shared memory overlap.
  template <class Pair, int kColumns, int kM, int kN, int kRows, class Unpack>
  __device__ void add_elements(float (&x)[kM][kN][4], const char* tile, const ThreadRows<kRows>& rows, int column,
                               int queries, float factor, const Unpack& unpack) const {
    const bool per_head = this->per_head();
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const int r = per_head ? rows.row(i) : (rows.query(i) < queries ? rows.query(i) : 0);
      Pair pairs[kN];
#pragma unroll
      for (int n = 0; n < kN; ++n)
        pairs[n] = *reinterpret_cast<const Pair*>(
            tile + bias_offset<kColumns>(r, column + 8 * n + 2 * (threadIdx.x % 4), sizeof(Pair) / 2));
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float2 b = unpack(pairs[n]);
        float* y = &x[i / 2][n][2 * (i % 2)];
        y[0] = y[0] * factor + b.x;
        y[1] = y[1] * factor + b.y;
      }
    }
  }
};

// x = x * factor + bias, of T in a tile, by ldmatrix: `first` is where the lane reads, for each row i of the fragments
// (and where there are but two of those, for the next column block too), hide(pair, i, n) what becomes of a pair.
template <class T, int kM, int kN, class Hide>
__device__ __forceinline__ void add_bias(float (&x)[kM][kN][4], uint32_t first, float factor, const Hide& hide) {
  constexpr int kTogether = 2 / kM;  // column blocks
  for_each_index<kN / kTogether>([&](auto block_index) {
    constexpr int block = decltype(block_index)::value * kTogether;
    uint32_t pairs[4];
    ptx::load_matrix(pairs, first ^ (block * 16));
    for_each_index<4>([&](auto pair_index) {
      constexpr int j = decltype(pair_index)::value, i = j % (2 * kM), n = block + j / (2 * kM);
      const float2 b = ptx::unpack_bits<T>(hide(pairs[j], i, std::integral_constant<int, n>()));
      float* const y = &x[i / 2][n][2 * (i % 2)];
      y[0] = y[0] * factor + b.x, y[1] = y[1] * factor + b.y;
    });
  });
}

// Per-key bias: kColumns floats in shared memory.
template <int kColumns, int kThreads>
__device__ __forceinline__ void load_key_bias(float* target, const Problem& p, const char* base, int key) {
  for (int c = threadIdx.x; c < kColumns; c += kThreads) {
    float value = 0.0f;
    if (key + c < static_cast<int>(p.S)) {
      const int64_t at = (key + c) * p.bias.col;
      value = p.bias_dtype == DType::kF32    ? reinterpret_cast<const float*>(base)[at]
              : p.bias_dtype == DType::kBF16 ? __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(base)[at])
                                             : __half2float(reinterpret_cast<const __half*>(base)[at]);
    }
    target[c] = value;
  }
}

template <int kM, int kN>
__device__ __forceinline__ void add_key_bias(float (&x)[kM][kN][4], const float* bias, int column, float factor) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float2 b = *reinterpret_cast<const float2*>(bias + column + 8 * n + 2 * (threadIdx.x % 4));
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      x[m][n][0] = x[m][n][0] * factor + b.x, x[m][n][1] = x[m][n][1] * factor + b.y;
      x[m][n][2] = x[m][n][2] * factor + b.x, x[m][n][3] = x[m][n][3] * factor + b.y;
    }
  }
}

}  // namespace jax_dma::sm80
