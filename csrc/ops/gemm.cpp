// gemm, and the backward of activations that gemm, linear and mlp share: schema, checks, autograd, autocast, dispatch.
//
// Users call gemm. gemm_forward also returns what backward needs: the pre-activation, or an empty tensor where backward
// can use the output (relu) or needs neither (no activation). Backward calls activation_backward if there is an
// activation, then gemm_backward with its result. The latter returns the gradients that output_mask asks for, in the
// order of the arguments, and empty tensors for the others.
#include "ops/torch_headers.h"

#include <ATen/ops/mul.h>

#include <algorithm>
#include <cmath>

#include "ops/gemm_autograd.h"
#include "ops/gemm_composed.h"

namespace cuda_ext {
namespace {

struct GemmShape {
  Sizes batch;
  int64_t m, n, k;
  Sizes out() const {
    Sizes sizes = batch;
    sizes.append({m, n});
    return sizes;
  }
};

GemmShape check_product(const char* op, const Tensor& a, const Tensor& b) {
  check_floating(op, "a", a);
  check_same_dtype(op, "b", b, "a", a);
  check_same_device(op, "b", b, "a", a);
  CUDA_EXT_CHECK(a.dim() >= 2, op, "expected a of shape (..., M, K), got ", shape_string(a));
  CUDA_EXT_CHECK(b.dim() >= 2 && b.size(-2) == a.size(-1), op, "expected b of shape (..., ", a.size(-1),
                 ", N) to match a ", shape_string(a), ", got ", shape_string(b));
  GemmShape shape{{}, a.size(-2), b.size(-1), a.size(-1)};
  const int64_t dims = std::max(a.dim(), b.dim()) - 2;
  for (int64_t d = 0; d < dims; ++d) {
    const int64_t own_a = d - (dims - (a.dim() - 2)), own_b = d - (dims - (b.dim() - 2));
    const int64_t size_a = own_a < 0 ? 1 : a.size(own_a), size_b = own_b < 0 ? 1 : b.size(own_b);
    CUDA_EXT_CHECK(size_a == size_b || size_a == 1 || size_b == 1, op,
                   "expected the batch dims of a and b to broadcast, got a ", shape_string(a), " and b ",
                   shape_string(b));
    shape.batch.push_back(size_a == 1 ? size_b : size_a);
  }
  return shape;
}

void check_scale(const char* op, const char* argument, double value) {
  CUDA_EXT_CHECK(!std::isnan(value), op, "expected ", argument, " to be a number, got nan");
}

}  // namespace

GemmCall describe_gemm(const char* op, const Tensor& given_a, const Tensor& given_b, const OptionalTensor& c,
                       const OptionalTensor& bias, const ActivationName& activation, double alpha, double beta,
                       OptionalType out_dtype) {
  const GemmShape shape = check_product(op, given_a, given_b);
  GemmCall call{left_operand(given_a),
                with_unit_stride(given_b),
                shape.out(),
                output_type(op, out_dtype, given_a.scalar_type()),
                {}};
  const Tensor &a = call.a, &b = call.b;
  const Sizes& sizes = call.sizes;
  GemmParams& params = call.params;
  params.activation = parse_activation(op, activation);
  if (is_given(c)) check_addend(op, "c", *c, a, call.type, sizes);
  if (is_given(bias)) check_bias(op, "bias", *bias, a, call.type, shape.n);
  check_scale(op, "alpha", alpha);
  check_scale(op, "beta", beta);

  params.m = shape.m;
  params.n = shape.n;
  params.k = alpha == 0.0 ? 0 : shape.k;
  params.a = matrix(a);
  params.b = matrix(b);
  const bool has_c = is_given(c) && beta != 0.0;
  const int64_t dims = int64_t(sizes.size());
  if (has_c) {
    params.c = matrix(*c);
    params.c.row_stride = broadcast_stride(*c, dims - 2, dims);
    params.c.column_stride = broadcast_stride(*c, dims - 1, dims);
  }
  if (is_given(bias)) params.bias = matrix(*bias);
  BatchDims batch;
  for (int64_t d = 0; d < dims - 2; ++d)
    batch.push_back({sizes[d], false, broadcast_stride(a, d, dims), broadcast_stride(b, d, dims),
                     has_c ? broadcast_stride(*c, d, dims) : 0, 0});
  const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
  if (!empty) set_batch(op, params, batch);
  params.alpha = alpha;
  params.beta = beta;
  params.batch_invariant = is_batch_invariant();
  return call;
}

namespace {

std::tuple<Tensor, Tensor> gemm_on_device(const char* op, const Tensor& a, const Tensor& b, const OptionalTensor& c,
                                          const OptionalTensor& bias, const ActivationName& activation, double alpha,
                                          double beta, OptionalType out_dtype, bool for_backward) {
  GemmCall call = describe_gemm(op, a, b, c, bias, activation, alpha, beta, out_dtype);
  const bool save_preact = for_backward && needs_preact(call.params.activation, false, false);
  Tensor out = empty_beside(a, call.sizes, call.type);
  Tensor preact = save_preact ? empty_beside(a, call.sizes, call.type) : for_backward ? absent(a, call.type) : Tensor();
  if (out.numel() == 0) return {out, preact};
  call.params.out = output(out);
  if (save_preact) call.params.preact_out = output(preact);
  run_gemm(op, out, call.params);
  return {out, preact};
}

Tensor gemm(const Tensor& a, const Tensor& b, const OptionalTensor& c, const OptionalTensor& bias,
            ActivationName activation, double alpha, double beta, OptionalType out_dtype) {
  return std::get<0>(gemm_on_device("gemm", a, b, c, bias, activation, alpha, beta, out_dtype, false));
}

std::tuple<Tensor, Tensor> gemm_forward(const Tensor& a, const Tensor& b, const OptionalTensor& c,
                                        const OptionalTensor& bias, ActivationName activation, double alpha,
                                        double beta, OptionalType out_dtype) {
  return gemm_on_device("gemm", a, b, c, bias, activation, alpha, beta, out_dtype, true);
}

// The gradient of `operand`, summed over the batch dims that it was broadcast along: alpha * grad @ other^T for the
// left operand, alpha * other^T @ grad for the right one.
Tensor operand_gradient(const char* op, const Tensor& given_grad, const Tensor& operand, const Tensor& given_other,
                        double alpha, bool is_left) {
  const Tensor grad = is_left ? left_operand(given_grad) : with_unit_stride(given_grad);
  const Tensor other = with_unit_stride(given_other);
  Tensor result = empty_beside(grad, operand.sizes(), operand.scalar_type());
  if (result.numel() == 0) return result;
  const int64_t dims = grad.dim();
  GemmParams params;
  params.m = operand.size(-2);
  params.n = operand.size(-1);
  params.k = alpha == 0.0 ? 0 : is_left ? grad.size(-1) : grad.size(-2);
  params.a = is_left ? matrix(grad) : transposed(matrix(other));
  params.b = is_left ? transposed(matrix(other)) : matrix(grad);
  BatchDims batch;
  for (int64_t d = 0; d < dims - 2; ++d) {
    const int64_t own = d - (dims - operand.dim());
    const bool reduced = own < 0 || operand.size(own) == 1;
    const int64_t stride = broadcast_stride(grad, d, dims), other_stride = broadcast_stride(other, d, dims);
    batch.push_back({grad.size(d), reduced, is_left ? stride : other_stride, is_left ? other_stride : stride, 0, 0});
  }
  set_batch(op, params, batch);
  params.alpha = alpha;
  params.batch_invariant = is_left && is_batch_invariant();
  params.out = output(result);
  run_gemm(op, result, params);
  return result;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> gemm_backward(const Tensor& grad, const Tensor& a, const Tensor& b,
                                                         const OptionalTensor& bias, double alpha, double beta,
                                                         std::array<bool, 4> output_mask) {
  constexpr const char* op = "gemm_backward";
  check_gradient(op, grad, check_product(op, a, b).out());
  const auto type = a.scalar_type();
  Tensor grad_bias = bias_gradient(op, grad, output_mask[3], is_given(bias) ? bias->scalar_type() : type);
  // Tensor cores need both operands in the same dtype.
  const Tensor factor = cuda_kernels(op, grad.device()) == nullptr ? grad : grad.to(type);
  return {output_mask[0] ? operand_gradient(op, factor, a, b, alpha, true) : absent(grad, type),
          output_mask[1] ? operand_gradient(op, factor, b, a, alpha, false) : absent(grad, type),
          output_mask[2] ? at::mul(grad, beta) : absent(grad, type), grad_bias};
}

// grad (..., N), preact (..., N) or, gated, (..., 2N): the gradient at preact, and the sum of its rows.
std::tuple<Tensor, Tensor> activation_backward(const Tensor& grad, const Tensor& preact, ActivationName activation,
                                               bool gated, OptionalType bias_dtype) {
  constexpr const char* op = "activation_backward";
  check_floating(op, "grad_out", grad);
  check_same_device(op, "preact", preact, "grad_out", grad);
  CUDA_EXT_CHECK(grad.dim() >= 1, op, "expected grad_out of shape (..., N), got ", shape_string(grad));
  const Sizes expected = replace_last(grad.sizes(), 1, {gated ? 2 * grad.size(-1) : grad.size(-1)});
  CUDA_EXT_CHECK(preact.sizes() == at::IntArrayRef(expected) && is_floating(preact.scalar_type()), op,
                 "expected preact of shape ", shape_string(expected), ", got ", shape_string(preact));
  auto [grad_preact, bias] = activation_gradient(op, grad, preact, parse_activation(op, activation), gated,
                                                 bias_dtype.has_value(), bias_dtype.value_or(grad.scalar_type()));
  // Without an activation grad_preact is grad, but an op must not return its input.
  return {grad_preact.is_alias_of(grad) ? grad_preact.clone() : grad_preact, bias};
}

}  // namespace

std::tuple<Tensor, Tensor> call_activation_backward(const Tensor& grad, const Tensor& preact,
                                                    const ActivationName& activation, bool gated,
                                                    OptionalType bias_type) {
  static const auto op = find_op<decltype(activation_backward)>(CUDA_EXT_OP("activation_backward"));
  return op.call(grad, preact, activation, gated, bias_type);
}

// The autograd node. Its name shows in profiles and as grad_fn, so it is outside of the anonymous namespace.
struct GemmBackward : torch::autograd::Function<GemmBackward> {
  static constexpr const char* kNodeName = CUDA_EXT_OP("GemmBackward");

  static variable_list backward(AutogradContext* ctx, variable_list& grads) {
    if (!grads[0].defined()) return variable_list(4);
    std::array<bool, 4> wanted{};
    for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = ctx->needs_input_grad(i);
    auto saved = ctx->get_saved_variables();
    const Tensor &a = saved[0], &b = saved[1];
    Tensor& preact = saved[2];
    const OptionalTensor bias = optional(saved[3]);
    const ActivationName activation = saved_activation(ctx);
    const double alpha = saved_option(ctx, "alpha", 1.0), beta = saved_option(ctx, "beta", 1.0);
    if (!preact.defined() || needs_composed_backward(grads[0])) {
      auto [grad_a, grad_b, grad_c, grad_bias] = gemm_composed_backward(
          grads[0], a, b, optional(saved[4]), bias, parse_activation("gemm_backward", activation), alpha, beta, wanted);
      return {grad_a, grad_b, grad_c, grad_bias};
    }
    Tensor grad = std::move(grads[0]), grad_bias;
    if (activation.has_value()) {
      std::tie(grad, grad_bias) =
          call_activation_backward(grad, preact, activation, false, bias_type(wanted[3], bias, a));
      preact.reset();
      release_saved(ctx);
    }
    const bool sums_bias = wanted[3] && !activation.has_value();
    static const auto op = find_op<decltype(gemm_backward)>(CUDA_EXT_OP("gemm_backward"));
    auto gradients = op.call(grad, a, b, bias, alpha, beta, {wanted[0], wanted[1], wanted[2], sums_bias});
    if (sums_bias) grad_bias = std::get<3>(gradients);
    return {wanted[0] ? std::get<0>(gradients) : Tensor(), wanted[1] ? std::get<1>(gradients) : Tensor(),
            wanted[2] ? std::get<2>(gradients) : Tensor(), wanted[3] ? grad_bias : Tensor()};
  }
};

namespace {

Tensor gemm_autograd(const Tensor& a, const Tensor& b, const OptionalTensor& c, const OptionalTensor& bias,
                     ActivationName activation, double alpha, double beta, OptionalType out_dtype) {
  static const auto op = find_op<decltype(gemm)>(CUDA_EXT_OP("gemm"));
  static const auto forward_op = find_op<decltype(gemm_forward)>(CUDA_EXT_OP("gemm_forward"));
  const Derivatives wanted = derivatives_of(a, b, c, bias);
  auto [out, preact] = call_below_autograd(wanted, op, forward_op, a, b, c, bias, activation, alpha, beta, out_dtype);
  if (wanted.reverse) {
    const auto node = make_node<GemmBackward>(a, b, c, bias);
    save_activation(&node->ctx_, activation);
    save_option(&node->ctx_, "alpha", alpha, 1.0);
    save_option(&node->ctx_, "beta", beta, 1.0);
    // A second derivative needs c to recompute the pre-activation.
    attach_node(node,
                {a, b, activation == "relu" && preact.defined() ? out : preact, value_or_empty(bias),
                 activation.has_value() ? value_or_empty(c) : Tensor()},
                out);
  }
  if (wanted.forward)
    set_tangent(out, gemm_tangent(a, b, c, bias, parse_activation("gemm", activation), alpha, beta, out.scalar_type()));
  return out;
}

template <c10::DeviceType device>
Tensor gemm_autocast(const Tensor& a, const Tensor& b, const OptionalTensor& c, const OptionalTensor& bias,
                     ActivationName activation, double alpha, double beta, OptionalType out_dtype) {
  static const auto op = find_op<decltype(gemm)>(CUDA_EXT_OP("gemm"));
  const Autocast cast(device);
  return op.call(cast(a), cast(b), cast(c), cast(bias), activation, alpha, beta, out_dtype);
}

}  // namespace

// Tensors come first and are positional: vmap rules need that.
#define GEMM_ARGUMENTS                                                                \
  "(Tensor a, Tensor b, Tensor? c=None, Tensor? bias=None, *, str? activation=None, " \
  "float alpha=1.0, float beta=1.0, ScalarType? out_dtype=None)"

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::flexible_layout};
  m.def("gemm" GEMM_ARGUMENTS " -> Tensor", tags);
  m.def("gemm_forward" GEMM_ARGUMENTS " -> (Tensor out, Tensor preact)", tags);
  m.def(
      "gemm_backward(Tensor grad_out, Tensor a, Tensor b, Tensor? bias, *, float alpha, float beta, "
      "bool[4] output_mask) -> (Tensor grad_a, Tensor grad_b, Tensor grad_c, Tensor grad_bias)",
      tags);
  m.def(
      "activation_backward(Tensor grad_out, Tensor preact, *, str? activation, bool gated, "
      "ScalarType? bias_dtype) -> (Tensor grad_preact, Tensor grad_bias)",
      tags);
  register_layout_errors(m, {"gemm", "gemm_forward", "gemm_backward", "activation_backward"});
}

namespace {

void register_kernels(torch::Library& m) {
  m.impl("gemm", gemm);
  m.impl("gemm_forward", gemm_forward);
  m.impl("gemm_backward", gemm_backward);
  m.impl("activation_backward", activation_backward);
}

}  // namespace

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CUDA, m) { register_kernels(m); }

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, Autograd, m) {
  m.impl("gemm", gemm_autograd);
  for (const char* name : {"gemm_forward", "gemm_backward", "activation_backward"})
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, AutocastCPU, m) { m.impl("gemm", gemm_autocast<c10::DeviceType::CPU>); }

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, AutocastCUDA, m) { m.impl("gemm", gemm_autocast<c10::DeviceType::CUDA>); }

}  // namespace cuda_ext
