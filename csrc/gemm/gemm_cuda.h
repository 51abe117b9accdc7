// The GEMM on CUDA devices: the kernel on wgmma where it can run, else the one on mma.sync.
#pragma once

#include "gemm/gemm_sm80.h"
#include "gemm/gemm_sm90.h"

namespace cuda_ext {

// The plan of the kernel on wgmma for the current device, or why it cannot run.
inline sm90::GemmChoice choose_gemm_sm90(const GemmParams& params, Float32Product float32) {
  return sm90::choose_plan(params, float32 == Float32Product::kTf32, rt::describe_device("gemm"));
}

// Bytes of workspace that a launch with these parameters needs. Pointers are not dereferenced; null means absent.
inline size_t gemm_cuda_workspace(const GemmParams& params, Float32Product float32) {
  if (is_empty(params)) return 0;
  const sm90::GemmChoice choice = choose_gemm_sm90(params, float32);
  return choice.plan ? gemm_sm90_workspace(params, *choice.plan) : gemm_sm80_workspace(params, float32);
}

// Launches the product on `stream`, an rt::Stream. a and b have the same dtype; the others any except float64.
inline void launch_gemm_cuda(const GemmParams& params, Workspace workspace, void* stream, Float32Product float32) {
  if (is_empty(params)) return;
  const sm90::GemmChoice choice = choose_gemm_sm90(params, float32);
  if (choice.plan)
    launch_gemm_sm90(params, *choice.plan, workspace, stream);
  else
    launch_gemm_sm80(params, workspace, stream, float32);
}

}  // namespace cuda_ext
