#include "launch_forward.cuh"

template cudaError_t jax_dma::sm90::launch_forward<__nv_bfloat16, 256>(const jax_dma::Problem&, cudaStream_t);
