// Plans of the products whose results are logits, and the choice of the instantiation.
#include "loss/loss_cuda.h"

#include <limits>

#include "base/built.h"
#include "gemm/gemm_sm80.h"
#include "gemm/plan_sm80.h"
#include "gemm/plan_sm90.h"
#include "loss/logits.h"
#include "rt/device.h"

namespace cuda_ext {

namespace loss {

std::optional<LogitPlan> plan_logits(const GemmParams& product, Float32Product float32) {
  constexpr int64_t kMost = std::numeric_limits<int>::max() - 512;  // positions are int
  const bool reads =
      product.k > 0 && is_k_major_a(product) && is_k_major_b(product) && product.m < kMost && product.n < kMost;
  if (!reads || is_empty(product)) return std::nullopt;
  const rt::Device device = rt::describe_device("logits");
  LogitPlan plan{.sm90 = std::nullopt, .sm80 = {}, .arithmetic = sm80::arithmetic_of(product, float32)};
  if (kBuiltForSm90a) {
    const Restriction only{.config = kLogitConfig, .k_blocks = 1, .splits = 1, .copies = 0};
    plan.sm90 = sm90::choose_plan(product, float32 == Float32Product::kTf32, device, only).plan;
  }
  if (plan.sm90) {
    plan.sm90->tma_store = false;
    return plan;
  }
  plan.sm80 = sm80::choose_plan(product, plan.arithmetic, sm80::rates_of(device), {.config = kLogitShape, .splits = 1});
  return plan.sm80.shape == kLogitShape ? std::optional(plan) : std::nullopt;
}

namespace {

// Calls f(launcher) for the instantiation of the plan.
template <class F>
void with_instantiation(const GemmParams& product, const LogitPlan& plan, const F& f) {
  const Dtype dtype = product.a.dtype;
  if constexpr (kBuiltForSm90a)
    if (plan.sm90) {
      if (dtype == Dtype::kFloat16) return f(LogitsSm90<half_t>{}, *plan.sm90);
      if (dtype == Dtype::kBFloat16) return f(LogitsSm90<bfloat16_t>{}, *plan.sm90);
      return f(LogitsSm90<float>{}, *plan.sm90);
    }
  if (dtype == Dtype::kFloat16) return f(LogitsSm80<half_t, sm80::Arithmetic::k16Bit>{}, plan.sm80);
  if (dtype == Dtype::kBFloat16) return f(LogitsSm80<bfloat16_t, sm80::Arithmetic::k16Bit>{}, plan.sm80);
  if (plan.arithmetic == sm80::Arithmetic::kTf32) return f(LogitsSm80<float, sm80::Arithmetic::kTf32>{}, plan.sm80);
  f(LogitsSm80<float, sm80::Arithmetic::kThreeTf32>{}, plan.sm80);
}

}  // namespace
}  // namespace loss

bool launch_product_statistics_cuda(const GemmParams& product, const LogitStatisticsParams& params,
                                    const AllocateWorkspace& allocate, void* stream, Float32Product float32) {
  if (!loss::have_epilogue(params.tile.coefficients)) return false;
  const auto plan = loss::plan_logits(product, float32);
  if (!plan) return false;
  LogitParts parts{.count = plan->parts()};
  provide_workspace("logit_statistics", allocate, [&](void* data) {
    WorkspaceCursor cursor(data);
    const int64_t size = parts.count * product.m;
    cursor.allocate(parts.max, size);
    cursor.allocate(parts.sum, size);
    if (params.statistics.moment != nullptr) cursor.allocate(parts.moment, size);
    if (params.statistics.dot != nullptr) cursor.allocate(parts.dot, size);
    return cursor;
  });
  const LogitPartsParams of_parts{params.tile, parts, static_cast<float*>(params.statistics.picked),
                                  static_cast<float*>(params.logits)};
  loss::with_instantiation(product, *plan, [&](auto kernel, const auto& own_plan) {
    kernel.statistics(product, own_plan, of_parts, stream);
  });
  loss::launch_total_statistics({product.m, parts, params.statistics}, stream);
  return true;
}

bool launch_product_grad_cuda(const GemmParams& product, const LogitGradParams& params, void* stream,
                              Float32Product float32) {
  if (!loss::have_epilogue(params.tile.coefficients)) return false;
  const auto plan = loss::plan_logits(product, float32);
  if (!plan) return false;
  loss::with_instantiation(
      product, *plan, [&](auto kernel, const auto& own_plan) { kernel.gradient(product, own_plan, params, stream); });
  return true;
}

}  // namespace cuda_ext
