// Autograd and autocast of the losses (loss.cpp).
#include "ops/torch_headers.h"

#include <ATen/ops/mul.h>

#include "ops/gemm_autograd.h"
#include "ops/loss_ops.h"

namespace cuda_ext {
namespace {

void save_options(AutogradContext* ctx, const LossOptions& options) {
  save_option(ctx, "scale", options.scale, 1.0);
  save_option(ctx, "softcap", options.softcap);
  save_option(ctx, "ignore_index", options.ignore_index);
  save_option(ctx, "memory_limit", options.memory_limit);
  save_option(ctx, "filter_gradients", options.filter_gradients);
}
LossOptions saved_options(const AutogradContext* ctx) {
  return {saved_option(ctx, "scale", 1.0), saved_option<double>(ctx, "softcap"),
          saved_option<int64_t>(ctx, "ignore_index"), saved_option<int64_t>(ctx, "memory_limit"),
          saved_option<bool>(ctx, "filter_gradients")};
}

// Of the first three inputs of the current node.
std::array<bool, 3> wanted_gradients(const AutogradContext* ctx) {
  return {ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2)};
}

// slot = alpha factor gradient + beta slot; both have the weight's dtype.
void write_to_slot(const SlotWrite& slot, const Tensor& gradient, const Tensor& factor) {
  Tensor to = *slot.view();
  const Tensor own_factor = factor.to(gradient.scalar_type());
  if (slot.beta() == 0.0) {
    at::mul_out(to, gradient, own_factor * slot.alpha());
  } else {
    if (slot.beta() != 1.0) to.mul_(slot.beta());
    to.addcmul_(gradient, own_factor, slot.alpha());
  }
}

}  // namespace

struct LogitStatisticsBackward : torch::autograd::Function<LogitStatisticsBackward> {
  static constexpr const char* kNodeName = CUDA_EXT_OP("LogitStatisticsBackward");

  static variable_list backward(AutogradContext* ctx, variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &input = saved[0], &weight = saved[1], &lse = saved[5], &lse_low = saved[6], &entropy = saved[7];
    const OptionalTensor bias = optional(saved[2]), target = optional(saved[3]), coefficients = optional(saved[4]);
    const LossOptions o = saved_options(ctx);
    const auto wanted = wanted_gradients(ctx);
    bool composed = !lse.defined();
    Tensor arrived;  // any of the gradients
    for (const Tensor& grad : grads) {
      if (!grad.defined()) continue;
      arrived = grad;
      composed = composed || needs_composed_backward(grad);
    }
    if (!arrived.defined()) return variable_list(3);
    // Gradients of outputs that were not requested are those of empty tensors.
    const auto given = [&](size_t i, bool exists) { return exists ? grads[i] : Tensor(); };
    const RowGradients by{grads[0], given(1, target.has_value()), given(2, coefficients.has_value()),
                          given(3, saved_option<bool>(ctx, "entropy"))};
    if (composed) {
      auto result = composed_gradients(by, input, weight, bias, target, coefficients, o, wanted);
      return {result[0], result[1], result[2]};
    }
    static const auto op = find_op<StatisticsBackwardSignature>(CUDA_EXT_OP("logit_statistics_backward"));
    static const auto slot_op =
        find_op<StatisticsBackwardSlotSignature>(CUDA_EXT_OP("logit_statistics_backward"), "slot");
    SlotWrite slot(wanted[1], /*input=*/1, arrived);
    const auto call = [&](const auto& handle, const auto&... more) {
      return handle.call(optional(by.lse), optional(by.nll), optional(by.dot), optional(by.entropy), input, weight,
                         bias, target, coefficients, lse, lse_low, optional(entropy), o.scale, o.softcap,
                         o.ignore_index, o.memory_limit, o.filter_gradients, wanted, more...);
    };
    const auto [grad_input, grad_weight, grad_bias] =
        slot.found() ? call(slot_op, slot.view(), slot.alpha(), slot.beta()) : call(op);
    slot.done();
    return {wanted[0] ? grad_input : Tensor(), wanted[1] && !slot.found() ? grad_weight : Tensor(),
            wanted[2] ? grad_bias : Tensor()};
  }
};

struct LinearLossBackward : torch::autograd::Function<LinearLossBackward> {
  static constexpr const char* kNodeName = CUDA_EXT_OP("LinearLossBackward");

  static variable_list backward(AutogradContext* ctx, variable_list& grads) {
    if (!grads[0].defined()) return variable_list(3);
    const auto saved = ctx->get_saved_variables();
    const auto wanted = wanted_gradients(ctx);
    const Tensor& grad = grads[0];
    if (saved_option<bool>(ctx, "composed") || needs_composed_backward(grad)) return composed(ctx, saved, grad, wanted);
    // In training the factor is 1, which costs nothing to know on a CPU.
    const bool is_one = is_last_pass(ctx) && grad.is_cpu() && !grad.unsafeGetTensorImpl()->is_python_dispatch() &&
                        kernels_on(grad.device()) == Kernels::kCpu && grad.item<double>() == 1.0;
    SlotWrite slot(wanted[1], /*input=*/1, grad);
    if (slot.found()) write_to_slot(slot, saved[10], grad);
    slot.done();
    variable_list result(3);
    for (size_t i = 0; i < 3; ++i)
      if (wanted[i] && !(i == 1 && slot.found()))
        result[i] = is_one ? saved[9 + i].detach() : saved[9 + i] * grad.to(saved[9 + i].scalar_type());
    return result;
  }

 private:
  static variable_list composed(const AutogradContext* ctx, const variable_list& saved, const Tensor& grad,
                                const std::array<bool, 3>& wanted) {
    const Tensor &input = saved[0], &weight = saved[1];
    const OptionalTensor bias = optional(saved[2]), target = optional(saved[3]), coefficients = optional(saved[4]),
                         by_square = optional(saved[8]);
    const LossOptions o = saved_options(ctx);
    const Tensor lse =
        by_square.has_value() ? composed_statistics(input, weight, bias, target, coefficients, o, false)[0] : Tensor();
    const RowGradients by =
        gradients_of_loss(lse, optional(saved[5]), optional(saved[6]), optional(saved[7]), by_square);
    const auto times = [&](const Tensor& t) { return t.defined() ? t * grad : t; };
    auto result = composed_gradients({times(by.lse), times(by.nll), times(by.dot), Tensor()}, input, weight, bias,
                                     target, coefficients, o, wanted);
    return {result[0], result[1], result[2]};
  }
};

namespace {

Statistics logit_statistics_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                     const OptionalTensor& target, const OptionalTensor& coefficients, double scale,
                                     double softcap, int64_t ignore_index, int64_t memory_limit, bool filter_gradients,
                                     bool entropy) {
  static const auto op = find_op<StatisticsSignature>(CUDA_EXT_OP("logit_statistics"));
  const LossOptions options{scale, softcap, ignore_index, memory_limit, filter_gradients};
  const Derivatives wanted = derivatives_of(input, weight, bias);
  Statistics result = [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return op.call(input, weight, bias, target, coefficients, scale, softcap, ignore_index, memory_limit,
                   filter_gradients, entropy);
  }();
  auto& [lse, nll, dot, own_entropy, lse_low] = result;
  if (wanted.reverse) {
    const auto node = make_node<LogitStatisticsBackward>(input, weight, bias);
    save_options(&node->ctx_, options);
    save_option(&node->ctx_, "entropy", entropy);
    for (const Tensor& output : {lse, nll, dot, own_entropy}) torch::autograd::set_history(output, node);
    save_variables(node, {input, weight, value_or_empty(bias), value_or_empty(target), value_or_empty(coefficients),
                          wanted.composed ? Tensor() : lse, wanted.composed ? Tensor() : lse_low,
                          wanted.composed || !entropy ? Tensor() : own_entropy});
  }
  if (wanted.forward) {
    const auto all = composed_statistics(input, weight, bias, target, coefficients, options, entropy);
    size_t i = 0;
    for (const Tensor& output : {lse, nll, dot, own_entropy}) set_tangent(output, tangent_of(all[i++]));
  }
  return result;
}

Tensor linear_loss_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& target, const OptionalTensor& coefficients,
                            const OptionalTensor& by_lse, const OptionalTensor& by_nll, const OptionalTensor& by_dot,
                            const OptionalTensor& by_square, double scale, double softcap, int64_t ignore_index,
                            int64_t memory_limit, bool filter_gradients, LossMethod method) {
  static const auto op = find_op<LossSignature>(CUDA_EXT_OP("linear_loss"));
  static const auto forward_op = find_op<LossForwardSignature>(CUDA_EXT_OP("linear_loss_forward"));
  static const auto statistics_op = find_op<StatisticsSignature>(CUDA_EXT_OP("logit_statistics"));
  const LossOptions options{scale, softcap, ignore_index, memory_limit, filter_gradients};
  const Derivatives wanted = derivatives_of(input, weight, bias);
  if (wanted.reverse && !forms_gradients_in_forward(input, weight, memory_limit, method)) {
    const auto [lse, nll, dot, entropy, lse_low] = statistics_op.call(
        input, weight, bias, target, coefficients, scale, softcap, ignore_index, memory_limit, filter_gradients, false);
    return weighted_sum(lse, nll, dot, by_lse, by_nll, by_dot, by_square);
  }
  Tensor loss, gradients[3];
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (wanted.reverse && !wanted.composed)
      std::tie(loss, gradients[0], gradients[1], gradients[2]) =
          forward_op.call(input, weight, bias, target, coefficients, by_lse, by_nll, by_dot, by_square, scale, softcap,
                          ignore_index, memory_limit, filter_gradients,
                          {input.requires_grad(), weight.requires_grad(), is_given(bias) && bias->requires_grad()});
    else
      loss = op.call(input, weight, bias, target, coefficients, by_lse, by_nll, by_dot, by_square, scale, softcap,
                     ignore_index, memory_limit, filter_gradients, method);
  }
  if (wanted.reverse) {
    const auto node = make_node<LinearLossBackward>(input, weight, bias);
    save_options(&node->ctx_, options);
    save_option(&node->ctx_, "composed", wanted.composed);
    attach_node(node,
                {input, weight, value_or_empty(bias), value_or_empty(target), value_or_empty(coefficients),
                 value_or_empty(by_lse), value_or_empty(by_nll), value_or_empty(by_dot), value_or_empty(by_square),
                 gradients[0], gradients[1], gradients[2]},
                loss);
  }
  if (wanted.forward) {
    const auto all = composed_statistics(input, weight, bias, target, coefficients, options, false);
    set_tangent(loss, tangent_of(weighted_sum(all[0], all[1], all[2], by_lse, by_nll, by_dot, by_square)));
  }
  return loss;
}

template <c10::DeviceType device>
Statistics logit_statistics_autocast(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                     const OptionalTensor& target, const OptionalTensor& coefficients, double scale,
                                     double softcap, int64_t ignore_index, int64_t memory_limit, bool filter_gradients,
                                     bool entropy) {
  static const auto op = find_op<StatisticsSignature>(CUDA_EXT_OP("logit_statistics"));
  const Autocast cast(device);
  return op.call(cast(input), cast(weight), cast(bias), target, coefficients, scale, softcap, ignore_index,
                 memory_limit, filter_gradients, entropy);
}

template <c10::DeviceType device>
Tensor linear_loss_autocast(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& target, const OptionalTensor& coefficients,
                            const OptionalTensor& by_lse, const OptionalTensor& by_nll, const OptionalTensor& by_dot,
                            const OptionalTensor& by_square, double scale, double softcap, int64_t ignore_index,
                            int64_t memory_limit, bool filter_gradients, LossMethod method) {
  static const auto op = find_op<LossSignature>(CUDA_EXT_OP("linear_loss"));
  const Autocast cast(device);
  return op.call(cast(input), cast(weight), cast(bias), target, coefficients, by_lse, by_nll, by_dot, by_square, scale,
                 softcap, ignore_index, memory_limit, filter_gradients, method);
}

}  // namespace

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, Autograd, m) {
  m.impl("logit_statistics", logit_statistics_autograd);
  m.impl("linear_loss", linear_loss_autograd);
  for (const char* name : {"logit_statistics_backward", "logit_statistics_backward.slot", "linear_loss_forward"})
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, AutocastCPU, m) {
  m.impl("logit_statistics", logit_statistics_autocast<c10::DeviceType::CPU>);
  m.impl("linear_loss", linear_loss_autocast<c10::DeviceType::CPU>);
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, AutocastCUDA, m) {
  m.impl("logit_statistics", logit_statistics_autocast<c10::DeviceType::CUDA>);
  m.impl("linear_loss", linear_loss_autocast<c10::DeviceType::CUDA>);
}

}  // namespace cuda_ext
