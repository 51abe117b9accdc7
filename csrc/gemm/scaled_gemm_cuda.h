// Scaled products on CUDA devices.
#pragma once

#include "gemm/scaled_plan.h"

namespace cuda_ext {

// The kernel for the current device, or why there is none.
ScaledGemmChoice choose_scaled_gemm_cuda(const ScaledGemmParams& params, const Restriction& only);
// Launches the product on `stream`, an rt::Stream, as chosen. Its operands are contiguous along k, lines aligned to 16
// bytes.
void launch_scaled_gemm_cuda(const ScaledGemmParams& params, const ScaledGemmChoice& choice,
                             const AllocateWorkspace& allocate, void* stream);

}  // namespace cuda_ext
