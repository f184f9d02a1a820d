// Backward attention for Hopper: wgmma, TMA, warp specialisation.
//
// One block per (tile of 128 keys, key/value head, batch entry). It walks the live query tiles of its keys, 64 rows
// (64 / G queries x G heads, head fastest) at a time, with keys along M, so that p^T and ds^T stay in registers as the
// A operand of dv and dk:
//
//   s^T = k q^T, p^T = exp2(logits - lse)       dp^T = v dout^T, ds^T = p^T (dp^T - delta)
//   dv += p^T dout, dk += ds^T q                dq += ds k (f32, bulk reduce-add), dbias = ds summed over what was
//   broadcast
//
// Head dimensions up to 64 have tiles of 128 rows where there is no bias: half as many products, twice as much to do
// between waiting. In their tiles of 64 rows the consumers do not meet: one warpgroup makes all of dq, either one that
// does nothing else, or, where a block has three consumers and 192 keys, each of them in turn.
//
// Head dimensions above 128: backward_wide.cuh.
//
// Warps. 0: TMA of k, v, q, dout, row statistics. 1: mask bits and bias. 2 and 3: dq and dbias of a consumer warpgroup
// each, from shared memory to device memory. 4 to 7 and 8 to 11 (and 12 to 15, of three): 64 keys each, and one half of
// dq: of its channels, or of 128 rows; or 12 to 15: dq.
//
// The products of a tile are issued in the order dp, dv, dk, dq, and s of the next tile behind them: exponentials run
// beside dp, ds and dbias beside dv and dk. dq goes to shared memory beside the next s, and on from there, at 128
// channels, beside the next dv and dk, which need half of shared memory's bandwidth (s, dp and dq need all of it).
// Nothing is in flight from one iteration to the next: ptxas would serialize all products. So it would if they needed
// more registers than there are: look for "serializ" in its output.
//
// Shared memory, head dim 128: k, v 64 KB; two stages of q, dout 64 KB; ds 16 KB; dq on its way out 32 KB; two stages
// of row statistics 1 KB; one or two of bits (<= 1 KB) and bias (64 rows at most: 16 KB, f32 32 KB); dbias on its way
// out.
#pragma once

#include <utility>

#include "../live_tiles.cuh"
#include "../sm80/logits.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace jax_dma::sm90 {

using sm80::Bias;
using sm80::BlockOperands;
using sm80::kLarge;
using sm80::Mask;

constexpr int kRows = 64;        // of a tile, or half of one
constexpr int kKeys = kKeyTile;  // of a block, where it has two consumers and up to 128 channels
constexpr int kQueryParts = kTileRows / kRows;
constexpr int kThreads = 384, kConsumers = 256;  // above 128 channels

// kHalves: how many times 64 rows a tile has. kStagedDQ: whether dq leaves by way of shared memory (of head dimensions
// above 128). kGroups: of consumers, 64 keys each.
template <int kHeadDim, int kHalves = 1, bool kStagedDQ = true, int kGroups = 2>
struct BackwardShape {
  static constexpr bool kWide = kHeadDim > 128;
  static constexpr int kTile = kRows * kHalves;
  static constexpr int kPanels = kHeadDim / 64;  // tiles are panels of 64 channels, rows of 128 bytes, swizzled
  static constexpr int kKeys = kWide ? 64 : 64 * kGroups;  // of a block
  static constexpr int kKVPanel = kKeys * 128, kQPanel = kTile * 128;
  static constexpr int kKVBytes = kPanels * kKVPanel, kQBytes = kPanels * kQPanel;
  static constexpr int kDSPanel = kKeys * 128, kDSBytes = kHalves * kDSPanel;  // panels of 64 rows, [key][row]
  static constexpr bool kTurns = kGroups == 3;                                 // dq is made by the consumers in turn,
  static constexpr bool kApart = kHeadDim == 64 && kHalves == 1 && !kTurns;    // or by a warpgroup of its own,
  static constexpr bool kWholeDQ = kTurns || kApart;                           // all channels of it at once
  static constexpr int kConsumers = 128 * kGroups, kThreads = 128 + kConsumers + (kApart ? 128 : 0);
  // Of a thread: 64 rows x half the channels over a warpgroup, or all channels.
  static constexpr int kDQRegs = kHalves * kHeadDim / (kWholeDQ ? 2 : 4);
  static constexpr int kDQBytes = kTile * kHeadDim / 2 * 4;  // of a warpgroup
  static constexpr int kDoutStages = kWide && kStagedDQ ? 1 : 2;
  // dq on its way out: above 128 channels half of it, and p lies behind ds.
  static constexpr int kDQStage = !kWide ? 2 * kDQBytes : kStagedDQ ? kDQBytes : 0;
  static constexpr int kQ = 2 * kKVBytes, kDS = kQ + (2 + kDoutStages) * kQBytes,
                       kDQ = kDS + (kWide ? 2 : 1) * kDSBytes, kStats = kDQ + kDQStage, kLogits = kStats + 16 * kTile;
};

// How this block's dbias leaves it.
enum class DBias : int {
  kNone,
  kKey,       // bias per key: row sums of ds^T, kept in registers
  kPerQuery,  // sum over the group, one row per query
  kPerRow,    // one row per (query, head)
  kPerHead,   // bias [.., N, 1, S]: sum over queries, one row per head
};

// How dbias of a tile is staged in shared memory: in T, of 1 << n rows that share it, or in f32. kAny: a kernel for all
// that is rare: soft caps, groups whose size is not 1, 2, 4 or 8, intervals of query heads, a bias of another type. The
// others do without that code: their loops fit in the instruction cache, or nearly so. Of biases per key, k2: of query
// heads.
enum class Staging : int { k1, k2, k4, k8, kF32, kAny };

// What the host works out for a call. Offsets and sizes are in bytes of shared memory.
struct BackwardPlan {
  // The blocks of a launch: `heads` (batch entry, key/value head)s from first_head on, `parts` key tiles from
  // first_part on; `chunk` heads are at work together. heads_apart: those of a batch entry do not follow each other,
  // but the batch entries of a head do.
  int heads, first_head, parts, first_part, chunk;
  bool heads_apart;
  // Bits, bias and dbias have a row for each 1 << shift rows of a tile. Bias and dbias are panels of 128 bytes of keys,
  // swizzled as TMA does: 16-byte chunk c of row r lies at c ^ (r % 8).
  int bits_shift, bias_shift, dbias_shift;
  int queries;      // of a tile
  int group_shift;  // log2(G), or -1 if a row's query is not row >> group_shift for groups up to 8
  int bits_at, bits_stage, bias_at, bias_stage, bias_panel, dbias_at, dbias_panel;
  int logit_stages;  // of bits and bias
  int special_at;    // SpecialRow of each row, if there is a bias
  int shared;        // bytes in all
  DBias dbias;
  bool bias_by_tma, bias_aligned, bias_batch;
  bool dbias_by_tma, dbias_f32, dbias_pairs, dbias_batch;  // pairs: two keys at a time are aligned
};

// What the kernels keep of a row's log-sum-exp: +inf where the row sees nothing or is padding; times log2(e) as long as
// that is precise enough to be subtracted from a logit times log2(e); otherwise (with a bias only) such that `large()`
// tells it exactly. Negative ones are above kHideBelow or so, which leaves room for positive ones of any size.
struct RowStat {
  float value;

  __device__ static float of(float lse, bool bias) {
    if (!bias || fabsf(lse) <= kLarge) return lse * kLog2e;
    return lse > 0x1p102f ? -lse : 2.0f * lse;
  }
  __device__ bool blank() const { return value == INFINITY; }
  __device__ bool special() const { return fabsf(value) > 1.5f * kLarge; }
  __device__ float large() const { return value < -0x1p102f ? -value : 0.5f * value; }
};

// What the logits of a row need beside a bias if its log-sum-exp is very large, or if it sees nothing.
struct SpecialRow {
  float base, most;  // logit = min(logit - base, most)
};

// Scratch of the backward pass; rows are in tile order (tile * kRows + row).
struct BackwardScratch {
  float* row_stats;  // [B, K, tiles, 2, kRows]: RowStat, -delta
  float* dq;         // [B, K, tiles, kRows * head dim], fragment order
  int* turn;         // [B, K, tiles, 2]: under `deterministic`, how many key tiles have added to a half of dq
  float* dbias;      // f32, dbias's shape, where several blocks add to one element; otherwise null
  int64_t tiles;     // of 64 rows, per (batch entry, key/value head)
  bool zeroed;       // dq is set to 0 beforehand; otherwise by the block of a head's first keys, while others begin
};

// q and dout: [batch, position, head, channel] in boxes of a tile's rows; k and v: boxes of 128 keys. The batch
// coordinate of a batch entry is its offset divided by `entry`.
struct BackwardMaps {
  CUtensorMap q, dout, k, v, bias, dbias;
  int64_t q_entry, dout_entry, k_entry, v_entry;
};

__device__ __forceinline__ void store_value(void* base, int64_t index, float value, DType dtype) {
  if (dtype == DType::kF32) static_cast<float*>(base)[index] = value;
  else if (dtype == DType::kBF16) static_cast<__nv_bfloat16*>(base)[index] = __float2bfloat16(value);
  else static_cast<__half*>(base)[index] = __float2half(value);
}

// Query (low half) and head (high half) of each row of a tile; rows past queries x heads repeat the last query.
struct Rows {
  uint32_t packed[kTileRows];

  __device__ int query(int row) const { return packed[row] & 0xffff; }
  __device__ int head(int row) const { return packed[row] >> 16; }
};

// The live tiles of a block, whose first key is `key`, backwards from plan tile `start` and then from the last one.
// kIntervals: whether there may be intervals. kBlockKeys: 192 are keys of two plan tiles.
template <int kParts, bool kIntervals, int kBlockKeys = kKeys>
struct Walk {
  int start, words, done = 0, tile = 0, parts = 0;
  uint32_t seen = 0, full = 0;
  bool tile_full = false;

  __device__ Walk(const Problem& p, int start)
      : start(start), words(static_cast<int>(ceil_div(p.query_tiles, kTilesPerWord))) {}

  template <class T>
  __device__ int next(const Problem& p, const BlockOperands<T>& operands, int key) {
    const int tile_queries = queries_per_tile(p.G), queries = tile_queries / kParts;
    while (true) {
      while (parts > 0) {
        const int index = tile * kParts + --parts;
        const int t0 = index * queries, t1 = min(t0 + queries, static_cast<int>(p.T));
        if (t0 >= static_cast<int>(p.T)) continue;
        // Turns count whole tiles, so that every block can tell its own.
        if (p.deterministic || !p.causal || key <= t1 - 1 + static_cast<int>(p.causal_offset())) return index;
      }
      while (seen == 0) {
        if (kIntervals && p.start.present()) skip_hidden(p, operands.bounds, key / kKeyTile, tile_queries);
        if (done > words) return -1;
        TileWord loaded = query_tiles_word(p, operands, key / kKeyTile, word_of(done), tile_queries);
        if (kBlockKeys > kKeyTile) {
          const int second = min(key / kKeyTile + 1, static_cast<int>(p.key_tiles) - 1);
          const TileWord more = query_tiles_word(p, operands, second, word_of(done), tile_queries);
          loaded.seen |= more.seen, loaded.full &= more.full;
        }
        seen = loaded.seen, full = loaded.full;
        const uint32_t begun = ~0u >> (kTilesPerWord - 1 - start % kTilesPerWord);  // up to `start`
        if (done == 0) seen &= begun;
        if (done == words) seen &= ~begun;
        ++done;
      }
      const int bit = 31 - __clz(seen);
      seen &= ~(1u << bit);
      tile_full = (full >> bit) & 1;
      tile = word_of(done - 1) * kTilesPerWord + bit;
      parts = kParts;
    }
  }
  __device__ int word_of(int step) const {
    const int word = start / kTilesPerWord - step;
    return word < 0 ? word + words : word;
  }
  // Goes on to the next word that the intervals reach; there is none where `done` passes `words`.
  __device__ void skip_hidden(const Problem& p, const int32_t* bounds, int key_tile, int tile_queries) {
    const WordRange reached = query_words(p, bounds, key_tile, tile_queries);
    const int word = word_of(done);
    if (reached.first > reached.last) done = words + 1;
    else if (word > reached.last) done += word - reached.last;
    else if (word < reached.first) done += word + words - reached.last;
  }
};

// What a consumer is told about a tile, beside q, dout and row statistics.
struct TileInfo {
  int tile;  // -1: there are no more
  int hidden;
};
// What warps 1 to 3 are told about it.
struct TileJob {
  int tile;   // -1: there are no more
  int turn;   // under `deterministic`: how many key tiles add to its dq before this one
  bool bits;  // whether mask bits hide something
};
constexpr int kTestBits = 1, kTestPosition = 2;  // positions hidden by mask bits; by S, causality or intervals

struct BackwardShared {
  Rows rows;
  TileInfo info[2];
  TileJob jobs[4];  // a tile's is overwritten when its dq and dbias have left shared memory
  uint64_t kv_full, q_full[2], q_free[2], dout_full[2], dout_free[2], logits_full[2], logits_free[2], ds_full, ds_free,
      job_full[4];
  uint64_t dq_full[2], dq_free[2], dbias_full[3], dbias_free[3];  // of a warpgroup
  int q_batch, dout_batch, k_batch, v_batch;                      // coordinates in the tensor maps
  int start;                                                      // plan tile that this block begins with
  int64_t dk, dv;                                                 // offsets of this block's
};

// Mask bits and bias of one tile into shared memory, by one warp.
template <class T, Mask kMask, Bias kBias, int kTile = kRows, int kBlockKeys = kKeys>
__device__ __forceinline__ void load_logits(const Problem& p, const BackwardPlan& plan,
                                            const BlockOperands<T>& operands, const Rows& rows, uint32_t bits_tile,
                                            uint32_t bias_tile, int t0, int key, bool bits) {
  const int lane = threadIdx.x % 32;
  if (kMask == Mask::kBits && bits) {
    const bool per_head = p.bits.group != 0;
#pragma unroll 1
    for (int r = lane; r < kTile >> plan.bits_shift; r += 32) {
      const int row = r << plan.bits_shift, query = rows.query(row), head = per_head ? rows.head(row) : 0;
      const bool inside = t0 + query < static_cast<int>(p.T);
      if constexpr (kBlockKeys == 192) {  // six words
        const uint32_t* const words = operands.bits + (inside ? (t0 + query) * p.bits.row + head * p.bits.group : 0);
        const uint32_t target = bits_tile + 32 * r, same = p.bits.col == 0 && inside ? *words : 0;
#pragma unroll
        for (int i = 0; i < 6; i += 2) {
          const int word = key / 32 + i;
          const bool there = inside && word < 4 * static_cast<int>(p.key_tiles);
          if (p.bits.col != 0)
            asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(target + 4 * i),
                         "l"(words + (there ? word : 0)), "r"(there ? 8 : 0)
                         : "memory");
          else asm volatile("st.shared.v2.u32 [%0], {%1, %1};" ::"r"(target + 4 * i), "r"(same) : "memory");
        }
        continue;
      }
      const uint32_t* source =
          operands.bits +
          (inside ? (t0 + query) * p.bits.row + head * p.bits.group + (key / kKeys * 4) * p.bits.col : 0);
      if (p.bits.col != 0) {
        ptx::copy_async_16(bits_tile + 16 * r, source, inside ? 16 : 0);
      } else {  // one word stands for all keys
        const uint32_t word = inside ? *source : 0;
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(bits_tile + 16 * r), "r"(word) : "memory");
      }
    }
  }
  if (kBias == Bias::kTile && !plan.bias_by_tma) {
    const bool per_head = p.bias.group != 0;
    const int bytes = p.bias_dtype == DType::kF32 ? 4 : 2, per_chunk = 16 / bytes, row_shift = bytes == 4 ? 5 : 4;
    const int chunk = lane & ((1 << row_shift) - 1), c = key + chunk * per_chunk;
    const int keys = max(min(static_cast<int>(p.S) - c, per_chunk), 0);
#pragma unroll 2
    for (int r = lane >> row_shift; r < kTile >> plan.bias_shift; r += 32 >> row_shift) {
      const int row = r << plan.bias_shift, query = rows.query(row), head = per_head ? rows.head(row) : 0;
      const int valid = t0 + query < static_cast<int>(p.T) ? keys : 0;
      const char* source =
          operands.bias + (valid ? ((t0 + query) * p.bias.row + head * p.bias.group + c * p.bias.col) * bytes : 0);
      const uint32_t target = bias_tile + chunk / 8 * plan.bias_panel + r * 128 + (((chunk ^ r) & 7) << 4);
      if (plan.bias_aligned) {
        ptx::copy_async_16(target, source, valid * bytes);
      } else {
#pragma unroll 1
        for (int e = 0; e < per_chunk; ++e) {
          if (bytes == 4) {
            const uint32_t value = e < valid ? reinterpret_cast<const uint32_t*>(source)[e * p.bias.col] : 0;
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(target + 4 * e), "r"(value) : "memory");
          } else {
            const uint16_t value = e < valid ? reinterpret_cast<const uint16_t*>(source)[e * p.bias.col] : 0;
            asm volatile("st.shared.u16 [%0], %1;" ::"r"(target + 2 * e), "h"(value) : "memory");
          }
        }
      }
    }
  }
}

// Four neighbouring elements, 16-byte aligned.
__device__ __forceinline__ void reduce_add(float* target, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}

// The lane, as something new in each iteration of a loop: addresses made of it are not kept in registers meanwhile.
__device__ __forceinline__ int fresh_lane() {
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));
  return lane;
}

// 64 rows of an accumulator of keys x rows.
template <int kN>
__device__ __forceinline__ float (&half_of(float (&x)[kN], int half))[32] {
  return reinterpret_cast<float (&)[32]>(x[32 * half]);
}

// Where in a tile, in units of 16 bytes, a lane's share begins. Of ds: matrices of 8 keys x 8 rows, of which lane l
// gives the address of key l % 8 of matrix l / 8.
__device__ __forceinline__ int place_in_ds(int lane) {
  return (lane / 8 % 2 * 8 + lane % 8) * 8 + ((lane / 16) ^ (lane % 8));
}
// Of dbias, whose rows stand for 1 << shift rows each: transposed, so any order of rows will do.
__device__ __forceinline__ int place_in_dbias(int lane, int shift) {
  const int n = lane % 8, block = shift == 3 ? 0 : lane / 16;
  const int row = 8 * block + (shift == 0   ? n
                               : shift == 2 ? 4 * (n % 2) + 2 * (n / 2 % 2) + n / 4
                                            : 4 * (n % 2) + n / 2);
  return row * 8 + ((lane / 8 % 2) ^ (row & 7));
}
// Of bias, where two rows share one of it: of a pair of rows that ldmatrix gives, the first is made to be that of x's
// pair 2 i, the second of 2 i + 1.
__device__ __forceinline__ int place_in_bias(int lane, int shift) {
  const int row = (lane / 8 * 16 + lane % 2 * 8 + lane % 8 / 2 * 2) >> shift;
  return row * 8 + (row & 7);
}

// Makes pairs of biases -inf where mask bits hide: of two rows and one of the thread's two keys each, either 2 i and
// 2 i + 1 of eight rows, or (kPairs) those of two times eight rows. `key`: the first of this warp's 16, in the tile.
template <class Element, bool kPairs, int kRowBytes>
__device__ __forceinline__ void hide_pairs(uint32_t (&pairs)[kPairs ? 8 : 16], uint32_t bits_tile, int shift, int key) {
  constexpr uint32_t kInfinities = std::is_same_v<Element, __half> ? 0xfc00fc00 : 0xff80ff80;
  const int lane = fresh_lane(), step = shift > 3 ? 0 : 8 * kRowBytes >> shift;  // between rows that are 8 apart
  const uint32_t first = bits_tile + key / 32 * 4 + ((2 * (lane % 4)) >> shift) * kRowBytes;
  const uint32_t bytes = 0xcc88 + key % 32 / 8 * 0x1111;  // prmt: copies of the top bits of these
  uint32_t seen[2];
  const auto look = [&](uint32_t even, uint32_t odd) {
    even = ptx::load_shared_word(even) << (7 - lane / 4), odd = ptx::load_shared_word(odd) << (7 - lane / 4);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      asm("prmt.b32 %0, %1, %2, %3;" : "=r"(seen[h]) : "r"(even), "r"(odd), "r"(bytes + h * 0x1111));
  };
  const auto hide = [&](int i, int h) {
    uint32_t& pair = pairs[kPairs ? 4 * h + i : 2 * i + h];
    pair = (pair & seen[h]) | (kInfinities & ~seen[h]);
  };
  if (step == 0) {  // the same for all rows
    look(first, first);
#pragma unroll
    for (int i = 0; i < (kPairs ? 4 : 8); ++i) hide(i, 0), hide(i, 1);
    return;
  }
#pragma unroll
  for (int i = 0; i < (kPairs ? 4 : 8); ++i) {
    if (kPairs) look(first + 2 * i * step, first + (2 * i + 1) * step);
    else look(first + i * step, first + i * step + (shift == 0 ? kRowBytes : 0));
    hide(i, 0), hide(i, 1);
  }
}

// How biases of a thread's two keys are unpacked where a mask is the same for all queries: selectors of byte
// permutations, of a pair's lower half and, 16 bits further up, of its upper half. What is hidden gets -inf.
template <class Element>
struct KeySelectors {
  static constexpr bool kHalf = std::is_same_v<Element, __half>;
  static constexpr uint32_t kInfinity = kHalf ? 0xfc00fc00 : 0x0000ff80;
  uint32_t of_key[2];

  __device__ __forceinline__ void set(int h, bool seen) {
    if (kHalf) of_key[h] = seen ? 0x3210 : 0x5454;
    else of_key[h] = seen ? 0x32661066 : 0x54665466;
  }
  __device__ __forceinline__ float2 unpack(uint32_t pair, int h) const {
    if constexpr (kHalf) return ptx::unpack_bits<__half>(__byte_perm(pair, kInfinity, of_key[h]));
    return make_float2(__uint_as_float(__byte_perm(pair, kInfinity, of_key[h])),
                       __uint_as_float(__byte_perm(pair, kInfinity, of_key[h] >> 16)));
  }
};

// x = x * factor + bias^T, from a tile in shared memory. `key`: the first of this warp's 16, in the tile. kPairs: rows
// 2 i and 2 i + 1 share a row of bias, and `place` is the lane's. hide: whether mask bits are to be looked at.
// kByKey: `selectors` say which keys are seen.
template <class T, bool kGeneral, bool kPairs, bool kByKey, int kBitsBytes>
__device__ __forceinline__ void add_bias(float (&x)[32], const Problem& p, const BackwardPlan& plan, uint32_t tile,
                                         int key, int place, float factor, bool hide, uint32_t bits_tile,
                                         const KeySelectors<T>& selectors) {
  const int lane = fresh_lane(), shift = plan.bias_shift;
  if (kGeneral && p.bias_dtype == DType::kF32) {
    tile += key / 32 * plan.bias_panel;
#pragma unroll
    for (int c = 0; c < 8; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = (8 * c + 2 * (lane % 4) + (e & 1)) >> shift, k = key % 32 + lane / 4 + 4 * (e & 2);
        float value;
        asm volatile("ld.shared.f32 %0, [%1];"
                     : "=f"(value)
                     : "r"(tile + r * 128 + (((k / 4) ^ (r & 7)) << 4) + (k % 4) * 4));
        x[4 * c + e] = fmaf(x[4 * c + e], factor, value);
      }
    return;
  }
  // ldmatrix gives each lane the address of a row of 8 keys and, transposed, two rows of one key.
  const auto add = [&](auto element) {
    using Element = decltype(element);
    const uint32_t panel = tile + key / 64 * plan.bias_panel;
    uint32_t pairs[kPairs ? 8 : 16];
    if constexpr (kPairs) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        ptx::load_matrix_transposed(reinterpret_cast<uint32_t (&)[4]>(pairs[4 * h]),
                                    panel + ((place ^ (key % 64 / 8 + h)) << 4));
    } else {
      const int chunk = key % 64 / 8 + (lane / 8) % 2;
#pragma unroll
      for (int c = 0; c < 8; c += 2) {
        const int r = (8 * (c + lane / 16) + lane % 8) >> shift;
        ptx::load_matrix_transposed(reinterpret_cast<uint32_t (&)[4]>(pairs[2 * c]),
                                    panel + r * 128 + ((chunk ^ (r & 7)) << 4));
      }
    }
    if (!kGeneral && hide) hide_pairs<Element, kPairs, kBitsBytes>(pairs, bits_tile, plan.bits_shift, key);
    if constexpr (kPairs) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 b = ptx::unpack_bits<Element>(pairs[4 * h + i]);
          float* const y = x + 8 * i + 2 * h;
          y[0] = fmaf(y[0], factor, b.x), y[1] = fmaf(y[1], factor, b.x);
          y[4] = fmaf(y[4], factor, b.y), y[5] = fmaf(y[5], factor, b.y);
        }
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float2 b;
        if constexpr (kByKey) b = selectors.unpack(pairs[i], i % 2);
        else b = ptx::unpack_bits<Element>(pairs[i]);
        x[2 * i] = fmaf(x[2 * i], factor, b.x), x[2 * i + 1] = fmaf(x[2 * i + 1], factor, b.y);
      }
    }
  };
  if constexpr (!kGeneral) add(T());
  else if (p.bias_dtype == DType::kBF16) add(__nv_bfloat16());
  else add(__half());
}

// The queries that see each of a thread's two keys: first <= query < last.
struct SeenBy {
  int first[2], last[2];

  // `key`: the first of the two. Intervals that differ among the heads of a group are left to the user.
  template <Mask kMask, class T>
  __device__ __forceinline__ static SeenBy of(const Problem& p, const BlockOperands<T>& operands, int key) {
    constexpr int kNever = 1 << 30;
    SeenBy seen;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int s = key + 8 * h, length = static_cast<int>(p.T);
      seen.first[h] = p.causal ? s - static_cast<int>(p.causal_offset()) : 0, seen.last[h] = length;
      if (s >= static_cast<int>(p.S)) {
        seen.first[h] = kNever;
      } else if (kMask != Mask::kNone && p.start.present() && p.start.group == 0) {
        seen.first[h] = min(max(seen.first[h], operands.start[s]), kNever);
        seen.last[h] = max(min(operands.end[s], length), 0);
      }
    }
    return seen;
  }
};

// Sets x to `value` where S, causality or intervals hide a position. `key`: the first of the thread's two keys;
// `first_row`: of x, in the tile.
template <Mask kMask, bool kGeneral, class T, int kN>
__device__ __forceinline__ void hide_positions(float (&x)[kN], float value, const Problem& p, const BackwardPlan& plan,
                                               const BlockOperands<T>& operands, const Rows& rows, const SeenBy& seen,
                                               int t0, int key, int first_row = 0) {
  const bool per_head = kMask != Mask::kNone && p.start.present() && p.start.group != 0;
  const int lane = threadIdx.x % 32, shift = plan.group_shift;
  if (!kGeneral || (shift >= 0 && !per_head)) {
    t0 += first_row >> shift;
    // Row 8 c + 2 (lane % 4) + e is of query (8 c >> shift) + (2 (lane % 4) + e >> shift): a range of c sees a key.
    const auto range = [&](int h, int e) {
      constexpr int kRounds = kN / 4;
      const int query = t0 + ((2 * (lane % 4) + e) >> shift), round = (8 >> shift) - 1;
      const auto below = [&](int t) { return (1u << min(max((t - query + round) >> (3 - shift), 0), kRounds)) - 1; };
      return (kMask == Mask::kNone ? (1u << kRounds) - 1 : below(seen.last[h])) & ~below(seen.first[h]);
    };
    const auto hide = [&](auto alike) {
      constexpr bool kAlike = decltype(alike)::value;  // two neighbouring rows are of one query
      constexpr uint32_t kAll = (1u << kN / 4) - 1;
      uint32_t visible[2][2], all = kAll;
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int e = 0; e < 2; ++e) all &= visible[h][e] = kAlike && e == 1 ? visible[h][0] : range(h, e);
      if (__all_sync(~0u, all == kAll)) return;
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
          for (int c = 0; c < kN / 4; ++c)
            if ((visible[h][e] & (1u << c)) == 0) x[4 * c + 2 * h + e] = value;
    };
    if (kMask == Mask::kIntervals && shift > 0) hide(std::true_type());
    else hide(std::false_type());
    return;
  }
  uint32_t outside = 0;  // bit i: x[i] is to be hidden
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int s = key + 8 * h;
#pragma unroll 1
    for (int c = 0; c < kN / 2; ++c) {
      const int row = first_row + 8 * (c / 2) + 2 * (lane % 4) + c % 2, t = t0 + rows.query(row);
      int first = seen.first[h], last = seen.last[h];
      if (per_head && s < static_cast<int>(p.S)) {
        const int64_t at = s + rows.head(row) * p.start.group;
        first = max(first, operands.start[at]), last = operands.end[at];
      }
      if (t < first || (kMask != Mask::kNone && t >= last)) outside |= 1u << (4 * (c / 2) + 2 * h + c % 2);
    }
  }
#pragma unroll
  for (int c = 0; c < kN; ++c)
    if (outside & (1u << c)) x[c] = value;
}

// Sums of ds^T over 1 << shift neighbouring rows of a thread's accumulators: over pairs in the thread, over quads and
// octets of rows with the lane's neighbours, where a lane keeps one sum of the two that it and its neighbour began.
struct GroupSums {
  const float (&ds)[32];

  __device__ __forceinline__ static float exchange(float first, float second, int lane_bit) {
    const bool upper = (threadIdx.x & lane_bit) != 0;
    const float received = __shfl_xor_sync(~0u, upper ? first : second, lane_bit);
    return (upper ? second : first) + received;
  }
  // h: which of the thread's two keys. With j = lane % 4:
  __device__ __forceinline__ float pair(int i, int h) const {
    return ds[4 * i + 2 * h] + ds[4 * i + 2 * h + 1];
  }  // query 4 i + j
  __device__ __forceinline__ float quad(int i, int h) const {  // query 4 i + 2 (j % 2) + j / 2
    return exchange(pair(2 * i, h), pair(2 * i + 1, h), 1);
  }
  __device__ __forceinline__ float octet(int i, int h) const {
    return exchange(quad(2 * i, h), quad(2 * i + 1, h), 2);
  }  // query 4 i + j
};

__device__ __forceinline__ void store_matrix_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                                        uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// dbias of a tile into shared memory, [row][key], 16 bits: a warp's 16 keys, the first of which is `key` in the panel.
template <class Element>
__device__ __forceinline__ void stage_dbias_16(const float (&ds)[32], uint32_t panel, int key, int shift, int place) {
  const GroupSums sums{ds};
  const uint32_t first = panel + ((place ^ (key / 8)) << 4);
  if (shift == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const d = ds + 8 * i;
      store_matrix_transposed(first + i * 2048, ptx::pack<Element>(d[0], d[1]), ptx::pack<Element>(d[2], d[3]),
                              ptx::pack<Element>(d[4], d[5]), ptx::pack<Element>(d[6], d[7]));
    }
  } else if (shift == 1) {
    const auto word = [&](int i, int h) { return ptx::pack<Element>(sums.pair(2 * i, h), sums.pair(2 * i + 1, h)); };
#pragma unroll
    for (int i = 0; i < 4; i += 2)
      store_matrix_transposed(first + i * 1024, word(i, 0), word(i, 1), word(i + 1, 0), word(i + 1, 1));
  } else if (shift == 2) {
    const auto word = [&](int i, int h) { return ptx::pack<Element>(sums.quad(2 * i, h), sums.quad(2 * i + 1, h)); };
    store_matrix_transposed(first, word(0, 0), word(0, 1), word(1, 0), word(1, 1));
  } else {
    const auto word = [&](int h) { return ptx::pack<Element>(sums.octet(0, h), sums.octet(1, h)); };
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(first), "r"(word(0)),
                 "r"(word(1))
                 : "memory");
  }
}

// use(0), ..., use(kCount - 1), as constants.
template <int kCount, class Use, int... i>
__device__ __forceinline__ void for_each(const Use& use, std::integer_sequence<int, i...>) {
  (use(std::integral_constant<int, i>()), ...);
}
template <int kCount, class Use>
__device__ __forceinline__ void for_each(const Use& use) {
  for_each<kCount>(use, std::make_integer_sequence<int, kCount>());
}

// The same in f32; `key` counts from the first of the tile, and so do the panels.
__device__ __forceinline__ void stage_dbias_32(const float (&ds)[32], uint32_t panels, int panel_bytes, int key,
                                               int shift) {
  const GroupSums sums{ds};
  const int lane = fresh_lane(), j = lane % 4;
  // Rows that are 8 apart lie 1 KB apart.
  const auto address = [&](int row, int h) {
    const int k = key % 32 + lane / 4 + 8 * h;
    return panels + key / 32 * panel_bytes + row * 128 + (((k / 4) ^ (row & 7)) << 4) + k % 4 * 4;
  };
  const auto put = [](uint32_t first, auto octet, float value) {
    asm volatile("st.shared.f32 [%0 + %1], %2;" ::"r"(first), "n"(octet.value * 1024), "f"(value) : "memory");
  };
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (shift == 0) {
      const uint32_t even = address(2 * j, h), odd = address(2 * j + 1, h);
      for_each<8>([&](auto c) { put(even, c, ds[4 * c.value + 2 * h]), put(odd, c, ds[4 * c.value + 2 * h + 1]); });
    } else if (shift == 1) {
      const uint32_t first = address(j, h), second = address(4 + j, h);
      for_each<4>(
          [&](auto c) { put(first, c, sums.pair(2 * c.value, h)), put(second, c, sums.pair(2 * c.value + 1, h)); });
    } else if (shift == 2) {
      const int row = 2 * (j % 2) + j / 2;
      const uint32_t first = address(row, h), second = address(4 + row, h);
      for_each<2>(
          [&](auto c) { put(first, c, sums.quad(2 * c.value, h)), put(second, c, sums.quad(2 * c.value + 1, h)); });
    } else {
      const std::integral_constant<int, 0> only;
      put(address(j, h), only, sums.octet(0, h)), put(address(4 + j, h), only, sums.octet(1, h));
    }
  }
}

// The descriptor of an operand that lies `bytes` further on.
__device__ __forceinline__ uint64_t advance(uint64_t operand, int bytes) {
  return (operand & ~uint64_t{0xffffffff}) | (static_cast<uint32_t>(operand) + (bytes >> 4));
}

__device__ __forceinline__ void bulk_store(float* target, uint32_t source, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Stores a box of a map of five axes, or adds it to what is there.
__device__ __forceinline__ void store_box(const CUtensorMap* map, uint32_t source, bool add, int c0, int c2, int c3,
                                          int c4) {
  if (add)
    asm volatile(
        "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
        "r"(source), "r"(c0), "r"(0), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
  else
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
                 "r"(source), "r"(c0), "r"(0), "r"(c2), "r"(c3), "r"(c4)
                 : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Where dbias goes that TMA cannot address or that is summed over more: rows of this block's 128 keys, from ds in
// shared memory. By two warps, each thread with two neighbouring keys.
template <class T>
struct DBiasWriter {
  const Problem& p;
  const Rows& rows;
  DBias mode;
  char* direct;   // in bias's dtype, at (batch, kv_head)
  float* summed;  // or null
  int key;
  bool pairs;  // 4-byte stores of two keys are aligned

  __device__ void put(int64_t index, float value) const {
    if (summed != nullptr) ptx::reduce_add(summed + index, value);
    else store_value(direct, index, value, p.bias_dtype);
  }
  __device__ void put2(int64_t row, int column, float a, float b) const {
    const int64_t index = row + key + column;
    const int inside = static_cast<int>(p.S) - key - column;
    if (inside >= 2 && summed == nullptr && pairs) {
      if (p.bias_dtype == DType::kF32) *reinterpret_cast<float2*>(reinterpret_cast<float*>(direct) + index) = {a, b};
      else
        *reinterpret_cast<uint32_t*>(reinterpret_cast<uint16_t*>(direct) + index) =
            p.bias_dtype == DType::kBF16 ? ptx::pack<__nv_bfloat16>(a, b) : ptx::pack<__half>(a, b);
      return;
    }
    if (inside >= 1) put(index, a);
    if (inside >= 2) put(index + 1, b);
  }
  __device__ static uint32_t address(uint32_t ds, int k, int row) {
    return ds + k * 128 + (((row / 8) ^ (k & 7)) << 4) + (row % 8) * 2;
  }
  __device__ static float element(uint32_t ds, int k, int row) {
    uint16_t bits;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address(ds, k, row)));
    return ptx::unpack<T>(bits).x;
  }

  // `thread` is 0 to 63.
  __device__ void write(uint32_t ds, int t0, int thread) const {
    const int queries = min(queries_per_tile(p.G) / kQueryParts, static_cast<int>(p.T) - t0), count = queries * p.G;
    if (p.dbias.col == 0) {
      if (thread < 32) write_row_sums(ds, t0, queries, thread);
      return;
    }
    const int k = 2 * thread;
    if (mode == DBias::kPerHead) {
#pragma unroll 1
      for (int g = 0; g < p.G; ++g) {
        float a = 0.0f, b = 0.0f;
        for (int q = 0; q < queries; ++q) a += element(ds, k, q * p.G + g), b += element(ds, k + 1, q * p.G + g);
        put2(g * p.dbias.group, k, a, b);
      }
      return;
    }
    if (pairs && key + kKeys <= p.S) {
      if (summed != nullptr)
        write_rows(summed, ds, t0, count, k, [](float* at, float a, float b) {
          asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(at), "f"(a), "f"(b) : "memory");
        });
      else if (p.bias_dtype == DType::kF32)
        write_rows(reinterpret_cast<float*>(direct), ds, t0, count, k,
                   [](float* at, float a, float b) { *reinterpret_cast<float2*>(at) = {a, b}; });
      else if (p.bias_dtype == DType::kBF16)
        write_rows(reinterpret_cast<uint16_t*>(direct), ds, t0, count, k, [](uint16_t* at, float a, float b) {
          *reinterpret_cast<uint32_t*>(at) = ptx::pack<__nv_bfloat16>(a, b);
        });
      else
        write_rows(reinterpret_cast<uint16_t*>(direct), ds, t0, count, k,
                   [](uint16_t* at, float a, float b) { *reinterpret_cast<uint32_t*>(at) = ptx::pack<__half>(a, b); });
      return;
    }
    const int step = mode == DBias::kPerQuery ? p.G : 1;
#pragma unroll 1
    for (int r = 0; r < count; r += step) {
      float a = 0.0f, b = 0.0f;
#pragma unroll 1
      for (int j = r; j < r + step; ++j) a += element(ds, k, j), b += element(ds, k + 1, j);
      put2((t0 + rows.query(r)) * p.dbias.row + (step == 1 ? rows.head(r) * p.dbias.group : 0), k, a, b);
    }
  }

  // All rows of the tile, where pairs are aligned and inside.
  template <class Element, class Store>
  __device__ __forceinline__ void write_rows(Element* base, uint32_t ds, int t0, int count, int k, Store store) const {
    // In order; a sum is complete after `step` rows.
    const int step = mode == DBias::kPerQuery ? p.G : 1;
    const int64_t next_query = p.dbias.row - int64_t{step == 1 ? p.G - 1 : 0} * p.dbias.group;
    Element* at = base + t0 * p.dbias.row + key + k;
    int left = step, heads_left = p.G;
    float a = 0.0f, b = 0.0f;
#pragma unroll 1
    for (int c = 0; 8 * c < count; ++c) {
      uint32_t x[4], y[4];
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                   : "r"(address(ds, k, 8 * c)));
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(y[0]), "=r"(y[1]), "=r"(y[2]), "=r"(y[3])
                   : "r"(address(ds, k + 1, 8 * c)));
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 u = ptx::unpack<T>(x[j / 2]), v = ptx::unpack<T>(y[j / 2]);
        a += j % 2 ? u.y : u.x, b += j % 2 ? v.y : v.x;
        if (--left == 0) {
          if (8 * c + j < count) store(at, a, b);
          left = step, a = b = 0.0f;
          if (step == 1 && --heads_left != 0) at += p.dbias.group;
          else at += next_query, heads_left = p.G;
        }
      }
    }
  }

  // A bias that is the same for all keys: one warp sums over them, in a fixed order.
  __device__ void write_row_sums(uint32_t ds, int t0, int queries, int lane) const {
    const int sums = mode == DBias::kPerQuery ? queries : mode == DBias::kPerRow ? queries * p.G : p.G;
    const int summands = mode == DBias::kPerQuery ? p.G : mode == DBias::kPerRow ? 1 : queries;
    const int first = mode == DBias::kPerQuery ? p.G : 1, step = mode == DBias::kPerHead ? p.G : 1;
#pragma unroll 1
    for (int r = 0; r < sums; ++r) {
      float sum = 0.0f;
#pragma unroll 1
      for (int j = 0; j < summands; ++j)
#pragma unroll
        for (int i = 0; i < kKeys / 32; ++i) sum += element(ds, lane + 32 * i, r * first + j * step);
      for (int mask = 16; mask > 0; mask >>= 1) sum += __shfl_xor_sync(~0u, sum, mask);
      const int t = t0 + (mode == DBias::kPerQuery ? r : mode == DBias::kPerRow ? rows.query(r) : 0);
      const int g = mode == DBias::kPerRow ? rows.head(r) : mode == DBias::kPerHead ? r : 0;
      if (lane == 0) put(t * p.dbias.row + g * p.dbias.group, sum);
    }
  }
};

// Word j of lane 4 i + k becomes word k of lane 4 i + j.
__device__ __forceinline__ void transpose_words(uint32_t (&words)[4]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = (lane & bit) != 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j & bit) continue;
      const uint32_t received = __shfl_xor_sync(~0u, upper ? words[j] : words[j + bit], bit);
      words[j] = upper ? received : words[j];
      words[j + bit] = upper ? words[j + bit] : received;
    }
  }
}

// Blocks of one head begin where the newest of them is, so that q, dout and dq are in the L2 cache: the head's first
// two turns, which nothing else uses then, tell which block that is and its plan tile. The order of additions to dq is
// arbitrary anyway.
__device__ __forceinline__ int first_tile(const Problem& p, const BackwardScratch& scratch, int64_t head,
                                          int key_tile) {
  const int last = static_cast<int>(p.query_tiles) - 1;
  if (p.deterministic) return last;
  if (scratch.dbias != nullptr)  // apart, because they add to the same dbias
    return static_cast<int>((p.dbias.kv != 0 ? head / p.K : head) % p.query_tiles);
  int* const front = scratch.turn + 2 * head * scratch.tiles;
  if (atomicMax(front, key_tile + 1) == 0) return last;
  const int tile = *const_cast<volatile int*>(front + 1);
  return tile == 0 ? last : tile - 1;
}

// Blocks of a sliding window are all at the same tile, so that q, dout and dq are in the L2 cache, if each begins with
// the query of its window that is a multiple of the window's width. That tile, or -1 if this key tile and the one
// before it are not seen by equally many queries.
__device__ __forceinline__ int first_tile_of_window(const Problem& p, int64_t head, int key_tile) {
  const int32_t* const bounds =
      static_cast<const int32_t*>(p.bounds.data) + offset_of(p, p.bounds, head / p.K, static_cast<int>(head % p.K), 0);
  const auto queries_of = [&](int tile) {  // that see a key tile: from x up to y
    const int first = p.causal ? tile * kKeyTile - static_cast<int>(p.causal_offset()) : 0;
    return make_int2(max(bounds[tile], max(first, 0)), min(bounds[tile + p.bounds.row], static_cast<int>(p.T)));
  };
  const int2 own = queries_of(key_tile), other = queries_of(max(key_tile - 1, 0));
  if (own.x >= own.y || other.x >= other.y || own.y - own.x != other.y - other.x) return -1;
  const int last = own.y - 1;
  return (last - last % (own.y - own.x)) / queries_per_tile(p.G);
}

template <class T, int kHeadDim, class MaskKind, class BiasKind, Staging kStaging, int kHalves = 1, int kGroups = 2>
__global__ void __launch_bounds__(BackwardShape<kHeadDim, kHalves, true, kGroups>::kThreads, 1)
    jax_dma_sm90_backward(const __grid_constant__ Problem p, const __grid_constant__ BackwardMaps maps,
                          const __grid_constant__ BackwardScratch scratch, const __grid_constant__ BackwardPlan plan) {
  using Shape = BackwardShape<kHeadDim, kHalves, true, kGroups>;
  constexpr int kKeys = Shape::kKeys, kConsumers = Shape::kConsumers, kThreads = Shape::kThreads;
  constexpr int kTile = Shape::kTile, kParts = kTileRows / kTile, kBitsBytes = kKeys > 128 ? 32 : 16;
  constexpr bool kTurns = Shape::kTurns, kApart = Shape::kApart, kWholeDQ = Shape::kWholeDQ;
  constexpr Mask kMask = MaskKind::kind;
  constexpr Bias kBias = BiasKind::kind;
  constexpr bool kGeneral = kStaging == Staging::kAny;
  // dbias is of bias's shape.
  constexpr bool kBiasPairs =
      kBias == Bias::kTile && (kStaging == Staging::k2 || kStaging == Staging::k4 || kStaging == Staging::k8);
  // Whether rows of even and odd number in a tile may have biases per key of their own.
  constexpr int kRowKinds = kGeneral || kStaging == Staging::k2 ? 2 : 1;
  static_assert(kHalves == 1 || kBias != Bias::kTile);
  static_assert(!kTurns || (kBias == Bias::kTile && kMask != Mask::kIntervals && !kGeneral));
  constexpr int kPanels = Shape::kPanels, kQPanel = Shape::kQPanel, kKVPanel = Shape::kKVPanel;
  constexpr bool kLogits = kMask == Mask::kBits || kBias == Bias::kTile;  // something is loaded for each tile of logits
  constexpr bool kFewRegisters = kHeadDim * kHalves == 128;
  // Where registers are short ds is made of p as the products see it, in 16 bits.
  constexpr bool kPackedP = kFewRegisters || kTurns;
  constexpr bool kEarlyDV = kHeadDim == 128 && !kGeneral;  // dv is issued before dp is waited for
  constexpr bool kByKey = kTurns && kMask == Mask::kNone;  // a mask, if there is one, is the same for all queries
  constexpr bool kHideFirst = kBias != Bias::kNone;        // before the exponentials
  // dq of a tile is announced, to the warp that adds it, together with ds of the next one. Not where that one may have
  // to wait, for a soft cap, until the same warp has read dbias.
  constexpr bool kLateDQ = kFewRegisters && !(kGeneral && kBias == Bias::kTile);
  constexpr bool kDeltaFirst = kApart && kBias == Bias::kTile;  // dp begins with -delta
  // A block is launched with 168 registers for each of 384 threads, or 128 of 512; more would be waited for forever.
  constexpr int kProducerRegs = kTurns ? 32 : kApart ? 64 : !kFewRegisters ? 88 : kBias == Bias::kTile ? 40 : 56;
  constexpr int kConsumerRegs = kTurns ? 160 : kApart ? 192 : (3 * 168 - kProducerRegs) / 2, kDQWarpRegs = 64;

  extern __shared__ __align__(1024) char dynamic[];
  __shared__ BackwardShared shared;
  __shared__ BlockOperands<T> operands;
  const uint32_t k_tile = ptx::shared_address(dynamic), v_tile = k_tile + Shape::kKVBytes,
                 q_tiles = v_tile + Shape::kKVBytes, dout_tiles = q_tiles + 2 * Shape::kQBytes,
                 ds_tile = k_tile + Shape::kDS;
  float* const stats = reinterpret_cast<float*>(dynamic + Shape::kStats);  // [stage][half][log-sum-exp, -delta][row]
  // Where the block's i-th tile of q and of dout lies.
  const auto q_at = [&](int i) { return q_tiles + (i & 1) * Shape::kQBytes; };
  const auto dout_at = [&](int i) { return dout_tiles + (i & 1) * Shape::kQBytes; };

  // Some heads at a time, so that what they share stays in the L2 cache, and of these the first keys first: under a
  // causal mask the most queries see them, and a long block that starts late is waited for.
  const int chunk = blockIdx.x / (plan.chunk * plan.parts), block = blockIdx.x % (plan.chunk * plan.parts);
  const int width = min(plan.chunk, plan.heads - chunk * plan.chunk);
  const int key_tile = plan.first_part + block / width, at = plan.first_head + chunk * plan.chunk + block % width;
  const int entries = static_cast<int>(p.B), head = plan.heads_apart ? at % entries * p.K + at / entries : at;
  const int key = key_tile * kKeys, queries = plan.queries;
  // dbias of a tile leaves by TMA, or is read from ds.
  const bool deterministic = !kTurns && p.deterministic;
  const bool staged_dbias = kBias == Bias::kTile && plan.dbias_by_tma,
             read_dbias = !kTurns && kBias == Bias::kTile && plan.dbias != DBias::kNone && !plan.dbias_by_tma;

  // A block begins with little code a thread: what runs once is not in the instruction cache.
  const int batch = head / static_cast<int>(p.K), kv_head = head % static_cast<int>(p.K);
  const auto offset = [&](const View& view) { return offset_of(p, view, batch, kv_head, 0); };
  if (threadIdx.x == 0) {
    barrier_init(&shared.ds_free, kWholeDQ ? 4 : 8), barrier_init(&shared.ds_full, 4 * kGroups);
    for (int i = 0; i < 4; ++i) barrier_init(&shared.job_full[i], 1);
    for (int i = 0; i < 2; ++i) {
      barrier_init(&shared.q_full[i], 1), barrier_init(&shared.dout_full[i], 1);
      barrier_init(&shared.q_free[i], 4 * kGroups), barrier_init(&shared.dout_free[i], 4 * kGroups);
      barrier_init(&shared.logits_full[i], 64 + (plan.bias_by_tma ? 1 : 0)),
          barrier_init(&shared.logits_free[i], 4 * kGroups);
      barrier_init(&shared.dq_full[i], 4), barrier_init(&shared.dq_free[i], 1);
    }
    for (int i = 0; i < kGroups; ++i)
      barrier_init(&shared.dbias_full[i], staged_dbias ? 4 : 8),
          barrier_init(&shared.dbias_free[i], staged_dbias ? 1 : 2);
    barrier_init_fence();
  } else if (threadIdx.x == 64) {  // k and v
    barrier_init(&shared.kv_full, 1);
    barrier_init_fence();
    const int k_batch = static_cast<int>(offset_of(p, p.k, batch, 0, 0) / maps.k_entry),
              v_batch = static_cast<int>(offset_of(p, p.v, batch, 0, 0) / maps.v_entry);
    arrive_expecting(&shared.kv_full, 2 * Shape::kKVBytes);
    for (int panel = 0; panel < kPanels; ++panel) {
      load_box(k_tile + panel * kKVPanel, &maps.k, &shared.kv_full, 64 * panel, kv_head, key, k_batch);
      load_box(v_tile + panel * kKVPanel, &maps.v, &shared.kv_full, 64 * panel, kv_head, key, v_batch);
    }
  } else if (threadIdx.x == 32) {
    shared.q_batch = static_cast<int>(offset_of(p, p.q, batch, 0, 0) / maps.q_entry);
    prefetch_map(&maps.q);
  } else if (threadIdx.x == 96) {
    shared.dk = offset(p.dk), shared.dv = offset(p.dv);
    int start = -1;
    if (kMask != Mask::kNone && p.start.present() && !p.deterministic && scratch.dbias == nullptr)
      start = first_tile_of_window(p, head, key_tile);
    shared.start = start >= 0 ? start : first_tile(p, scratch, head, key_tile);
  } else if (threadIdx.x == 128) {
    shared.dout_batch = static_cast<int>(offset_of(p, p.dout, batch, 0, 0) / maps.dout_entry);
    prefetch_map(&maps.dout);
  } else if (threadIdx.x == 160) {
    operands.bits = static_cast<const uint32_t*>(p.bits.data) + offset(p.bits);
    operands.by_query = static_cast<const uint32_t*>(p.tiles_by_query.data) + offset(p.tiles_by_query);
  } else if (threadIdx.x == 192) {
    operands.by_key = static_cast<const uint32_t*>(p.tiles_by_key.data) + offset(p.tiles_by_key);
    operands.bounds = static_cast<const int32_t*>(p.bounds.data) + offset(p.bounds);
  } else if (threadIdx.x == 224) {
    operands.start = static_cast<const int32_t*>(p.start.data) + offset(p.start);
    operands.end = static_cast<const int32_t*>(p.end.data) + offset(p.end);
  } else if (threadIdx.x == 256) {
    operands.bias = static_cast<const char*>(p.bias.data) + offset(p.bias) * (p.bias_dtype == DType::kF32 ? 4 : 2);
    operands.lse = static_cast<const float*>(p.lse.data) + offset(p.lse);
  } else if (threadIdx.x == 288) {
    operands.dbias_offset = offset(p.dbias);
    operands.dbias = static_cast<char*>(p.dbias.data) + operands.dbias_offset * (p.bias_dtype == DType::kF32 ? 4 : 2);
  }
  for (int r = threadIdx.x; r < kTile; r += kThreads)
    shared.rows.packed[r] = r < queries * p.G ? r / p.G | (r % p.G) << 16 : queries - 1;
  // Rows of q and dout that no load reaches.
  for (int i = threadIdx.x + queries * p.G * 8; i < kQPanel / 16; i += kThreads)
    for (int panel = 0; panel < 4 * kPanels; ++panel)
      *reinterpret_cast<uint4*>(dynamic + Shape::kQ + panel * kQPanel + 16 * i) = uint4{0, 0, 0, 0};
  fence_async_proxy();
  __syncthreads();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < 4) {
    give_registers<kProducerRegs>();
    constexpr bool kIntervals = kMask == Mask::kIntervals || kGeneral;  // there may be intervals
    if (warp == 0) {
      Walk<kParts, kIntervals, kKeys> walk(p, shared.start);
      const int bytes = kPanels * queries * p.G * 128;
      int i = 0;
#pragma unroll 1
      for (int tile = walk.next(p, operands, key); tile >= 0; tile = walk.next(p, operands, key), ++i) {
        const int stage = i & 1, parity = (i >> 1 & 1) ^ 1, t0 = tile * queries;
        int turn = 0;
        if (deterministic)
          turn = kMask == Mask::kNone
                     ? key_tile
                     : key_tiles_before<kIntervals>(p, operands, tile / kParts, key_tile, queries_per_tile(p.G));
        if (lane == 0) {
          wait(&shared.q_free[stage], parity);
          int hidden = kMask == Mask::kBits && p.bits.present() && !walk.tile_full ? kTestBits : 0;
          if ((!kByKey && key + kKeys > static_cast<int>(p.S)) ||
              (p.causal && key + kKeys - 1 > t0 + static_cast<int>(p.causal_offset())) ||
              (kMask != Mask::kNone && p.start.present() && !walk.tile_full))
            hidden |= kTestPosition;
          shared.info[stage] = TileInfo{tile, hidden};
          shared.jobs[i & 3] = TileJob{tile, turn, (hidden & kTestBits) != 0};
          arrive(&shared.job_full[i & 3]);
          if (!p.deterministic && scratch.dbias == nullptr) {
            volatile int* const front = scratch.turn + 2 * head * scratch.tiles;
            if (front[0] == key_tile + 1) front[1] = tile / kParts + 1;
          }
          arrive_expecting(&shared.q_full[stage], bytes + 8 * kTile);
          for (int panel = 0; panel < kPanels; ++panel)
            load_box(q_at(i) + panel * kQPanel, &maps.q, &shared.q_full[stage], 64 * panel, kv_head * p.G, t0,
                     shared.q_batch);
          load_bytes(k_tile + Shape::kStats + stage * 8 * kTile,
                     scratch.row_stats + (head * scratch.tiles + tile * kHalves) * (2 * kRows), 8 * kTile,
                     &shared.q_full[stage]);
          wait(&shared.dout_free[stage], parity);
          arrive_expecting(&shared.dout_full[stage], bytes);
          for (int panel = 0; panel < kPanels; ++panel)
            load_box(dout_at(i) + panel * kQPanel, &maps.dout, &shared.dout_full[stage], 64 * panel, kv_head * p.G, t0,
                     shared.dout_batch);
        }
        __syncwarp();
      }
      if (lane == 0) {
        if (i == 0) wait(&shared.kv_full, 0);  // a block must not end before what it has asked for is there
        wait(&shared.q_free[i & 1], (i >> 1 & 1) ^ 1);
        shared.info[i & 1].tile = shared.jobs[i & 3].tile = -1;
        arrive(&shared.q_full[i & 1]), arrive(&shared.job_full[i & 3]);
      }
    } else if (warp == 1) {
      if constexpr (kLogits) {
        int stage = 0, parity = 1;
#pragma unroll 1
        for (int i = 0;; ++i) {
          wait(&shared.job_full[i & 3], i >> 2 & 1);
          const int tile = shared.jobs[i & 3].tile;
          if (tile < 0) break;
          wait(&shared.logits_free[stage], parity);
          const uint32_t bias_tile = k_tile + plan.bias_at + stage * plan.bias_stage;
          if (kBias == Bias::kTile && plan.bias_by_tma && lane == 0) {
            const int bytes = p.bias_dtype == DType::kF32 ? 4 : 2, panels = kKeys * bytes / 128;
            const int rows = p.bias.group != 0 ? queries * p.G : queries;
            arrive_expecting(&shared.logits_full[stage], panels * rows * 128);
#pragma unroll 1
            for (int i = 0; i < panels; ++i)
              load_box(bias_tile + i * plan.bias_panel, &maps.bias, &shared.logits_full[stage], key + i * (128 / bytes),
                       0, tile * queries, p.bias.kv != 0 ? head % p.K : 0, plan.bias_batch ? head / p.K : 0);
          }
          __syncwarp();
          load_logits<T, kMask, kBias, kTile, kKeys>(p, plan, operands, shared.rows,
                                                     k_tile + plan.bits_at + stage * plan.bits_stage, bias_tile,
                                                     tile * queries, key, shared.jobs[i & 3].bits);
          arrive_after_copies(&shared.logits_full[stage]);
          arrive(&shared.logits_full[stage]);
          if (++stage == plan.logit_stages) stage = 0, parity ^= 1;
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
      }
    } else {
      // dq and dbias of a warpgroup. Of three: dq and dbias of the first, dbias of the others.
      const int group = warp - 2;
      const int end_group = kTurns && group == 1 ? kGroups : group + 1;
      const bool has_dq = !kTurns || group == 0;
      if (!has_dq && !staged_dbias) return;
      const uint32_t dq_stage = k_tile + Shape::kDQ + group * Shape::kDQBytes;
      const DBiasWriter<T> writer{p,
                                  shared.rows,
                                  plan.dbias,
                                  operands.dbias,
                                  scratch.dbias == nullptr ? nullptr : scratch.dbias + operands.dbias_offset,
                                  key,
                                  plan.dbias_pairs};
      const int group_panels = plan.dbias_f32 ? 2 : 1;  // 64 keys
      const uint32_t dbias_stages = k_tile + plan.dbias_at;
      const int dbias_head = p.dbias.kv != 0 ? head % p.K : 0, dbias_batch = plan.dbias_batch ? head / p.K : 0;
      const auto store_dbias = [&](const CUtensorMap* map, int group, uint32_t source, int panel, int t0) {
#pragma unroll 1
        for (int i = 0; i < group_panels; ++i)
          store_box(map, source + i * panel, scratch.dbias != nullptr, key + 64 * group + 32 * i, t0, dbias_head,
                    dbias_batch);
      };
      // Channels that are not there: a half of all rows, or of a group's rows.
      const bool any_channels = kHalves == 2 || group * (kHeadDim / 2) < p.H;
      const int all_bytes = kTurns ? 2 * Shape::kDQBytes : Shape::kDQBytes;
      const int dq_bytes = (kHalves == 2 || kTurns) && p.H <= kHeadDim / 2 ? all_bytes / 2 : all_bytes;
      if constexpr (kWholeDQ) {
        // Block (head, first keys) sets dq of the head to 0, and the head's others wait for that. It has begun before
        // them: blocks begin in the order of their numbers, and whatever the order of heads, of the heads of a chunk
        // the first keys have the lowest.
        if (!scratch.zeroed && has_dq) {
          int* const done = scratch.turn + 2 * (head * scratch.tiles + 1) + group;  // not needed otherwise
          if (key_tile == 0) {
            for (int at = 16 * lane; at < all_bytes; at += 512)
              *reinterpret_cast<uint4*>(dynamic + (dq_stage - k_tile) + at) = uint4{0, 0, 0, 0};
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) {
#pragma unroll 1
              for (int tile = 0; any_channels && tile < static_cast<int>(scratch.tiles); ++tile)
                bulk_store(scratch.dq + (2 * (head * scratch.tiles + tile) + group) * (kRows * kHeadDim / 2), dq_stage,
                           dq_bytes);
              bulk_wait();
              ptx::store_release(done, 1);
            }
          } else if (lane == 0) {
            while (ptx::load_acquire(done) == 0) __nanosleep(32);
            fence_async_proxy_global();
          }
        }
        if (lane == 0 && has_dq) arrive(&shared.dq_free[group]);
      }
      int i = 0;
      const auto next_tile = [&] {
        wait(&shared.job_full[i & 3], i >> 2 & 1);
        const int tile = shared.jobs[i & 3].tile;
        __syncwarp();  // all lanes have read it
        return tile;
      };
      const auto add_dq = [&](int tile) {  // by one thread
        // In units of 64 rows x half the channels: a half of the channels, or of 128 rows with all channels.
        const int64_t place = 2 * (head * scratch.tiles + tile * kHalves) + kHalves * group;
        int* const turn = scratch.turn + place;
        const int before = shared.jobs[i & 3].turn;
        if (deterministic) {  // key tiles add to dq in their own order
          while (ptx::load_acquire(turn) != before) __nanosleep(32);
          fence_async_proxy_global();
        }
        wait(&shared.dq_full[group], i & 1);
        if (any_channels) {
          bulk_reduce_add(scratch.dq + place * (kRows * kHeadDim / 2), dq_stage, dq_bytes);
          bulk_wait_read();
        }
        arrive(&shared.dq_free[group]);
        if (deterministic) {  // once what was added is in memory
          bulk_wait();
          ptx::store_release(turn, before + 1);
        }
      };
      if (read_dbias) {
#pragma unroll 1
        for (int tile = next_tile(); tile >= 0; ++i, tile = next_tile()) {
          wait(&shared.dbias_full[0], i & 1);
          writer.write(ds_tile, tile * queries, threadIdx.x - 64);
          __syncwarp();
          if (lane == 0) {
            arrive(&shared.dbias_free[0]);
            add_dq(tile);
          }
          __syncwarp();
        }
      } else {  // apart, because under `deterministic` others wait for this loop
#pragma unroll 1
        for (int tile = next_tile(); tile >= 0; ++i, tile = next_tile()) {
          if (lane == 0) {
            if (staged_dbias) {
#pragma unroll 1
              for (int g = group; g < end_group; ++g) {
                wait(&shared.dbias_full[g], i & 1);
                store_dbias(&maps.dbias, g, dbias_stages + g * group_panels * plan.dbias_panel, plan.dbias_panel,
                            tile * queries);
                bulk_wait_read();
                arrive(&shared.dbias_free[g]);
              }
            }
            if (has_dq) add_dq(tile);
          }
          __syncwarp();
        }
      }
      if (lane == 0) bulk_wait();
    }
    return;
  }

  // What all lanes of the warp have done with.
  const auto release = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) arrive(barrier);
  };
  // All channels of dq of the block's i-th tile, by one warpgroup.
  const auto make_dq = [&](int i, float (&dq)[32]) __attribute__((always_inline)) {
    wait(&shared.ds_full, i & 1);
    const uint64_t ds_columns = operand(ds_tile, 8192), k_columns = operand(k_tile, kKVPanel);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kKeys / 16; ++c)
      wgmma_shared<T, true, true>(dq, advance(ds_columns, c * 2048), advance(k_columns, c * 2048), c > 0);
    wgmma_commit();
    wait(&shared.dq_free[0], i & 1);
    if (!kTurns) wait(&shared.dq_free[1], i & 1);
    wgmma_wait<0>();
    hold(dq);
    release(&shared.ds_free);
    float4* const stage = reinterpret_cast<float4*>(dynamic + Shape::kDQ) + threadIdx.x % 128;
#pragma unroll
    for (int c = 0; c < 8; ++c) stage[c * 128] = make_float4(dq[4 * c], dq[4 * c + 1], dq[4 * c + 2], dq[4 * c + 3]);
    fence_async_proxy();
    release(&shared.dq_full[0]);
    if (!kTurns) release(&shared.dq_full[1]);
  };
  if constexpr (kApart) {
    if (threadIdx.x >= 128 + kConsumers) {
      give_registers<kDQWarpRegs>();
      float dq[32];
#pragma unroll 1
      for (int i = 0;; ++i) {
        wait(&shared.job_full[i & 3], i >> 2 & 1);
        if (shared.jobs[i & 3].tile < 0) return;
        if (i == 0) wait(&shared.kv_full, 0);
        make_dq(i, dq);
      }
    }
  }

  take_registers<kConsumerRegs>();
  // Warpgroup, by a vote: what is made of it the compiler then knows to be the same for all lanes, as descriptors must
  // be.
  const int group =
      (__any_sync(~0u, threadIdx.x >= 256) ? 1 : 0) + (kTurns && __any_sync(~0u, threadIdx.x >= 384) ? 1 : 0);
  const int thread = threadIdx.x % 128;
  const int warp_key = 64 * group + 16 * (warp % 4), k0 = warp_key + lane / 4;  // this thread's keys are k0 and k0 + 8
  float dk[kHeadDim / 2], dv[kHeadDim / 2];
  float key_bias[2][kRowKinds] = {}, key_sum[2][kRowKinds] = {};
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = dv[i] = 0.0f;
  if constexpr (kBias == Bias::kKey) {
#pragma unroll
    for (int i = 0; i < 2 * kRowKinds; ++i) {
      const int h = i % 2, e = i / 2, s = key + k0 + 8 * h;
      const int head = kRowKinds == 2 && p.bias.group != 0 ? (2 * (lane % 4) + e) % p.G : 0;
      const int64_t index = s * p.bias.col + head * p.bias.group;
      if (s < static_cast<int>(p.S))
        key_bias[h][e] = p.bias_dtype == DType::kF32 ? reinterpret_cast<const float*>(operands.bias)[index]
                         : p.bias_dtype == DType::kBF16
                             ? __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(operands.bias)[index])
                             : __half2float(reinterpret_cast<const __half*>(operands.bias)[index]);
    }
  }
  KeySelectors<T> selectors{};
  if constexpr (kByKey) {
    const int word = (key + warp_key) / 32;
    const bool there = word < 4 * static_cast<int>(p.key_tiles);
    const uint32_t bits = p.bits.present() && there ? operands.bits[word * p.bits.col] : ~0u;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      selectors.set(h, key + k0 + 8 * h < static_cast<int>(p.S) && (bits >> ((k0 + 8 * h) % 32) & 1) != 0);
  }
  // Kept in registers where each tile may need it.
  const SeenBy seen = kMask == Mask::kIntervals ? SeenBy::of<kMask>(p, operands, key + k0) : SeenBy();
  // From the units of s, times scale or not, to log2.
  const bool capped = kGeneral && p.softcap != 0.0f;
  const float log2_factor = kBias == Bias::kNone && !capped ? p.scale * kLog2e : kLog2e;
  const uint32_t k_group = k_tile + group * 64 * 128, v_group = v_tile + group * 64 * 128;
  // dq: 64 rows by this group's half of the channels, or this group's 64 rows by all channels.
  const uint32_t k_half = kHalves == 2 ? k_tile : kPanels == 2 ? k_tile + group * kKVPanel : k_tile + group * 64;
  float* const dq_stage = reinterpret_cast<float*>(dynamic + Shape::kDQ + group * Shape::kDQBytes);
  float s_p[32 * kHalves], dp_ds[32 * kHalves], dq[Shape::kDQRegs];
  uint32_t packed[kHalves][16], ds[kHalves][16];  // p and ds in 16 bits

  // The lane's places in ds, dbias and bias. At 128 channels they are worked out once and share a register.
  const uint32_t places = place_in_ds(lane) | place_in_dbias(lane, plan.dbias_shift) << 7 |
                          (kBiasPairs ? place_in_bias(lane, plan.bias_shift) << 14 : 0);
  const auto place = [&](int first_bit, int bits) {
    uint32_t all = places;
    asm volatile("" : "+r"(all));  // what is made of it is not kept in registers
    return static_cast<int>(all >> first_bit & ((1u << bits) - 1));
  };
  const auto place_of_ds = [&] { return kHeadDim == 128 ? place(0, 7) : place_in_ds(fresh_lane()); };
  const auto place_of_dbias = [&](int shift) {
    return kHeadDim == 128 ? place(7, 7) : place_in_dbias(fresh_lane(), shift);
  };
  const auto place_of_bias = [&] {
    return kHeadDim == 128 ? place(14, 8) : place_in_bias(fresh_lane(), plan.bias_shift);
  };

  // Where the thread's words of ds lie: word c holds rows 8 (c / 2) + 2 (lane % 4), + 1 and key k0 + 8 (c % 2).
  struct WordsOfDS {
    uint32_t base;
    int swizzle;
    __device__ __forceinline__ WordsOfDS(uint32_t warp_keys) : base(warp_keys), swizzle(fresh_lane()) {
      base += swizzle / 4 * 128 + swizzle % 4 * 4, swizzle /= 4;
    }
    __device__ __forceinline__ uint32_t at(int c) const { return base + c % 2 * 1024 + (((c / 2) ^ swizzle) << 4); }
  };
  const uint32_t ds_keys = ds_tile + warp_key * 128;
  const auto issue_s = [&](int i) __attribute__((always_inline)) {
    const uint64_t k_rows = operand(k_group), q_rows = operand(q_at(i));
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kHeadDim / 16; ++c)
      wgmma_shared<T>(s_p, advance(k_rows, (c / 4) * kKVPanel + (c % 4) * 32),
                      advance(q_rows, (c / 4) * kQPanel + (c % 4) * 32), c > 0);
    wgmma_commit();
  };
  const auto issue_dp = [&](int i) __attribute__((always_inline)) {
    const uint64_t v_rows = operand(v_group), dout_rows = operand(dout_at(i));
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kHeadDim / 16; ++c)
      wgmma_shared<T>(dp_ds, advance(v_rows, (c / 4) * kKVPanel + (c % 4) * 32),
                      advance(dout_rows, (c / 4) * kQPanel + (c % 4) * 32), kDeltaFirst || c > 0);
    wgmma_commit();
  };
  // dv += p^T dout, dk += ds^T q.
  const auto issue_rows = [&](float (&d)[kHeadDim / 2], const uint32_t (&a)[kHalves][16],
                              uint32_t tile) __attribute__((always_inline)) {
    const uint64_t columns = operand(tile, kQPanel);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < 4 * kHalves; ++c) {
      const uint32_t* const words = a[c / 4] + c % 4 * 4;
      wgmma_registers<T>(d, words[0], words[1], words[2], words[3], advance(columns, c * 2048));
    }
    wgmma_commit();
  };
  const auto issue_dq = [&]() __attribute__((always_inline)) {
    const uint64_t ds_columns = operand(ds_tile + (kHalves == 2 ? group * Shape::kDSPanel : 0), 8192),
                   k_columns = operand(k_half, kKVPanel);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kKeys / 16; ++c)
      wgmma_shared<T, true, true>(dq, advance(ds_columns, c * 2048), advance(k_columns, c * 2048), c > 0);
    wgmma_commit();
  };

  SpecialRow* const special_rows = reinterpret_cast<SpecialRow*>(dynamic + plan.special_at);
  // Waits for dout of a tile. Whether it has rows that see nothing or are padding, or rows of very large logits: they
  // need care that others are spared.
  const auto prepare = [&](int i) __attribute__((always_inline)) {
    const int stage = i & 1;
    float* const lse = stats + stage * 2 * kTile;
    bool special = false;
#pragma unroll
    for (int r = 0; r < kTile; r += 32)
      special |=
          RowStat{lse[r + r / kRows * kRows + lane]}.special() && (kBias != Bias::kNone || r + lane < queries * p.G);
    special = __any_sync(~0u, special);  // the same for every warp
    wait(&shared.dout_full[stage], i >> 1 & 1);
    if (special) {
      if (kWholeDQ) named_sync(4, kConsumers);  // others may still read special_rows
      // Whatever the cotangents of a row that sees nothing hold must not reach the products, in which 0 * NaN is NaN.
#pragma unroll 1
      for (int j = threadIdx.x - 128; j < kTile * 8 * kPanels; j += kConsumers) {
        const int panel = j / (kTile * 8), r = j / 8 % kTile;
        const uint32_t chunk = dout_at(i) + panel * kQPanel + r * 128 + j % 8 * 16;
        float* const stat = lse + r + r / kRows * kRows;
        const bool blank = RowStat{*stat}.blank(), large = kBias != Bias::kNone && !blank && RowStat{*stat}.special();
        float factor = 1.0f;
        if (blank) {
          ptx::store_shared(chunk, make_uint4(0, 0, 0, 0));
        } else if (large) {
          factor =
              operands.weight_factor(p, shared.info[stage].tile * queries + shared.rows.query(r), shared.rows.head(r));
          ptx::scale_shared<T>(chunk, factor);
        }
        if (kBias != Bias::kNone && panel == 0 && j % 8 == 0) {
          stat[kRows] *= factor;
          special_rows[r] = {large ? RowStat{*stat}.large() : 0.0f, blank ? -INFINITY : INFINITY};
        }
      }
      fence_async_proxy();
      named_sync(4, kConsumers);
      if constexpr (kBias != Bias::kNone) {  // nothing more is to be subtracted from these rows
        const int r = threadIdx.x - 128;
        if (r < kRows && RowStat{lse[r]}.special() && !RowStat{lse[r]}.blank()) lse[r] = 0.0f;
        named_sync(4, kConsumers);
      }
    }
    return special;
  };

  // p of the block's i-th tile from s; 64 rows at a time.
  const auto make_p = [&](int i, int tile, bool special) __attribute__((always_inline)) {
    const int stage = i & 1, parity = i >> 1 & 1;
    const int logit_stage = plan.logit_stages == 2 ? stage : 0, logit_parity = plan.logit_stages == 2 ? parity : stage;
    if (kLogits) wait(&shared.logits_full[logit_stage], logit_parity);
    if (capped) {
      wait(&shared.ds_free, (i & 1) ^ 1);
      if (read_dbias) wait(&shared.dbias_free[0], (i & 1) ^ 1);
    }
    const int hidden = shared.info[stage].hidden;
    const uint32_t bits_tile = k_tile + plan.bits_at + logit_stage * plan.bits_stage;
    // Bits hide pairs of biases, unless these stand for two rows each that see different keys.
    const bool bits_in_bias =
        kMask == Mask::kBits && kBias == Bias::kTile && !kGeneral && (!kBiasPairs || plan.bits_shift > 0);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float (&x)[32] = half_of(s_p, half);
      const int first_row = half * kRows;
      // Of the rows in this thread's columns.
      const float2* const lse2 =
          reinterpret_cast<const float2*>(stats + stage * 2 * kTile + half * 2 * kRows) + lane % 4;
      float factor = p.scale;
      if (capped) {
        // x: the capped logits; their derivative is kept for ds.
        const float inner = p.scale / p.softcap;
        factor = 1.0f;
        const WordsOfDS words(ds_keys + half * Shape::kDSPanel);
#pragma unroll
        for (int c = 0; c < 16; ++c) {
          const float a = ptx::tanh(x[2 * c] * inner), b = ptx::tanh(x[2 * c + 1] * inner);
          x[2 * c] = p.softcap * a, x[2 * c + 1] = p.softcap * b;
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(words.at(c)), "r"(ptx::pack<T>(1.0f - a * a, 1.0f - b * b))
                       : "memory");
        }
      }
      if constexpr (kBias == Bias::kTile) {
        add_bias<T, kGeneral, kBiasPairs, kByKey, kBitsBytes>(
            x, p, plan, k_tile + plan.bias_at + logit_stage * plan.bias_stage, warp_key,
            kBiasPairs ? place_of_bias() : 0, factor, bits_in_bias && (hidden & kTestBits), bits_tile, selectors);
      } else if constexpr (kBias == Bias::kKey) {
#pragma unroll
        for (int c = 0; c < 32; ++c) x[c] = fmaf(x[c], factor, key_bias[c / 2 % 2][c % kRowKinds]);
      }
      if (kBias != Bias::kNone && special) {
        // In a row of padding x may be NaN: it meets biases that are hidden from all others.
#pragma unroll
        for (int c = 0; c < 16; ++c) {
          const SpecialRow row = special_rows[8 * (c / 2) + 2 * (lane % 4) + c % 2];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float& z = x[4 * (c / 2) + 2 * h + c % 2];
            z = fminf(z - row.base, row.most);
          }
        }
      }
      // Hidden positions are 0 in p, whatever they met on the way.
      const auto hide = [&](float value) {
        if (kMask == Mask::kBits && !bits_in_bias && (hidden & kTestBits)) {
          // Between rows that are 8 apart:
          const int shift = plan.bits_shift, step = shift > 3 ? 0 : 8 * kBitsBytes >> shift;
          const uint32_t first = bits_tile + warp_key / 32 * 4 + ((first_row + 2 * (lane % 4)) >> shift) * kBitsBytes;
          const uint32_t bit0 = 1u << (k0 % 32), bit1 = bit0 << 8;
          const auto load = [&](uint32_t address) {
            uint32_t word;
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
            return word;
          };
          if (shift > 0 && (kGeneral || !kBiasPairs)) {  // two neighbouring rows are of one query
#pragma unroll
            for (int c = 0; c < 8; ++c) {
              const uint32_t word = load(first + c * step);
              if ((word & bit0) == 0) x[4 * c] = x[4 * c + 1] = value;
              if ((word & bit1) == 0) x[4 * c + 2] = x[4 * c + 3] = value;
            }
          } else {
#pragma unroll
            for (int c = 0; c < 8; ++c)
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                const uint32_t word = load(first + c * 8 * kBitsBytes + e * kBitsBytes);
                if ((word & bit0) == 0) x[4 * c + e] = value;
                if ((word & bit1) == 0) x[4 * c + 2 + e] = value;
              }
          }
        }
        if (hidden & kTestPosition)
          hide_positions<kMask, kGeneral>(x, value, p, plan, operands, shared.rows,
                                          kMask == Mask::kIntervals ? seen : SeenBy::of<kMask>(p, operands, key + k0),
                                          tile * queries, key + k0, first_row);
      };
      if constexpr (kHideFirst) {
        hide(-INFINITY);
        if (kLogits && half == kHalves - 1) release(&shared.logits_free[logit_stage]);
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const float2 l = lse2[4 * c];
#pragma unroll
        for (int e = 0; e < 4; ++e) x[4 * c + e] = ptx::exp2(fmaf(x[4 * c + e], log2_factor, e & 1 ? -l.y : -l.x));
      }
      if constexpr (!kHideFirst) hide(0.0f);
#pragma unroll
      for (int c = 0; c < 16; ++c) packed[half][c] = ptx::pack_bits<T>(x[2 * c], x[2 * c + 1]);
    }
    if (kLogits && !kHideFirst) release(&shared.logits_free[logit_stage]);
  };

  // ds from p and dp: in dp_ds of the logits that bias was added to, in ds and shared memory of those before the cap,
  // for dk and dq.
  const auto make_ds = [&](int i) __attribute__((always_inline)) {
    const auto store_ds = [&](int half) {
      const uint32_t first = ds_keys + half * Shape::kDSPanel + (place_of_ds() << 4);
#pragma unroll
      for (int c = 0; c < 4; ++c)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(first ^ (c << 5)),
                     "r"(ds[half][4 * c]), "r"(ds[half][4 * c + 1]), "r"(ds[half][4 * c + 2]), "r"(ds[half][4 * c + 3])
                     : "memory");
    };
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float (&x)[32] = half_of(s_p, half);
      float (&y)[32] = half_of(dp_ds, half);
      const float2* const minus_delta =
          reinterpret_cast<const float2*>(stats + (i & 1) * 2 * kTile + half * 2 * kRows + kRows) + lane % 4;
      const auto weights = [&](int c) {  // two rows of p
        if (!kPackedP) return make_float2(x[2 * c], x[2 * c + 1]);
        return kGeneral ? ptx::unpack<T>(packed[half][c]) : ptx::unpack_bits<T>(packed[half][c]);
      };
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const float2 p0 = weights(2 * c), p1 = weights(2 * c + 1);
        const auto differ = [&](float dp, float minus_delta) { return kDeltaFirst ? dp : dp + minus_delta; };
        const float2 d = kDeltaFirst ? float2{} : minus_delta[4 * c];
        y[4 * c] = p0.x * differ(y[4 * c], d.x), y[4 * c + 1] = p0.y * differ(y[4 * c + 1], d.y);
        y[4 * c + 2] = p1.x * differ(y[4 * c + 2], d.x), y[4 * c + 3] = p1.y * differ(y[4 * c + 3], d.y);
        if constexpr (kBias == Bias::kKey) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float* const pair = y + 4 * c + 2 * h;
            if (kRowKinds == 1) key_sum[h][0] += pair[0] + pair[1];
            else key_sum[h][0] += pair[0], key_sum[h][kRowKinds - 1] += pair[1];
          }
        }
      }
      if (!capped) {
#pragma unroll
        for (int c = 0; c < 16; ++c) ds[half][c] = ptx::pack_bits<T>(y[2 * c], y[2 * c + 1]);
        if (half == 0) {
          if (!kEarlyDV) wait(&shared.ds_free, (i & 1) ^ 1);
          if (read_dbias) wait(&shared.dbias_free[0], (i & 1) ^ 1);
        }
        store_ds(half);
        if (read_dbias) release(&shared.dbias_full[0]);
      } else {
        const WordsOfDS words(ds_keys + half * Shape::kDSPanel);  // slopes of the cap are there until now
#pragma unroll
        for (int c = 0; c < 16; ++c) {
          uint32_t pair;
          asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(words.at(c)) : "memory");
          const float2 slope = ptx::unpack<T>(pair);
          ds[half][c] = ptx::pack<T>(y[2 * c] * slope.x, y[2 * c + 1] * slope.y);
          if (read_dbias)
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(words.at(c)), "r"(ptx::pack<T>(y[2 * c], y[2 * c + 1]))
                         : "memory");
        }
        if (read_dbias) {
          release(&shared.dbias_full[0]);
          wait(&shared.dbias_free[0], i & 1);
        }
        store_ds(half);
      }
    }
  };

  // dbias of the block's i-th tile, on its way out.
  const auto stage_dbias = [&](int i) __attribute__((always_inline)) {
    if constexpr (kBias == Bias::kTile) {
      if (staged_dbias) {
        wait(&shared.dbias_free[group], (i & 1) ^ 1);
        const uint32_t panels = k_tile + plan.dbias_at;
        const uint32_t panel = panels + group * plan.dbias_panel;
        const int shift = kStaging < Staging::kF32 ? static_cast<int>(kStaging) : plan.dbias_shift;
        if (kStaging == Staging::kF32 || (kGeneral && plan.dbias_f32))
          stage_dbias_32(dp_ds, panels, plan.dbias_panel, warp_key, shift);
        else if constexpr (!kGeneral) stage_dbias_16<T>(dp_ds, panel, warp_key % 64, shift, place_of_dbias(shift));
        else if (p.bias_dtype == DType::kBF16)
          stage_dbias_16<__nv_bfloat16>(dp_ds, panel, warp_key % 64, shift, place_of_dbias(shift));
        else stage_dbias_16<__half>(dp_ds, panel, warp_key % 64, shift, place_of_dbias(shift));
      }
    }
  };
  const auto stage_dq = [&](int i) __attribute__((always_inline)) {
    wait(&shared.dq_free[group], (i & 1) ^ 1);
#pragma unroll
    for (int c = 0; c < Shape::kDQRegs / 4; ++c)
      reinterpret_cast<float4*>(dq_stage)[c * 128 + thread] =
          make_float4(dq[4 * c], dq[4 * c + 1], dq[4 * c + 2], dq[4 * c + 3]);
    if constexpr (!kLateDQ) {
      fence_async_proxy();
      release(&shared.dq_full[group]);
    }
  };

  // What dp of the block's i-th tile begins with: -delta, which is then not to be added.
  const auto begin_dp = [&](int i) __attribute__((always_inline)) {
    if constexpr (kDeltaFirst) {
      const float2* const minus_delta = reinterpret_cast<const float2*>(stats + (i & 1) * 2 * kTile + kRows) + lane % 4;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const float2 d = minus_delta[4 * c];
        dp_ds[4 * c] = dp_ds[4 * c + 2] = d.x, dp_ds[4 * c + 1] = dp_ds[4 * c + 3] = d.y;
      }
    }
  };

  wait(&shared.q_full[0], 0);
  int tile = shared.info[0].tile;
  bool special = false;
  if (tile >= 0) {
    wait(&shared.kv_full, 0);
    issue_s(0);
    special = prepare(0);
    begin_dp(0);
    wgmma_wait<0>();
    hold(s_p);
  }
  int i = 0, owner = 0;  // owner: which consumer makes dq of the tile
#pragma unroll 1
  for (; tile >= 0; ++i) {
    issue_dp(i);
    make_p(i, tile, special);
    if constexpr (kEarlyDV) {
      issue_rows(dv, packed, dout_at(i));
      wait(&shared.ds_free, (i & 1) ^ 1);  // here it also keeps ptxas from moving exponentials behind the wait for dp
    }
    wgmma_wait<kEarlyDV ? 1 : 0>();
    hold(dp_ds);
    if constexpr (!kEarlyDV) issue_rows(dv, packed, dout_at(i));
    make_ds(i);
    issue_rows(dk, ds, q_at(i));
    if constexpr (kWholeDQ) {
      const int next = i + 1;
      wait(&shared.q_full[next & 1], next >> 1 & 1);
      tile = shared.info[next & 1].tile;
      if constexpr (kApart) {  // there are registers for s of the next tile beside what becomes dbias
        wgmma_wait<1>();
        hold(dv);
        release(&shared.dout_free[i & 1]);
        issue_s(next);
      }
      stage_dbias(i);
      fence_async_proxy();
      release(&shared.ds_full);
      if (staged_dbias) release(&shared.dbias_full[group]);
      wgmma_wait<kApart ? 1 : 0>();
      hold(dk);
      if constexpr (kTurns) {
        hold(dv);
        issue_s(next);
        release(&shared.dout_free[i & 1]);
      }
      release(&shared.q_free[i & 1]);
      if (tile >= 0) special = prepare(next);
      if constexpr (kTurns) {
        if (owner == group) make_dq(i, dp_ds);
        owner = owner == kGroups - 1 ? 0 : owner + 1;
      }
      if (tile >= 0) begin_dp(next);
      wgmma_wait<0>();
      hold(s_p);
      continue;
    }
    stage_dbias(i);
    fence_async_proxy();
    if (kLateDQ && i > 0) release(&shared.dq_full[group]);
    if (staged_dbias) release(&shared.dbias_full[group]);
    named_sync(1, kConsumers);  // ds is there
    issue_dq();

    // s of the next tile, behind those (of whatever is there, if there is no next tile).
    const int next = i + 1;
    wait(&shared.q_full[next & 1], next >> 1 & 1);
    tile = shared.info[next & 1].tile;
    wgmma_wait<1>();
    hold(dv), hold(dk);
    release(&shared.dout_free[i & 1]), release(&shared.q_free[i & 1]);
    issue_s(next);
    wgmma_wait<1>();
    hold(dq);
    release(&shared.ds_free);
    stage_dq(i);
    if (tile >= 0) special = prepare(next);
    wgmma_wait<0>();
    hold(s_p);
  }

  if (kApart && i > 0) wait(&shared.ds_free, (i - 1) & 1);  // ds has been read
  if (kLateDQ && i > 0) {
    fence_async_proxy();
    release(&shared.dq_full[group]);
  }

  // dk and dv: four lanes exchange their words of a key, so that each has 16 bytes to store.
  const auto store = [&](const float (&d)[kHeadDim / 2], T* out, const View& view, int channels, float factor) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int s = key + k0 + 8 * h;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; n += 4) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          words[j] = ptx::pack<T>(d[4 * (n + j) + 2 * h] * factor, d[4 * (n + j) + 2 * h + 1] * factor);
        transpose_words(words);
        const int c = 8 * (n + lane % 4);
        if (s < static_cast<int>(p.S) && c < channels)
          ptx::store_global(out + s * view.row + c, uint4{words[0], words[1], words[2], words[3]});
      }
    }
  };
  store(dk, static_cast<T*>(p.dk.data) + shared.dk, p.dk, p.H, p.scale);
  store(dv, static_cast<T*>(p.dv.data) + shared.dv, p.dv, p.Hv, 1.0f);
  if constexpr (kBias == Bias::kKey) {
    if (plan.dbias != DBias::kNone) {
      const DBiasWriter<T> writer{p,
                                  shared.rows,
                                  plan.dbias,
                                  operands.dbias,
                                  scratch.dbias == nullptr ? nullptr : scratch.dbias + operands.dbias_offset,
                                  key,
                                  plan.dbias_pairs};
      float* const sums = reinterpret_cast<float*>(dynamic + Shape::kDS);  // ds has been read
      named_sync(1, kConsumers);
      // That have sums of their own. A lane has those of 2 (lane % 4) and the next one, modulo `heads`.
      const int heads = kRowKinds == 2 && p.dbias.group != 0 ? p.G : 1;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum[2] = {key_sum[h][0], kRowKinds == 2 ? key_sum[h][kRowKinds - 1] : 0.0f};
        if (heads == 1) sum[0] += sum[1];
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2) {
          const float other[2] = {__shfl_xor_sync(~0u, sum[0], distance), __shfl_xor_sync(~0u, sum[1], distance)};
          if (heads <= 2 * distance) sum[0] += other[0], sum[1] += other[1];
        }
        const int k = k0 + 8 * h;
        if (lane % 4 >= (heads + 1) / 2) continue;
        if (p.dbias.col == 0) sums[k] = sum[0];
        else if (key + k < p.S)
          for (int e = 0; e < min(heads, 2); ++e)
            writer.put((2 * (lane % 4) + e) * p.dbias.group + key + k, e == 0 ? sum[0] : sum[1]);
      }
      if (p.dbias.col == 0) {
        named_sync(1, kConsumers);
        if (threadIdx.x == 128) {
          float sum = 0.0f;
          for (int k = 0; k < kKeys; ++k) sum += sums[k];
          writer.put(0, sum);
        }
      }
    }
  }
}

// Threads of a block of the two kernels below, for 64 rows of kChannels channels.
__host__ __device__ constexpr int threads_for(int channels) { return channels > 32 ? 256 : 128; }

// Per tile of 64 rows: log-sum-exp and -delta = <out, dout> - dlse, dq = 0, turn = 0. One block a tile. kChannels: that
// out has at most.
template <class T, int kHeadDim, int kChannels>
__global__ void __launch_bounds__(threads_for(kChannels))
    jax_dma_sm90_row_stats(const __grid_constant__ Problem p, const __grid_constant__ BackwardScratch scratch) {
  constexpr int kThreads = threads_for(kChannels), kLanes = kChannels / 8;  // of a row: 16 bytes each
  constexpr int kRounds = kRows * kLanes / kThreads;
  const uint32_t tiles = scratch.tiles, head = blockIdx.x / tiles, batch = head / static_cast<uint32_t>(p.K);
  const int tile = blockIdx.x % tiles, kv_head = head % static_cast<uint32_t>(p.K);
  const int queries = queries_per_tile(p.G) / kQueryParts, c = threadIdx.x % kLanes * 8;
  const auto at = [&](const View& view) { return offset_of(p, view, batch, kv_head, 0); };
  const int64_t out_at = at(p.out), dout_at = at(p.dout), lse_at = at(p.lse), dlse_at = at(p.dlse);
  // What is not there is read from where something is: without branches all loads are in flight together.
  const int channel = c < p.Hv ? c : 0;
  uint4 out[kRounds], dout[kRounds];
  float lse[kRounds], dlse[kRounds];
  bool inside[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int r = threadIdx.x / kLanes + i * (kThreads / kLanes), query = r / p.G, g = r % p.G;
    inside[i] = query < queries && int64_t{tile} * queries + query < p.T;
    const int64_t t = inside[i] ? int64_t{tile} * queries + query : 0;
    out[i] = *reinterpret_cast<const uint4*>(static_cast<const T*>(p.out.data) + out_at + g * p.out.group +
                                             t * p.out.row + channel);
    dout[i] = *reinterpret_cast<const uint4*>(static_cast<const T*>(p.dout.data) + dout_at + g * p.dout.group +
                                              t * p.dout.row + channel);
    lse[i] = static_cast<const float*>(p.lse.data)[lse_at + g * p.lse.group + t * p.lse.row];
    dlse[i] =
        p.dlse.present() ? static_cast<const float*>(p.dlse.data)[dlse_at + g * p.dlse.group + t * p.dlse.row] : 0.0f;
  }
  float4* const dq = reinterpret_cast<float4*>(scratch.dq) + int64_t{blockIdx.x} * (kRows * kHeadDim / 4);
#pragma unroll
  for (int i = threadIdx.x; scratch.zeroed && i < kRows * kHeadDim / (p.H > kHeadDim / 2 ? 4 : 8); i += kThreads)
    dq[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (threadIdx.x < 2) scratch.turn[2 * int64_t{blockIdx.x} + threadIdx.x] = 0;
  float* const stats = scratch.row_stats + int64_t{blockIdx.x} * (2 * kRows);
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int r = threadIdx.x / kLanes + i * (kThreads / kLanes);
    const uint32_t u[4] = {out[i].x, out[i].y, out[i].z, out[i].w}, v[4] = {dout[i].x, dout[i].y, dout[i].z, dout[i].w};
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 x = ptx::unpack<T>(u[j]), y = ptx::unpack<T>(v[j]);
      sum += x.x * y.x + x.y * y.y;
    }
    if (c >= p.Hv) sum = 0.0f;
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask >>= 1) sum += __shfl_xor_sync(~0u, sum, mask);
    if (c == 0) {
      const bool blank = !inside[i] || lse[i] == -INFINITY;
      stats[r] = blank ? INFINITY : RowStat::of(lse[i], p.bias.present());
      stats[kRows + r] = blank ? 0.0f : dlse[i] - sum;
    }
  }
}

// Zeros in the tiles of dbias that no block visits. Row by row: as boxes of single tiles, stored by those who skip
// them, they took up to three times as long. One block per plan tile of queries.
template <class T>
__global__ void __launch_bounds__(256)
    jax_dma_sm90_clear_dbias(const __grid_constant__ Problem p, int block_keys, bool aligned) {
  constexpr int kWords = 64;  // of key tiles at a time
  __shared__ BlockOperands<T> operands;
  __shared__ uint32_t skipped[kQueryParts][kWords];
  const int64_t head = blockIdx.x / p.query_tiles;
  const int tile = static_cast<int>(blockIdx.x % p.query_tiles);
  if (threadIdx.x == 0) operands.fill(p, head / p.K, head % p.K);
  __syncthreads();
  const int lane = threadIdx.x % 32, queries = queries_per_tile(p.G), part = queries / kQueryParts;
  const int heads = p.dbias.group != 0 ? p.G : 1, bytes = operands.bias_bytes(p), per_chunk = 16 / bytes;
  const int words = static_cast<int>(ceil_div(p.key_tiles, kTilesPerWord));
#pragma unroll 1
  for (int first = 0; first < words; first += kWords) {
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < min(kWords, words - first); i += 8) {
      const uint32_t seen = key_tiles_word(p, operands, tile, first + i, queries).seen;
      const int end_key = ((first + i) * kTilesPerWord + lane + 1) * kKeyTile;
      const int key = (end_key - 1) / block_keys * block_keys;  // the first of the last block that has keys of the tile
#pragma unroll
      for (int j = 0; j < kQueryParts; ++j) {  // as Walk does
        const int last = min((tile * kQueryParts + j + 1) * part, static_cast<int>(p.T)) - 1;
        const bool reached = p.deterministic || !p.causal || key <= last + static_cast<int>(p.causal_offset());
        const uint32_t visited = seen & __ballot_sync(~0u, reached);
        if (lane == 0) skipped[j][i] = ~visited;
      }
    }
    __syncthreads();
    const int64_t begin = int64_t{first} * kTilesPerWord * kKeyTile,
                  end = min(begin + kWords * kTilesPerWord * kKeyTile, p.S);
    const int chunks = static_cast<int>(ceil_div(end - begin, per_chunk));
#pragma unroll 1
    for (int r = 0; r < queries * heads; ++r) {
      const int query = r / heads, t = tile * queries + query;
      if (t >= p.T) break;
      char* const row = operands.dbias + (t * p.dbias.row + r % heads * p.dbias.group + begin) * bytes;
      const uint32_t* const tiles = skipped[query / part];
#pragma unroll 4
      for (int c = threadIdx.x; c < chunks; c += 256) {
        const int i = c * per_chunk, key_tile = i / kKeyTile;
        if ((tiles[key_tile / kTilesPerWord] >> (key_tile % kTilesPerWord) & 1) == 0) continue;
        if (aligned && begin + i + per_chunk <= p.S) *reinterpret_cast<uint4*>(row + i * bytes) = uint4{0, 0, 0, 0};
        else
          for (int j = i; j < min(i + per_chunk, static_cast<int>(p.S - begin)); ++j)
            store_value(row, j, 0.0f, p.bias_dtype);
      }
    }
    __syncthreads();
  }
}

// dq from fragment order to its own, times scale. A thread makes 8 channels of two rows. kChannels: that dq has at
// most.
template <class T, int kHeadDim, int kChannels>
__global__ void __launch_bounds__(threads_for(kChannels))
    jax_dma_sm90_reorder_dq(const __grid_constant__ Problem p, const __grid_constant__ BackwardScratch scratch) {
  constexpr int kThreads = threads_for(kChannels), kBlocks = kChannels / 8;  // of 8 channels
  const uint32_t tiles = scratch.tiles, head = blockIdx.x / tiles, K = p.K;
  const int tile = blockIdx.x % tiles, queries = queries_per_tile(p.G) / kQueryParts;
  T* const out = static_cast<T*>(p.dq.data) + offset_of(p, p.dq, head / K, head % K, 0);
  const float4* const dq = reinterpret_cast<const float4*>(scratch.dq) + int64_t{blockIdx.x} * (kRows * kHeadDim / 4);
#pragma unroll
  for (int i = threadIdx.x; i < kBlocks * 32; i += kThreads) {
    const int block = i % kBlocks, pair = i / kBlocks;  // pair: 8 * (warp of the warpgroup) + lane / 4
    if (8 * block >= p.H) continue;
    const float4* const source = dq + block * 128 + pair * 4;
    float4 value[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) value[j] = source[j];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = pair / 8 * 16 + pair % 8 + 8 * h, query = r / p.G, g = r % p.G;
      const int64_t t = int64_t{tile} * queries + query;
      if (query >= queries || t >= p.T) continue;
      uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        packed[j] = h == 0 ? ptx::pack<T>(value[j].x * p.scale, value[j].y * p.scale)
                           : ptx::pack<T>(value[j].z * p.scale, value[j].w * p.scale);
      *reinterpret_cast<uint4*>(out + g * p.dq.group + t * p.dq.row + 8 * block) =
          uint4{packed[0], packed[1], packed[2], packed[3]};
    }
  }
}

}  // namespace jax_dma::sm90
