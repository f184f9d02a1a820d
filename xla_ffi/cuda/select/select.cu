// Radix selection, one row a block (a cluster of blocks where a row is long). Scores become unsigned integers of the
// same order, which stay in registers: 32 or 64 of them a thread, so a row is read once. Each pass counts, in shared
// memory, the next digit (from the top) of the keys whose higher digits are those of the threshold, and finds the digit
// of the threshold: the window-th highest key. Keys above it are chosen, and of those equal to it the first few.
//
// Bound by instructions, and nearly by memory: [1, 8, 8192, 8192] in bf16 is 1.07 GB to read and 0.54 GB to write,
// 0.37 ms at 4.3 TB/s, and half of the reading under the causal rule; an H200 takes 0.55 and 0.39 ms.
#include "select.h"

#include <cooperative_groups.h>

#include <cstring>
#include <type_traits>

namespace jax_dma::select {
namespace {

namespace cg = cooperative_groups;

constexpr int kLongChunk = 16384;    // keys of a block where several can share a row
constexpr int kMaxBlocksPerRow = 8;  // the largest cluster that every device with clusters can run
constexpr int kVectors = 8;          // 16-byte vectors of keys in a thread's registers

// How keys of kBits bits lie in those vectors. Sets of a thread's keys are bit masks: bit i % 32 of word i / 32 is key
// i % kVec of vector i / kVec.
template <int kBits>
struct Format {
  static constexpr int kVec = 128 / kBits;                                       // keys of a vector
  static constexpr int kItems = kVectors * kVec;                                 // keys of a thread
  static constexpr int kSetWords = kItems / 32;                                  // words of a set of them
  static constexpr int kPerWord = 32 / kBits;                                    // keys of a word
  static constexpr uint32_t kLowest = kBits == 16 ? 0x00010001u : 1u;            // lowest bit of each key of a word
  static constexpr uint32_t kHighest = kBits == 16 ? 0x80008000u : 0x80000000u;  // highest
  static constexpr uint32_t kKey = kBits == 16 ? 0xffffu : 0xffffffffu;
};

// A word of scores as keys of the same order: zero is the highest bit alone, so that -0 and +0 tie. No score becomes 0,
// which stands for a hidden key. Not-a-numbers are still to be put in their place.
template <int kBits>
__device__ __forceinline__ uint32_t ordered(uint32_t scores) {
  using F = Format<kBits>;
  uint32_t negative;  // all ones in each negative key: prmt can make bytes of sign bits (__byte_perm cannot)
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(negative) : "r"(scores), "n"(kBits == 16 ? 0xbb99 : 0xbbbb));
  return (scores ^ (negative | F::kHighest)) + (negative & F::kLowest);
}

// Of each of the keys in a word.
template <int kBits>
__device__ __forceinline__ uint32_t max_of(uint32_t a, uint32_t b) {
  return kBits == 16 ? __vmaxu2(a, b) : max(a, b);
}
template <int kBits>
__device__ __forceinline__ uint32_t min_of(uint32_t a, uint32_t b) {
  return kBits == 16 ? __vminu2(a, b) : min(a, b);
}
template <int kBits>
__device__ __forceinline__ uint32_t min_of_sum(uint32_t a, uint32_t b, uint32_t limit) {
  return kBits == 16 ? __viaddmin_u16x2(a, b, limit) : __viaddmin_u32(a, b, limit);
}

template <int kBits>
__device__ __forceinline__ uint32_t key_of(uint32_t word, int i) {
  return kBits == 32 ? word : i == 0 ? word & 0xffffu : word >> 16;
}

// NaN ranks last: the lowest key that is not hidden.
template <int kBits>
__device__ uint32_t with_nan_last(uint32_t word, uint32_t infinity) {
  uint32_t result = 0;
  for (int i = 0; i < Format<kBits>::kPerWord; ++i) {
    const uint32_t key = key_of<kBits>(word, i), zero = 1u << (kBits - 1);
    const bool nan = key != 0 && (key < zero ? zero - key : key - zero) > infinity;
    result |= (nan ? 1u : key) << (kBits * i % 32);
  }
  return result;
}

__device__ __forceinline__ int inclusive_scan(int x, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(~0u, x, step);
    if (lane >= step) x += below;
  }
  return x;
}

struct Found {
  uint32_t digit;
  int above, count;  // keys with a higher digit, and with this one
};

template <int kBits, int kChunk>
struct Shared {
  static constexpr int kThreads = kChunk / Format<kBits>::kItems, kWarps = kThreads / 32;
  // The fewer threads there are to look through the bins, the fewer bins.
  static constexpr int kDigitBits = kChunk >= 8192 ? 11 : 9;
  static constexpr int kBins = 1 << kDigitBits;
  alignas(16) uint32_t histogram[kBins + 4];  // and one bin for keys that do not count
  int group_sums[kBins / 128];
  Found found;
  int ties[kWarps * kVectors];
  int ties_of_block;
};

// Makes the counts of all threads, in all blocks of the row, visible to each of them.
template <int kBins, int kBits, int kChunk>
__device__ __forceinline__ void sum_over_row(Shared<kBits, kChunk>& shared, int blocks) {
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) {
    const cg::cluster_group cluster = cg::this_cluster();
    cluster.sync();
    const int slice = kBins / blocks, first = slice * cluster.block_rank();  // of this block: no other touches it
    for (int bin = first + threadIdx.x; bin < first + slice; bin += blockDim.x) {
      uint32_t sum = 0;
      for (int block = 0; block < blocks; ++block) sum += cluster.map_shared_rank(shared.histogram, block)[bin];
      for (int block = 0; block < blocks; ++block) cluster.map_shared_rank(shared.histogram, block)[bin] = sum;
    }
    cluster.sync();
    return;
  }
#endif
  __syncthreads();
}

// The digit of the wanted-th highest key (from 1). There must be that many. Leaves the histogram empty, unless it has
// no more bins than a warp has lanes: such a pass is the last.
template <int kBins, int kBits, int kChunk>
__device__ __forceinline__ Found find_digit(Shared<kBits, kChunk>& shared, int wanted) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (kBins <= 32) {  // every warp for itself
    const int count = lane < kBins ? shared.histogram[kBins - 1 - lane] : 0, sum = inclusive_scan(count, lane);
    const int owner = __ffs(__ballot_sync(~0u, sum >= wanted)) - 1;
    return {static_cast<uint32_t>(kBins - 1 - owner), __shfl_sync(~0u, sum - count, owner),
            __shfl_sync(~0u, count, owner)};
  } else {
    // Groups of 128 bins, from the highest: first which group, then which of its bins.
    constexpr int kWarps = Shared<kBits, kChunk>::kWarps, kGroups = kBins / 128;
    constexpr int kPer = (kGroups + kWarps - 1) / kWarps;
    uint4 count[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int group = i * kWarps + warp;
      if (kGroups % kWarps != 0 && group >= kGroups) continue;
      uint4* const own = reinterpret_cast<uint4*>(shared.histogram + kBins - 128 * group) - (lane + 1);
      count[i] = *own;
      *own = make_uint4(0, 0, 0, 0);
      const int sum = __reduce_add_sync(~0u, count[i].x + count[i].y + count[i].z + count[i].w);
      if (lane == 0) shared.group_sums[group] = sum;
    }
    __syncthreads();
    const int of_group = lane < kGroups ? shared.group_sums[lane] : 0, upto = inclusive_scan(of_group, lane);
    const int owner = __ffs(__ballot_sync(~0u, upto >= wanted)) - 1;
    int above = __shfl_sync(~0u, upto - of_group, owner);
    if (owner % kWarps == warp) {
      int bins[4] = {};  // from the highest
#pragma unroll
      for (int i = 0; i < kPer; ++i) {  // in registers, hence no index that is not known
        const uint32_t mine = owner / kWarps == i ? ~0u : 0u;
        bins[0] |= count[i].w & mine, bins[1] |= count[i].z & mine;
        bins[2] |= count[i].y & mine, bins[3] |= count[i].x & mine;
      }
      const int sum = bins[0] + bins[1] + bins[2] + bins[3];
      above += inclusive_scan(sum, lane) - sum;
      if (above < wanted && wanted <= above + sum) {
        int digit = kBins - 1 - 128 * owner - 4 * lane;
#pragma unroll
        for (int i = 0; i < 4; ++i, --digit) {
          if (above < wanted && wanted <= above + bins[i])
            shared.found = {static_cast<uint32_t>(digit), above, bins[i]};
          above += bins[i];
        }
      }
    }
    __syncthreads();
    return shared.found;
  }
}

// What a block does of a row.
template <int kBits, int kChunk, bool kWhole, bool kHeld>
struct Row {
  using F = Format<kBits>;
  using SharedType = Shared<kBits, kChunk>;
  using Score = std::conditional_t<kBits == 16, uint16_t, uint32_t>;
  static constexpr int kThreads = SharedType::kThreads, kWarps = SharedType::kWarps;
  struct Set {
    uint32_t word[F::kSetWords];
  };

  SharedType& shared;
  const int blocks;           // of the row
  const Score* const scores;  // the row's, as `mask`
  const uint8_t* const mask;  // or null
  const uint32_t infinity;
  const int begin, end;  // keys of this block, in chunks; with kHeld one chunk
  const int visible;     // keys from here on are hidden
  uint32_t words[kVectors][4];

  // The first key of a vector. Neighbouring threads have neighbouring vectors.
  static constexpr int kStride = kThreads * F::kVec;
  __device__ __forceinline__ int first_key(int chunk, int v) const {
    return chunk + static_cast<int>(threadIdx.x) * F::kVec + v * kStride;
  }
  __device__ __forceinline__ bool has_visible(int chunk, int v) const {
    return v * kStride < visible - first_key(chunk, 0);
  }
  __device__ __forceinline__ void hide_masked(uint32_t (&vector)[4], int key) const {
    if constexpr (kWhole) {
      uint32_t bytes[2];
      if constexpr (F::kVec == 8) memcpy(bytes, __builtin_assume_aligned(mask + key, 8), 8);
      else memcpy(bytes, __builtin_assume_aligned(mask + key, 4), 4);
#pragma unroll
      for (int w = 0; w < 4; ++w)  // the bytes of this word's keys, each times all ones
        vector[w] &= F::kKey * (F::kVec == 8 ? __byte_perm(bytes[w / 2], 0, w % 2 ? 0x4342 : 0x4140)
                                             : __byte_perm(bytes[0], 0, 0x4440 + w));
    } else {
#pragma unroll
      for (int i = 0; i < F::kVec; ++i)
        if (key + i < visible && mask[key + i] == 0) vector[i / F::kPerWord] &= ~(F::kKey << (kBits * i % 32));
    }
  }

  __device__ __forceinline__ void load(int chunk) {
    uint32_t largest = 0;  // magnitude
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int key = first_key(chunk, v);
      uint4 raw = make_uint4(0, 0, 0, 0);
      if (has_visible(chunk, v)) {
        if constexpr (kWhole) {
          const uint4* const source = reinterpret_cast<const uint4*>(scores + first_key(chunk, 0)) + v * kThreads;
          raw = kHeld ? __ldcs(source) : __ldg(source);
        } else {
          uint32_t part[4] = {};
#pragma unroll
          for (int i = 0; i < F::kVec; ++i)
            if (key + i < visible) part[i / F::kPerWord] |= uint32_t{scores[key + i]} << (kBits * i % 32);
          raw = make_uint4(part[0], part[1], part[2], part[3]);
        }
      }
      words[v][0] = raw.x, words[v][1] = raw.y, words[v][2] = raw.z, words[v][3] = raw.w;
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int key = first_key(chunk, v);
      if (!has_visible(chunk, v)) continue;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        largest = max_of<kBits>(largest, words[v][w] & ~F::kHighest);
        words[v][w] = ordered<kBits>(words[v][w]);
      }
      if (mask != nullptr) hide_masked(words[v], key);
      if (key + F::kVec > visible) {
#pragma unroll
        for (int i = 0; i < F::kVec; ++i)
          if (key + i >= visible) words[v][i / F::kPerWord] &= ~(F::kKey << (kBits * i % 32));
      }
    }
    if (max(key_of<kBits>(largest, 0), key_of<kBits>(largest, F::kPerWord - 1)) > infinity) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
#pragma unroll
        for (int w = 0; w < 4; ++w) words[v][w] = with_nan_last<kBits>(words[v][w], infinity);
    }
  }

  // Calls f(chunk) for each chunk of the block that has visible keys, its keys loaded.
  template <typename Function>
  __device__ __forceinline__ void for_each_chunk(Function f) {
    if constexpr (kHeld) {
      if (begin < visible) f(begin);
    } else {
      for (int chunk = begin; chunk < min(end, visible); chunk += kChunk) load(chunk), f(chunk);
    }
  }

  // The bits [0, kOpen) of the threshold, the wanted-th highest of the keys whose other bits are `prefix`. On return
  // `wanted` of the keys that begin like it are to be chosen, and `tied` are there; lower bits of the result are 0
  // where all of them are.
  template <int kOpen>
  __device__ __forceinline__ uint32_t threshold(uint32_t prefix, int& wanted, int& tied) {
    constexpr int kWidth = kOpen < SharedType::kDigitBits ? kOpen : SharedType::kDigitBits;
    constexpr int kShift = kOpen - kWidth, kBins = 1 << kWidth;
    static_assert(kShift == 0 || kOpen == kBits || kBits == 32, "a shift moves whole words");
    const auto count = [&](uint32_t offset) {
      atomicAdd(reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(shared.histogram) + offset), 1u);
    };
    for_each_chunk([&](int chunk) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (!has_visible(chunk, v)) continue;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          if constexpr (kOpen == kBits) {  // offsets in bytes, straight from the word
#pragma unroll
            for (int bit = 0; bit < 32; bit += kBits) count(words[v][w] >> (bit + kShift - 2) & (kBins - 1) * 4);
          } else {
            // Keys that begin with the prefix are below 1 << kOpen without it. Others are counted behind the bins: a
            // branch around each addition would cost more.
            uint32_t rest = words[v][w] ^ F::kLowest * (prefix << kOpen);
            rest = min_of<kBits>(kShift == 0 ? rest : rest >> kShift, F::kLowest * kBins);
            asm("shl.b32 %0, %0, 2;" : "+r"(rest));  // once a word; the compiler would do it for each key
#pragma unroll
            for (int i = 0; i < F::kPerWord; ++i) count(key_of<kBits>(rest, i));
          }
        }
      }
    });
    sum_over_row<kBins>(shared, blocks);
    const Found found = find_digit<kBins>(shared, wanted);
    prefix = prefix << kWidth | found.digit, wanted -= found.above, tied = found.count;
    if constexpr (kShift > 0) {
      if (wanted < tied) return threshold<kShift>(prefix, wanted, tied);
    }
    return prefix << kShift;
  }

  // Which keys of the thread are above the limit (at least 1), and which equal it.
  __device__ __forceinline__ void compare(int chunk, uint32_t limit, Set& above, Set& equal) const {
    const uint32_t below = (limit - 1) * F::kLowest, negated = (-(limit - 1) & F::kKey) * F::kLowest;
    above = equal = Set{};
    constexpr int kHalf = 16 / F::kVec;  // vectors that make 16 keys
#pragma unroll
    for (int v = 0; v < kVectors; v += kHalf) {
      if (!has_visible(chunk, v)) continue;
      // 0, 1 or 2 for each key: below, equal or above. Even keys in the lower half of the word, odd ones in the upper.
      uint32_t classes = 0;
#pragma unroll
      for (int w = 0; w < 4 * kHalf; ++w) {
        const uint32_t word = max_of<kBits>(words[v + w / 4][w % 4], below);
        const uint32_t of_word = min_of_sum<kBits>(word, negated, 2 * F::kLowest);
        classes += of_word << (kBits == 16 ? 2 * w : w % 2 * 16 + w / 2 * 2);
      }
      const auto sixteen = [](uint32_t bits) { return (bits | bits >> 15) & 0xffffu; };
      const int shift = v * F::kVec % 32;
      above.word[v * F::kVec / 32] |= sixteen(classes >> 1 & 0x55555555u) << shift;
      equal.word[v * F::kVec / 32] |= sixteen(classes & 0x55555555u) << shift;
    }
  }

  static __device__ __forceinline__ uint32_t of_vector(const Set& set, int v) {
    uint32_t word = 0;
#pragma unroll
    for (int w = 0; w < F::kSetWords; ++w) word |= v * F::kVec / 32 == w ? set.word[w] : 0u;
    return word >> (v * F::kVec % 32) & ((1u << F::kVec) - 1);
  }

  // How many of the tied keys lie in blocks before this one.
  __device__ __forceinline__ int ties_before(uint32_t limit) {
    int before = 0;
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) shared.ties_of_block = 0;
    __syncthreads();
    for_each_chunk([&](int chunk) {
      Set above, equal;
      compare(chunk, limit, above, equal);
      int ties = 0;
#pragma unroll
      for (int w = 0; w < F::kSetWords; ++w) ties += __popc(equal.word[w]);
      ties = __reduce_add_sync(~0u, ties);
      if (threadIdx.x % 32 == 0 && ties > 0) atomicAdd(&shared.ties_of_block, ties);
    });
    const cg::cluster_group cluster = cg::this_cluster();
    cluster.sync();
    for (int block = 0; block < static_cast<int>(cluster.block_rank()); ++block)
      before += *cluster.map_shared_rank(&shared.ties_of_block, block);
#endif
    return before;
  }

  // Of the tied keys of this chunk adds the first `room`, which sinks by those that were there.
  __device__ __forceinline__ void add_first_ties(Set& chosen, const Set& equal, int& room) {
    // Keys come in the order of (vector, warp, lane): count per vector and warp, find the group that is cut.
    constexpr int kGroups = kVectors * kWarps, kPer = (kGroups + 31) / 32;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int v = 0; v < kVectors; v += 2) {
      const uint32_t two = __popc(of_vector(equal, v)) | __popc(of_vector(equal, v + 1)) << 16;
      const uint32_t sums = __reduce_add_sync(~0u, two);
      if (lane == 0) shared.ties[v * kWarps + warp] = sums & 0xffff, shared.ties[(v + 1) * kWarps + warp] = sums >> 16;
    }
    __syncthreads();
    int count[kPer], sum = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int group = lane * kPer + i;
      count[i] = group < kGroups ? shared.ties[group] : 0, sum += count[i];
    }
    int before = inclusive_scan(sum, lane);
    const int total = __shfl_sync(~0u, before, 31);
    before -= sum;
    int whole = room >= total ? F::kItems : 0;  // how many of this thread's keys come before the cut
    if (room > 0 && room < total) {
      int cut = 0, left = 0;  // the group that is cut, and how many of its keys stay
      const int owner = __ffs(__ballot_sync(~0u, before < room && room <= before + sum)) - 1;
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        if (before < room && room <= before + count[i]) cut = lane * kPer + i, left = room - before;
        before += count[i];
      }
      cut = __shfl_sync(~0u, cut, owner), left = __shfl_sync(~0u, left, owner);
      const int vector = cut / kWarps, cut_warp = cut % kWarps;
      whole = F::kVec * (vector + (warp < cut_warp));
      if (warp == cut_warp) {
        uint32_t own = of_vector(equal, vector);
        left -= inclusive_scan(__popc(own), lane) - __popc(own);
        while (__popc(own) > max(left, 0)) own ^= 0x80000000u >> __clz(own);
#pragma unroll
        for (int w = 0; w < F::kSetWords; ++w)
          chosen.word[w] |= vector * F::kVec / 32 == w ? own << (vector * F::kVec % 32) : 0u;
      }
    }
#pragma unroll
    for (int w = 0; w < F::kSetWords; ++w) {
      const int bits = min(max(whole - 32 * w, 0), 32);
      chosen.word[w] |= bits == 32 ? equal.word[w] : equal.word[w] & ((1u << bits) - 1);
    }
    room -= total;
    if constexpr (!kHeld) __syncthreads();  // the counts are read; the next chunk's may come
  }

  __device__ __forceinline__ void store(const SelectProblem& p, int row, int chunk, const Set& chosen) const {
    const int S = static_cast<int>(p.S);
    if (p.bits != nullptr) {
      const int row_bytes = 16 * ((S + kKeyTile - 1) / kKeyTile), left = row_bytes - first_key(chunk, 0) / 8;
      uint8_t* out = reinterpret_cast<uint8_t*>(p.bits) + int64_t{row} * row_bytes + first_key(chunk, 0) / 8;
      asm("" : "+l"(out));
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        uint32_t bits = of_vector(chosen, v);
        if constexpr (F::kVec == 4) bits |= __shfl_down_sync(~0u, bits, 1) << 4;  // two lanes make a byte
        if (v * (kStride / 8) < left && (F::kVec == 8 || threadIdx.x % 2 == 0))
          out[v * (kStride / 8)] = static_cast<uint8_t>(bits);
      }
      return;
    }
    uint8_t* out = p.chosen + row * p.S + first_key(chunk, 0);
    const int left = S - first_key(chunk, 0);
    asm("" : "+l"(out));  // else the compiler computes it anew for each vector
    const auto four_bytes = [](uint32_t bits) { return (bits & 15) * 0x00204081u & 0x01010101u; };
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t bits = of_vector(chosen, v);
      if (v * kStride >= left) break;
      if constexpr (kWhole) {
        if constexpr (F::kVec == 8)
          __stcs(reinterpret_cast<uint2*>(out + v * kStride), make_uint2(four_bytes(bits), four_bytes(bits >> 4)));
        else __stcs(reinterpret_cast<uint32_t*>(out + v * kStride), four_bytes(bits));
      } else {
#pragma unroll
        for (int i = 0; i < F::kVec; ++i)
          if (v * kStride + i < left) out[v * kStride + i] = bits >> i & 1;
      }
    }
  }
};

__device__ __forceinline__ const uint8_t* mask_of_row(const SelectProblem& p, int row) {
  if (p.mask == nullptr) return nullptr;
  int64_t offset = 0;
#pragma unroll 1
  for (int axis = 0; axis < p.mask_rank; ++axis) {
    offset += row % p.mask_size[axis] * p.mask_stride[axis];
    row /= p.mask_size[axis];
  }
  return p.mask + offset;
}

// 64 registers, of which 32 hold keys: with more of them latencies show, with fewer they spill.
constexpr int threads_per_sm(bool held) { return held ? 1024 : 512; }

// kChunk: keys that a block holds in registers. kWhole: rows of scores begin at multiples of 16 bytes, those of masks
// where as many elements would. kHeld: a block has one chunk, which stays in registers.
template <int kBits, int kChunk, bool kWhole, bool kHeld>
__global__ void __launch_bounds__(Shared<kBits, kChunk>::kThreads,
                                  threads_per_sm(kHeld) / Shared<kBits, kChunk>::kThreads)
    jax_dma_select(const SelectProblem p, const int blocks_of_row) {
  using RowType = Row<kBits, kChunk, kWhole, kHeld>;
  __shared__ Shared<kBits, kChunk> shared;
  const int blocks = kChunk == kLongChunk ? blocks_of_row : 1;
  const int row = blockIdx.x / blocks, rank = blockIdx.x % blocks;
  const int S = static_cast<int>(p.S), T = static_cast<int>(p.T);

  int visible = p.causal ? min(S, max(0, row % T + S - T + 1)) : S;
  const uint8_t* mask = mask_of_row(p, row);
  if (mask != nullptr && p.mask_col == 0) {
    if (*mask == 0) visible = 0;
    mask = nullptr;
  }
  const bool search = visible > p.window;
  if (search) {
    uint4* const histogram = reinterpret_cast<uint4*>(shared.histogram);
#pragma unroll
    for (int i = threadIdx.x; i < Shared<kBits, kChunk>::kBins / 4; i += RowType::kThreads)
      histogram[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
  }

  const int chunks = (S + kChunk - 1) / kChunk, chunks_of_block = (chunks + blocks - 1) / blocks;
  const int begin = rank * chunks_of_block * kChunk, end = min(begin + chunks_of_block * kChunk, chunks * kChunk);
  const uint32_t infinity = kBits == 32 ? 0x7f800000u : p.dtype == DType::kBF16 ? 0x7f80u : 0x7c00u;
  RowType r{shared, blocks, static_cast<const typename RowType::Score*>(p.scores) + row * p.S, mask, infinity, begin,
            end,    visible};
  const bool read = search || mask != nullptr;  // else all visible keys are chosen
  if (kHeld && read) r.load(begin);

  uint32_t limit = 1;  // keys above it are chosen
  int room = 0;        // and so many of those that equal it, in case of a cut; else all
  bool cut = false;
  if (search) {
    int tied = 0;
    room = static_cast<int>(p.window);
    limit = r.template threshold<kBits>(0, room, tied);
    cut = limit > 0 && room < tied;
    limit = max(limit, 1u);  // 0: fewer than `window` keys are not hidden
  }
  const bool shared_cut = blocks > 1 && cut;
  if (shared_cut) room -= r.ties_before(limit);

  for (int chunk = begin; chunk < end; chunk += kChunk) {
    typename RowType::Set chosen{}, tied{};
    if (read) {
      if (chunk < visible) {
        if constexpr (!kHeld) r.load(chunk);
        r.compare(chunk, limit, chosen, tied);
        if (cut) {
          r.add_first_ties(chosen, tied, room);
        } else {
#pragma unroll
          for (int w = 0; w < RowType::F::kSetWords; ++w) chosen.word[w] |= tied.word[w];
        }
      }
    } else {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int inside = min(max(visible - r.first_key(chunk, v), 0), RowType::F::kVec);
        chosen.word[v * RowType::F::kVec / 32] |= ((1u << inside) - 1) << (v * RowType::F::kVec % 32);
      }
    }
    r.store(p, row, chunk, chosen);
    if constexpr (kHeld) break;
  }
#if __CUDA_ARCH__ >= 900
  if (shared_cut) cg::this_cluster().sync();  // no block leaves while another reads its shared memory
#endif
}

template <int kBits, int kChunk, bool kWhole, bool kHeld>
cudaError_t launch_kernel(const SelectProblem& p, int blocks, cudaStream_t stream) {
  if (p.rows * blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(p.rows * blocks));
  config.blockDim = dim3(Shared<kBits, kChunk>::kThreads);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = blocks > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, jax_dma_select<kBits, kChunk, kWhole, kHeld>, p, blocks);
}

// Whether the device, and the code that was built for it, have clusters of blocks.
template <int kBits>
bool has_clusters() {
  int device = 0, major = 0;
  cudaFuncAttributes code;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9 &&
         cudaFuncGetAttributes(&code, jax_dma_select<kBits, kLongChunk, true, true>) == cudaSuccess &&
         code.ptxVersion >= 90;
}

template <int kBits, bool kWhole>
cudaError_t launch_rows(const SelectProblem& p, cudaStream_t stream) {
  if (p.S <= 2048) return launch_kernel<kBits, 2048, kWhole, true>(p, 1, stream);
  if (p.S <= 4096) return launch_kernel<kBits, 4096, kWhole, true>(p, 1, stream);
  if (p.S <= 8192) return launch_kernel<kBits, 8192, kWhole, true>(p, 1, stream);
  int blocks = 1;
  if (p.S > kLongChunk && has_clusters<kBits>())
    while (blocks < kMaxBlocksPerRow && blocks * kLongChunk < p.S) blocks *= 2;
  return blocks * kLongChunk >= p.S ? launch_kernel<kBits, kLongChunk, kWhole, true>(p, blocks, stream)
                                    : launch_kernel<kBits, kLongChunk, kWhole, false>(p, blocks, stream);
}

}  // namespace

cudaError_t launch(const SelectProblem& p, cudaStream_t stream) {
  if (p.rows == 0 || p.S == 0) return cudaSuccess;
  if (p.S > INT32_MAX / 2) return cudaErrorInvalidValue;
  const int bits = p.dtype == DType::kF32 ? 32 : 16;
  const bool whole = p.S * bits % 128 == 0 && reinterpret_cast<uintptr_t>(p.scores) % 16 == 0 &&
                     reinterpret_cast<uintptr_t>(p.mask) % 8 == 0 && reinterpret_cast<uintptr_t>(p.chosen) % 8 == 0;
  if (bits == 32) return whole ? launch_rows<32, true>(p, stream) : launch_rows<32, false>(p, stream);
  return whole ? launch_rows<16, true>(p, stream) : launch_rows<16, false>(p, stream);
}

}  // namespace jax_dma::select
