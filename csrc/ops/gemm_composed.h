// Derivatives of the GEMM ops composed of differentiable ops: our own for products, PyTorch's for the rest. Used for
// second derivatives, forward mode and torch.func (ops/autograd.h). They recompute the pre-activation.
#pragma once

#include "ops/autograd.h"
#include "ops/product.h"

namespace cuda_ext {

// The public ops, through the dispatcher.
Tensor call_gemm(const Tensor& a, const Tensor& b, const OptionalTensor& c, const OptionalTensor& bias,
                 const ActivationName& activation, double alpha, double beta, OptionalType out_dtype);
Tensor call_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                   const OptionalTensor& residual = {}, const ActivationName& activation = {});

// activation(z), gated activation(gate) * up of z = [gate; up]: (..., N) from z (..., N) or (..., 2N).
Tensor hidden_of(const Tensor& z, Activation activation, bool gated);
// The gradient at z, from the gradient at hidden_of(z).
Tensor hidden_backward(const Tensor& grad, const Tensor& z, Activation activation, bool gated);

// The tangent of an op's output, from the tangents of its arguments.
Tensor gemm_tangent(const Tensor& a, const Tensor& b, const OptionalTensor& c, const OptionalTensor& bias,
                    Activation activation, double alpha, double beta, at::ScalarType out_dtype);
Tensor linear_tangent(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& residual, Activation activation, bool gated);
Tensor mlp_tangent(const Tensor& input, const Tensor& weight1, const Tensor& weight2, const OptionalTensor& bias1,
                   const OptionalTensor& bias2, const OptionalTensor& residual, Activation activation, bool gated);

// The gradients selected by `wanted`, in the order of the op's arguments; the others are undefined.
std::array<Tensor, 4> gemm_composed_backward(const Tensor& grad, const Tensor& a, const Tensor& b,
                                             const OptionalTensor& c, const OptionalTensor& bias, Activation activation,
                                             double alpha, double beta, const std::array<bool, 4>& wanted);
std::array<Tensor, 3> linear_composed_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                               const OptionalTensor& bias, Activation activation, bool gated,
                                               const std::array<bool, 3>& wanted);
std::array<Tensor, 5> mlp_composed_backward(const Tensor& grad, const Tensor& input, const Tensor& weight1,
                                            const Tensor& weight2, const OptionalTensor& bias1, Activation activation,
                                            bool gated, const std::array<bool, 5>& wanted);

}  // namespace cuda_ext
