// Chooses the instantiations of the Hopper backward kernels for a problem and launches them.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "../sm80/launch.h"
#include "../sm80/launch_common.cuh"
#include "backward.cuh"

namespace jax_dma::sm90 {

using sm80::BackwardBuffers;

// cudaErrorNotSupported: a call for the sm_80-class kernels (nothing has been launched).
template <class T, int kHeadDim>
cudaError_t launch_backward(const Problem& problem, const BackwardBuffers& buffers, cudaStream_t stream);

inline DBias dbias_mode_of(const Problem& p) {
  if (!p.dbias.present()) return DBias::kNone;
  if (p.dbias.row == 0) return p.dbias.group == 0 ? DBias::kKey : DBias::kPerHead;
  return p.dbias.group == 0 ? DBias::kPerQuery : DBias::kPerRow;
}

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline EncodeTiled encode_tiled() {
  static const EncodeTiled encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result) !=
            cudaSuccess ||
        result != cudaDriverEntryPointSuccess)
      function = nullptr;
    return reinterpret_cast<EncodeTiled>(function);
  }();
  return encode;
}

// [batch, position, head, channel] in boxes of `box_rows` positions x `box_heads` heads x 64 channels, 128-byte swizzle;
// what lies outside is read as 0. False if the view cannot be described.
inline bool make_map(const Problem& p, const View& view, int64_t length, int heads, int channels, int box_heads,
                     int box_rows, CUtensorMap* map, int64_t* entry) {
  const bool query = heads != p.K || p.G == 1;  // q and dout have K * G heads
  const int64_t head_stride = query && p.G > 1 ? view.group : view.kv;
  if (query && p.G > 1 && p.K > 1 && view.kv != p.G * view.group) return false;
  *entry = std::max<int64_t>(length * view.row, 8);
  int64_t entries = 1;
  for (int axis = 0; axis < p.batch_rank; ++axis) {
    if (view.batch[axis] % *entry != 0) return false;
    entries += (p.batch_size[axis] - 1) * (view.batch[axis] / *entry);
  }
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(channels), static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(length), static_cast<cuuint64_t>(entries)};
  const cuuint64_t strides[3] = {static_cast<cuuint64_t>(heads > 1 ? head_stride : channels) * 2,
                                 static_cast<cuuint64_t>(length > 1 ? view.row : heads * channels) * 2,
                                 static_cast<cuuint64_t>(*entry) * 2};
  for (const cuuint64_t stride : strides)
    if (stride == 0 || stride % 16 != 0 || stride >= (1ull << 40)) return false;
  if (reinterpret_cast<uintptr_t>(view.data) % 16 != 0) return false;
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_heads), static_cast<cuuint32_t>(box_rows), 1},
                   steps[4] = {1, 1, 1, 1};
  return encode_tiled()(map,
                        p.dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
                        view.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class T>  // the element type of the call: one such kernel for each translation unit
__global__ void jax_dma_sm90_round_dbias(const float* sums, void* dbias, int64_t elements, DType dtype) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < elements) store_value(dbias, i, sums[i], dtype);
}

// Whether two neighbouring keys, the first one even, lie at an aligned address (4 bytes, or 8 of f32).
inline bool pairs_are_aligned(const Problem& p, const View& view) {
  bool aligned = view.present() && view.col == 1 && reinterpret_cast<uintptr_t>(view.data) % 8 == 0;
  aligned = aligned && view.row % 2 == 0 && view.group % 2 == 0 && view.kv % 2 == 0;
  for (int axis = 0; axis < p.batch_rank; ++axis) aligned = aligned && view.batch[axis] % 2 == 0;
  return aligned;
}

template <class T, int kHeadDim>
cudaError_t launch_backward(const Problem& p, const BackwardBuffers& buffers, cudaStream_t stream) {
  using Shape = BackwardShape<kHeadDim>;
  using sm80::launch;
  if (p.T == 0 || p.S == 0 || p.B == 0 || p.G > kRows || p.H % 8 != 0 || p.Hv % 8 != 0 || encode_tiled() == nullptr ||
      (p.start.present() && p.start.group != 0))
    return cudaErrorNotSupported;
  constexpr int kSharedLimit = 227 * 1024 - 1024;  // barriers and tables are beside it
  const int logit_stages = Shape::shared_bytes(p, 2) <= kSharedLimit ? 2 : 1;
  const int shared = Shape::shared_bytes(p, logit_stages);
  if (shared > kSharedLimit) return cudaErrorNotSupported;

  const int queries = queries_per_tile(p.G) / kQueryParts;
  BackwardMaps maps;
  if (!make_map(p, p.q, p.T, p.N, p.H, p.G, queries, &maps.q, &maps.q_entry) ||
      !make_map(p, p.dout, p.T, p.N, p.Hv, p.G, queries, &maps.dout, &maps.dout_entry) ||
      !make_map(p, p.k, p.S, p.K, p.H, 1, kKeys, &maps.k, &maps.k_entry) ||
      !make_map(p, p.v, p.S, p.K, p.Hv, 1, kKeys, &maps.v, &maps.v_entry))
    return cudaErrorNotSupported;

  BackwardScratch scratch{buffers.row_stats, buffers.dq, buffers.turn, buffers.dbias, ceil_div(p.T, queries), 0, 0, 0,
                          logit_stages};
  const int64_t tiles = p.B * p.K * scratch.tiles;
  cudaError_t error = launch(jax_dma_sm90_row_stats<T, kHeadDim>, tiles, 256, 0, stream, p, scratch);
  if (error == cudaSuccess && buffers.dbias != nullptr)
    error = cudaMemsetAsync(buffers.dbias, 0, buffers.dbias_elements * sizeof(float), stream);

  // Blocks that add to one element of dbias are launched one after another where the order of additions must be fixed.
  const int parts = static_cast<int>(ceil_div(p.S, kKeys)), heads = static_cast<int>(p.B * p.K);
  const bool in_order = p.deterministic && buffers.dbias != nullptr;
  scratch.heads = in_order ? 1 : heads;
  const int parts_per_launch = in_order && p.dbias.col == 0 ? 1 : parts;
  for (scratch.first_head = 0; scratch.first_head < heads; scratch.first_head += scratch.heads)
    for (scratch.first_part = 0; scratch.first_part < parts && error == cudaSuccess;
         scratch.first_part += parts_per_launch)
      error = sm80::with_kinds(p, [&](auto mask, auto bias) {
        return launch(jax_dma_sm90_backward<T, kHeadDim, decltype(mask), decltype(bias)>,
                      int64_t{parts_per_launch} * scratch.heads, kThreads, shared, stream, p, maps, scratch,
                      dbias_mode_of(p), sm80::bias_is_aligned(p, p.bias), pairs_are_aligned(p, p.dbias));
      });
  if (error == cudaSuccess) error = launch(jax_dma_sm90_reorder_dq<T, kHeadDim>, tiles, 256, 0, stream, p, scratch);
  if (error == cudaSuccess && buffers.dbias_elements > 0)
    error = launch(jax_dma_sm90_round_dbias<T>, ceil_div(buffers.dbias_elements, 256), 256, 0, stream,
                   static_cast<const float*>(buffers.dbias), p.dbias.data, buffers.dbias_elements, p.bias_dtype);
  return error;
}

}  // namespace jax_dma::sm90
