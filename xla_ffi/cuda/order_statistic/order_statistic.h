// The k-th smallest value of ranges of a permutation, a range for each place; see jax_dma/masks.py.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jax_dma::order_statistic {

constexpr int kChunk = 1024;

struct Problem {
  const int32_t* values;      // [rows, S], each row a permutation of 0 .. S - 1
  const int32_t *low, *high;  // [rows, S], the range of each query
  int64_t rows;
  int S, k;
  int32_t* result;  // [rows, S]; for what is smaller than its own place, or if there is none, anything up to the place
  // Scratch: values in the order of a level and of the next; the digits before each place, and of each chunk; the
  // queries.
  int32_t *ordered, *reordered;    // [rows, S]
  int4* before;                    // [rows, S + 1]
  int4* of_chunks;                 // [rows, chunks]
  int32_t *from, *to, *remaining;  // [rows, S]
};

cudaError_t launch(const Problem& problem, cudaStream_t stream);

}  // namespace jax_dma::order_statistic
