// Launches persistent kernels on wgmma (sm_90a).
#pragma once

#include "rt/launch.cuh"

namespace cuda_ext::sm90 {

// `clusters` of `cluster` blocks of a kernel that is instantiated for Gemm.
template <auto kernel, class Gemm, class... Params>
void launch_clusters(const char* name, int clusters, int cluster, rt::Stream stream, const Params&... params) {
  rt::launch<kernel>(name,
                     {.grid = {clusters * cluster},
                      .threads = Gemm::kThreads,
                      .cluster = {cluster},
                      .shared_bytes = sizeof(typename Gemm::Storage),
                      .programmatic = true,
                      .stream = stream},
                     params...);
}

}  // namespace cuda_ext::sm90
