// C interface of the GEMM's launchers for test_gemm_kernels.py, which fills their parameter structs.
#include <cstdio>

#include "gemm/activation_grad.h"
#include "gemm/gemm_sm80.h"
#include "gemm/plan_sm80.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace cuda_ext;

namespace {

template <class F>
int report(char* error, size_t error_size, F&& f) {
  try {
    f();
    return 0;
  } catch (const std::exception& e) {
    std::snprintf(error, error_size, "%s", e.what());
    return 1;
  }
}

}  // namespace

EXPORT size_t gemm_params_size() { return sizeof(GemmParams); }
EXPORT size_t activation_grad_params_size() { return sizeof(ActivationGradParams); }

EXPORT size_t gemm_workspace(const GemmParams* params, int tf32) {
  return gemm_sm80_workspace(*params, tf32 ? Float32Product::kTf32 : Float32Product::kThreeTf32);
}
EXPORT int gemm_run(const GemmParams* params, void* workspace, size_t bytes, int tf32, char* error, size_t size) {
  return report(error, size, [&] {
    launch_gemm_sm80(*params, {workspace, bytes}, nullptr, tf32 ? Float32Product::kTf32 : Float32Product::kThreeTf32);
  });
}
EXPORT size_t activation_grad_workspace_bytes(const ActivationGradParams* params) {
  return activation_grad_workspace(*params);
}
EXPORT int activation_grad_run(const ActivationGradParams* params, void* workspace, size_t bytes, char* error,
                               size_t size) {
  return report(error, size, [&] { launch_activation_grad_cuda(*params, {workspace, bytes}, nullptr); });
}

// out: block_m, block_n, block_k and splits that the heuristic chooses for 16-bit operands on a device.
EXPORT void gemm_choice(const GemmParams* params, int compute_capability, int processors, int* out) {
  using namespace sm80;
  const GemmPlan plan = choose_plan(*params, Arithmetic::k16Bit, rates_of({compute_capability, processors}));
  const GemmConfig& tile = kTiles[int(Arithmetic::k16Bit)][plan.shape];
  out[0] = tile.block_m;
  out[1] = tile.block_n;
  out[2] = tile.block_k;
  out[3] = plan.splits;
}
