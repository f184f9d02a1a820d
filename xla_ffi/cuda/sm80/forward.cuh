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
// blocks an SM (three at head dim 64) overlap the softmax of one with the products of the other.
//
// Keys are loaded while the previous tile's softmax and p v run, values, bits and bias while q k^T runs: one buffer
// each. What is rare has an instance of its own (kGeneral), so that the loop of the others is short.
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
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kBlocks = kHeadDim <= 64 ? 3 : 2;  // blocks an SM
  static constexpr int kM = kRows / (16 * kWarps);                                            // row blocks of a warp
  static constexpr int kKVBytes = 2 * kHeadDim * kKeys, kTileBytes = 2 * kHeadDim * kRows + 2 * kKVBytes;
  // After q, k and v: mask bits, intervals, bias.
  __host__ __device__ static int bits_bytes(const Problem& p) {
    return p.bits.present() ? MaskTile<kRows, kKeys>::kBytes : 0;
  }
  // Of a bias tile: one per query, or per (query, head).
  __host__ __device__ static int bias_rows(const Problem& p) {
    return p.bias.group != 0 ? kRows : queries_per_tile(p.G) * kRows / kTileRows;
  }
  static int shared_bytes(const Problem& p, Bias bias) {
    const int bias_bytes = bias == Bias::kNone  ? 0
                           : bias == Bias::kKey ? 4 * kKeys
                                                : bias_rows(p) * kKeys * (p.bias_dtype == DType::kF32 ? 4 : 2);
    return kTileBytes + bits_bytes(p) + IntervalTile<kKeys>::bytes(p) + bias_bytes;
  }
};

// Whether a call needs a general instance, one that takes any mask and any bias of its kind.
template <class T>
bool is_general_forward(const Problem& p, bool bias_aligned) {
  if (has_rare_logits<T>(p, bias_aligned) || !(p.scale < 1e6f)) return true;          // kUnseen * scale must be finite
  return p.bias.present() && (p.bias.row != 0 || p.bias.group != 0) && p.S % 8 != 0;  // a chunk is loaded or is not
}

template <class T, int kHeadDim, bool kGeneral, class MaskKind, class BiasKind>
__global__ void __launch_bounds__(ForwardShape<kHeadDim>::kThreads, ForwardShape<kHeadDim>::kBlocks)
    jax_dma_sm80_forward(const __grid_constant__ Problem p, const __grid_constant__ TileOrder order,
                         bool bias_aligned) {
  using Shape = ForwardShape<kHeadDim>;
  using Load = ThreadLoad<Shape::kKeys, kHeadDim, Shape::kThreads>;
  constexpr Mask kMask = MaskKind::kind;
  constexpr Bias kBias = BiasKind::kind;
  constexpr int kRows = Shape::kRows, kKeys = Shape::kKeys, kThreads = Shape::kThreads, kM = Shape::kM;
  constexpr int kS = kKeys / 8, kO = kHeadDim / 8;  // column blocks of logits and output
  constexpr int kQueryParts = kTileRows / kRows, kKeyParts = kKeyTile / kKeys;

  const bool has_bits = kGeneral ? p.bits.present() : kMask == Mask::kBits,
             has_intervals = kGeneral ? p.start.present() : kMask == Mask::kIntervals;
  constexpr bool kBits = !kGeneral && kMask == Mask::kBits, kBiasTile = !kGeneral && kBias == Bias::kTile;
  // Scaling is left to the exponential where nothing is added to the products.
  constexpr bool kScaledLate = !kGeneral && kBias == Bias::kNone;
  const float log2_factor = kScaledLate ? p.scale * kLog2e : kLog2e, slack = 8.0f / log2_factor;

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
  // Where each row of a tile of bits or bias begins in device memory; rows past the end are the last.
  __shared__ const uint32_t* bits_sources[kBits ? kRows : 1];
  __shared__ const char* bias_sources[kBiasTile ? kRows : 1];
  if (threadIdx.x == 0) operands.fill(p, head / p.K, head % p.K);
  table.template fill<kThreads>(p.G);
  __syncthreads();
  if constexpr (kBits || kBiasTile) {
    const int r = threadIdx.x;
    const auto offset = [&](const View& view) {
      const int query = view.group != 0 ? table.query(r) : r, g = view.group != 0 ? table.head(r) : 0;
      return min(t0 + query, t1 - 1) * view.row + g * view.group;
    };
    if (r < kRows) {
      if constexpr (kBits) bits_sources[r] = operands.bits + offset(p.bits);
      if constexpr (kBiasTile) bias_sources[r] = operands.bias + 2 * offset(p.bias);
    }
    __syncthreads();
  }

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * kM;
  const ThreadRows<kRows> rows(table, warp_row);

  // The rows that this thread reads of a tile of bits, a byte each, and where it reads a tile of bias: see add_bias().
  [[maybe_unused]] uint32_t bits_rows = 0, bias_first = 0;
  const auto row_of = [&](const View& view, int r) {
    const int query = table.query(r);
    return view.group != 0 ? r : query < queries ? query : 0;
  };
  if constexpr (kBits && kBiasTile)
    for (int i = 0; i < 2 * kM; ++i) bits_rows |= row_of(p.bits, rows.row(i)) << (8 * i);
  if constexpr (kBiasTile)
    bias_first = ptx::shared_address(bias_tile) +
                 bias_offset<kKeys>(row_of(p.bias, warp_row + lane / 8 % (2 * kM) * 8 + lane % 8),
                                    kM == 1 ? lane / 16 * 8 : 0, 2);
  OperandA<kRows> q_operand = OperandA<kRows>::template at<false>(q_tile, warp_row);
  OperandB<kKeys> k_operand = OperandB<kKeys>::template at<false>(k_tile, 0),
                  v_operand = OperandB<kKeys>::template at<true>(v_tile, 0);
  uint32_t load_target = Load::target(k_tile, 0);
  // Kept in registers, not computed for each tile.
  asm volatile("" : "+r"(q_operand.base), "+r"(k_operand.base), "+r"(v_operand.base), "+r"(load_target));

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

  // Loads of one thread, a pass at a time: keys or values, `offset` from where keys are.
  struct Rows {
    const T* source;
    int count;
  };
  const auto rows_of = [&](const T* base, const View& view, int channels, int key) {
    return Rows{base + (key + Load::row(0)) * view.row + Load::chunk() * 8,
                Load::chunk() * 8 < channels ? static_cast<int>(p.S) - key : 0};
  };
  const auto load_pass = [&](int offset, Rows& rows, const View& view, int pass) {
    constexpr int kStep = Load::kRowsPerPass;
    static_assert(8 % kStep == 0 || kStep % 8 == 0);
    ptx::copy_async_16(((load_target + offset) ^ (pass * kStep % 8 * 16)) + pass * kStep * 128, rows.source,
                       Load::row(pass) < rows.count ? 16 : 0);
    rows.source += kStep * view.row;
  };
  const auto load_keys = [&](int key) {
    Rows rows = rows_of(operands.k, p.k, p.H, key);
#pragma unroll
    for (int pass = 0; pass < Load::kPasses; ++pass) load_pass(0, rows, p.k, pass);
  };
  const auto load_bits = [&](int key) {
    const int r = threadIdx.x;
    if (kRows == kThreads || r < kRows)
      ptx::copy_async<kKeys / 8>(mask_tile + r * (kKeys / 8), bits_sources[r] + key / 32, true);
  };
  constexpr int kBiasStep = kThreads / (kKeys / 8), kBiasPasses = kRows / kBiasStep,
                kBiasBeside = kBiasPasses < 2 ? kBiasPasses : 2;
  const int bias_rows = kBiasTile ? Shape::bias_rows(p) : 0;
  const auto load_bias_pass = [&](int key, int pass) {
    const int r = threadIdx.x / (kKeys / 8) + pass * kBiasStep, c = threadIdx.x % (kKeys / 8) * 8;
    ptx::copy_async_16_if(r < bias_rows, ptx::shared_address(bias_tile) + bias_offset<kKeys>(r, c, 2),
                          bias_sources[r] + 2 * (key + c), key + c < static_cast<int>(p.S));
  };
  // Bias per key, one of this thread.
  const bool bias_f32 = p.bias_dtype == DType::kF32, bias_bf16 = p.bias_dtype == DType::kBF16;
  const auto read_key_bias = [&](int key) {
    const int s = key + threadIdx.x;
    const bool inside = threadIdx.x < kKeys && s < static_cast<int>(p.S);
    return ptx::load_global_if(inside && bias_f32, inside && !bias_f32,
                               operands.bias + s * p.bias.col * (bias_f32 ? 4 : 2));
  };
  const auto write_key_bias = [&](uint32_t value) {
    const float wide = bias_f32    ? hide_low(__uint_as_float(value))
                       : bias_bf16 ? __uint_as_float(value << 16)
                                   : ptx::unpack<__half>(value).x;
    ptx::store_shared_word_if(threadIdx.x < kKeys, ptx::shared_address(bias_tile) + 4 * threadIdx.x,
                              __float_as_uint(wide));
  };

  float o[kM][kO][4];
  clear(o);
  float m[2 * kM], l[2 * kM];
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) m[i] = kUnseen, l[i] = 0.0f;
  [[maybe_unused]] bool large = false;  // some reference of this warp is beyond kLarge

  int part = next_part();
  if (part >= 0) {
    load_query_rows<T, kRows, kHeadDim, kThreads>(q_tile, operands.q + t0 * p.q.row, p.q, table, (t1 - t0) * p.G, p.H);
    load_keys(part * kKeys);
    ptx::copy_async_commit();
  }
  while (part >= 0) {
    const int key = part * kKeys;
    const bool tile_full = live.tile_full;
    [[maybe_unused]] uint32_t key_bias = 0;
    if constexpr (kBias == Bias::kKey) key_bias = read_key_bias(key);
    ptx::copy_async_wait<0>();
    __syncthreads();  // q and k are there, and nobody reads v or bias of the previous tile any more
    if (kMask != Mask::kNone && has_intervals && !tile_full)
      IntervalTile<kKeys>::template load<kThreads>(interval_tile, p, operands.start, operands.end, key);
    if constexpr (kGeneral) {
      if (kMask == Mask::kBits && has_bits && !tile_full)
        MaskTile<kRows, kKeys>::template load<kThreads>(mask_tile, p, table, operands.bits, t0, key, queries);
      if constexpr (kBias == Bias::kTile)
        BiasTile{p, operands.bias, bias_aligned}.template load<kRows, kKeys, kThreads>(bias_tile, table, t0, key,
                                                                                       queries);
    } else if (kBiasTile && bias_rows > kBiasBeside * kBiasStep) {
#pragma unroll
      for (int pass = kBiasBeside; pass < kBiasPasses; ++pass) load_bias_pass(key, pass);
    }

    // What else is loaded comes between the products, behind the first reads of their operands.
    float x[kM][kS][4];
    clear(x);
    Rows values = rows_of(operands.v, p.v, p.Hv, key);
    multiply<T, kM, kS, kHeadDim, false, false>(x, q_operand, k_operand, [&](int step, int steps) {
      if constexpr (kBits)
        if (step == 1) load_bits(key);
      if constexpr (kBiasTile)
        if (step >= 2 && step - 2 < kBiasBeside) load_bias_pass(key, step - 2);
      if (step >= 4 && step - 4 < Load::kPasses) load_pass(Shape::kKVBytes, values, p.v, step - 4);
      if constexpr (kBias == Bias::kKey)
        if (step == steps - 4) write_key_bias(key_bias);
    });
    ptx::copy_async_commit();

    ptx::copy_async_wait<0>();
    __syncthreads();  // v and bias are there, and nobody reads k any more
    part = next_part();
    if (part >= 0) {
      load_keys(part * kKeys);
      ptx::copy_async_commit();
      if constexpr (kBiasTile) {
        if (static_cast<int>(threadIdx.x) < bias_rows) ptx::prefetch_l2(bias_sources[threadIdx.x] + 2 * part * kKeys);
      } else if constexpr (kBias == Bias::kTile) {
        BiasTile{p, operands.bias, bias_aligned}.template prefetch<kRows, kKeys, kThreads>(table, t0, part * kKeys,
                                                                                           queries);
      }
    }

    const bool at_edge =
        key + kKeys > static_cast<int>(p.S) || (p.causal && key + kKeys - 1 > t0 + static_cast<int>(p.causal_offset()));
    if constexpr (kBits && kBiasTile) {
      // Which keys each row sees, so that what is hidden can be -inf in the pairs of biases.
      uint32_t words[2 * kM][kKeys / 32];
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i) {
        if (tile_full) {
#pragma unroll
          for (uint32_t& word : words[i]) word = ~0u;
        } else {
          ptx::load_shared_row(words[i], mask_tile + ((bits_rows >> (8 * i)) & 0xff) * (kKeys / 8));
        }
      }
      if (at_edge) {
        const int offset = static_cast<int>(p.causal_offset()) + t0 + 1 - key;
#pragma unroll
        for (int i = 0; i < 2 * kM; ++i) {
          int visible = static_cast<int>(p.S) - key;
          if (p.causal) visible = min(visible, offset + rows.query(i));
#pragma unroll
          for (int w = 0; w < kKeys / 32; ++w) words[i][w] &= (uint64_t{1} << min(max(visible - 32 * w, 0), 32)) - 1;
        }
      }
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i)
#pragma unroll
        for (uint32_t& word : words[i]) word <<= 6 - 2 * (lane % 4);
      add_bias<T>(x, bias_first, p.scale, [&](uint32_t pair, int i, auto block) {
        constexpr int n = decltype(block)::value;
        return MaskTile<kRows, kKeys>::template hide_pair<T, n % 4>(pair, words[i][n / 4]);
      });
    } else {
      // Logits, in natural units where there is a cap or a bias; otherwise scaling is left to the exponential.
      float factor = p.scale;
      if (kGeneral && p.softcap != 0.0f) soft_cap(x, p.scale, p.softcap), factor = 1.0f;
      if constexpr (kBiasTile) add_bias<T>(x, bias_first, factor, [](uint32_t pair, int, auto) { return pair; });
      else if constexpr (kBias == Bias::kTile)
        BiasTile{p, operands.bias, bias_aligned}.template add<T, kKeys>(x, bias_tile, rows, 0, queries, factor);
      else if constexpr (kBias == Bias::kKey) add_key_bias(x, reinterpret_cast<const float*>(bias_tile), 0, factor);
      else if (kGeneral) scale_by(x, factor);
      if (kMask != Mask::kNone && !tile_full) {
        if (kMask == Mask::kBits && has_bits) MaskTile<kRows, kKeys>::hide(x, mask_tile, p, rows, queries, 0);
        if (has_intervals) IntervalTile<kKeys>::hide(x, interval_tile, p, rows, t0, 0);
      }
      if (at_edge) hide_by_position(x, p, rows, t0, key);
    }

    // Online softmax. A row's logits are spread over the four lanes of a quad. The reference m that is subtracted from
    // them moves only when a logit is 2^8 above it: any m gives the same result, and lanes hardly ever have to talk.
    float peak[2 * kM];
    bool above = false;
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      peak[i] = -INFINITY;
#pragma unroll
      for (int n = 0; n < kS; ++n)
        peak[i] = fmaxf(peak[i], fmaxf(x[i / 2][n][2 * (i % 2)], x[i / 2][n][2 * (i % 2) + 1]));
      above |= peak[i] > m[i] + slack;
    }
    if (__any_sync(~0u, above)) {
      large = false;
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i) {
        peak[i] = fmaxf(peak[i], __shfl_xor_sync(~0u, peak[i], 1));
        peak[i] = fmaxf(peak[i], __shfl_xor_sync(~0u, peak[i], 2));
        if (peak[i] > m[i] + slack) {
          const float rescale = ptx::exp2((m[i] - peak[i]) * log2_factor);
          m[i] = peak[i], l[i] *= rescale;
#pragma unroll
          for (int n = 0; n < kO; ++n) o[i / 2][n][2 * (i % 2)] *= rescale, o[i / 2][n][2 * (i % 2) + 1] *= rescale;
        }
        large |= m[i] != kUnseen && fabsf(m[i]) > kLarge;
      }
      large = __any_sync(~0u, large);
    }
    if (!kScaledLate && large) {  // rows of very large logits are shifted before they are multiplied
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i)
#pragma unroll
        for (int n = 0; n < kS; ++n) x[i / 2][n][2 * (i % 2)] -= m[i], x[i / 2][n][2 * (i % 2) + 1] -= m[i];
    }
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const float shift = !kScaledLate && large ? 0.0f : m[i] * log2_factor;
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
          a[r][0] = ptx::pack_bits<T>(x[r][n][0], x[r][n][1]), a[r][1] = ptx::pack_bits<T>(x[r][n][2], x[r][n][3]);
          a[r][2] = ptx::pack_bits<T>(x[r][n + 1][0], x[r][n + 1][1]),
          a[r][3] = ptx::pack_bits<T>(x[r][n + 1][2], x[r][n + 1][3]);
        }
      }
      load(step + kAhead);
      const uint32_t (&v)[4] = b[step % kBuffers];
#pragma unroll
      for (int r = 0; r < kM; ++r) ptx::mma<T>(o[r][c], a[r], v[0], v[1]), ptx::mma<T>(o[r][c + 1], a[r], v[2], v[3]);
    }
  }

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
            ptx::pack_bits<T>(o[i / 2][n][2 * (i % 2)] * inverse, o[i / 2][n][2 * (i % 2) + 1] * inverse);
    }
    if (lane % 4 == 0)
      *reinterpret_cast<float2*>(lse + t * p.lse.row + rows.head(i) * p.lse.group) =
          log_sum_exp(m[i] * (kScaledLate ? p.scale : 1.0f), total);
  }
}

}  // namespace jax_dma::sm80
