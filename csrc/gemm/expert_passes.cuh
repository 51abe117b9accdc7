// The passes between the products of a mixture of experts: weighted sums of the results of a token's experts, and the
// gradient through gate and weights. Each reads its operands once and writes its results once.
//
// Problem        CombineParams and GateGradParams in expert_passes.h.
// Traffic        In rows of n elements: combine_rows reads top_k and writes one for each token; gate_grad reads 2 and
//                writes 2 for each row of the product, gated 3 and 3.
// Threads        A thread has 16 bytes of a row, a warp 512 adjacent bytes. combine_rows: a warp has those of one
//                token, and up to kRowsAtOnce results of it in flight. gate_grad: a warp has a whole row, because one
//                sum is of it, and kStepsAtOnce steps of 512 bytes in flight.
// Order          combine_rows adds in the order of a token's experts; gate_grad each lane its columns, then the lanes:
//                the bits depend on the row and n alone.
// Barriers       None: no thread reads what another wrote. Shuffles add the lanes.
// Unaligned      If rows do not all begin at multiples of 16 bytes, and in the last part of a row, elements are
//                loaded and stored one by one.
#pragma once

#include "arch/warp.cuh"
#include "gemm/activation.cuh"
#include "gemm/expert_passes.h"

namespace cuda_ext::expert_passes {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / arch::kWarpSize;
constexpr int kRowsAtOnce = 4;
constexpr int kStepsAtOnce = 2;

// A thread's part of a row: kCount adjacent elements, of which the row may have fewer.
template <class T>
struct RowVector {
  static constexpr int kCount = 16 / sizeof(T);
  static constexpr int kWarpColumns = arch::kWarpSize * kCount;

  int count;      // of elements
  bool is_whole;  // kCount, aligned

  // `are_aligned`: whether rows begin at multiples of 16 bytes.
  DEVICE RowVector(int64_t column, int64_t n, bool are_aligned) {
    const int64_t left = n - column;
    count = left <= 0 ? 0 : left < kCount ? int(left) : kCount;
    is_whole = are_aligned && count == kCount;
  }

  // As they are in memory; 0 beyond the row.
  DEVICE arch::Words4 load(const T* from) const {
    if (is_whole) return arch::load_global_streaming<arch::Words4>(from);
    float x[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = i < count ? arch::to_float(arch::load_global_streaming<T>(from + i)) : 0.0f;
    return arch::words_of<T>(x);
  }
  DEVICE void store(T* to, const float (&x)[kCount]) const {
    if (is_whole) return arch::store_global(to, arch::words_of<T>(x));
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (i < count) arch::store_global(to + i, arch::from_float<T>(x[i]));
  }
};

DEVICE bool are_aligned(const void* data, int64_t row_bytes) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_bytes % 16 == 0;
}
template <class T>
DEVICE bool are_aligned(const Operand& matrix) {
  return are_aligned(matrix.data, matrix.row_stride * int64_t(sizeof(T)));
}

// Grid: blocks of kWarps tiles, which are parts of 512 bytes of a token's row.
template <class T>
GLOBAL(kThreads, 4)
combine_rows(GRID_CONSTANT CombineParams params, int column_tiles) {
  using Vector = RowVector<T>;
  const int tile = arch::block_x() * kWarps + arch::thread_index() / arch::kWarpSize;
  const int64_t token = tile / column_tiles;
  if (token >= params.tokens) return;
  const int64_t column = tile % column_tiles * Vector::kWarpColumns + arch::lane_index() * Vector::kCount;
  const Vector vector(column, params.n,
                      are_aligned<T>(params.results) && are_aligned(params.out.data, params.n * int64_t(sizeof(T))));
  const T* const results = static_cast<const T*>(params.results.data) + column;
  const float* const weights = static_cast<const float*>(params.weights);
  const int64_t first_pair = token * params.top_k;
  float sum[Vector::kCount] = {};
#pragma unroll 1
  for (int64_t first = 0; first < params.top_k; first += kRowsAtOnce) {
    const int64_t pair = first_pair + first;
    int64_t rows[kRowsAtOnce];
    float weight[kRowsAtOnce];
    arch::Words4 words[kRowsAtOnce] = {};
#pragma unroll
    for (int j = 0; j < kRowsAtOnce; ++j) {
      const bool exists = first + j < params.top_k;
      rows[j] = exists ? int64_t(arch::load_global<uint64_t>(params.rows + pair + j)) : 0;
      weight[j] = exists && weights != nullptr ? arch::load_global<float>(weights + pair + j) : 1.0f;
    }
#pragma unroll
    for (int j = 0; j < kRowsAtOnce; ++j)
      if (first + j < params.top_k) words[j] = vector.load(results + rows[j] * params.results.row_stride);
#pragma unroll
    for (int j = 0; j < kRowsAtOnce; ++j)
      if (first + j < params.top_k) {
        float x[Vector::kCount];
        arch::unpack<T>(words[j], x);
#pragma unroll
        for (int i = 0; i < Vector::kCount; ++i)
          sum[i] = first + j == 0 ? weight[j] * x[i] : arch::fma(weight[j], x[i], sum[i]);
      }
  }
  vector.store(static_cast<T*>(params.out.data) + token * params.n + column, sum);
}

// The pointers of a row in gate_grad; null for what is not wanted.
template <class T>
struct GateRow {
  const T* grad_hidden;
  const T* product;
  T* grad_product;
  T* weighted_hidden;
  float weight;

  DEVICE GateRow(const GateGradParams& params, int64_t row, float weight) : weight(weight) {
    const auto row_of = [row](const Output& matrix, int64_t width) {
      return matrix.data == nullptr ? nullptr : static_cast<T*>(matrix.data) + row * width;
    };
    grad_hidden = static_cast<const T*>(params.grad_hidden.data) + row * params.grad_hidden.row_stride;
    product = static_cast<const T*>(params.product.data) + row * params.product.row_stride;
    grad_product = row_of(params.grad_product, params.gated ? 2 * params.n : params.n);
    weighted_hidden = row_of(params.weighted_hidden, params.n);
  }
};

// Stores the results for one vector; returns its part of the sum of g * h. `up`: of a gated product.
template <class T>
DEVICE float gate_grad_of_vector(const GateGradParams& params, const GateRow<T>& row, const RowVector<T>& vector,
                                 int64_t column, const arch::Words4& grad_words, const arch::Words4& gate_words,
                                 const arch::Words4& up_words) {
  constexpr int kCount = RowVector<T>::kCount;
  float grad[kCount], gate[kCount], up[kCount], grad_up[kCount];
  arch::unpack<T>(grad_words, grad);
  arch::unpack<T>(gate_words, gate);
  arch::unpack<T>(up_words, up);
  float dot = 0.0f;
  epilogue::with_activation(params.activation, [&](auto f) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const auto y = f.both(gate[i]);
      const float linear = params.gated ? up[i] : 1.0f, weighted = row.weight * grad[i];
      const float hidden = y.value * linear;
      dot = arch::fma(grad[i], hidden, dot);
      gate[i] = row.weight * hidden;
      grad_up[i] = weighted * y.value;
      grad[i] = weighted * linear * y.derivative;
    }
  });
  if (row.weighted_hidden != nullptr) vector.store(row.weighted_hidden + column, gate);
  if (row.grad_product != nullptr) {
    vector.store(row.grad_product + column, grad);
    if (params.gated) vector.store(row.grad_product + params.n + column, grad_up);
  }
  return dot;
}

// Grid: blocks of kWarps rows.
template <class T>
GLOBAL(kThreads, 2)
gate_grad(GRID_CONSTANT GateGradParams params) {
  using Vector = RowVector<T>;
  const int64_t index = int64_t(arch::block_x()) * kWarps + arch::thread_index() / arch::kWarpSize;
  if (index >= params.rows) return;
  const int64_t pair = int64_t(arch::load_global<uint64_t>(params.pairs + index));
  const GateRow<T> row(params, index, arch::load_global<float>(static_cast<const float*>(params.weights) + pair));
  // If the rows of n elements are aligned, so are all outputs, which are new tensors.
  const bool aligned = are_aligned<T>(params.grad_hidden) && are_aligned<T>(params.product) &&
                       are_aligned(params.grad_product.data, params.n * int64_t(sizeof(T))) &&
                       are_aligned(params.weighted_hidden.data, 0);
  float dot = 0.0f;
#pragma unroll 1
  for (int64_t first = arch::lane_index() * Vector::kCount; first < params.n;
       first += kStepsAtOnce * Vector::kWarpColumns) {
    arch::Words4 grad[kStepsAtOnce] = {}, gate[kStepsAtOnce] = {}, up[kStepsAtOnce] = {};
#pragma unroll
    for (int s = 0; s < kStepsAtOnce; ++s) {
      const int64_t column = first + s * Vector::kWarpColumns;
      const Vector vector(column, params.n, aligned);
      if (vector.count == 0) continue;
      grad[s] = vector.load(row.grad_hidden + column);
      gate[s] = vector.load(row.product + column);
      if (params.gated) up[s] = vector.load(row.product + params.n + column);
    }
#pragma unroll
    for (int s = 0; s < kStepsAtOnce; ++s) {
      const int64_t column = first + s * Vector::kWarpColumns;
      const Vector vector(column, params.n, aligned);
      if (vector.count > 0) dot += gate_grad_of_vector(params, row, vector, column, grad[s], gate[s], up[s]);
    }
  }
  if (params.grad_weights == nullptr) return;
  dot = arch::sum_over_lanes(dot);
  if (arch::lane_index() == 0) arch::store_global(static_cast<float*>(params.grad_weights) + pair, dot);
}

}  // namespace cuda_ext::expert_passes
