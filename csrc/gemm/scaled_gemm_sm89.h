// The launcher of scaled products on mma.sync (sm_89 and later).
#pragma once

#include "gemm/scaled_gemm.h"

namespace cuda_ext {

// One instantiation per file: instantiations/scaled_gemm_sm89_{e4m3,e5m2}_{e4m3,e5m2}.cu, after the types of a and b.
template <class A, class B>
struct ScaledGemmSm89 {
  static void launch(const ScaledGemmParams& params, void* stream);
};

// Of groups of rows; b is of float8_e4m3. One instantiation per file: instantiations/scaled_groups_sm89_{e4m3,e5m2}.cu.
template <class A>
struct ScaledGroupsSm89 {
  static void launch(const ScaledGemmParams& params, void* stream);
};

extern template struct ScaledGemmSm89<float8_e4m3_t, float8_e4m3_t>;
extern template struct ScaledGemmSm89<float8_e4m3_t, float8_e5m2_t>;
extern template struct ScaledGemmSm89<float8_e5m2_t, float8_e4m3_t>;
extern template struct ScaledGemmSm89<float8_e5m2_t, float8_e5m2_t>;
extern template struct ScaledGroupsSm89<float8_e4m3_t>;
extern template struct ScaledGroupsSm89<float8_e5m2_t>;

// Launches the product on `stream`, an rt::Stream, where sm80::scaled_refusal is empty.
inline void launch_scaled_gemm_sm89(const ScaledGemmParams& params, void* stream) {
  const auto launch = [&]<class A>(A) {
    if (params.groups.cut == Groups::Cut::kRows) return ScaledGroupsSm89<A>::launch(params, stream);
    if (params.b.dtype == Dtype::kFloat8E4M3) return ScaledGemmSm89<A, float8_e4m3_t>::launch(params, stream);
    ScaledGemmSm89<A, float8_e5m2_t>::launch(params, stream);
  };
  if (params.a.dtype == Dtype::kFloat8E4M3) return launch(float8_e4m3_t{});
  launch(float8_e5m2_t{});
}

}  // namespace cuda_ext
