// The launcher of the GEMM on wgmma (sm_90a).
#pragma once

#include "base/workspace.h"
#include "gemm/plan_sm90.h"

namespace cuda_ext {

// Bytes of workspace that a launch of this plan needs.
size_t gemm_sm90_workspace(const GemmParams& params, sm90::GemmPlan plan);

// Launches the product on `stream`, an rt::Stream, as planned for these parameters (sm90::choose_plan).
void launch_gemm_sm90(const GemmParams& params, sm90::GemmPlan plan, Workspace workspace, void* stream);

}  // namespace cuda_ext
