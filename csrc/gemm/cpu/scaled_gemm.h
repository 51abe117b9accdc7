// Scaled products on the CPU. A task is a part of the output; its sums stay in L2. It goes through k in blocks: it
// converts its lines of a and b to bfloat16, in which both formats of FP8 are exact, multiplies them (launch_gemm), and
// adds the product, times the scales of the block, to the sums.
#pragma once

#include "gemm/cpu/addresses.h"
#include "gemm/scaled_gemm.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

template <class F>
CUDA_EXT_INLINE void with_float8(Dtype dtype, F&& f) {
  if (dtype == Dtype::kFloat8E5M2) return f(static_cast<float8_e5m2_t*>(nullptr));
  f(static_cast<float8_e4m3_t*>(nullptr));
}

// Lines of an operand as bfloat16, contiguous along the dim along which the operand is.
struct ConvertedLines {
  bfloat16_t* data;
  int64_t line_stride, k_stride;

  // `lines` lines from `first` on, and `k` elements from `first_k` on. The strides are those of the operand.
  void convert(const Operand& operand, int64_t from_line_stride, int64_t from_k_stride, int64_t first, int64_t lines,
               int64_t first_k, int64_t k) {
    const bool along_lines = from_line_stride == 1 && from_k_stride != 1;
    const int64_t rows = along_lines ? k : lines, columns = along_lines ? lines : k;
    const int64_t row_stride = along_lines ? from_k_stride : from_line_stride;
    const int64_t column_stride = along_lines ? from_line_stride : from_k_stride;
    line_stride = along_lines ? 1 : columns;
    k_stride = along_lines ? columns : 1;
    with_float8(operand.dtype, [&](auto* type) {
      using Storage = std::remove_pointer_t<decltype(type)>;
      const auto* from = static_cast<const Storage*>(operand.data) + first * from_line_stride + first_k * from_k_stride;
      bfloat16_t* to = data;
      for (int64_t i = 0; i < rows; ++i, from += row_stride, to += columns)
        for_vectors<float>(columns, [&](int64_t j, int64_t count) {
          if (column_stride == 1) return store_partial(to + j, load_partial(from + j, count), count);
          Storage values[kLanes<float>] = {};
          for (int64_t n = 0; n < count; ++n) values[n] = from[(j + n) * column_stride];
          store_partial(to + j, load(values), count);
        });
    });
  }
};

// Computes parts of the output, one after the other; a thread allocates its buffers once for all of its parts.
class ScaledTask {
 public:
  static constexpr int64_t kRows = 240, kColumns = 480;  // at most
  static constexpr int64_t kLongBlock = 1024;            // of k, if scales do not depend on it

  explicit ScaledTask(const ScaledGemmParams& params)
      : p_(params),
        block_k_(params.has_blocks() ? kScaleBlock : kLongBlock),
        lines_((kRows + kColumns) * block_k_ * int64_t(sizeof(bfloat16_t))),
        sums_((2 * kRows + 1) * kColumns * int64_t(sizeof(float))) {}

  void run(int64_t row, int64_t rows, int64_t column, int64_t columns) const {
    float *const sums = sums_.as<float>(), *const products = sums + kRows * kColumns;
    const bool blocks = p_.has_blocks();
    if (p_.k == 0 || blocks) std::fill_n(sums, rows * columns, 0.0f);
    for (int64_t k = 0; k < p_.k; k += block_k_) {
      multiply(row, rows, column, columns, k, !blocks && k > 0, blocks ? products : sums);
      if (blocks) scale(row, rows, column, columns, k / kScaleBlock, products, sums);
    }
    // A sum of no terms is 0, whatever the scales.
    if (!blocks && p_.k > 0) scale(row, rows, column, columns, 0, sums, nullptr);
    store_part(row, rows, column, columns, sums);
  }

 private:
  // out (rows, columns) = or += the product of a block of k.
  void multiply(int64_t row, int64_t rows, int64_t column, int64_t columns, int64_t first_k, bool accumulate,
                float* out) const {
    const int64_t k = std::min(block_k_, p_.k - first_k);
    ConvertedLines a{lines_.as<bfloat16_t>(), 0, 0}, b{a.data + kRows * block_k_, 0, 0};
    a.convert(p_.a, p_.a.row_stride, p_.a.column_stride, row, rows, first_k, k);
    b.convert(p_.b, p_.b.column_stride, p_.b.row_stride, column, columns, first_k, k);
    GemmParams product;
    product.m = rows;
    product.n = columns;
    product.k = k;
    product.a = {a.data, Dtype::kBFloat16, a.line_stride, a.k_stride, {}};
    product.b = {b.data, Dtype::kBFloat16, b.k_stride, b.line_stride, {}};
    product.out = {out, Dtype::kFloat32};
    if (accumulate) product.c = {out, Dtype::kFloat32, columns, 1, {}};
    cuda_ext::launch_gemm(product);  // with pairs of bfloat16, where the CPU has them
  }

  // values (rows, columns) times their scales: added to `sums`, or in place if that is null.
  void scale(int64_t row, int64_t rows, int64_t column, int64_t columns, int64_t block, float* values,
             float* sums) const {
    float* const of_columns = sums_.as<float>() + 2 * kRows * kColumns;
    for (int64_t j = 0; j < columns; ++j) of_columns[j] = *p_.scale_b.at(column + j, block);
    for (int64_t i = 0; i < rows; ++i, values += columns) {
      const float of_row = *p_.scale_a.at(row + i, block);
      for_vectors<float>(columns, [&](int64_t j, int64_t count) {
        const Vec<float> scaled = load_partial(values + j, count) * of_row * load_partial(of_columns + j, count);
        float* const to = sums == nullptr ? values + j : sums + i * columns + j;
        store_partial(to, sums == nullptr ? scaled : load_partial(to, count) + scaled, count);
      });
    }
  }

  void store_part(int64_t row, int64_t rows, int64_t column, int64_t columns, float* sums) const {
    const auto add = [&](const Operand& operand, int64_t row_stride, float factor) {
      if (operand.data == nullptr) return;
      with_storage<float>(operand.dtype, [&](auto* type) {
        const auto* const data = static_cast<decltype(type)>(const_cast<void*>(operand.data));
        for (int64_t i = 0; i < rows; ++i)
          for (int64_t j = 0; j < columns; ++j)
            sums[i * columns + j] +=
                factor * to_compute(data[(row + i) * row_stride + (column + j) * operand.column_stride]);
      });
    };
    add(p_.bias, 0, 1);
    add(p_.c, p_.c.row_stride, float(p_.beta));
    with_storage<float>(p_.out.dtype, [&](auto* type) {
      auto* to = static_cast<decltype(type)>(p_.out.data) + row * p_.n + column;
      for (int64_t i = 0; i < rows; ++i, to += p_.n, sums += columns)
        for_vectors<float>(
            columns, [&](int64_t j, int64_t count) { store_partial(to + j, load_partial(sums + j, count), count); });
    });
  }

  const ScaledGemmParams& p_;
  const int64_t block_k_;
  const Scratch lines_;  // (kRows + kColumns, block_k): a's, b's
  const Scratch sums_;   // (2 * kRows + 1, kColumns): sums, products of a block, scales of columns
};

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
