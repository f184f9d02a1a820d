// Which tiles a block has to visit: the plan's bitmaps, the intervals' bounds and the causal rule, ANDed 32 tiles at a
// time. Every warp of a block evaluates the same words, so the answer is the same for all its threads.
#pragma once

#include "../common/problem.h"

namespace jax_dma {

// 32 consecutive tiles: which have anything visible, and which have nothing hidden by bits or intervals. (Causal edges
// and the ends of T and S are left to the kernels, which know their own tile shapes.)
struct TileWord {
  uint32_t seen, full;
};

// Lane l judges the tile pair (query_tile, key_tile) it is given; the word is the warp's vote. `map` is the plan's word
// for these tiles or null, `bounds` those of the intervals or null.
__device__ inline TileWord vote(const Problem& p, int query_tile, int key_tile, int queries, const uint32_t* map,
                                int64_t plane, const int32_t* bounds) {
  const int t0 = query_tile * queries, t1 = min(t0 + queries, static_cast<int>(p.T));
  bool seen = query_tile < static_cast<int>(p.query_tiles) && key_tile < static_cast<int>(p.key_tiles), full = seen;
  if (seen && p.causal) seen = key_tile * kKeyTile <= t1 - 1 + static_cast<int>(p.causal_offset());
  if (seen && bounds != nullptr) {
    const int32_t* b = bounds + key_tile;
    const int64_t stride = p.bounds.row;
    seen = b[0] < t1 && b[stride] > t0;
    full = b[2 * stride] <= t0 && b[3 * stride] >= t1;
  }
  TileWord word{__ballot_sync(~0u, seen), __ballot_sync(~0u, full)};
  if (map != nullptr) word.seen &= map[0], word.full &= map[plane];
  return word;
}

// Key tiles 32 * word ... as seen by a query tile, for `operands` as in BlockOperands.
template <class Operands>
__device__ TileWord key_tiles_word(const Problem& p, const Operands& operands, int query_tile, int word, int queries) {
  const uint32_t* map =
      p.bits.present() ? operands.by_query + query_tile * p.tiles_by_query.row + word * p.tiles_by_query.col : nullptr;
  return vote(p, query_tile, word * kTilesPerWord + threadIdx.x % 32, queries, map, p.tiles_by_query_plane,
              p.start.present() ? operands.bounds : nullptr);
}

// The first of the words from `word` on in which the intervals show a key tile to any query of [t0, t1); the word of
// tile `tiles`, or one after it, if there is none. A window in a long sequence leaves most words empty, and judging
// them one by one would wait for memory each time: here the loads of several are under way together.
__device__ inline int skip_hidden(const Problem& p, const int32_t* bounds, int word, int tiles, int t0, int t1) {
  constexpr int kTogether = 4;
  if (!p.start.present() || tiles - word * kTilesPerWord <= 2 * kTogether * kTilesPerWord) return word;
#pragma unroll 1
  for (; word * kTilesPerWord < tiles; word += kTogether) {
    bool seen[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int tile = (word + i) * kTilesPerWord + static_cast<int>(threadIdx.x % 32);
      const int at = min(tile, static_cast<int>(p.key_tiles) - 1);
      const int first = bounds[at], last = bounds[at + p.bounds.row];
      seen[i] = tile == at && first < t1 && last > t0;
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (__any_sync(~0u, seen[i])) return word + i;
  }
  return word;
}

// Query tiles 32 * word ... that see a key tile.
template <class Operands>
__device__ TileWord query_tiles_word(const Problem& p, const Operands& operands, int key_tile, int word, int queries) {
  if (p.start.present()) {  // far from the intervals of the tile's keys nothing needs a vote
    const int32_t* b = operands.bounds + key_tile;
    const int64_t t0 = int64_t{word} * kTilesPerWord * queries;
    if (b[0] >= t0 + kTilesPerWord * queries || b[p.bounds.row] <= t0) return TileWord{0, 0};
  }
  const uint32_t* map =
      p.bits.present() ? operands.by_key + key_tile * p.tiles_by_key.row + word * p.tiles_by_key.col : nullptr;
  return vote(p, word * kTilesPerWord + threadIdx.x % 32, key_tile, queries, map, p.tiles_by_key_plane,
              p.start.present() ? operands.bounds : nullptr);
}

// Walks the live tiles of one row or column of the tile grid, in order, each split into kParts parts.
//   skip(word) gives the first word from there on that may have any; load(word) its 32 tiles; keep(part index) may drop
//   a part.
template <int kParts>
struct LiveTiles {
  int word = -1;
  uint32_t seen = 0, full = 0;
  int index = kParts - 1;  // the current part, tile * kParts + part
  bool tile_full = false;

  // The next live part of `tiles` tiles, or -1.
  template <class Skip, class Load, class Keep>
  __device__ int next(int tiles, const Skip& skip, const Load& load, const Keep& keep) {
    while (true) {
      while (++index % kParts != 0)
        if (keep(index)) return index;
      while (seen == 0) {
        word = skip(word + 1);
        if (word * kTilesPerWord >= tiles) return -1;
        const TileWord loaded = load(word);
        seen = loaded.seen, full = loaded.full;
      }
      const int bit = __ffs(seen) - 1;
      seen &= seen - 1;
      tile_full = (full >> bit) & 1;
      index = (word * kTilesPerWord + bit) * kParts;
      if (keep(index)) return index;
    }
  }
};

}  // namespace jax_dma
