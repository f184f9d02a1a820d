// The kernels for each instruction set that this build can contain, and the choice among them at run time.
#include "kernels.h"

#include <cstring>
#include <limits>

// Wheels are built for the baseline of the architecture, so on x86-64 wider vectors are compiled function by function.
// Vector types inside `target_clones` are lowered for the baseline before the clones are made; including the kernels
// once per target is not.
#if defined(__x86_64__) && defined(__GNUC__)
#define JAX_DMA_X86_DISPATCH 1
#endif

#define SIMD_NAMESPACE baseline
#define SIMD_TARGET
#define SIMD_BYTES 16
#if defined(__aarch64__)
#define SIMD_BLOCK_ROWS 12  // 24 accumulators of 32 registers
#else
#define SIMD_BLOCK_ROWS 4  // 8 accumulators of 16 registers: without FMA the products need some too
#endif
#include "simd_kernels.inc"

#ifdef JAX_DMA_X86_DISPATCH

#define SIMD_NAMESPACE avx2
#define SIMD_TARGET __attribute__((target("avx2,fma")))
#define SIMD_BYTES 32
#define SIMD_BLOCK_ROWS 6  // 12 accumulators of 16 registers
#include "simd_kernels.inc"

#define SIMD_NAMESPACE avx512
#define SIMD_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define SIMD_BYTES 64
#define SIMD_BLOCK_ROWS 12  // 24 accumulators of 32 registers
#include "simd_kernels.inc"

#endif

namespace jax_dma::cpu {

const Kernels& kernels() {
  static const Kernels* const best = [] {
#ifdef JAX_DMA_X86_DISPATCH
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma"))
      return &avx512::table;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &avx2::table;
#endif
    return &baseline::table;
  }();
  return *best;
}

}  // namespace jax_dma::cpu
