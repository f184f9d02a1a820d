// Forward attention for compute capability 9.0a: TMA, wgmma, specialised warps, persistent blocks.
//
// A block works through tiles of 128 or 192 rows (queries x heads of one key/value head, head fastest) one after
// another. The last warpgroup produces: its first warp walks the live key tiles and loads q, k, the bias and the mask
// bits by TMA, its second v. Where there is something that TMA cannot load (intervals, the bias per key beside them,
// unaligned bias), all but the first do that, by ordinary loads, and the first loads v too. The other warpgroups
// consume: each computes 64 of the rows, q k^T from shared memory and p v with p in registers. A
// warpgroup issues the next q k^T before the current p v and runs its softmax meanwhile.
//
//   head dim   rows x keys   stages of q, k, v   shared memory: q + k + v
//   32         192 x 128     2, 2, 2             24 + 16 + 16 = 56 KB
//   64         192 x 128     2, 2, 2             48 + 32 + 32 = 112 KB
//   128        192 x 64      1, 4, 4             48 + 64 + 64 = 176 KB
//   or         128 x 128     1, 2, 2             32 + 64 + 64 = 160 KB (with a dense mask or a bias tile)
//   or         128 x 128     2, 2, 2             64 + 64 + 64 = 192 KB (with a dense mask and a bias that heads share)
//   256        128 x 64      1, 2, 2             64 + 64 + 64 = 192 KB
// plus one or two stages of bias (192 x 128 x 2 bytes = 48 KB at most where 16 bits, 96 KB in f32; G times less where
// heads share it) and two of key vectors. Mask bits, 16 bytes a row, go from device memory straight to registers at
// head dimensions above 64: asked for before q k^T is issued and used after it. Below that registers are short, and the
// bits lie in four stages of shared memory (192 x 16 bytes = 3 KB at most).
//
// The loop is bound by latencies, not by a unit: a scheduler has two or three consumer warps. So it has no branch to
// what is rare (kGeneral), descriptors are uniform, and the largest logits are hardly ever looked for (see softmax).
// Spilled registers are slow here: beside so much shared memory there are some 28 KB of L1 cache, and one word of 384
// threads takes 1.5 KB.
#pragma once

#include "../live_tiles.cuh"
#include "../tile_order.h"
#include "../sm80/logits.cuh"
#include "bias_records.h"
#include "tma.cuh"
#include "wgmma.cuh"

namespace jax_dma::sm90 {

// The kinds are shared with the sm_80 class, and so are the steps on logits that do not depend on how a tile is split.
using sm80::Bias, sm80::Mask;
using sm80::dense_mask, sm80::interval_mask, sm80::key_bias, sm80::no_bias, sm80::no_mask, sm80::tile_bias;
using sm80::is_hidden, sm80::kLarge, sm80::log_sum_exp;

// A tile of biases that the heads of a group share, as they share the mask. Each 16 rows are then 16 / G queries with
// the first half of the heads and the same queries with the second, so that both rows of a thread belong to one query:
// bias and bits are read and unpacked once for the two.
struct shared_tile_bias {
  static constexpr Bias kind = Bias::kTile;
};
constexpr int kWarpRows = 16;

// A tile with a row of biases for each of its rows, which the matrix product adds: s = q k^T + E b, where E is 1 /
// scale on its diagonal and 0 elsewhere. Products of sparse matrices do that in two steps of 32 columns. They take two
// values of each four columns, here those of the pair in which the diagonal is. Both steps read parts of one strip, of
// which the middle third holds the diagonal. The biases must be finite, and small: the kernel finds out by judge_bias.
struct product_tile_bias {
  static constexpr Bias kind = Bias::kTile;
};
// Half of the columns are held, of two bytes each.
constexpr int kDiagonalStep = 32, kDiagonalBytes = 3 * kDiagonalStep * kDiagonalStep;

// Of rings: part i of a block's work lies in stage i % kStages, its bias tile in stage i % 2.
constexpr int kMaxStages = 4, kBiasStages = 2, kMaxQueryStages = 2;

// Where blocks take items as they come, the numbers of a block's last items. (Four: before item i + 4 is told, keys of
// item i + 1 have been given back, and so all have done with item i.)
constexpr int kItems = 4;

constexpr int kChunkBytes = 16;  // of a row: eight channels of a bias per key

// A part of the keys: its number, whether it is the tile's last, and whether the masks hide nothing there. -1: the tile
// has none.
struct Part {
  int code;
  __device__ __forceinline__ static int encode(int number, bool last, bool full) {
    return 4 * number + 2 * last + full;
  }
  __device__ __forceinline__ bool none() const { return code < 0; }
  __device__ __forceinline__ int number() const { return (code & (kTested - 1)) >> 2; }
  __device__ __forceinline__ bool last() const { return code & 2; }
  __device__ __forceinline__ bool full() const { return code & 1; }
  // Set by those that consume, from BiasRecord::to_part: whether a bias per key is to be added, and which of four
  // groups of 32 keys have some that only some queries see. Where there is no part, they change nothing.
  static constexpr int kTested = 1 << 26;
  __device__ __forceinline__ bool bias_added() const { return code & kBiasAdded; }
  __device__ __forceinline__ bool tests(int group) const { return code & (kTested << group); }
};

template <int kHeadDim, Mask kMask, Bias kBias>
struct ForwardShape {
  // Three warpgroups fill each other's gaps better than two. At 128 they have registers for 64 keys at a time, which is
  // worth it unless there is a bias tile, or a dense mask, whose live tiles have 128 rows.
  static constexpr bool kNarrow = kHeadDim == 128 && kMask != Mask::kBits && kBias != Bias::kTile;
  static constexpr int kGroups = kHeadDim <= 64 || kNarrow ? 3 : 2;  // warpgroups that consume, 64 rows each
  static constexpr int kRows = 64 * kGroups, kConsumers = 128 * kGroups, kThreads = kConsumers + 128;
  static constexpr int kKeys = kHeadDim <= 128 && !kNarrow ? 128 : 64, kStages = kNarrow ? 4 : 2;
  // Registers a lane, shared out anew among the warpgroups. (A multiprocessor's quarter has 512 for a warp of each.)
  static constexpr int kProducerRegisters = kHeadDim <= 64 ? 32 : kHeadDim <= 128 ? 56 : 40;
  static constexpr int kConsumerRegisters =
      kGroups == 3 ? (512 - kProducerRegisters) / 3 : (504 - kProducerRegisters) / 2;
  static constexpr int kRowBytes = kHeadDim < 64 ? 2 * kHeadDim : 128;
  static constexpr int kPanels = 2 * kHeadDim / kRowBytes;
  static constexpr int kQueryBytes = 2 * kRows * kHeadDim, kTileBytes = 2 * kKeys * kHeadDim;
  // Two stages of q where they fit: the next tile's is there when this one's is done.
  static constexpr int kQueryStages = kHeadDim <= 64 ? kMaxQueryStages : 1, kKeysAt = kQueryStages * kQueryBytes;
  static constexpr int kBiasAt = kKeysAt + 2 * kStages * kTileBytes;
  // For product_tile_bias, 1 / scale is a sum of so many numbers of 16 bits.
  static constexpr int kDiagonals = kHeadDim <= 32 ? 2 : 1;
  // Of a bias per key: the records of the stages, which hold k's first chunk, then q's, and one of zeros for both.
  using Record = BiasRecord<kKeys>;
  static constexpr int kOnesAt = kBiasAt + kStages * sizeof(Record), kZerosAt = kOnesAt + 64 * kChunkBytes;
  static constexpr int kRecordsEnd = kZerosAt + kKeys * kChunkBytes;
};

// Whether the helper warps write the records of a bias per key. Otherwise TMA brings them.
template <int kHeadDim, Mask kMask>
constexpr bool kWritesRecords = kMask == Mask::kIntervals && kHeadDim <= 128;

struct ForwardMaps {
  CUtensorMap q, k, v, bias, bits, out;
};

// Whether TMA brings mask bits to shared memory, with the keys. They have four stages, because they are read after
// their keys have been given back: when part i's keys have, part i - 1's bits have been read, not yet its own.
template <int kHeadDim, Mask kMask, bool kGeneral>
constexpr bool kBitsInShared = kMask == Mask::kBits && !kGeneral && kHeadDim <= 64;
constexpr int kBitsStages = 4;

// What the host works out for a call. Offsets and sizes are in bytes of shared memory.
struct ForwardPlan {
  TileOrder order;          // of the query tiles of all heads (B x K)
  Divisor by_heads;         // K
  Divisor by_group;         // G
  int items;                // tiles x heads x splits
  int queries;              // of a tile
  int query_shift;          // the tiles of the maps have 2^query_shift
  int splits, split_tiles;  // the key tiles of a query tile are divided among `splits` items
  int consumers;            // threads: 128 where only the first 64 rows are used
  int bias_rows, bias_panel, bias_stage;
  int bias_two;  // whether there are two stages of bias: 0, 1
  int side_at, side_stage, barriers_at;
  int bits_at, bits_stage, bits_bytes;  // of mask bits in shared memory
  int diagonal_at;                      // of what goes with product_tile_bias
  uint32_t* unfit;                      // what judge_bias found, by its blocks
  View records;                         // of a bias per key, where TMA brings them
  int* next_item;    // how many items have been taken beside each block's first; null: a block's items are fixed
  uint32_t nothing;  // 0, which the compiler does not know
  int second_query;  // stage of q, where the next item begins beside the end of the last
  bool bias_by_tma, bits_by_tma;
  bool bias_by_head;  // a tile has a row of biases for each head, the same for all queries
  bool q_batch, k_batch, v_batch, bias_batch, bits_batch;  // whether the map's batch axis is the batch entry, or 0
  float* partial;  // where there are splits: their outputs [splits, B, K, G, T, Hv], then their lse [.., 2]
};

// The tile of a block's round. Every other round runs backwards, so that all blocks get much the same number of keys.
__device__ __forceinline__ int tile_of_round(int round) {
  return round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
}

// One tile of work: the last queries first, because under a causal mask they see the most keys.
struct Item {
  int batch, kv_head, t0, split = 0;
  __device__ __forceinline__ Item(const Problem& p, const ForwardPlan& plan, int index) {
    if (plan.splits > 1) split = index % plan.splits, index /= plan.splits;
    const TileOrder::Place place = plan.order.at(index);
    batch = plan.by_heads.quotient(place.head), kv_head = place.head - batch * p.K;
    t0 = (plan.order.tiles - 1 - place.tile) * plan.queries;
  }
};

// What the consumers need to know of an item, where blocks take them as they come. (Worked out by each thread it would
// delay the item's beginning and its end.)
struct ItemPlace {
  int index;
  Item item;
  int64_t bits, out, lse;  // offsets of the first row
};

struct ForwardBarriers {
  uint64_t q_full[kMaxQueryStages], q_empty[kMaxQueryStages];
  uint64_t k_full[kMaxStages], k_empty[kMaxStages], v_full[kMaxStages], v_empty[kMaxStages];
  uint64_t bias_full[kBiasStages], bias_empty[kBiasStages], side_full[kMaxStages], side_empty[kMaxStages];
  int part[kMaxStages];  // what lies in a stage: see Part
  uint64_t item_full[kItems], place_full[kItems];
  int item[kItems];
  ItemPlace place[kItems];
};

// The live parts of an item, in order. What begins an item runs once in a while and is not in the instruction cache:
// its time is its length.
template <int kKeys, Mask kMask, bool kGeneral>
struct Walk {
  static constexpr bool kBits = kMask == Mask::kBits;
  static constexpr bool kIntervals = kMask == Mask::kIntervals || (kBits && kGeneral);
  const uint32_t* by_query = nullptr;
  const int32_t* bounds = nullptr;
  LiveTiles<kKeyTile / kKeys> live;
  int first_tile, last_tile;  // of the maps
  int t0, t1;                 // their queries
  int first = 0, limit;       // of the keys: no query of the item sees those at and past the limit
  int tiles;                  // of keys, up to the limit

  __device__ __forceinline__ Walk(const Problem& p, const ForwardPlan& plan, const Item& item) {
    const int end = min(item.t0 + plan.queries, static_cast<int>(p.T));
    first_tile = item.t0 >> plan.query_shift, last_tile = (end - 1) >> plan.query_shift;
    t0 = first_tile << plan.query_shift, t1 = min((last_tile + 1) << plan.query_shift, static_cast<int>(p.T));
    if (kBits)
      by_query = static_cast<const uint32_t*>(p.tiles_by_query.data) +
                 offset_of(p, p.tiles_by_query, item.batch, item.kv_head, 0) + first_tile * p.tiles_by_query.row;
    if (kIntervals && p.start.present())
      bounds = static_cast<const int32_t*>(p.bounds.data) + offset_of(p, p.bounds, item.batch, item.kv_head, 0);
    limit = static_cast<int>(p.S);
    if (p.causal) limit = min(limit, end + static_cast<int>(p.causal_offset()));
    if (plan.splits > 1) {
      first = item.split * plan.split_tiles * kKeyTile, limit = min(limit, first + plan.split_tiles * kKeyTile);
      live.word = item.split * plan.split_tiles / kTilesPerWord - 1;
    }
    tiles = (max(limit, 0) + kKeyTile - 1) / kKeyTile;
  }
  __device__ __forceinline__ int next(const Problem& p) {
    return live.next(
        tiles, [&](int word) { return kIntervals ? skip_hidden(p, bounds, word, tiles, t0, t1) : word; },
        [&](int word) {
          TileWord seen{~0u, ~0u};
          const int left = tiles - word * kTilesPerWord;
          if (left < kTilesPerWord) seen.seen = (1u << left) - 1;
          if (kIntervals && bounds != nullptr) {
            const int tile =
                min(word * kTilesPerWord + static_cast<int>(threadIdx.x % 32), static_cast<int>(p.key_tiles) - 1);
            const int32_t* const b = bounds + tile;
            const int64_t stride = p.bounds.row;
            seen.seen &= __ballot_sync(~0u, b[0] < t1 && b[stride] > t0);
            seen.full &= __ballot_sync(~0u, b[2 * stride] <= t0 && b[3 * stride] >= t1);
          }
          if (kBits) {
            const uint32_t* map = by_query + word * p.tiles_by_query.col;
            uint32_t any = 0;
#pragma unroll 2
            for (int tile = first_tile; tile <= last_tile; ++tile, map += p.tiles_by_query.row)
              any |= map[0], seen.full &= map[p.tiles_by_query_plane];
            seen.seen &= any;
          }
          return seen;
        },
        [&](int part) { return part * kKeys >= first && part * kKeys < limit; });
  }
};

// Bias tiles in shared memory are panels of 128-byte rows, swizzled as TMA does: 16-byte chunk c of row r lies at c ^
// (r % 8).
__device__ __forceinline__ int bias_offset(int row, int byte, int panel_bytes) {
  return byte / 128 * panel_bytes + row * 128 + (((byte % 128 / 16) ^ (row % 8)) * 16) + byte % 16;
}

// Fills a bias tile by ordinary loads, where TMA cannot: broadcast over queries or keys, or unaligned. For 96 threads,
// a warp a row.
template <class Element, int kKeys>
__device__ __forceinline__ void fill_bias(const Problem& p, char* stage, const char* base, int t0, int key, int rows,
                                          int group, int panel_bytes) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int r = threadIdx.x / 32 % 4 - 1; r < rows; r += 3) {
    const int query = r / group, g = r % group;
    const Element* source =
        reinterpret_cast<const Element*>(base) + (t0 + query) * p.bias.row + g * p.bias.group + key * p.bias.col;
    const int columns = t0 + query < static_cast<int>(p.T) ? static_cast<int>(p.S) - key : 0;
    Element values[kKeys / 32];
#pragma unroll
    for (int i = 0; i < kKeys / 32; ++i)
      values[i] = lane + 32 * i < columns ? source[(lane + 32 * i) * p.bias.col] : Element{};
#pragma unroll
    for (int i = 0; i < kKeys / 32; ++i)
      *reinterpret_cast<Element*>(
          stage + bias_offset(r, (lane + 32 * i) * static_cast<int>(sizeof(Element)), panel_bytes)) = values[i];
  }
}

// Fills a stage of key vectors: the bias per key as f32, then the intervals (of each head of the group, where they
// differ). For 96 threads.
template <bool kKeyBias, int kKeys>
__device__ __forceinline__ void fill_side(const Problem& p, char* side, const char* bias, const int32_t* start,
                                          const int32_t* end, int key, bool intervals) {
  const int helper = threadIdx.x % 128 - 32, columns = static_cast<int>(p.S) - key;
  if constexpr (kKeyBias) {
#pragma unroll
    for (int c = helper; c < kKeys; c += 96)
      reinterpret_cast<float*>(side)[c] =
          c < columns ? bias_value(p, load_bias(p, bias, (key + c) * p.bias.col)) : 0.0f;
  }
  if (intervals) {
    int2* const pairs = reinterpret_cast<int2*>(side + (kKeyBias ? 4 * kKeys : 0));
    const int count = (p.start.group != 0 ? p.G : 1) * kKeys;
#pragma unroll 2
    for (int i = helper; i < count; i += 96) {
      const int c = i % kKeys, g = i / kKeys;
      pairs[i] =
          c < columns ? make_int2(start[key + c + g * p.start.group], end[key + c + g * p.end.group]) : make_int2(0, 0);
    }
  }
}

// What a thread of the 96 that write a record has of its keys: nothing waits for a load before all have been asked for.
template <int kKeys>
struct KeyValues {
  static constexpr int kCount = (kKeys + 95) / 96;
  uint32_t bias[kCount];
  int2 intervals[kCount];

  __device__ __forceinline__ static int key_of(int i) { return static_cast<int>(threadIdx.x % 128) - 32 + 96 * i; }
  __device__ __forceinline__ void load(const Problem& p, const char* source, const int32_t* start, const int32_t* end,
                                       int key, bool with_intervals) {
    const int columns = min(static_cast<int>(p.S) - key, kKeys);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int at = key + key_of(i);
      bias[i] = 0, intervals[i] = make_int2(0, 0);
      if (key_of(i) >= columns) continue;
      bias[i] = load_bias(p, source, at * p.bias.col);
      if (with_intervals) intervals[i] = make_int2(start[at], end[at]);
    }
  }
  // `pairs`: where intervals go that some of the queries from t0 to t1 see and others do not; null if none do.
  __device__ __forceinline__ void store(const Problem& p, BiasRecord<kKeys>& record, int2* pairs, int t0,
                                        int t1) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int c = key_of(i);
      if (c >= kKeys) break;  // the same for all of a warp
      float value = bias_value(p, bias[i]);
      int to_part = 0;
      if (pairs != nullptr) {
        const int2 at = intervals[i];
        const bool none = at.x >= t1 || at.y <= t0, all = at.x <= t0 && at.y >= t1;
        if (none) value = -INFINITY;
        if (__any_sync(~0u, !none && !all)) pairs[c] = at, to_part = Part::kTested << c / 32;
      }
      if (__any_sync(~0u, record.set(c, value, p.scale))) to_part |= kBiasAdded;
      if (c % 32 == 0) record.to_part[c / 32] = to_part;
    }
    fence_async_proxy();
  }
};

// The rows of a thread's accumulators: elements 0, 1 of a block belong to row 0, elements 2, 3 to row 1.
struct ThreadRows {
  int first, packed[2];  // query | head of the group << 16
  __device__ __forceinline__ ThreadRows(int first_row, const Divisor& by_group) {
    first = first_row + (threadIdx.x % 32) / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = by_group.quotient(row(i));
      packed[i] = query | (row(i) - query * static_cast<int>(by_group.value)) << 16;
    }
  }
  // In the order that goes with shared_tile_bias.
  __device__ __forceinline__ static ThreadRows with_shared_bias(int first_row, const Divisor& by_group) {
    ThreadRows rows(first_row, by_group);
    const int half = by_group.value / 2, shift = __ffs(half) - 1, row = static_cast<int>(threadIdx.x % 32) / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      rows.packed[i] = (by_group.quotient(first_row) + (row >> shift)) | (i * half + row % half) << 16;
    return rows;
  }
  __device__ __forceinline__ int row(int i) const { return first + 8 * i; }
  __device__ __forceinline__ int query(int i) const { return packed[i] & 0xffff; }
  __device__ __forceinline__ int head(int i) const { return packed[i] >> 16; }
};

// x = x * factor + a value per key (f32 in shared memory).
template <int kBlocks>
__device__ __forceinline__ void add_key_bias(float (&x)[kBlocks][4], uint32_t vector, float factor) {
  vector += 8 * (threadIdx.x % 4);
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    float b0, b1;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(b0), "=f"(b1) : "r"(vector + 32 * n));
    x[n][0] = x[n][0] * factor + b0, x[n][1] = x[n][1] * factor + b1;
    x[n][2] = x[n][2] * factor + b0, x[n][3] = x[n][3] * factor + b1;
  }
}

// The mask bits of a thread's rows, for one part of the keys.
template <int kKeys, int kRows>
struct MaskBits {
  static constexpr int kWords = kKeys / 32;
  uint32_t words[kRows][kWords];

  // `second` is the distance of the second row in words.
  __device__ __forceinline__ void load(const uint32_t* first, int second, int key, bool uniform) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint32_t* const row = first + (i == 0 ? 0 : second);
      if (uniform) {  // one word stands for all keys
        const uint32_t word = __ldg(row);
#pragma unroll
        for (int w = 0; w < kWords; ++w) words[i][w] = word;
      } else if constexpr (kWords == 4) {
        const uint4 four = __ldg(reinterpret_cast<const uint4*>(row + key / 32));
        words[i][0] = four.x, words[i][1] = four.y, words[i][2] = four.z, words[i][3] = four.w;
      } else {
        const uint2 two = __ldg(reinterpret_cast<const uint2*>(row + key / 32));
        words[i][0] = two.x, words[i][1] = two.y;
      }
    }
  }
  // From shared memory, where the rows lie `offset` after these addresses.
  __device__ __forceinline__ void load(const uint32_t (&rows)[2], uint32_t offset) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint4 four = ptx::load_shared(rows[i] + offset);
      words[i][0] = four.x, words[i][1] = four.y, words[i][2] = four.z, words[i][3] = four.w;
    }
  }
  __device__ __forceinline__ void hide(float (&x)[kKeys / 8][4]) const {
    const int first_bit = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int w = 0; w < kWords; ++w)
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        // The thread's eight bits, brought together, so that they become predicates by one instruction.
        const uint32_t bits = (((words[i][w] >> first_bit) & 0x03030303u) * 0x01041040u) >> 24;
#pragma unroll
        for (int b = 0; b < 8; ++b) {
          float& y = x[4 * w + b / 2][2 * i + b % 2];
          y = (bits & (1u << b)) != 0 ? y : -INFINITY;
        }
      }
  }
  // A pair of 16-bit biases of block n and row i, with -inf where hidden.
  __device__ __forceinline__ uint32_t hide_pair(uint32_t pair, uint32_t infinities, int i, int n) const {
    const int column = 2 * (threadIdx.x % 4), b = n % 4;
    const uint32_t even = words[i][n / 4] << (7 - column), odd = words[i][n / 4] << (6 - column);
    uint32_t seen;  // copies of the top bits of bytes
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(seen) : "r"(even), "r"(odd), "r"((8 + b) * 0x11 + (12 + b) * 0x1100));
    return (pair & seen) | (infinities & ~seen);
  }
};

template <class Element>
__device__ __forceinline__ float2 unpack_bias(uint32_t pair) {
  if constexpr (std::is_same_v<Element, __half>) return ptx::unpack<Element>(pair);
  else return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
// Two biases that hide.
template <class Element>
constexpr uint32_t kInfinities = std::is_same_v<Element, __half> ? 0xfc00fc00u : 0xff80ff80u;

// Bias tiles of 16 bits, read as fragments: pairs[c][i + 2 j] holds two columns of block 2 c + j and row i.
template <int kBlocks>
struct BiasPairs {
  uint32_t pairs[kBlocks / 2][4];

  // Where a lane's row begins in a stage: matrices 0 and 1 are the warp's rows 0-7 and 8-15 of a block, 2 and 3 of the
  // next.
  __device__ __forceinline__ static uint32_t lane_row(const ForwardPlan& plan, bool per_head, int first_row,
                                                      int group) {
    const int lane = threadIdx.x % 32, row = first_row + lane % 16;
    const int r = plan.bias_by_head ? row % group : min(per_head ? row : row / group, plan.bias_rows - 1);
    return r * 128 + ((lane / 16) ^ (r % 8)) * 16;
  }
  __device__ __forceinline__ void load(uint32_t lane_row, int panel_bytes, int c) {
    const uint32_t address = (lane_row ^ (c % 4 * 32)) + c / 4 * panel_bytes;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs[c][0]), "=r"(pairs[c][1]), "=r"(pairs[c][2]), "=r"(pairs[c][3])
                 : "r"(address));
  }
  // x = x * factor + the bias, and -inf where `bits` hide (kHide). Returns something of each load.
  template <class Element, bool kHide, class Bits>
  __device__ __forceinline__ uint32_t add(float (&x)[kBlocks][4], uint32_t lane_row, int panel_bytes, float factor,
                                          const Bits& bits) {
    constexpr int kSteps = kBlocks / 2, kAhead = 4;
#pragma unroll
    for (int c = 0; c < kAhead; ++c) load(lane_row, panel_bytes, c);
    uint32_t read = 0;
#pragma unroll
    for (int c = 0; c < kSteps; ++c) {
      read |= pairs[c][3];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = j % 2, n = 2 * c + j / 2;
        uint32_t pair = pairs[c][j];
        if constexpr (kHide) pair = bits.hide_pair(pair, kInfinities<Element>, i, n);
        const float2 b = unpack_bias<Element>(pair);
        x[n][2 * i] = x[n][2 * i] * factor + b.x, x[n][2 * i + 1] = x[n][2 * i + 1] * factor + b.y;
      }
      if (c + kAhead < kSteps) load(lane_row, panel_bytes, c + kAhead);
    }
    return read;
  }
};

// The same for shared_tile_bias: a load brings four blocks, for both rows.
template <int kBlocks>
struct SharedBiasPairs {
  __device__ __forceinline__ static uint32_t lane_row(const ForwardPlan& plan, int first_row, int group) {
    const int lane = threadIdx.x % 32;
    const int r = min(first_row / group + lane % 8 / (group / 2), plan.bias_rows - 1);
    return r * 128 + ((lane / 8) ^ (r % 8)) * 16;
  }
  template <class Element, bool kHide, class Bits>
  __device__ __forceinline__ static uint32_t add(float (&x)[kBlocks][4], uint32_t lane_row, int panel_bytes,
                                                 float factor, const Bits& bits) {
    constexpr int kLoads = kBlocks / 4;
    uint32_t pairs[kLoads][4];
#pragma unroll
    for (int c = 0; c < kLoads; ++c) ptx::load_matrix(pairs[c], (lane_row ^ (c % 2 * 64)) + c / 2 * panel_bytes);
    uint32_t read = 0;
#pragma unroll
    for (int c = 0; c < kLoads; ++c) read |= pairs[c][3];
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      uint32_t pair = pairs[n / 4][n % 4];
      if constexpr (kHide) pair = bits.hide_pair(pair, kInfinities<Element>, 0, n);
      const float2 b = unpack_bias<Element>(pair);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        x[n][2 * i] = x[n][2 * i] * factor + b.x, x[n][2 * i + 1] = x[n][2 * i + 1] * factor + b.y;
    }
    return read;
  }
};

// The same for a bias of f32, unmasked.
template <int kBlocks>
__device__ __forceinline__ void add_f32_bias(float (&x)[kBlocks][4], uint32_t stage, const ForwardPlan& plan,
                                             bool per_head, const ThreadRows& rows, float factor) {
  const int lane_byte = static_cast<int>(threadIdx.x % 4) * 8;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int index = plan.bias_by_head ? rows.head(i) : per_head ? rows.row(i) : rows.query(i);
    const int r = min(index, plan.bias_rows - 1);
    const uint32_t row = stage + r * 128 + (((lane_byte / 16) ^ (r % 8)) * 16) + lane_byte % 16;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      float2 b;
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(b.x), "=f"(b.y)
                   : "r"((row ^ (n % 4 * 32)) + n / 4 * plan.bias_panel));
      x[n][2 * i] = x[n][2 * i] * factor + b.x;
      x[n][2 * i + 1] = x[n][2 * i + 1] * factor + b.y;
    }
  }
}

// x = -inf where t is outside [start, end): `vector` holds (start, end) of kKeys keys (kSome: of those that the part
// tests), or those of each head of the group.
template <bool kSome, int kBlocks>
__device__ __forceinline__ void hide_by_intervals(float (&x)[kBlocks][4], uint32_t vector, bool per_head, int group,
                                                  const ThreadRows& rows, int t0, Part part) {
  constexpr int kKeys = 8 * kBlocks;
  vector += 16 * (threadIdx.x % 4);
  const auto read = [](uint32_t address) {
    int4 pair;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pair.x), "=r"(pair.y), "=r"(pair.z), "=r"(pair.w)
                 : "r"(address));
    return pair;
  };
  const auto hide = [](float* y, int4 pair, int t) {
    y[0] = t >= pair.x && t < pair.y ? y[0] : -INFINITY;
    y[1] = t >= pair.z && t < pair.w ? y[1] : -INFINITY;
  };
  const int t[2] = {t0 + rows.query(0), t0 + rows.query(1)};
  if (!per_head) {
#pragma unroll
    for (int m = 0; m < kBlocks; m += 4) {
      if (kSome && !part.tests(m / 4)) continue;
#pragma unroll
      for (int n = m; n < m + 4; ++n) {
        const int4 pair = read(vector + 64 * n);
        hide(x[n], pair, t[0]), hide(x[n] + 2, pair, t[1]);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t row = vector + 8 * kKeys * min(rows.head(i), group - 1);
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) hide(x[n] + 2 * i, read(row + 64 * n), t[i]);
    }
  }
}

// x = -inf past S and, under the causal rule, past the query.
template <int kBlocks>
__device__ __forceinline__ void hide_by_position(float (&x)[kBlocks][4], const Problem& p, const ThreadRows& rows,
                                                 int t0, int key) {
  const int columns = static_cast<int>(p.S) - key, offset = static_cast<int>(p.causal_offset()) + t0 - key + 1;
  const int lane_column = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int visible = columns;
    if (p.causal) visible = min(visible, offset + rows.query(i));
    visible -= lane_column;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (8 * n + e >= visible) x[n][2 * i + e] = -INFINITY;
  }
}

// Word j of lane q of a quad becomes word q of lane j: then a lane holds 16 bytes of a row of the output.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (threadIdx.x & bit) != 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if ((j & bit) != 0) continue;
      const uint32_t received = __shfl_xor_sync(~0u, upper ? words[j] : words[j | bit], bit);
      if (upper) words[j] = received;
      else words[j | bit] = received;
    }
  }
}

// Four 8x8 matrices of 16-bit elements, to where ptx::load_matrix would read them.
__device__ __forceinline__ void store_matrix(uint32_t address, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// What the online softmax knows of a thread's two rows.
struct SoftmaxRows {
  // Subtracted from the logits: a value near the largest so far. Any gives the same result, so it moves only when a sum
  // grows too large (kGeneral: when a logit is 2^8 above it), and the output is hardly ever rescaled.
  float reference[2];
  float sum[2];  // of this thread's columns
  // Whether any row's of the warp cannot be used without looking at the logits: there is none, or it is beyond kLarge.
  bool unsafe;
};

// kGeneral: with what is rare, decided at run time: soft caps, scales that are not positive, intervals beside bits,
// bits that are the same for all keys, biases of another dtype or that TMA cannot load, and biases per key without
// records, where these would be used too seldom.
template <class T, int kHeadDim, class MaskKind, class BiasKind, bool kGeneral>
__device__ __forceinline__ void forward_block(const Problem& p, const ForwardMaps& maps, const ForwardPlan& plan) {
  constexpr Mask kMask = MaskKind::kind;
  constexpr Bias kBias = BiasKind::kind;
  using Shape = ForwardShape<kHeadDim, kMask, kBias>;
  constexpr bool kSharedBias = std::is_same_v<BiasKind, shared_tile_bias>;
  constexpr bool kProductBias = std::is_same_v<BiasKind, product_tile_bias>;
  constexpr int kKeys = Shape::kKeys, kPanels = Shape::kPanels, kRows = Shape::kRows, kRowBytes = Shape::kRowBytes;
  constexpr int kStages = Shape::kStages;
  constexpr int kS = kKeys / 8, kO = kHeadDim / 8;  // column blocks of logits and output
  constexpr int kQueryPanel = kRows * kRowBytes, kKeyPanel = kKeys * kRowBytes;

  extern __shared__ __align__(1024) char shared[];
  const uint32_t q_tile = ptx::shared_address(shared), k_tiles = q_tile + Shape::kKeysAt;
  const uint32_t v_tiles = k_tiles + kStages * Shape::kTileBytes;
  auto& bar = *reinterpret_cast<ForwardBarriers*>(shared + plan.barriers_at);
  // Whether there are key vectors.
  const bool has_intervals = kMask == Mask::kIntervals || (kGeneral && kMask == Mask::kBits && p.start.present());
  // Records of a bias per key come with the keys, on their barriers, or from the helper warps, on those of the side.
  constexpr bool kRecords = kBias == Bias::kKey && !kGeneral, kKeyVector = kBias == Bias::kKey && kGeneral;
  constexpr bool kWritten = kRecords && kWritesRecords<kHeadDim, kMask>;
  constexpr bool kBrought = kRecords && !kWritten;
  constexpr bool kInProduct = kRecords || kProductBias;
  using Record = typename Shape::Record;
  constexpr bool kBitsShared = kBitsInShared<kHeadDim, kMask, kGeneral>;
  // Of dense masks the host does not know how many keys the items have: whoever is done takes the next. (At smaller
  // head dimensions short items lose more than uneven ones gain.)
  constexpr bool kTakesItems = kMask == Mask::kBits && !kGeneral && kHeadDim >= 128;
  // Of tiles with few keys, the next queries are asked for early: these are given back as soon as they have been read.
  constexpr bool kEarlyQueries = (kMask == Mask::kIntervals || kTakesItems) && kHeadDim == 128;
  // Where there is room besides: an item's first products are issued before the results of the last are written, so the
  // next queries have a stage of their own. Results leave by TMA through the stage of their queries, a warp's at a
  // time: in the order of rows that goes with a shared bias, those are of whole queries.
  constexpr bool kAhead = kTakesItems && kHeadDim == 128 && kSharedBias;
  constexpr int kQueryStages = kAhead ? kMaxQueryStages : Shape::kQueryStages;
  const int query_stage = kAhead ? plan.second_query : Shape::kQueryBytes;
  const bool takes_items = kTakesItems && plan.next_item != nullptr;
  const auto item_of_round = [&](int round) {
    if (!takes_items) return tile_of_round(round);
    wait(&bar.item_full[round % kItems], round / kItems & 1);
    return *const_cast<volatile int*>(&bar.item[round % kItems]);
  };
  const bool with_side = kKeyVector || has_intervals;
  const bool bias_by_tma = !kGeneral || plan.bias_by_tma;

  if (threadIdx.x == 0) {
    if (q_tile % 1024 != 0) __trap();       // the swizzle goes by address
    const int warps = plan.consumers / 32;  // one arrival a warp
    for (int i = 0; i < kQueryStages; ++i) barrier_init(&bar.q_full[i], 1), barrier_init(&bar.q_empty[i], warps);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&bar.k_full[i], 1), barrier_init(&bar.v_full[i], 1);
      barrier_init(&bar.k_empty[i], warps), barrier_init(&bar.v_empty[i], warps);
      barrier_init(&bar.side_full[i], 96), barrier_init(&bar.side_empty[i], warps);
    }
    for (int i = 0; i < kBiasStages; ++i)
      barrier_init(&bar.bias_full[i], bias_by_tma ? 1 : 96), barrier_init(&bar.bias_empty[i], warps);
    if (kTakesItems)
      for (int i = 0; i < kItems; ++i) barrier_init(&bar.item_full[i], 1), barrier_init(&bar.place_full[i], 1);
    barrier_init_fence();
  }
  // Rows of q that no query takes stay 0.
  const int used_rows = plan.queries * p.G, unused = (kRows - used_rows) * (kRowBytes / 4);
  for (int i = threadIdx.x; i < unused * kPanels * Shape::kQueryStages; i += Shape::kThreads)
    reinterpret_cast<uint32_t*>(shared)[i / unused * (kQueryPanel / 4) + used_rows * (kRowBytes / 4) + i % unused] = 0;
  if constexpr (kRecords)
    for (int i = threadIdx.x; i < (Shape::kRecordsEnd - Shape::kOnesAt) / 4; i += Shape::kThreads) {
      const bool ones = i < (Shape::kZerosAt - Shape::kOnesAt) / 4;
      reinterpret_cast<uint32_t*>(shared + Shape::kOnesAt)[i] = !ones || i % 4 > 1 ? 0
                                                                : i % 4 == 0       ? 0x3f803f80
                                                                                   : 0x3f80;
    }
  if constexpr (kProductBias) {  // eight rows of eight values one after another
    float rest = 1 / p.scale;
#pragma unroll
    for (int part = 0; part < Shape::kDiagonals; ++part) {
      const T value = static_cast<T>(rest);
      rest -= static_cast<float>(value);
      T* const strip = reinterpret_cast<T*>(shared + plan.diagonal_at + part * kDiagonalBytes);
      for (int i = threadIdx.x; i < kDiagonalBytes / 2; i += Shape::kThreads) {
        const int row = i / 128 * 8 + i / 8 % 8 - kDiagonalStep, column = i / 64 % 2 * 8 + i % 8;
        strip[i] = row >= 0 && row < kDiagonalStep && row / 4 * 2 + row % 2 == column ? value : static_cast<T>(0.0f);
      }
    }
  }
  fence_async_proxy();
  __syncthreads();

  const int warp = threadIdx.x / 32;
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));  // keeps the compiler from reading it anew at every use
  const int bias_two = kGeneral ? plan.bias_two : 1;
  if (warp >= Shape::kConsumers / 32) {
    // ---- Producers.
    give_registers<Shape::kProducerRegisters>();
    // Warps 1 to 3 help where TMA cannot load all. Elsewhere warp 1 loads the values: keys need not wait until there is
    // room for the values before them.
    const int role = warp - Shape::kConsumers / 32;
    const bool needs_help = with_side || (kBias == Bias::kTile && !bias_by_tma), helps = role > 0 && needs_help;
    const bool loads_keys = role == 0, loads_values = role == (needs_help ? 0 : 1);
    if (!helps && !loads_keys && !loads_values) return;
    if (!helps && lane == 0) {
      prefetch_map(&maps.q), prefetch_map(&maps.k), prefetch_map(&maps.v);
      if (kBias == Bias::kTile && bias_by_tma) prefetch_map(&maps.bias);
    }
    uint32_t slot = 0;  // counts the parts
    int taken = 0;
#pragma unroll 1
    for (int round = 0; round < plan.items; ++round) {
      if (takes_items && loads_keys && lane == 0) {
        bar.item[round % kItems] = round == 0 ? blockIdx.x : gridDim.x + taken;
        arrive(&bar.item_full[round % kItems]);
        taken = atomicAdd(plan.next_item, 1);  // for the next round: it takes its time
      }
      const int index = item_of_round(round);
      if (kTakesItems && loads_values && lane == 0) {
        const Item item(p, plan, index);
        const auto offset = [&](const View& view) {
          return offset_of(p, view, item.batch, item.kv_head, 0) + item.t0 * view.row;
        };
        bar.place[round % kItems] = {index, item, offset(p.bits), offset(p.out), offset(p.lse)};
        arrive(&bar.place_full[round % kItems]);
      }
      if (index >= plan.items) break;
      const Item item(p, plan, index);
      Walk<kKeys, kMask, kGeneral> walk(p, plan, item);
      int part = walk.next(p);
      bool full = kMask == Mask::kNone || walk.live.tile_full;
      const Record* records = nullptr;
      if constexpr (kBrought)
        records =
            static_cast<const Record*>(plan.records.data) + offset_of(p, plan.records, item.batch, item.kv_head, 0);
      // A tile without keys passes a slot of each ring without data.
      if (!helps) {
        // Loads by TMA. Lane 0 waits and issues; all lanes walk.
        if (lane == 0 && loads_keys) {
          const int stage = round % kQueryStages;
          uint64_t* const full_barrier = &bar.q_full[stage];
          wait(&bar.q_empty[stage], (round / kQueryStages & 1) ^ 1);
          if (part < 0) {
            arrive(full_barrier);
          } else {
            arrive_expecting(full_barrier, kPanels * used_rows * kRowBytes);
            for (int c = 0; c < kPanels; ++c) {
              const uint32_t panel = q_tile + stage * query_stage + c * kQueryPanel;
              const int batch = plan.q_batch ? item.batch : 0;
              if constexpr (kSharedBias) {
                const int row = (batch * static_cast<int>(p.T) + item.t0) * p.G;
                load_box(panel, &maps.q, full_barrier, 64 * c, 0, 0, 2 * item.kv_head, row / kWarpRows);
              } else {
                load_box(panel, &maps.q, full_barrier, 64 * c, 0, item.t0, item.kv_head, batch);
              }
            }
          }
        }
#pragma unroll 1
        do {
          const int next = part < 0 ? -1 : walk.next(p), key = part * kKeys;
          if (lane == 0) {
            const int stage = slot % kStages;
            const uint32_t phase = (slot / kStages & 1) ^ 1;
            if (loads_keys) {
              wait(&bar.k_empty[stage], phase);
              bar.part[stage] = part < 0 ? -1 : Part::encode(part, next < 0, full);
              if (part < 0) {
                arrive(&bar.k_full[stage]);
              } else {
                const bool with_bits = kBitsShared && !full;
                arrive_expecting(&bar.k_full[stage], Shape::kTileBytes + (kBrought ? sizeof(Record) : 0) +
                                                         (kProductBias ? plan.bias_stage : 0) +
                                                         (with_bits ? plan.bits_bytes : 0));
                if (with_bits)
                  load_box(q_tile + plan.bits_at + slot % kBitsStages * plan.bits_stage, &maps.bits, &bar.k_full[stage],
                           key / 32, 0, p.bits.row != 0 ? item.t0 : 0, p.bits.kv != 0 ? item.kv_head : 0,
                           plan.bits_batch ? item.batch : 0);
                if constexpr (kBrought)
                  load_bytes(q_tile + Shape::kBiasAt + stage * sizeof(Record), records + part, sizeof(Record),
                             &bar.k_full[stage]);
                for (int c = 0; c < kPanels; ++c)
                  load_box(k_tiles + stage * Shape::kTileBytes + c * kKeyPanel, &maps.k, &bar.k_full[stage], 64 * c,
                           key, item.kv_head, plan.k_batch ? item.batch : 0, 0);
                if constexpr (kProductBias)
                  for (int c = 0; c < kKeys / 64; ++c)
                    load_box(q_tile + Shape::kBiasAt + stage * plan.bias_stage + c * plan.bias_panel, &maps.bias,
                             &bar.k_full[stage], key + 64 * c, 0, item.t0, p.bias.kv != 0 ? item.kv_head : 0,
                             plan.bias_batch ? item.batch : 0);
              }
              if (kBias == Bias::kTile && !kProductBias && bias_by_tma) {
                const int bias_stage = slot & bias_two;
                wait(&bar.bias_empty[bias_stage], (slot >> bias_two & 1) ^ 1);
                if (part < 0) {
                  arrive(&bar.bias_full[bias_stage]);
                } else {
                  const int bytes = kGeneral && p.bias_dtype == DType::kF32 ? 4 : 2, panels = kKeys * bytes / 128;
                  const uint32_t target = q_tile + Shape::kBiasAt + bias_stage * plan.bias_stage;
                  arrive_expecting(&bar.bias_full[bias_stage], panels * plan.bias_rows * 128);
#pragma unroll 1
                  for (int c = 0; c < panels; ++c)
                    load_box(target + c * plan.bias_panel, &maps.bias, &bar.bias_full[bias_stage],
                             key + c * (128 / bytes), 0, plan.bias_by_head ? 0 : item.t0,
                             p.bias.kv != 0 ? item.kv_head : 0, plan.bias_batch ? item.batch : 0);
                }
              }
            }
            if (loads_values) {
              wait(&bar.v_empty[stage], phase);
              if (part < 0) {
                arrive(&bar.v_full[stage]);
              } else {
                arrive_expecting(&bar.v_full[stage], Shape::kTileBytes);
                for (int c = 0; c < kPanels; ++c)
                  load_box(v_tiles + stage * Shape::kTileBytes + c * kKeyPanel, &maps.v, &bar.v_full[stage], 64 * c,
                           key, item.kv_head, plan.v_batch ? item.batch : 0, 0);
              }
            }
          }
          __syncwarp();
          ++slot;
          part = next, full = kMask == Mask::kNone || walk.live.tile_full;
        } while (part >= 0);
      } else {
        const int32_t *start = nullptr, *end = nullptr;
        if (has_intervals) {
          start = static_cast<const int32_t*>(p.start.data) + offset_of(p, p.start, item.batch, item.kv_head, 0);
          end = static_cast<const int32_t*>(p.end.data) + offset_of(p, p.end, item.batch, item.kv_head, 0);
        }
        const char* bias = nullptr;
        if (kBias != Bias::kNone)
          bias = static_cast<const char*>(p.bias.data) +
                 offset_of(p, p.bias, item.batch, item.kv_head, 0) * (p.bias_dtype == DType::kF32 ? 4 : 2);
#pragma unroll 1
        do {
          const int key = part * kKeys;
          if (with_side) {
            const int stage = slot % kStages;
            const bool intervals = has_intervals && !full, some = kWritten && intervals && p.start.group == 0;
            KeyValues<kKeys> values;
            if (kWritten && part >= 0) values.load(p, bias, start, end, key, some);
            wait(&bar.side_empty[stage], (slot / kStages & 1) ^ 1);
            if (part >= 0) {
              char* const side = shared + plan.side_at + stage * plan.side_stage;
              if constexpr (kWritten)
                values.store(p, reinterpret_cast<Record*>(shared + Shape::kBiasAt)[stage],
                             some ? reinterpret_cast<int2*>(side) : nullptr, item.t0,
                             min(item.t0 + plan.queries, static_cast<int>(p.T)));
              fill_side<kKeyVector, kKeys>(p, side, bias, start, end, key, intervals && !some);
            }
            arrive(&bar.side_full[stage]);
          }
          if (kBias == Bias::kTile && !bias_by_tma) {
            const int bias_stage = slot & bias_two, group = p.bias.group != 0 ? p.G : 1;
            char* const tile = shared + Shape::kBiasAt + bias_stage * plan.bias_stage;
            wait(&bar.bias_empty[bias_stage], (slot >> bias_two & 1) ^ 1);
            if (part >= 0) {
              if (p.bias_dtype == DType::kF32)
                fill_bias<float, kKeys>(p, tile, bias, item.t0, key, plan.bias_rows, group, plan.bias_panel);
              else fill_bias<uint16_t, kKeys>(p, tile, bias, item.t0, key, plan.bias_rows, group, plan.bias_panel);
            }
            arrive(&bar.bias_full[bias_stage]);
          }
          ++slot;
          part = part < 0 ? -1 : walk.next(p), full = kMask == Mask::kNone || walk.live.tile_full;
        } while (part >= 0);
      }
    }
    return;
  }

  // ---- Consumers.
  take_registers<Shape::kConsumerRegisters>();
  if (threadIdx.x >= plan.consumers) return;
  constexpr float kSlack = 8.0f, kMostOfTile = 1 << 13;  // of a thread's columns (p fits in f16)
  constexpr DType kSameDType = std::is_same_v<T, __half> ? DType::kF16 : DType::kBF16;
  const int group = warp / 4;  // 0, 1: which 64 rows
  const int first_row = 64 * group + warp % 4 * kWarpRows;
  const auto rows_from = [&](int first_row) {
    return kSharedBias ? ThreadRows::with_shared_bias(first_row, plan.by_group) : ThreadRows(first_row, plan.by_group);
  };
  const ThreadRows rows = rows_from(first_row);
  // Low words of the operands' descriptors; uniform, so that those are computed beside the vector instructions. They
  // count in 16 bytes.
  const auto uniform = [](uint32_t value) { return __shfl_sync(~0u, value, 0); };
  const uint32_t q_low = uniform(static_cast<uint32_t>(operand(q_tile + 64 * kRowBytes * group)));
  const uint32_t k_low = uniform(static_cast<uint32_t>(operand(k_tiles)));
  const uint32_t v_low = uniform(static_cast<uint32_t>(operand(v_tiles, kKeyPanel)));
  const auto described = [](uint32_t low) {
    constexpr uint32_t kHigh = 8 * kRowBytes >> 4 | (kRowBytes == 128 ? 1u : 2u) << 30;
    return uint64_t{kHigh} << 32 | low;
  };
  // Logits are x * p.scale where scaling is left to the exponential, and otherwise x.
  const bool scaled_late = kBias == Bias::kNone && (!kGeneral || (p.softcap == 0.0f && p.scale > 0.0f));
  const float log2_factor = scaled_late ? p.scale * kLog2e : kLog2e;

  // The same for the channels of the bias: two chunks, whose distance is the leading one, without swizzle.
  const auto chunks = [](uint32_t first, uint32_t second) { return first >> 4 | (second - first) >> 4 << 16; };
  const auto described_chunks = [](uint32_t low) { return uint64_t{8 * kChunkBytes >> 4} << 32 | low; };
  const auto record_at = [&](uint32_t stage, uint32_t offset) {
    return q_tile + Shape::kBiasAt + offset + stage * static_cast<uint32_t>(sizeof(Record));
  };
  const uint32_t ones_low = uniform(chunks(q_tile + Shape::kOnesAt, q_tile + Shape::kZerosAt));
  const uint32_t channels_low = uniform(chunks(record_at(0, 0), q_tile + Shape::kZerosAt));

  const uint32_t diagonal_low = uniform((q_tile + plan.diagonal_at) >> 4 | 128 >> 4 << 16);
  const uint32_t bias_low = uniform(
      static_cast<uint32_t>(operand(q_tile + Shape::kBiasAt + 64 * 128 * group, kProductBias ? plan.bias_panel : 0)));
  const uint32_t which = lane / 4 % 4 < 2 ? 0x44444444 : 0xeeeeeeee;  // columns 0, 1 or 2, 3 of four

  uint32_t slot = 0;  // counts the parts
  float o[kO][4], x[kS][4];
  SoftmaxRows soft{};
  uint32_t a[kS / 2][4];  // p, as operand fragments: two column blocks to one k block
  const uint32_t* bits = nullptr;
  int second_bits = 0;
  MaskBits<kKeys, kSharedBias ? 1 : 2> mask;
  uint32_t bits_rows[2] = {};  // in the first stage of bits in shared memory
  if constexpr (kBitsShared) {
    const int group = p.bits.group != 0 ? p.G : 1;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      bits_rows[i] =
          q_tile + plan.bits_at +
          16 * ((p.bits.row != 0 ? min(rows.query(i), plan.queries - 1) * group : 0) + (group > 1 ? rows.head(i) : 0));
  }
  uint32_t bias_row = 0;
  if constexpr (kBias == Bias::kTile)
    bias_row = q_tile + Shape::kBiasAt +
               (kSharedBias ? SharedBiasPairs<kS>::lane_row(plan, first_row, p.G)
                            : BiasPairs<kS>::lane_row(plan, p.bias.group != 0, first_row, p.G));
  asm volatile("" : "+r"(bits_rows[0]), "+r"(bits_rows[1]), "+r"(bias_row));  // not to be worked out anew in the loop

  // Three warpgroups take turns at the products, so that they do not all want the same unit at once. (Elsewhere, masks
  // among them, it is slower.)
  constexpr bool kTurns = kProductBias || (kHeadDim == 64 && kMask == Mask::kNone && kBias == Bias::kNone && !kGeneral);
  const bool takes_turns = kTurns && plan.consumers > 128;
  // Uniform: they are needed at once where a turn begins. 0: none.
  const uint32_t own_turn = uniform(takes_turns ? 1 + group : 0);
  const uint32_t next_turn = uniform(takes_turns ? 1 + (group == Shape::kGroups - 1 ? 0 : group + 1) : 0);
  const auto await_turn = [&] {
    if (kTurns && own_turn != 0) named_sync(own_turn, 256);
  };
  const auto pass_turn = [&] {
    if (kTurns && next_turn != 0) named_arrive(next_turn, 256);
  };
  if (group == Shape::kGroups - 1) pass_turn();
  // A stage is given back when all lanes of the warp have read it.
  const auto release_products = [&](uint64_t* empty) {  // after the wait for wgmma, which the warp does as one
    if (lane == 0) arrive(empty);
  };
  const auto release = [&](uint64_t* empty) {
    __syncwarp();
    release_products(empty);
  };
  // The same for what was loaded to registers: `read` is something of each load (ptxas may change their order).
  // Without it the stage may be given back before the loads have been carried out, and overwritten.
  const auto release_read = [&](uint64_t* empty, uint32_t read) {
    __syncwarp();
    if ((lane | (read & plan.nothing)) == 0) arrive(empty);
  };
  // Whether the next keys and the values of these are there: asked before the exponentials, because the answer takes
  // some 50 cycles, and needed after them.
  bool keys_there = false, values_there = false;
  const auto look_ahead = [&] {
    keys_there = is_over(&bar.k_full[(slot + 1) % kStages], (slot + 1) / kStages & 1);
    values_there = is_over(&bar.v_full[slot % kStages], slot / kStages & 1);
  };
  // Which keys come next, waiting until they are there. Asks for their mask bits.
  const auto next_part = [&] {
    if (!keys_there) wait(&bar.k_full[slot % kStages], slot / kStages & 1);
    Part part{*const_cast<volatile int*>(&bar.part[slot % kStages])};
    __syncwarp();  // lane 0 gives the stage back for all
    if constexpr (kRecords) {
      if (kWritten) wait(&bar.side_full[slot % kStages], slot / kStages & 1);
      const uint32_t to_part = record_at(slot % kStages, offsetof(Record, to_part));
      if constexpr (kWritten) {
#pragma unroll
        for (int pair = 0; pair < kKeys / 64; ++pair) {
          uint32_t words[2];
          ptx::load_shared_row(words, to_part + 8 * pair);
          part.code |= words[0] | words[1];
        }
      } else {
        part.code |= ptx::load_shared_word(to_part);
      }
    }
    if constexpr (kMask == Mask::kBits && !kBitsShared)
      if (!part.none() && !part.full())
        mask.load(bits, second_bits, part.number() * kKeys, kGeneral && p.bits.col == 0);
    return part;
  };
  const auto multiply_keys = [&](uint32_t q, uint32_t stage) {
    const uint32_t k = k_low + stage * (Shape::kTileBytes / 16);
    constexpr int kSteps = kRowBytes / 32;  // of 16 channels, in a panel
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kHeadDim / 16; ++c)
      wgmma_shared<T>(x, described(q + (c / kSteps * kQueryPanel + c % kSteps * 32) / 16),
                      described(k + (c / kSteps * kKeyPanel + c % kSteps * 32) / 16), c > 0);
    if constexpr (kRecords) {  // last: each step rounds at the size of what there is
      constexpr uint32_t kStep = sizeof(Record) / 16;
      wgmma_shared<__nv_bfloat16>(x, described_chunks(ones_low),
                                  described_chunks(channels_low + stage * (kStep - (kStep << 16))), true);
    }
    if constexpr (kProductBias) {
      const uint32_t b = bias_low + stage * (plan.bias_stage / 16);
#pragma unroll
      for (int part = 0; part < Shape::kDiagonals; ++part)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          SparseWgmma<T>::shared(
              x, uint64_t{256 >> 4} << 32 | (diagonal_low + (3 * part + 1 - c) * (kDiagonalBytes / 3 / 16)),
              uint64_t{1024 >> 4 | 1u << 30} << 32 | (b + c * (kDiagonalStep * 128 / 16)), which);
    }
    wgmma_commit();
  };
  // p v of the part before `slot`.
  const auto multiply_values = [&](uint32_t stage) {
    const uint32_t v = v_low + stage * (Shape::kTileBytes / 16);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kKeys / 16; ++c)
      wgmma_registers<T>(o, a[c][0], a[c][1], a[c][2], a[c][3], described(v + c * (16 * kRowBytes / 16)));
    wgmma_commit();
  };
  const auto wait_for_values = [&] {
    if (!values_there) wait(&bar.v_full[(slot - 1) % kStages], (slot - 1) / kStages & 1);
  };
  int last_inner_key = 0;  // parts that begin after it reach past what some row sees
  float unit = 1.0f;       // logits are x * unit, for kInProduct
  // From products to logits.
  const auto to_logits = [&](Part part, int t0) {
    const int key = part.number() * kKeys, stage = slot % kStages;
    const bool intervals = has_intervals && !part.full();
    const uint32_t side = q_tile + plan.side_at + stage * plan.side_stage;
    if (with_side && !kWritten) wait(&bar.side_full[stage], slot / kStages & 1);

    float factor = p.scale;
    unit = 1.0f;
    if (kGeneral && p.softcap != 0.0f) {
      const float inner = p.scale / p.softcap;
#pragma unroll
      for (int n = 0; n < kS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[n][i] = p.softcap * ptx::tanh(x[n][i] * inner);
      factor = 1.0f;
    }
    bool hide = kMask == Mask::kBits && !part.full();
    if constexpr (kProductBias) {
      unit = factor;
    } else if constexpr (kBias == Bias::kTile) {
      const int bias_stage = slot & bias_two;
      wait(&bar.bias_full[bias_stage], slot >> bias_two & 1);
      if (!kGeneral || p.bias_dtype != DType::kF32) {
        const uint32_t row = bias_row + bias_stage * plan.bias_stage;
        constexpr bool kHidesPairs = kMask == Mask::kBits && (kSharedBias || !kBitsShared);
        uint32_t read = 0;
        const auto add = [&](auto element, auto masked) {
          std::conditional_t<kSharedBias, SharedBiasPairs<kS>, BiasPairs<kS>> pairs;
          read = pairs.template add<decltype(element), decltype(masked)::value>(x, row, plan.bias_panel, factor, mask);
        };
        const auto add_masked_or_not = [&](auto element) {
          if (kHidesPairs && hide) {
            if constexpr (kSharedBias && kBitsShared) mask.load(bits_rows, slot % kBitsStages * plan.bits_stage);
            add(element, std::true_type());
          } else {
            add(element, std::false_type());
          }
        };
        if (!kGeneral || p.bias_dtype == kSameDType) add_masked_or_not(T());
        else add_masked_or_not(std::conditional_t<std::is_same_v<T, __half>, __nv_bfloat16, __half>());
        if (kHidesPairs) hide = false;
        if (!kGeneral) release_read(&bar.bias_empty[bias_stage], read);
      } else {
        add_f32_bias(x, q_tile + Shape::kBiasAt + bias_stage * plan.bias_stage, plan, p.bias.group != 0, rows, factor);
      }
    } else if constexpr (kRecords) {
      unit = factor;
      if (part.bias_added()) {
        add_key_bias(x, record_at(stage, offsetof(Record, added)), factor);
        unit = 1.0f;
      }
    } else if constexpr (kBias == Bias::kKey) {
      add_key_bias(x, side, factor);
    } else if (kGeneral && factor <= 0.0f) {  // so that the largest product is the largest logit
#pragma unroll
      for (int n = 0; n < kS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[n][i] *= factor;
    }
    if (!hide && !intervals && key <= last_inner_key) return;  // a jump takes its time, so there is one
    if constexpr (kMask == Mask::kBits && !kSharedBias)
      if (hide) {
        if constexpr (kBitsShared) mask.load(bits_rows, slot % kBitsStages * plan.bits_stage);
        mask.hide(x);
      }
    if constexpr (kMask != Mask::kNone)
      if (intervals)
        hide_by_intervals<kWritten>(x, side + (kKeyVector ? 4 * kKeys : 0), p.start.group != 0, p.G, rows, t0, part);
    if (key > last_inner_key) hide_by_position(x, p, rows, t0, key);
  };
  // The (unnormalised) probabilities, packed, and their sums. The logits stay in x.
  float sum[2];
  const auto exponentials = [&](const float (&shift)[2]) {
    float factor = kInProduct ? unit * kLog2e : log2_factor;
    asm volatile("" : "+f"(factor));  // or products with it are worked out, and kept, before the loop
#pragma unroll
    for (int c = 0; c < kS / 2; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = x[2 * c + i / 2] + 2 * (i % 2);
        const float first = ptx::exp2(pair[0] * factor - shift[i % 2]);
        const float second = ptx::exp2(pair[1] * factor - shift[i % 2]);
        if (c == 0 && i < 2) sum[i] = first + second;
        else sum[i % 2] += first, sum[i % 2] += second;
        a[c][i] = ptx::pack<T>(first, second);
      }
  };
  const auto join_quads = [](float (&peak)[2]) {  // a row is spread over the four lanes of a quad
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2)
#pragma unroll
      for (int i = 0; i < 2; ++i) peak[i] = fmaxf(peak[i], __shfl_xor_sync(~0u, peak[i], distance));
  };
  // From logits to probabilities by the references that there are. (Of an item's first part: by the largest of a
  // quarter of the logits.) Returns whether that could be done and the sums are small enough.
  const auto use_references = [&](bool is_first) {
    if (is_first) {
      float peak[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        peak[i] = fmaxf(x[0][2 * i], x[0][2 * i + 1]);
#pragma unroll
        for (int n = 4; n < kS; n += 4) peak[i] = fmaxf(peak[i], fmaxf(x[n][2 * i], x[n][2 * i + 1]));
        if constexpr (kInProduct) peak[i] *= unit;
      }
      join_quads(peak);
      soft.unsafe = __any_sync(~0u, !(fabsf(peak[0]) <= kLarge && fabsf(peak[1]) <= kLarge));
      if (!soft.unsafe) soft.reference[0] = peak[0], soft.reference[1] = peak[1];
    }
    if (soft.unsafe) return false;
    const float shift[2] = {soft.reference[0] * log2_factor, soft.reference[1] * log2_factor};
    exponentials(shift);
    return !__any_sync(~0u, !(sum[0] < kMostOfTile && sum[1] < kMostOfTile));
  };
  // From logits to probabilities. The largest logits are looked for only where the references cannot be used or have
  // turned out to be too small.
  const auto softmax = [&](auto is_first) {
    if (kGeneral || !use_references(decltype(is_first)::value)) {
      bool large = false;
      float peak[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float chain[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) chain[n] = fmaxf(x[n][2 * i], x[n][2 * i + 1]);
#pragma unroll
        for (int n = 4; n < kS; ++n) chain[n % 4] = fmaxf(chain[n % 4], fmaxf(x[n][2 * i], x[n][2 * i + 1]));
        peak[i] = fmaxf(fmaxf(chain[0], chain[1]), fmaxf(chain[2], chain[3]));
        if constexpr (kInProduct) peak[i] *= unit;
      }
      // False where peak and reference are -inf.
      const auto above = [&](int i) { return (peak[i] - soft.reference[i]) * log2_factor > kSlack; };
      if (__any_sync(~0u, above(0) || above(1))) {
        join_quads(peak);
        float rescale[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (is_hidden(peak[i])) peak[i] = -INFINITY;
          const bool move = above(i);
          rescale[i] = move ? ptx::exp2((soft.reference[i] - peak[i]) * log2_factor) : 1.0f;
          if (move) soft.reference[i] = peak[i];
          soft.sum[i] *= rescale[i];
        }
        if (!decltype(is_first)::value) {
#pragma unroll
          for (int n = 0; n < kO; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) o[n][i] *= rescale[i / 2];
        }
      }
      bool beyond = false, none = false;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float size = fabsf(soft.reference[i]);
        none |= size == INFINITY, beyond |= size > kLarge && size != INFINITY;
      }
      if constexpr (kBias != Bias::kNone) large = __any_sync(~0u, beyond);
      soft.unsafe = large || __any_sync(~0u, none);
      if (large) {  // rows of very large logits are shifted before they are multiplied
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float reference = soft.reference[i] == -INFINITY ? 0.0f : soft.reference[i];
#pragma unroll
          for (int n = 0; n < kS; ++n)
#pragma unroll
            for (int e = 2 * i; e < 2 * i + 2; ++e)
              x[n][e] = kInProduct ? x[n][e] * unit - reference : x[n][e] - reference;
        }
        unit = 1.0f;
      }
      float shift[2];  // the reference in units of the exponential
#pragma unroll
      for (int i = 0; i < 2; ++i)
        shift[i] = soft.reference[i] == -INFINITY || large ? 0.0f : soft.reference[i] * log2_factor;
      exponentials(shift);
    }
    soft.sum[0] += sum[0], soft.sum[1] += sum[1];
  };
  // The rest of what logits are made from is given back when they have been used.
  const auto give_back_sides = [&](Part part) {
    __syncwarp();
    if (lane != 0) return;
    if (kBias == Bias::kTile && kGeneral) arrive(&bar.bias_empty[slot & bias_two]);
    if (kBrought && part.bias_added()) arrive(&bar.k_empty[slot % kStages]);
    if (with_side) arrive(&bar.side_empty[slot % kStages]);
  };
  struct {
    int index, t0;
    uint32_t q;
    Part part;  // the first
  } next;       // item (kAhead)
  const auto place_of = [&](int round) -> const ItemPlace& {
    wait(&bar.place_full[round % kItems], round / kItems & 1);
    return bar.place[round % kItems];
  };
  const auto find_bits = [&](const ItemPlace& place) {
    const int last = min(plan.queries, static_cast<int>(p.T) - place.item.t0) - 1;
    const auto row = [&](int i) {  // (in 32 bits: see launch_forward)
      return min(rows.query(i), last) * static_cast<int>(p.bits.row) + rows.head(i) * static_cast<int>(p.bits.group);
    };
    bits = static_cast<const uint32_t*>(p.bits.data) + place.bits + row(0), second_bits = row(1) - row(0);
  };
  const auto begin_next = [&](int round) {
    const ItemPlace& place = place_of(round);
    next.index = *const_cast<const volatile int*>(&place.index), next.t0 = place.item.t0;
    find_bits(place);
    if (next.index < plan.items) {
      next.part = next_part();
      if (!next.part.none()) wait(&bar.q_full[round % kQueryStages], round / kQueryStages & 1);
    }
    // (Also where there are no keys: with a branch, ptxas would have each product waited for.)
    next.q = uniform(q_low + round % kQueryStages * (query_stage / 16));
    multiply_keys(next.q, uniform(slot % kStages));
  };
  if constexpr (kAhead) begin_next(0);
#pragma unroll 1
  // (A bound that says that rounds are the same for all threads: ptxas then keeps what follows from them, such as
  // stages, in uniform registers.)
  for (int round = 0; round < plan.items; ++round) {
    if constexpr (kAhead) {
      wgmma_wait<0>();
      hold(x);
    }
    const int index = kAhead        ? next.index
                      : kTakesItems ? *const_cast<const volatile int*>(&place_of(round).index)
                                    : item_of_round(round);
    if (index >= plan.items) break;
    // Where the item is, is not worked out where nothing depends on it.
    int t0 = 0;
    if constexpr (kTakesItems) t0 = kAhead ? next.t0 : bar.place[round % kItems].item.t0;
    else if (kGeneral || kMask == Mask::kIntervals || p.causal) t0 = Item(p, plan, index).t0;
    last_inner_key = static_cast<int>(p.S) - kKeys;
    if (p.causal) {
      int thread = threadIdx.x;  // worked out anew, or it is kept in memory
      asm volatile("" : "+r"(thread));
      const int first_query = t0 + plan.by_group.quotient(thread / 128 * 64);
      last_inner_key = min(last_inner_key, first_query + static_cast<int>(p.causal_offset()) + 1 - kKeys);
    }
    if constexpr (kTakesItems) {
      if (!kAhead) find_bits(bar.place[round % kItems]);
    } else if constexpr (kMask == Mask::kBits && !kBitsShared) {
      const Item item(p, plan, index);
      const auto row = [&](int i) {
        return min(item.t0 + min(rows.query(i), plan.queries - 1), static_cast<int>(p.T) - 1) * p.bits.row +
               rows.head(i) * p.bits.group;
      };
      bits = static_cast<const uint32_t*>(p.bits.data) + offset_of(p, p.bits, item.batch, item.kv_head, 0) + row(0);
      second_bits = static_cast<int>(row(1) - row(0));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) soft.reference[i] = -INFINITY, soft.sum[i] = 0.0f;
    soft.unsafe = true;
    keys_there = false;
    float inverse[2] = {};                          // of the rows' sums
    float2 row_lse = make_float2(-INFINITY, 0.0f);  // two lanes of a quad have, and write, that of a row each
#pragma unroll
    for (int n = 0; n < kO; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] = 0.0f;

    const uint32_t q_stage = round % kQueryStages;
    const uint32_t q = kAhead ? next.q : uniform(q_low + q_stage * (query_stage / 16));
    Part part = kAhead ? next.part : next_part();
    if (kAhead && round > 0 && elected()) {
      bulk_wait_read();  // until the results of the item before have left through its queries' stage
      arrive(&bar.q_empty[(round - 1) % kQueryStages]);
    }
    if (!part.none()) {
      if constexpr (!kAhead) {
        wait(&bar.q_full[q_stage], round / kQueryStages & 1);
        const uint32_t stage = uniform(slot % kStages);
        await_turn();
        multiply_keys(q, stage);
        pass_turn();
        wgmma_wait<0>();
        hold(x);
      }
      if (!kBrought || !part.bias_added()) release(&bar.k_empty[slot % kStages]);
      if (kEarlyQueries && !kAhead && part.last()) release(&bar.q_empty[q_stage]);
      to_logits(part, t0);
      look_ahead();
      softmax(std::true_type());
      give_back_sides(part);
      bool last = part.last();
      ++slot;
      if (!last) part = next_part();
#pragma unroll 1
      while (!last) {
        const uint32_t stage = uniform(slot % kStages);
        wait_for_values();
        await_turn();
        multiply_keys(q, stage);
        multiply_values((stage + kStages - 1) % kStages);
        pass_turn();
        wgmma_wait<1>();
        hold(x);
        if (!kBrought || !part.bias_added()) release_products(&bar.k_empty[slot % kStages]);
        if (kEarlyQueries && !kAhead && part.last()) release_products(&bar.q_empty[q_stage]);
        to_logits(part, t0);
        // p goes to the registers of the p before. The other warpgroups' products fill this wait.
        wgmma_wait<0>();
        hold(o);
        release_products(&bar.v_empty[(slot - 1) % kStages]);
        look_ahead();
        softmax(std::false_type());
        give_back_sides(part);
        last = part.last();
        ++slot;
        if (!last) part = next_part();
      }
      if (!kEarlyQueries) release_products(&bar.q_empty[q_stage]);
      const uint32_t before = uniform((slot - 1) % kStages);
      wait_for_values();
      multiply_values(before);
      float total[2] = {soft.sum[0], soft.sum[1]};
#pragma unroll
      for (int distance = 1; distance <= 2; distance *= 2)
#pragma unroll
        for (int i = 0; i < 2; ++i) total[i] += __shfl_xor_sync(~0u, total[i], distance);
#pragma unroll
      for (int i = 0; i < 2; ++i) inverse[i] = total[i] == 0.0f ? 0.0f : __fdividef(1.0f, total[i]);
      const bool second = lane % 2 != 0;
      row_lse = log_sum_exp((second ? soft.reference[1] : soft.reference[0]) * (scaled_late ? p.scale : 1.0f),
                            second ? total[1] : total[0]);
      if constexpr (kAhead) {
        const uint32_t last = slot - 1;
        begin_next(round + 1);
        wgmma_wait<1>();
        hold(o);
        release(&bar.v_empty[last % kStages]);
      } else {
        wgmma_wait<0>();
        hold(o);
        release(&bar.v_empty[(slot - 1) % kStages]);
      }
    } else {
      // Each slot is waited for before it is given back: its barriers must not run a phase ahead of the producer.
      wait(&bar.q_full[q_stage], round / kQueryStages & 1);
      if (!kAhead) release(&bar.q_empty[q_stage]);
      release(&bar.k_empty[slot % kStages]);
      wait(&bar.v_full[slot % kStages], slot / kStages & 1);
      release(&bar.v_empty[slot % kStages]);
      if (with_side) {
        wait(&bar.side_full[slot % kStages], slot / kStages & 1);
        release(&bar.side_empty[slot % kStages]);
      }
      if (kBias == Bias::kTile && !kProductBias) {
        wait(&bar.bias_full[slot & bias_two], slot >> bias_two & 1);
        release(&bar.bias_empty[slot & bias_two]);
      }
      ++slot;
      if constexpr (kAhead) begin_next(round + 1);
    }

    // The item, the lane and the rows are worked out anew: what follows from them would take registers in the loop. (At
    // larger head dimensions there are enough for the rows.)
    int same_round = round, thread = threadIdx.x;
    asm volatile("" : "+r"(same_round), "+r"(thread));
    const int lane = thread % 32;
    const ItemPlace& place = bar.place[round % kItems];
    const Item done = kTakesItems ? place.item : Item(p, plan, item_of_round(same_round));
    const ThreadRows own_rows = kTakesItems ? rows : rows_from(thread / 32 * kWarpRows);
    bool inside[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) inside[i] = own_rows.query(i) < plan.queries && done.t0 + own_rows.query(i) < p.T;
    const bool second = lane % 2 != 0, writes_lse = lane % 4 < 2 && (second ? inside[1] : inside[0]);
    const int query = second ? own_rows.query(1) : own_rows.query(0),
              head = second ? own_rows.head(1) : own_rows.head(0);
    if (plan.splits > 1) {
      // (Not from `place`: ptxas then orders the loop worse, 0.985 instead of 0.957 of the time before with full
      // lists.)
      const Item split = kTakesItems ? Item(p, plan, index) : done;
      const int64_t count = p.B * p.N * p.T;
      const int64_t first = split.split * count + int64_t{split.batch * p.K + split.kv_head} * p.G * p.T + split.t0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (!inside[i]) continue;
        float* const target = plan.partial + (first + own_rows.head(i) * p.T + own_rows.query(i)) * p.Hv;
#pragma unroll
        for (int n = 0; n < kO; ++n) {
          const int c = 8 * n + 2 * (lane % 4);
          if (c < p.Hv)
            *reinterpret_cast<float2*>(target + c) =
                make_float2(o[n][2 * i] * inverse[i], o[n][2 * i + 1] * inverse[i]);
        }
      }
      if (writes_lse)
        reinterpret_cast<float2*>(plan.partial + plan.splits * count * p.Hv)[first + head * p.T + query] = row_lse;
      continue;
    }
    if (writes_lse)
      *reinterpret_cast<float2*>(static_cast<float*>(p.lse.data) +
                                 (kTakesItems ? place.lse + head * p.lse.group + query * p.lse.row
                                              : offset_of(p, p.lse, done.batch, done.kv_head, head) +
                                                    (done.t0 + query) * p.lse.row)) = row_lse;
    if constexpr (kAhead) {
      const uint32_t stage = q_tile + q_stage * query_stage + first_row * kRowBytes;
      const uint32_t row = stage + lane % 16 * kRowBytes + ((lane / 16) ^ (lane % 8)) * 16;
      named_sync(1 + group, 128);  // all of the warpgroup have read the queries
#pragma unroll
      for (int c = 0; c < kO / 2; ++c) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* const pair = o[2 * c + j / 2] + 2 * (j % 2);
          words[j] = ptx::pack<T>(pair[0] * inverse[j % 2], pair[1] * inverse[j % 2]);
        }
        store_matrix((row ^ (c % 4 * 32)) + c / 4 * kQueryPanel, words);
      }
      fence_async_proxy();
      __syncwarp();
      const int warp_row = (done.batch * static_cast<int>(p.T) + done.t0) * p.G / kWarpRows + warp;
      const bool some = __any_sync(~0u, inside[0]);
      if (some && elected()) {
#pragma unroll
        for (int c = 0; c < kPanels; ++c)
          write_box(&maps.out, stage + c * kQueryPanel, 64 * c, 0, 0, 2 * done.kv_head, warp_row);
        commit_boxes();
      }
      continue;
    }
    T* const out = (kTakesItems ? static_cast<T*>(p.out.data) + place.out
                                : static_cast<T*>(p.out.data) + offset_of(p, p.out, done.batch, done.kv_head, 0) +
                                      done.t0 * p.out.row) +
                   8 * (lane % 4);
    T* targets[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) targets[i] = out + own_rows.query(i) * p.out.row + own_rows.head(i) * p.out.group;
#pragma unroll
    for (int n = 0; n < kO; n += 4)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          words[j] = ptx::pack<T>(o[n + j][2 * i] * inverse[i], o[n + j][2 * i + 1] * inverse[i]);
        transpose_quad(words);
        if (inside[i] && 8 * (n + lane % 4) < p.Hv)
          *reinterpret_cast<uint4*>(targets[i] + 8 * n) = make_uint4(words[0], words[1], words[2], words[3]);
      }
  }
  if constexpr (kAhead) wgmma_wait<0>(), bulk_wait();  // products of no use, and results
  if (group == 0) await_turn();                        // the one that is left over
}

// Which biases product_tile_bias cannot take: NaN, and those that rounding would make uncertain.
template <class T>
__device__ __forceinline__ bool is_unfit(uint32_t bits) {
  constexpr uint32_t kMost = std::is_same_v<T, __half> ? 0x6400 : 0x4480;  // kMostInProduct
  return (bits & 0x7fff) > kMost || (bits >> 16 & 0x7fff) > kMost;
}
// Looks at all biases of a call, where none varies over the batch and rows are aligned. A warp a row.
constexpr int kJudges = 128, kJudgeThreads = 256;
template <class T>
__global__ void __launch_bounds__(kJudgeThreads)
    jax_dma_sm90_judge_bias(const __grid_constant__ Problem p, uint32_t* __restrict__ unfit) {
  const int lane = threadIdx.x % 32, heads = p.bias.kv != 0 ? p.K : 1, group = p.bias.group != 0 ? p.G : 1;
  const int rows = heads * group * static_cast<int>(p.T);
  bool found = false;
  for (int row = blockIdx.x * (kJudgeThreads / 32) + threadIdx.x / 32; row < rows;
       row += kJudges * (kJudgeThreads / 32)) {
    const int head = row / static_cast<int>(p.T), t = row - head * static_cast<int>(p.T);
    const uint16_t* const source = static_cast<const uint16_t*>(p.bias.data) + head / group * p.bias.kv +
                                   head % group * p.bias.group + t * p.bias.row;
    int key = 8 * lane;
    for (; key + 8 <= p.S; key += 256) {
      const uint4 eight = __ldg(reinterpret_cast<const uint4*>(source + key));
      found |= is_unfit<T>(eight.x) || is_unfit<T>(eight.y) || is_unfit<T>(eight.z) || is_unfit<T>(eight.w);
    }
    for (; key < p.S; ++key) found |= is_unfit<T>(source[key]);
  }
  const bool any = __syncthreads_or(found);
  if (threadIdx.x == 0) unfit[blockIdx.x] = any;
}

template <class T, int kHeadDim, class MaskKind, class BiasKind, bool kGeneral>
__global__ void __launch_bounds__(ForwardShape<kHeadDim, MaskKind::kind, BiasKind::kind>::kThreads, 1)
    jax_dma_sm90_forward(const __grid_constant__ Problem p, const __grid_constant__ ForwardMaps maps,
                         const __grid_constant__ ForwardPlan plan) {
  if constexpr (std::is_same_v<BiasKind, product_tile_bias>) {
    if (__syncthreads_or(threadIdx.x < kJudges && plan.unfit[threadIdx.x] != 0)) {
      forward_block<T, kHeadDim, MaskKind, tile_bias, kGeneral>(p, maps, plan);
      return;
    }
  }
  forward_block<T, kHeadDim, MaskKind, BiasKind, kGeneral>(p, maps, plan);
}

// Puts together what the splits of a row computed. For a warp a row.
template <class T>
__global__ void __launch_bounds__(128)
    jax_dma_sm90_combine(const __grid_constant__ Problem p, const float* __restrict__ partial, int splits) {
  const int64_t rows = p.B * p.N * p.T, row = blockIdx.x * int64_t{4} + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;
  const float2* const lses = reinterpret_cast<const float2*>(partial + splits * rows * p.Hv) + row;
  float peak = -INFINITY, total = 0.0f;
  for (int s = lane; s < splits; s += 32) peak = fmaxf(peak, lses[s * rows].x);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, distance));
  const float reference = peak == -INFINITY ? 0.0f : peak;
  float2 sum[4] = {};
#pragma unroll 4
  for (int s = 0; s < splits; ++s) {
    const float2 lse = lses[s * rows];
    const float weight = ptx::exp2((lse.x - reference + lse.y) * kLog2e);
    total += weight;
    const float* const source = partial + (s * rows + row) * p.Hv;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int c = 64 * j + 2 * lane;
      if (c >= p.Hv) continue;
      const float2 y = *reinterpret_cast<const float2*>(source + c);
      sum[j].x += weight * y.x, sum[j].y += weight * y.y;
    }
  }
  const int64_t t = row % p.T, head = row / p.T;
  const int g = static_cast<int>(head % p.G), kv_head = static_cast<int>(head / p.G % p.K);
  const int64_t batch = head / p.N;
  const float inverse = total > 0.0f ? 1.0f / total : total == 0.0f ? 0.0f : total;
  T* const out = static_cast<T*>(p.out.data) + offset_of(p, p.out, batch, kv_head, g) + t * p.out.row;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int c = 64 * j + 2 * lane;
    if (c < p.Hv) *reinterpret_cast<uint32_t*>(out + c) = ptx::pack<T>(sum[j].x * inverse, sum[j].y * inverse);
  }
  if (lane == 0)
    *reinterpret_cast<float2*>(static_cast<float*>(p.lse.data) + offset_of(p, p.lse, batch, kv_head, g) +
                               t * p.lse.row) = log_sum_exp(reference, total);
}

}  // namespace jax_dma::sm90
