#include "ops/torch_headers.h"

#include "ops/gemm_composed.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/threshold_backward.h>

namespace cuda_ext {
namespace {

// An activation and its gradient in differentiable operations.
struct Composed {
  Tensor (*value)(const Tensor& z);
  Tensor (*backward)(const Tensor& grad, const Tensor& z);  // grad * value'(z)
};

Composed composed(Activation activation) {
  switch (activation) {
    case Activation::kRelu:
      return {[](const Tensor& z) { return at::relu(z); },
              [](const Tensor& grad, const Tensor& z) { return at::threshold_backward(grad, z, 0); }};
    case Activation::kGelu:
      return {[](const Tensor& z) { return at::gelu(z); },
              [](const Tensor& grad, const Tensor& z) { return at::gelu_backward(grad, z); }};
    case Activation::kGeluTanh:
      return {[](const Tensor& z) { return at::gelu(z, "tanh"); },
              [](const Tensor& grad, const Tensor& z) { return at::gelu_backward(grad, z, "tanh"); }};
    case Activation::kSilu:
      return {[](const Tensor& z) { return at::silu(z); },
              [](const Tensor& grad, const Tensor& z) {
                const Tensor s = z.sigmoid();  // silu_backward has no forward mode
                return grad * (s * (1 + z * (1 - s)));
              }};
    case Activation::kRelu2:
      return {[](const Tensor& z) { return at::relu(z).square(); },
              [](const Tensor& grad, const Tensor& z) { return grad * (2 * at::relu(z)); }};
    case Activation::kNone: break;
  }
  return {[](const Tensor& z) { return z; }, [](const Tensor& grad, const Tensor&) { return grad; }};
}

Tensor activate(const Tensor& z, Activation activation) { return composed(activation).value(z); }
Tensor activation_backward(const Tensor& grad, const Tensor& z, Activation activation) {
  return composed(activation).backward(grad, z);
}

// (..., n) as (rows, n).
Tensor rows_of(const Tensor& tensor) { return tensor.dim() == 1 ? tensor.unsqueeze(0) : tensor.flatten(0, -2); }

Tensor sum_rows(const Tensor& tensor) { return tensor.dim() == 1 ? tensor : rows_of(tensor).sum(0); }

Tensor product(const Tensor& a, const Tensor& b, double alpha = 1.0, OptionalType out_dtype = {}) {
  return call_gemm(a, b, {}, {}, {}, alpha, 1.0, out_dtype);
}

// grad (..., N) @ weight (N, K)
Tensor input_gradient(const Tensor& grad, const Tensor& weight) { return call_linear(grad, weight.t(), {}); }
// grad (..., N)^T @ input (..., K)
Tensor weight_gradient(const Tensor& grad, const Tensor& input) { return product(rows_of(grad).t(), rows_of(input)); }

// Sums the defined terms.
class Sum {
 public:
  void add(const Tensor& term) {
    if (term.defined()) total_ = total_.defined() ? total_ + term : term;
  }
  const Tensor& total() const { return total_; }

 private:
  Tensor total_;
};

// A tensor without its tangent.

}  // namespace

Tensor hidden_of(const Tensor& z, Activation activation, bool gated) {
  if (!gated) return activate(z, activation);
  const auto halves = z.chunk(2, -1);
  return activate(halves[0], activation) * halves[1];
}

Tensor hidden_backward(const Tensor& grad, const Tensor& z, Activation activation, bool gated) {
  if (!gated) return activation_backward(grad, z, activation);
  const auto halves = z.chunk(2, -1);
  const Tensor &gate = halves[0], &up = halves[1];
  return at::cat({activation_backward(grad * up, gate, activation), grad * activate(gate, activation)}, -1);
}

Tensor call_gemm(const Tensor& a, const Tensor& b, const OptionalTensor& c, const OptionalTensor& bias,
                 const ActivationName& activation, double alpha, double beta, OptionalType out_dtype) {
  static const auto op = find_op<Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                        ActivationName, double, double, OptionalType)>(CUDA_EXT_OP("gemm"));
  return op.call(a, b, c, bias, activation, alpha, beta, out_dtype);
}

Tensor call_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                   const OptionalTensor& residual, const ActivationName& activation) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, ActivationName)>(
          CUDA_EXT_OP("linear"));
  return op.call(input, weight, bias, residual, activation);
}

Tensor gemm_tangent(const Tensor& a, const Tensor& b, const OptionalTensor& c, const OptionalTensor& bias,
                    Activation activation, double alpha, double beta, at::ScalarType out_dtype) {
  if (activation != Activation::kNone)
    return tangent_of(activate(call_gemm(a, b, c, bias, {}, alpha, beta, out_dtype), activation));
  Sum tangent;
  if (const Tensor da = tangent_of(a); da.defined()) tangent.add(product(da, primal(b), alpha, out_dtype));
  if (const Tensor db = tangent_of(b); db.defined()) tangent.add(product(primal(a), db, alpha, out_dtype));
  if (const Tensor dc = tangent_of(c); dc.defined() && beta != 0.0) tangent.add(dc * beta);
  tangent.add(tangent_of(bias));
  return tangent.total();
}

Tensor linear_tangent(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& residual, Activation activation, bool gated) {
  if (gated || activation != Activation::kNone) {
    const Tensor out = hidden_of(call_linear(input, weight, bias), activation, gated);
    return tangent_of(is_given(residual) ? out + *residual : out);
  }
  Sum tangent;
  if (const Tensor dx = tangent_of(input); dx.defined()) tangent.add(call_linear(dx, primal(weight), {}));
  if (const Tensor dw = tangent_of(weight); dw.defined()) tangent.add(call_linear(primal(input), dw, {}));
  tangent.add(tangent_of(bias));
  tangent.add(tangent_of(residual));
  return tangent.total();
}

Tensor mlp_tangent(const Tensor& input, const Tensor& weight1, const Tensor& weight2, const OptionalTensor& bias1,
                   const OptionalTensor& bias2, const OptionalTensor& residual, Activation activation, bool gated) {
  const Tensor hidden = hidden_of(call_linear(input, weight1, bias1), activation, gated);
  return tangent_of(call_linear(hidden, weight2, bias2, residual));
}

std::array<Tensor, 4> gemm_composed_backward(const Tensor& grad, const Tensor& a, const Tensor& b,
                                             const OptionalTensor& c, const OptionalTensor& bias, Activation activation,
                                             double alpha, double beta, const std::array<bool, 4>& wanted) {
  const Tensor at_z =
      activation == Activation::kNone
          ? grad
          : activation_backward(grad, call_gemm(a, b, c, bias, {}, alpha, beta, grad.scalar_type()), activation);
  const Tensor factor = at_z.to(a.scalar_type());
  // The gradients of broadcast operands are summed; for c and bias the autograd engine does that.
  return {wanted[0] ? product(factor, b.mT(), alpha).sum_to_size_symint(a.sym_sizes()) : Tensor(),
          wanted[1] ? product(a.mT(), factor, alpha).sum_to_size_symint(b.sym_sizes()) : Tensor(),
          wanted[2] ? at_z * beta : Tensor(), wanted[3] ? sum_rows(at_z) : Tensor()};
}

std::array<Tensor, 3> linear_composed_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                               const OptionalTensor& bias, Activation activation, bool gated,
                                               const std::array<bool, 3>& wanted) {
  const bool plain = !gated && activation == Activation::kNone;
  const Tensor at_z = plain ? grad : hidden_backward(grad, call_linear(input, weight, bias), activation, gated);
  return {wanted[0] ? input_gradient(at_z, weight) : Tensor(), wanted[1] ? weight_gradient(at_z, input) : Tensor(),
          wanted[2] ? sum_rows(at_z) : Tensor()};
}

std::array<Tensor, 5> mlp_composed_backward(const Tensor& grad, const Tensor& input, const Tensor& weight1,
                                            const Tensor& weight2, const OptionalTensor& bias1, Activation activation,
                                            bool gated, const std::array<bool, 5>& wanted) {
  const Tensor z = call_linear(input, weight1, bias1);
  const Tensor at_z = hidden_backward(input_gradient(grad, weight2), z, activation, gated);
  return {wanted[0] ? input_gradient(at_z, weight1) : Tensor(), wanted[1] ? weight_gradient(at_z, input) : Tensor(),
          wanted[2] ? weight_gradient(grad, hidden_of(z, activation, gated)) : Tensor(),
          wanted[3] ? sum_rows(at_z) : Tensor(), wanted[4] ? sum_rows(grad) : Tensor()};
}

}  // namespace cuda_ext
