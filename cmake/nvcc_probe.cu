// Compiled before CMake is told about CUDA: does this nvcc work for these targets, does its runtime link, and is CUB
// there?
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cub/version.cuh>
#include <string>

__global__ void probe(__nv_bfloat16* x) { x[threadIdx.x] = __float2bfloat16(1.0f); }

int main() {
  int devices = 0;
  return std::string(cudaGetErrorString(cudaGetDeviceCount(&devices))).empty();
}
