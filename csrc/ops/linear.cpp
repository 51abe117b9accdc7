// linear and gated_linear: schema, checks, autograd, autocast, dispatch.
//
// Forward and backward are as in ops/gemm.cpp, with linear_backward for both ops. linear_backward.slot writes the
// gradient of the weight into the slot it is given (ops/gradient_slots.h) and returns an empty tensor instead. It is a
// separate op so that the op that a compiler traces has no side effects.
#include "ops/torch_headers.h"

#include "ops/gemm_autograd.h"
#include "ops/gemm_composed.h"

namespace cuda_ext {
namespace {

std::tuple<Tensor, Tensor> run_linear(const char* op, const Tensor& input, const Tensor& weight,
                                      const OptionalTensor& bias, const OptionalTensor& residual,
                                      const ActivationName& activation_name, bool gated, bool for_backward) {
  check_projection(op, "input", input, "weight", weight, "bias", bias, gated);
  const Activation activation = parse_activation(op, activation_name);
  if (is_given(residual))
    check_addend(op, "residual", *residual, input, input.scalar_type(),
                 replace_last(input.sizes(), 1, {weight.size(0)}));
  const bool save_preact = for_backward && needs_preact(activation, gated, is_given(residual));
  auto [out, preact] = project(op, input, weight, bias, residual, activation, gated, save_preact);
  return {out, for_backward && !save_preact ? absent(input, input.scalar_type()) : preact};
}

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& residual,
              ActivationName activation) {
  return std::get<0>(run_linear("linear", input, weight, bias, residual, activation, false, false));
}
std::tuple<Tensor, Tensor> linear_forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                          const OptionalTensor& residual, ActivationName activation) {
  return run_linear("linear", input, weight, bias, residual, activation, false, true);
}
Tensor gated_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, ActivationName activation) {
  return std::get<0>(run_linear("gated_linear", input, weight, bias, std::nullopt, activation, true, false));
}
std::tuple<Tensor, Tensor> gated_linear_forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                                ActivationName activation) {
  return run_linear("gated_linear", input, weight, bias, std::nullopt, activation, true, true);
}

using LinearGradients = std::tuple<Tensor, Tensor, Tensor>;

LinearGradients run_linear_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                    const OptionalTensor& bias, const std::array<bool, 3>& output_mask,
                                    const WeightSlot* into) {
  constexpr const char* op = "linear_backward";
  check_projection(op, "input", input, "weight", weight, "bias", std::nullopt, false);
  check_gradient(op, grad, replace_last(input.sizes(), 1, {weight.size(0)}));
  if (into != nullptr) check_slot(op, *into, weight);
  const auto type = input.scalar_type();
  Tensor grad_bias = bias_gradient(op, grad, output_mask[2], is_given(bias) ? bias->scalar_type() : type);
  return {output_mask[0] ? input_gradient(op, grad, weight, type) : absent(grad, type),
          output_mask[1] ? weight_gradient(op, grad, input, type, into) : absent(grad, type), grad_bias};
}

LinearGradients linear_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                const OptionalTensor& bias, std::array<bool, 3> output_mask) {
  return run_linear_backward(grad, input, weight, bias, output_mask, nullptr);
}
LinearGradients linear_backward_slot(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                     const OptionalTensor& bias, std::array<bool, 3> output_mask,
                                     const OptionalTensor& weight_slot, double slot_alpha, double slot_beta) {
  const WeightSlot into{"weight_slot", weight_slot, slot_alpha, slot_beta};
  return run_linear_backward(grad, input, weight, bias, output_mask, &into);
}

}  // namespace

ProjectionGradients call_linear_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                         const OptionalTensor& bias, std::array<bool, 3> wanted) {
  static const auto op = find_op<decltype(linear_backward)>(CUDA_EXT_OP("linear_backward"));
  static const auto slot_op = find_op<decltype(linear_backward_slot)>(CUDA_EXT_OP("linear_backward"), "slot");
  if (!wanted[0] && !wanted[1] && !wanted[2]) return {};
  SlotWrite slot(wanted[1], /*input=*/1, grad);
  auto [grad_input, grad_weight, grad_bias] =
      slot.found() ? slot_op.call(grad, input, weight, bias, wanted, slot.view(), slot.alpha(), slot.beta())
                   : op.call(grad, input, weight, bias, wanted);
  slot.done();
  return {wanted[0] ? grad_input : Tensor(), wanted[1] && !slot.found() ? grad_weight : Tensor(),
          wanted[2] ? grad_bias : Tensor()};
}

// The autograd nodes. Their names show in profiles and as grad_fn, so they are outside of the anonymous namespace.
// gated_linear has no residual.
template <bool gated>
struct LinearBackward : torch::autograd::Function<LinearBackward<gated>> {
  static constexpr const char* kNodeName = gated ? CUDA_EXT_OP("GatedLinearBackward") : CUDA_EXT_OP("LinearBackward");

  static variable_list backward(AutogradContext* ctx, variable_list& grads) {
    if (!grads[0].defined()) return variable_list(gated ? 3 : 4);
    std::array<bool, 3> wanted{};
    for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = ctx->needs_input_grad(i);
    auto saved = ctx->get_saved_variables();
    const Tensor &input = saved[0], &weight = saved[1];
    Tensor& preact = saved[2];
    const OptionalTensor bias = optional(saved[3]);
    const ActivationName activation = saved_activation(ctx);
    Tensor grad_residual;
    if constexpr (!gated) grad_residual = ctx->needs_input_grad(3) ? grads[0] : Tensor();
    variable_list result;
    if (!preact.defined() || needs_composed_backward(grads[0])) {
      auto [grad_input, grad_weight, grad_bias] = linear_composed_backward(
          grads[0], input, weight, bias, parse_activation("linear_backward", activation), gated, wanted);
      result = {grad_input, grad_weight, grad_bias};
    } else {
      Tensor grad = std::move(grads[0]), grad_bias;
      const bool has_activation = gated || activation.has_value();
      if (has_activation) {
        std::tie(grad, grad_bias) =
            call_activation_backward(grad, preact, activation, gated, bias_type(wanted[2], bias, input));
        preact.reset();
        release_saved(ctx);
      }
      auto gradients =
          call_linear_backward(grad, input, weight, bias, {wanted[0], wanted[1], wanted[2] && !has_activation});
      result = {gradients.input, gradients.weight, has_activation && wanted[2] ? grad_bias : gradients.bias};
    }
    if constexpr (!gated) result.push_back(grad_residual);
    return result;
  }
};

namespace {

Tensor linear_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       const OptionalTensor& residual, ActivationName activation) {
  static const auto op = find_op<decltype(linear)>(CUDA_EXT_OP("linear"));
  static const auto forward_op = find_op<decltype(linear_forward)>(CUDA_EXT_OP("linear_forward"));
  const Derivatives wanted = derivatives_of(input, weight, bias, residual);
  auto [out, preact] = call_below_autograd(wanted, op, forward_op, input, weight, bias, residual, activation);
  if (wanted.reverse) {
    const auto node = make_node<LinearBackward<false>>(input, weight, bias, residual);
    save_activation(&node->ctx_, activation);
    const bool output_serves = activation == "relu" && !is_given(residual) && preact.defined();
    attach_node(node, {input, weight, output_serves ? out : preact, value_or_empty(bias)}, out);
  }
  if (wanted.forward)
    set_tangent(out, linear_tangent(input, weight, bias, residual, parse_activation("linear", activation), false));
  return out;
}

Tensor gated_linear_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             ActivationName activation) {
  static const auto op = find_op<decltype(gated_linear)>(CUDA_EXT_OP("gated_linear"));
  static const auto forward_op = find_op<decltype(gated_linear_forward)>(CUDA_EXT_OP("gated_linear_forward"));
  const Derivatives wanted = derivatives_of(input, weight, bias);
  auto [out, preact] = call_below_autograd(wanted, op, forward_op, input, weight, bias, activation);
  if (wanted.reverse) {
    const auto node = make_node<LinearBackward<true>>(input, weight, bias);
    save_activation(&node->ctx_, activation);
    attach_node(node, {input, weight, preact, value_or_empty(bias)}, out);
  }
  if (wanted.forward)
    set_tangent(out, linear_tangent(input, weight, bias, {}, parse_activation("gated_linear", activation), true));
  return out;
}

template <c10::DeviceType device>
Tensor linear_autocast(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       const OptionalTensor& residual, ActivationName activation) {
  static const auto op = find_op<decltype(linear)>(CUDA_EXT_OP("linear"));
  const Autocast cast(device);
  return op.call(cast(input), cast(weight), cast(bias), cast(residual), activation);
}
template <c10::DeviceType device>
Tensor gated_linear_autocast(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             ActivationName activation) {
  static const auto op = find_op<decltype(gated_linear)>(CUDA_EXT_OP("gated_linear"));
  const Autocast cast(device);
  return op.call(cast(input), cast(weight), cast(bias), activation);
}

}  // namespace

// Tensors come first and are positional: vmap rules need that.
#define LINEAR_ARGUMENTS \
  "(Tensor input, Tensor weight, Tensor? bias=None, Tensor? residual=None, *, str? activation=None)"
#define GATED_LINEAR_ARGUMENTS "(Tensor input, Tensor weight, Tensor? bias=None, *, str? activation='silu')"
#define LINEAR_BACKWARD_ARGUMENTS "Tensor grad_out, Tensor input, Tensor weight, Tensor? bias, *, bool[3] output_mask"
#define LINEAR_SLOT_ARGUMENTS LINEAR_BACKWARD_ARGUMENTS ", Tensor(a!)? weight_slot, float slot_alpha, float slot_beta"
#define LINEAR_GRADIENTS " -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)"

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::flexible_layout};
  m.def("linear" LINEAR_ARGUMENTS " -> Tensor", tags);
  m.def("linear_forward" LINEAR_ARGUMENTS " -> (Tensor out, Tensor preact)", tags);
  m.def("linear_backward(" LINEAR_BACKWARD_ARGUMENTS ")" LINEAR_GRADIENTS, tags);
  m.def("linear_backward.slot(" LINEAR_SLOT_ARGUMENTS ")" LINEAR_GRADIENTS, tags);
  m.def("gated_linear" GATED_LINEAR_ARGUMENTS " -> Tensor", tags);
  m.def("gated_linear_forward" GATED_LINEAR_ARGUMENTS " -> (Tensor out, Tensor preact)", tags);
  register_layout_errors(m, {"linear", "linear_forward", "linear_backward", "linear_backward.slot", "gated_linear",
                             "gated_linear_forward"});
}

namespace {

void register_kernels(torch::Library& m) {
  m.impl("linear", linear);
  m.impl("linear_forward", linear_forward);
  m.impl("linear_backward", linear_backward);
  m.impl("linear_backward.slot", linear_backward_slot);
  m.impl("gated_linear", gated_linear);
  m.impl("gated_linear_forward", gated_linear_forward);
}

}  // namespace

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CUDA, m) { register_kernels(m); }

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, Autograd, m) {
  m.impl("linear", linear_autograd);
  m.impl("gated_linear", gated_linear_autograd);
  for (const char* name : {"linear_forward", "linear_backward", "linear_backward.slot", "gated_linear_forward"})
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, AutocastCPU, m) {
  m.impl("linear", linear_autocast<c10::DeviceType::CPU>);
  m.impl("gated_linear", gated_linear_autocast<c10::DeviceType::CPU>);
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, AutocastCUDA, m) {
  m.impl("linear", linear_autocast<c10::DeviceType::CUDA>);
  m.impl("gated_linear", gated_linear_autocast<c10::DeviceType::CUDA>);
}

}  // namespace cuda_ext
