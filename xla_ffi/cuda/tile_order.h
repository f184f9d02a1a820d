// In which order blocks take the tiles of all (batch entry, key/value head)s.
#pragma once

#include <algorithm>

#include "../common/problem.h"

namespace jax_dma {

// Heads are taken in groups: tile 0 of each head of a group, then tile 1 of each, and so on, then the next group. One
// group holds all heads where there are few tiles, so that the longest (which kernels number first) start first and
// none is waited for at the end. Where there are many, the groups are small enough that what the blocks of a head share
// stays in the L2 cache: with 1,024 short heads in one group, each block would read its keys from device memory again.
struct TileOrder {
  int tiles = 0, heads = 0, group = 1;

  struct Place {
    int tile, head;
  };
  JAX_DMA_HOST_DEVICE Place at(int index) const {
    const int of_group = index / (tiles * group), rest = index - of_group * tiles * group;
    const int first = of_group * group, size = heads - first < group ? heads - first : group;
    return {rest / size, first + rest % size};
  }
};

// `shared_bytes`: what all blocks of a head read (and add to) in device memory.
inline TileOrder tile_order(int64_t tiles, int64_t heads, int64_t shared_bytes, int processors) {
  constexpr int64_t kCache = 24 << 20;
  TileOrder order{static_cast<int>(tiles), static_cast<int>(heads), static_cast<int>(heads)};
  if (tiles * heads >= int64_t{32} * processors)
    order.group = static_cast<int>(std::clamp<int64_t>(kCache / std::max<int64_t>(shared_bytes, 1), 1, heads));
  return order;
}

}  // namespace jax_dma
