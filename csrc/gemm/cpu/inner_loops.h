// The inner loops of in_place.h: products with b read in place.
#pragma once

#include "gemm/cpu/panels.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

// result (rows, vectors * lanes) = or, if `add`, += start (0 if null) + whatever add_to(sum) adds to the sum.
template <class T, int rows, int vectors, class F>
CUDA_EXT_INLINE void sum_tile(const T* start, T* result, int64_t result_stride, bool add, F&& add_to) {
  Vec<T> sum[rows][vectors];
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < vectors; ++j) sum[i][j] = Vec<T>{};
  }
  if (start != nullptr) {
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < vectors; ++j) sum[i][j] = load(start + i * kPanelColumns<T> + j * kLanes<T>);
    }
  }
  add_to(sum);
  if (add) {
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < vectors; ++j) sum[i][j] += load(result + i * result_stride + j * kLanes<T>);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < vectors; ++j) store(result + i * result_stride + j * kLanes<T>, sum[i][j]);
  }
}

// sum_tile of a (rows, k) @ b (k, vectors * lanes), b row-major with rows ldb apart.
template <class T, int rows, int vectors>
void multiply_rows(int64_t k, const T* a, int64_t a_row, int64_t a_col, const T* b, int64_t ldb, const T* start,
                   T* result, int64_t result_stride, bool add) {
  sum_tile<T, rows, vectors>(start, result, result_stride, add,
                             [&](auto& sum) { add_products<T, rows, vectors>(k, a, a_row, a_col, b, ldb, sum); });
}

// Lane i = the sum of the lanes of vectors[i], added in pairs.
template <class T>
CUDA_EXT_INLINE Vec<T> sums_of_lanes(Vec<T> (&vectors)[kLanes<T>]) {
  transpose<T>(vectors);
#pragma GCC unroll 4
  for (int width = kLanes<T> / 2; width > 0; width /= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < width; ++i) vectors[i] = vectors[2 * i] + vectors[2 * i + 1];
  }
  return vectors[0];
}

// sums (rows, columns) = or, unless fresh, += a (rows, k) @ b (k, columns). Columns of b are ldb apart; both operands
// are read along k.
template <int rows, int columns, class Storage, class T = Compute<Storage>>
CUDA_EXT_INLINE void add_dots(int64_t k, const T* a, int64_t a_row, const Storage* b, int64_t ldb, bool fresh, T* sums,
                              int64_t sums_row) {
  constexpr int lanes = kLanes<T>, count = (rows * columns + lanes - 1) / lanes * lanes;
  Vec<T> sum[count];
#pragma GCC unroll 32
  for (int i = 0; i < count; ++i) sum[i] = Vec<T>{};
  for_vectors<T>(k, [&](int64_t p, int64_t elements) {
    Vec<T> column[columns], row[rows];
#pragma GCC unroll 8
    for (int j = 0; j < columns; ++j) column[j] = load_partial(b + j * ldb + p, elements);
#pragma GCC unroll 4
    for (int i = 0; i < rows; ++i) row[i] = load_partial(a + i * a_row + p, elements);
#pragma GCC unroll 4
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < columns; ++j) sum[i * columns + j] = multiply_add(sum[i * columns + j], row[i], column[j]);
    }
  });
  alignas(64) T total[count];
#pragma GCC unroll 8
  for (int first = 0; first < count; first += lanes) {
    Vec<T> square[lanes];
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) square[i] = sum[first + i];
    store(total + first, sums_of_lanes<T>(square));
  }
#pragma GCC unroll 4
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < columns; ++j) {
      T& to = sums[i * sums_row + j];
      to = fresh ? total[i * columns + j] : to + total[i * columns + j];
    }
  }
}

constexpr int kDotRows = 4;

// Columns that are multiplied at once: enough sums to hide the latency of a multiply-add, few enough to keep them in
// registers together with a vector of each column and one of a.
constexpr int dot_columns(int rows) {
  const int columns = (kVectorRegisters - 1) / (rows + 1);
  return rows == 1 || columns > 8 ? 8 : columns;
}

template <int rows, class Storage, class T = Compute<Storage>>
void add_dots_of_rows(int64_t columns, int64_t k, const T* a, int64_t a_row, const Storage* b, int64_t ldb, bool fresh,
                      T* sums, int64_t sums_row) {
  constexpr int together = dot_columns(rows);
  int64_t j = 0;
  for (; j + together <= columns; j += together)
    add_dots<rows, together>(k, a, a_row, b + j * ldb, ldb, fresh, sums + j, sums_row);
  for (; j < columns; ++j) add_dots<rows, 1>(k, a, a_row, b + j * ldb, ldb, fresh, sums + j, sums_row);
}

// sums (rows, columns) = or, unless fresh, += a (rows, steps) @ b (steps, columns), rows of b ldb apart.
template <int rows, int steps, class Storage, class T = Compute<Storage>>
void add_rows(int64_t columns, const T* a, int64_t a_row, const Storage* b, int64_t ldb, bool fresh, T* sums,
              int64_t sums_row) {
  Vec<T> factor[rows][steps];
#pragma GCC unroll 4
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 16
    for (int s = 0; s < steps; ++s) factor[i][s] = splat(a[i * a_row + s]);
  }
  for_vectors<T>(columns, [&](int64_t j, int64_t count) {
    Vec<T> sum[rows];
#pragma GCC unroll 4
    for (int i = 0; i < rows; ++i) sum[i] = fresh ? Vec<T>{} : load_partial(sums + i * sums_row + j, count);
#pragma GCC unroll 16
    for (int s = 0; s < steps; ++s) {
      const Vec<T> of_b = load_partial(b + s * ldb + j, count);
#pragma GCC unroll 4
      for (int i = 0; i < rows; ++i) sum[i] = multiply_add(sum[i], factor[i][s], of_b);
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; ++i) store_partial(sums + i * sums_row + j, sum[i], count);
  });
}

// sums (rows, columns) = a (rows, k) @ b (k, columns), k > 0.
template <int rows, class Storage, class T = Compute<Storage>>
void stream_rows(int64_t columns, int64_t k, const T* a, int64_t a_row, const Storage* b, int64_t ldb, T* sums,
                 int64_t sums_row) {
  constexpr int steps = rows == 1 ? 8 : 4;
  int64_t p = 0;
  for (; p + steps <= k; p += steps)
    add_rows<rows, steps>(columns, a + p, a_row, b + p * ldb, ldb, p == 0, sums, sums_row);
  for (; p < k; ++p) add_rows<rows, 1>(columns, a + p, a_row, b + p * ldb, ldb, p == 0, sums, sums_row);
}

// Calls f(std::integral_constant<int, count>) for 1 <= count <= most.
template <int most, class F>
CUDA_EXT_INLINE void with_count(int64_t count, F&& f) {
  if constexpr (most > 1) {
    if (count < most) return with_count<most - 1>(count, f);
  }
  f(std::integral_constant<int, most>{});
}

using DirectSizes = std::make_index_sequence<kPanelRows * kPanelVectors>;

template <class T, size_t... index>
auto find_multiply_rows(int64_t rows, int64_t vectors, std::index_sequence<index...>) {
  static constexpr decltype(&multiply_rows<T, 1, 1>) table[] = {
      &multiply_rows<T, int(index) / kPanelVectors + 1, int(index) % kPanelVectors + 1>...};
  return table[(rows - 1) * kPanelVectors + vectors - 1];
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
