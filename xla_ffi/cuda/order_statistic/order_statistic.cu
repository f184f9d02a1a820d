// Positions are cut into 256 parts. A table says how many of the first keys in order of rank lie in each part. From it
// a key finds the part in which its answer lies; for most keys that is before their own, and they are done: they never
// enter. A warp a key searches the parts of the others (of 131,072 random keys and k = 2,047 some 11,000).
#include "order_statistic.h"

namespace jax_dma::order_statistic {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kEach = kChunk / kThreads;
static_assert(kParts == kThreads, "a thread a part");

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ uint32_t lanes_below() { return (1u << lane()) - 1; }

// Inclusive prefix sum over the lanes of a warp.
__device__ __forceinline__ int sum_up_to_lane(int value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = __shfl_up_sync(~0u, value, distance);
    if (lane() >= distance) value += before;
  }
  return value;
}

__global__ void __launch_bounds__(kThreads) jax_dma_order_statistic_count(const Problem p, int chunks, int part_bits) {
  __shared__ int counts[kParts];
  const int64_t row = blockIdx.x / chunks;
  const int chunk = static_cast<int>(blockIdx.x % chunks), t = static_cast<int>(threadIdx.x);
  counts[t] = 0;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int r = chunk * kChunk + j * kThreads + t;
    if (r >= p.S) continue;
    atomicAdd(&counts[p.order[row * p.S + r] >> part_bits], 1);
    p.result[row * p.S + r] = 0;
  }
  __syncthreads();
  p.counts[(row * chunks + chunk) * kParts + t] = counts[t];
  if (chunk == 0 && t == 0) p.found[row] = 0;
}

// What was counted in a chunk becomes what was counted before it. A block has 32 parts, a warp some of the chunks.
__global__ void __launch_bounds__(kThreads) jax_dma_order_statistic_sum(const Problem p, int chunks) {
  __shared__ int of_warps[kWarps][32];
  constexpr int kBlocks = kParts / 32;
  const int64_t row = blockIdx.x / kBlocks;
  const int warp = static_cast<int>(threadIdx.x) / 32, each = (chunks + kWarps - 1) / kWarps;
  const int c0 = warp * each, c1 = min(c0 + each, chunks);
  int32_t* const counts = p.counts + row * chunks * kParts + blockIdx.x % kBlocks * 32 + lane();
  int sum = 0;
#pragma unroll 8
  for (int c = c0; c < c1; ++c) sum += counts[int64_t{c} * kParts];
  of_warps[warp][lane()] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < warp; ++w) sum += of_warps[w][lane()];
#pragma unroll 8
  for (int c = c0; c < c1; ++c) {
    const int count = counts[int64_t{c} * kParts];
    counts[int64_t{c} * kParts] = sum;
    sum += count;
  }
}

// Finds the part of each key of a chunk. A warp has kEach groups of 32 keys that follow one another in order.
__global__ void __launch_bounds__(kThreads) jax_dma_order_statistic_find(const Problem p, int chunks, int part_bits) {
  constexpr int kGroups = kChunk / 32;
  __shared__ int of_warps[kWarps];
  __shared__ int before[kGroups][kParts];  // how many keys before a group lie in a part; then also in those before it
  const int64_t row = blockIdx.x / chunks;
  const int chunk = static_cast<int>(blockIdx.x % chunks), t = static_cast<int>(threadIdx.x), warp = t / 32;
  const int r0 = chunk * kChunk + warp * 32 * kEach + lane();
  int key[kEach], first[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) key[j] = r0 + 32 * j < p.S ? p.order[row * p.S + r0 + 32 * j] : -1;
  int sum = p.counts[(row * chunks + chunk) * kParts + t];
#pragma unroll
  for (int j = 0; j < kEach; ++j) first[j] = key[j] >= 0 ? p.first[row * p.S + key[j]] : 0;
  for (int g = 0; g < kGroups; ++g) before[g][t] = 0;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (key[j] >= 0) atomicAdd(&before[warp * kEach + j][key[j] >> part_bits], 1);
  __syncthreads();
#pragma unroll 8
  for (int g = 0; g < kGroups; ++g) {
    const int count = before[g][t];
    before[g][t] = sum;
    sum += count;
  }
  __syncthreads();
  for (int g = warp * kEach; g < (warp + 1) * kEach; ++g) {
    int lower = 0;
#pragma unroll
    for (int i = 0; i < kParts / 32; ++i) {
      int& here = before[g][32 * i + lane()];
      here = lower + sum_up_to_lane(here);
      lower = __shfl_sync(~0u, here, 31);
    }
  }
  __syncwarp();

  uint32_t candidates[kEach];  // of each group
  int parts[kEach], rest[kEach], found = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int* const counts = before[warp * kEach + j];
    // How many keys of the segment before this group lie in the first `n` parts: all keys of earlier segments come
    // before it, and they lie before the segment.
    const auto count = [&](int n) {
      const unsigned of_parts = static_cast<unsigned>(n) << part_bits;
      return n == 0 ? 0 : counts[n - 1] - static_cast<int>(min(static_cast<unsigned>(first[j]), of_parts));
    };
    const int part = key[j] >= 0 ? key[j] >> part_bits : kParts;
    bool candidate = key[j] >= 0 && r0 + 32 * j - first[j] > p.k && count(part) <= p.k;
    candidates[j] = 0, parts[j] = rest[j] = 0;
    if (__ballot_sync(~0u, candidate) == 0) continue;
    if (candidate) {  // the most that have up to k keys of those before the group
#pragma unroll
      for (int step = kParts / 2; step > 0; step /= 2)
        if (count(parts[j] + step) <= p.k) parts[j] += step;
      if (count(parts[j] + 1) <= p.k) ++parts[j];
    }
    // Together with those of the group it may be fewer.
    for (bool done = !candidate; __ballot_sync(~0u, !done) != 0;) {
      int earlier = 0;
#pragma unroll
      for (int l = 0; l < 32; ++l) earlier += __shfl_sync(~0u, part, l) < parts[j] && l < lane();
      if (done) continue;
      rest[j] = p.k - count(parts[j]) - earlier;
      if (rest[j] >= 0) done = true;
      else if (--parts[j] < part) candidate = false, done = true;
    }
    candidates[j] = __ballot_sync(~0u, candidate);
    found += __popc(candidates[j]);
  }
  if (lane() == 0) of_warps[warp] = found;
  __syncthreads();
  if (t == 0) {
    int sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += of_warps[w];
    int at = sum > 0 ? atomicAdd(p.found + row, sum) : 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int of_warp = of_warps[w];
      of_warps[w] = at, at += of_warp;
    }
  }
  __syncthreads();
  int at = of_warps[warp];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if ((candidates[j] >> lane() & 1) != 0)
      p.candidates[row * p.S + at + __popc(candidates[j] & lanes_below())] =
          make_int4(key[j], rest[j], parts[j] << part_bits, first[j]);
    at += __popc(candidates[j]);
  }
}

// Finds, in the part of a candidate, the position of the key before which `rest` come that outrank it. A warp does it.
__global__ void __launch_bounds__(kThreads) jax_dma_order_statistic_search(const Problem p, int chunks, int part_bits) {
  constexpr int kAhead = 4;
  const int64_t row = blockIdx.x / chunks;
  const int32_t* const ranks = p.rank + row * p.S;
  const int found = p.found[row];
  for (int n = static_cast<int>(blockIdx.x % chunks) * kWarps + static_cast<int>(threadIdx.x) / 32; n < found;
       n += chunks * kWarps) {
    const int4 candidate = p.candidates[row * p.S + n];
    const int rank = ranks[candidate.x];
    const int end = static_cast<int>(min(static_cast<int64_t>(candidate.z) + (1 << part_bits), int64_t{p.S}));
    int rest = candidate.y;
    for (int first = max(candidate.z, candidate.w); first < end; first += 32 * kAhead) {
      bool outranks[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int place = first + 32 * j + lane();
        outranks[j] = (place < end ? ranks[place] : p.S) < rank;
      }
      int count = 0;
#pragma unroll
      for (int j = 0; j < kAhead; ++j) count += outranks[j];
      count = __reduce_add_sync(~0u, count);
      if (rest >= count) {
        rest -= count;
        continue;
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const uint32_t votes = __ballot_sync(~0u, outranks[j]);
        if (outranks[j] && __popc(votes & lanes_below()) == rest)
          p.result[row * p.S + candidate.x] = first + 32 * j + lane();
        rest -= __popc(votes);
      }
      break;
    }
  }
}

}  // namespace

cudaError_t launch(const Problem& p, cudaStream_t stream) {
  if (p.rows == 0 || p.S == 0) return cudaSuccess;
  const int chunks = (p.S + kChunk - 1) / kChunk;
  const unsigned blocks = static_cast<unsigned>(p.rows * chunks), sums = static_cast<unsigned>(p.rows * (kParts / 32));
  int part_bits = 0;
  while ((p.S - 1) >> part_bits >= kParts) ++part_bits;
  jax_dma_order_statistic_count<<<blocks, kThreads, 0, stream>>>(p, chunks, part_bits);
  jax_dma_order_statistic_sum<<<sums, kThreads, 0, stream>>>(p, chunks);
  jax_dma_order_statistic_find<<<blocks, kThreads, 0, stream>>>(p, chunks, part_bits);
  jax_dma_order_statistic_search<<<blocks, kThreads, 0, stream>>>(p, chunks, part_bits);
  return cudaGetLastError();
}

}  // namespace jax_dma::order_statistic
