// Launches the kernel of gemm_sm90.cuh: the instantiation for the config.
#pragma once

#include "gemm/gemm_sm90.cuh"
#include "gemm/gemm_sm90.h"
#include "gemm/launch_sm90.cuh"

namespace cuda_ext::sm90 {

template <class T, Major a_major, Major b_major, int config>
void launch_config(const GemmParams& params, const GemmPlan& plan, const TensorMaps& maps, rt::Stream stream) {
  using Kernel = Gemm<T, a_major, b_major, kConfigs[config]>;
  launch_clusters<gemm_sm90<Kernel>, Kernel>("gemm_sm90", plan.clusters, plan.cluster_blocks(), stream, params, plan,
                                             maps);
}

template <class T, bool a_k_major, bool b_k_major>
void GemmSm90<T, a_k_major, b_k_major>::launch(const GemmParams& params, const GemmPlan& plan, const TensorMaps& maps,
                                               void* stream) {
  constexpr Major kMajors[] = {Major::kMn, Major::kK};
  constexpr Major kA = kMajors[a_k_major], kB = kMajors[b_k_major];
  static_assert(kNumConfigs == 5);
  switch (plan.config) {
    case 0: return launch_config<T, kA, kB, 0>(params, plan, maps, stream);
    case 1: return launch_config<T, kA, kB, 1>(params, plan, maps, stream);
    case 2: return launch_config<T, kA, kB, 2>(params, plan, maps, stream);
    case 3: return launch_config<T, kA, kB, 3>(params, plan, maps, stream);
    default:
      if constexpr (b_k_major) return launch_config<T, kA, kB, 4>(params, plan, maps, stream);  // is_legal
  }
}

}  // namespace cuda_ext::sm90
