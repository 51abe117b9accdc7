// The launcher of grouped products (Groups in gemm.h) on mma.sync (sm_80 and later).
#pragma once

#include "gemm/problem.h"

namespace cuda_ext {

// One instantiation per storage type and product, in instantiations/grouped_gemm_sm80_{f16,bf16,f32,tf32}.cu.
template <class T, Float32Product float32 = Float32Product::kThreeTf32>
struct GroupedGemmSm80 {
  static void launch(const GemmParams& params, void* stream);
};

extern template struct GroupedGemmSm80<half_t>;
extern template struct GroupedGemmSm80<bfloat16_t>;
extern template struct GroupedGemmSm80<float>;
extern template struct GroupedGemmSm80<float, Float32Product::kTf32>;

// Launches the product on `stream`, an rt::Stream. Its epilogue is without c and residual.
inline void launch_grouped_gemm_sm80(const GemmParams& params, void* stream, Float32Product float32) {
  switch (params.a.dtype) {
    case Dtype::kFloat16: return GroupedGemmSm80<half_t>::launch(params, stream);
    case Dtype::kBFloat16: return GroupedGemmSm80<bfloat16_t>::launch(params, stream);
    case Dtype::kFloat32:
      return float32 == Float32Product::kTf32 ? GroupedGemmSm80<float, Float32Product::kTf32>::launch(params, stream)
                                              : GroupedGemmSm80<float>::launch(params, stream);
    default: throw std::invalid_argument("expected float16, bfloat16 or float32 operands, got float64");
  }
}

}  // namespace cuda_ext
