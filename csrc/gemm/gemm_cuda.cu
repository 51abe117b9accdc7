#include "gemm/gemm_cuda.h"

#include "rt/device.h"

namespace cuda_ext {

rt::Device gemm_cuda_device() { return rt::describe_device("gemm"); }

sm90::GemmChoice choose_gemm_sm90(const GemmParams& params, Float32Product float32, const Restriction& only) {
  if (!has_gemm_sm90())
    return {.plan = {}, .refusal = "the library has no kernels for sm_90a; build it with 9.0a in TORCH_CUDA_ARCH_LIST"};
  const rt::Device device = gemm_cuda_device();
  const bool tf32 = float32 == Float32Product::kTf32;
  // A plan for mma.sync was measured to be faster than copies, or is tested.
  const Restriction of_sm90 = only.sm80 ? Restriction{.copies = 0} : only;
  sm90::GemmChoice choice = sm90::choose_plan(params, tf32, device, of_sm90);
  if (!choice.plan && of_sm90.config >= 0) choice = sm90::choose_plan(params, tf32, device);
  return choice;
}

void launch_gemm_cuda(const GemmParams& params, const AllocateWorkspace& allocate, void* stream, Float32Product float32,
                      const Restriction& only) {
  if (is_empty(params)) return;
  const sm90::GemmChoice choice = choose_gemm_sm90(params, float32, only);
  if (choice.plan) {
    launch_gemm_sm90(params, *choice.plan, allocate(gemm_sm90_workspace(params, *choice.plan)), stream);
  } else {
    const Restriction of_sm80 = only.sm80 ? only : Restriction{};
    launch_gemm_sm80(params, allocate(gemm_sm80_workspace(params, float32, of_sm80)), stream, float32, of_sm80);
  }
}

}  // namespace cuda_ext
