// Warpgroup matrix products of compute capability 9.0a: m64nNk16 in bf16 and f16 with f32 accumulators. Written by a script.
//
// An accumulator d[N / 8][4] is laid out as for mma.sync: element i of block n is row 16 (warp % 4) + lane / 4 + 8 (i / 2) and
// column 8 n + 2 (lane % 4) + i % 2. Operands in shared memory are tiles of 128-byte rows with the 128-byte swizzle of TMA.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace jax_dma::sm90 {

// Describes an operand at a shared address: `leading` is the distance in bytes between groups of 64 columns where columns are
// contiguous (unused where k is contiguous), `stride` that between groups of eight 128-byte rows.
__device__ __forceinline__ uint64_t operand(uint32_t address, uint32_t leading = 16, uint32_t stride = 1024) {
  return (uint64_t{address & 0x3ffff} >> 4) | uint64_t{leading >> 4} << 16 | uint64_t{stride >> 4} << 32 | uint64_t{1} << 62;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving reads or writes of an accumulator across this point.
template <int kBlocks>
__device__ __forceinline__ void hold(float (&d)[kBlocks][4]) {
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[n][i])::"memory");
}

// d = a b (+ d if accumulate). a [64 x 16] and b [16 x N] both with k contiguous.
template <class T, int kBlocks>
__device__ __forceinline__ void wgmma_shared(float (&d)[kBlocks][4], uint64_t a, uint64_t b, bool accumulate);
// The same with a in registers (an mma.sync operand fragment) and b with its columns contiguous.
template <class T, int kBlocks>
__device__ __forceinline__ void wgmma_registers(float (&d)[kBlocks][4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b);

#define JAX_DMA_D(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define JAX_DMA_D8(n) JAX_DMA_D(n), JAX_DMA_D(n + 1), JAX_DMA_D(n + 2), JAX_DMA_D(n + 3), JAX_DMA_D(n + 4), JAX_DMA_D(n + 5), JAX_DMA_D(n + 6), JAX_DMA_D(n + 7)

#define JAX_DMA_R0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define JAX_DMA_R32 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define JAX_DMA_R64 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define JAX_DMA_R96 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

template <>
__device__ __forceinline__ void wgmma_shared<__nv_bfloat16, 8>(float (&d)[8][4], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" JAX_DMA_R0 "}, %32, %33, p, 1, 1, 0, 0;}"
               : JAX_DMA_D8(0)
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

template <>
__device__ __forceinline__ void wgmma_registers<__nv_bfloat16, 8>(float (&d)[8][4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) {
  asm volatile("{.reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" JAX_DMA_R0 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;}"
               : JAX_DMA_D8(0)
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

template <>
__device__ __forceinline__ void wgmma_shared<__nv_bfloat16, 16>(float (&d)[16][4], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" JAX_DMA_R0 ", " JAX_DMA_R32 "}, %64, %65, p, 1, 1, 0, 0;}"
               : JAX_DMA_D8(0), JAX_DMA_D8(8)
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

template <>
__device__ __forceinline__ void wgmma_registers<__nv_bfloat16, 16>(float (&d)[16][4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) {
  asm volatile("{.reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" JAX_DMA_R0 ", " JAX_DMA_R32 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;}"
               : JAX_DMA_D8(0), JAX_DMA_D8(8)
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

template <>
__device__ __forceinline__ void wgmma_registers<__nv_bfloat16, 32>(float (&d)[32][4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) {
  asm volatile("{.reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" JAX_DMA_R0 ", " JAX_DMA_R32 ", " JAX_DMA_R64 ", " JAX_DMA_R96 "}, {%128, %129, %130, %131}, %132, p, 1, 1, 1;}"
               : JAX_DMA_D8(0), JAX_DMA_D8(8), JAX_DMA_D8(16), JAX_DMA_D8(24)
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

template <>
__device__ __forceinline__ void wgmma_shared<__half, 8>(float (&d)[8][4], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" JAX_DMA_R0 "}, %32, %33, p, 1, 1, 0, 0;}"
               : JAX_DMA_D8(0)
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

template <>
__device__ __forceinline__ void wgmma_registers<__half, 8>(float (&d)[8][4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) {
  asm volatile("{.reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" JAX_DMA_R0 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;}"
               : JAX_DMA_D8(0)
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

template <>
__device__ __forceinline__ void wgmma_shared<__half, 16>(float (&d)[16][4], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" JAX_DMA_R0 ", " JAX_DMA_R32 "}, %64, %65, p, 1, 1, 0, 0;}"
               : JAX_DMA_D8(0), JAX_DMA_D8(8)
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

template <>
__device__ __forceinline__ void wgmma_registers<__half, 16>(float (&d)[16][4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) {
  asm volatile("{.reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" JAX_DMA_R0 ", " JAX_DMA_R32 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;}"
               : JAX_DMA_D8(0), JAX_DMA_D8(8)
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

template <>
__device__ __forceinline__ void wgmma_registers<__half, 32>(float (&d)[32][4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) {
  asm volatile("{.reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" JAX_DMA_R0 ", " JAX_DMA_R32 ", " JAX_DMA_R64 ", " JAX_DMA_R96 "}, {%128, %129, %130, %131}, %132, p, 1, 1, 1;}"
               : JAX_DMA_D8(0), JAX_DMA_D8(8), JAX_DMA_D8(16), JAX_DMA_D8(24)
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

#undef JAX_DMA_D
#undef JAX_DMA_D8
#undef JAX_DMA_R0
#undef JAX_DMA_R32
#undef JAX_DMA_R64
#undef JAX_DMA_R96

}  // namespace jax_dma::sm90
