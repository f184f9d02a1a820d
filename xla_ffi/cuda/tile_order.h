// In which order blocks take the tiles of all (batch entry, key/value head)s.
#pragma once

#include <algorithm>

#include "../common/problem.h"

namespace jax_dma {

// Division by a positive number that the compiler does not know: three instructions in the place of some thirty, for
// dividends from 0 to 2^31 - 1.
struct Divisor {
  uint32_t value = 1, multiplier = 1;
  int shift = 0;

  Divisor() = default;
  explicit Divisor(int64_t divisor) : value(static_cast<uint32_t>(std::max<int64_t>(divisor, 1))) {
    while (int64_t{1} << shift < value) ++shift;
    multiplier = static_cast<uint32_t>((((uint64_t{1} << shift) - value) << 32) / value + 1);
  }
  JAX_DMA_HOST_DEVICE int quotient(int dividend) const {
    const uint32_t n = static_cast<uint32_t>(dividend);
    return static_cast<int>((static_cast<uint32_t>(uint64_t{n} * multiplier >> 32) + n) >> shift);
  }
};

// Heads are taken in groups: tile 0 of each head of a group, then tile 1 of each, and so on, then the next group. One
// group holds all heads where there are few tiles, so that the longest (which kernels number first) start first and
// none is waited for at the end. Where there are many, the groups are small enough that what the blocks of a head share
// stays in the L2 cache: with 1,024 short heads in one group, each block would read its keys from device memory again.
struct TileOrder {
  int tiles = 0, heads = 0, group = 1;
  Divisor by_group_tiles, by_group, by_last;  // tiles of a group, heads of a group, heads of the last

  struct Place {
    int tile, head;
  };
  JAX_DMA_HOST_DEVICE Place at(int index) const {
    const int of_group = by_group_tiles.quotient(index), rest = index - of_group * tiles * group;
    const int first = of_group * group;
    const Divisor& size = heads - first < group ? by_last : by_group;
    const int tile = size.quotient(rest);
    return {tile, first + rest - tile * static_cast<int>(size.value)};
  }
};

// `shared_bytes`: what all blocks of a head read (and add to) in device memory.
inline TileOrder tile_order(int64_t tiles, int64_t heads, int64_t shared_bytes, int processors) {
  constexpr int64_t kCache = 24 << 20;
  TileOrder order;
  order.tiles = static_cast<int>(tiles), order.heads = static_cast<int>(heads), order.group = std::max(order.heads, 1);
  if (tiles * heads >= int64_t{32} * processors)
    order.group = static_cast<int>(std::clamp<int64_t>(kCache / std::max<int64_t>(shared_bytes, 1), 1, heads));
  order.by_group_tiles = Divisor(tiles * order.group), order.by_group = Divisor(order.group);
  order.by_last = Divisor(heads % order.group == 0 ? order.group : heads % order.group);
  return order;
}

}  // namespace jax_dma
