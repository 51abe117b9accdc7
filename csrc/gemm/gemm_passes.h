// The small kernels around a product: before it if blocks divide k, after it if there are column sums, and the gradient
// of an activation. On `stream`, an rt::Stream.
#pragma once

#include "base/workspace.h"
#include "gemm/gemm.h"

namespace cuda_ext {

// words (count,) = 0.
void launch_clear_words(uint32_t* words, int count, void* stream);

// The rows of out (rows, row_bytes), of whole units of 16 bytes, after the last of the groups of rows = 0.
void launch_clear_rest(const Groups& groups, int64_t rows, int64_t row_bytes, void* out, void* stream);

// out (width,) = the column sums of block_sums (blocks, width).
void launch_add_block_sums(const float* block_sums, int64_t blocks, int64_t width, const Output& out, void* stream);

// The gradient through an activation and a bias, where no product has it in its epilogue. Any dtypes except float64.
void launch_activation_grad_cuda(const ActivationGradParams& params, const AllocateWorkspace& allocate, void* stream);

}  // namespace cuda_ext
