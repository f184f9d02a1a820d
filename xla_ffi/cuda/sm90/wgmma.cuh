// Warpgroup matrix products of compute capability 9.0a: m64nNk16 in bf16 and f16 with f32 accumulators.
//
// An accumulator is float[N / 8][4], or flat, laid out as for mma.sync: element i of block n is row
// 16 (warp % 4) + lane / 4 + 8 (i / 2) and column 8 n + 2 (lane % 4) + i % 2. Operands in shared memory are tiles of
// 128-byte rows with the 128-byte swizzle of TMA.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace jax_dma::sm90 {

// Describes an operand at a shared address: `leading` is the distance in bytes between groups of 64 columns where
// columns are contiguous (unused where k is contiguous), `stride` that between groups of eight 128-byte rows.
__device__ __forceinline__ uint64_t operand(uint32_t address, uint32_t leading = 16, uint32_t stride = 1024) {
  return (uint64_t{address & 0x3ffff} >> 4) | uint64_t{leading >> 4} << 16 | uint64_t{stride >> 4} << 32 |
         uint64_t{1} << 62;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

template <int kBlocks>
__device__ __forceinline__ float& element(float (&d)[kBlocks][4], int i) {
  return d[i / 4][i % 4];
}
template <int kElements>
__device__ __forceinline__ float& element(float (&d)[kElements], int i) {
  return d[i];
}

// Keeps the compiler from moving reads or writes of an accumulator across this point.
template <class Accumulator>
__device__ __forceinline__ void hold(Accumulator& d) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(d) / sizeof(float)); ++i)
    asm volatile("" : "+f"(element(d, i))::"memory");
}

template <class T, int kN>
struct Wgmma;

#define JAX_DMA_D4(i) "+f"(element(d, i)), "+f"(element(d, i + 1)), "+f"(element(d, i + 2)), "+f"(element(d, i + 3))
#define JAX_DMA_D16(i) JAX_DMA_D4(i), JAX_DMA_D4(i + 4), JAX_DMA_D4(i + 8), JAX_DMA_D4(i + 12)
#define JAX_DMA_D32 JAX_DMA_D16(0), JAX_DMA_D16(16)
#define JAX_DMA_D64 JAX_DMA_D32, JAX_DMA_D16(32), JAX_DMA_D16(48)
#define JAX_DMA_D128 JAX_DMA_D64, JAX_DMA_D16(64), JAX_DMA_D16(80), JAX_DMA_D16(96), JAX_DMA_D16(112)
#define JAX_DMA_R0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define JAX_DMA_R16 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define JAX_DMA_R32 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define JAX_DMA_R48 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define JAX_DMA_R64 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define JAX_DMA_R80 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define JAX_DMA_R96 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define JAX_DMA_R112 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define JAX_DMA_R_32 JAX_DMA_R0 ", " JAX_DMA_R16
#define JAX_DMA_R_64 JAX_DMA_R_32 ", " JAX_DMA_R32 ", " JAX_DMA_R48
#define JAX_DMA_R_128 JAX_DMA_R_64 ", " JAX_DMA_R64 ", " JAX_DMA_R80 ", " JAX_DMA_R96 ", " JAX_DMA_R112

// p0 to p6 number the operands after the accumulator's.
#define JAX_DMA_WGMMA(T, TYPE, N, D, R, p0, p1, p2, p3, p4, p5, p6)                                                  \
  template <>                                                                                                        \
  struct Wgmma<T, N> {                                                                                               \
    template <bool kTransA, bool kTransB, class Accumulator>                                                         \
    __device__ __forceinline__ static void shared(Accumulator& d, uint64_t a, uint64_t b, bool accumulate) {         \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " p2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE   \
                   "." TYPE " {" R "}, " p0 ", " p1 ", p, 1, 1, " p3 ", " p4 ";}"                                    \
                   : D                                                                                               \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransA ? 1 : 0), "n"(kTransB ? 1 : 0)); \
    }                                                                                                                \
    template <bool kTransB, class Accumulator>                                                                       \
    __device__ __forceinline__ static void registers(Accumulator& d, uint32_t a0, uint32_t a1, uint32_t a2,          \
                                                     uint32_t a3, uint64_t b, bool accumulate) {                     \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " p5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE   \
                   "." TYPE " {" R "}, {" p0 ", " p1 ", " p2 ", " p3 "}, " p4 ", p, 1, 1, " p6 ";}"                  \
                   : D                                                                                               \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<int>(accumulate)),                  \
                     "n"(kTransB ? 1 : 0));                                                                          \
    }                                                                                                                \
  };
#define JAX_DMA_WGMMAS(T, TYPE)                                                                           \
  JAX_DMA_WGMMA(T, TYPE, 32, JAX_DMA_D16(0), JAX_DMA_R0, "%16", "%17", "%18", "%19", "%20", "%21", "%22") \
  JAX_DMA_WGMMA(T, TYPE, 64, JAX_DMA_D32, JAX_DMA_R_32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")  \
  JAX_DMA_WGMMA(T, TYPE, 128, JAX_DMA_D64, JAX_DMA_R_64, "%64", "%65", "%66", "%67", "%68", "%69", "%70") \
  JAX_DMA_WGMMA(T, TYPE, 256, JAX_DMA_D128, JAX_DMA_R_128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")
JAX_DMA_WGMMAS(__nv_bfloat16, "bf16")
JAX_DMA_WGMMAS(__half, "f16")

// d = a b (+ d if accumulate), a [64 x 16], b [16 x N]. Trans operands have their rows (a) or columns (b) contiguous,
// the others k.
template <class T, bool kTransA = false, bool kTransB = false, class Accumulator>
__device__ __forceinline__ void wgmma_shared(Accumulator& d, uint64_t a, uint64_t b, bool accumulate) {
  Wgmma<T, sizeof(Accumulator) / 2>::template shared<kTransA, kTransB>(d, a, b, accumulate);
}
// d += a b with a in registers (an mma.sync operand fragment) and, by default, b with its columns contiguous.
template <class T, bool kTransB = true, class Accumulator>
__device__ __forceinline__ void wgmma_registers(Accumulator& d, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                uint64_t b, bool accumulate = true) {
  Wgmma<T, sizeof(Accumulator) / 2>::template registers<kTransB>(d, a0, a1, a2, a3, b, accumulate);
}

// d += a b, a [64 x 32] with two values of each four in a row, b [32 x 128] with its columns contiguous. `which` of the
// four they are, of rows lane / 4 and lane / 4 + 8 alike: two bits each, from the first on.
template <class T>
struct SparseWgmma;
#define JAX_DMA_SPARSE_WGMMA(T, TYPE)                                                                       \
  template <>                                                                                               \
  struct SparseWgmma<T> {                                                                                   \
    template <class Accumulator>                                                                            \
    __device__ __forceinline__ static void shared(Accumulator& d, uint64_t a, uint64_t b, uint32_t which) { \
      asm volatile("wgmma.mma_async.sp.sync.aligned.m64n128k32.f32." TYPE "." TYPE " {" JAX_DMA_R_64        \
                   "}, %64, %65, %66, 0, 1, 1, 1, 0, 1;"                                                    \
                   : JAX_DMA_D64                                                                            \
                   : "l"(a), "l"(b), "r"(which));                                                           \
    }                                                                                                       \
  };
JAX_DMA_SPARSE_WGMMA(__nv_bfloat16, "bf16")
JAX_DMA_SPARSE_WGMMA(__half, "f16")

#undef JAX_DMA_SPARSE_WGMMA
#undef JAX_DMA_WGMMAS
#undef JAX_DMA_WGMMA
#undef JAX_DMA_D4
#undef JAX_DMA_D16
#undef JAX_DMA_D32
#undef JAX_DMA_D64
#undef JAX_DMA_D128
#undef JAX_DMA_R_32
#undef JAX_DMA_R_64
#undef JAX_DMA_R_128
#undef JAX_DMA_R0
#undef JAX_DMA_R16
#undef JAX_DMA_R32
#undef JAX_DMA_R48
#undef JAX_DMA_R64
#undef JAX_DMA_R80
#undef JAX_DMA_R96
#undef JAX_DMA_R112

}  // namespace jax_dma::sm90
