#include <cuda_fp16.h>

#include "launch_forward.cuh"

template cudaError_t jax_dma::sm90::launch_forward<__half, 128>(const jax_dma::Problem&,
                                                                const jax_dma::sm90::ForwardScratch&, cudaStream_t);
