#include "bias_records.h"

#include "../sm80/launch_common.cuh"

namespace jax_dma::sm90 {

// A block a record, a thread a key.
template <int kKeys>
__global__ void __launch_bounds__(kKeys)
    jax_dma_sm90_bias_records(const __grid_constant__ Problem p, BiasRecord<kKeys>* __restrict__ records) {
  const int parts = static_cast<int>(p.key_tiles) * (kKeyTile / kKeys);
  const int c = threadIdx.x, key = blockIdx.x % parts * kKeys + c;
  int rest = blockIdx.x / parts;  // in the order of view_of_records
  int64_t at = key * p.bias.col;
  if (p.bias.kv != 0) at += rest % p.K * p.bias.kv, rest /= p.K;
  for (int axis = p.batch_rank - 1; axis >= 0; --axis) {
    if (p.bias.batch[axis] == 0) continue;
    const int size = static_cast<int>(p.batch_size[axis]);
    at += rest % size * p.bias.batch[axis], rest /= size;
  }
  const float value = key < p.S ? bias_value(p, load_bias(p, p.bias.data, at)) : -INFINITY;
  const bool any_added = __syncthreads_or(records[blockIdx.x].set(c, value, p.scale));
  if (c == 0) records[blockIdx.x].to_part[0] = any_added ? kBiasAdded : 0;
}

template <int kKeys>
cudaError_t fill_bias_records(const Problem& p, BiasRecord<kKeys>* records, int64_t count, cudaStream_t stream) {
  return sm80::launch(jax_dma_sm90_bias_records<kKeys>, count, kKeys, 0, stream, p, records);
}
template cudaError_t fill_bias_records(const Problem&, BiasRecord<64>*, int64_t, cudaStream_t);
template cudaError_t fill_bias_records(const Problem&, BiasRecord<128>*, int64_t, cudaStream_t);

}  // namespace jax_dma::sm90
