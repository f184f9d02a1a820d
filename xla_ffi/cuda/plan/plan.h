// From a dense bool mask to packed bits and bitmaps of tiles, in one reading of the mask.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jax_dma::plan {

struct PlanProblem {
  const uint8_t* mask;  // [outer, heads, T, S], one byte an element, 0 or 1
  int64_t outer;        // product of the batch axes
  int64_t T, S;
  int heads;       // of the mask: 1, K or N
  int G;           // query heads of a key/value head
  bool causal;     // tiles that this rule hides altogether count as hidden, and their bits are neither read nor written
  uint32_t* bits;  // [outer, heads, T, 4 * key tiles]
  uint32_t* tiles_by_query;  // [outer, K|1, query tiles, 2, words of 32 key tiles]
  uint32_t* tiles_by_key;    // [outer, K|1, key tiles, 2, words of 32 query tiles]
};

cudaError_t launch(const PlanProblem& problem, bool heads_are_grouped, cudaStream_t stream);

}  // namespace jax_dma::plan
