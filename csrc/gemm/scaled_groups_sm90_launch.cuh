// Launches scaled products of groups: the instantiation for the config.
#pragma once

#include "gemm/launch_sm90.cuh"
#include "gemm/scaled_gemm_sm90.h"
#include "gemm/scaled_groups_sm90.cuh"

namespace cuda_ext::sm90 {

// Of groups of terms: scales are read for each k tile, whatever they depend on.
template <class A>
void ScaledTermsSm90<A>::launch(const ScaledGemmParams& params, const GemmParams& epilogue, const ScaledPlan& plan,
                                const TensorMaps& maps, void* stream) {
  const auto launch_kernel = [&]<int config>() {
    using Kernel = ScaledTerms<A, float8_e4m3_t, kScaledConfigs[config]>;
    launch_clusters<scaled_gemm_sm90<Kernel>, Kernel>("scaled_gemm_sm90", plan.clusters, plan.cluster, stream, params,
                                                      epilogue, plan, maps);
  };
  plan.config == 0 ? launch_kernel.template operator()<0>() : launch_kernel.template operator()<1>();
}

template <class A>
void ScaledGroupsSm90<A>::launch(const ScaledGemmParams& params, const GemmParams& epilogue, const ScaledPlan& plan,
                                 const TensorMaps& maps, void* stream) {
  const auto launch_kernel = [&]<int config>() {
    using Kernel = ScaledGroups<A, float8_e4m3_t, kScaledConfigs[config]>;
    launch_clusters<scaled_gemm_sm90<Kernel>, Kernel>("scaled_gemm_sm90", plan.clusters, plan.cluster, stream, params,
                                                      epilogue, plan, maps);
  };
  static_assert(kNumGroupedScaledConfigs == 3);
  switch (plan.config) {
    case 0: return launch_kernel.template operator()<0>();
    case 1: return launch_kernel.template operator()<1>();
    default: return launch_kernel.template operator()<2>();
  }
}

}  // namespace cuda_ext::sm90
