#include "gemm/gemm_cuda.h"

#include "base/built.h"
#include "gemm/grouped_gemm_sm80.h"
#include "gemm/grouped_plan_sm90.h"
#include "rt/device.h"

namespace cuda_ext {

rt::Device gemm_cuda_device() { return rt::describe_device("gemm"); }

sm90::GemmChoice choose_gemm_sm90(const GemmParams& params, Float32Product float32, const Restriction& only) {
  if (!kBuiltForSm90a) return {.plan = {}, .refusal = kNotBuiltForSm90a};
  const rt::Device device = gemm_cuda_device();
  const bool tf32 = float32 == Float32Product::kTf32;
  // A plan for mma.sync was measured to be faster than copies, or is tested.
  const Restriction of_sm90 = only.sm80 ? Restriction{.copies = 0} : only;
  sm90::GemmChoice choice = sm90::choose_plan(params, tf32, device, of_sm90);
  if (!choice.plan && of_sm90.config >= 0) choice = sm90::choose_plan(params, tf32, device);
  return choice;
}

sm90::GemmChoice choose_grouped_gemm(const GemmParams& params) {
  if (!kBuiltForSm90a) return {.plan = {}, .refusal = kNotBuiltForSm90a};
  return sm90::choose_grouped_plan(params, gemm_cuda_device());
}

void launch_gemm_cuda(const GemmParams& params, const AllocateWorkspace& allocate, void* stream, Float32Product float32,
                      const Restriction& only) {
  if (is_empty(params)) return;
  if (params.groups.cut != Groups::Cut::kNone) {
    if constexpr (kBuiltForSm90a)
      if (const sm90::GemmChoice choice = choose_grouped_gemm(params); choice.plan)
        return launch_grouped_gemm_sm90(params, *choice.plan, stream);
    return launch_grouped_gemm_sm80(params, stream, float32);
  }
  const sm90::GemmChoice choice = choose_gemm_sm90(params, float32, only);
  if constexpr (kBuiltForSm90a)
    if (choice.plan) return launch_gemm_sm90(params, *choice.plan, allocate, stream);
  launch_gemm_sm80(params, allocate, stream, float32, only.sm80 ? only : Restriction{});
}

}  // namespace cuda_ext
