// Forward attention with mma.sync and cp.async, for compute capability 8.0 and newer.
//
// One block of 4 warps per (tile of kM rows, key/value head, batch entry). The rows are queries x heads of the group,
// so keys, mask and bias are read once for all G heads. Warps share out the rows; each keeps its part of the output in
// registers and runs the softmax on its own.
//
//   head dim   rows x keys   rows a warp   shared memory: q + k + v
//   64         128 x 64      32            16 + 8 + 8 = 32 KB
//   128        128 x 64      32            32 + 16 + 16 = 64 KB
//   256        64 x 32       16            32 + 16 + 16 = 64 KB
// plus a bias tile of rows x keys where bias varies over queries (16 KB in 16 bits, 32 KB in f32 at most; 96 KB in
// all). 32 rows a warp halve the shared-memory reads per product against 16, which is what bounds the 16-row shape; two
// blocks an SM overlap the softmax of one with the products of the other.
//
// Keys are loaded while the previous tile's softmax and p v run, values while q k^T runs: one buffer each.
#pragma once

#include "../live_tiles.cuh"
#include "../tile_order.h"
#include "logits.cuh"
#include "tile.cuh"

namespace jax_dma::sm80 {

template <int kHeadDim>
struct ForwardShape {
  static constexpr int kRows = kHeadDim <= 128 ? 128 : 64;
  static constexpr int kKeys = kHeadDim <= 128 ? 64 : 32;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kM = kRows / (16 * kWarps);  // row blocks of a warp
  static constexpr int kTileBytes = 2 * kHeadDim * (kRows + 2 * kKeys);
  // After q, k and v: mask bits, intervals, bias.
  __host__ __device__ static int bits_bytes(const Problem& p) {
    return p.bits.present() ? MaskTile<kRows, kKeys>::kBytes : 0;
  }
  static int shared_bytes(const Problem& p, Bias bias) {
    const int bias_bytes = bias == Bias::kNone  ? 0
                           : bias == Bias::kKey ? 4 * kKeys
                                                : kRows * kKeys * (p.bias_dtype == DType::kF32 ? 4 : 2);
    return kTileBytes + bits_bytes(p) + IntervalTile<kKeys>::bytes(p) + bias_bytes;
  }
};

template <class T, int kHeadDim, class MaskKind, class BiasKind>
__global__ void __launch_bounds__(ForwardShape<kHeadDim>::kThreads, 2)
    jax_dma_sm80_forward(const __grid_constant__ Problem p, const __grid_constant__ TileOrder order,
                         bool bias_aligned) {
  using Shape = ForwardShape<kHeadDim>;
  constexpr Mask kMask = MaskKind::kind;
  constexpr Bias kBias = BiasKind::kind;
  constexpr int kRows = Shape::kRows, kKeys = Shape::kKeys, kThreads = Shape::kThreads, kM = Shape::kM;
  constexpr int kS = kKeys / 8, kO = kHeadDim / 8;  // column blocks of logits and output
  constexpr int kQueryParts = kTileRows / kRows, kKeyParts = kKeyTile / kKeys;

  // Rescaling rarely costs a branch, which without masks and bias costs more than it saves (1.69 against 1.68 ms and,
  // with them, 2.50 against 2.61 ms at N32 K8 T8192 H128 on an H200).
  constexpr bool kRareRescale = kMask != Mask::kNone || kBias != Bias::kNone;
  constexpr float kSlack = kRareRescale ? 8.0f : 0.0f;

  extern __shared__ __align__(128) char shared[];
  const uint32_t q_tile = ptx::shared_address(shared), k_tile = q_tile + 2 * kHeadDim * kRows,
                 v_tile = k_tile + 2 * kHeadDim * kKeys;
  const int mask_bytes =
      kMask == Mask::kNone ? 0 : (kMask == Mask::kBits ? Shape::bits_bytes(p) : 0) + IntervalTile<kKeys>::bytes(p);
  const uint32_t mask_tile = q_tile + Shape::kTileBytes,
                 interval_tile = mask_tile + (kMask == Mask::kBits ? Shape::bits_bytes(p) : 0);
  char* const bias_tile = shared + Shape::kTileBytes + mask_bytes;

  // Which tile: the last queries of all heads first, because under a causal mask they see the most keys, and a long
  // block that starts late is waited for.
  const int tile_queries = queries_per_tile(p.G), queries = tile_queries / kQueryParts;
  const auto [tile, head] = order.at(blockIdx.x);
  const int t0 = (order.tiles - 1 - tile) * queries, t1 = min(t0 + queries, static_cast<int>(p.T));
  __shared__ BlockOperands<T> operands;
  __shared__ RowTable<kRows> table;
  if (threadIdx.x == 0) operands.fill(p, head / p.K, head % p.K);
  table.template fill<kThreads>(p.G);
  __syncthreads();

  const int warp_row = threadIdx.x / 32 * 16 * kM;
  const ThreadRows<kRows> rows(table, warp_row);

  LiveTiles<kKeyParts> live;
  const auto next_part = [&] {
    return live.next(
        static_cast<int>(p.key_tiles),
        [&](int word) { return skip_hidden(p, operands.bounds, word, static_cast<int>(p.key_tiles), t0, t1); },
        [&](int word) { return key_tiles_word(p, operands, t0 / tile_queries, word, tile_queries); },
        [&](int part) {
          return part * kKeys < static_cast<int>(p.S) &&
                 (!p.causal || part * kKeys <= t1 - 1 + static_cast<int>(p.causal_offset()));
        });
  };
  const auto load_keys = [&](uint32_t target, const T* base, const View& view, int channels, int key) {
    load_rows<T, kKeys, kHeadDim, kThreads>(target, base + key * view.row, view.row, static_cast<int>(p.S) - key,
                                            channels);
  };

  float o[kM][kO][4];
  clear(o);
  float m[2 * kM], l[2 * kM];
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) m[i] = -INFINITY, l[i] = 0.0f;
  // Logits are x * p.scale where scaling is left to the exponential, and otherwise x.
  const bool scaled_late = kBias == Bias::kNone && p.softcap == 0.0f && p.scale > 0.0f;
  const float log2_factor = scaled_late ? p.scale * kLog2e : kLog2e;

  int part = next_part();
  if (part >= 0) {
    load_query_rows<T, kRows, kHeadDim, kThreads>(q_tile, operands.q + t0 * p.q.row, p.q, table, (t1 - t0) * p.G, p.H);
    load_keys(k_tile, operands.k, p.k, p.H, part * kKeys);
    ptx::copy_async_commit();
  }
  while (part >= 0) {
    const int key = part * kKeys;
    const bool tile_full = live.tile_full;
    ptx::copy_async_wait<0>();
    __syncthreads();  // q and k are there, and nobody reads v or bias of the previous tile any more
    if (kMask != Mask::kNone && p.start.present() && !tile_full)
      IntervalTile<kKeys>::template load<kThreads>(interval_tile, p, operands.start, operands.end, key);
    if (kMask == Mask::kBits && p.bits.present() && !tile_full)
      MaskTile<kRows, kKeys>::template load<kThreads>(mask_tile, p, table, operands.bits, t0, key, queries);
    if constexpr (kBias == Bias::kTile)
      BiasTile{p, operands.bias, bias_aligned}.template load<kRows, kKeys, kThreads>(bias_tile, table, t0, key,
                                                                                     queries);
    if constexpr (kBias == Bias::kKey)
      load_key_bias<kKeys, kThreads>(reinterpret_cast<float*>(bias_tile), p, operands.bias, key);
    load_keys(v_tile, operands.v, p.v, p.Hv, key);
    ptx::copy_async_commit();

    float x[kM][kS][4];
    clear(x);
    multiply<T, kM, kS, kHeadDim, kRows, kKeys, false, false>(x, q_tile, k_tile, warp_row, 0);

    ptx::copy_async_wait<0>();
    __syncthreads();  // v and bias are there, and nobody reads k any more
    part = next_part();
    if (part >= 0) {
      load_keys(k_tile, operands.k, p.k, p.H, part * kKeys);
      ptx::copy_async_commit();
      if constexpr (kBias == Bias::kTile)
        BiasTile{p, operands.bias, bias_aligned}.template prefetch<kRows, kKeys, kThreads>(table, t0, part * kKeys,
                                                                                           queries);
    }

    // Logits, in natural units where there is a cap or a bias; otherwise scaling is left to the exponential.
    float factor = p.scale;
    if (p.softcap != 0.0f) soft_cap(x, p.scale, p.softcap), factor = 1.0f;
    if constexpr (kBias == Bias::kTile)
      BiasTile{p, operands.bias, bias_aligned}.template add<T, kKeys>(x, bias_tile, rows, 0, queries, factor);
    else if constexpr (kBias == Bias::kKey) add_key_bias(x, reinterpret_cast<const float*>(bias_tile), 0, factor);
    else if (factor <= 0.0f) scale_by(x, factor);  // so that the largest product is the largest logit
    if (kMask != Mask::kNone && !tile_full) {
      if (kMask == Mask::kBits && p.bits.present()) MaskTile<kRows, kKeys>::hide(x, mask_tile, p, rows, queries, 0);
      if (p.start.present()) IntervalTile<kKeys>::hide(x, interval_tile, p, rows, t0, 0);
    }
    if (key + kKeys > static_cast<int>(p.S) || (p.causal && key + kKeys - 1 > t0 + static_cast<int>(p.causal_offset())))
      hide_by_position(x, p, rows, t0, key);

    // Online softmax. A row's logits are spread over the four lanes of a quad. The reference m that is subtracted from
    // them moves only when a logit is 2^kSlack above it: any m gives the same result, and the output is hardly ever
    // rescaled.
    float rescale[2 * kM];
    bool moved = false;
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      float peak = m[i];
#pragma unroll
      for (int n = 0; n < kS; ++n) peak = fmaxf(peak, fmaxf(x[i / 2][n][2 * (i % 2)], x[i / 2][n][2 * (i % 2) + 1]));
      peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
      peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
      if (is_hidden(peak)) peak = -INFINITY;
      const bool move = (peak - m[i]) * log2_factor > kSlack;  // false where both are -inf
      rescale[i] = move ? ptx::exp2((m[i] - peak) * log2_factor) : 1.0f;
      if (move) m[i] = peak, moved = true;
    }
    if (!kRareRescale || __any_sync(~0u, moved)) {
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i) {
        l[i] *= rescale[i];
#pragma unroll
        for (int n = 0; n < kO; ++n) o[i / 2][n][2 * (i % 2)] *= rescale[i], o[i / 2][n][2 * (i % 2) + 1] *= rescale[i];
      }
    }
    bool large = false;
    if constexpr (kBias != Bias::kNone) {  // rows of very large logits are shifted before they are multiplied
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i) large |= m[i] != -INFINITY && fabsf(m[i]) > kLarge;
      large = __any_sync(~0u, large);
      if (large) {
#pragma unroll
        for (int i = 0; i < 2 * kM; ++i) {
          const float shift = m[i] == -INFINITY ? 0.0f : m[i];
#pragma unroll
          for (int n = 0; n < kS; ++n) x[i / 2][n][2 * (i % 2)] -= shift, x[i / 2][n][2 * (i % 2) + 1] -= shift;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const float shift = large || m[i] == -INFINITY ? 0.0f : m[i] * log2_factor;
#pragma unroll
      for (int n = 0; n < kS; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& y = x[i / 2][n][2 * (i % 2) + e];
          y = ptx::exp2(y * log2_factor - shift);
          l[i] += y;
        }
    }

    // o += p v: accumulator fragments of p are operand fragments, two column blocks to one k block. v is read ahead.
    const auto v_operand = OperandB<kKeys>::template at<true>(v_tile, 0);
    constexpr int kPairs = kO / 2, kSteps = kS / 2 * kPairs, kAhead = kM == 1 ? 3 : 1, kBuffers = kAhead + 1;
    uint32_t a[kM][4], b[kBuffers][4];
    const auto load = [&](int step) {
      if (step < kSteps) v_operand.template load<true>(b[step % kBuffers], step % kPairs * 2, step / kPairs * 16);
    };
#pragma unroll
    for (int step = 0; step < kAhead; ++step) load(step);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int n = step / kPairs * 2, c = step % kPairs * 2;
      if (c == 0) {
#pragma unroll
        for (int r = 0; r < kM; ++r) {
          a[r][0] = ptx::pack<T>(x[r][n][0], x[r][n][1]), a[r][1] = ptx::pack<T>(x[r][n][2], x[r][n][3]);
          a[r][2] = ptx::pack<T>(x[r][n + 1][0], x[r][n + 1][1]),
          a[r][3] = ptx::pack<T>(x[r][n + 1][2], x[r][n + 1][3]);
        }
      }
      load(step + kAhead);
      const uint32_t (&v)[4] = b[step % kBuffers];
#pragma unroll
      for (int r = 0; r < kM; ++r) ptx::mma<T>(o[r][c], a[r], v[0], v[1]), ptx::mma<T>(o[r][c + 1], a[r], v[2], v[3]);
    }
  }

  const int lane = threadIdx.x % 32;
  T* const out = static_cast<T*>(p.out.data) + offset_of(p, p.out, head / p.K, head % p.K, 0);
  float* const lse = static_cast<float*>(p.lse.data) + offset_of(p, p.lse, head / p.K, head % p.K, 0);
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    float total = l[i];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const int t = t0 + rows.query(i);
    if (rows.query(i) >= queries || t >= p.T) continue;
    const float inverse = total > 0.0f ? 1.0f / total : total == 0.0f ? 0.0f : total;  // NaN stays NaN
    T* const target = out + t * p.out.row + rows.head(i) * p.out.group;
#pragma unroll
    for (int n = 0; n < kO; ++n) {
      const int c = 8 * n + 2 * (lane % 4);
      if (c < p.Hv)
        *reinterpret_cast<uint32_t*>(target + c) =
            ptx::pack<T>(o[i / 2][n][2 * (i % 2)] * inverse, o[i / 2][n][2 * (i % 2) + 1] * inverse);
    }
    if (lane % 4 == 0)
      *reinterpret_cast<float2*>(lse + t * p.lse.row + rows.head(i) * p.lse.group) =
          log_sum_exp(m[i] * (scaled_late ? p.scale : 1.0f), total);
  }
}

}  // namespace jax_dma::sm80
