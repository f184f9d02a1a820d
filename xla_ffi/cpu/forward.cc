// Attention, forward: out and lse.
//
// One piece of work is a block of up to 128 rows (queries x the heads of a group) of one (batch, key/value head),
// against its live key tiles in turn:
//
//   x   = q k^T               [rows, 128]   against k transposed once per tile
//   x   = exp(logits - max)                 online softmax: earlier sums shrink when the maximum grows
//   out = out + x v           [rows, Hv]
//
// Calls with few query tiles (decoding) also cut the keys into ranges. Each range leaves its maximum, sum and
// unnormalised out, which are then combined in order. How the work is cut depends on nothing but shapes, so results do
// not depend on the number of threads.
#include <cmath>
#include <limits>

#include "attention.h"
#include "tiles.h"

namespace jax_dma::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kEnoughPieces = 16;       // pieces of work to aim for
constexpr int64_t kLeastTilesOfARange = 4;  // shorter key ranges cost more to combine than they save

struct Widths {
  explicit Widths(const Problem& p) : qk(round_up(p.H, kPad)), v(round_up(p.Hv, kPad)) {}
  int64_t qk, v;
};

// The state of the online softmax for a block of rows.
struct RowState {
  float* max;
  float* sum;
  float* out;  // [rows, padded Hv], not divided by sum
};

class ForwardWorker {
 public:
  explicit ForwardWorker(const Problem& p)
      : p_(p),
        width_(p),
        logits_(p),
        q_(kTileRows * width_.qk),
        k_(kKeyTile * width_.qk),
        k_transposed_(width_.qk * kTileStride),
        v_(kKeyTile * width_.v),
        x_(kTileRows * kTileStride),
        out_(kTileRows * width_.v) {}

  // Rows [first_row, first_row + rows) of a query tile against the live key tiles of a range.
  void attend(Pair pair, int64_t query_tile, int first_row, int rows, Range key_tiles, RowState state) {
    const Kernels& kernel = kernels();
    load_query_rows(p_, p_.q, pair, query_tile, first_row, rows, p_.H, q_.get());
    std::fill_n(state.max, rows, -kInfinity);
    std::fill_n(state.sum, rows, 0.0f);
    std::fill_n(state.out, rows * width_.v, 0.0f);
    LiveTiles(p_, pair).keys(query_tile, key_tiles, [&](int64_t key_tile, bool full) {
      if (!logits_.prepare(pair, query_tile, key_tile, full, first_row, rows)) return;
      const Columns columns = logits_.columns();
      load_key_rows(p_, p_.k, pair, key_tile, p_.H, k_.get());
      load_key_rows(p_, p_.v, pair, key_tile, p_.Hv, v_.get());
      kernel.transpose(k_.get(), width_.qk, kKeyTile, width_.qk, k_transposed_.get(), kTileStride);
      kernel.matmul(rows, columns.size(), p_.H, q_.get(), width_.qk, 1, k_transposed_.get() + columns.first,
                    kTileStride, x_.get() + columns.first, kTileStride, false);
      kernel.softmax(logits_.rows(), rows, logits_.options(), columns, x_.get(), state.max, state.sum, state.out,
                     width_.v);
      kernel.matmul(rows, width_.v, columns.size(), x_.get() + columns.first, kTileStride, 1,
                    v_.get() + columns.first * width_.v, width_.v, state.out, width_.v, true);
    });
  }

  void finish(Pair pair, int64_t query_tile, int first_row, int rows, RowState state) {
    const int64_t out_base = offset_of(p_, p_.out, pair.batch, pair.kv, 0);
    const int64_t lse_base = offset_of(p_, p_.lse, pair.batch, pair.kv, 0);
    for_each_row(p_, query_tile, first_row, rows, [&](int r, int64_t query, int g) {
      float* row = state.out + r * width_.v;
      const bool sees_nothing = state.sum[r] == 0;  // the greatest logit alone adds 1
      if (sees_nothing) std::fill_n(row, width_.v, 0.0f);
      else kernels().scale(1.0f / state.sum[r], width_.v, row);
      kernels().narrow(p_.dtype, row, p_.Hv,
                       element(p_.out, p_.dtype, out_base + query * p_.out.row + g * p_.out.group));
      const float log_sum = std::log(state.sum[r]), total = sees_nothing ? -kInfinity : state.max[r] + log_sum;
      float* const lse = static_cast<float*>(p_.lse.data) + lse_base + query * p_.lse.row + g * p_.lse.group;
      lse[0] = total, lse[1] = sees_nothing ? 0.0f : (state.max[r] - total) + log_sum;
    });
  }

  // Adds the state of another key range to `into`.
  void combine(int rows, RowState into, RowState from) {
    for (int r = 0; r < rows; ++r) {
      const float max = std::max(into.max[r], from.max[r]), base = max == -kInfinity ? 0.0f : max;
      const float shrink_into = std::exp(into.max[r] - base), shrink_from = std::exp(from.max[r] - base);
      float *to = into.out + r * width_.v, *other = from.out + r * width_.v;
      kernels().scale(shrink_into, width_.v, to);
      kernels().scale(shrink_from, width_.v, other);
      kernels().add(other, width_.v, to);
      into.max[r] = max;
      into.sum[r] = into.sum[r] * shrink_into + from.sum[r] * shrink_from;
    }
  }

  RowState own_state() { return {max_, sum_, out_.get()}; }

 private:
  const Problem& p_;
  const Widths width_;
  TileLogits logits_;
  Buffer q_, k_, k_transposed_, v_, x_, out_;
  float max_[kTileRows], sum_[kTileRows];
};

}  // namespace

void forward(const Problem& p, const Pool& pool) {
  const int64_t row_blocks = ceil_div(static_cast<int64_t>(queries_per_tile(p.G)) * p.G, kTileRows);
  const int64_t blocks = p.B * p.K * p.query_tiles * row_blocks;
  if (blocks == 0) return;

  // Heads one after the other, so that threads share keys in the cache. Under causal the last query tiles see the most
  // keys; they go first, so that no thread is left with one at the end.
  const auto locate = [&](int64_t block, auto visit) {
    const int64_t row_block = block % row_blocks, rest = block / row_blocks;
    const int64_t query_tile = p.query_tiles - 1 - rest % p.query_tiles;
    const Range queries = queries_of(p, query_tile);
    const int64_t first_row = row_block * kTileRows;
    const int64_t rows = std::min<int64_t>(kTileRows, (queries.last - queries.first) * p.G - first_row);
    if (rows > 0)
      visit(pair_at(p, rest / p.query_tiles), query_tile, static_cast<int>(first_row), static_cast<int>(rows));
  };

  const int64_t ranges =
      std::max<int64_t>(1, std::min(ceil_div(kEnoughPieces, blocks), p.key_tiles / kLeastTilesOfARange));
  if (ranges == 1) {
    parallel_for(pool, blocks, [&]() -> Worker {
      auto worker = std::make_shared<ForwardWorker>(p);
      return [&, worker](int64_t block) {
        locate(block, [&](Pair pair, int64_t query_tile, int first_row, int rows) {
          worker->attend(pair, query_tile, first_row, rows, {0, p.key_tiles}, worker->own_state());
          worker->finish(pair, query_tile, first_row, rows, worker->own_state());
        });
      };
    });
    return;
  }

  const int64_t width = round_up(p.Hv, kPad), stride = kTileRows * (2 + width);
  const Buffer states(blocks * ranges * stride);
  const auto state = [&](int64_t block, int64_t range) {
    float* base = states.get() + (block * ranges + range) * stride;
    return RowState{base, base + kTileRows, base + 2 * kTileRows};
  };
  parallel_for(pool, blocks * ranges, [&]() -> Worker {
    auto worker = std::make_shared<ForwardWorker>(p);
    return [&, worker](int64_t piece) {
      const int64_t block = piece / ranges, range = piece % ranges;
      const Range key_tiles = {p.key_tiles * range / ranges, p.key_tiles * (range + 1) / ranges};
      locate(block, [&](Pair pair, int64_t query_tile, int first_row, int rows) {
        worker->attend(pair, query_tile, first_row, rows, key_tiles, state(block, range));
      });
    };
  });
  parallel_for(pool, blocks, [&]() -> Worker {
    auto worker = std::make_shared<ForwardWorker>(p);
    return [&, worker](int64_t block) {
      locate(block, [&](Pair pair, int64_t query_tile, int first_row, int rows) {
        for (int64_t range = 1; range < ranges; ++range) worker->combine(rows, state(block, 0), state(block, range));
        worker->finish(pair, query_tile, first_row, rows, state(block, 0));
      });
    };
  });
}

}  // namespace jax_dma::cpu
