// The arithmetic of the host kernels: everything whose speed depends on the instruction set, behind one table.
//
// Every buffer is f32 and row-major. Leading dimensions are multiples of kPad floats and rows are padded with zeros, so
// no kernel has a tail narrower than kPad.
#pragma once

#include <cstdint>

#include "../common/problem.h"

namespace jax_dma::cpu {

constexpr int kPad = 16;  // floats in the widest vector
// Leading dimension of buffers that are kKeyTile wide. 128 floats would put every row of a column on one of 8 sets of
// a 64-set L1; 144 floats are 9 cache lines, which walks all of them.
constexpr int kTileStride = kKeyTile + kPad;

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// How the products q.k of one row become logits. Arrays are indexed by the column of the key tile; absent ones are
// null.
struct LogitsRow {
  const float* bias;      // kKeyTile long
  const uint32_t* words;  // 4 words, a 1 bit is visible
  const int32_t* start;   // visible where start <= query < end
  const int32_t* end;
  int32_t query;
  int32_t visible_columns;  // columns from here on are hidden (causal, or past S); kKeyTile: none
};

struct LogitsOptions {
  float scale, softcap;  // softcap 0: none
};

// Columns [first, last) of a tile, multiples of kPad. Nothing outside is read or written.
struct Columns {
  int first, last;
  int size() const { return last - first; }
};

struct Kernels {
  // c[m, n] (+)= a[m, depth] b[depth, n]; a has any strides, b and c are row-major, n is a multiple of kPad.
  void (*matmul)(int64_t m, int64_t n, int64_t depth, const float* a, int64_t a_row, int64_t a_col, const float* b,
                 int64_t ldb, float* c, int64_t ldc, bool accumulate);

  // n elements to f32, and zeros up to `padded` (a multiple of kPad, at least n).
  void (*widen)(DType from, const void* source, int64_t n, float* target, int64_t padded);
  // n elements of f32 to another type, rounded to nearest even.
  void (*narrow)(DType to, const float* source, int64_t n, void* target);
  // target[columns, rows] = source[rows, columns]; rows and columns are multiples of 4.
  void (*transpose)(const float* source, int64_t ld_source, int64_t rows, int64_t columns, float* target,
                    int64_t ld_target);

  // One step of the online softmax. x [rows, kTileStride] holds q.k and receives exp(logits - row_max); row_max,
  // row_sum and out [rows, out_width] are brought to the new maximum.
  void (*softmax)(const LogitsRow* rows, int64_t count, const LogitsOptions& options, Columns columns, float* x,
                  float* row_max, float* row_sum, float* out, int64_t out_width);

  // lse + lse_tail: see common/problem.h. x holds q.k and receives the probabilities; dp holds dout.v and receives the
  // gradient of q.k; ds, where not null, receives the gradient of the logits after softcap, which is the gradient of
  // the bias. All [rows, kTileStride].
  void (*gradient)(const LogitsRow* rows, int64_t count, const LogitsOptions& options, Columns columns,
                   const float* lse, const float* lse_tail, const float* delta, float* x, float* dp, float* ds);

  void (*add)(const float* source, int64_t n, float* target);
  void (*scale)(float factor, int64_t n, float* target);
  float (*dot)(const float* a, const float* b, int64_t n);  // n a multiple of kPad
  float (*sum)(const float* a, int64_t n);                  // n a multiple of kPad
};

// The table for the best instruction set of this machine.
const Kernels& kernels();

}  // namespace jax_dma::cpu
