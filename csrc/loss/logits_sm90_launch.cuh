// Launches the kernels of logits_sm90.cuh.
#pragma once

#include "loss/logits.h"
#include "loss/logits_sm90.cuh"
#include "rt/launch.cuh"

namespace cuda_ext::loss {

template <class T, class Epilogue>
void launch_sm90(const GemmParams& product, const sm90::GemmPlan& plan, const Epilogue& epilogue, rt::Stream stream) {
  using Kernel = sm90::Gemm<T, sm90::Major::kK, sm90::Major::kK, sm90::kConfigs[kLogitConfig]>;
  const sm90::TensorMaps maps = sm90::make_maps(product, plan);
  rt::launch<logits_sm90<Kernel, Epilogue>>("logits_sm90",
                                            {.grid = {plan.clusters * plan.cluster_blocks()},
                                             .threads = Kernel::kThreads,
                                             .cluster = {plan.cluster_blocks()},
                                             .shared_bytes = sizeof(typename Kernel::Storage),
                                             .programmatic = true,
                                             .stream = stream},
                                            product, plan, maps, epilogue);
}

template <class T>
void LogitsSm90<T>::statistics(const GemmParams& product, const sm90::GemmPlan& plan, const LogitPartsParams& params,
                               void* stream) {
  launch_sm90<T>(product, plan, StatisticsEpilogue{params}, stream);
}
template <class T>
void LogitsSm90<T>::gradient(const GemmParams& product, const sm90::GemmPlan& plan, const LogitGradParams& params,
                             void* stream) {
  launch_sm90<T>(product, plan, GradientEpilogue<T>{params}, stream);
}

}  // namespace cuda_ext::loss
