// The signatures of the ops of loss.cpp, as loss_autograd.cpp calls them.
#pragma once

#include "ops/loss_composed.h"

namespace cuda_ext {

using LossMethod = std::string_view;  // "auto", "forward" or "recompute"

using Statistics = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;  // lse, nll, dot, entropy, lse_low
using StatisticsSignature = Statistics(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                       const OptionalTensor& target, const OptionalTensor& coefficients, double scale,
                                       double softcap, int64_t ignore_index, int64_t memory_limit,
                                       bool filter_gradients, bool entropy);

using LogitGradients = std::tuple<Tensor, Tensor, Tensor>;  // of input, weight and bias
using StatisticsBackwardSignature = LogitGradients(const OptionalTensor& grad_lse, const OptionalTensor& grad_nll,
                                                   const OptionalTensor& grad_dot, const OptionalTensor& grad_entropy,
                                                   const Tensor& input, const Tensor& weight,
                                                   const OptionalTensor& bias, const OptionalTensor& target,
                                                   const OptionalTensor& coefficients, const Tensor& lse,
                                                   const Tensor& lse_low, const OptionalTensor& entropy, double scale,
                                                   double softcap, int64_t ignore_index, int64_t memory_limit,
                                                   bool filter_gradients, std::array<bool, 3> output_mask);
using StatisticsBackwardSlotSignature = LogitGradients(
    const OptionalTensor& grad_lse, const OptionalTensor& grad_nll, const OptionalTensor& grad_dot,
    const OptionalTensor& grad_entropy, const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
    const OptionalTensor& target, const OptionalTensor& coefficients, const Tensor& lse, const Tensor& lse_low,
    const OptionalTensor& entropy, double scale, double softcap, int64_t ignore_index, int64_t memory_limit,
    bool filter_gradients, std::array<bool, 3> output_mask, const OptionalTensor& weight_slot, double slot_alpha,
    double slot_beta);

using LossSignature = Tensor(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             const OptionalTensor& target, const OptionalTensor& coefficients,
                             const OptionalTensor& by_lse, const OptionalTensor& by_nll, const OptionalTensor& by_dot,
                             const OptionalTensor& by_square, double scale, double softcap, int64_t ignore_index,
                             int64_t memory_limit, bool filter_gradients, LossMethod method);
using LossForward = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // the loss and its gradients
using LossForwardSignature = LossForward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                         const OptionalTensor& target, const OptionalTensor& coefficients,
                                         const OptionalTensor& by_lse, const OptionalTensor& by_nll,
                                         const OptionalTensor& by_dot, const OptionalTensor& by_square, double scale,
                                         double softcap, int64_t ignore_index, int64_t memory_limit,
                                         bool filter_gradients, std::array<bool, 3> output_mask);

// Whether linear_loss forms its gradients in forward: if it is told to, or if enough complete rows of logits fit into
// the limit.
bool forms_gradients_in_forward(const Tensor& input, const Tensor& weight, int64_t memory_limit, LossMethod method);

}  // namespace cuda_ext
