// mlp and gated_mlp: linear, activation, linear as one op. Backward needs only the pre-activation: the GEMM that forms
// the gradient of the hidden tensor turns it into that of the pre-activation, emits the hidden tensor again, and sums
// the bias gradient, all in its epilogue. The three ops of each are as in gemm.cpp.
#include <ATen/ops/zeros.h>

#include "gemm/autograd.h"
#include "gemm/gemm_composed.h"

namespace cuda_ext {
namespace {

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using OutputMask = std::array<bool, 5>;

void check_layers(const char* op, const Tensor& input, const Tensor& weight1, const Tensor& weight2,
                  const OptionalTensor& bias1, const OptionalTensor& bias2, bool gated) {
  check_projection(op, "input", input, "weight1", weight1, "bias1", bias1, gated);
  check_same_dtype(op, "weight2", weight2, "input", input);
  check_same_device(op, "weight2", weight2, "input", input);
  const int64_t hidden = gated ? weight1.size(0) / 2 : weight1.size(0);
  CUDA_EXT_CHECK(weight2.dim() == 2 && weight2.size(1) == hidden, op, "expected weight2 of shape (N, ", hidden,
                 ") to match weight1 ", shape_string(weight1), ", got ", shape_string(weight2));
  if (is_given(bias2)) check_bias(op, "bias2", *bias2, input, input.scalar_type(), weight2.size(0));
}

template <bool gated>
constexpr const char* op_name = gated ? "gated_mlp" : "mlp";

template <bool gated>
std::tuple<Tensor, Tensor> run_mlp(const Tensor& input, const Tensor& weight1, const Tensor& weight2,
                                   const OptionalTensor& bias1, const OptionalTensor& bias2,
                                   const ActivationName& activation, bool for_backward) {
  constexpr const char* op = op_name<gated>;
  check_layers(op, input, weight1, weight2, bias1, bias2, gated);
  auto [hidden, preact] =
      project(op, input, weight1, bias1, std::nullopt, parse_activation(op, activation), gated, for_backward);
  Tensor out = project(op, hidden, weight2, bias2, std::nullopt, Activation::kNone, false, false).out;
  return {std::move(out), std::move(preact)};
}

template <bool gated>
Tensor mlp(const Tensor& input, const Tensor& weight1, const Tensor& weight2, const OptionalTensor& bias1,
           const OptionalTensor& bias2, ActivationName activation) {
  return std::get<0>(run_mlp<gated>(input, weight1, weight2, bias1, bias2, activation, false));
}
template <bool gated>
std::tuple<Tensor, Tensor> mlp_forward(const Tensor& input, const Tensor& weight1, const Tensor& weight2,
                                       const OptionalTensor& bias1, const OptionalTensor& bias2,
                                       ActivationName activation) {
  return run_mlp<gated>(input, weight1, weight2, bias1, bias2, activation, true);
}

template <bool gated>
Gradients run_mlp_backward(const Tensor& grad, const Tensor& input, const Tensor& weight1, const Tensor& weight2,
                           const OptionalTensor& bias1, const OptionalTensor& bias2, const Tensor& preact,
                           const ActivationName& activation_name, const OutputMask& output_mask,
                           const WeightSlot* into1, const WeightSlot* into2) {
  constexpr const char* op = gated ? "gated_mlp_backward" : "mlp_backward";
  check_layers(op, input, weight1, weight2, bias1, bias2, gated);
  const Activation activation = parse_activation(op, activation_name);
  const int64_t hidden_size = weight2.size(1), width = weight1.size(0);
  const Sizes preact_size = replace_last(input.sizes(), 1, {width});
  check_gradient(op, grad, Tensor(), replace_last(input.sizes(), 1, {weight2.size(0)}), false, Activation::kNone);
  CUDA_EXT_CHECK(preact.sizes() == at::IntArrayRef(preact_size), op, "expected preact of shape ",
                 shape_string(preact_size), ", got ", shape_string(preact));
  if (into1 != nullptr) check_slot(op, *into1, weight1);
  if (into2 != nullptr) check_slot(op, *into2, weight2);
  const auto type = input.scalar_type();
  const auto [wants_input, wants_weight1, wants_weight2, wants_bias1, wants_bias2] = output_mask;

  Tensor grad_preact = absent(grad, type), hidden = absent(grad, type), grad_bias1 = absent(grad, type);
  if (wants_input || wants_weight1 || wants_weight2 || wants_bias1) {
    grad_preact = empty_beside(grad, preact_size, type);
    hidden =
        wants_weight2 ? empty_beside(grad, replace_last(input.sizes(), 1, {hidden_size}), type) : absent(grad, type);
    if (wants_bias1) grad_bias1 = at::zeros({width}, is_given(bias1) ? bias1->options() : input.options());
    if (grad_preact.numel() > 0) {
      // (rows, N) @ (N, hidden), with the backward epilogue.
      const Tensor grad_rows = with_unit_stride(grad.reshape({preact.numel() / width, weight2.size(0)}));
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
      params.preact = matrix(preact_rows);
      params.out = output(grad_preact);
      if (wants_weight2) params.hidden = output(hidden);
      if (wants_bias1) params.bias_grad = output(grad_bias1);
      run_gemm(op, grad_preact, params);
    }
  }
  Tensor grad_bias2 = activation_gradient(op, grad, Tensor(), Activation::kNone, false, wants_bias2,
                                          is_given(bias2) ? bias2->scalar_type() : type)
                          .bias;
  Tensor grad_weight2 = wants_weight2 ? weight_gradient(op, grad, hidden, type, into2) : absent(grad, type);
  hidden.reset();  // before the other gradients take memory
  return {wants_input ? input_gradient(op, grad_preact, weight1, type) : absent(grad, type),
          wants_weight1 ? weight_gradient(op, grad_preact, input, type, into1) : absent(grad, type), grad_weight2,
          grad_bias1, grad_bias2};
}

template <bool gated>
Gradients mlp_backward(const Tensor& grad, const Tensor& input, const Tensor& weight1, const Tensor& weight2,
                       const OptionalTensor& bias1, const OptionalTensor& bias2, const Tensor& preact,
                       ActivationName activation, OutputMask output_mask) {
  return run_mlp_backward<gated>(grad, input, weight1, weight2, bias1, bias2, preact, activation, output_mask, nullptr,
                                 nullptr);
}
template <bool gated>
Gradients mlp_backward_slot(const Tensor& grad, const Tensor& input, const Tensor& weight1, const Tensor& weight2,
                            const OptionalTensor& bias1, const OptionalTensor& bias2, const Tensor& preact,
                            ActivationName activation, OutputMask output_mask, const OptionalTensor& weight1_slot,
                            const OptionalTensor& weight2_slot, double slot1_alpha, double slot1_beta,
                            double slot2_alpha, double slot2_beta) {
  const WeightSlot into1{"weight1_slot", weight1_slot, slot1_alpha, slot1_beta};
  const WeightSlot into2{"weight2_slot", weight2_slot, slot2_alpha, slot2_beta};
  return run_mlp_backward<gated>(grad, input, weight1, weight2, bias1, bias2, preact, activation, output_mask, &into1,
                                 &into2);
}

}  // namespace

// The autograd node, outside of the anonymous namespace because its name shows in profiles and as grad_fn.
template <bool gated>
struct MlpBackward : torch::autograd::Function<MlpBackward<gated>> {
  static constexpr const char* kNodeName = gated ? CUDA_EXT_OP("GatedMlpBackward") : CUDA_EXT_OP("MlpBackward");

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& grad = grads[0];
    if (!grad.defined()) return variable_list(5);
    OutputMask wanted{};
    for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = ctx->needs_input_grad(i);
    const auto saved = ctx->get_saved_variables();
    const Tensor &input = saved[0], &weight1 = saved[1], &weight2 = saved[2], &preact = saved[3];
    const OptionalTensor bias1 = optional(saved[4]), bias2 = optional(saved[5]);
    const ActivationName activation = saved_activation(ctx);
    if (!preact.defined() || needs_composed_backward(grad)) {
      auto gradients = mlp_composed_backward(grad, input, weight1, weight2, bias1,
                                             parse_activation("mlp_backward", activation), gated, wanted);
      return {gradients.begin(), gradients.end()};
    }
    constexpr const char* name = gated ? CUDA_EXT_OP("gated_mlp_backward") : CUDA_EXT_OP("mlp_backward");
    static const auto op = find_op<decltype(mlp_backward<gated>)>(name);
    static const auto slot_op = find_op<decltype(mlp_backward_slot<gated>)>(name, "slot");
    SlotWrite slot1(wanted[1], /*input=*/1, grad), slot2(wanted[2], /*input=*/2, grad);
    auto [grad_input, grad_weight1, grad_weight2, grad_bias1, grad_bias2] =
        slot1.found() || slot2.found()
            ? slot_op.call(grad, input, weight1, weight2, bias1, bias2, preact, activation, wanted, slot1.view(),
                           slot2.view(), slot1.alpha(), slot1.beta(), slot2.alpha(), slot2.beta())
            : op.call(grad, input, weight1, weight2, bias1, bias2, preact, activation, wanted);
    slot1.done();
    slot2.done();
    return {wanted[0] ? grad_input : Tensor(), wanted[1] && !slot1.found() ? grad_weight1 : Tensor(),
            wanted[2] && !slot2.found() ? grad_weight2 : Tensor(), wanted[3] ? grad_bias1 : Tensor(),
            wanted[4] ? grad_bias2 : Tensor()};
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
                    const OptionalTensor& bias2, ActivationName activation) {
  static const auto forward_op =
      find_op<decltype(mlp_forward<gated>)>(gated ? CUDA_EXT_OP("gated_mlp_forward") : CUDA_EXT_OP("mlp_forward"));
  const Derivatives wanted = derivatives_of(input, weight1, weight2, bias1, bias2);
  auto [out, preact] =
      call_below_autograd(wanted, public_op<gated>(), forward_op, input, weight1, weight2, bias1, bias2, activation);
  if (wanted.reverse) {
    const auto node = make_node<MlpBackward<gated>>(input, weight1, weight2, bias1, bias2);
    save_activation(&node->ctx_, activation);
    finish_node(node, {input, weight1, weight2, preact, value_or_empty(bias1), value_or_empty(bias2)}, out);
  }
  if (wanted.forward) {
    const Activation parsed = parse_activation(op_name<gated>, activation);
    set_tangent(out, mlp_tangent(input, weight1, weight2, bias1, bias2, parsed, gated));
  }
  return out;
}

template <bool gated, c10::DeviceType device>
Tensor mlp_autocast(const Tensor& input, const Tensor& weight1, const Tensor& weight2, const OptionalTensor& bias1,
                    const OptionalTensor& bias2, ActivationName activation) {
  const Autocast cast(device);
  return public_op<gated>().call(cast(input), cast(weight1), cast(weight2), cast(bias1), cast(bias2), activation);
}

}  // namespace

#define MLP_ARGUMENTS(activation)                                                                   \
  "(Tensor input, Tensor weight1, Tensor weight2, Tensor? bias1=None, Tensor? bias2=None, *, str? " \
  "activation='" activation "')"
#define MLP_BACKWARD_ARGUMENTS                                                                                      \
  "Tensor grad_out, Tensor input, Tensor weight1, Tensor weight2, Tensor? bias1, Tensor? bias2, Tensor preact, *, " \
  "str? activation, bool[5] output_mask"
#define MLP_SLOT_ARGUMENTS                                                                      \
  MLP_BACKWARD_ARGUMENTS                                                                        \
  ", Tensor(a!)? weight1_slot, Tensor(b!)? weight2_slot, float slot1_alpha, float slot1_beta, " \
  "float slot2_alpha, float slot2_beta"
#define MLP_GRADIENTS \
  " -> (Tensor grad_input, Tensor grad_weight1, Tensor grad_weight2, Tensor grad_bias1, Tensor grad_bias2)"

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::flexible_layout};
  m.def("mlp" MLP_ARGUMENTS("gelu") " -> Tensor", tags);
  m.def("mlp_forward" MLP_ARGUMENTS("gelu") " -> (Tensor out, Tensor preact)", tags);
  m.def("mlp_backward(" MLP_BACKWARD_ARGUMENTS ")" MLP_GRADIENTS, tags);
  m.def("mlp_backward.slot(" MLP_SLOT_ARGUMENTS ")" MLP_GRADIENTS, tags);
  m.def("gated_mlp" MLP_ARGUMENTS("silu") " -> Tensor", tags);
  m.def("gated_mlp_forward" MLP_ARGUMENTS("silu") " -> (Tensor out, Tensor preact)", tags);
  m.def("gated_mlp_backward(" MLP_BACKWARD_ARGUMENTS ")" MLP_GRADIENTS, tags);
  m.def("gated_mlp_backward.slot(" MLP_SLOT_ARGUMENTS ")" MLP_GRADIENTS, tags);
  register_refusals(m, {"mlp", "mlp_forward", "mlp_backward", "mlp_backward.slot", "gated_mlp", "gated_mlp_forward",
                        "gated_mlp_backward", "gated_mlp_backward.slot"});
}

namespace {

void register_kernels(torch::Library& m) {
  m.impl("mlp", mlp<false>);
  m.impl("mlp_forward", mlp_forward<false>);
  m.impl("mlp_backward", mlp_backward<false>);
  m.impl("mlp_backward.slot", mlp_backward_slot<false>);
  m.impl("gated_mlp", mlp<true>);
  m.impl("gated_mlp_forward", mlp_forward<true>);
  m.impl("gated_mlp_backward", mlp_backward<true>);
  m.impl("gated_mlp_backward.slot", mlp_backward_slot<true>);
}

}  // namespace

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CUDA, m) { register_kernels(m); }

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, Autograd, m) {
  m.impl("mlp", mlp_autograd<false>);
  m.impl("gated_mlp", mlp_autograd<true>);
  for (const char* name : {"mlp_forward", "mlp_backward", "mlp_backward.slot", "gated_mlp_forward",
                           "gated_mlp_backward", "gated_mlp_backward.slot"})
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
