// Scratch of the forward kernels. Where few tiles have many keys, the keys of a tile are divided among several blocks,
// and what each computes lies here until it is put together. Otherwise the records of a bias per key (bias_records.h),
// or what judge_bias finds.
#pragma once

#include <cstdint>

namespace jax_dma::sm90 {

// f32, [splits, B, N, T, Hv + 2]: 264 / (query tiles * B * K) splits are the most that are of use on 132 processors,
// and no more than key tiles / 8. Or 648 for each 128 keys of each head and batch entry of the bias. Or 128 (a bias of
// queries and keys that at least 64 batch entries share). And one with a dense mask. Less, or none, is allowed.
struct ForwardScratch {
  float* data = nullptr;
  int64_t floats = 0;
};

}  // namespace jax_dma::sm90
