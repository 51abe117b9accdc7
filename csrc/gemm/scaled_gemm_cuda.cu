#include "gemm/scaled_gemm_cuda.h"

#include "base/built.h"
#include "gemm/scaled_gemm_sm89.h"
#include "gemm/scaled_gemm_sm90.h"
#include "rt/device.h"

namespace cuda_ext {

ScaledGemmChoice choose_scaled_gemm_cuda(const ScaledGemmParams& params, const Restriction& only) {
  const rt::Device device = rt::describe_device("scaled_gemm");
  return choose_scaled_gemm(params, device, is_built_for_sm89(device.compute_capability) ? "" : kNotBuiltForSm89,
                            kBuiltForSm90a ? "" : kNotBuiltForSm90a, only);
}

void launch_scaled_gemm_cuda(const ScaledGemmParams& params, const ScaledGemmChoice& choice,
                             const AllocateWorkspace& allocate, void* stream) {
  if constexpr (kBuiltForSm90a)
    if (choice.kernel == ScaledGemmChoice::Kernel::kSm90)
      return launch_scaled_gemm_sm90(params, choice.plan_sm90, allocate, stream);
  if constexpr (kBuiltForSm89)
    if (choice.kernel == ScaledGemmChoice::Kernel::kSm89) launch_scaled_gemm_sm89(params, stream);
}

}  // namespace cuda_ext
