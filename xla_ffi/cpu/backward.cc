// Attention, backward: dq, dk, dv and, where asked for, dbias.
//
// One piece of work walks the key tiles of a range, and for each of them its live query tiles:
//
//   p  = exp(logits - lse)            [rows, 128]   from q k^T
//   ds = p * (dout v^T - delta)       [rows, 128]   the gradient of the logits: dbias, before softcap and scale
//   dv += p^T dout    dk += dl^T q    dq += dl k    dl = ds * d(softcap) * scale
//   delta = rowsum(dout * out) - dlse
//
// dk and dv of a key tile stay with the piece that owns it. dq of a query tile gets a part from every range of keys,
// and those parts are added in order afterwards. dbias belongs to the piece too, if nobody else adds to it: so all
// (batch, key/value head) that share a dbias form one group, which a piece walks in order. Where a dbias is small
// enough to be copied, groups are also split, and the copies added in order. How the work is cut depends on nothing but
// shapes and tile maps, so results do not depend on the number of threads.
#include <limits>

#include "attention.h"
#include "tiles.h"

namespace jax_dma::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kEnoughPieces = 16;                   // pieces of work to aim for
constexpr int64_t kMaxDbiasCopies = int64_t{16} << 20;  // bytes for all copies of dbias, if there is more than one
constexpr int64_t kMaxQueryParts = int64_t{256} << 20;  // bytes for all parts of dq, if there is more than one

// dbias: where its elements go, who shares them, and what is summed where.
class BiasGradient {
 public:
  explicit BiasGradient(const Problem& p) : p_(p), wanted_(p.dbias.present()) {
    const View& view = p.dbias;
    if (!wanted_) return;
    elements_ = (view.kv ? p.K : 1) * (view.group ? p.G : 1) * (view.row ? p.T : 1) * (view.col ? p.S : 1);
    for (int axis = 0; axis < p.batch_rank; ++axis) {
      if (view.batch[axis]) elements_ *= p.batch_size[axis];
      else members_ *= p.batch_size[axis];
    }
    if (!view.kv) members_ *= p.K;
    direct_ = members_ == 1 && view.row && view.col && p.G <= kTileRows;
  }

  bool wanted() const { return wanted_; }
  // Every element is the sum over one tile, stored at once in the result's own type.
  bool direct() const { return direct_; }
  int64_t members() const { return members_; }
  int64_t bytes() const { return elements_ * 4; }

  // Makes `copies` zeroed sums; the result itself is one where its type allows.
  void allocate(int64_t copies) {
    if (!wanted_ || direct_) return;
    copies_ = copies;
    in_place_ = copies == 1 && p_.bias_dtype == DType::kF32;
    if (!in_place_) sums_ = Buffer(copies * elements_);
    if (elements_ > 0) std::fill_n(sum(0), copies * elements_, 0.0f);
  }
  float* sum(int64_t copy) const {
    return in_place_ ? static_cast<float*>(p_.dbias.data) : sums_.get() + copy * elements_;
  }

  void finish(const Pool& pool) const {
    if (!wanted_ || direct_ || in_place_) return;
    constexpr int64_t kChunk = int64_t{1} << 16;
    parallel_for(pool, ceil_div(elements_, kChunk), [&]() -> Worker {
      return [&](int64_t chunk) {
        const int64_t first = chunk * kChunk, count = std::min(kChunk, elements_ - first);
        for (int64_t copy = 1; copy < copies_; ++copy) kernels().add(sum(copy) + first, count, sum(0) + first);
        kernels().narrow(p_.bias_dtype, sum(0) + first, count, element(p_.dbias, p_.bias_dtype, first));
      };
    });
  }

 private:
  const Problem& p_;
  bool wanted_, direct_ = false, in_place_ = false;
  int64_t elements_ = 0, members_ = 1, copies_ = 1;
  Buffer sums_;
};

// Numbers the (batch, key/value head) so that those that share a dbias are `members` of one group.
Pair member_of_group(const Problem& p, const BiasGradient& dbias, int64_t group, int64_t member) {
  if (!dbias.wanted()) return pair_at(p, group);
  const auto digit = [&](bool is_shared, int64_t size) {
    int64_t& from = is_shared ? member : group;
    const int64_t value = from % size;
    from /= size;
    return value;
  };
  Pair pair = {0, digit(p.dbias.kv == 0, p.K)};
  int64_t weight = 1;
  for (int axis = p.batch_rank - 1; axis >= 0; --axis) {
    pair.batch += digit(p.dbias.batch[axis] == 0, p.batch_size[axis]) * weight;
    weight *= p.batch_size[axis];
  }
  return pair;
}

// The dq of one (batch, key/value head) that one range of keys contributes: f32, for the query tiles it touches.
struct QueryPart {
  Range tiles = {0, 0};
  std::vector<char> touched;  // tiles that were written; the others are zero, and uninitialised
  Buffer sums;                // [tiles, rows, padded H]
};

// How the work is cut.
struct Pieces {
  int64_t groups, members;  // members of a group
  int64_t splits;           // of the members of a group, each with a copy of dbias
  int64_t ranges;           // of the key tiles

  Range members_of(int64_t split) const { return {members * split / splits, members * (split + 1) / splits}; }
  Range key_tiles_of(int64_t range, int64_t key_tiles) const {
    return {key_tiles * range / ranges, key_tiles * (range + 1) / ranges};
  }
};

// The query tiles that a range of key tiles reaches.
Range reach(const LiveTiles& live, Range key_tiles) {
  Range all = {0, 0};
  for (int64_t j = key_tiles.first; j < key_tiles.last; ++j) {
    const Range range = live.query_range(j);
    if (range.empty()) continue;
    all = all.empty() ? range : Range{std::min(all.first, range.first), std::max(all.last, range.last)};
  }
  return all;
}

// Floats in the dq of a query tile.
int64_t query_tile_size(const Problem& p) {
  return static_cast<int64_t>(queries_per_tile(p.G)) * p.G * round_up(p.H, kPad);
}

class BackwardWorker {
 public:
  BackwardWorker(const Problem& p, const BiasGradient& dbias, const float* delta)
      : p_(p),
        dbias_(dbias),
        delta_(delta),
        h_(round_up(p.H, kPad)),
        hv_(round_up(p.Hv, kPad)),
        logits_(p),
        q_(kTileRows * h_),
        dout_(kTileRows * hv_),
        k_(kKeyTile * h_),
        v_(kKeyTile * hv_),
        k_transposed_(h_ * kTileStride),
        v_transposed_(hv_ * kTileStride),
        x_(kTileRows * kTileStride),
        dp_(kTileRows * kTileStride),
        ds_(dbias.wanted() ? kTileRows * kTileStride : 0),
        dk_(kKeyTile * h_),
        dv_(kKeyTile * hv_) {}

  // dk, dv and dbias of a range of keys, and its part of dq.
  void walk(Pair pair, Range key_tiles, int64_t dbias_copy, QueryPart* part) {
    const LiveTiles live(p_, pair);
    part->tiles = reach(live, key_tiles);
    const int64_t tiles = part->tiles.last - part->tiles.first;
    part->touched.assign(tiles, 0);
    part->sums = Buffer(tiles * query_tile_size(p_));
    for (int64_t j = key_tiles.first; j < key_tiles.last; ++j) {
      load_key_rows(p_, p_.k, pair, j, p_.H, k_.get());
      load_key_rows(p_, p_.v, pair, j, p_.Hv, v_.get());
      kernels().transpose(k_.get(), h_, kKeyTile, h_, k_transposed_.get(), kTileStride);
      kernels().transpose(v_.get(), hv_, kKeyTile, hv_, v_transposed_.get(), kTileStride);
      std::fill_n(dk_.get(), kKeyTile * h_, 0.0f);
      std::fill_n(dv_.get(), kKeyTile * hv_, 0.0f);
      int64_t next = 0;  // the first query tile whose dbias is not written
      live.queries(j, [&](int64_t i, bool full) {
        zero_dbias(pair, {next, i}, j);
        next = i + 1;
        char& touched = part->touched[i - part->tiles.first];
        float* dq = part->sums.get() + (i - part->tiles.first) * query_tile_size(p_);
        bool visible = false;
        for_each_row_block(p_, i, [&](int first_row, int rows) {
          visible = logits_.prepare(pair, i, j, full, first_row, rows);
          if (visible) tile(pair, i, j, first_row, rows, dbias_copy, touched != 0, dq + first_row * h_);
        });
        if (visible) touched = 1;
        else zero_dbias(pair, {i, i + 1}, j);
      });
      zero_dbias(pair, {next, p_.query_tiles}, j);
      store_key_rows(p_.dk, pair, j, p_.H, dk_.get());
      store_key_rows(p_.dv, pair, j, p_.Hv, dv_.get());
    }
  }

 private:
  // One block of rows against the key tile in k_ and v_; logits_ is prepared.
  void tile(Pair pair, int64_t i, int64_t j, int first_row, int rows, int64_t dbias_copy, bool add_to_dq, float* dq) {
    const Kernels& kernel = kernels();
    const Columns columns = logits_.columns();
    load_query_rows(p_, p_.q, pair, i, first_row, rows, p_.H, q_.get());
    load_query_rows(p_, p_.dout, pair, i, first_row, rows, p_.Hv, dout_.get());
    const int64_t lse_base = offset_of(p_, p_.lse, pair.batch, pair.kv, 0);
    const float* delta = delta_ + (pair.batch * p_.K + pair.kv) * p_.T * p_.G;
    for_each_row(p_, i, first_row, rows, [&](int r, int64_t query, int g) {
      const float* lse = static_cast<const float*>(p_.lse.data) + lse_base + query * p_.lse.row + g * p_.lse.group;
      row_lse_[r] = lse[0], row_lse_tail_[r] = lse[1];
      row_delta_[r] = delta[query * p_.G + g];
      if (row_lse_[r] == -kInfinity) {  // 0 * NaN would reach dk and dv
        std::fill_n(q_.get() + r * h_, h_, 0.0f);
        std::fill_n(dout_.get() + r * hv_, hv_, 0.0f);
      }
    });

    const int n = columns.size(), first = columns.first;
    float *x = x_.get() + first, *dp = dp_.get() + first;
    kernel.matmul(rows, n, p_.H, q_.get(), h_, 1, k_transposed_.get() + first, kTileStride, x, kTileStride, false);
    kernel.matmul(rows, n, p_.Hv, dout_.get(), hv_, 1, v_transposed_.get() + first, kTileStride, dp, kTileStride,
                  false);
    kernel.gradient(logits_.rows(), rows, logits_.options(), columns, row_lse_, row_lse_tail_, row_delta_, x_.get(),
                    dp_.get(), ds_.get());
    kernel.matmul(n, hv_, rows, x, 1, kTileStride, dout_.get(), hv_, dv_.get() + first * hv_, hv_, true);
    kernel.matmul(n, h_, rows, dp, 1, kTileStride, q_.get(), h_, dk_.get() + first * h_, h_, true);
    kernel.matmul(rows, h_, n, dp, kTileStride, 1, k_.get() + first * h_, h_, dq, h_, add_to_dq);
    if (dbias_.wanted()) add_dbias(pair, i, j, first_row, rows, dbias_copy);
  }

  // Rows of ds that go to the same row of dbias are added first, then stored or added to the sums.
  void add_dbias(Pair pair, int64_t i, int64_t j, int first_row, int rows, int64_t copy) {
    const View& view = p_.dbias;
    const Columns columns = logits_.columns();
    const Range keys = keys_of(p_, j);
    const int64_t base = offset_of(p_, view, pair.batch, pair.kv, 0) + keys.first * view.col;
    alignas(64) float total[kKeyTile] = {};
    int64_t target = -1;
    const auto flush = [&] {
      const int64_t count = keys.last - keys.first;
      if (target < 0) return;
      if (dbias_.direct()) kernels().narrow(p_.bias_dtype, total, count, element(view, p_.bias_dtype, target));
      else if (view.col) kernels().add(total, count, dbias_.sum(copy) + target);
      else dbias_.sum(copy)[target] += kernels().sum(total, kKeyTile);
    };
    const auto add_row = [&](int r, int64_t query, int g) {
      const int64_t to = base + query * view.row + g * view.group;
      if (to != target) {
        flush();
        std::fill_n(total, kKeyTile, 0.0f);
        target = to;
      }
      kernels().add(ds_.get() + r * kTileStride + columns.first, columns.size(), total + columns.first);
    };
    // Rows of one head are G apart: where heads differ and queries do not, head by head.
    if (view.group && !view.row) {
      for (int start = 0; start < std::min(p_.G, rows); ++start)
        for (int r = start; r < rows; r += p_.G) add_row(r, 0, (first_row + r) % p_.G);
    } else {
      for_each_row(p_, i, first_row, rows, add_row);
    }
    flush();
  }

  // Tiles that hold nothing visible, where no sums were zeroed beforehand.
  void zero_dbias(Pair pair, Range query_tiles, int64_t j) {
    if (!dbias_.direct() || query_tiles.empty()) return;
    const View& view = p_.dbias;
    const Range keys = keys_of(p_, j);
    const int64_t end = queries_of(p_, query_tiles.last - 1).last,
                  bytes = (keys.last - keys.first) * size_of(p_.bias_dtype);
    for (int g = 0; g < (view.group ? p_.G : 1); ++g) {
      const int64_t base = offset_of(p_, view, pair.batch, pair.kv, g) + keys.first;
      for (int64_t query = queries_of(p_, query_tiles.first).first; query < end; ++query)
        std::memset(element(view, p_.bias_dtype, base + query * view.row), 0, bytes);
    }
  }

  void store_key_rows(const View& view, Pair pair, int64_t key_tile, int64_t width, const float* source) {
    const Range keys = keys_of(p_, key_tile);
    const int64_t base = offset_of(p_, view, pair.batch, pair.kv, 0);
    for (int64_t s = keys.first; s < keys.last; ++s, source += round_up(width, kPad))
      kernels().narrow(p_.dtype, source, width, element(view, p_.dtype, base + s * view.row));
  }

  const Problem& p_;
  const BiasGradient& dbias_;
  const float* delta_;    // [B * K, T, G]
  const int64_t h_, hv_;  // padded H and Hv
  TileLogits logits_;
  Buffer q_, dout_, k_, v_, k_transposed_, v_transposed_, x_, dp_, ds_, dk_, dv_;
  float row_lse_[kTileRows], row_lse_tail_[kTileRows], row_delta_[kTileRows];
};

// dq of one query tile: the sum of its parts, which the first of them receives, rounded once.
void store_queries(const Problem& p, Pair pair, int64_t query_tile, const QueryPart* parts, int64_t count) {
  const int64_t padded = round_up(p.H, kPad), base = offset_of(p, p.dq, pair.batch, pair.kv, 0);
  for_each_row_block(p, query_tile, [&](int first_row, int rows) {
    float* total = nullptr;
    for (const QueryPart* part = parts; part < parts + count; ++part) {
      const int64_t tile = query_tile - part->tiles.first;
      if (query_tile < part->tiles.first || query_tile >= part->tiles.last || !part->touched[tile]) continue;
      float* sums = part->sums.get() + tile * query_tile_size(p) + first_row * padded;
      if (total) kernels().add(sums, rows * padded, total);
      else total = sums;
    }
    for_each_row(p, query_tile, first_row, rows, [&](int r, int64_t query, int g) {
      char* target = element(p.dq, p.dtype, base + query * p.dq.row + g * p.dq.group);
      if (total) kernels().narrow(p.dtype, total + r * padded, p.H, target);
      else std::memset(target, 0, p.H * size_of(p.dtype));
    });
  });
}

// delta [T, G] of one (batch, key/value head), for one query tile. out and dout: scratch, [kTileRows, padded Hv].
void compute_delta(const Problem& p, Pair pair, int64_t query_tile, float* out, float* dout, float* delta) {
  const int64_t padded = round_up(p.Hv, kPad), base = offset_of(p, p.dlse, pair.batch, pair.kv, 0);
  for_each_row_block(p, query_tile, [&](int first_row, int rows) {
    load_query_rows(p, p.out, pair, query_tile, first_row, rows, p.Hv, out);
    load_query_rows(p, p.dout, pair, query_tile, first_row, rows, p.Hv, dout);
    for_each_row(p, query_tile, first_row, rows, [&](int r, int64_t query, int g) {
      const float dlse = static_cast<const float*>(p.dlse.data)[base + query * p.dlse.row + g * p.dlse.group];
      delta[query * p.G + g] = kernels().dot(out + r * padded, dout + r * padded, padded) - dlse;
    });
  });
}

// The most ranges of keys whose parts of dq fit the budget.
int64_t choose_ranges(const Problem& p, Pieces pieces) {
  const int64_t tile_bytes = query_tile_size(p) * sizeof(float);
  const int64_t without_ranges = std::max<int64_t>(1, pieces.groups * pieces.splits);
  pieces.ranges = std::clamp<int64_t>(ceil_div(kEnoughPieces, without_ranges), 1, std::max<int64_t>(1, p.key_tiles));
  for (; pieces.ranges > 1; pieces.ranges /= 2) {
    int64_t tiles = 0;
    for (int64_t pair = 0; pair < p.B * p.K; ++pair) {
      const LiveTiles live(p, pair_at(p, pair));
      for (int64_t range = 0; range < pieces.ranges; ++range) {
        const Range reached = reach(live, pieces.key_tiles_of(range, p.key_tiles));
        tiles += reached.last - reached.first;
      }
    }
    if (tiles * tile_bytes <= kMaxQueryParts) break;
  }
  return pieces.ranges;
}

}  // namespace

void backward(const Problem& p, const Pool& pool) {
  const int64_t pairs = p.B * p.K;
  BiasGradient dbias(p);
  Pieces pieces = {dbias.members() > 0 ? pairs / dbias.members() : 0, dbias.members(), 1, 1};
  if (dbias.wanted() && pieces.groups > 0) {
    const int64_t copies = std::min(ceil_div(kEnoughPieces, pieces.groups), pieces.members);
    if (copies * dbias.bytes() <= kMaxDbiasCopies) pieces.splits = copies;
  }
  pieces.ranges = choose_ranges(p, pieces);
  // Keys share a dbias that does not depend on the key.
  const bool copy_per_range = dbias.wanted() && p.dbias.col == 0;
  dbias.allocate(pieces.splits * (copy_per_range ? pieces.ranges : 1));

  const Buffer delta(pairs * p.T * p.G);
  parallel_for(pool, pairs * p.query_tiles, [&]() -> Worker {
    auto scratch = std::make_shared<Buffer>(2 * kTileRows * round_up(p.Hv, kPad));
    return [&, scratch](int64_t index) {
      const int64_t pair = index / p.query_tiles;
      float *out = scratch->get(), *dout = out + kTileRows * round_up(p.Hv, kPad);
      compute_delta(p, pair_at(p, pair), index % p.query_tiles, out, dout, delta.get() + pair * p.T * p.G);
    };
  });

  std::vector<QueryPart> parts(pieces.ranges > 1 ? pairs * pieces.ranges : 0);  // [pair, range]
  const int64_t pieces_of_group = pieces.splits * pieces.ranges;
  parallel_for(pool, pieces.groups * pieces_of_group, [&]() -> Worker {
    auto worker = std::make_shared<BackwardWorker>(p, dbias, delta.get());
    return [&, worker](int64_t piece) {
      const int64_t group = piece / pieces_of_group, range = piece % pieces.ranges;
      const int64_t split = piece % pieces_of_group / pieces.ranges;
      const Range key_tiles = pieces.key_tiles_of(range, p.key_tiles), members = pieces.members_of(split);
      const int64_t copy = copy_per_range ? split * pieces.ranges + range : split;
      for (int64_t member = members.first; member < members.last; ++member) {
        const Pair pair = member_of_group(p, dbias, group, member);
        if (pieces.ranges > 1) {
          worker->walk(pair, key_tiles, copy, &parts[(pair.batch * p.K + pair.kv) * pieces.ranges + range]);
          continue;
        }
        QueryPart part;
        worker->walk(pair, key_tiles, copy, &part);
        for (int64_t i = 0; i < p.query_tiles; ++i) store_queries(p, pair, i, &part, 1);
      }
    };
  });

  if (pieces.ranges > 1) {
    parallel_for(pool, pairs * p.query_tiles, [&]() -> Worker {
      return [&](int64_t index) {
        const int64_t pair = index / p.query_tiles;
        store_queries(p, pair_at(p, pair), index % p.query_tiles, &parts[pair * pieces.ranges], pieces.ranges);
      };
    });
  }
  dbias.finish(pool);
}

}  // namespace jax_dma::cpu
