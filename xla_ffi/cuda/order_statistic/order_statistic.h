// The k-th smallest value of ranges of a permutation; see jax_dma/masks.py.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jax_dma::order_statistic {

constexpr int kChunk = 2048;

struct Problem {
  const int32_t* values;      // [rows, S], each row a permutation of 0 .. S - 1
  const int32_t *low, *high;  // [rows, S], the range of each query
  int64_t rows;
  int S, k;
  int32_t* result;  // [rows, S]
  // Scratch: values in the order of a level and of the next; zeros before each place; zeros of each chunk; the queries.
  int32_t *ordered, *reordered;    // [rows, S]
  int32_t* zeros_before;           // [rows, S + 1]
  int32_t* chunk_zeros;            // [rows, chunks]
  int32_t *from, *to, *remaining;  // [rows, S]
};

cudaError_t launch(const Problem& problem, cudaStream_t stream);

}  // namespace jax_dma::order_statistic
