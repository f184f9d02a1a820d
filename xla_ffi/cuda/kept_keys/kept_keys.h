// Lists of the keys that runs of consecutive queries see, and rows taken by them; see jax_dma/kept_keys.py.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../common/problem.h"

namespace jax_dma::kept_keys {

// Where a batch entry lies in an operand of which each batch axis is 1 or full: strides are 0 where it is 1.
struct BatchOffset {
  int rank = 0;
  int64_t size[kMaxBatchDims + 1] = {}, stride[kMaxBatchDims + 1] = {};

  JAX_DMA_HOST_DEVICE int64_t operator()(int64_t batch) const {
    int64_t offset = 0;
    for (int axis = rank - 1; axis >= 0 && batch != 0; --axis) {
      offset += batch % size[axis] * stride[axis];
      batch /= size[axis];
    }
    return offset;
  }
};

struct ListsProblem {
  const int32_t *start, *end;  // [outer, heads, S]
  int64_t outer, T, S;
  int heads, R, runs, length;
  int32_t *keys, *first, *last;  // [outer, runs, heads, length]
  int32_t* bounds_of_tiles;      // [outer, runs, heads, 4, length / 128]: as in jax_dma/tiles.py
  int32_t* counts;               // [outer, runs, heads, 2]: keys seen by the whole run, keys in all
  // The other way round: the places of a key in the lists of its runs, run by run, begin at its offset; -1 is past the
  // end of a list. Offsets and places end with the room that there is: so many only if a list is too short.
  int32_t* offsets;  // [outer, heads, S]
  int32_t* places;   // [outer, heads, runs * length]
  // Scratch: the keys that any query sees, in order, their intervals, and offset - first run; per 128 of them, smallest
  // start and largest end; how many there are in each chunk of kChunk keys, and in all, and their runs.
  int32_t* entries;    // [outer, heads, 4, S]
  int2* bounds;        // [outer, heads, groups]
  int2* chunk_counts;  // [outer, heads, chunks + 1]
};
constexpr int kChunk = 1024, kGroup = 128;
cudaError_t launch_lists(const ListsProblem& problem, cudaStream_t stream);

struct TakeProblem {
  const int32_t* keys;        // [batch, runs, key_heads, length]
  const void* x;              // [batch, S, x_heads, row bytes]
  void* rows;                 // [batch, runs, length, heads, row bytes]
  BatchOffset keys_at, x_at;  // in elements of keys, and in rows of x
  int64_t outer, S;
  int runs, length, key_heads, x_heads, heads, row_bytes;
  bool fill;  // zeros after the end of a list; otherwise only to the end of a key tile, and what follows is not written
};
cudaError_t launch_take(const TakeProblem& problem, cudaStream_t stream);

struct SumProblem {
  const int32_t *offsets, *places;  // as made by launch_lists
  const int32_t *start, *end;       // [batch, key_heads, S]
  const void* rows;                 // [batch, runs, length, heads, channels]
  void* sums;                       // [batch, S, heads, channels]
  BatchOffset offsets_at, places_at, start_at;
  DType rows_type, sums_type;
  int64_t outer, T, S;
  int R, runs, length, key_heads, heads, channels;
};
cudaError_t launch_sum(const SumProblem& problem, cudaStream_t stream);

}  // namespace jax_dma::kept_keys
