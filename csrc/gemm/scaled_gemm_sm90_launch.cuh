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
  static_assert(kNumScaledConfigs == 3);
  if (plan.config == 0)
    plan.columns_vary ? launch_kernel.template operator()<0, true>() : launch_kernel.template operator()<0, false>();
  else if (plan.config == 1)
    plan.columns_vary ? launch_kernel.template operator()<1, true>() : launch_kernel.template operator()<1, false>();
  else  // without promotion scales do not depend on the block
    launch_kernel.template operator()<2, false>();
}

}  // namespace cuda_ext::sm90
