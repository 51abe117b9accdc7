// mlp and gated_mlp: linear, activation, linear and an optional residual as one op. Backward needs only the
// pre-activation. The GEMM in mlp_hidden_backward forms the gradient of the hidden tensor; its epilogue turns that into
// the gradient of the pre-activation, recomputes the hidden tensor, and sums the bias gradient. linear_backward does
// the rest. The other ops are as in gemm.cpp.
#include "ops/torch_headers.h"

#include <ATen/ops/zeros.h>

#include "ops/gemm_autograd.h"
#include "ops/gemm_composed.h"

namespace cuda_ext {
namespace {

using HiddenGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using OutputMask = std::array<bool, 4>;

void check_layers(const char* op, const Tensor& input, const Tensor& weight1, const Tensor& weight2,
                  const OptionalTensor& bias1, const OptionalTensor& bias2, const OptionalTensor& residual,
                  bool gated) {
  check_projection(op, "input", input, "weight1", weight1, "bias1", bias1, gated);
  check_same_dtype(op, "weight2", weight2, "input", input);
  check_same_device(op, "weight2", weight2, "input", input);
  const int64_t hidden = gated ? weight1.size(0) / 2 : weight1.size(0);
  CUDA_EXT_CHECK(weight2.dim() == 2 && weight2.size(1) == hidden, op, "expected weight2 of shape (N, ", hidden,
                 ") to match weight1 ", shape_string(weight1), ", got ", shape_string(weight2));
  if (is_given(bias2)) check_bias(op, "bias2", *bias2, input, input.scalar_type(), weight2.size(0));
  if (is_given(residual))
    check_addend(op, "residual", *residual, input, input.scalar_type(),
                 replace_last(input.sizes(), 1, {weight2.size(0)}));
}

template <bool gated>
constexpr const char* op_name = gated ? "gated_mlp" : "mlp";

template <bool gated>
std::tuple<Tensor, Tensor> run_mlp(const Tensor& input, const Tensor& weight1, const Tensor& weight2,
                                   const OptionalTensor& bias1, const OptionalTensor& bias2,
                                   const OptionalTensor& residual, const ActivationName& activation,
                                   bool for_backward) {
  constexpr const char* op = op_name<gated>;
  check_layers(op, input, weight1, weight2, bias1, bias2, residual, gated);
  auto [hidden, preact] =
      project(op, input, weight1, bias1, std::nullopt, parse_activation(op, activation), gated, for_backward);
  Tensor out = project(op, hidden, weight2, bias2, residual, Activation::kNone, false, false).out;
  return {std::move(out), std::move(preact)};
}

template <bool gated>
Tensor mlp(const Tensor& input, const Tensor& weight1, const Tensor& weight2, const OptionalTensor& bias1,
           const OptionalTensor& bias2, const OptionalTensor& residual, ActivationName activation) {
  return std::get<0>(run_mlp<gated>(input, weight1, weight2, bias1, bias2, residual, activation, false));
}
template <bool gated>
std::tuple<Tensor, Tensor> mlp_forward(const Tensor& input, const Tensor& weight1, const Tensor& weight2,
                                       const OptionalTensor& bias1, const OptionalTensor& bias2,
                                       const OptionalTensor& residual, ActivationName activation) {
  return run_mlp<gated>(input, weight1, weight2, bias1, bias2, residual, activation, true);
}

// grad (..., N), weight2 (N, hidden), preact (..., hidden), or (..., 2 * hidden) if gated. Returns the gradients of the
// pre-activation, weight2, bias1 and bias2.
HiddenGradients run_hidden_backward(const Tensor& grad, const Tensor& weight2, const Tensor& preact,
                                    const OptionalTensor& bias1, const OptionalTensor& bias2,
                                    const ActivationName& activation_name, bool gated, const OutputMask& output_mask,
                                    const WeightSlot* into) {
  constexpr const char* op = "mlp_hidden_backward";
  check_floating(op, "grad_out", grad);
  check_floating(op, "weight2", weight2);
  check_same_device(op, "weight2", weight2, "grad_out", grad);
  check_same_device(op, "preact", preact, "grad_out", grad);
  CUDA_EXT_CHECK(grad.dim() >= 1 && weight2.dim() == 2 && weight2.size(0) == grad.size(-1), op,
                 "expected grad_out of shape (..., N) and weight2 of shape (N, K), got ", shape_string(grad), " and ",
                 shape_string(weight2));
  const Activation activation = parse_activation(op, activation_name);
  const int64_t hidden_size = weight2.size(1), width = gated ? 2 * hidden_size : hidden_size;
  const Sizes preact_size = replace_last(grad.sizes(), 1, {width});
  CUDA_EXT_CHECK(preact.sizes() == at::IntArrayRef(preact_size), op, "expected preact of shape ",
                 shape_string(preact_size), ", got ", shape_string(preact));
  if (into != nullptr) check_slot(op, *into, weight2);
  const auto type = weight2.scalar_type();
  const auto [wants_preact, wants_weight2, wants_bias1, wants_bias2] = output_mask;

  Tensor grad_preact = absent(grad, type), hidden = absent(grad, type), grad_bias1 = absent(grad, type);
  if (wants_preact || wants_weight2 || wants_bias1) {
    grad_preact = empty_beside(grad, preact_size, type);
    if (wants_weight2) hidden = empty_beside(grad, replace_last(grad.sizes(), 1, {hidden_size}), type);
    if (wants_bias1) grad_bias1 = at::zeros({width}, is_given(bias1) ? bias1->options() : weight2.options());
    if (grad_preact.numel() > 0) {
      // (rows, N) @ (N, hidden), with the backward epilogue.
      const Tensor grad_rows = left_operand(grad.reshape({preact.numel() / width, weight2.size(0)}));
      const Tensor preact_rows = preact.reshape({preact.numel() / width, width});
      GemmParams params;
      params.m = grad_rows.size(0);
      params.n = hidden_size;
      params.k = weight2.size(0);
      params.a = matrix(grad_rows);
      const Tensor weight = with_unit_stride(weight2);
      params.b = matrix(weight);
      params.activation = activation;
      params.gated = gated;
      params.batch_invariant = is_batch_invariant();
      params.preact = matrix(preact_rows);
      params.out = output(grad_preact);
      if (wants_weight2) params.hidden = output(hidden);
      if (wants_bias1) params.bias_grad = output(grad_bias1);
      run_gemm(op, grad_preact, params);
    }
  }
  if (!wants_preact) grad_preact = absent(grad, type);
  return {grad_preact, wants_weight2 ? weight_gradient(op, grad, hidden, type, into) : absent(grad, type), grad_bias1,
          bias_gradient(op, grad, wants_bias2, is_given(bias2) ? bias2->scalar_type() : type)};
}

HiddenGradients mlp_hidden_backward(const Tensor& grad, const Tensor& weight2, const Tensor& preact,
                                    const OptionalTensor& bias1, const OptionalTensor& bias2, ActivationName activation,
                                    bool gated, OutputMask output_mask) {
  return run_hidden_backward(grad, weight2, preact, bias1, bias2, activation, gated, output_mask, nullptr);
}
HiddenGradients mlp_hidden_backward_slot(const Tensor& grad, const Tensor& weight2, const Tensor& preact,
                                         const OptionalTensor& bias1, const OptionalTensor& bias2,
                                         ActivationName activation, bool gated, OutputMask output_mask,
                                         const OptionalTensor& weight_slot, double slot_alpha, double slot_beta) {
  const WeightSlot into{"weight_slot", weight_slot, slot_alpha, slot_beta};
  return run_hidden_backward(grad, weight2, preact, bias1, bias2, activation, gated, output_mask, &into);
}

}  // namespace

// The autograd node; not in the anonymous namespace because profiles and grad_fn show its name.
template <bool gated>
struct MlpBackward : torch::autograd::Function<MlpBackward<gated>> {
  static constexpr const char* kNodeName = gated ? CUDA_EXT_OP("GatedMlpBackward") : CUDA_EXT_OP("MlpBackward");

  static variable_list backward(AutogradContext* ctx, variable_list& grads) {
    if (!grads[0].defined()) return variable_list(6);
    std::array<bool, 5> wanted{};
    const Tensor grad_residual = ctx->needs_input_grad(5) ? grads[0] : Tensor();
    for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = ctx->needs_input_grad(i);
    auto saved = ctx->get_saved_variables();
    const Tensor &input = saved[0], &weight1 = saved[1], &weight2 = saved[2];
    Tensor& preact = saved[3];
    const OptionalTensor bias1 = optional(saved[4]), bias2 = optional(saved[5]);
    const ActivationName activation = saved_activation(ctx);
    if (!preact.defined() || needs_composed_backward(grads[0])) {
      auto gradients = mlp_composed_backward(grads[0], input, weight1, weight2, bias1,
                                             parse_activation("mlp_backward", activation), gated, wanted);
      return {gradients[0], gradients[1], gradients[2], gradients[3], gradients[4], grad_residual};
    }
    static const auto op = find_op<decltype(mlp_hidden_backward)>(CUDA_EXT_OP("mlp_hidden_backward"));
    static const auto slot_op = find_op<decltype(mlp_hidden_backward_slot)>(CUDA_EXT_OP("mlp_hidden_backward"), "slot");
    Tensor grad = std::move(grads[0]);
    const OutputMask mask = {wanted[0] || wanted[1], wanted[2], wanted[3], wanted[4]};
    SlotWrite slot(wanted[2], /*input=*/2, grad);
    auto [grad_preact, grad_weight2, grad_bias1, grad_bias2] =
        slot.found() ? slot_op.call(grad, weight2, preact, bias1, bias2, activation, gated, mask, slot.view(),
                                    slot.alpha(), slot.beta())
                     : op.call(grad, weight2, preact, bias1, bias2, activation, gated, mask);
    slot.done();
    grad.reset();
    preact.reset();
    release_saved(ctx);
    auto gradients = call_linear_backward(grad_preact, input, weight1, std::nullopt, {wanted[0], wanted[1], false});
    return {gradients.input,
            gradients.weight,
            wanted[2] && !slot.found() ? grad_weight2 : Tensor(),
            wanted[3] ? grad_bias1 : Tensor(),
            wanted[4] ? grad_bias2 : Tensor(),
            grad_residual};
  }
};

namespace {

template <bool gated>
const auto& public_op() {
  static const auto op = find_op<decltype(mlp<gated>)>(gated ? CUDA_EXT_OP("gated_mlp") : CUDA_EXT_OP("mlp"));
  return op;
}

template <bool gated>
Tensor mlp_autograd(const Tensor& input, const Tensor& weight1, const Tensor& weight2, const OptionalTensor& bias1,
                    const OptionalTensor& bias2, const OptionalTensor& residual, ActivationName activation) {
  static const auto forward_op =
      find_op<decltype(mlp_forward<gated>)>(gated ? CUDA_EXT_OP("gated_mlp_forward") : CUDA_EXT_OP("mlp_forward"));
  const Derivatives wanted = derivatives_of(input, weight1, weight2, bias1, bias2, residual);
  auto [out, preact] = call_below_autograd(wanted, public_op<gated>(), forward_op, input, weight1, weight2, bias1,
                                           bias2, residual, activation);
  if (wanted.reverse) {
    const auto node = make_node<MlpBackward<gated>>(input, weight1, weight2, bias1, bias2, residual);
    save_activation(&node->ctx_, activation);
    attach_node(node, {input, weight1, weight2, preact, value_or_empty(bias1), value_or_empty(bias2)}, out);
  }
  if (wanted.forward) {
    const Activation parsed = parse_activation(op_name<gated>, activation);
    set_tangent(out, mlp_tangent(input, weight1, weight2, bias1, bias2, residual, parsed, gated));
  }
  return out;
}

template <bool gated, c10::DeviceType device>
Tensor mlp_autocast(const Tensor& input, const Tensor& weight1, const Tensor& weight2, const OptionalTensor& bias1,
                    const OptionalTensor& bias2, const OptionalTensor& residual, ActivationName activation) {
  const Autocast cast(device);
  return public_op<gated>().call(cast(input), cast(weight1), cast(weight2), cast(bias1), cast(bias2), cast(residual),
                                 activation);
}

}  // namespace

#define MLP_ARGUMENTS(activation)                                                           \
  "(Tensor input, Tensor weight1, Tensor weight2, Tensor? bias1=None, Tensor? bias2=None, " \
  "Tensor? residual=None, *, str? activation='" activation "')"
#define MLP_HIDDEN_ARGUMENTS                                                                                       \
  "Tensor grad_out, Tensor weight2, Tensor preact, Tensor? bias1, Tensor? bias2, *, str? activation, bool gated, " \
  "bool[4] output_mask"
#define MLP_SLOT_ARGUMENTS MLP_HIDDEN_ARGUMENTS ", Tensor(a!)? weight_slot, float slot_alpha, float slot_beta"
#define MLP_HIDDEN_GRADIENTS " -> (Tensor grad_preact, Tensor grad_weight2, Tensor grad_bias1, Tensor grad_bias2)"

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::flexible_layout};
  m.def("mlp" MLP_ARGUMENTS("gelu") " -> Tensor", tags);
  m.def("mlp_forward" MLP_ARGUMENTS("gelu") " -> (Tensor out, Tensor preact)", tags);
  m.def("mlp_hidden_backward(" MLP_HIDDEN_ARGUMENTS ")" MLP_HIDDEN_GRADIENTS, tags);
  m.def("mlp_hidden_backward.slot(" MLP_SLOT_ARGUMENTS ")" MLP_HIDDEN_GRADIENTS, tags);
  m.def("gated_mlp" MLP_ARGUMENTS("silu") " -> Tensor", tags);
  m.def("gated_mlp_forward" MLP_ARGUMENTS("silu") " -> (Tensor out, Tensor preact)", tags);
  register_layout_errors(
      m, {"mlp", "mlp_forward", "mlp_hidden_backward", "mlp_hidden_backward.slot", "gated_mlp", "gated_mlp_forward"});
}

namespace {

void register_kernels(torch::Library& m) {
  m.impl("mlp", mlp<false>);
  m.impl("mlp_forward", mlp_forward<false>);
  m.impl("mlp_hidden_backward", mlp_hidden_backward);
  m.impl("mlp_hidden_backward.slot", mlp_hidden_backward_slot);
  m.impl("gated_mlp", mlp<true>);
  m.impl("gated_mlp_forward", mlp_forward<true>);
}

}  // namespace

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CUDA, m) { register_kernels(m); }

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, Autograd, m) {
  m.impl("mlp", mlp_autograd<false>);
  m.impl("gated_mlp", mlp_autograd<true>);
  for (const char* name : {"mlp_forward", "mlp_hidden_backward", "mlp_hidden_backward.slot", "gated_mlp_forward"})
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, AutocastCPU, m) {
  m.impl("mlp", mlp_autocast<false, c10::DeviceType::CPU>);
  m.impl("gated_mlp", mlp_autocast<true, c10::DeviceType::CPU>);
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, AutocastCUDA, m) {
  m.impl("mlp", mlp_autocast<false, c10::DeviceType::CUDA>);
  m.impl("gated_mlp", mlp_autocast<true, c10::DeviceType::CUDA>);
}

}  // namespace cuda_ext
