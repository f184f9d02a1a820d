// Thin wrappers over the PTX instructions that the sm_80-class kernels use (sm_90 reductions where they exist).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace jax_dma::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Asynchronous copies say nothing to the compiler about memory: what orders them are the commits, waits and barriers
// around them.
// Copies 16 bytes to shared memory; bytes past `valid` (0 to 16) become 0.
__device__ __forceinline__ void copy_async_16(uint32_t target, const void* source, int valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid));
}
// The same for 4, 8 or 16 bytes, all of them or (valid == false) zeros.
template <int kBytes>
__device__ __forceinline__ void copy_async(uint32_t target, const void* source, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source), "n"(kBytes),
               "r"(valid ? kBytes : 0));
}
// Copies 16 bytes, or zeros where not `valid`, if `wanted`; without a branch.
__device__ __forceinline__ void copy_async_16_if(bool wanted, uint32_t target, const void* source, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.s32 p, %0, 0;\n"
      "@p cp.async.cg.shared.global [%1], [%2], 16, %3;\n"
      "}" ::"r"(int{wanted}),
      "r"(target), "l"(source), "r"(valid ? 16 : 0));
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrix(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void load_matrix_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// c [16 x 8] += a [16 x 16] b [16 x 8], f32 accumulation.
template <class T>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// 2^x; 2^-inf is 0.
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh to about 1e-7, absolute.
__device__ __forceinline__ float tanh(float x) { return 1.0f - __fdividef(2.0f, exp2(x * 2.885390081777927f) + 1.0f); }

// Adds without returning the old value.
__device__ __forceinline__ void reduce_add(float* target, float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(target), "f"(value) : "memory");
}

__device__ __forceinline__ int load_acquire(const int* source) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(int* target, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(target), "r"(value) : "memory");
}

template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
  } else {
    __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
  }
}
template <class T>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&pair));
  } else {
    return __half22float2(*reinterpret_cast<__half2*>(&pair));
  }
}

// The same as one integer: pack() and unpack() go by way of halves, which the compiler moves one by one.
template <class T>
__device__ __forceinline__ uint32_t pack_bits(float low, float high) {
  uint32_t pair;
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <class T>
__device__ __forceinline__ float2 unpack_bits(uint32_t pair) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000));
  else return unpack<T>(pair);
}

// Stores to device memory by pointers that the compiler cannot tell to be such.
__device__ __forceinline__ void store_global(void* target, uint32_t x, uint32_t y) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(target), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void store_global(void* target, uint4 value) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

// One word of shared memory, read at this place in the program.
__device__ __forceinline__ uint32_t load_shared_word(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}

__device__ __forceinline__ void load_shared_row(uint32_t (&words)[2], uint32_t address) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address));
}
__device__ __forceinline__ void load_shared_row(uint32_t (&words)[1], uint32_t address) {
  words[0] = load_shared_word(address);
}
// The other way, if `wanted`; without a branch.
__device__ __forceinline__ void store_shared_word_if(bool wanted, uint32_t address, uint32_t value) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.s32 p, %0, 0;\n"
      "@p st.shared.u32 [%1], %2;\n"
      "}" ::"r"(int{wanted}),
      "r"(address), "r"(value));
}
// Four bytes of device memory, or two, or (neither) 0; without a branch.
__device__ __forceinline__ uint32_t load_global_if(bool four, bool two, const void* source) {
  uint32_t value;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.s32 p, %1, 0;\n"
      "setp.ne.s32 q, %2, 0;\n"
      "mov.b32 %0, 0;\n"
      "@p ld.global.b32 %0, [%3];\n"
      "@q ld.global.u16 %0, [%3];\n"
      "}"
      : "=&r"(value)
      : "r"(int{four}), "r"(int{two}), "l"(source));
  return value;
}

// 16 bytes in shared memory.
__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address));
  return value;
}
__device__ __forceinline__ void store_shared(uint32_t address, uint4 value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}
template <class T>
__device__ __forceinline__ void scale_shared(uint32_t address, float factor) {
  uint4 pairs;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pairs.x), "=r"(pairs.y), "=r"(pairs.z), "=r"(pairs.w)
               : "r"(address)
               : "memory");
  const auto scaled = [factor](uint32_t pair) {
    const float2 values = unpack<T>(pair);
    return pack<T>(values.x * factor, values.y * factor);
  };
  store_shared(address, make_uint4(scaled(pairs.x), scaled(pairs.y), scaled(pairs.z), scaled(pairs.w)));
}

}  // namespace jax_dma::ptx
