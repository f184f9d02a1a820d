// From accumulators of q k^T to logits: scale, soft cap, bias and masks, in registers. Shared by forward and backward.
//
// Accumulators are mma fragments: element i of block (m, n) is row 16 m + lane / 4 + 8 (i / 2) and column
// 8 n + 2 (lane % 4) + i % 2 of a warp's part of a tile. A tile's rows are queries x heads, head fastest.
#pragma once

#include "../../common/problem.h"
#include "../ptx.cuh"
#include "tile.cuh"

namespace jax_dma::sm80 {

enum class Mask { kNone, kIntervals, kBits };  // kBits: packed bits, and intervals if present

// How bias reaches a tile of logits.
enum class BiasKind : int {
  kNone,
  kKey,   // one value per key (bias [.., K|1, 1, S]): a vector in shared memory
  kTile,  // anything else: a tile in shared memory, in bias's dtype
};

// For each of a thread's rows: its query within the tile, and its head within the group, packed to save registers.
template <int kM>
struct ThreadRows {
  int first;
  uint32_t packed[2 * kM];

  __device__ ThreadRows(int first_row, int group) : first(first_row + (threadIdx.x % 32) / 4) {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) packed[i] = row(i) / group | (row(i) % group) << 16;
  }
  __device__ int row(int i) const { return first + 8 * i; }
  __device__ int query(int i) const { return packed[i] & 0xffff; }
  __device__ int head(int i) const { return packed[i] >> 16; }
};

// Where the operands of a block's (batch entry, key/value head) begin. Kept in shared memory: they are needed once a tile,
// and registers are short.
template <class T>
struct BlockOperands {
  const T *q, *k, *v, *dout;
  const uint32_t *bits, *by_query, *by_key;
  const int32_t *start, *end, *bounds;
  const char* bias;
  char* dbias;
  int64_t dbias_offset;

  __device__ void fill(const Problem& p, int64_t batch, int64_t kv_head) {
    const auto at = [&](const View& view) { return offset_of(p, view, batch, kv_head, 0); };
    q = static_cast<const T*>(p.q.data) + at(p.q), k = static_cast<const T*>(p.k.data) + at(p.k);
    v = static_cast<const T*>(p.v.data) + at(p.v), dout = static_cast<const T*>(p.dout.data) + at(p.dout);
    bits = static_cast<const uint32_t*>(p.bits.data) + at(p.bits);
    by_query = static_cast<const uint32_t*>(p.tiles_by_query.data) + at(p.tiles_by_query);
    by_key = static_cast<const uint32_t*>(p.tiles_by_key.data) + at(p.tiles_by_key);
    start = static_cast<const int32_t*>(p.start.data) + at(p.start), end = static_cast<const int32_t*>(p.end.data) + at(p.end);
    bounds = static_cast<const int32_t*>(p.bounds.data) + at(p.bounds);
    const int bytes = bias_bytes(p);
    bias = static_cast<const char*>(p.bias.data) + at(p.bias) * bytes;
    dbias_offset = at(p.dbias);
    dbias = static_cast<char*>(p.dbias.data) + dbias_offset * bytes;
  }
  __device__ static int bias_bytes(const Problem& p) { return p.bias_dtype == DType::kF32 ? 4 : 2; }
};

// x = -inf where the packed bits are 0. `key` is the warp's first key, `t0` the tile's first query.
template <int kM, int kN>
__device__ __forceinline__ void hide_by_bits(float (&x)[kM][kN][4], const Problem& p, const uint32_t* bits, const ThreadRows<kM>& rows, int t0, int key, int queries) {
  constexpr int kWords = (8 * kN + 31) / 32;
  const int first_bit = key % 32 + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    const int t = t0 + rows.query(i);
    const bool inside = rows.query(i) < queries && t < static_cast<int>(p.T);
    const uint32_t* row = bits + t * p.bits.row + rows.head(i) * p.bits.group + (key / 32) * p.bits.col;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t word = inside ? row[w * p.bits.col] >> first_bit : 0;
#pragma unroll
      for (int n = 4 * w; n < kN && n < 4 * w + 4; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (!((word >> (8 * (n - 4 * w) + e)) & 1)) x[i / 2][n][2 * (i % 2) + e] = -INFINITY;
    }
  }
}

// x = -inf where t is outside [start, end) of the key.
template <int kM, int kN>
__device__ __forceinline__ void hide_by_intervals(float (&x)[kM][kN][4], const Problem& p, const int32_t* start, const int32_t* end, const ThreadRows<kM>& rows, int t0, int key) {
  const bool per_head = p.start.group != 0;
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int s = key + 8 * n + 2 * (static_cast<int>(threadIdx.x) % 4) + e;
      if (s >= static_cast<int>(p.S)) continue;  // hidden by hide_by_position
      int first = start[s], last = end[s];
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i) {
        if (per_head) first = start[s + rows.head(i) * p.start.group], last = end[s + rows.head(i) * p.end.group];
        const int t = t0 + rows.query(i);
        if (t < first || t >= last) x[i / 2][n][2 * (i % 2) + e] = -INFINITY;
      }
    }
}

// x = -inf past S and, under the causal rule, past the query.
template <int kM, int kN>
__device__ __forceinline__ void hide_by_position(float (&x)[kM][kN][4], const Problem& p, const ThreadRows<kM>& rows, int t0, int key) {
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

// x = capped * log2(e) for the accumulators of q k^T.
template <int kM, int kN>
__device__ __forceinline__ void soft_cap(float (&x)[kM][kN][4], float scale, float cap) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) x[m][n][i] = cap * tanhf(x[m][n][i] * (scale / cap)) * kLog2e;
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

// A bias value in log2 units; -inf where it hides.
__device__ __forceinline__ float bias_term(float bias) { return bias <= kHideBelow ? -INFINITY : bias * kLog2e; }

// ---------------------------------------------------------------------------------------------------------------------
// Bias tiles in shared memory: kRows rows of kColumns elements of 2 or 4 bytes, 16-byte chunks swizzled by row.

template <int kColumns>
__device__ __forceinline__ uint32_t bias_offset(int row, int column, int bytes) {
  const int chunks = kColumns * bytes / 16;  // a power of two, at least 4
  const int chunk = column * bytes / 16;
  return row * (kColumns * bytes) + ((chunk ^ (row & (chunks < 8 ? chunks - 1 : 7))) * 16) + (column * bytes) % 16;
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
  __device__ void load(char* tile, int t0, int key, int queries) const {
    const int bytes = this->bytes();
    const bool per_head = this->per_head();
    const int rows = per_head ? kRows : queries;
    const int chunks = kColumns * bytes / 16, per_chunk = 16 / bytes;
    for (int i = threadIdx.x; i < rows * chunks; i += kThreads) {
      const int r = i / chunks, c = (i % chunks) * per_chunk;
      const int t = t0 + (per_head ? r / p.G : r);
      const int g = per_head ? r % p.G : 0;
      const bool inside = t < static_cast<int>(p.T) && (per_head ? r / p.G : r) < queries;
      const int valid = inside ? max(min(static_cast<int>(p.S) - (key + c), per_chunk), 0) : 0;
      const char* source = base + (t * p.bias.row + g * p.bias.group + (key + c) * p.bias.col) * bytes;
      char* target = tile + bias_offset<kColumns>(r, c, bytes);
      if (whole_chunks) {
        ptx::copy_async_16(ptx::shared_address(target), valid > 0 ? source : base, valid * bytes);
      } else {
        for (int e = 0; e < per_chunk; ++e) {
          if (bytes == 4) reinterpret_cast<float*>(target)[e] = e < valid ? reinterpret_cast<const float*>(source)[e * p.bias.col] : 0.0f;
          else reinterpret_cast<uint16_t*>(target)[e] = e < valid ? reinterpret_cast<const uint16_t*>(source)[e * p.bias.col] : uint16_t{0};
        }
      }
    }
  }

  // x = x * factor + bias in log2 units, for a warp whose columns begin at `column`.
  template <class T, int kColumns, int kM, int kN>
  __device__ void add(float (&x)[kM][kN][4], const char* tile, const ThreadRows<kM>& rows, int column, int queries, float factor) const {
    const int bytes = this->bytes();
    const bool per_head = this->per_head();
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const int r = per_head ? rows.row(i) : (rows.query(i) < queries ? rows.query(i) : 0);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const int c = column + 8 * n + 2 * (threadIdx.x % 4);
        const char* source = tile + bias_offset<kColumns>(r, c, bytes);
        const float2 b = bytes == 4 ? *reinterpret_cast<const float2*>(source) : ptx::unpack<T>(*reinterpret_cast<const uint32_t*>(source));
        float* y = &x[i / 2][n][2 * (i % 2)];
        y[0] = y[0] * factor + bias_term(b.x);
        y[1] = y[1] * factor + bias_term(b.y);
      }
    }
  }
};

// Per-key bias: kColumns floats in shared memory, already in log2 units (see bias_term).
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
    target[c] = bias_term(value);
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
