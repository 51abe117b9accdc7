// The passes between the products of a mixture of experts. csrc/ops/experts.cpp fills these structs; the kernels of all
// devices use them. Rows of the products are pairs of a token and one of its experts, sorted by experts.
#pragma once

#include "gemm/gemm.h"

namespace cuda_ext {

// out[t] = the sum over i of weights[t, i] * results[rows[t, i]], in the order of i. The first product and each later
// multiply-add are rounded to float32 (float64 for float64), and the sum to the dtype of `out`.
struct CombineParams {
  int64_t tokens = 0;
  int64_t n = 0;
  int64_t top_k = 0;              // at least 1
  Operand results;                // (rows, n), contiguous along a row
  const int64_t* rows = nullptr;  // (tokens, top_k)
  const void* weights = nullptr;  // (tokens, top_k), float32 or float64; absent: 1
  Output out;                     // (tokens, n), dtype of `results`
};

// The gradient through h = activation(z), gated h = activation(z[:, :n]) * z[:, n:], and the weights of the rows. For
// each row, with g the gradient of w * h, and w = weights[pair]:
//   grad_product = the gradient of z for the gradient w * g of h
//   weighted_hidden = w * h
//   grad_weights[pair] = the sum of g * h
// Nothing is rounded to 16 bits before it is stored.
struct GateGradParams {
  int64_t rows = 0;
  int64_t n = 0;
  Activation activation = Activation::kNone;
  bool gated = false;
  Operand grad_hidden;             // g (rows, n), contiguous along a row
  Operand product;                 // z (rows, n), gated: (rows, 2n), contiguous along a row, dtype of grad_hidden
  const int64_t* pairs = nullptr;  // (rows,), a permutation
  const void* weights = nullptr;   // (rows,) by pair, float32 or float64
  Output grad_product;             // as `product`; this and what follows may be absent
  Output weighted_hidden;          // (rows, n)
  void* grad_weights = nullptr;    // (rows,) by pair, dtype of weights
};

CUDA_EXT_CPU_LAUNCHER(launch_combine, CombineParams)
CUDA_EXT_CPU_LAUNCHER(launch_gate_grad, GateGradParams)

// The CUDA kernels, on `stream`, an rt::Stream. Any dtypes except float64.
void launch_combine_cuda(const CombineParams& params, void* stream);
void launch_gate_grad_cuda(const GateGradParams& params, void* stream);

}  // namespace cuda_ext
