// A bias per key as the forward kernel takes it: as part of the matrix product. k has 16 more channels, which hold
// bias / scale as the sum of three bf16, 24 bits together, and q has (1, 1, 1, 0, ..). The product rounds what it adds
// up to 24 bits of the largest: a bias above kMostInProduct (or NaN) is added to the logits of its tile instead. Hidden
// keys are no reason.
//
// A record holds this for a part of the keys. Mostly a kernel of its own makes the records and TMA brings them with the
// keys, so that no warp of the main kernel converts or waits for a bias. Beside intervals the helper warps of the main
// kernel write them (kWritesRecords), because they know more: keys that no query of the tile sees are hidden by their
// bias, and the consumers need not look at their intervals.
#pragma once

#include <cuda_runtime.h>

#include "../../common/problem.h"
#include "../ptx.cuh"

namespace jax_dma::sm90 {

constexpr float kMostInProduct = 1 << 10;
constexpr float kLeastScaleInProduct = 1e-6f;  // less, and 2 * kHideBelow / scale is no bf16

// As it lies in shared memory. The other eight channels are 0 for all keys.
template <int kKeys>
struct alignas(16) BiasRecord {
  uint4 channels[kKeys];  // bf16
  float added[kKeys];     // to the logits; read only if any is
  int to_part[4];         // bits of Part::code: one for all keys, or by 32 keys where helper warps write them

  // Puts a key's bias in. Returns whether it is to be added.
  __device__ __forceinline__ bool set(int key, float bias, float scale) {
    const bool hidden = bias <= kHideBelow, large = !(hidden || fabsf(bias) <= kMostInProduct);
    const float x = (large ? 0.0f : hidden ? 2.0f * kHideBelow : bias) * (1.0f / scale);
    const float high = __bfloat162float(__float2bfloat16(x)), middle = __bfloat162float(__float2bfloat16(x - high));
    channels[key] =
        make_uint4(ptx::pack<__nv_bfloat16>(high, middle), ptx::pack<__nv_bfloat16>(x - high - middle, 0.0f), 0, 0);
    added[key] = large ? bias : 0.0f;
    return large;
  }
};
constexpr int kBiasAdded = 1 << 30;  // of to_part: some of the keys have a bias that is added

// A bias as it is in memory, and its value: a thread can ask for several before it waits for the first.
__device__ __forceinline__ uint32_t load_bias(const Problem& p, const void* bias, int64_t at) {
  return p.bias_dtype == DType::kF32 ? static_cast<const uint32_t*>(bias)[at] : static_cast<const uint16_t*>(bias)[at];
}
__device__ __forceinline__ float bias_value(const Problem& p, uint32_t loaded) {
  return p.bias_dtype == DType::kF16 ? __half2float(__ushort_as_half(static_cast<unsigned short>(loaded)))
                                     : __uint_as_float(p.bias_dtype == DType::kBF16 ? loaded << 16 : loaded);
}

// The records of a call: (batch, key/value head) is addressed as in a view, in records; col: part of the keys.
inline View view_of_records(const Problem& p, int64_t parts, void* records, int64_t* count) {
  View view;
  view.data = records, view.col = 1, *count = parts;
  if (p.bias.kv != 0) view.kv = *count, *count *= p.K;
  for (int axis = p.batch_rank - 1; axis >= 0; --axis)
    if (p.bias.batch[axis] != 0) view.batch[axis] = *count, *count *= p.batch_size[axis];
  return view;
}

// Fills them; `p` has a bias per key.
template <int kKeys>
cudaError_t fill_bias_records(const Problem& p, BiasRecord<kKeys>* records, int64_t count, cudaStream_t stream);

}  // namespace jax_dma::sm90
