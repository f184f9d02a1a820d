// Lists of kept keys. The keys that no query ever sees are dropped first: of 131,072 random keys 10,653 ever enter a
// top-2048. Then one block makes the list of one run of one head, skipping groups of 128 keys by their bounds.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "kept_keys.h"

namespace jax_dma::kept_keys {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ uint32_t lanes_below() { return (1u << lane()) - 1; }

// Exclusive prefix sum over the warps of a block of a value that each warp holds; `total` is the sum.
__device__ __forceinline__ int prefix_over_warps(int value, int* shared, int* total) {
  __syncthreads();
  if (lane() == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  int before = 0, sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < static_cast<int>(threadIdx.x) / 32) before += shared[w];
    sum += shared[w];
  }
  *total = sum;
  return before;
}

__device__ __forceinline__ bool ever_seen(const ListsProblem& p, const int32_t* start, const int32_t* end, int64_t s) {
  return s < p.S && max(start[s], 0) < min(end[s], static_cast<int>(p.T));
}

__global__ void __launch_bounds__(kThreads) jax_dma_count_kept_keys(const ListsProblem p, int chunks) {
  __shared__ int shared[kWarps];
  const int64_t row = blockIdx.x / chunks;
  const int chunk = static_cast<int>(blockIdx.x % chunks);
  const int32_t *start = p.start + row * p.S, *end = p.end + row * p.S;
  int count = 0;
  for (int i = threadIdx.x; i < kChunk; i += kThreads) count += ever_seen(p, start, end, int64_t{chunk} * kChunk + i);
  for (int mask = 16; mask > 0; mask >>= 1) count += __shfl_xor_sync(~0u, count, mask);
  int total;
  prefix_over_warps(count, shared, &total);
  if (threadIdx.x == 0) p.chunk_counts[row * (chunks + 1) + chunk] = total;
}

__global__ void __launch_bounds__(kThreads) jax_dma_compact_kept_keys(const ListsProblem p, int chunks) {
  __shared__ int shared[kWarps];
  const int64_t row = blockIdx.x / chunks;
  const int chunk = static_cast<int>(blockIdx.x % chunks);
  const int32_t *start = p.start + row * p.S, *end = p.end + row * p.S;
  const int32_t* const counts = p.chunk_counts + row * (chunks + 1);
  int before = 0;
  for (int i = threadIdx.x; i < chunk; i += kThreads) before += counts[i];
  for (int mask = 16; mask > 0; mask >>= 1) before += __shfl_xor_sync(~0u, before, mask);
  int base;
  prefix_over_warps(before, shared, &base);
  for (int i = threadIdx.x; i < kChunk; i += kThreads) {
    const int64_t s = int64_t{chunk} * kChunk + i;
    const bool seen = ever_seen(p, start, end, s);
    const uint32_t votes = __ballot_sync(~0u, seen);
    int total;
    const int place = base + prefix_over_warps(__popc(votes), shared, &total) + __popc(votes & lanes_below());
    if (seen) p.entries[row * p.S + place] = static_cast<int32_t>(s);
    base += total;
  }
  if (chunk == chunks - 1 && threadIdx.x == 0) p.chunk_counts[row * (chunks + 1) + chunks] = base;
}

// One warp a group.
__global__ void __launch_bounds__(kThreads) jax_dma_bound_kept_keys(const ListsProblem p, int chunks, int groups) {
  const int64_t index = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (index >= p.outer * p.heads * groups) return;
  const int64_t row = index / groups;
  const int first = static_cast<int>(index % groups) * kGroup, count = p.chunk_counts[row * (chunks + 1) + chunks];
  int smallest = INT32_MAX, largest = INT32_MIN;
  for (int i = first + lane(); i < min(first + kGroup, count); i += 32) {
    const int64_t s = row * p.S + p.entries[row * p.S + i];
    smallest = min(smallest, p.start[s]), largest = max(largest, p.end[s]);
  }
  smallest = __reduce_min_sync(~0u, smallest), largest = __reduce_max_sync(~0u, largest);
  if (lane() == 0) p.bounds[index] = make_int2(smallest, largest);
}

__global__ void __launch_bounds__(kThreads) jax_dma_list_kept_keys(const ListsProblem p, int chunks, int groups) {
  __shared__ int shared[kWarps], live[kThreads];
  const int run = blockIdx.x % p.runs;
  const int64_t row = blockIdx.x / p.runs, outer = row / p.heads, head = row % p.heads;
  const int t0 = run * p.R, t1 = min(t0 + p.R, static_cast<int>(p.T));
  const int32_t *start = p.start + row * p.S, *end = p.end + row * p.S, *entries = p.entries + row * p.S;
  const int count = p.chunk_counts[row * (chunks + 1) + chunks], used = (count + kGroup - 1) / kGroup;
  const int64_t list = (outer * p.runs + run) * p.heads + head;
  int32_t *const keys = p.keys + list * p.length, *const first = p.first + list * p.length,
                 *const last = p.last + list * p.length;

  // Twice over the same keys: those that the whole run sees are listed first, and then the others.
  int listed = 0, whole_count = 0;
  for (int pass = 0; pass < 2; ++pass) {
    for (int g0 = 0; g0 < used; g0 += kThreads) {
      // Which of the next groups have a key that the run sees.
      const int g = g0 + threadIdx.x;
      bool alive = false;
      if (g < used) {
        const int2 bound = p.bounds[row * groups + g];
        alive = bound.x < t1 && bound.y > t0;
      }
      const uint32_t votes = __ballot_sync(~0u, alive);
      int lives;
      const int place = prefix_over_warps(__popc(votes), shared, &lives) + __popc(votes & lanes_below());
      if (alive) live[place] = g;
      __syncthreads();
      for (int i = 0; i < lives; i += kWarps) {  // a group a warp
        const int turn = i + static_cast<int>(threadIdx.x) / 32;
        int key[kGroup / 32], from[kGroup / 32], to[kGroup / 32], found = 0;
        uint32_t mine[kGroup / 32];
#pragma unroll
        for (int j = 0; j < kGroup / 32; ++j) {
          const int at = turn < lives ? live[turn] * kGroup + 32 * j + lane() : count;
          bool take = false;
          if (at < count) {
            key[j] = entries[at], from[j] = start[key[j]], to[j] = end[key[j]];
            const bool seen = from[j] < t1 && to[j] > t0, whole = from[j] <= t0 && to[j] >= t1;
            take = seen && whole == (pass == 0);
          }
          mine[j] = __ballot_sync(~0u, take);
          found += __popc(mine[j]);
        }
        int total;
        int base = listed + prefix_over_warps(found, shared, &total);
        listed += total;
#pragma unroll
        for (int j = 0; j < kGroup / 32; ++j) {
          const int at = base + __popc(mine[j] & lanes_below());
          if ((mine[j] >> lane() & 1) != 0 && at < p.length) {
            keys[at] = key[j];
            first[at] = min(max(from[j] - t0, 0), p.R), last[at] = min(max(to[j] - t0, 0), p.R);
          }
          base += __popc(mine[j]);
        }
      }
    }
    if (pass == 0) whole_count = listed;
  }
  for (int i = listed + static_cast<int>(threadIdx.x); i < p.length; i += kThreads)
    keys[i] = static_cast<int32_t>(p.S), first[i] = 0, last[i] = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    p.counts[2 * list] = whole_count, p.counts[2 * list + 1] = listed;
    if (listed > p.length) keys[0] = -1, first[0] = 0, last[0] = p.R;
  }
}

// A block copies pieces of the rows of one list, kPieces a thread.
constexpr int kPieces = 4;
template <class Piece>
__global__ void __launch_bounds__(kThreads) jax_dma_take_kept_keys(const TakeProblem p, int blocks_per_list) {
  const int per_row = p.row_bytes / static_cast<int>(sizeof(Piece)), pieces = p.length * p.heads * per_row;
  const int64_t list = blockIdx.x / blocks_per_list, batch = list / p.runs;  // list: batch * runs + run
  const int first =
      static_cast<int>(blockIdx.x % blocks_per_list) * (kThreads * kPieces) + static_cast<int>(threadIdx.x);
  const int32_t* const keys = p.keys + p.keys_at(batch) + list % p.runs * p.key_heads * p.length;
  const Piece* const x = static_cast<const Piece*>(p.x) + p.x_at(batch) * per_row;
  Piece* const rows = static_cast<Piece*>(p.rows) + list * pieces;
  const int heads_per_list = p.heads / p.key_heads;
  Piece value[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int at = first + i * kThreads;
    if (at >= pieces) break;
    const int row = at / per_row, piece = at - row * per_row, slot = row / p.heads, head = row - slot * p.heads;
    const int32_t key = keys[head / heads_per_list * p.length + slot];
    if (key < 0) {
      memset(&value[i], 0xff, sizeof(Piece));  // NaN in every type
    } else if (key >= p.S) {
      memset(&value[i], 0, sizeof(Piece));
    } else {
      value[i] = x[(int64_t{key} * p.x_heads + (p.x_heads == 1 ? 0 : head)) * per_row + piece];
    }
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i)
    if (first + i * kThreads < pieces) rows[first + i * kThreads] = value[i];
}

// One or two neighbouring elements, as floats.
template <class T>
__device__ __forceinline__ float2 read(const T* at, std::integral_constant<int, 1>) {
  return {static_cast<float>(*at), 0.0f};
}
__device__ __forceinline__ float2 read(const float* at, std::integral_constant<int, 2>) {
  return *reinterpret_cast<const float2*>(at);
}
__device__ __forceinline__ float2 read(const __nv_bfloat16* at, std::integral_constant<int, 2>) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(at));
}
__device__ __forceinline__ float2 read(const __half* at, std::integral_constant<int, 2>) {
  return __half22float2(*reinterpret_cast<const __half2*>(at));
}

// The place of `key` in the ascending list, or -1.
__device__ __forceinline__ int find(const int32_t* list, int count, int key) {
  int first = 0;  // if it is there, it is in [first, first + count)
  while (count > 1) {
    const int half = count / 2;
    if (list[first + half] <= key) first += half;
    count -= half;
  }
  return count == 1 && list[first] == key ? first : -1;
}

// Neighbouring elements that are written together.
template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Neighbours {
  T element[kCount];
};

// What lists say of a key.
struct Listed {
  const int32_t *keys, *counts;  // of the batch entry and the head
  int start, end, key;

  // The key's place in the run's list, or -1.
  __device__ int place(const SumProblem& p, int run) const {
    const int t0 = run * p.R, t1 = min(t0 + p.R, static_cast<int>(p.T));
    const int64_t at = int64_t{run} * p.key_heads;
    const int whole = min(counts[2 * at], p.length), all = min(counts[2 * at + 1], p.length);
    const bool among_whole = start <= t0 && end >= t1;
    const int skipped = among_whole ? 0 : whole;
    const int found = find(keys + at * p.length + skipped, among_whole ? whole : all - whole, key);
    return found < 0 ? -1 : found + skipped;
  }
};

// A block has 256 (batch entry, key, head)s. Of most keys there is nothing to sum. A warp sums the rows of one of the
// others: each lane looks for it in the list of another run, and then its rows are added run by run, so that the order
// is fixed. A lane has up to kMost pieces of a row, of kWidth neighbouring channels.
template <class Row, class Sum, int kWidth, int kMost>
__global__ void __launch_bounds__(kThreads) jax_dma_sum_kept_keys(const SumProblem p) {
  constexpr int kAhead = 4;  // rows that are read together
  const auto channel = [](int i) { return (32 * i + lane()) * kWidth; };
  __shared__ int shared[kWarps], seen[kThreads];
  Sum* const sums = static_cast<Sum*>(p.sums);
  const int64_t count = p.outer * p.S * p.heads, block = blockIdx.x * int64_t{kThreads};
  const auto locate = [&](int64_t index, int* head, int* key_head, int* key) {
    *head = static_cast<int>(index % p.heads), *key = static_cast<int>(index / p.heads % p.S);
    *key_head = p.key_heads == 1 ? 0 : *head / (p.heads / p.key_heads);
    return index / p.heads / p.S;  // the batch entry
  };

  const auto write = [&](int64_t index, const float2(&sum)[kMost]) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      Neighbours<Sum, kWidth> value;
      value.element[0] = static_cast<Sum>(sum[i].x);
      if constexpr (kWidth == 2) value.element[1] = static_cast<Sum>(sum[i].y);
      if (channel(i) < p.channels)
        *reinterpret_cast<Neighbours<Sum, kWidth>*>(sums + index * p.channels + channel(i)) = value;
    }
  };

  bool any = false;
  if (block + threadIdx.x < count) {
    int head, key_head, key;
    const int64_t batch = locate(block + threadIdx.x, &head, &key_head, &key);
    const int64_t interval = p.start_at(batch) + int64_t{key_head} * p.S + key;
    any = max(p.start[interval], 0) < min(p.end[interval], static_cast<int>(p.T));
  }
  const uint32_t votes = __ballot_sync(~0u, any);
  const float2 nothing[kMost] = {};
  int total;
  const int before = prefix_over_warps(__popc(votes), shared, &total) + __popc(votes & lanes_below());
  if (any) seen[before] = threadIdx.x;
  for (int i = 0; i < 32; ++i) {
    const int64_t index = block + (threadIdx.x & ~31u) + i;
    if ((votes >> i & 1) != 0 || index >= count) continue;
    write(index, nothing);
  }
  __syncthreads();

  for (int turn = threadIdx.x / 32; turn < total; turn += kWarps) {
    const int64_t index = block + seen[turn];
    int head, key_head;
    Listed listed;
    const int64_t batch = locate(index, &head, &key_head, &listed.key);
    const int64_t interval = p.start_at(batch) + int64_t{key_head} * p.S + listed.key;
    listed.start = max(p.start[interval], 0), listed.end = min(p.end[interval], static_cast<int>(p.T));
    listed.keys = p.keys + p.keys_at(batch) + int64_t{key_head} * p.length;
    listed.counts = p.counts + p.counts_at(batch) + 2 * key_head;
    const int last_run = (listed.end - 1) / p.R;
    float2 sum[kMost] = {};
    for (int run0 = listed.start / p.R; run0 <= last_run; run0 += 32) {
      const int run = run0 + lane(), place = run <= last_run ? listed.place(p, run) : -1;
      uint32_t rest = __ballot_sync(~0u, place >= 0);
      while (rest != 0) {
        float2 value[kAhead][kMost] = {};
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          if (rest == 0) break;
          const int from = __ffs(rest) - 1;
          rest &= rest - 1;
          const int64_t slot = (batch * p.runs + run0 + from) * p.length + __shfl_sync(~0u, place, from);
          const Row* const row = static_cast<const Row*>(p.rows) + (slot * p.heads + head) * p.channels;
#pragma unroll
          for (int i = 0; i < kMost; ++i)
            if (channel(i) < p.channels) value[j][i] = read(row + channel(i), std::integral_constant<int, kWidth>());
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j)
#pragma unroll
          for (int i = 0; i < kMost; ++i) sum[i].x += value[j][i].x, sum[i].y += value[j][i].y;
      }
    }
    write(index, sum);
  }
}

}  // namespace

cudaError_t launch_lists(const ListsProblem& p, cudaStream_t stream) {
  const int64_t rows = p.outer * p.heads;
  const int chunks = static_cast<int>(ceil_div(p.S, kChunk)), groups = static_cast<int>(ceil_div(p.S, kGroup));
  if (rows == 0 || p.runs == 0) return cudaSuccess;
  jax_dma_count_kept_keys<<<rows * chunks, kThreads, 0, stream>>>(p, chunks);
  jax_dma_compact_kept_keys<<<rows * chunks, kThreads, 0, stream>>>(p, chunks);
  jax_dma_bound_kept_keys<<<ceil_div(rows * groups, kWarps), kThreads, 0, stream>>>(p, chunks, groups);
  jax_dma_list_kept_keys<<<rows * p.runs, kThreads, 0, stream>>>(p, chunks, groups);
  return cudaGetLastError();
}

cudaError_t launch_take(const TakeProblem& p, cudaStream_t stream) {
  const int64_t lists = p.outer * p.runs, bytes = int64_t{p.length} * p.heads * p.row_bytes;  // of a list
  if (lists * bytes == 0) return cudaSuccess;
  const auto aligned = [&](int n) {
    return p.row_bytes % n == 0 && (reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.rows)) % n == 0;
  };
  const auto launch = [&](auto piece) {
    const int64_t blocks = ceil_div(bytes, kThreads * kPieces * sizeof(piece));
    jax_dma_take_kept_keys<decltype(piece)><<<lists * blocks, kThreads, 0, stream>>>(p, static_cast<int>(blocks));
    return cudaGetLastError();
  };
  return aligned(16) ? launch(uint4{}) : aligned(4) ? launch(uint32_t{}) : launch(uint16_t{});
}

cudaError_t launch_sum(const SumProblem& p, cudaStream_t stream) {
  const int64_t sums = p.outer * p.S * p.heads;
  if (sums == 0) return cudaSuccess;
  const auto launch = [&](auto row, auto sum) {
    using Row = decltype(row);
    using Sum = decltype(sum);
    const auto kernel = p.channels % 2 == 1    ? jax_dma_sum_kept_keys<Row, Sum, 1, 8>
                        : p.channels <= 2 * 64 ? jax_dma_sum_kept_keys<Row, Sum, 2, 2>
                                               : jax_dma_sum_kept_keys<Row, Sum, 2, 4>;
    kernel<<<ceil_div(sums, kThreads), kThreads, 0, stream>>>(p);
    return cudaGetLastError();
  };
  const auto with_sum = [&](auto row) { return p.sums_type == DType::kF32 ? launch(row, float{}) : launch(row, row); };
  if (p.rows_type == DType::kF32) return with_sum(float{});
  return p.rows_type == DType::kBF16 ? with_sum(__nv_bfloat16{}) : with_sum(__half{});
}

}  // namespace jax_dma::kept_keys
