// Launches the kernels of logits_sm80.cuh.
#pragma once

#include "loss/logits.h"
#include "loss/logits_sm80.cuh"
#include "rt/launch.cuh"

namespace cuda_ext::loss {

template <class T, sm80::Arithmetic arithmetic, class Epilogue>
void launch_sm80(const GemmParams& product, const sm80::GemmPlan& plan, const Epilogue& epilogue, rt::Stream stream) {
  using Kernel = sm80::Gemm<T, arithmetic, true, true, sm80::kTiles[int(arithmetic)][kLogitShape]>;
  rt::launch<logits_sm80<Kernel, Epilogue>>("logits_sm80",
                                            {.grid = {plan.tiles},
                                             .threads = Kernel::kThreads,
                                             .shared_bytes = sizeof(typename Kernel::Storage),
                                             .stream = stream},
                                            product, plan, epilogue);
}

template <class T, sm80::Arithmetic arithmetic>
void LogitsSm80<T, arithmetic>::statistics(const GemmParams& product, const sm80::GemmPlan& plan,
                                           const LogitPartsParams& params, void* stream) {
  launch_sm80<T, arithmetic>(product, plan, StatisticsEpilogue{params}, stream);
}
template <class T, sm80::Arithmetic arithmetic>
void LogitsSm80<T, arithmetic>::gradient(const GemmParams& product, const sm80::GemmPlan& plan,
                                         const LogitGradParams& params, void* stream) {
  launch_sm80<T, arithmetic>(product, plan, GradientEpilogue<T>{params}, stream);
}

}  // namespace cuda_ext::loss
