#include "launch_backward.cuh"

template cudaError_t jax_dma::sm90::launch_backward<__half, 256>(const jax_dma::Problem&,
                                                                 const jax_dma::sm80::BackwardBuffers&, cudaStream_t);
