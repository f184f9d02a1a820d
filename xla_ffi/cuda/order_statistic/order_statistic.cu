// A wavelet matrix of two bits a level, walked while it is built: level by level, from the most significant bits, the
// values are partitioned stably by their digit, and every query follows the quarter that holds its answer. Two kernels
// a level: one moves the queries by the level before and counts the digits of each chunk, the other places the values.
// Rows of 131,072 stay in the L2 cache. Most queries are at rest after a level or two: their answer lies before them.
#include "order_statistic.h"

#include <utility>

namespace jax_dma::order_statistic {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kEach = kChunk / kThreads;
constexpr int kAtRest = -1;  // what remains of such a query

// How many values have digit 0, 1 and 2.
struct Counts {
  int of[3];

  __device__ __forceinline__ void add(const Counts& more) {
#pragma unroll
    for (int d = 0; d < 3; ++d) of[d] += more.of[d];
  }
  // How many of the first `count` values, of which these are the counts, have the digit.
  __device__ __forceinline__ int operator()(int digit, int count) const {
    return digit == 0 ? of[0] : digit == 1 ? of[1] : digit == 2 ? of[2] : count - of[0] - of[1] - of[2];
  }
  // How many have a smaller digit.
  __device__ __forceinline__ int below(int digit) const {
    return (digit > 0 ? of[0] : 0) + (digit > 1 ? of[1] : 0) + (digit > 2 ? of[2] : 0);
  }
};
__device__ __forceinline__ Counts counts_at(const int4* at) {
  const int4 counts = *at;
  return {{counts.x, counts.y, counts.z}};
}

__device__ __forceinline__ Counts sum_over_warp(Counts counts) {
#pragma unroll
  for (int d = 0; d < 3; ++d) counts.of[d] = __reduce_add_sync(~0u, counts.of[d]);
  return counts;
}

// Moves the queries of a chunk to the quarter of the level at `shift` (whose digits are counted) that holds their
// answer. Each step is taken for all of a thread's queries together, so that they wait for memory together.
__device__ __forceinline__ void follow(const Problem& p, int64_t row, int chunk, int shift, bool first) {
  const int4* const before = p.before + row * (p.S + 1);
  const Counts all = counts_at(before + p.S);
  const int i0 = chunk * kChunk + static_cast<int>(threadIdx.x);
  const int32_t *const froms = (first ? p.low : p.from) + row * p.S, *const tos = (first ? p.high : p.to) + row * p.S;
  int k[kEach], from[kEach], to[kEach], result[kEach];
  Counts before_from[kEach], before_to[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = i0 + j * kThreads;
    k[j] = i >= p.S ? kAtRest : first ? p.k : p.remaining[row * p.S + i];
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = i0 + j * kThreads;
    from[j] = to[j] = result[j] = 0;
    if (k[j] == kAtRest) continue;
    from[j] = froms[i], to[j] = tos[i];
    if (!first) result[j] = p.result[row * p.S + i];
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (k[j] != kAtRest) before_from[j] = counts_at(before + from[j]), before_to[j] = counts_at(before + to[j]);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if (k[j] == kAtRest) continue;
    const int i = i0 + j * kThreads;
    const int64_t at = row * p.S + i;
    int digit = 0, rest = k[j];
    const bool none = rest >= to[j] - from[j];  // there is no answer
#pragma unroll
    for (int d = 0; d < 3; ++d) {
      const int inside = before_to[j].of[d] - before_from[j].of[d];
      if (digit == d && rest >= inside) rest -= inside, ++digit;
    }
    result[j] |= digit << shift;
    p.result[at] = none ? 0 : result[j];
    p.remaining[at] = none || result[j] >> shift < i >> shift ? kAtRest : rest;
    p.from[at] = all.below(digit) + before_from[j](digit, from[j]);
    p.to[at] = all.below(digit) + before_to[j](digit, to[j]);
  }
}

// shift: of the level whose digits are counted, or -1; previous: of the one that queries follow, or -1.
__global__ void __launch_bounds__(kThreads)
    jax_dma_order_statistic_count(const Problem p, const int32_t* values, int chunks, int shift, int previous,
                                  bool first) {
  __shared__ Counts of_warps[kWarps];
  const int64_t row = blockIdx.x / chunks;
  const int chunk = static_cast<int>(blockIdx.x % chunks);
  if (shift >= 0) {
    Counts counts{};
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int i = chunk * kChunk + j * kThreads + static_cast<int>(threadIdx.x);
      const int digit = i < p.S ? (values[row * p.S + i] >> shift) & 3 : 3;
#pragma unroll
      for (int d = 0; d < 3; ++d) counts.of[d] += digit == d;
    }
    counts = sum_over_warp(counts);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = counts;
    __syncthreads();
    if (threadIdx.x < 3) {
      int sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += of_warps[w].of[threadIdx.x];
      reinterpret_cast<int32_t*>(p.of_chunks + row * chunks + chunk)[threadIdx.x] = sum;
    }
  }
  if (previous >= 0) follow(p, row, chunk, previous, first);
}

// A warp has kEach * 32 neighbouring values.
__global__ void __launch_bounds__(kThreads)
    jax_dma_order_statistic_place(const Problem p, const int32_t* values, int32_t* target, int chunks, int shift) {
  __shared__ Counts of_warps[kWarps], before_of_warps[kWarps], all_of_warps[kWarps];
  const int64_t row = blockIdx.x / chunks;
  const int chunk = static_cast<int>(blockIdx.x % chunks), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int i0 = chunk * kChunk + warp * kEach * 32 + lane;
  int value[kEach];
  uint32_t votes[kEach][3];
  Counts mine{};
#pragma unroll
  for (int j = 0; j < kEach; ++j) value[j] = i0 + 32 * j < p.S ? values[row * p.S + i0 + 32 * j] : 0;
  Counts before{}, all{};  // of the chunks
  for (int c = threadIdx.x; c < chunks; c += kThreads) {
    const Counts counts = counts_at(p.of_chunks + row * chunks + c);
    all.add(counts);
    if (c < chunk) before.add(counts);
  }
  before = sum_over_warp(before), all = sum_over_warp(all);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int digit = i0 + 32 * j < p.S ? (value[j] >> shift) & 3 : 3;
#pragma unroll
    for (int d = 0; d < 3; ++d) votes[j][d] = __ballot_sync(~0u, digit == d), mine.of[d] += __popc(votes[j][d]);
  }
  if (lane == 0) of_warps[warp] = mine, before_of_warps[warp] = before, all_of_warps[warp] = all;
  __syncthreads();
  before = all = Counts{};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    before.add(before_of_warps[w]), all.add(all_of_warps[w]);
    if (w < warp) before.add(of_warps[w]);
  }
  int4* const table = p.before + row * (p.S + 1);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = i0 + 32 * j, digit = (value[j] >> shift) & 3;
    Counts here = before;
#pragma unroll
    for (int d = 0; d < 3; ++d) {
      here.of[d] += __popc(votes[j][d] & ((1u << lane) - 1));
      before.of[d] += __popc(votes[j][d]);
    }
    if (i >= p.S) break;
    table[i] = make_int4(here.of[0], here.of[1], here.of[2], 0);
    target[row * p.S + all.below(digit) + here(digit, i)] = value[j];
  }
  if (chunk == chunks - 1 && threadIdx.x == 0) table[p.S] = make_int4(all.of[0], all.of[1], all.of[2], 0);
}

}  // namespace

cudaError_t launch(const Problem& p, cudaStream_t stream) {
  if (p.rows == 0 || p.S == 0) return cudaSuccess;
  const int chunks = (p.S + kChunk - 1) / kChunk;
  const unsigned blocks = static_cast<unsigned>(p.rows * chunks);
  int top = 0;  // the shift of the first level
  while (top < 30 && (p.S - 1) >> (top + 2) != 0) top += 2;
  const int32_t* values = p.values;
  int32_t *target = p.ordered, *other = p.reordered;
  for (int shift = top; shift >= 0; shift -= 2) {
    const int previous = shift == top ? -1 : shift + 2;
    jax_dma_order_statistic_count<<<blocks, kThreads, 0, stream>>>(p, values, chunks, shift, previous, previous == top);
    jax_dma_order_statistic_place<<<blocks, kThreads, 0, stream>>>(p, values, target, chunks, shift);
    values = target;
    std::swap(target, other);
  }
  jax_dma_order_statistic_count<<<blocks, kThreads, 0, stream>>>(p, values, chunks, -1, 0, top == 0);
  return cudaGetLastError();
}

}  // namespace jax_dma::order_statistic
