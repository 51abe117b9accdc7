// Launches grouped products on the kernel of gemm_sm90.cuh: the instantiation for the config.
#pragma once

#include "gemm/grouped_gemm_sm90.h"
#include "gemm/groups_sm90.cuh"
#include "rt/launch.cuh"

namespace cuda_ext::sm90 {

template <class T, bool a_k_major, bool b_k_major>
void GroupedGemmSm90<T, a_k_major, b_k_major>::launch(const GemmParams& params, const GemmPlan& plan,
                                                      const TensorMaps& maps, void* stream) {
  const auto launch_config = [&]<int config>() {
    using Kernel = std::conditional_t<a_k_major, GroupsOfRows<T, b_k_major ? Major::kK : Major::kMn, kConfigs[config]>,
                                      GroupsOfTerms<T, kConfigs[config]>>;
    rt::launch<gemm_sm90<Kernel>>("gemm_sm90",
                                  {.grid = {plan.clusters * plan.cluster},
                                   .threads = Kernel::kThreads,
                                   .cluster = {plan.cluster},
                                   .shared_bytes = sizeof(typename Kernel::Storage),
                                   .programmatic = true,
                                   .stream = stream},
                                  params, plan, maps);
  };
  if (plan.config == kGroupedConfigs[0])
    launch_config.template operator()<kGroupedConfigs[0]>();
  else
    launch_config.template operator()<kGroupedConfigs[1]>();
}

}  // namespace cuda_ext::sm90
