// The order of the keys of each row, and the rank of each; equal keys stay in order.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace jax_dma::rank {

struct Problem {
  const void* keys;  // [rows, S], unsigned, of key_bits = 16 or 32
  int rows, S, key_bits;
  int32_t *order, *rank;  // [rows, S]: the place of the r-th key; the rank of the key at a place
  // Scratch.
  uint64_t* packed[2];  // [rows, S]
  void* temporary;
  size_t temporary_bytes;
};

// Whether row, key and place fit into 64 bits, and all keys can be counted.
bool serves(int64_t rows, int64_t S, int key_bits);

// cudaErrorInvalidValue if there is not enough temporary memory.
cudaError_t launch(const Problem& problem, cudaStream_t stream);

}  // namespace jax_dma::rank
