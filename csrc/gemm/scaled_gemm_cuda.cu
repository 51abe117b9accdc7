#include "gemm/scaled_gemm_cuda.h"

#include "base/built.h"
#include "gemm/scaled_gemm_sm90.h"
#include "rt/device.h"

namespace cuda_ext {

sm90::ScaledChoice choose_scaled_gemm_cuda(const ScaledGemmParams& params) {
  if (!kBuiltForSm90a) return {.plan = {}, .refusal = kNotBuiltForSm90a};
  const rt::Device device = rt::describe_device("scaled_gemm");
  return params.groups.cut == Groups::Cut::kRows ? sm90::choose_scaled_groups_plan(params, device)
                                                 : sm90::choose_scaled_plan(params, device);
}

void launch_scaled_gemm_cuda(const ScaledGemmParams& params, const sm90::ScaledPlan& plan, void* stream) {
  if constexpr (kBuiltForSm90a) launch_scaled_gemm_sm90(params, plan, stream);
}

}  // namespace cuda_ext
