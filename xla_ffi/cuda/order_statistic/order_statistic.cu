// A wavelet matrix, walked while it is built: level by level, from the most significant bit, the values are partitioned
// stably by that bit, and every query follows the half that holds its answer. Two kernels a level: one moves the
// queries by the level before and counts the zeros of each chunk, the other places the values. Rows of 131,072 stay in
// the L2 cache; a level moves about 40 bytes an element.
#include "order_statistic.h"

#include <utility>

namespace jax_dma::order_statistic {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

__device__ __forceinline__ int sum_over_block(int value, int* shared) {
  for (int mask = 16; mask > 0; mask >>= 1) value += __shfl_xor_sync(~0u, value, mask);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  int sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += shared[w];
  return sum;
}

// Moves the queries of a chunk to the half of the level at `shift` (whose zeros are counted) that holds their answer.
__device__ __forceinline__ void follow(const Problem& p, int64_t row, int chunk, int shift, bool first) {
  const int32_t* const zeros_before = p.zeros_before + row * (p.S + 1);
  const int zeros = zeros_before[p.S];
  for (int i = chunk * kChunk + static_cast<int>(threadIdx.x); i < min((chunk + 1) * kChunk, p.S); i += kThreads) {
    const int64_t at = row * p.S + i;
    const int from = first ? p.low[at] : p.from[at], to = first ? p.high[at] : p.to[at];
    const int k = first ? p.k : p.remaining[at];
    const int before_from = zeros_before[from], before_to = zeros_before[to], inside = before_to - before_from;
    const bool right = k >= inside;
    p.from[at] = right ? zeros + from - before_from : before_from;
    p.to[at] = right ? zeros + to - before_to : before_to;
    p.remaining[at] = right ? k - inside : k;
    p.result[at] = (first ? 0 : p.result[at]) | (right ? 1 << shift : 0);
  }
}

// shift: of the level whose zeros are counted, or -1; previous: of the one that queries follow, or -1.
__global__ void __launch_bounds__(kThreads)
    jax_dma_order_statistic_count(const Problem p, const int32_t* values, int chunks, int shift, int previous,
                                  bool first) {
  __shared__ int shared[kWarps];
  const int64_t row = blockIdx.x / chunks;
  const int chunk = static_cast<int>(blockIdx.x % chunks);
  if (previous >= 0) follow(p, row, chunk, previous, first);
  if (shift < 0) return;
  int zeros = 0;
  for (int i = chunk * kChunk + static_cast<int>(threadIdx.x); i < min((chunk + 1) * kChunk, p.S); i += kThreads)
    zeros += (~values[row * p.S + i] >> shift) & 1;
  zeros = sum_over_block(zeros, shared);
  if (threadIdx.x == 0) p.chunk_zeros[row * chunks + chunk] = zeros;
}

__global__ void __launch_bounds__(kThreads)
    jax_dma_order_statistic_place(const Problem p, const int32_t* values, int32_t* target, int chunks, int shift) {
  __shared__ int shared[kWarps];
  const int64_t row = blockIdx.x / chunks;
  const int chunk = static_cast<int>(blockIdx.x % chunks), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = 0, all = 0;
  for (int c = threadIdx.x; c < chunks; c += kThreads) {
    const int zeros = p.chunk_zeros[row * chunks + c];
    all += zeros, before += c < chunk ? zeros : 0;
  }
  before = sum_over_block(before, shared), all = sum_over_block(all, shared);
  int32_t* const zeros_before = p.zeros_before + row * (p.S + 1);
  for (int i0 = chunk * kChunk; i0 < min((chunk + 1) * kChunk, p.S); i0 += kThreads) {
    const int i = i0 + static_cast<int>(threadIdx.x);
    const int value = i < p.S ? values[row * p.S + i] : -1;
    const bool zero = i < p.S && ((value >> shift) & 1) == 0;
    const uint32_t votes = __ballot_sync(~0u, zero);
    __syncthreads();
    if (lane == 0) shared[warp] = __popc(votes);
    __syncthreads();
    int here = before + __popc(votes & ((1u << lane) - 1));
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) here += shared[w];
      before += shared[w];
    }
    if (i < p.S) {
      zeros_before[i] = here;
      target[row * p.S + (zero ? here : all + i - here)] = value;
    }
  }
  if (chunk == chunks - 1 && threadIdx.x == 0) zeros_before[p.S] = all;
}

}  // namespace

cudaError_t launch(const Problem& p, cudaStream_t stream) {
  if (p.rows == 0 || p.S == 0) return cudaSuccess;
  const int chunks = (p.S + kChunk - 1) / kChunk;
  const unsigned blocks = static_cast<unsigned>(p.rows * chunks);
  int bits = 1;
  while (bits < 31 && p.S - 1 >> bits != 0) ++bits;
  const int32_t* values = p.values;
  int32_t *target = p.ordered, *other = p.reordered;
  for (int shift = bits - 1; shift >= 0; --shift) {
    const int previous = shift == bits - 1 ? -1 : shift + 1;
    jax_dma_order_statistic_count<<<blocks, kThreads, 0, stream>>>(p, values, chunks, shift, previous,
                                                                   previous == bits - 1);
    jax_dma_order_statistic_place<<<blocks, kThreads, 0, stream>>>(p, values, target, chunks, shift);
    values = target;
    std::swap(target, other);
  }
  jax_dma_order_statistic_count<<<blocks, kThreads, 0, stream>>>(p, values, chunks, -1, 0, bits == 1);
  return cudaGetLastError();
}

}  // namespace jax_dma::order_statistic
