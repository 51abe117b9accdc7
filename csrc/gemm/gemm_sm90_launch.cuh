// Launches the kernel of gemm_sm90.cuh: the instantiation for dtype, layout and config.
#pragma once

#include "gemm/gemm_sm90.cuh"

namespace cuda_ext::sm90 {

template <class T, Major a_major, Major b_major, int config>
void launch_config(const GemmParams& params, const GemmPlan& plan, const TensorMaps& maps, rt::Stream stream) {
  using Kernel = Gemm<T, a_major, b_major, kConfigs[config]>;
  rt::launch<gemm_sm90<Kernel>>("gemm_sm90",
                                {.grid = {plan.clusters * plan.cluster},
                                 .threads = Kernel::kThreads,
                                 .cluster = {plan.cluster},
                                 .shared_bytes = sizeof(typename Kernel::Storage),
                                 .programmatic = true,
                                 .stream = stream},
                                params, plan, maps);
}

// One instantiation per file, named after the majors of the kernel's a and b. The function is not inline: an inline one
// would be instantiated where it is called too, despite extern template.
template <class T, Major a_major, Major b_major>
struct Layout {
  static void launch(const GemmParams& params, const GemmPlan& plan, const TensorMaps& maps, rt::Stream stream);
};
template <class T, Major a_major, Major b_major>
void Layout<T, a_major, b_major>::launch(const GemmParams& params, const GemmPlan& plan, const TensorMaps& maps,
                                         rt::Stream stream) {
  static_assert(kNumConfigs == 4);
  switch (plan.config) {
    case 0: return launch_config<T, a_major, b_major, 0>(params, plan, maps, stream);
    case 1: return launch_config<T, a_major, b_major, 1>(params, plan, maps, stream);
    case 2: return launch_config<T, a_major, b_major, 2>(params, plan, maps, stream);
    default: return launch_config<T, a_major, b_major, 3>(params, plan, maps, stream);
  }
}

}  // namespace cuda_ext::sm90
