#include "ops/torch_headers.h"

#include "ops/loss_composed.h"

#include <ATen/ops/exp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/scatter_add.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

namespace cuda_ext {
namespace {

Tensor all_logits(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const LossOptions& o) {
  const auto type = accumulation_type(input.scalar_type());
  Tensor x = call_gemm(input, weight.t(), std::nullopt, std::nullopt, std::nullopt, 1.0, 1.0, type);
  if (is_given(bias)) x = x + bias->to(type);
  x = o.scale * x;
  return o.softcap > 0 ? o.softcap * at::tanh(x / o.softcap) : x;
}

// Rows whose target is not ignored, and targets that are all columns.
std::pair<Tensor, Tensor> valid_targets(const Tensor& target, const LossOptions& o) {
  const Tensor valid = target.ne(o.ignore_index);
  return {valid, at::where(valid, target, at::zeros_like(target)).unsqueeze(1)};
}

}  // namespace

std::array<Tensor, 4> composed_statistics(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                          const OptionalTensor& target, const OptionalTensor& coefficients,
                                          const LossOptions& options, bool entropy) {
  const Tensor z = all_logits(input, weight, bias, options);
  std::array<Tensor, 4> result;
  result[0] = at::logsumexp(z, {1});
  if (is_given(target)) {
    const auto [valid, columns] = valid_targets(*target, options);
    const Tensor picked = z.gather(1, columns).squeeze(1);
    result[1] = at::where(valid, picked, at::zeros_like(picked));
  }
  if (is_given(coefficients)) result[2] = (z * coefficients->to(z.scalar_type())).sum(1);
  if (entropy) result[3] = result[0] - (at::exp(z - result[0].unsqueeze(1)) * z).sum(1);
  return result;
}

std::array<Tensor, 3> composed_gradients(const std::array<Tensor, 4>& by, const Tensor& input, const Tensor& weight,
                                         const OptionalTensor& bias, const OptionalTensor& target,
                                         const OptionalTensor& coefficients, const LossOptions& options,
                                         const std::array<bool, 3>& wanted) {
  const auto& [by_lse, by_picked, by_dot, by_entropy] = by;
  const Tensor z = all_logits(input, weight, bias, options);
  const Tensor prob = at::exp(z - at::logsumexp(z, {1}, /*keepdim=*/true));
  Tensor grad = at::zeros_like(z);
  if (by_lse.defined()) grad = grad + prob * by_lse.unsqueeze(1);
  if (by_entropy.defined()) {
    // The gradient of the entropy H is p (sum p z - z).
    const Tensor mean = (prob * z).sum(1, /*keepdim=*/true);
    grad = grad + prob * (mean - z) * by_entropy.unsqueeze(1);
  }
  if (by_dot.defined()) grad = grad + by_dot.unsqueeze(1) * coefficients->to(z.scalar_type());
  if (by_picked.defined()) {
    const auto [valid, columns] = valid_targets(*target, options);
    grad = at::scatter_add(grad, 1, columns, at::where(valid, by_picked, at::zeros_like(by_picked)).unsqueeze(1));
  }
  if (options.softcap > 0) grad = grad * (1 - (z / options.softcap).square());
  grad = grad * options.scale;
  const Tensor rounded = grad.to(input.scalar_type());
  std::array<Tensor, 3> result;
  if (wanted[0]) result[0] = call_gemm(rounded, weight, std::nullopt, std::nullopt, std::nullopt, 1.0, 1.0, {});
  if (wanted[1]) result[1] = call_gemm(rounded.t(), input, std::nullopt, std::nullopt, std::nullopt, 1.0, 1.0, {});
  if (wanted[2]) result[2] = grad.sum(0).to(is_given(bias) ? bias->scalar_type() : input.scalar_type());
  return result;
}

Tensor weighted_sum(const Tensor& lse, const Tensor& picked, const Tensor& dot, const Tensor& by_lse,
                    const OptionalTensor& by_picked, const OptionalTensor& by_dot, const OptionalTensor& by_square) {
  const auto term = [](const Tensor& by, const Tensor& value) {
    return at::where(by.eq(0), at::zeros_like(by), by * value);
  };
  // The difference to lse first, which is exact where both are nearly equal.
  Tensor terms =
      is_given(by_picked) ? term(*by_picked, picked - lse) + term(by_lse + *by_picked, lse) : term(by_lse, lse);
  if (is_given(by_dot)) terms = terms + term(*by_dot, dot);
  if (is_given(by_square)) terms = terms + term(*by_square, lse.square());
  return terms.sum();
}

}  // namespace cuda_ext
