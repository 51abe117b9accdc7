// Operands of scaled_mm and scaled_grouped_mm.
#pragma once

#include "gemm/scaled_gemm.h"
#include "launchers/cuda_kernels.h"
#include "ops/op.h"

namespace cuda_ext {

constexpr int64_t kAlignment = 16;  // of the lines that kernels read, in bytes

inline int64_t blocks_of(int64_t size) { return (size + kScaleBlock - 1) / kScaleBlock; }

bool is_fp8(at::ScalarType type);
void check_fp8(const char* op, const char* argument, const Tensor& tensor);

// The values of torch.nn.functional.ScalingType.
enum Scaling : int64_t { kTensorWise = 0, kRowWise = 1, kBlockWise1x128 = 4, kBlockWise128x128 = 5 };

// The scales of an operand with `lines` lines (rows of a, columns of b), as (lines that have their own, blocks of k).
struct ScaleLines {
  Tensor scales;
  int line_shift;  // 2^line_shift lines share one
  bool has_blocks;

  Scales params() const {
    const auto stride = [&](int64_t dim) { return scales.size(dim) == 1 ? 0 : scales.stride(dim); };
    return {scales.const_data_ptr<float>(), line_shift, has_blocks, stride(0), stride(1)};
  }
  // (lines, 1) of a block of k, for `count` lines.
  Tensor of_block(int64_t block, int64_t count) const {
    const Tensor column = scales.narrow(1, has_blocks ? block : 0, 1);
    return line_shift == 0 ? column : column.repeat_interleave(int64_t(1) << line_shift, 0).narrow(0, 0, count);
  }
};

// The layouts are PyTorch's: scales of lines are (lines, blocks of k), those of 128 x 128 are (blocks of k, blocks of
// lines), of either operand.
ScaleLines check_scales(const char* op, const char* argument, const Tensor& scales, int64_t scaling,
                        const Tensor& operand, bool is_b);

// Whether the kernels of FP8 read a matrix in place: contiguous along its second dim, lines aligned.
bool has_aligned_lines(const Tensor& matrix);
// A matrix of FP8, (lines, elements), whose lines are aligned.
Tensor empty_lines(const Tensor& beside, int64_t lines, int64_t elements, at::ScalarType type);
Tensor with_aligned_lines(const Tensor& matrix);

// Whether the current device has a kernel for the product, which launch_scaled then runs.
bool has_kernel(const CudaKernels& kernels, const ScaledGemmParams& params);
void launch_scaled(const char* op, const CudaKernels& kernels, const ScaledGemmParams& params, at::Device device);

}  // namespace cuda_ext
