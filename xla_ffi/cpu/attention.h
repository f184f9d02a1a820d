// The two host kernels. Both write every element of every result.
#pragma once

#include "../common/problem.h"
#include "parallel.h"

namespace jax_dma::cpu {

void forward(const Problem& problem, const Pool& pool);   // out, lse
void backward(const Problem& problem, const Pool& pool);  // dq, dk, dv and, where present, dbias

}  // namespace jax_dma::cpu
