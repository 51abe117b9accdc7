// Launches scaled products of groups: the instantiation for the config.
#pragma once

#include "gemm/scaled_gemm_sm90.h"
#include "gemm/scaled_groups_sm90.cuh"
#include "rt/launch.cuh"

namespace cuda_ext::sm90 {

template <class A>
void ScaledGroupsSm90<A>::launch(const ScaledGemmParams& params, const GemmParams& epilogue, const ScaledPlan& plan,
                                 const TensorMaps& maps, void* stream) {
  const auto launch_kernel = [&]<int config>() {
    using Kernel = ScaledGroups<A, float8_e4m3_t, kScaledConfigs[config]>;
    rt::launch<scaled_gemm_sm90<Kernel>>("scaled_gemm_sm90",
                                         {.grid = {plan.clusters * plan.cluster},
                                          .threads = Kernel::kThreads,
                                          .cluster = {plan.cluster},
                                          .shared_bytes = sizeof(typename Kernel::Storage),
                                          .programmatic = true,
                                          .stream = stream},
                                         params, epilogue, plan, maps);
  };
  static_assert(kNumScaledConfigs == 2);
  if (plan.config == 0)
    launch_kernel.template operator()<0>();
  else
    launch_kernel.template operator()<1>();
}

}  // namespace cuda_ext::sm90
