// Scaled products on CUDA devices.
#pragma once

#include "gemm/scaled_plan_sm90.h"

namespace cuda_ext {

// The plan for the current device, or why there is no kernel for the product.
sm90::ScaledChoice choose_scaled_gemm_cuda(const ScaledGemmParams& params);
// Launches the product on `stream`, an rt::Stream, as planned.
void launch_scaled_gemm_cuda(const ScaledGemmParams& params, const sm90::ScaledPlan& plan, void* stream);

}  // namespace cuda_ext
