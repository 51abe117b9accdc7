// Launches grouped products on the kernel of gemm_sm90.cuh: the instantiation for the config.
#pragma once

#include "gemm/grouped_gemm_sm90.h"
#include "gemm/groups_sm90.cuh"
#include "gemm/launch_sm90.cuh"

namespace cuda_ext::sm90 {

template <class T, bool a_k_major, bool b_k_major>
void GroupedGemmSm90<T, a_k_major, b_k_major>::launch(const GemmParams& params, const GemmPlan& plan,
                                                      const TensorMaps& maps, void* stream) {
  const auto launch_config = [&]<int config, bool gathers>() {
    constexpr Major kMajorB = b_k_major ? Major::kK : Major::kMn;
    using Kernel = std::conditional_t<a_k_major, GroupsOfRows<T, kMajorB, kConfigs[config], gathers>,
                                      GroupsOfTerms<T, kConfigs[config], gathers>>;
    launch_clusters<gemm_sm90<Kernel>, Kernel>("gemm_sm90", plan.clusters, plan.cluster, stream, params, plan, maps);
  };
  const auto launch = [&]<bool gathers>() {
    if (plan.config == kGroupedConfigs[0])
      launch_config.template operator()<kGroupedConfigs[0], gathers>();
    else
      launch_config.template operator()<kGroupedConfigs[1], gathers>();
  };
  if (params.groups.indices != nullptr)
    launch.template operator()<true>();
  else
    launch.template operator()<false>();
}

}  // namespace cuda_ext::sm90
