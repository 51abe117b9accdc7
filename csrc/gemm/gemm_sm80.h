// Products on tensor cores that read their operands from registers (sm_80 and later): what the bindings call.
#pragma once

#include "gemm/gemm.h"
#include "gemm/workspace.h"

namespace cuda_ext {

// How float32 operands are multiplied: rounded to tf32 (11 bits), or as sums of two tf32 (about 22 bits) in three
// products, where an infinity gives NaN.
enum class Float32Product : uint8_t { kThreeTf32, kTf32 };

// Whether the kernels read `operand` (rows, columns) in place; if not the caller makes it contiguous first.
inline bool gemm_sm80_reads(const Operand& operand, int64_t rows, int64_t columns) {
  return operand.column_stride == 1 || operand.row_stride == 1 || rows == 1 || columns == 1;
}

// One instantiation per storage type, in gemm_sm80_{f16,bf16,f32}.cu.
template <class T>
size_t gemm_sm80_workspace_of(const GemmParams& params, Float32Product float32);
template <class T>
void launch_gemm_sm80_of(const GemmParams& params, Workspace workspace, void* stream, Float32Product float32);
extern template size_t gemm_sm80_workspace_of<half_t>(const GemmParams&, Float32Product);
extern template size_t gemm_sm80_workspace_of<bfloat16_t>(const GemmParams&, Float32Product);
extern template size_t gemm_sm80_workspace_of<float>(const GemmParams&, Float32Product);
extern template void launch_gemm_sm80_of<half_t>(const GemmParams&, Workspace, void*, Float32Product);
extern template void launch_gemm_sm80_of<bfloat16_t>(const GemmParams&, Workspace, void*, Float32Product);
extern template void launch_gemm_sm80_of<float>(const GemmParams&, Workspace, void*, Float32Product);

// Bytes of workspace that a launch with these parameters needs. Pointers are not followed, but tell what is present.
inline size_t gemm_sm80_workspace(const GemmParams& params, Float32Product float32 = Float32Product::kThreeTf32) {
  switch (params.a.dtype) {
    case Dtype::kFloat16: return gemm_sm80_workspace_of<half_t>(params, float32);
    case Dtype::kBFloat16: return gemm_sm80_workspace_of<bfloat16_t>(params, float32);
    case Dtype::kFloat32: return gemm_sm80_workspace_of<float>(params, float32);
    default: throw std::invalid_argument("gemm_sm80: expected float16, bfloat16 or float32 operands, got float64");
  }
}

// Starts what GemmParams describes on `stream`, an rt::Stream. a and b have one dtype; the others any but float64.
inline void launch_gemm_sm80(const GemmParams& params, Workspace workspace, void* stream,
                             Float32Product float32 = Float32Product::kThreeTf32) {
  switch (params.a.dtype) {
    case Dtype::kFloat16: return launch_gemm_sm80_of<half_t>(params, workspace, stream, float32);
    case Dtype::kBFloat16: return launch_gemm_sm80_of<bfloat16_t>(params, workspace, stream, float32);
    case Dtype::kFloat32: return launch_gemm_sm80_of<float>(params, workspace, stream, float32);
    default: throw std::invalid_argument("gemm_sm80: expected float16, bfloat16 or float32 operands, got float64");
  }
}

}  // namespace cuda_ext
