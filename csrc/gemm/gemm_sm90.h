// The launcher of the GEMM on wgmma (sm_90a).
#pragma once

#include "base/workspace.h"
#include "gemm/tiles_sm90.h"

namespace cuda_ext {

namespace sm90 {

struct TensorMaps;  // maps_sm90.cuh

// The launcher for one dtype and layout of the kernel's operands, which a swapped config exchanges. One instantiation
// per file: instantiations/gemm_sm90_{f16,bf16,tf32}_{kk,kn,mk,mn}.cu, named after the contiguous dims of a and b.
template <class T, bool a_k_major, bool b_k_major>
struct GemmSm90 {
  static void launch(const GemmParams& params, const GemmPlan& plan, const TensorMaps& maps, void* stream);
};

}  // namespace sm90

// Launches the product on `stream`, an rt::Stream, as planned for these parameters (sm90::choose_plan).
void launch_gemm_sm90(const GemmParams& params, sm90::GemmPlan plan, const AllocateWorkspace& allocate, void* stream);

}  // namespace cuda_ext
