// Operands of scaled_mm.
#pragma once

#include "ops/op.h"

namespace cuda_ext {

bool is_fp8(at::ScalarType type);

// Whether the kernels of FP8 read a matrix in place: contiguous along its second dim, lines aligned.
bool has_aligned_lines(const Tensor& matrix);

}  // namespace cuda_ext
