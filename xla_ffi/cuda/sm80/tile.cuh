// Tiles in shared memory: layout, asynchronous loads, and the products between them.
//
// A tile of R rows and C channels of 16-bit elements is stored as C / 64 panels of [R][64], 128 bytes a row; the
// 16-byte chunk c of row r lies at chunk c ^ (r % 8), so that the eight rows of an ldmatrix touch all banks.
#pragma once

#include <utility>

#include "../../common/problem.h"
#include "../ptx.cuh"

namespace jax_dma::sm80 {

template <int kRows>
__device__ __forceinline__ uint32_t chunk_address(uint32_t tile, int row, int chunk) {
  return tile + (chunk / 8) * (kRows * 128) + row * 128 + (((chunk % 8) ^ (row % 8)) * 16);
}

// The part of a tile load that one thread does: 16-byte chunk `chunk` of rows first_row + pass * kRowsPerPass.
template <int kRows, int kChannels, int kThreads>
struct ThreadLoad {
  static constexpr int kChunks = kChannels / 8, kRowsPerPass = kThreads / kChunks, kPasses = kRows / kRowsPerPass;
  static_assert(kThreads % kChunks == 0 && kRows % kRowsPerPass == 0);

  __device__ static int chunk() { return threadIdx.x % kChunks; }
  __device__ static int row(int pass) { return pass * kRowsPerPass + threadIdx.x / kChunks; }
  __device__ static uint32_t target(uint32_t tile, int pass) {
    if constexpr (kRowsPerPass % 8 == 0)
      return chunk_address<kRows>(tile, threadIdx.x / kChunks, chunk()) + pass * kRowsPerPass * 128;
    else return chunk_address<kRows>(tile, row(pass), chunk());
  }
};

// Loads the first `rows` (at most kRows) of consecutive rows; rows and channels beyond (channels: a multiple of 8) are
// zeros. An address outside the array is formed there, but not read.
template <class T, int kRows, int kChannels, int kThreads>
__device__ __forceinline__ void load_rows(uint32_t tile, const T* base, int64_t stride, int rows, int channels) {
  using Load = ThreadLoad<kRows, kChannels, kThreads>;
  if (Load::chunk() * 8 >= channels) rows = 0;
  const T* source = base + Load::row(0) * stride + Load::chunk() * 8;
#pragma unroll
  for (int pass = 0; pass < Load::kPasses; ++pass) {
    ptx::copy_async_16(Load::target(tile, pass), source, Load::row(pass) < rows ? 16 : 0);
    source += Load::kRowsPerPass * stride;
  }
}

// One pass of what follows; `where` is the table's word for its row, `base` where the thread's chunk of row 0 is.
template <class T, int kRows, int kChannels, int kThreads>
__device__ __forceinline__ void load_query_pass(uint32_t tile, const T* base, const View& view, uint32_t where,
                                                int rows, int channels, int pass) {
  using Load = ThreadLoad<kRows, kChannels, kThreads>;
  const int offset = (where & 0xffff) * static_cast<int>(view.row) + (where >> 16) * static_cast<int>(view.group);
  ptx::copy_async_16(Load::target(tile, pass), base + offset,
                     Load::row(pass) < rows && Load::chunk() * 8 < channels ? 16 : 0);
}

// The same for the rows of a query tile (see RowTable), of which the first `rows` hold something.
template <class T, int kRows, int kChannels, int kThreads, class Table>
__device__ __forceinline__ void load_query_rows(uint32_t tile, const T* base, const View& view, const Table& table,
                                                int rows, int channels) {
  using Load = ThreadLoad<kRows, kChannels, kThreads>;
  const int row_stride = static_cast<int>(view.row), head_stride = static_cast<int>(view.group);
  if (Load::chunk() * 8 >= channels) rows = 0;
  base += Load::chunk() * 8;
#pragma unroll
  for (int pass = 0; pass < Load::kPasses; ++pass) {
    const int row = Load::row(pass);
    ptx::copy_async_16(Load::target(tile, pass), base + table.query(row) * row_stride + table.head(row) * head_stride,
                       row < rows ? 16 : 0);
  }
}

// run(0), ..., run(kCount - 1), with constants.
template <class Run, int... kIndex>
__device__ __forceinline__ void for_each_index(const Run& run, std::integer_sequence<int, kIndex...>) {
  (run(std::integral_constant<int, kIndex>()), ...);
}
template <int kCount, class Run>
__device__ __forceinline__ void for_each_index(const Run& run) {
  for_each_index(run, std::make_integer_sequence<int, kCount>());
}

// Where a warp reads matrix operands from a tile. Each lane keeps the address of its row of the first 8x8 matrices;
// other blocks are an exclusive or (chunks within a panel) and a constant away, because blocks start at even chunks.
//
// kTransposed says that the tile is stored the other way round: [k][row] for A [row x k], [k][column] for B [k x
// column].
template <int kRows>
struct OperandA {  // 16 x 16 blocks
  uint32_t base;

  template <bool kTransposed>
  __device__ static OperandA at(uint32_t tile, int row) {
    const int lane = threadIdx.x % 32;
    if constexpr (kTransposed)
      return {tile + (row / 64) * (kRows * 128) + (lane % 8 + (lane / 16) * 8) * 128 +
              (((row / 8) % 8) ^ ((lane / 8) % 2) ^ (lane % 8)) * 16};
    else return {tile + (row + lane % 16) * 128 + ((lane / 16) ^ (lane % 8)) * 16};
  }
  // The block 16 * m rows further, at k.
  template <bool kTransposed>
  __device__ void load(uint32_t (&a)[4], int m, int k) const {
    if constexpr (kTransposed) ptx::load_matrix_transposed(a, (base ^ (m * 32)) + k * 128);
    else ptx::load_matrix(a, (base ^ ((k / 8) % 8 * 16)) + (k / 64) * (kRows * 128) + m * (16 * 128));
  }
};

template <int kRows>
struct OperandB {  // two neighbouring 16 x 8 blocks
  uint32_t base;

  template <bool kTransposed>
  __device__ static OperandB at(uint32_t tile, int column) {
    const int lane = threadIdx.x % 32;
    if constexpr (kTransposed)
      return {tile + (column / 64) * (kRows * 128) + (lane % 16) * 128 +
              (((column / 8) % 8) ^ (lane / 16) ^ (lane % 8)) * 16};
    else return {tile + (column + lane % 8 + (lane / 16) * 8) * 128 + (((lane / 8) % 2) ^ (lane % 8)) * 16};
  }
  // The blocks 8 * n columns further (n even), at k.
  template <bool kTransposed>
  __device__ void load(uint32_t (&b)[4], int n, int k) const {
    if constexpr (kTransposed)
      ptx::load_matrix_transposed(b, (base ^ (n % 8 * 16)) + (n / 8) * (kRows * 128) + k * 128);
    else ptx::load_matrix(b, (base ^ ((k / 8) % 8 * 16)) + (k / 64) * (kRows * 128) + n * (8 * 128));
  }
};

// c [16 kM x 8 kN] += A [.. x kK] B [kK x ..] for one warp: its rows begin at `row`, its columns at `column`, multiples
// of 16 kM and 8 kN. kARows and kBRows are the row counts of the stored tiles. Operands are read ahead of their use (by
// more steps where a step is shorter): with two warps a scheduler nothing else hides the latency of shared memory.
// beside(step, steps) is called in each step, for work that the products hide.
struct Nothing {
  __device__ void operator()(int, int) const {}
};
template <class T, int kM, int kN, int kK, bool kATransposed, bool kBTransposed, int kARows, int kBRows,
          class Beside = Nothing>
__device__ __forceinline__ void multiply(float (&c)[kM][kN][4], OperandA<kARows> a_operand, OperandB<kBRows> b_operand,
                                         const Beside& beside = {}) {
  constexpr int kPairs = kN / 2, kSteps = kK / 16 * kPairs;  // a step is one k block by one pair of column blocks
  constexpr int kAhead = kM == 1 ? 3 : 1, kBuffers = kAhead + 1;
  uint32_t a[kBuffers][kM][4], b[kBuffers][4];
  const auto load = [&](int step) {
    if (step >= kSteps) return;
    const int k = step / kPairs, pair = step % kPairs;
    if (pair == 0) {
#pragma unroll
      for (int m = 0; m < kM; ++m) a_operand.template load<kATransposed>(a[k % kBuffers][m], m, 16 * k);
    }
    b_operand.template load<kBTransposed>(b[step % kBuffers], 2 * pair, 16 * k);
  };
#pragma unroll
  for (int step = 0; step < kAhead; ++step) load(step);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    load(step + kAhead);
    const int n = 2 * (step % kPairs);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      ptx::mma<T>(c[m][n], a[step / kPairs % kBuffers][m], b[step % kBuffers][0], b[step % kBuffers][1]);
      ptx::mma<T>(c[m][n + 1], a[step / kPairs % kBuffers][m], b[step % kBuffers][2], b[step % kBuffers][3]);
    }
    beside(step, kSteps);
  }
}

// The same, of tiles.
template <class T, int kM, int kN, int kK, int kARows, int kBRows, bool kATransposed, bool kBTransposed,
          class Beside = Nothing>
__device__ __forceinline__ void multiply(float (&c)[kM][kN][4], uint32_t a_tile, uint32_t b_tile, int row, int column,
                                         const Beside& beside = {}) {
  multiply<T, kM, kN, kK, kATransposed, kBTransposed>(c, OperandA<kARows>::template at<kATransposed>(a_tile, row),
                                                      OperandB<kBRows>::template at<kBTransposed>(b_tile, column),
                                                      beside);
}

template <int kM, int kN>
__device__ __forceinline__ void clear(float (&c)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) c[m][n][i] = 0.0f;
}

}  // namespace jax_dma::sm80
