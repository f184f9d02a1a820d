"""Writes wgmma.cuh (python3 gen_wgmma.py > wgmma.cuh)."""
HEAD = '''// Warpgroup matrix products of compute capability 9.0a: m64nNk16 in bf16 and f16 with f32 accumulators. Written by a script.
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
'''
out=[HEAD]
for k in range(0,128,32):
    out.append(f'#define JAX_DMA_R{k} "'+', '.join(f'%{i}' for i in range(k,k+32))+'"')
for t,c in (('__nv_bfloat16','bf16'),('__half','f16')):
    for N in (64,128,256):
        b=N//8; r=N//2
        regs=' ", " '.join(f'JAX_DMA_R{k}' for k in range(0,r,32)); ds=', '.join(f'JAX_DMA_D8({k})' for k in range(0,b,8))
        name=f'wgmma.mma_async.sync.aligned.m64n{N}k16.f32.{c}.{c}'
        if N<256:
            out.append(f'''
template <>
__device__ __forceinline__ void wgmma_shared<{t}, {b}>(float (&d)[{b}][4], uint64_t a, uint64_t b, bool accumulate) {{
  asm volatile("{{.reg .pred p; setp.ne.b32 p, %{r+2}, 0; {name} {{" {regs} "}}, %{r}, %{r+1}, p, 1, 1, 0, 0;}}"
               : {ds}
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}}''')
        out.append(f'''
template <>
__device__ __forceinline__ void wgmma_registers<{t}, {b}>(float (&d)[{b}][4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) {{
  asm volatile("{{.reg .pred p; setp.eq.u32 p, 0, 0; {name} {{" {regs} "}}, {{%{r}, %{r+1}, %{r+2}, %{r+3}}}, %{r+4}, p, 1, 1, 1;}}"
               : {ds}
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}}''')
out.append('''
#undef JAX_DMA_D
#undef JAX_DMA_D8''')
for k in range(0,128,32): out.append(f'#undef JAX_DMA_R{k}')
out.append('\n}  // namespace jax_dma::sm90')
print('\n'.join(out))
