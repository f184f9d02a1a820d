// One block per query tile (all heads of a group, if the mask has one per query head) and 32 key tiles, a word of their
// bitmap. A warp takes 512 keys, 16 bytes a lane, down all rows of the tile: it writes their bits, and votes on the
// four key tiles.
//
// Bound by memory: [1, 8, 8192, 8192] is 537 MB to read, under a causal rule half of it, and 67 MB to write: 0.14 ms or
// 0.08 ms at 4.3 TB/s.
#include "plan.h"

#include "../../common/problem.h"

namespace jax_dma::plan {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kLaneKeys = 16, kWarpKeys = 32 * kLaneKeys, kWarpTiles = kWarpKeys / kKeyTile;
static_assert(kWarps * kWarpTiles == kTilesPerWord);

// Four bytes of 0 or 1 to four bits: the product gathers them, in order, in its highest byte.
__device__ __forceinline__ uint32_t four_bits(uint32_t bytes) { return (bytes * 0x01020408u) >> 24; }

// 16 mask bytes from `row` as bits; those from `end` on are 0.
template <bool kWhole>
__device__ __forceinline__ uint32_t sixteen_bits(const uint8_t* row, int64_t key, int64_t end) {
  if constexpr (kWhole) {  // rows begin at multiples of 16 bytes and `end` is one
    if (key >= end) return 0;
    const uint4 bytes = __ldg(reinterpret_cast<const uint4*>(row + key));
    return four_bits(bytes.x) | four_bits(bytes.y) << 4 | four_bits(bytes.z) << 8 | four_bits(bytes.w) << 12;
  } else {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i)
      if (key + i < end) bits |= uint32_t{row[key + i]} << i;
    return bits;
  }
}

template <bool kWhole>
__global__ void __launch_bounds__(kThreads, 2048 / kThreads)
    jax_dma_plan(const PlanProblem p, int groups, int heads_of_group) {
  const int queries = queries_per_tile(p.G);
  const int query_tiles = static_cast<int>(ceil_div(p.T, queries)),
            key_tiles = static_cast<int>(ceil_div(p.S, kKeyTile));
  const int query_words = static_cast<int>(ceil_div(query_tiles, kTilesPerWord)),
            key_words = static_cast<int>(ceil_div(key_tiles, kTilesPerWord));
  const int word = blockIdx.x % key_words, row_of_tiles = blockIdx.x / key_words;
  const int tile = row_of_tiles % query_tiles;
  const int64_t group = row_of_tiles / query_tiles;                                 // of [outer, K|1]
  const int64_t head = group / groups * p.heads + group % groups * heads_of_group;  // the first one, of [outer, heads]
  const int64_t t0 = int64_t{tile} * queries;
  const int rows = static_cast<int>(min(p.T - t0, int64_t{queries}));
  // Past this the causal rule hides all of each key tile.
  const int64_t last = t0 + rows - 1 + p.S - p.T;  // the last key that the tile's last query sees
  const int64_t end = p.causal ? min(p.S, last < 0 ? 0 : (last / kKeyTile + 1) * kKeyTile) : p.S;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  __shared__ uint32_t by_query[2];
  if (threadIdx.x < 2) by_query[threadIdx.x] = 0;
  __syncthreads();

  const int first_tile = (word * kWarps + warp) * kWarpTiles;  // of the warp's keys
  const int64_t key = int64_t{first_tile} * kKeyTile + lane * kLaneKeys;
  if (int64_t{first_tile} * kKeyTile >= end) {  // hidden: a lane writes the four words of a row and key tile
    const int key_tile = first_tile + lane % kWarpTiles;
    for (int g = 0; g < heads_of_group && key_tile < key_tiles; ++g)
      for (int r = lane / kWarpTiles; r < rows; r += 32 / kWarpTiles)
        reinterpret_cast<uint4*>(p.bits)[((head + g) * p.T + t0 + r) * key_tiles + key_tile] = {};
  } else {
    const int64_t inside = p.S - key;  // keys of this lane that there are
    const uint32_t all = inside >= kLaneKeys ? 0xffffu : inside <= 0 ? 0u : (1u << inside) - 1;
    bool seen = false, full = true;
    for (int g = 0; g < heads_of_group; ++g) {
      const uint8_t* const mask = p.mask + (head + g) * p.T * p.S + t0 * p.S;
      uint32_t* const out = p.bits + ((head + g) * p.T + t0) * 4 * key_tiles;
#pragma unroll 4
      for (int r = 0; r < rows; ++r) {
        const uint32_t bits = sixteen_bits<kWhole>(mask + r * p.S, key, end);
        seen |= bits != 0, full &= bits == all;
        // Two lanes make a word. Words past the last key tile do not exist.
        const uint32_t high = __shfl_down_sync(~0u, bits, 1);
        const int64_t at = key / 32;
        if (lane % 2 == 0 && at < 4 * key_tiles) out[r * 4 * int64_t{key_tiles} + at] = bits | high << 16;
      }
    }
    const uint32_t seen_lanes = __ballot_sync(~0u, seen), full_lanes = __ballot_sync(~0u, full);
    const int key_tile = first_tile + lane;
    if (lane < kWarpTiles && key_tile < key_tiles) {  // lane l speaks for lanes 8 l to 8 l + 7
      uint32_t* const by_key = p.tiles_by_key + (group * key_tiles + key_tile) * 2 * query_words + tile / kTilesPerWord;
      if ((seen_lanes >> (8 * lane)) & 0xff) {
        atomicOr(by_query, 1u << key_tile % kTilesPerWord);
        atomicOr(by_key, 1u << tile % kTilesPerWord);
      }
      if (((full_lanes >> (8 * lane)) & 0xff) == 0xff) {
        atomicOr(by_query + 1, 1u << key_tile % kTilesPerWord);
        atomicOr(by_key + query_words, 1u << tile % kTilesPerWord);
      }
    }
  }
  __syncthreads();
  if (threadIdx.x < 2)
    p.tiles_by_query[((group * query_tiles + tile) * 2 + threadIdx.x) * key_words + word] = by_query[threadIdx.x];
}

}  // namespace

cudaError_t launch(const PlanProblem& p, bool heads_are_grouped, cudaStream_t stream) {
  const int heads_of_group = heads_are_grouped ? p.G : 1, groups = p.heads / heads_of_group;
  const int64_t query_tiles = ceil_div(p.T, queries_per_tile(p.G)), key_tiles = ceil_div(p.S, kKeyTile);
  const int64_t blocks = p.outer * groups * query_tiles * ceil_div(key_tiles, kTilesPerWord);
  if (blocks == 0 || p.S == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const int64_t by_key_words = p.outer * groups * key_tiles * 2 * ceil_div(query_tiles, kTilesPerWord);
  if (cudaError_t error = cudaMemsetAsync(p.tiles_by_key, 0, by_key_words * sizeof(uint32_t), stream);
      error != cudaSuccess)
    return error;
  const bool whole = p.S % kLaneKeys == 0 && reinterpret_cast<uintptr_t>(p.mask) % kLaneKeys == 0;
  const auto kernel = whole ? jax_dma_plan<true> : jax_dma_plan<false>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p, groups, heads_of_group);
  return cudaGetLastError();
}

}  // namespace jax_dma::plan
