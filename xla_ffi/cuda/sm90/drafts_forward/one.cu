// One kernel, to look at its code: nvcc ... -DHD=128 -DMK=no_mask -DBK=no_bias one.cu
#include "launch_forward.cuh"
#ifndef HD
#define HD 128
#endif
#ifndef MK
#define MK no_mask
#endif
#ifndef BK
#define BK no_bias
#endif
template __global__ void jax_dma::sm90::jax_dma_sm90_forward<__nv_bfloat16, HD, jax_dma::sm80::MK, jax_dma::sm80::BK>(const __grid_constant__ jax_dma::Problem, const __grid_constant__ jax_dma::sm90::ForwardMaps, const __grid_constant__ jax_dma::sm90::ForwardPlan);
