// Parameters of matrix products with fused epilogues, and of the elementwise gradient of an activation. csrc/ops fills
// these structs and calls the launchers; all kernels, on any device, use the same structs.
#pragma once

#include "base/dtype.h"
#include "cpu/isa.h"
#include "gemm/activation.h"

namespace cuda_ext {

// Batch dims are stored innermost first and merged where strides permit, so this limit is rarely reached.
constexpr int kMaxBatchDims = 8;

// A matrix that is read in place, with any strides (in elements; 0 broadcasts). Absent if data is null.
struct Operand {
  const void* data = nullptr;
  Dtype dtype = Dtype::kFloat32;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
  int64_t batch_strides[kMaxBatchDims] = {};
};

// A contiguous row-major matrix that is written, batches one after the other. Absent if data is null.
struct Output {
  void* data = nullptr;
  Dtype dtype = Dtype::kFloat32;
};

// A grouped product: its only batch dim are groups, of which each has a part [ends[g - 1], ends[g]) of one other dim.
// Parts that are outside of it are cut off; an end below the one before is an empty group.
struct Groups {
  enum class Cut : uint8_t {
    kNone,   // not a grouped product
    kRows,   // m: a (m, k), b (count, k, n), bias (count, n), out (m, n). The rows after the last group are 0.
    kTerms,  // k: a (m, k), b (k, n), out (count, m, n). The terms after the last group are not used.
  };
  Cut cut = Cut::kNone;
  const int32_t* ends = nullptr;  // (count,), where the operands are
  int64_t count = 0;
  // If not null, row i of a (kRows) or b (kTerms) is row indices[i] of `source_rows` in memory. Rows of other indices
  // are 0 on a GPU, and an error on the CPU.
  const int32_t* indices = nullptr;  // (m,) or (k,), where the operands are
  int64_t source_rows = 0;
};

// Forward, for each of the batches:  z = alpha * sum_r a_r @ b_r + beta * c + bias        (m, n), gated: (m, 2n)
//                                    out = activation(z) + residual                       (m, n)
//                           gated:   out = activation(z[:, :n]) * z[:, n:] + residual     (m, n)
// Backward (preact.data set; one batch): with g = alpha * sum_r a_r @ b_r, the gradient of h = activation(z),
//                                    out = g * activation'(z), hidden = h                 (m, n)
//                           gated:   h = activation(z[:, :n]) * z[:, n:], out is the gradient of z    (m, 2n)
// and bias_grad is the sum of out over its rows.
// c may be out itself, with the same dtype and strides, to accumulate a product in place: each element is read by the
// thread that writes it, before the write. Otherwise outputs must not overlap inputs.
// The sum over r runs over the reduced batch dims, which yields the gradient of a broadcast operand. Batch and reduced
// sizes are at least 1; k may be 0, and then sums are 0.
struct GemmParams {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  int batch_dims = 0;
  int64_t batch_sizes[kMaxBatchDims] = {};
  int reduced_dims = 0;
  int64_t reduced_sizes[kMaxBatchDims] = {};
  int64_t reduced_strides_a[kMaxBatchDims] = {};
  int64_t reduced_strides_b[kMaxBatchDims] = {};

  Operand a;  // (batch, m, k)
  Operand b;  // (batch, k, n), gated: (batch, k, 2n)
  double alpha = 1.0;
  double beta = 1.0;
  Activation activation = Activation::kNone;
  bool gated = false;
  Groups groups;                 // on a GPU: of operands as GroupedGemm (groups_sm80.cuh) needs them
  bool batch_invariant = false;  // the bits of a row must not depend on m, nor on the other rows and batches
  Output out;

  Operand c;          // (batch, m, n), gated: absent
  Operand bias;       // (n,) by column_stride, gated: (2n,)
  Operand residual;   // (batch, m, n)
  Output preact_out;  // z

  Operand preact;    // z; selects the backward epilogue
  Output hidden;     // (m, n)
  Output bias_grad;  // (n,), gated: (2n,)
};

// The gradient through an activation and the bias before it, in one pass over grad_out (rows, n):
// grad_preact = grad_out * activation'(preact), bias_grad = the sum of its rows. Gated as in GemmParams.
// Without grad_preact (and then without an activation) only the sum is formed.
struct ActivationGradParams {
  int64_t rows = 0;
  int64_t n = 0;
  Activation activation = Activation::kNone;
  bool gated = false;
  Operand grad_out;
  Operand preact;      // (rows, n), gated: (rows, 2n)
  Output grad_preact;  // as preact
  Output bias_grad;    // (n,), gated: (2n,)
};

CUDA_EXT_CPU_LAUNCHER_WITH_BFLOAT16(launch_gemm, GemmParams)
CUDA_EXT_CPU_LAUNCHER(launch_activation_grad, ActivationGradParams)

}  // namespace cuda_ext
