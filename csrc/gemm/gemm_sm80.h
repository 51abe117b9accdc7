// The launcher of the GEMM on mma.sync (sm_80 and later).
#pragma once

#include "gemm/problem.h"
#include "base/workspace.h"

namespace cuda_ext {

// Whether the kernels can read `operand` (rows, columns) in place; if not, the caller must make it contiguous first.
inline bool gemm_sm80_reads(const Operand& operand, int64_t rows, int64_t columns) {
  return operand.column_stride == 1 || operand.row_stride == 1 || rows == 1 || columns == 1;
}

// One instantiation per storage type and product, in instantiations/gemm_sm80_{f16,bf16,f32,tf32}.cu.
template <class T, Float32Product float32 = Float32Product::kThreeTf32>
struct GemmSm80 {
  static void launch(const GemmParams& params, const Restriction& only, const AllocateWorkspace& allocate,
                     void* stream);
};

// Without these, each instantiation would also instantiate the others, which launch_gemm_sm80 names.
extern template struct GemmSm80<half_t>;
extern template struct GemmSm80<bfloat16_t>;
extern template struct GemmSm80<float>;
extern template struct GemmSm80<float, Float32Product::kTf32>;

// Launches the product on `stream`, an rt::Stream. a and b have the same dtype; the others any except float64.
inline void launch_gemm_sm80(const GemmParams& params, const AllocateWorkspace& allocate, void* stream,
                             Float32Product float32 = Float32Product::kThreeTf32, const Restriction& only = {}) {
  const auto launch = [&](auto gemm) { gemm.launch(params, only, allocate, stream); };
  switch (params.a.dtype) {
    case Dtype::kFloat16: return launch(GemmSm80<half_t>{});
    case Dtype::kBFloat16: return launch(GemmSm80<bfloat16_t>{});
    case Dtype::kFloat32:
      return float32 == Float32Product::kTf32 ? launch(GemmSm80<float, Float32Product::kTf32>{})
                                              : launch(GemmSm80<float>{});
    default: throw std::invalid_argument("expected float16, bfloat16 or float32 operands, got float64");
  }
}

}  // namespace cuda_ext
