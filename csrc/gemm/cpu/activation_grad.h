// The gradient through an activation and the bias before it, as ActivationGradParams describes it.
#pragma once

#include "gemm/cpu/epilogue.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

// sums (num_row_blocks, n) = the sums over the rows of each row block of `matrix` (rows, n), in order.
template <class Storage, class T = Compute<Storage>>
void sum_row_blocks(const Storage* matrix, int64_t row_stride, int64_t rows, int64_t n, T* sums) {
  constexpr int64_t kSteps = 8;  // rows that one pass over the sums adds
  static_assert(kRowBlock % kSteps == 0);
  for_row_blocks(rows, n, 4 * kLanes<T>, 32768, [&](int64_t begin, int64_t end, int64_t first, int64_t last) {
    for (int64_t row = begin; row < end; row += kSteps) {
      const int64_t steps = std::min(kSteps, end - row);
      const Storage* const from = matrix + row * row_stride + first;
      T* const to = sums + row / kRowBlock * n + first;
      for_vectors<T>(last - first, [&](int64_t j, int64_t count) {
        Vec<T> sum = row == begin ? Vec<T>{} : load_partial(to + j, count);
        if (steps == kSteps) {
#pragma GCC unroll 8
          for (int64_t i = 0; i < kSteps; ++i) sum += load_partial(from + i * row_stride + j, count);
        } else {
          for (int64_t i = 0; i < steps; ++i) sum += load_partial(from + i * row_stride + j, count);
        }
        store_partial(to + j, sum, count);
      });
    }
  });
}

// A bias gradient alone: bias_grad (n,) = the sum of the rows of grad_out. If rows are short and contiguous, kFold rows
// are treated as one long row; its sums have the memory layout of the sums of kFold row blocks.
template <class T>
void run_column_sums(const ActivationGradParams& params) {
  constexpr int64_t kFold = kLanes<T>;
  const Operand& grad = params.grad_out;
  const int64_t fold = params.n <= 64 && grad.row_stride == params.n ? kFold : 1;
  const int64_t rows = params.rows / fold, rest = params.rows % fold, n = params.n * fold;
  const int64_t blocks = num_row_blocks(rows) * fold + (rest > 0 ? 1 : 0);
  const Scratch scratch(blocks * params.n * int64_t(sizeof(T)));
  T* const sums = scratch.as<T>();
  with_storage<T>(grad.dtype, [&](auto* type) {
    const auto* data = static_cast<decltype(type)>(const_cast<void*>(grad.data));
    sum_row_blocks(data, grad.row_stride * fold, rows, n, sums);
    if (rest > 0) sum_row_blocks(data + rows * n, grad.row_stride, rest, params.n, sums + (blocks - 1) * params.n);
  });
  sum_rows_of(sums, blocks, params.n, params.bias_grad);
}

template <class T>
void run_activation_grad(const ActivationGradParams& params) {
  const bool only_sums = params.bias_grad.data != nullptr && !params.gated && params.grad_preact.data == nullptr;
  if (only_sums && (params.grad_out.column_stride == 1 || params.n == 1)) return run_column_sums<T>(params);
  const bool sums_bias = params.bias_grad.data != nullptr;
  const int64_t width = params.gated ? 2 * params.n : params.n;
  const Scratch bias_sums(sums_bias ? num_row_blocks(params.rows) * width * int64_t(sizeof(T)) : 0);
  const BackwardEpilogue<T> epilogue{T(1),          params.activation,  params.gated, params.n,
                                     params.preact, params.grad_preact, {},           bias_sums.as<T>()};
  for_tiles_of<T>(params.grad_out, params.rows, params.n, epilogue);
  if (sums_bias) sum_rows_of(bias_sums.as<T>(), num_row_blocks(params.rows), width, params.bias_grad);
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
