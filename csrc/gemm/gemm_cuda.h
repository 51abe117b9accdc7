// The GEMM on CUDA devices: the kernel on wgmma where it can run, else the one on mma.sync.
#pragma once

#include <functional>

#include "gemm/gemm_sm80.h"
#include "gemm/gemm_sm90.h"
#include "gemm/plan_sm90.h"

namespace cuda_ext {

// The caller's function that provides a workspace of so many bytes.
using AllocateWorkspace = std::function<Workspace(size_t bytes)>;

// The current device, as plans see it.
rt::Device gemm_cuda_device();

// The plan of the kernel on wgmma for the current device, or why it cannot run. A restriction that no plan fits is
// ignored, as below.
sm90::GemmChoice choose_gemm_sm90(const GemmParams& params, Float32Product float32, const Restriction& only);

// Launches the product on `stream`, an rt::Stream. a and b have the same dtype; the others any except float64. Unless
// the output is empty it calls `allocate` once, because the size of the workspace follows from the plan.
void launch_gemm_cuda(const GemmParams& params, const AllocateWorkspace& allocate, void* stream, Float32Product float32,
                      const Restriction& only);

}  // namespace cuda_ext
