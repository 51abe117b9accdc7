#include "gemm/gemm_cuda.h"

#include "rt/device.h"

namespace cuda_ext {

rt::Device gemm_cuda_device() { return rt::describe_device("gemm"); }

sm90::GemmChoice choose_gemm_sm90(const GemmParams& params, Float32Product float32) {
  if (!has_gemm_sm90())
    return {.plan = {}, .refusal = "the library has no kernels for sm_90a; build it with 9.0a in TORCH_CUDA_ARCH_LIST"};
  return sm90::choose_plan(params, float32 == Float32Product::kTf32, gemm_cuda_device());
}

void launch_gemm_cuda(const GemmParams& params, const AllocateWorkspace& allocate, void* stream,
                      Float32Product float32) {
  if (is_empty(params)) return;
  const sm90::GemmChoice choice = choose_gemm_sm90(params, float32);
  if (choice.plan)
    launch_gemm_sm90(params, *choice.plan, allocate(gemm_sm90_workspace(params, *choice.plan)), stream);
  else
    launch_gemm_sm80(params, allocate(gemm_sm80_workspace(params, float32)), stream, float32);
}

}  // namespace cuda_ext
