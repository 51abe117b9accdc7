#include "ops/torch_headers.h"

#include "ops/loss_composed.h"

#include <ATen/ops/exp.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/scatter_add.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <limits>

namespace cuda_ext {
namespace {

Tensor all_logits(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const LossOptions& o) {
  const auto type = accumulation_type(input.scalar_type());
  Tensor x = call_gemm(input, weight.t(), std::nullopt, std::nullopt, std::nullopt, 1.0, 1.0, type);
  if (is_given(bias)) x = x + bias->to(type);
  x = o.scale * x;
  return o.softcap > 0 ? o.softcap * at::tanh(x / o.softcap) : x;
}

// Which rows count, the column of each row's target, and which targets are no class. At an index that is out
// of bounds a CPU raises, and a GPU would stop: there the column is another.
struct Targets {
  Tensor valid, columns, wrong;  // (M,), (M, 1), (M,)

  Targets(const Tensor& target, const Tensor& z, const LossOptions& o) : valid(target.ne(o.ignore_index)) {
    const Tensor own = at::where(valid, target, at::zeros_like(target));
    const bool raises = kernels_on(z.device()) == Kernels::kCpu;
    const c10::SymInt last = z.sym_size(1).max(1) - 1;
    columns = (raises ? own : own.clamp(0, at::Scalar(last))).unsqueeze(1);
    wrong = columns.squeeze(1).ne(own);
  }
};

}  // namespace

std::array<Tensor, 4> composed_statistics(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                          const OptionalTensor& target, const OptionalTensor& coefficients,
                                          const LossOptions& options, bool entropy) {
  const Tensor z = all_logits(input, weight, bias, options);
  std::array<Tensor, 4> result;
  result[0] = at::logsumexp(z, {1});
  if (is_given(target)) {
    const Targets of_rows(*target, z, options);
    const Tensor nll = result[0] - z.gather(1, of_rows.columns).squeeze(1);
    const Tensor known = at::where(of_rows.wrong, at::full_like(nll, std::numeric_limits<double>::quiet_NaN()), nll);
    result[1] = at::where(of_rows.valid, known, at::zeros_like(nll));
  }
  if (is_given(coefficients)) result[2] = (z * coefficients->to(z.scalar_type())).sum(1);
  if (entropy) result[3] = result[0] - (at::exp(z - result[0].unsqueeze(1)) * z).sum(1);
  return result;
}

RowGradients gradients_of_loss(const Tensor& lse, const OptionalTensor& by_lse, const OptionalTensor& by_nll,
                               const OptionalTensor& by_dot, const OptionalTensor& by_square) {
  RowGradients by{value_or_empty(by_lse), value_or_empty(by_nll), value_or_empty(by_dot), Tensor()};
  if (!is_given(by_square)) return by;
  const Tensor of_square = 2 * *by_square * lse;
  by.lse = by.lse.defined() ? by.lse + of_square : of_square;
  return by;
}

std::array<Tensor, 3> composed_gradients(const RowGradients& by, const Tensor& input, const Tensor& weight,
                                         const OptionalTensor& bias, const OptionalTensor& target,
                                         const OptionalTensor& coefficients, const LossOptions& options,
                                         const std::array<bool, 3>& wanted) {
  const Tensor z = all_logits(input, weight, bias, options);
  const Tensor prob = at::exp(z - at::logsumexp(z, {1}, /*keepdim=*/true));
  Tensor grad = at::zeros_like(z);
  if (by.lse.defined()) grad = grad + prob * by.lse.unsqueeze(1);
  if (by.entropy.defined()) {
    // The gradient of the entropy H is p (sum p z - z).
    const Tensor mean = (prob * z).sum(1, /*keepdim=*/true);
    grad = grad + prob * (mean - z) * by.entropy.unsqueeze(1);
  }
  if (by.dot.defined()) grad = grad + by.dot.unsqueeze(1) * coefficients->to(z.scalar_type());
  if (by.nll.defined()) {
    const Targets of_rows(*target, z, options);
    const Tensor own = at::where(of_rows.valid, by.nll, at::zeros_like(by.nll)).unsqueeze(1);
    const Tensor of_target = at::where(of_rows.wrong.unsqueeze(1), at::zeros_like(own), -own);
    grad = at::scatter_add(grad + prob * own, 1, of_rows.columns, of_target);
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

Tensor weighted_sum(const Tensor& lse, const Tensor& nll, const Tensor& dot, const OptionalTensor& by_lse,
                    const OptionalTensor& by_nll, const OptionalTensor& by_dot, const OptionalTensor& by_square) {
  Tensor terms = at::zeros_like(lse);
  const auto add = [&](const OptionalTensor& by, const Tensor& value) {
    if (is_given(by)) terms = terms + at::where(by->eq(0), at::zeros_like(*by), *by * value);
  };
  add(by_lse, lse);
  add(by_nll, nll);
  add(by_dot, dot);
  if (is_given(by_square)) add(by_square, lse.square());
  return terms.sum();
}

}  // namespace cuda_ext
