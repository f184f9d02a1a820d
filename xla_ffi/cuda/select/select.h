// The `window` highest of the scores in each row, as a bool mask or as packed bits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../common/problem.h"

namespace jax_dma::select {

constexpr int kMaxMaskAxes = 8;  // after merging, of all axes but the last

struct SelectProblem {
  const void* scores;  // [rows, S]
  DType dtype;
  int64_t rows, T, S;  // row r is query r % T
  int64_t window;      // at least 1
  bool causal;         // query t sees the first t + (S - T) + 1 keys only

  // Optional: one byte an element, 0 hides. Row r lies where its digits in the mixed radix of `mask_size`, lowest
  // first, times `mask_stride` say. mask_col is 1, or 0 where one byte stands for all keys of a row.
  const uint8_t* mask;
  int mask_rank;
  int mask_size[kMaxMaskAxes];
  int64_t mask_stride[kMaxMaskAxes];
  int mask_col;

  // One of the two.
  uint8_t* chosen;  // [rows, S], one byte an element, 0 or 1
  uint32_t* bits;   // [rows, 4 * ceil(S / 128)]; bit i of word w is key 32 * w + i
};

cudaError_t launch(const SelectProblem& problem, cudaStream_t stream);

}  // namespace jax_dma::select
