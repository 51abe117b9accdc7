// The launcher of scaled products on wgmma (sm_90a).
#pragma once

#include "gemm/scaled_tiles_sm90.h"

namespace cuda_ext {

namespace sm90 {

struct TensorMaps;  // maps_sm90.cuh

// One instantiation per file: instantiations/scaled_gemm_sm90_{e4m3,e5m2}_{e4m3,e5m2}.cu, after the types of a and b.
template <class A, class B>
struct ScaledGemmSm90 {
  static void launch(const ScaledGemmParams& params, const GemmParams& epilogue, const ScaledPlan& plan,
                     const TensorMaps& maps, void* stream);
};

// Of groups of rows; b is of float8_e4m3. One instantiation per file: instantiations/scaled_groups_sm90_{e4m3,e5m2}.cu.
template <class A>
struct ScaledGroupsSm90 {
  static void launch(const ScaledGemmParams& params, const GemmParams& epilogue, const ScaledPlan& plan,
                     const TensorMaps& maps, void* stream);
};

// Of groups of terms; both are of float8_e4m3: instantiations/scaled_terms_sm90_e4m3.cu.
template <class A>
struct ScaledTermsSm90 {
  static void launch(const ScaledGemmParams& params, const GemmParams& epilogue, const ScaledPlan& plan,
                     const TensorMaps& maps, void* stream);
};

}  // namespace sm90

// Launches the product on `stream`, an rt::Stream, as planned for these parameters (sm90::choose_scaled_plan).
void launch_scaled_gemm_sm90(const ScaledGemmParams& params, sm90::ScaledPlan plan, const AllocateWorkspace& allocate,
                             void* stream);

}  // namespace cuda_ext
