// Launches the kernel of scaled_gemm_sm90.cuh: the instantiation for the config.
#pragma once

#include "gemm/launch_sm90.cuh"
#include "gemm/scaled_gemm_sm90.cuh"
#include "gemm/scaled_gemm_sm90.h"

namespace cuda_ext::sm90 {

template <class A, class B>
void ScaledGemmSm90<A, B>::launch(const ScaledGemmParams& params, const GemmParams& epilogue, const ScaledPlan& plan,
                                  const TensorMaps& maps, void* stream) {
  const auto launch_kernel = [&]<int config, bool columns_vary>() {
    using Kernel = ScaledGemm<A, B, kScaledConfigs[config], columns_vary>;
    launch_clusters<scaled_gemm_sm90<Kernel>, Kernel>("scaled_gemm_sm90", plan.clusters, plan.cluster, stream, params,
                                                      epilogue, plan, maps);
  };
  const auto launch_config = [&]<int config>() {
    if constexpr (kScaledConfigs[config].promotes)  // else scales do not depend on the block
      if (plan.columns_vary) return launch_kernel.template operator()<config, true>();
    launch_kernel.template operator()<config, false>();
  };
  static_assert(kNumScaledConfigs == 4);
  switch (plan.config) {
    case 0: return launch_config.template operator()<0>();
    case 1: return launch_config.template operator()<1>();
    case 2: return launch_config.template operator()<2>();
    default: return launch_config.template operator()<3>();
  }
}

}  // namespace cuda_ext::sm90
