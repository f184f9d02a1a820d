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

// Inclusive prefix sum over the lanes of a warp.
__device__ __forceinline__ int sum_up_to_lane(int value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = __shfl_up_sync(~0u, value, distance);
    if (lane() >= distance) value += before;
  }
  return value;
}

// The runs whose queries see a key: `count` from `first` on.
struct Runs {
  int first, count;

  __device__ Runs(int start, int end, int T, int R) {
    start = max(start, 0), end = min(end, T);
    first = start / R, count = start < end ? (end - 1) / R - first + 1 : 0;
  }
};
__device__ __forceinline__ Runs runs_of(const ListsProblem& p, const int32_t* start, const int32_t* end, int64_t s) {
  return s < p.S ? Runs(start[s], end[s], static_cast<int>(p.T), p.R) : Runs(0, 0, 0, 1);
}

__global__ void __launch_bounds__(kThreads) jax_dma_count_kept_keys(const ListsProblem p, int chunks) {
  __shared__ int shared[2][kWarps];
  const int64_t row = blockIdx.x / chunks;
  const int chunk = static_cast<int>(blockIdx.x % chunks);
  const int32_t *start = p.start + row * p.S, *end = p.end + row * p.S;
  int count = 0, runs = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < kChunk; i += kThreads) {
    const Runs of_key = runs_of(p, start, end, int64_t{chunk} * kChunk + i);
    count += of_key.count > 0, runs += of_key.count;
  }
  count = __reduce_add_sync(~0u, count), runs = __reduce_add_sync(~0u, runs);
  int2 total;
  prefix_over_warps(count, shared[0], &total.x), prefix_over_warps(runs, shared[1], &total.y);
  if (threadIdx.x == 0) p.chunk_counts[row * (chunks + 1) + chunk] = total;
}

__global__ void __launch_bounds__(kThreads) jax_dma_compact_kept_keys(const ListsProblem p, int chunks) {
  __shared__ int shared[2][kWarps];
  const int64_t row = blockIdx.x / chunks;
  const int chunk = static_cast<int>(blockIdx.x % chunks), room = p.runs * p.length;
  const int32_t *start = p.start + row * p.S, *end = p.end + row * p.S;
  const int2* const counts = p.chunk_counts + row * (chunks + 1);
  int before = 0;
  int64_t runs_before = 0;
  for (int i = threadIdx.x; i < chunk; i += kThreads) before += counts[i].x, runs_before += counts[i].y;
  before = __reduce_add_sync(~0u, before);
  for (int mask = 16; mask > 0; mask >>= 1) runs_before += __shfl_xor_sync(~0u, runs_before, mask);
  int base, runs_base;
  prefix_over_warps(before, shared[0], &base);
  prefix_over_warps(static_cast<int>(min(runs_before, int64_t{room})), shared[1], &runs_base);
  for (int i = threadIdx.x; i < kChunk; i += kThreads) {
    const int64_t s = int64_t{chunk} * kChunk + i;
    const Runs runs = runs_of(p, start, end, s);
    const uint32_t votes = __ballot_sync(~0u, runs.count > 0);
    const int up_to = sum_up_to_lane(runs.count);
    int total, runs_total;
    const int place = base + prefix_over_warps(__popc(votes), shared[0], &total) + __popc(votes & lanes_below());
    const int runs_of_warps = prefix_over_warps(__shfl_sync(~0u, up_to, 31), shared[1], &runs_total);
    const int offset = min(runs_base + runs_of_warps + up_to - runs.count, room);
    if (s < p.S) p.offsets[row * p.S + s] = offset;
    if (runs.count > 0) {
      int32_t* const entry = p.entries + row * 4 * p.S + place;
      entry[0] = static_cast<int32_t>(s), entry[p.S] = start[s], entry[2 * p.S] = end[s];
      entry[3 * p.S] = offset - runs.first;
    }
    base += total, runs_base = min(runs_base + runs_total, room);
  }
  if (chunk == chunks - 1 && threadIdx.x == 0) p.chunk_counts[row * (chunks + 1) + chunks].x = base;
}

// One warp a group.
__global__ void __launch_bounds__(kThreads) jax_dma_bound_kept_keys(const ListsProblem p, int chunks, int groups) {
  const int64_t index = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (index >= p.outer * p.heads * groups) return;
  const int64_t row = index / groups;
  const int first = static_cast<int>(index % groups) * kGroup, count = p.chunk_counts[row * (chunks + 1) + chunks].x;
  int smallest = INT32_MAX, largest = INT32_MIN;
  const int32_t *const start = p.entries + (row * 4 + 1) * p.S, *const end = start + p.S;
  for (int i = first + lane(); i < min(first + kGroup, count); i += 32)
    smallest = min(smallest, start[i]), largest = max(largest, end[i]);
  smallest = __reduce_min_sync(~0u, smallest), largest = __reduce_max_sync(~0u, largest);
  if (lane() == 0) p.bounds[index] = make_int2(smallest, largest);
}

__global__ void __launch_bounds__(kThreads) jax_dma_list_kept_keys(const ListsProblem p, int chunks, int groups) {
  __shared__ int shared[kWarps], live[kThreads];
  const int run = blockIdx.x % p.runs;
  const int64_t row = blockIdx.x / p.runs, outer = row / p.heads, head = row % p.heads;
  const int t0 = run * p.R, t1 = min(t0 + p.R, static_cast<int>(p.T));
  const int32_t *const entries = p.entries + row * 4 * p.S, *const start = entries + p.S, *const end = start + p.S,
                       *const offset = end + p.S;
  const int count = p.chunk_counts[row * (chunks + 1) + chunks].x, used = (count + kGroup - 1) / kGroup;
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
        int key[kGroup / 32], from[kGroup / 32], to[kGroup / 32], of_key[kGroup / 32], found = 0;
        uint32_t mine[kGroup / 32];
#pragma unroll
        for (int j = 0; j < kGroup / 32; ++j) {
          const int at = turn < lives ? live[turn] * kGroup + 32 * j + lane() : count;
          bool take = false;
          if (at < count) {
            key[j] = entries[at], from[j] = start[at], to[j] = end[at], of_key[j] = offset[at] + run;
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
          if ((mine[j] >> lane() & 1) != 0) {
            const bool fits = at < p.length;
            if (of_key[j] < p.runs * p.length) p.places[row * p.runs * p.length + of_key[j]] = fits ? at : -1;
            if (fits) {
              keys[at] = key[j];
              first[at] = min(max(from[j] - t0, 0), p.R), last[at] = min(max(to[j] - t0, 0), p.R);
            }
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

// How a block copies rows of a list. The heads of a slot lie side by side, `width` pieces in all: a thread has one of
// the columns, and kSlots slots that are `together` apart.
struct TakeBlocks {
  int per_row, width, columns, together, of_columns, of_list;
};
constexpr int kSlots = 8;

template <class Piece>
__global__ void __launch_bounds__(kThreads) jax_dma_take_kept_keys(const TakeProblem p, const TakeBlocks blocks) {
  const int list = blockIdx.x / static_cast<unsigned>(blocks.of_list), rest = blockIdx.x - list * blocks.of_list;
  const int batch = list / p.runs, run = list - batch * p.runs;
  const int above = static_cast<int>(threadIdx.x) / blocks.columns, part = rest / blocks.of_columns;
  const int column =
      (rest - part * blocks.of_columns) * blocks.columns + static_cast<int>(threadIdx.x) - above * blocks.columns;
  if (above >= blocks.together || column >= blocks.width) return;
  const int first = part * (kSlots * blocks.together) + above, head = column / blocks.per_row;
  const int32_t* const keys =
      p.keys + p.keys_at(batch) + (int64_t{run} * p.key_heads + head / (p.heads / p.key_heads)) * p.length;
  const int stride = p.x_heads * blocks.per_row, from = p.x_heads == 1 ? column - head * blocks.per_row : column;
  const Piece* const x = static_cast<const Piece*>(p.x) + p.x_at(batch) * blocks.per_row + from;
  Piece* const rows = static_cast<Piece*>(p.rows) + (int64_t{list} * p.length + first) * blocks.width + column;
  int32_t key[kSlots];
  Piece value[kSlots];
#pragma unroll
  for (int i = 0; i < kSlots; ++i)
    key[i] = first + i * blocks.together < p.length ? keys[first + i * blocks.together] : static_cast<int32_t>(p.S);
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    if (key[i] >= 0 && key[i] < p.S) value[i] = x[int64_t{key[i]} * stride];
    else memset(&value[i], key[i] < 0 ? 0xff : 0, sizeof(Piece));  // all ones are NaN in every type
  }
#pragma unroll
  for (int i = 0; i < kSlots; ++i)
    if (first + i * blocks.together < p.length) rows[int64_t{i} * blocks.together * blocks.width] = value[i];
}

// Neighbouring elements that are read or written together.
template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Neighbours {
  T element[kCount];
};

// What is summed for a (batch entry, key, head): rows of `runs` runs. Where they lie in the lists of these runs is said
// from places[at] on.
struct Summed {
  int first_list = 0, runs = 0, head = 0;
  int64_t at = 0;
  float without = 0.0f;  // the sum if there are no runs

  __device__ Summed(const SumProblem& p, unsigned index, unsigned count) {
    if (index >= count) return;
    const unsigned row = index / static_cast<unsigned>(p.heads), batch = row / static_cast<unsigned>(p.S);
    const int64_t key = row - batch * static_cast<unsigned>(p.S);
    head = static_cast<int>(index - row * p.heads);
    const int64_t key_head = p.key_heads == 1 ? 0 : head / (p.heads / p.key_heads);
    const int64_t interval = p.start_at(batch) + key_head * p.S + key;
    const int offset = p.offsets[p.offsets_at(batch) + key_head * p.S + key], room = p.runs * p.length;
    const Runs of_key(p.start[interval], p.end[interval], static_cast<int>(p.T), p.R);
    first_list = static_cast<int>(batch) * p.runs + of_key.first, runs = of_key.count;
    at = p.places_at(batch) + key_head * room + offset;
    if (offset + runs > room) runs = 0, without = NAN;  // some of the places are not known
  }
  // The row of a pair, which belongs to the key of lane `owner`; -1 if it is not listed. `past`: the pairs of this
  // lane's key and those before it.
  __device__ int64_t row(const SumProblem& p, int pair, int pairs, int past, int owner) const {
    const auto of_owner = [&](auto x) { return __shfl_sync(~0u, x, owner); };
    const int of_key = pair + of_owner(runs - past), list = of_owner(first_list) + of_key, of_head = of_owner(head);
    const int64_t from = of_owner(at) + of_key;
    const int place = pair < pairs ? p.places[from] : -1;
    return place < 0 ? -1 : (int64_t{list} * p.length + place) * p.heads + of_head;
  }
};

// Sums of single values. A lane has a key; the (key, run) pairs of all 32 are taken 32 at a time, a lane each.
template <class Row, class Sum>
__global__ void __launch_bounds__(kThreads) jax_dma_sum_kept_values(const SumProblem p, unsigned count) {
  const unsigned index = blockIdx.x * kThreads + threadIdx.x;
  const Summed mine(p, index, count);
  const int past = sum_up_to_lane(mine.runs), pairs = __shfl_sync(~0u, past, 31);
  float sum = mine.without;
#pragma unroll 1
  for (int pair0 = 0; pair0 < pairs; pair0 += 32) {
    int owner = 0;  // the first key whose pairs end after this one
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
      if (__shfl_sync(~0u, past, owner + step - 1) <= pair0 + lane()) owner += step;
    const int64_t row = mine.row(p, pair0 + lane(), pairs, past, owner);
    float value = row < 0 ? 0.0f : static_cast<float>(static_cast<const Row*>(p.rows)[row]);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float before = __shfl_up_sync(~0u, value, distance);
      const int of = __shfl_up_sync(~0u, owner, distance);
      if (lane() >= distance && of == owner) value += before;
    }
    const int end = min(past - pair0, 32);  // of this lane's key
    value = __shfl_sync(~0u, value, max(end - 1, 0));
    if (end > 0 && past - mine.runs - pair0 < 32 && mine.runs > 0) sum += value;
  }
  if (index < count) static_cast<Sum*>(p.sums)[index] = static_cast<Sum>(sum);
}

// Sums of rows. A warp has kMine keys. Their (key, run) pairs are taken 32 at a time: each lane looks one up, and then
// their rows are read, kAhead together, and added one after another. A lane has up to kMost pieces of a row, of kWidth
// neighbouring channels.
constexpr int kMine = 8;
template <class Row, class Sum, int kWidth, int kMost>
__global__ void __launch_bounds__(kThreads) jax_dma_sum_kept_rows(const SumProblem p, unsigned count) {
  constexpr int kAhead = 32 / (kWidth * kMost);
  const auto channel = [](int i) { return (32 * i + lane()) * kWidth; };
  const unsigned first = (blockIdx.x * kWarps + threadIdx.x / 32) * kMine;
  float sum[kMost][kWidth];
  const auto fill = [&](float value) {
#pragma unroll
    for (int i = 0; i < kMost; ++i)
#pragma unroll
      for (int c = 0; c < kWidth; ++c) sum[i][c] = value;
  };
  const auto write = [&](int which) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      Neighbours<Sum, kWidth> value;
#pragma unroll
      for (int c = 0; c < kWidth; ++c) value.element[c] = static_cast<Sum>(sum[i][c]);
      Sum* const at = static_cast<Sum*>(p.sums) + int64_t{first + which} * p.channels + channel(i);
      if (channel(i) < p.channels) *reinterpret_cast<Neighbours<Sum, kWidth>*>(at) = value;
    }
  };

  const Summed mine(p, lane() < kMine ? first + lane() : count, count);
  const uint32_t any = __ballot_sync(~0u, mine.runs > 0);
#pragma unroll 1
  for (int i = 0; i < kMine; ++i) {
    fill(__shfl_sync(~0u, mine.without, i));
    if ((any >> i & 1) == 0 && first + i < count) write(i);
  }

  const int past = sum_up_to_lane(mine.runs), pairs = __shfl_sync(~0u, past, 31);
  int summed = -1;  // whose rows `sum` holds
#pragma unroll 1
  for (int pair0 = 0; pair0 < pairs; pair0 += 32) {
    int owner = 0;
#pragma unroll
    for (int i = 0; i < kMine - 1; ++i) owner += pair0 + lane() >= __shfl_sync(~0u, past, i);
    const int64_t row = mine.row(p, pair0 + lane(), pairs, past, owner);
#pragma unroll 1
    for (int j0 = 0; j0 < min(32, pairs - pair0); j0 += kAhead) {
      Neighbours<Row, kWidth> value[kAhead][kMost];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int64_t from = __shfl_sync(~0u, row, j0 + j);
        const Row* const source = static_cast<const Row*>(p.rows) + from * p.channels;
#pragma unroll
        for (int i = 0; i < kMost; ++i) {
          value[j][i] = {};
          if (from >= 0 && channel(i) < p.channels)
            value[j][i] = *reinterpret_cast<const Neighbours<Row, kWidth>*>(source + channel(i));
        }
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int of = __shfl_sync(~0u, owner, j0 + j);
        if (pair0 + j0 + j >= pairs) break;
        if (of != summed) {
          if (summed >= 0) write(summed);
          summed = of, fill(0.0f);
        }
#pragma unroll
        for (int i = 0; i < kMost; ++i)
#pragma unroll
          for (int c = 0; c < kWidth; ++c) sum[i][c] += static_cast<float>(value[j][i].element[c]);
      }
    }
  }
  if (summed >= 0) write(summed);
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
  const int64_t lists = p.outer * p.runs;
  if (lists * p.length * p.heads * p.row_bytes == 0) return cudaSuccess;
  const auto aligned = [&](int n) {
    return p.row_bytes % n == 0 && (reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.rows)) % n == 0;
  };
  const auto launch = [&](auto piece) {
    TakeBlocks blocks{};
    blocks.per_row = p.row_bytes / static_cast<int>(sizeof(piece)), blocks.width = p.heads * blocks.per_row;
    blocks.columns = std::min(blocks.width, kThreads), blocks.together = kThreads / blocks.columns;
    blocks.of_columns = static_cast<int>(ceil_div(blocks.width, blocks.columns));
    blocks.of_list = blocks.of_columns * static_cast<int>(ceil_div(p.length, kSlots * blocks.together));
    jax_dma_take_kept_keys<decltype(piece)><<<lists * blocks.of_list, kThreads, 0, stream>>>(p, blocks);
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
    const unsigned count = static_cast<unsigned>(sums);
    const auto run = [&](auto kernel, int of_block) {
      kernel<<<ceil_div(sums, of_block), kThreads, 0, stream>>>(p, count);
    };
    if (p.channels == 1) run(jax_dma_sum_kept_values<Row, Sum>, kThreads);
    else if (p.channels % 4 != 0) run(jax_dma_sum_kept_rows<Row, Sum, 1, 8>, kMine * kWarps);
    else if (p.channels <= 128) run(jax_dma_sum_kept_rows<Row, Sum, 4, 1>, kMine * kWarps);
    else run(jax_dma_sum_kept_rows<Row, Sum, 4, 2>, kMine * kWarps);
    return cudaGetLastError();
  };
  const auto with_sum = [&](auto row) { return p.sums_type == DType::kF32 ? launch(row, float{}) : launch(row, row); };
  if (p.rows_type == DType::kF32) return with_sum(float{});
  return p.rows_type == DType::kBF16 ? with_sum(__nv_bfloat16{}) : with_sum(__half{});
}

}  // namespace jax_dma::kept_keys
