// All rows are sorted at once, by CUB. What is sorted is (row, key, place) in one word; no bits of the place are looked
// at, because the sort is stable.
#include "rank.h"

#include <cub/device/device_radix_sort.cuh>

namespace jax_dma::rank {
namespace {

constexpr int kThreads = 256, kEach = 4;

// The bits of the numbers below n.
int bits_below(int64_t n) {
  int bits = 0;
  while ((n - 1) >> bits != 0) ++bits;
  return bits;
}

template <class Key>
__global__ void __launch_bounds__(kThreads)
    jax_dma_rank_pack(const Key* keys, uint64_t* packed, int S, unsigned count, int key_bits, int place_bits) {
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const unsigned i = (blockIdx.x * kEach + j) * kThreads + threadIdx.x;
    if (i >= count) return;
    const unsigned row = i / static_cast<unsigned>(S), place = i - row * static_cast<unsigned>(S);
    packed[i] = ((uint64_t{row} << key_bits | keys[i]) << place_bits) | place;
  }
}

__global__ void __launch_bounds__(kThreads)
    jax_dma_rank_unpack(const uint64_t* packed, int32_t* order, int32_t* rank, int S, unsigned count, int place_bits) {
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const unsigned i = (blockIdx.x * kEach + j) * kThreads + threadIdx.x;
    if (i >= count) return;
    const unsigned row = i / static_cast<unsigned>(S), first = row * static_cast<unsigned>(S);
    const unsigned place = static_cast<unsigned>(packed[i]) & ((1u << place_bits) - 1);
    order[i] = static_cast<int32_t>(place);
    rank[first + place] = static_cast<int32_t>(i - first);
  }
}

}  // namespace

bool serves(int64_t rows, int64_t S, int key_bits) {
  return rows * S < INT32_MAX && bits_below(rows) + key_bits + bits_below(S) <= 64;
}

cudaError_t launch(const Problem& p, cudaStream_t stream) {
  const int count = p.rows * p.S;
  if (count == 0) return cudaSuccess;
  const int place_bits = bits_below(p.S), last_bit = place_bits + p.key_bits + bits_below(p.rows);
  const unsigned blocks = (static_cast<unsigned>(count) + kThreads * kEach - 1) / (kThreads * kEach);
  const auto pack = [&](auto key) {
    jax_dma_rank_pack<<<blocks, kThreads, 0, stream>>>(static_cast<const decltype(key)*>(p.keys), p.packed[0], p.S,
                                                       static_cast<unsigned>(count), p.key_bits, place_bits);
  };
  if (p.key_bits == 16) pack(uint16_t{});
  else pack(uint32_t{});
  cub::DoubleBuffer<uint64_t> packed(p.packed[0], p.packed[1]);
  size_t needed = 0;
  const auto sort = [&](void* temporary) {
    return cub::DeviceRadixSort::SortKeys(temporary, needed, packed, count, place_bits, last_bit, stream);
  };
  if (const cudaError_t error = sort(nullptr); error != cudaSuccess) return error;
  if (needed > p.temporary_bytes) return cudaErrorInvalidValue;
  needed = p.temporary_bytes;
  if (const cudaError_t error = sort(p.temporary); error != cudaSuccess) return error;
  jax_dma_rank_unpack<<<blocks, kThreads, 0, stream>>>(packed.Current(), p.order, p.rank, p.S,
                                                       static_cast<unsigned>(count), place_bits);
  return cudaGetLastError();
}

}  // namespace jax_dma::rank
