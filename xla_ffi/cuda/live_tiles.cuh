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

// The first of the words from `word` on in which the intervals may show a key tile to any query of [t0, t1); the word
// of tile `tiles`, or one after it, if there is none. A window in a long sequence leaves most words empty.
__device__ inline int skip_hidden(const Problem& p, const int32_t* bounds, int word, int tiles, int t0, int t1) {
  if (!p.start.present() || p.bounds.row == p.key_tiles) return word;
  bounds += p.key_tiles;  // those of words
#pragma unroll 1
  for (; word * kTilesPerWord < tiles; word += 32) {
    const int mine = word + static_cast<int>(threadIdx.x % 32);
    const bool seen = mine * kTilesPerWord < tiles && bounds[mine] < t1 && bounds[mine + p.bounds.row] > t0;
    const uint32_t votes = __ballot_sync(~0u, seen);
    if (votes != 0) return word + __ffs(votes) - 1;
  }
  return word;
}

// How many key tiles before `key_tile` a query tile sees. kIntervals: whether there may be intervals.
template <bool kIntervals, class Operands>
__device__ int key_tiles_before(const Problem& p, const Operands& operands, int query_tile, int key_tile, int queries) {
  const auto skip = [&](int word) {
    if (!kIntervals) return word;
    return skip_hidden(p, operands.bounds, word, key_tile, query_tile * queries, (query_tile + 1) * queries);
  };
  int count = 0;
#pragma unroll 1
  for (int word = skip(0); word * kTilesPerWord < key_tile; word = skip(word + 1)) {
    uint32_t seen = key_tiles_word(p, operands, query_tile, word, queries).seen;
    if (word == key_tile / kTilesPerWord) seen &= (1u << (key_tile % kTilesPerWord)) - 1;
    count += __popc(seen);
  }
  return count;
}

// The words of query tiles that the intervals of a key tile reach: from first to last.
struct WordRange {
  int first, last;
};
__device__ inline WordRange query_words(const Problem& p, const int32_t* bounds, int key_tile, int queries) {
  if (!p.start.present()) return {0, static_cast<int>((p.query_tiles - 1) / kTilesPerWord)};
  const int t0 = max(bounds[key_tile], 0), t1 = min(bounds[key_tile + p.bounds.row], static_cast<int>(p.T));
  if (t0 >= t1) return {0, -1};
  const int shift = __ffs(queries * kTilesPerWord) - 1;  // a power of two
  return {t0 >> shift, (t1 - 1) >> shift};
}

// Query tiles 32 * word ... that see a key tile.
template <class Operands>
__device__ TileWord query_tiles_word(const Problem& p, const Operands& operands, int key_tile, int word, int queries) {
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
