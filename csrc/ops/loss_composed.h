// The ops of loss.cpp composed of differentiable ops, which make all logits: for second derivatives, forward mode,
// torch.func (ops/autograd.h), and float64 on a GPU.
#pragma once

#include "ops/gemm_composed.h"

namespace cuda_ext {

// Logits are z = softcap tanh(x / softcap), or x if softcap is 0, with x = scale (input @ weight^T + bias).
struct LossOptions {
  double scale, softcap;
  int64_t ignore_index;
  int64_t memory_limit;  // bytes for tiles of logits
  bool filter_gradients;
};

// Of each row: lse; nll = lse - z at the target, 0 if that is ignored; dot = sum of coefficients z; entropy of
// softmax(z). Undefined where there is no target, are no coefficients, or no entropy is wanted.
std::array<Tensor, 4> composed_statistics(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                          const OptionalTensor& target, const OptionalTensor& coefficients,
                                          const LossOptions& options, bool entropy);

// The gradients of a loss at the statistics of each row, some of which may be undefined.
struct RowGradients {
  Tensor lse, nll, dot, entropy;
};
// Those of weighted_sum.
RowGradients gradients_of_loss(const Tensor& lse, const OptionalTensor& by_lse, const OptionalTensor& by_nll,
                               const OptionalTensor& by_dot, const OptionalTensor& by_square);

// The gradients of input, weight and bias that are wanted.
std::array<Tensor, 3> composed_gradients(const RowGradients& by, const Tensor& input, const Tensor& weight,
                                         const OptionalTensor& bias, const OptionalTensor& target,
                                         const OptionalTensor& coefficients, const LossOptions& options,
                                         const std::array<bool, 3>& wanted);

// sum(by_lse lse + by_nll nll + by_dot dot + by_square lse^2); a weight of 0 removes its term, even if infinite.
Tensor weighted_sum(const Tensor& lse, const Tensor& nll, const Tensor& dot, const OptionalTensor& by_lse,
                    const OptionalTensor& by_nll, const OptionalTensor& by_dot, const OptionalTensor& by_square);

}  // namespace cuda_ext
