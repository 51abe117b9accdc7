// Chooses the kernel of a scaled product on a CUDA device. No header of CUDA is needed.
#pragma once

#include "gemm/scaled_plan_sm89.h"
#include "gemm/scaled_plan_sm90.h"

namespace cuda_ext {

struct ScaledGemmChoice {
  enum class Kernel { kNone, kSm89, kSm90 };  // kSm89 chooses its plan when it is launched
  Kernel kernel = Kernel::kNone;
  sm90::ScaledPlan plan_sm90;
  std::string refusal;  // why it is not the kernel on wgmma, or why there is none
};

// `missing`: why this build has no code of the kernel for the device, or empty. `only`: of plans for wgmma; ignored if
// no plan is left.
inline ScaledGemmChoice choose_scaled_gemm(const ScaledGemmParams& params, const rt::Device& device,
                                           const std::string& missing_sm89 = "", const std::string& missing_sm90 = "",
                                           const Restriction& only = {}) {
  using Kernel = ScaledGemmChoice::Kernel;
  const bool is_hopper = device.compute_capability == 90;
  if (is_hopper && !missing_sm90.empty()) return {.plan_sm90 = {}, .refusal = missing_sm90};
  const auto choose = [&](const Restriction& restriction) {
    return params.groups.cut == Groups::Cut::kRows ? sm90::choose_scaled_groups_plan(params, device, restriction)
                                                   : sm90::choose_scaled_plan(params, device, restriction);
  };
  sm90::ScaledChoice wgmma = choose(only);
  if (!wgmma.refusal.empty()) wgmma = choose({});
  if (wgmma.refusal.empty()) return {Kernel::kSm90, wgmma.plan, ""};
  if (is_hopper) return {.plan_sm90 = {}, .refusal = wgmma.refusal};
  std::string refusal = sm80::scaled_refusal(params, device.compute_capability);
  if (refusal.empty()) refusal = missing_sm89;
  if (!refusal.empty()) return {.plan_sm90 = {}, .refusal = refusal};
  return {Kernel::kSm89, {}, wgmma.refusal};
}

}  // namespace cuda_ext
