// C interface of the GEMM's launchers for test_gemm_kernels.py, which fills their parameter structs.
#include <cstdio>

#include "gemm/gemm_cuda.h"
#include "gemm/gemm_passes.h"
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

// The tests' restriction of the choice of a plan for wgmma.
static Restriction restriction;
EXPORT void gemm_restrict(int config, int cluster, int k_blocks, int splits, int copies) {
  restriction = {.config = config, .cluster = cluster, .k_blocks = k_blocks, .splits = splits, .copies = copies};
}
static sm90::GemmChoice choice_of(const GemmParams& params, int tf32) {
  return sm90::choose_plan(params, tf32, gemm_cuda_device(), restriction);
}

// 1: wgmma, 0: mma.sync; then the config, the cluster, the blocks of it that divide k, the splits and tma_store.
EXPORT int gemm_choice_sm90(const GemmParams* params, int tf32, int* out, char* refusal, size_t size) {
  const sm90::GemmChoice choice = choice_of(*params, tf32);
  std::snprintf(refusal, size, "%s", choice.refusal.c_str());
  if (!choice.plan) return 0;
  out[0] = choice.plan->config;
  out[1] = choice.plan->cluster;
  out[2] = choice.plan->k_blocks;
  out[3] = choice.plan->splits;
  out[4] = choice.plan->tma_store;
  out[5] = choice.plan->copies.a + 2 * choice.plan->copies.b;
  return 1;
}
// allocate(bytes) returns memory, of which the launcher gets at most `most` bytes.
EXPORT int gemm_run(const GemmParams* params, void* (*allocate)(size_t), size_t most, int tf32, char* error,
                    size_t size) {
  const auto provide = [&](size_t bytes) { return Workspace{allocate(bytes), bytes < most ? bytes : most}; };
  return report(error, size, [&] {
    if (is_empty(*params)) return;
    if (const auto choice = choice_of(*params, tf32); choice.plan)
      launch_gemm_sm90(*params, *choice.plan, provide, nullptr);
    else
      launch_gemm_sm80(*params, provide, nullptr, tf32 ? Float32Product::kTf32 : Float32Product::kThreeTf32);
  });
}
EXPORT int activation_grad_run(const ActivationGradParams* params, void* (*allocate)(size_t), char* error,
                               size_t size) {
  const auto provide = [&](size_t bytes) { return Workspace{allocate(bytes), bytes}; };
  return report(error, size, [&] { launch_activation_grad_cuda(*params, provide, nullptr); });
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
