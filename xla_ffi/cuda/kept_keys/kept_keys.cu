// Lists of kept keys. The keys that no query ever sees are dropped first: of 131,072 random keys 10,653 ever enter a
// top-2048. Then one block makes the list of one run of one head, skipping groups of 128 keys by their bounds.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "kept_keys.h"

namespace jax_dma::kept_keys {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kEach = kChunk / kThreads;

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ uint32_t lanes_below() { return (1u << lane()) - 1; }

// Exclusive prefix sum over the warps of a block of a value that each warp holds; `total` is the sum.
template <int kCount = kWarps>
__device__ __forceinline__ int prefix_over_warps(int value, int* shared, int* total) {
  __syncthreads();
  if (lane() == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  int before = 0, sum = 0;
#pragma unroll
  for (int w = 0; w < kCount; ++w) {
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
  int first = 0, count = 0;

  __device__ Runs() {}
  __device__ Runs(int start, int end, int T, int R) {
    start = max(start, 0), end = min(end, T);
    first = start / R, count = start < end ? (end - 1) / R - first + 1 : 0;
  }
};
__device__ __forceinline__ Runs runs_of(const ListsProblem& p, const int32_t* start, const int32_t* end, int64_t s) {
  return s < p.S ? Runs(start[s], end[s], static_cast<int>(p.T), p.R) : Runs();
}

__global__ void __launch_bounds__(kThreads) jax_dma_count_kept_keys(const ListsProblem p, int chunks) {
  __shared__ int shared[2][kWarps];
  const int64_t row = blockIdx.x / chunks;
  const int chunk = static_cast<int>(blockIdx.x % chunks);
  const int32_t *start = p.start + row * p.S, *end = p.end + row * p.S;
  int count = 0, runs = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const Runs of_key = runs_of(p, start, end, int64_t{chunk} * kChunk + j * kThreads + threadIdx.x);
    count += of_key.count > 0, runs += of_key.count;
  }
  count = __reduce_add_sync(~0u, count), runs = __reduce_add_sync(~0u, runs);
  // Bounds of no key, which the next kernel narrows.
  const int64_t group = int64_t{chunk} * (kChunk / kGroup) + threadIdx.x, groups = (p.S + kGroup - 1) / kGroup;
  if (threadIdx.x < kChunk / kGroup && group < groups) p.bounds[row * groups + group] = make_int2(INT32_MAX, INT32_MIN);
  int2 total;
  prefix_over_warps(count, shared[0], &total.x), prefix_over_warps(runs, shared[1], &total.y);
  if (threadIdx.x == 0) p.chunk_counts[row * (chunks + 1) + chunk] = total;
}

// A warp has kEach * 32 neighbouring keys.
__global__ void __launch_bounds__(kThreads) jax_dma_compact_kept_keys(const ListsProblem p, int chunks) {
  __shared__ int shared[2][kWarps];
  const int64_t row = blockIdx.x / chunks;
  const int chunk = static_cast<int>(blockIdx.x % chunks), room = p.runs * p.length;
  const int64_t groups = (p.S + kGroup - 1) / kGroup;
  const int32_t *start = p.start + row * p.S, *end = p.end + row * p.S;
  const int2* const counts = p.chunk_counts + row * (chunks + 1);
  const int64_t s0 = int64_t{chunk} * kChunk + static_cast<int>(threadIdx.x) / 32 * (32 * kEach) + lane();
  Runs runs[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) runs[j] = runs_of(p, start, end, s0 + 32 * j);
  int before = 0;
  int64_t runs_before = 0;
  for (int i = threadIdx.x; i < chunk; i += kThreads) before += counts[i].x, runs_before += counts[i].y;
  before = __reduce_add_sync(~0u, before);
  for (int mask = 16; mask > 0; mask >>= 1) runs_before += __shfl_xor_sync(~0u, runs_before, mask);
  int base, runs_base;
  prefix_over_warps(before, shared[0], &base);
  prefix_over_warps(static_cast<int>(min(runs_before, int64_t{room})), shared[1], &runs_base);
  uint32_t votes[kEach];
  int found = 0, of_warp = 0, total, runs_total;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    votes[j] = __ballot_sync(~0u, runs[j].count > 0);
    found += __popc(votes[j]), of_warp += runs[j].count;
  }
  int place0 = base + prefix_over_warps(found, shared[0], &total);
  runs_base += prefix_over_warps(__reduce_add_sync(~0u, of_warp), shared[1], &runs_total);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int64_t s = s0 + 32 * j;
    const int up_to = sum_up_to_lane(runs[j].count), offset = min(runs_base + up_to - runs[j].count, room);
    if (s < p.S) p.offsets[row * p.S + s] = offset;
    const int place = place0 + __popc(votes[j] & lanes_below());
    int from = INT32_MAX, to = INT32_MIN;
    if (runs[j].count > 0) {
      int32_t* const entry = p.entries + row * 4 * p.S + place;
      from = start[s], to = end[s];
      entry[0] = static_cast<int32_t>(s), entry[p.S] = from, entry[2 * p.S] = to;
      entry[3 * p.S] = offset - runs[j].first;
    }
    // These neighbours belong to one group or two.
    for (int group = place0 / kGroup; group * kGroup < place0 + __popc(votes[j]); ++group) {
      const bool in_group = place / kGroup == group;
      const int first = __reduce_min_sync(~0u, in_group ? from : INT32_MAX),
                last = __reduce_max_sync(~0u, in_group ? to : INT32_MIN);
      int2* const bound = p.bounds + row * groups + group;
      if (lane() == 0) atomicMin(&bound->x, first), atomicMax(&bound->y, last);
    }
    place0 += __popc(votes[j]), runs_base += __shfl_sync(~0u, up_to, 31);
  }
  base += total;
  if (chunk == chunks - 1 && threadIdx.x == 0) p.chunk_counts[row * (chunks + 1) + chunks].x = base;
}

// In which order a run's keys are listed: those that all of it sees; then those that its first query sees, the longer
// the earlier, in steps of a 128th of the run; then the others.
constexpr int kSteps = 128, kClasses = kSteps + 2;
__device__ __forceinline__ int list_class(int start, int end, int t0, int t1, float per_step) {
  const int steps = static_cast<int>((end - t0 - 0.5f) * per_step);  // (end - t0 - 1) / step
  return start > t0 ? kSteps + 1 : end >= t1 ? 0 : kSteps - steps;
}

constexpr int kFewLists = 132;  // a block of 1,024 threads for each multiprocessor of an H200
template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1) jax_dma_list_kept_keys(const ListsProblem p, int chunks, int groups) {
  constexpr int kWarps = kThreads / 32;
  __shared__ int shared[kWarps], live[kThreads], before[kWarps][kClasses];
  const int run = blockIdx.x % p.runs;
  const int64_t row = blockIdx.x / p.runs, outer = row / p.heads, head = row % p.heads;
  const int t0 = run * p.R, t1 = min(t0 + p.R, static_cast<int>(p.T));
  const float per_step = 1.0f / ((p.R + kSteps - 1) / kSteps);
  const int32_t *const entries = p.entries + row * 4 * p.S, *const start = entries + p.S, *const end = start + p.S,
                       *const offset = end + p.S;
  const int count = p.chunk_counts[row * (chunks + 1) + chunks].x, used = (count + kGroup - 1) / kGroup;
  const int64_t list = (outer * p.runs + run) * p.heads + head;
  int32_t *const keys = p.keys + list * p.length, *const first = p.first + list * p.length,
                 *const last = p.last + list * p.length;
  const int room = p.runs * p.length;
  int32_t* const places = p.places + row * room;

  // First in order: `first` takes the keys' entries and `last` their classes.
  int listed = 0, whole = 0;
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
    const int place = prefix_over_warps<kWarps>(__popc(votes), shared, &lives) + __popc(votes & lanes_below());
    if (alive) live[place] = g;
    __syncthreads();
    for (int i = 0; i < lives; i += kWarps) {  // a group a warp
      const int turn = i + static_cast<int>(threadIdx.x) / 32;
      int of_key[kGroup / 32], class_of[kGroup / 32], found = 0;
      uint32_t mine[kGroup / 32];
#pragma unroll
      for (int j = 0; j < kGroup / 32; ++j) {
        const int at = turn < lives ? live[turn] * kGroup + 32 * j + lane() : count;
        bool seen = false;
        if (at < count) {
          const int from = start[at], to = end[at];
          of_key[j] = offset[at] + run;
          seen = from < t1 && to > t0, class_of[j] = list_class(from, to, t0, t1, per_step);
        }
        mine[j] = __ballot_sync(~0u, seen);
        whole += seen && class_of[j] == 0;
        found += __popc(mine[j]);
      }
      int total;
      int base = listed + prefix_over_warps<kWarps>(found, shared, &total);
      listed += total;
#pragma unroll
      for (int j = 0; j < kGroup / 32; ++j) {
        const int at = base + __popc(mine[j] & lanes_below());
        if ((mine[j] >> lane() & 1) != 0) {
          if (at < p.length) first[at] = live[turn] * kGroup + 32 * j + lane(), last[at] = class_of[j];
          else if (of_key[j] < room) places[of_key[j]] = -1;
        }
        base += __popc(mine[j]);
      }
    }
  }

  // Then class by class: counted, and then placed. A warp has a part of the list, kEach keys a lane at a time.
  const int warp = static_cast<int>(threadIdx.x) / 32, n = min(listed, p.length);
  const int part = (n + kThreads - 1) / kThreads * 32, end_of_part = min((warp + 1) * part, n);
  int* const mine = before[warp];
  const auto over_part = [&](bool place) {
    for (int i0 = warp * part; i0 < end_of_part; i0 += 32 * kEach) {
      int class_of[kEach], entry[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int i = i0 + 32 * j + lane();
        class_of[j] = -1;
        if (i < end_of_part) class_of[j] = last[i], entry[j] = first[i];
      }
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const uint32_t alike = __match_any_sync(~0u, class_of[j]), earlier = alike & lanes_below();
        const bool there = class_of[j] >= 0;
        const int at = there ? mine[class_of[j]] : 0;
        __syncwarp();
        if (there && earlier == 0) mine[class_of[j]] = at + __popc(alike);
        __syncwarp();
        if (there && place) keys[at + __popc(earlier)] = entry[j];
      }
    }
    __syncthreads();
  };
  for (int i = threadIdx.x; i < kWarps * kClasses; i += kThreads) before[0][i] = 0;
  __syncthreads();
  over_part(false);
  const int c = static_cast<int>(threadIdx.x);
  int of_class = 0, total;
  for (int w = 0; w < kWarps && c < kClasses; ++w) of_class += before[w][c];
  const int up_to = sum_up_to_lane(of_class);
  int sum = prefix_over_warps<kWarps>(__shfl_sync(~0u, up_to, 31), shared, &total) + up_to - of_class;
  for (int w = 0; w < kWarps && c < kClasses; ++w) {
    const int of_warp = before[w][c];
    before[w][c] = sum, sum += of_warp;
  }
  __syncthreads();
  over_part(true);
#pragma unroll 4
  for (int i = threadIdx.x; i < n; i += kThreads) {
    const int entry = keys[i], of_key = offset[entry] + run;
    if (of_key < room) places[of_key] = i;
    keys[i] = entries[entry];
    first[i] = min(max(start[entry] - t0, 0), p.R), last[i] = min(max(end[entry] - t0, 0), p.R);
  }
  for (int i = listed + static_cast<int>(threadIdx.x); i < p.length; i += kThreads)
    keys[i] = static_cast<int32_t>(p.S), first[i] = 0, last[i] = 0;
  int whole_count;
  prefix_over_warps<kWarps>(__reduce_add_sync(~0u, whole), shared, &whole_count);
  if (threadIdx.x == 0) {
    p.counts[2 * list] = whole_count, p.counts[2 * list + 1] = listed;
    if (listed > p.length) keys[0] = -1, first[0] = 0, last[0] = p.R;
  }
  __syncthreads();
  const int tiles = p.length / kKeyTile;
  int32_t* const bounds = p.bounds_of_tiles + list * 4 * tiles;
#pragma unroll 1
  for (int tile = warp; tile < tiles; tile += kWarps) {
    int first_start = INT32_MAX, last_end = INT32_MIN, last_start = INT32_MIN, first_end = INT32_MAX;
#pragma unroll
    for (int j = 0; j < kKeyTile / 32; ++j) {
      const int i = tile * kKeyTile + 32 * j + lane(), from = first[i], to = last[i];
      const bool empty = from >= to;
      first_start = min(first_start, empty ? INT32_MAX : from), last_end = max(last_end, empty ? INT32_MIN : to);
      last_start = max(last_start, empty ? INT32_MAX : from), first_end = min(first_end, empty ? INT32_MIN : to);
    }
    first_start = __reduce_min_sync(~0u, first_start), last_end = __reduce_max_sync(~0u, last_end);
    last_start = __reduce_max_sync(~0u, last_start), first_end = __reduce_min_sync(~0u, first_end);
    if (lane() < 4)
      bounds[lane() * tiles + tile] = lane() == 0   ? first_start
                                      : lane() == 1 ? last_end
                                      : lane() == 2 ? last_start
                                                    : first_end;
  }
}

// How a block copies rows of a list. The heads of a slot lie side by side, `width` pieces in all: a thread has one of
// the columns, and kSlots slots that are `together` apart; then, `turn` slots on, the same again, so that blocks whose
// list ends early have less to do instead of nothing.
struct TakeBlocks {
  int per_row, width, columns, together, of_columns, of_list, turn;
};
constexpr int kSlots = 8, kTurns = 4, kEnoughBlocks = 4096;

template <class Piece>
__global__ void __launch_bounds__(kThreads, 4) jax_dma_take_kept_keys(const TakeProblem p, const TakeBlocks blocks) {
  const int list = blockIdx.x / static_cast<unsigned>(blocks.of_list), rest = blockIdx.x - list * blocks.of_list;
  const int batch = list / p.runs, run = list - batch * p.runs;
  const int above = static_cast<int>(threadIdx.x) / blocks.columns, part = rest / blocks.of_columns;
  const int column =
      (rest - part * blocks.of_columns) * blocks.columns + static_cast<int>(threadIdx.x) - above * blocks.columns;
  if (above >= blocks.together || column >= blocks.width) return;
  const int head = column / blocks.per_row;
  const int32_t* const keys =
      p.keys + p.keys_at(batch) + (int64_t{run} * p.key_heads + head / (p.heads / p.key_heads)) * p.length;
  const int stride = p.x_heads * blocks.per_row, from = p.x_heads == 1 ? column - head * blocks.per_row : column;
  const Piece* const x = static_cast<const Piece*>(p.x) + p.x_at(batch) * blocks.per_row + from;
  Piece* const rows = static_cast<Piece*>(p.rows) + int64_t{list} * p.length * blocks.width + column;
  const auto in_use = [&](int slot) {  // whether its tile is: after a tile without a key there are no others
    return slot < p.length && (p.fill || keys[slot / kKeyTile * kKeyTile] != p.S);
  };
  int first = part * (kSlots * blocks.together) + above, turns = 0;
#pragma unroll
  for (int i = 0; i < kTurns; ++i) turns += (i == 0 || blocks.turn > 0) && in_use(first + i * blocks.turn);
#pragma unroll 1
  for (; turns > 0; --turns, first += blocks.turn) {
    int32_t key[kSlots];
    Piece value[kSlots];
    uint32_t written = 0;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const int slot = first + i * blocks.together;
      key[i] = slot < p.length ? keys[slot] : static_cast<int32_t>(p.S);
      written |= static_cast<uint32_t>(in_use(slot)) << i;
    }
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (key[i] >= 0 && key[i] < p.S) value[i] = x[int64_t{key[i]} * stride];
      else memset(&value[i], key[i] < 0 ? 0xff : 0, sizeof(Piece));  // all ones are NaN in every type
    }
#pragma unroll
    for (int i = 0; i < kSlots; ++i)
      if ((written >> i & 1) != 0) rows[int64_t{first + i * blocks.together} * blocks.width] = value[i];
  }
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
  // Few lists have large blocks, so that each takes less time.
  const int64_t lists = rows * p.runs;
  const auto list = [&](auto threads) {
    jax_dma_list_kept_keys<threads.value><<<lists, threads.value, 0, stream>>>(p, chunks, groups);
  };
  if (lists <= kFewLists) list(std::integral_constant<int, 1024>());
  else if (lists <= 2 * kFewLists) list(std::integral_constant<int, 512>());
  else list(std::integral_constant<int, kThreads>());
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
    const int slots = kSlots * blocks.together, parts = static_cast<int>(ceil_div(p.length, slots));
    const bool many = lists * parts * blocks.of_columns >= kEnoughBlocks;
    const int of_turn = many ? static_cast<int>(ceil_div(parts, kTurns)) : parts;
    blocks.turn = many ? of_turn * slots : 0, blocks.of_list = blocks.of_columns * of_turn;
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
