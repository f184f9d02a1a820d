// For each of S keys the (k + 1)-th position, in order, of the keys that outrank it; see jax_dma/masks.py.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jax_dma::order_statistic {

constexpr int kChunk = 1024, kParts = 256;

struct Problem {
  // Keys in segments of neighbours, by rank within their segment; where the segment of each key begins, and its place
  // in `order`. [rows, S]
  const int32_t *order, *first, *rank;
  int64_t rows;
  int S, k;
  int32_t* result;  // [rows, S]; if it is smaller than its own place, or if there is none, anything up to the place
  // Scratch: how many keys of each part of the row are in each chunk of `order`, then in all before; keys that may
  // enter.
  int32_t* counts;   // [rows, chunks, kParts]
  int4* candidates;  // [rows, S]
  int32_t* found;    // [rows], how many candidates
};

cudaError_t launch(const Problem& problem, cudaStream_t stream);

}  // namespace jax_dma::order_statistic
