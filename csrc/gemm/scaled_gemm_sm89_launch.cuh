// Launches the kernel of scaled_gemm_sm89.cuh: plan, and the instantiation for the tile shape.
#pragma once

#include "gemm/scaled_gemm_sm89.cuh"
#include "gemm/scaled_gemm_sm89.h"
#include "gemm/scaled_plan_sm89.h"
#include "rt/device.h"
#include "rt/launch.cuh"

namespace cuda_ext {
namespace sm80 {

template <class A, class B, Groups::Cut cut>
void launch_scaled(const ScaledGemmParams& params, rt::Stream stream) {
  const GemmPlan plan = choose_scaled_plan(params, rt::describe_device("scaled_gemm_sm89"));
  const auto launch = [&]<int shape>() {
    using Kernel = ScaledGemm<A, B, kTiles[int(Arithmetic::kFloat8)][shape], cut>;
    rt::launch<scaled_gemm_sm89<Kernel>>("scaled_gemm_sm89",
                                         {.grid = {plan.tiles},
                                          .threads = Kernel::kThreads,
                                          .shared_bytes = sizeof(typename Kernel::Storage),
                                          .stream = stream},
                                         params, without_scales(params), plan);
  };
  static_assert(kNumShapes[int(Arithmetic::kFloat8)] == 2);
  if (plan.shape == 0)
    launch.template operator()<0>();
  else
    launch.template operator()<1>();
}

}  // namespace sm80

template <class A, class B>
void ScaledGemmSm89<A, B>::launch(const ScaledGemmParams& params, void* stream) {
  sm80::launch_scaled<A, B, Groups::Cut::kNone>(params, stream);
}

template <class A>
void ScaledGroupsSm89<A>::launch(const ScaledGemmParams& params, void* stream) {
  sm80::launch_scaled<A, float8_e4m3_t, Groups::Cut::kRows>(params, stream);
}

}  // namespace cuda_ext
