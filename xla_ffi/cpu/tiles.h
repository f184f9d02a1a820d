// What the two host kernels share above the arithmetic: which tiles are live, how a tile of an operand is brought in,
// and how the logits of a tile are to be formed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "../common/problem.h"
#include "kernels.h"

namespace jax_dma::cpu {

// Uninitialised floats on a cache line boundary.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t floats) {
    if (floats <= 0) return;
    data_.reset(static_cast<float*>(std::aligned_alloc(64, round_up(floats * sizeof(float), 64))));
    if (!data_) throw std::bad_alloc();
  }
  float* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };
  std::unique_ptr<float, Free> data_;
};

inline int64_t size_of(DType type) { return type == DType::kF32 ? 4 : 2; }

// The address of an element of a view whose elements are of `type`.
inline char* element(const View& view, DType type, int64_t offset) {
  return static_cast<char*>(view.data) + offset * size_of(type);
}

// A (batch entry, key/value head): what one query tile attends within.
struct Pair {
  int64_t batch, kv;
};
inline Pair pair_at(const Problem& p, int64_t index) { return {index / p.K, index % p.K}; }

struct Range {
  int64_t first, last;  // [first, last)
  bool empty() const { return first >= last; }
};

// The positions of a tile.
inline Range queries_of(const Problem& p, int64_t query_tile) {
  const int64_t queries = queries_per_tile(p.G);
  return {query_tile * queries, std::min(p.T, (query_tile + 1) * queries)};
}
inline Range keys_of(const Problem& p, int64_t key_tile) {
  return {key_tile * kKeyTile, std::min(p.S, (key_tile + 1) * kKeyTile)};
}

// A query tile is worked on kTileRows rows at a time; only a group of more than kTileRows heads needs more than one
// step.
template <class Visit>
void for_each_row_block(const Problem& p, int64_t query_tile, Visit visit) {
  const Range queries = queries_of(p, query_tile);
  const int64_t rows = (queries.last - queries.first) * p.G;
  for (int64_t first = 0; first < rows; first += kTileRows)
    visit(static_cast<int>(first), static_cast<int>(std::min<int64_t>(kTileRows, rows - first)));
}

// visit(row of the block, query, head of the group) for `rows` rows of a query tile.
template <class Visit>
void for_each_row(const Problem& p, int64_t query_tile, int first_row, int rows, Visit visit) {
  int64_t query = queries_of(p, query_tile).first + first_row / p.G;
  int g = first_row % p.G;
  for (int r = 0; r < rows; ++r) {
    visit(r, query, g);
    if (++g == p.G) g = 0, ++query;
  }
}

// The tiles of one (batch, key/value head) that may hold a visible position: the ones that the dense mask's bitmaps,
// the bounds of the intervals and the causal rule all admit. Such a tile is full where all of them call it so.
class LiveTiles {
 public:
  LiveTiles(const Problem& p, Pair pair) : p_(p) {
    by_query_ = base<uint32_t>(p.tiles_by_query, pair);
    by_key_ = base<uint32_t>(p.tiles_by_key, pair);
    bounds_ = base<int32_t>(p.bounds, pair);
  }

  // visit(key_tile, full) for the live key tiles of a query tile in `among`, ascending.
  template <class Visit>
  void keys(int64_t query_tile, Range among, Visit visit) const {
    const Range queries = queries_of(p_, query_tile);
    if (p_.causal) among.last = std::min(among.last, floor_div(queries.last - 1 + p_.causal_offset(), kKeyTile) + 1);
    for (int64_t j = among.first; j < among.last; ++j) {
      bool full = true;
      if (by_query_) {
        const uint32_t* words =
            by_query_ + query_tile * p_.tiles_by_query.row + j / kTilesPerWord * p_.tiles_by_query.col;
        if (*words == 0) {
          j |= kTilesPerWord - 1;
          continue;
        }
        if (!bit(words, j)) continue;
        full = bit(words + p_.tiles_by_query_plane, j);
      }
      if (bounds_ && (bound(kSmallestStart, j) >= queries.last || bound(kLargestEnd, j) <= queries.first)) continue;
      visit(j, full && is_full(queries, j));
    }
  }

  // visit(query_tile, full) for the live query tiles of a key tile, ascending.
  template <class Visit>
  void queries(int64_t key_tile, Visit visit) const {
    const Range among = query_range(key_tile);
    for (int64_t i = among.first; i < among.last; ++i) {
      bool full = true;
      if (by_key_) {
        const uint32_t* words = by_key_ + key_tile * p_.tiles_by_key.row + i / kTilesPerWord * p_.tiles_by_key.col;
        if (*words == 0) {
          i |= kTilesPerWord - 1;
          continue;
        }
        if (!bit(words, i)) continue;
        full = bit(words + p_.tiles_by_key_plane, i);
      }
      visit(i, full && is_full(queries_of(p_, i), key_tile));
    }
  }

  // A range of query tiles that contains all live ones of a key tile.
  Range query_range(int64_t key_tile) const {
    const int64_t queries = queries_per_tile(p_.G);
    Range range = {0, p_.query_tiles};
    if (p_.causal) range.first = std::max<int64_t>(0, floor_div(key_tile * kKeyTile - p_.causal_offset(), queries));
    if (bounds_) {
      range.first = std::max(range.first, floor_div(bound(kSmallestStart, key_tile), queries));
      range.last = std::min(range.last, floor_div(bound(kLargestEnd, key_tile) - 1, queries) + 1);
    }
    return range;
  }

 private:
  enum Bound { kSmallestStart, kLargestEnd, kLargestStart, kSmallestEnd };  // the rows of `bounds`

  template <class T>
  const T* base(const View& view, Pair pair) const {
    return view.present() ? static_cast<const T*>(view.data) + offset_of(p_, view, pair.batch, pair.kv, 0) : nullptr;
  }
  static int64_t floor_div(int64_t a, int64_t b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }
  static bool bit(const uint32_t* word, int64_t tile) { return *word >> (tile % kTilesPerWord) & 1; }
  int64_t bound(Bound which, int64_t key_tile) const { return bounds_[which * p_.bounds.row + key_tile]; }

  bool is_full(Range queries, int64_t key_tile) const {
    if (bounds_ && bound(kLargestStart, key_tile) > queries.first) return false;
    if (bounds_ && bound(kSmallestEnd, key_tile) < queries.last) return false;
    return !p_.causal || keys_of(p_, key_tile).last - 1 <= queries.first + p_.causal_offset();
  }

  const Problem& p_;
  const uint32_t* by_query_;
  const uint32_t* by_key_;
  const int32_t* bounds_;
};

// How to form the logits of one tile, row by row: LogitsRow for `rows` rows from `first_row` of a query tile.
class TileLogits {
 public:
  explicit TileLogits(const Problem& p)
      : p_(p), options_{p.scale, p.softcap}, bias_(p.bias.present() ? kTileRows * kKeyTile : 0) {
    if (p.start.present()) ends_.resize(2 * kKeyTile * interval_heads());
  }

  // False where no position of the tile is visible after all.
  bool prepare(Pair pair, int64_t query_tile, int64_t key_tile, bool full, int first_row, int rows) {
    const Range queries = queries_of(p_, query_tile), keys = keys_of(p_, key_tile);
    const int key_count = static_cast<int>(keys.last - keys.first);
    const bool intervals = p_.start.present() && !full;
    if (intervals) load_intervals(pair, keys);
    columns_ = {0, key_count};
    if (p_.causal && !full) columns_.last = visible_columns(queries.last - 1, keys);
    if (intervals) trim_to_intervals(queries);
    if (columns_.first >= columns_.last) return false;
    columns_ = {columns_.first / kPad * kPad, static_cast<int>(round_up(columns_.last, kPad))};

    for_each_row(p_, query_tile, first_row, rows, [&](int r, int64_t query, int g) {
      LogitsRow& row = rows_[r];
      row = {};
      row.query = static_cast<int32_t>(query);
      row.visible_columns = p_.causal && !full ? visible_columns(query, keys) : key_count;
      if (p_.bits.present() && !full) row.words = load_words(pair, query, g, key_tile, r);
      if (intervals) {
        row.start = starts_[p_.start.group ? g : 0];
        row.end = stops_[p_.end.group ? g : 0];
      }
      if (p_.bias.present()) row.bias = load_bias(pair, query, g, keys, r);
    });
    return true;
  }

  const LogitsRow* rows() const { return rows_; }
  const LogitsOptions& options() const { return options_; }
  Columns columns() const { return columns_; }

 private:
  int64_t interval_heads() const { return p_.start.group || p_.end.group ? p_.G : 1; }

  // The keys that the causal rule leaves to a query, counted from the tile's first.
  int visible_columns(int64_t query, Range keys) const {
    const int64_t count = query + p_.causal_offset() + 1 - keys.first;
    return static_cast<int>(std::clamp<int64_t>(count, 0, keys.last - keys.first));
  }

  // Points starts_ and stops_ at the tile's keys, in a padded copy where the tile is cut off by S.
  void load_intervals(Pair pair, Range keys) {
    const int64_t heads = interval_heads(), count = keys.last - keys.first;
    starts_.resize(heads), stops_.resize(heads);
    for (int64_t g = 0; g < heads; ++g) {
      const auto at = [&](const View& view, int32_t* padded) {
        const int32_t* from =
            static_cast<const int32_t*>(view.data) + offset_of(p_, view, pair.batch, pair.kv, g) + keys.first;
        if (count == kKeyTile) return from;
        std::fill(std::copy(from, from + count, padded), padded + kKeyTile, 0);
        return static_cast<const int32_t*>(padded);
      };
      starts_[g] = at(p_.start, &ends_[2 * g * kKeyTile]);
      stops_[g] = at(p_.end, &ends_[(2 * g + 1) * kKeyTile]);
    }
  }

  // Drops columns at either end of the tile that no query of the tile sees: the edges of a window cross few tiles
  // whole.
  void trim_to_intervals(Range queries) {
    const auto seen = [&](int column) {
      for (size_t g = 0; g < starts_.size(); ++g)
        if (std::max<int64_t>(starts_[g][column], queries.first) < std::min<int64_t>(stops_[g][column], queries.last))
          return true;
      return false;
    };
    while (columns_.first < columns_.last && !seen(columns_.first)) ++columns_.first;
    while (columns_.first < columns_.last && !seen(columns_.last - 1)) --columns_.last;
  }

  const uint32_t* load_words(Pair pair, int64_t query, int g, int64_t key_tile, int r) {
    const uint32_t* from = static_cast<const uint32_t*>(p_.bits.data) + offset_of(p_, p_.bits, pair.batch, pair.kv, g) +
                           query * p_.bits.row;
    if (p_.bits.col) return from + key_tile * kWords;
    std::fill_n(words_[r], kWords, *from);
    return words_[r];
  }

  const float* load_bias(Pair pair, int64_t query, int g, Range keys, int r) {
    // Rows that share their bias share the copy.
    if (r > 0 && p_.bias.group == 0 && (g > 0 || p_.bias.row == 0)) return rows_[r - 1].bias;
    if (r >= p_.G && p_.bias.row == 0) return rows_[r - p_.G].bias;
    const int64_t offset =
        offset_of(p_, p_.bias, pair.batch, pair.kv, g) + query * p_.bias.row + keys.first * p_.bias.col;
    const char* from = element(p_.bias, p_.bias_dtype, offset);
    const int64_t count = keys.last - keys.first;
    if (p_.bias_dtype == DType::kF32 && p_.bias.col && count == kKeyTile) return reinterpret_cast<const float*>(from);
    float* to = bias_.get() + r * kKeyTile;
    if (p_.bias.col) {
      kernels().widen(p_.bias_dtype, from, count, to, kKeyTile);
    } else {
      float one[kPad];
      kernels().widen(p_.bias_dtype, from, 1, one, kPad);
      std::fill_n(to, kKeyTile, one[0]);
    }
    return to;
  }

  static constexpr int kWords = kKeyTile / 32;

  const Problem& p_;
  LogitsOptions options_;
  Columns columns_{};
  LogitsRow rows_[kTileRows];
  uint32_t words_[kTileRows][kWords];
  Buffer bias_;                                 // [kTileRows, kKeyTile]
  std::vector<int32_t> ends_;                   // [heads, 2, kKeyTile]
  std::vector<const int32_t*> starts_, stops_;  // per head of the group, or one for all
};

// Rows of an operand shaped like q or out: target [rows, padded width].
inline void load_query_rows(const Problem& p, const View& view, Pair pair, int64_t query_tile, int first_row, int rows,
                            int64_t width, float* target) {
  const int64_t padded = round_up(width, kPad), base = offset_of(p, view, pair.batch, pair.kv, 0);
  for_each_row(p, query_tile, first_row, rows, [&](int r, int64_t query, int g) {
    const char* from = element(view, p.dtype, base + query * view.row + g * view.group);
    kernels().widen(p.dtype, from, width, target + r * padded, padded);
  });
}

// A tile of k or v: target [kKeyTile, padded width], zero past S.
inline void load_key_rows(const Problem& p, const View& view, Pair pair, int64_t key_tile, int64_t width,
                          float* target) {
  const Range keys = keys_of(p, key_tile);
  const int64_t padded = round_up(width, kPad), base = offset_of(p, view, pair.batch, pair.kv, 0);
  for (int64_t s = keys.first; s < keys.last; ++s, target += padded)
    kernels().widen(p.dtype, element(view, p.dtype, base + s * view.row), width, target, padded);
  std::fill_n(target, (kKeyTile - (keys.last - keys.first)) * padded, 0.0f);
}

}  // namespace jax_dma::cpu
