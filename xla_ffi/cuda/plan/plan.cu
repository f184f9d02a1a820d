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
constexpr int kRows = 8;  // read at once
constexpr int kLaneKeys = 16, kWarpKeys = 32 * kLaneKeys, kWarpTiles = kWarpKeys / kKeyTile;
static_assert(kWarps * kWarpTiles == kTilesPerWord);

// Four bytes of 0 or 1 to four bits: the product gathers them, in order, in its highest byte.
__device__ __forceinline__ uint32_t four_bits(uint32_t bytes) { return (bytes * 0x01020408u) >> 24; }

__device__ __forceinline__ uint32_t sixteen_bits(uint4 bytes) {
  return four_bits(bytes.x) | four_bits(bytes.y) << 4 | four_bits(bytes.z) << 8 | four_bits(bytes.w) << 12;
}
__device__ __forceinline__ uint32_t up_to_sixteen_bits(const uint8_t* bytes, int count) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kLaneKeys; ++i)
    if (i < count) bits |= uint32_t{bytes[i]} << i;
  return bits;
}

// From 16 bits a lane of each of four rows to 64 neighbouring bits of row `row_of_lane()`: lanes 4 i to 4 i + 3 have
// those of keys 64 i to 64 i + 63.
__device__ __forceinline__ int row_of_lane() { return threadIdx.x % 2 * 2 + threadIdx.x / 2 % 2; }
__device__ __forceinline__ uint2 gather_row(const uint32_t (&bits)[4]) {
  const bool odd = threadIdx.x % 2 != 0, upper = threadIdx.x / 2 % 2 != 0;
  const uint32_t low = bits[0] | bits[1] << 16, high = bits[2] | bits[3] << 16;
  const uint32_t other = __shfl_xor_sync(~0u, odd ? low : high, 1);
  const uint32_t left = odd ? other : low, right = odd ? high : other;
  const uint32_t first = __byte_perm(left, right, 0x5410), second = __byte_perm(left, right, 0x7632);
  const uint32_t mine = upper ? second : first, neighbour = __shfl_xor_sync(~0u, upper ? first : second, 2);
  return upper ? make_uint2(neighbour, mine) : make_uint2(mine, neighbour);
}

template <bool kWhole>
__global__ void __launch_bounds__(kThreads, 4) jax_dma_plan(const PlanProblem p, int groups, int heads_of_group) {
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
  if (int64_t{first_tile} * kKeyTile < end) {  // otherwise no bits are written: those are of hidden tiles only
    const int64_t inside = p.S - key;          // keys of this lane that there are
    const uint32_t all = inside >= kLaneKeys ? 0xffffu : inside <= 0 ? 0u : (1u << inside) - 1;
    const int count = static_cast<int>(max(min(end - key, int64_t{kLaneKeys}), int64_t{0}));  // of them, to be read
    const uint32_t read = count > 0 ? 0xffffu : 0u;
    const int word_of_lane = first_tile * 4 + lane / 4 * 2;  // words past the last key tile do not exist
    bool seen = false, full = true;
    for (int g = 0; g < heads_of_group; ++g) {
      const uint8_t* const mask = p.mask + ((head + g) * p.T + t0) * p.S + (kWhole ? min(key, end - kLaneKeys) : key);
      uint32_t* const out = p.bits + ((head + g) * p.T + t0) * 4 * key_tiles + word_of_lane;
      for (int r = 0; r < rows; r += kRows) {
        const auto row = [&](int i) { return mask + min(r + i, rows - 1) * p.S; };
        uint32_t bits[kRows / 4][4];
        if constexpr (kWhole) {  // rows begin at multiples of 16 bytes and `end` is one
          uint4 bytes[kRows];    // with no branch between the loads: they are to be in flight together
#pragma unroll
          for (int i = 0; i < kRows; ++i) bytes[i] = __ldg(reinterpret_cast<const uint4*>(row(i)));
#pragma unroll
          for (int i = 0; i < kRows; ++i) bits[i / 4][i % 4] = sixteen_bits(bytes[i]) & read;
        } else {
#pragma unroll
          for (int i = 0; i < kRows; ++i) bits[i / 4][i % 4] = up_to_sixteen_bits(row(i), count);
        }
#pragma unroll
        for (int i = 0; i < kRows / 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) seen |= bits[i][j] != 0, full &= bits[i][j] == all;
          const uint2 words = gather_row(bits[i]);
          const int at = r + 4 * i + row_of_lane();
          if (at < rows && word_of_lane < 4 * key_tiles)
            *reinterpret_cast<uint2*>(out + at * 4 * int64_t{key_tiles}) = words;
        }
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
