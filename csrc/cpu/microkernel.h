// Matrix products of small operands that are already in cache, such as the blocks of attention, where a BLAS would
// spend its time packing operands that are used once. A tile of C is in registers; each step of k loads one row of B
// and broadcasts the tile's elements of A.
#pragma once

#include "cpu/bfloat16_pair.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

// Rows of a register tile that is `vectors` wide: as many as leave registers for a row of B and one broadcast.
constexpr int tile_rows(int vectors) {
  const int rows = (kVectorRegisters - vectors - 1) / vectors;
  return rows < 12 ? rows : 12;
}

// The widest tile: enough independent sums to hide the latency of a multiply-add, with the fewest loads.
constexpr int kTileVectors = kVectorRegisters == 32 ? 4 : 2;

// sum (Rows, Vectors) += a (Rows, k) @ b (k, Vectors * lanes), step by step in the order of k.
// Element is T, or BFloat16Pair if T is float; k counts Elements.
template <class T, int Rows, int Vectors, class Element>
CUDA_EXT_INLINE void add_products(int64_t k, const Element* a, int64_t a_row, int64_t a_col, const Element* b,
                                  int64_t ldb, Vec<T> (&sum)[Rows][Vectors]) {
#pragma GCC unroll 1
  for (int64_t step = 0; step < k; ++step) {
    decltype(load(b)) b_row[Vectors];
#pragma GCC unroll 16
    for (int j = 0; j < Vectors; ++j) b_row[j] = load(b + j * kLanes<T>);
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
      const auto a_element = splat(a[i * a_row]);
#pragma GCC unroll 16
      for (int j = 0; j < Vectors; ++j) sum[i][j] = multiply_add(sum[i][j], a_element, b_row[j]);
    }
    a += a_col;
    b += ldb;
  }
}

template <class T, int Rows, int Vectors, bool kAccumulate, class Element>
CUDA_EXT_INLINE void tile_product(int64_t k, const Element* a, int64_t a_row, int64_t a_col, const Element* b,
                                  int64_t ldb, T* c, int64_t ldc, T factor = T(1)) {
  Vec<T> sum[Rows][Vectors];
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < Vectors; ++j) sum[i][j] = Vec<T>{};
  }
  add_products<T, Rows, Vectors>(k, a, a_row, a_col, b, ldb, sum);
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < Vectors; ++j) {
      // C is added at the end instead of being the initial sum, so that rounding errors grow with the number of blocks,
      // not with k.
      T* at = c + i * ldc + j * kLanes<T>;
      store(at, kAccumulate ? load(at) + sum[i][j] : sum[i][j] * factor);
    }
  }
}

template <class T, int Rows, int Vectors, bool kAccumulate, class Element>
CUDA_EXT_INLINE int64_t tiles_from(int64_t i, int64_t m, int64_t k, const Element* a, int64_t a_row, int64_t a_col,
                                   const Element* b, int64_t ldb, T* c, int64_t ldc, T factor) {
  for (; i + Rows <= m; i += Rows)
    tile_product<T, Rows, Vectors, kAccumulate>(k, a + i * a_row, a_row, a_col, b, ldb, c + i * ldc, ldc, factor);
  return i;
}

template <class T, int Vectors, bool kAccumulate, class Element>
void panel_product(int64_t m, int64_t k, const Element* a, int64_t a_row, int64_t a_col, const Element* b, int64_t ldb,
                   T* c, int64_t ldc, T factor = T(1)) {
  constexpr int rows = tile_rows(Vectors);
  int64_t i = tiles_from<T, rows, Vectors, kAccumulate>(0, m, k, a, a_row, a_col, b, ldb, c, ldc, factor);
  if constexpr (rows > 4) i = tiles_from<T, 4, Vectors, kAccumulate>(i, m, k, a, a_row, a_col, b, ldb, c, ldc, factor);
  if constexpr (rows > 2) i = tiles_from<T, 2, Vectors, kAccumulate>(i, m, k, a, a_row, a_col, b, ldb, c, ldc, factor);
  tiles_from<T, 1, Vectors, kAccumulate>(i, m, k, a, a_row, a_col, b, ldb, c, ldc, factor);
}

// C (m, vectors * lanes) = factor * A (m, k) @ B (k, vectors * lanes), or, without a factor, += it. A's element (i, j)
// is a[i * a_row + j * a_col]; B and C are row-major with whole vectors in every row.
template <bool kAccumulate, class T, class Element>
void block_product(int64_t m, int64_t vectors, int64_t k, const Element* a, int64_t a_row, int64_t a_col,
                   const Element* b, int64_t ldb, T* c, int64_t ldc, T factor = T(1)) {
  constexpr int lanes = kLanes<T>;
  for (; vectors >= kTileVectors; vectors -= kTileVectors, b += kTileVectors * lanes, c += kTileVectors * lanes)
    panel_product<T, kTileVectors, kAccumulate>(m, k, a, a_row, a_col, b, ldb, c, ldc, factor);
  if constexpr (kTileVectors > 3) {
    if (vectors == 3) return panel_product<T, 3, kAccumulate>(m, k, a, a_row, a_col, b, ldb, c, ldc, factor);
  }
  if constexpr (kTileVectors > 2) {
    if (vectors == 2) return panel_product<T, 2, kAccumulate>(m, k, a, a_row, a_col, b, ldb, c, ldc, factor);
  }
  if (vectors == 1) panel_product<T, 1, kAccumulate>(m, k, a, a_row, a_col, b, ldb, c, ldc, factor);
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
