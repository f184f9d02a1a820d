#include "../sm80/launch.h"
#include "../sm80/launch_common.cuh"
#include "backward.cuh"
using namespace jax_dma; using namespace jax_dma::sm90;
#ifndef MK
#define MK no_mask
#define BK no_bias
#endif
#ifndef HD
#define HD 128
#endif
template __global__ void jax_dma::sm90::jax_dma_sm90_backward<__nv_bfloat16, HD, sm80::MK, sm80::BK>(const __grid_constant__ Problem, const __grid_constant__ BackwardMaps, const __grid_constant__ BackwardScratch, DBias, bool, bool);
