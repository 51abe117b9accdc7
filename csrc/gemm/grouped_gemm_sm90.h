// The launcher of grouped products (Groups in gemm.h) on wgmma (sm_90a).
#pragma once

#include "gemm/tiles_sm90.h"

namespace cuda_ext {

namespace sm90 {

struct TensorMaps;  // maps_sm90.cuh

// The configs of grouped products: the first if the output is wide and the epilogue short, else the second.
constexpr int kGroupedConfigs[] = {0, 2};

// Groups of rows, a contiguous along k and b along k or n, or of terms, both contiguous along the other dim. One
// instantiation per file: instantiations/grouped_gemm_sm90_{f16,bf16}_{kk,kn,mn}.cu, named as those of gemm_sm90.
template <class T, bool a_k_major, bool b_k_major>
struct GroupedGemmSm90 {
  static void launch(const GemmParams& params, const GemmPlan& plan, const TensorMaps& maps, void* stream);
};

}  // namespace sm90

// Launches the product on `stream`, an rt::Stream, as planned for these parameters.
void launch_grouped_gemm_sm90(const GemmParams& params, const sm90::GemmPlan& plan, void* stream);

}  // namespace cuda_ext
