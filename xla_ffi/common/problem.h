// One attention call: its shapes, its options, and where each operand lies in memory.
//
// Host and device kernels read the same struct. Letters as in the public documentation: B batch, T query length,
// S key length, N query heads, K key/value heads, G = N / K, H head dimension of q and k, Hv of v.
//
// Tiles. Work is cut into tiles of up to 128 rows by 128 keys. The rows of a tile are `queries_per_tile(G)` consecutive
// queries times the G query heads of one key/value head, head fastest (row = query * G + g), so that one load of keys,
// mask and bias serves all G heads. jax_dma/plan.py computes the same tiles in JAX; the two must agree.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define JAX_DMA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define JAX_DMA_HOST_DEVICE inline
#endif

namespace jax_dma {

constexpr int kKeyTile = 128;         // keys of a tile
constexpr int kTileRows = 128;        // rows of a tile, at most
constexpr int kTilesPerWord = 32;     // tiles described by one word of a tile bitmap
constexpr int kMaxBatchDims = 6;      // after merging; jax_dma/op.py sends calls with more elsewhere
constexpr float kHideBelow = -1e30f;  // a bias this low hides its position
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// The largest power of two q with q * G <= 128 (1 where G is larger).
JAX_DMA_HOST_DEVICE int queries_per_tile(int group) {
  int queries = kTileRows;
  while (queries > 1 && queries * group > kTileRows) queries >>= 1;
  return queries;
}

JAX_DMA_HOST_DEVICE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How many words of key tiles have bounds of intervals of their own: those of long sequences. (jax_dma/tiles.py)
constexpr int64_t kMostTilesWithoutWords = 128;
JAX_DMA_HOST_DEVICE int64_t bounded_words(int64_t key_tiles) {
  return key_tiles > kMostTilesWithoutWords ? ceil_div(key_tiles, kTilesPerWord) : 0;
}

enum class DType : int { kF32, kBF16, kF16 };

// One operand. Strides are in elements and 0 along a broadcast axis; data is null when the operand is absent.
struct View {
  void* data = nullptr;
  int64_t batch[kMaxBatchDims] = {};
  int64_t kv = 0, group = 0;  // query head n = kv_head * G + g lies at kv_head * kv + g * group
  int64_t row = 0, col = 0;   // what a row and a column are is said where the view is declared

  JAX_DMA_HOST_DEVICE bool present() const { return data != nullptr; }
};

struct Problem {
  // Batch axes, merged to the fewest that every operand can be addressed with.
  int batch_rank = 0;
  int64_t batch_size[kMaxBatchDims] = {};
  int64_t B = 1;  // their product

  int64_t T = 0, S = 0;
  int N = 0, K = 0, G = 0, H = 0, Hv = 0;
  int64_t query_tiles = 0, key_tiles = 0;

  float scale = 1.0f;
  float softcap = 0.0f;  // 0: none
  bool causal = false;
  bool deterministic = false;
  DType dtype = DType::kF32;       // of q, k, v, out and their gradients
  DType bias_dtype = DType::kF32;  // of bias and dbias

  View q, k, v;  // row: position, col: channel (stride 1)

  // Dense mask (all three or none). A visible position is a 1 bit; bit i of word w is key 32 * w + i. Rows are padded
  // with 0 to whole key tiles (4 words each); a mask that is the same for all keys has one word and col == 0.
  View bits;  // uint32; row: query, col: word
  // Bitmaps of tiles: plane 0 marks tiles with a visible position, plane 1 tiles with no hidden one (positions past T
  // and S count as not there). plane stride in `plane`.
  View tiles_by_query;  // uint32; row: query tile, col: word of 32 key tiles
  View tiles_by_key;    // uint32; row: key tile, col: word of 32 query tiles
  int64_t tiles_by_query_plane = 0, tiles_by_key_plane = 0;

  // Key intervals (all three or none): key s is visible to query t iff start[s] <= t < end[s].
  View start, end;  // int32; col: key
  // Per key tile, int32; row: which of {smallest start, largest end (both over non-empty intervals), largest start,
  // smallest end}, col: key tile, and after those the bounded_words.
  View bounds;

  View bias;  // bias_dtype; row: query, col: key

  View out;  // row: query, col: channel
  // float; row: query. Two numbers each: the log-sum-exp, and what was lost when it was rounded. Beside logits of -1e9
  // the logarithm of the sum is lost whole, and exp(logit - lse) would be wrong by the factor that the row sees keys.
  View lse;

  // Backward only.
  View dout;        // like out
  View dlse;        // float; row: query. Of the log-sum-exp
  View dq, dk, dv;  // like q, k, v, but never broadcast along a batch axis
  View dbias;       // bias_dtype, like bias; absent when it was not asked for

  // Query t sees keys up to t + causal_offset() under `causal`.
  JAX_DMA_HOST_DEVICE int64_t causal_offset() const { return S - T; }
};

// The element offset of (batch, key/value head, head of the group) in a view.
JAX_DMA_HOST_DEVICE int64_t offset_of(const Problem& p, const View& view, int64_t batch, int64_t kv_head, int64_t g) {
  int64_t offset = kv_head * view.kv + g * view.group;
#ifdef __CUDACC__
#pragma unroll 1
#endif
  for (int axis = p.batch_rank - 1; axis > 0; --axis) {
    offset += (batch % p.batch_size[axis]) * view.batch[axis];
    batch /= p.batch_size[axis];
  }
  return offset + batch * view.batch[0];  // mostly the only axis: no slow division
}

}  // namespace jax_dma
