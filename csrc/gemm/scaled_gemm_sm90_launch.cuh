// Launches the kernel of scaled_gemm_sm90.cuh: the instantiation for the config.
#pragma once

#include "gemm/scaled_gemm_sm90.cuh"
#include "gemm/scaled_gemm_sm90.h"
#include "rt/launch.cuh"

namespace cuda_ext::sm90 {

template <class A, class B>
void ScaledGemmSm90<A, B>::launch(const ScaledGemmParams& params, const GemmParams& epilogue, const ScaledPlan& plan,
                                  const TensorMaps& maps, void* stream) {
  const auto launch_config = [&]<int config>() {
    using Kernel = ScaledGemm<A, B, kScaledBlockM[config]>;
    rt::launch<scaled_gemm_sm90<Kernel>>("scaled_gemm_sm90",
                                         {.grid = {plan.clusters * plan.cluster},
                                          .threads = Kernel::kThreads,
                                          .cluster = {plan.cluster},
                                          .shared_bytes = sizeof(typename Kernel::Storage),
                                          .programmatic = true,
                                          .stream = stream},
                                         params, epilogue, plan, maps);
  };
  static_assert(kScaledConfigs == 2);
  if (plan.config == 0)
    launch_config.template operator()<0>();
  else
    launch_config.template operator()<1>();
}

}  // namespace cuda_ext::sm90
