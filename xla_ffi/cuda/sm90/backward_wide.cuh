// Backward attention for Hopper, head dimensions above 128: see backward.cuh for what is common to both kernels.
//
// A block has 64 keys. Its two consumer warpgroups share the rows of s^T and dp^T (32 each) and the channels of dv, dk
// and dq (one half each), so p and ds both go through shared memory:
//
//   s^T, dp^T [64 keys x 32 rows]     p^T, ds^T -> shared memory     dv, dk [64 keys x 128], dq [64 rows x 128]
//
// dq is added to device memory from registers: there is no room to stage its 64 KB. Where the order of the additions
// must be fixed (kStaged) dout has one stage only and dq leaves by way of shared memory in two halves, the second
// beside the next tile's exponentials.
//
// Shared memory: k, v 64 KB; two stages of q, dout 128 KB (kStaged: 96 KB, and half of dq 32 KB); ds, p 16 KB; row
// statistics 1 KB; bits 1 KB.
#pragma once

#include "backward.cuh"

namespace jax_dma::sm90 {

template <class T, class MaskKind, class BiasKind, bool kStaged>
__global__ void __launch_bounds__(kThreads, 1)
    jax_dma_sm90_backward_wide(const __grid_constant__ Problem p, const __grid_constant__ BackwardMaps maps,
                               const __grid_constant__ BackwardScratch scratch,
                               const __grid_constant__ BackwardPlan plan) {
  using Shape = BackwardShape<256, 1, kStaged>;
  constexpr Mask kMask = MaskKind::kind;
  constexpr Bias kBias = BiasKind::kind;
  static_assert(kBias != Bias::kTile);
  constexpr int kBlockKeys = Shape::kKeys, kPanels = Shape::kPanels, kQPanel = Shape::kQPanel;
  constexpr int kKVPanel = Shape::kKVPanel, kGroupRows = kRows / 2, kGroupPanels = kPanels / 2;
  constexpr bool kLogits = kMask == Mask::kBits;     // something is loaded for each tile of logits
  constexpr bool kHideFirst = kBias != Bias::kNone;  // before the exponentials
  constexpr int kHalfBytes = Shape::kDQBytes / 2;    // of a warpgroup's dq, on its way out
  constexpr int kProducerRegs = 24, kConsumerRegs = 240;
  static_assert(kProducerRegs + 2 * kConsumerRegs <= 3 * 168);

  extern __shared__ __align__(1024) char dynamic[];
  __shared__ BackwardShared shared;
  __shared__ BlockOperands<T> operands;
  const uint32_t k_tile = ptx::shared_address(dynamic), v_tile = k_tile + Shape::kKVBytes,
                 q_tiles = v_tile + Shape::kKVBytes, dout_tiles = q_tiles + 2 * Shape::kQBytes,
                 ds_tile = k_tile + Shape::kDS, p_tile = ds_tile + Shape::kDSBytes;
  float* const stats = reinterpret_cast<float*>(dynamic + Shape::kStats);  // [stage][log-sum-exp, -delta][row]

  const int chunk = blockIdx.x / (plan.chunk * plan.parts), block = blockIdx.x % (plan.chunk * plan.parts);
  const int width = min(plan.chunk, plan.heads - chunk * plan.chunk);
  const int part = plan.first_part + block / width, head = plan.first_head + chunk * plan.chunk + block % width;
  const int key = part * kBlockKeys, queries = queries_per_tile(p.G) / kQueryParts;

  if (threadIdx.x == 0) {
    operands.fill(p, head / p.K, head % p.K);
    barrier_init(&shared.kv_full, 1), barrier_init(&shared.ds_free, 8);
    for (int i = 0; i < 4; ++i) barrier_init(&shared.job_full[i], 1);
    for (int i = 0; i < 2; ++i) {
      barrier_init(&shared.dq_full[i], 4), barrier_init(&shared.dq_free[i], 1);
      barrier_init(&shared.q_full[i], 1), barrier_init(&shared.dout_full[i], 1);
      barrier_init(&shared.q_free[i], 8), barrier_init(&shared.dout_free[i], 8);
      barrier_init(&shared.logits_full[i], 64), barrier_init(&shared.logits_free[i], 8);
    }
    barrier_init_fence();
  } else if (threadIdx.x == 32) {
    shared.q_batch = static_cast<int>(offset_of(p, p.q, head / p.K, 0, 0) / maps.q_entry);
    shared.dout_batch = static_cast<int>(offset_of(p, p.dout, head / p.K, 0, 0) / maps.dout_entry);
  } else if (threadIdx.x == 64) {
    shared.k_batch = static_cast<int>(offset_of(p, p.k, head / p.K, 0, 0) / maps.k_entry);
    shared.v_batch = static_cast<int>(offset_of(p, p.v, head / p.K, 0, 0) / maps.v_entry);
  } else if (threadIdx.x == 96) {
    shared.dk = offset_of(p, p.dk, head / p.K, head % p.K, 0),
    shared.dv = offset_of(p, p.dv, head / p.K, head % p.K, 0);
    int start = -1;
    if (kMask != Mask::kNone && p.start.present() && !p.deterministic && scratch.dbias == nullptr)
      start = first_tile_of_window(p, head, key / kKeyTile);
    shared.start = start >= 0 ? start : first_tile(p, scratch, head, part);
  }
  for (int r = threadIdx.x; r < kRows; r += kThreads)
    shared.rows.packed[r] = r < queries * p.G ? r / p.G | (r % p.G) << 16 : queries - 1;
  // Rows of q and dout that no load reaches.
  for (int i = threadIdx.x + queries * p.G * 8; i < kQPanel / 16; i += kThreads)
    for (int panel = 0; panel < (2 + Shape::kDoutStages) * kPanels; ++panel)
      *reinterpret_cast<uint4*>(dynamic + 2 * Shape::kKVBytes + panel * kQPanel + 16 * i) = uint4{0, 0, 0, 0};
  fence_async_proxy();
  __syncthreads();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < 4) {
    give_registers<kProducerRegs>();
    constexpr bool kIntervals = kMask != Mask::kNone;  // there may be intervals
    if (warp == 0) {
      Walk<kQueryParts, kIntervals> walk(p, shared.start);
      const int kv_head = head % p.K, bytes = kPanels * queries * p.G * 128;
      int i = 0;
#pragma unroll 1
      for (int tile = walk.next(p, operands, key); tile >= 0; tile = walk.next(p, operands, key), ++i) {
        const int stage = i & 1, parity = (i >> 1 & 1) ^ 1, t0 = tile * queries;
        int turn = 0;
        if (kStaged && p.deterministic) {  // blocks add to dq in the order of their keys
          constexpr int kPerTile = kKeyTile / kBlockKeys;
          const int key_tile = key / kKeyTile;
          turn = part % kPerTile + kPerTile * (kMask == Mask::kNone
                                                   ? key_tile
                                                   : key_tiles_before<kIntervals>(p, operands, tile / kQueryParts,
                                                                                  key_tile, queries_per_tile(p.G)));
        }
        if (lane == 0) {
          if (i == 0) {
            arrive_expecting(&shared.kv_full, 2 * Shape::kKVBytes);
            for (int panel = 0; panel < kPanels; ++panel) {
              load_box(k_tile + panel * kKVPanel, &maps.k, &shared.kv_full, 64 * panel, kv_head, key, shared.k_batch);
              load_box(v_tile + panel * kKVPanel, &maps.v, &shared.kv_full, 64 * panel, kv_head, key, shared.v_batch);
            }
          }
          wait(&shared.q_free[stage], parity);
          int hidden = kMask == Mask::kBits && p.bits.present() && !walk.tile_full ? kTestBits : 0;
          if (key + kBlockKeys > static_cast<int>(p.S) ||
              (p.causal && key + kBlockKeys - 1 > t0 + static_cast<int>(p.causal_offset())) ||
              (kMask != Mask::kNone && p.start.present() && !walk.tile_full))
            hidden |= kTestPosition;
          shared.info[stage] = TileInfo{tile, hidden};
          shared.jobs[i & 3] = TileJob{tile, turn, (hidden & kTestBits) != 0};
          arrive(&shared.job_full[i & 3]);
          if (!p.deterministic && scratch.dbias == nullptr) {
            volatile int* const front = scratch.turn + 2 * head * scratch.tiles;
            if (front[0] == part + 1) front[1] = tile / kQueryParts + 1;
          }
          arrive_expecting(&shared.q_full[stage], bytes + 8 * kRows);
          for (int panel = 0; panel < kPanels; ++panel)
            load_box(q_tiles + stage * Shape::kQBytes + panel * kQPanel, &maps.q, &shared.q_full[stage], 64 * panel,
                     kv_head * p.G, t0, shared.q_batch);
          load_bytes(k_tile + Shape::kStats + stage * 8 * kRows,
                     scratch.row_stats + (head * scratch.tiles + tile) * (2 * kRows), 8 * kRows, &shared.q_full[stage]);
          const int dout_stage = kStaged ? 0 : stage;
          wait(&shared.dout_free[dout_stage], kStaged ? (i & 1) ^ 1 : parity);
          arrive_expecting(&shared.dout_full[dout_stage], bytes);
          for (int panel = 0; panel < kPanels; ++panel)
            load_box(dout_tiles + dout_stage * Shape::kQBytes + panel * kQPanel, &maps.dout,
                     &shared.dout_full[dout_stage], 64 * panel, kv_head * p.G, t0, shared.dout_batch);
        }
        __syncwarp();
      }
      if (lane == 0) {
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
          const TileJob job = shared.jobs[i & 3];
          if (job.tile < 0) break;
          wait(&shared.logits_free[stage], parity);
          load_logits<T, kMask, kBias>(p, plan, operands, shared.rows, k_tile + plan.bits_at + stage * plan.bits_stage,
                                       0, job.tile * queries, key, job.bits);
          arrive_after_copies(&shared.logits_full[stage]);
          arrive(&shared.logits_full[stage]);
          if (++stage == plan.logit_stages) stage = 0, parity ^= 1;
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
      }
    } else if constexpr (kStaged) {
      const int group = warp - 2;
      const uint32_t dq_stage = k_tile + Shape::kDQ + group * kHalfBytes;
#pragma unroll 1
      for (int i = 0;; ++i) {
        wait(&shared.job_full[i & 3], i >> 2 & 1);
        const TileJob job = shared.jobs[i & 3];
        __syncwarp();  // all lanes have read it
        if (job.tile < 0) break;
        if (lane == 0) {
          const int64_t half = 2 * (head * scratch.tiles + job.tile) + group;
          if (p.deterministic) {
            while (ptx::load_acquire(scratch.turn + half) != job.turn) __nanosleep(32);
            fence_async_proxy_global();
          }
#pragma unroll 1
          for (int j = 0; j < 2; ++j) {
            wait(&shared.dq_full[group], j);
            if (group * 128 < p.H) {
              bulk_reduce_add(scratch.dq + half * (kRows * 128) + j * (kHalfBytes / 4), dq_stage, kHalfBytes);
              bulk_wait_read();
            }
            arrive(&shared.dq_free[group]);
          }
          if (p.deterministic) {  // once what was added is in memory
            bulk_wait();
            ptx::store_release(scratch.turn + half, job.turn + 1);
          }
        }
        __syncwarp();
      }
      if (lane == 0) bulk_wait();
    }
    return;
  }

  take_registers<kConsumerRegs>();
  const int group = __any_sync(~0u, threadIdx.x >= 256) ? 1 : 0, thread = threadIdx.x % 128;
  const int warp_key = 16 * (warp % 4), k0 = warp_key + lane / 4;  // this thread's keys are k0 and k0 + 8
  float dk[kGroupPanels * 32], dv[kGroupPanels * 32], key_sum[2] = {0.0f, 0.0f}, key_bias[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kGroupPanels * 32; ++i) dk[i] = dv[i] = 0.0f;
  if constexpr (kBias == Bias::kKey) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int s = key + k0 + 8 * h;
      const int64_t index = s * p.bias.col;
      if (s < static_cast<int>(p.S))
        key_bias[h] = p.bias_dtype == DType::kF32 ? reinterpret_cast<const float*>(operands.bias)[index]
                      : p.bias_dtype == DType::kBF16
                          ? __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(operands.bias)[index])
                          : __half2float(reinterpret_cast<const __half*>(operands.bias)[index]);
    }
  }
  // Kept in registers where each tile may need it.
  const SeenBy seen = kMask == Mask::kIntervals ? SeenBy::of<kMask>(p, operands, key + k0) : SeenBy();
  const float log2_factor = kBias == Bias::kNone && p.softcap == 0.0f ? p.scale * kLog2e : kLog2e;
  const int first_row = group * kGroupRows;
  float x[16], dq[kGroupPanels * 32];

  const auto release = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) arrive(barrier);
  };
  // [64 keys x 32 rows] of keys (k or v) by rows (q or dout).
  const auto issue_rows = [&](float (&d)[16], uint32_t keys_tile, uint32_t rows_tile) {
    const uint64_t a = operand(keys_tile), b = operand(rows_tile + first_row * 128);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kPanels * 4; ++c)
      wgmma_shared<T>(d, advance(a, (c / 4) * kKVPanel + (c % 4) * 32), advance(b, (c / 4) * kQPanel + (c % 4) * 32),
                      c > 0);
    wgmma_commit();
  };
  // Adds keys x rows (p^T or ds^T) by this group's channels of rows (dout or q).
  const auto issue_channels = [&](float (&d)[kGroupPanels* 32], uint32_t keys_tile, uint32_t rows_tile) {
    const uint64_t a = operand(keys_tile), b = operand(rows_tile + group * kGroupPanels * kQPanel, kQPanel);
#pragma unroll
    for (int c = 0; c < kRows / 16; ++c)
      wgmma_shared<T, false, true>(d, advance(a, c * 32), advance(b, c * 2048), true);
    wgmma_commit();
  };

  // As in backward.cuh.
  const auto prepare = [&](int stage, int dout_parity) {
    float* const lse = stats + stage * 2 * kRows;
    const int dout_stage = kStaged ? 0 : stage;
    const uint32_t dout_tile = dout_tiles + dout_stage * Shape::kQBytes;
    bool special = false;
#pragma unroll
    for (int r = 0; r < kRows; r += 32)
      special |= RowStat{lse[r + lane]}.special() && (kBias != Bias::kNone || r + lane < queries * p.G);
    special = __any_sync(~0u, special);
    wait(&shared.dout_full[dout_stage], dout_parity);
    if (special) {
#pragma unroll 1
      for (int j = threadIdx.x - 128; j < kRows * 8 * kPanels; j += kConsumers) {
        const int panel = j / (kRows * 8), r = j / 8 % kRows;
        const uint32_t chunk = dout_tile + panel * kQPanel + r * 128 + j % 8 * 16;
        if (RowStat{lse[r]}.blank()) {
          ptx::store_shared(chunk, make_uint4(0, 0, 0, 0));
        } else if (kBias != Bias::kNone && RowStat{lse[r]}.special()) {
          const int t = shared.info[stage].tile * queries + shared.rows.query(r);
          const float factor = operands.weight_factor(p, t, shared.rows.head(r));
          ptx::scale_shared<T>(chunk, factor);
          if (panel == 0 && j % 8 == 0) lse[kRows + r] *= factor;
        }
      }
      fence_async_proxy();
      named_sync(4, kConsumers);
    }
    return special;
  };

  wait(&shared.q_full[0], 0);
  int tile = shared.info[0].tile;
  bool special = false;
  if (tile >= 0) {
    wait(&shared.kv_full, 0);
    issue_rows(x, k_tile, q_tiles);
    special = prepare(0, 0);
    wgmma_wait<0>();
    hold(x);
  }
  // One half of this group's dq, of 64 channels, to where it is added from: the first as soon as it is there, the
  // second beside the next tile's exponentials, when the first has been read.
  const auto stage_dq = [&](int half) {
    wait(&shared.dq_free[group], half ^ 1);
    float4* const target = reinterpret_cast<float4*>(dynamic + Shape::kDQ + group * kHalfBytes) + thread;
#pragma unroll
    for (int c = 0; c < kGroupPanels * 4; ++c) {
      const int e = 4 * (half * kGroupPanels * 4 + c);
      target[c * 128] = make_float4(dq[e], dq[e + 1], dq[e + 2], dq[e + 3]);
    }
    fence_async_proxy();
    release(&shared.dq_full[group]);
  };
  bool any = false;
#pragma unroll 1
  for (int i = 0; tile >= 0; ++i) {
    const int stage = i & 1, parity = i >> 1 & 1;
    const int logit_stage = plan.logit_stages == 2 ? stage : 0, logit_parity = plan.logit_stages == 2 ? parity : stage;
    const int dout_stage = kStaged ? 0 : stage;
    const uint32_t q_tile = q_tiles + stage * Shape::kQBytes, dout_tile = dout_tiles + dout_stage * Shape::kQBytes;
    const float* const lse = stats + stage * 2 * kRows;
    // Of the rows in this thread's columns.
    const float2* const lse2 = reinterpret_cast<const float2*>(lse + first_row) + lane % 4;

    float y[16];
    issue_rows(y, v_tile, dout_tile);
    if (kLogits) wait(&shared.logits_full[logit_stage], logit_parity);
    float factor = p.scale;
    uint32_t slopes[8];  // of the soft cap
    if (p.softcap != 0.0f) {
      const float inner = p.scale / p.softcap;
      factor = 1.0f;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const float a = ptx::tanh(x[2 * c] * inner), b = ptx::tanh(x[2 * c + 1] * inner);
        x[2 * c] = p.softcap * a, x[2 * c + 1] = p.softcap * b;
        slopes[c] = ptx::pack<T>(1.0f - a * a, 1.0f - b * b);
      }
    }
    if constexpr (kBias == Bias::kKey) {
#pragma unroll
      for (int c = 0; c < 16; ++c) x[c] = fmaf(x[c], factor, key_bias[c / 2 % 2]);
    }
    if (kBias != Bias::kNone && special) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float2 l = lse2[4 * c];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const RowStat stat{e & 1 ? l.y : l.x};
          float& z = x[4 * c + e];
          z = stat.blank() ? -INFINITY : stat.special() ? z - stat.large() : z;
        }
      }
    }
    // Hidden positions are 0 in p, whatever they met on the way.
    const int hidden = shared.info[stage].hidden;
    const auto hide = [&](float value) {
      if (kMask == Mask::kBits && (hidden & kTestBits)) {
        const uint32_t words =
            k_tile + plan.bits_at + logit_stage * plan.bits_stage + (key % kKeys + warp_key) / 32 * 4;
#pragma unroll
        for (int c = 0; c < 4; ++c)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int row = (first_row + 8 * c + 2 * (lane % 4) + e) >> plan.bits_shift;
            uint32_t word;
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(words + row * 16));
            word >>= k0 % 32;
            if ((word & 1) == 0) x[4 * c + e] = value;
            if ((word & 0x100) == 0) x[4 * c + 2 + e] = value;
          }
      }
      if (hidden & kTestPosition)
        hide_positions<kMask, true>(x, value, p, plan, operands, shared.rows,
                                    kMask == Mask::kIntervals ? seen : SeenBy::of<kMask>(p, operands, key + k0),
                                    tile * queries, key + k0, first_row);
    };
    if constexpr (kHideFirst) hide(-INFINITY);
    const auto exponentials = [&](auto shift_of) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float2 l = lse2[4 * c];
#pragma unroll
        for (int e = 0; e < 4; ++e)
          x[4 * c + e] = ptx::exp2(fmaf(x[4 * c + e], log2_factor, -shift_of(e & 1 ? l.y : l.x)));
      }
    };
    if (kBias != Bias::kNone && special)
      exponentials([](float stat) { return RowStat{stat}.special() && !RowStat{stat}.blank() ? 0.0f : stat; });
    else exponentials([](float stat) { return stat; });
    if constexpr (!kHideFirst) hide(0.0f);
    if (kLogits) release(&shared.logits_free[logit_stage]);
    if (kStaged && i > 0) stage_dq(1);
    wgmma_wait<0>();
    hold(y);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float2 minus_delta = lse2[kRows / 2 + 4 * c];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        y[4 * c + e] = x[4 * c + e] * (y[4 * c + e] + (e & 1 ? minus_delta.y : minus_delta.x));
      if constexpr (kBias == Bias::kKey)
        key_sum[0] += y[4 * c] + y[4 * c + 1], key_sum[1] += y[4 * c + 2] + y[4 * c + 3];
    }
    // [key][row], when the products of the tile before are done with theirs. Matrices of 8 keys x 8 rows: lane
    // l gives the address of key l % 8 of matrix l / 8.
    wait(&shared.ds_free, (i & 1) ^ 1);
    const auto store = [&](uint32_t tile, const auto& word) {
      const int l = fresh_lane();
      const uint32_t first = tile + (warp_key + l / 8 % 2 * 8 + l % 8) * 128 + (((group * 4 + l / 16) ^ (l % 8)) << 4);
#pragma unroll
      for (int c = 0; c < 2; ++c)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(first ^ (c << 5)),
                     "r"(word(4 * c)), "r"(word(4 * c + 1)), "r"(word(4 * c + 2)), "r"(word(4 * c + 3))
                     : "memory");
    };
    store(p_tile, [&](int c) { return ptx::pack<T>(x[2 * c], x[2 * c + 1]); });
    if (p.softcap == 0.0f) {
      store(ds_tile, [&](int c) { return ptx::pack<T>(y[2 * c], y[2 * c + 1]); });
    } else {
      store(ds_tile, [&](int c) {
        const float2 slope = ptx::unpack<T>(slopes[c]);
        return ptx::pack<T>(y[2 * c] * slope.x, y[2 * c + 1] * slope.y);
      });
    }
    fence_async_proxy();
    named_sync(1, kConsumers);  // p and ds are there
    wgmma_fence();
    issue_channels(dv, p_tile, dout_tile);
    issue_channels(dk, ds_tile, q_tile);
    const uint64_t ds_columns = operand(ds_tile, 8192),
                   k_columns = operand(k_tile + group * kGroupPanels * kKVPanel, kKVPanel);
#pragma unroll
    for (int c = 0; c < kBlockKeys / 16; ++c)
      wgmma_shared<T, true, true>(dq, advance(ds_columns, c * 2048), advance(k_columns, c * 2048), c > 0);
    wgmma_commit();

    // s of the next tile, behind those (of whatever is there, if there is no next tile).
    float* const target = scratch.dq + (2 * (head * scratch.tiles + tile) + group) * (kRows * 128) + 4 * thread;
    const int next_parity = (i + 1) >> 1 & 1;
    wait(&shared.q_full[stage ^ 1], next_parity);
    tile = shared.info[stage ^ 1].tile;
    issue_rows(x, k_tile, q_tiles + (stage ^ 1) * Shape::kQBytes);
    wgmma_wait<2>();
    hold(dv), hold(dk);
    release(&shared.dout_free[dout_stage]), release(&shared.q_free[stage]);
    wgmma_wait<1>();
    hold(dq);
    release(&shared.ds_free);
    if constexpr (kStaged) {
      stage_dq(0);
    } else if (group * 128 < p.H) {
#pragma unroll
      for (int c = 0; c < kGroupPanels * 8; ++c)
        reduce_add(target + c * 512, dq[4 * c], dq[4 * c + 1], dq[4 * c + 2], dq[4 * c + 3]);
    }
    if (tile >= 0) special = prepare(stage ^ 1, kStaged ? (i + 1) & 1 : next_parity);
    any = true;
    wgmma_wait<0>();
    hold(x);
  }
  if (kStaged && any) stage_dq(1);

  // dk and dv: four lanes exchange their words of a key, so that each has 16 bytes to store.
  const auto store = [&](const float (&d)[kGroupPanels* 32], T* out, const View& view, int channels, float factor) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int s = key + k0 + 8 * h;
#pragma unroll
      for (int n = 0; n < kGroupPanels * 8; n += 4) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          words[j] = ptx::pack<T>(d[4 * (n + j) + 2 * h] * factor, d[4 * (n + j) + 2 * h + 1] * factor);
        transpose_words(words);
        const int c = group * 128 + 8 * (n + lane % 4);
        if (s < static_cast<int>(p.S) && c < channels)
          *reinterpret_cast<uint4*>(out + s * view.row + c) = uint4{words[0], words[1], words[2], words[3]};
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
      float* const sums = reinterpret_cast<float*>(dynamic + Shape::kDS);  // [group][key]; ds has been read
      named_sync(1, kConsumers);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = key_sum[h];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (lane % 4 == 0) sums[group * kBlockKeys + k0 + 8 * h] = sum;
      }
      named_sync(1, kConsumers);
      if (threadIdx.x < 128 + kBlockKeys && p.dbias.col != 0) {
        const int k = threadIdx.x - 128;
        if (key + k < p.S) writer.put(key + k, sums[k] + sums[kBlockKeys + k]);
      }
      if (threadIdx.x == 128 && p.dbias.col == 0) {
        float sum = 0.0f;
        for (int k = 0; k < 2 * kBlockKeys; ++k) sum += sums[k];
        writer.put(0, sum);
      }
    }
  }
}

}  // namespace jax_dma::sm90
