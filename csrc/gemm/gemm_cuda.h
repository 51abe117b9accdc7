// The GEMM on CUDA devices: the kernel on wgmma where it can run, else the one on mma.sync.
#pragma once

#include "gemm/gemm_sm80.h"
#include "gemm/gemm_sm90.h"
#include "gemm/plan_sm90.h"

namespace cuda_ext {

// The current device, as plans see it.
rt::Device gemm_cuda_device();

// The plan of the kernel on wgmma for the current device, or why it cannot run. A restriction that no plan fits is
// ignored, as below.
sm90::GemmChoice choose_gemm_sm90(const GemmParams& params, Float32Product float32, const Restriction& only);

// The same for a grouped product.
sm90::GemmChoice choose_grouped_gemm(const GemmParams& params);

// Launches the product on `stream`, an rt::Stream. a and b have the same dtype; the others any except float64.
void launch_gemm_cuda(const GemmParams& params, const AllocateWorkspace& allocate, void* stream, Float32Product float32,
                      const Restriction& only);

}  // namespace cuda_ext
