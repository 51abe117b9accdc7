// Packing: pieces of a and b, whatever their dtype and strides, become small float32 (float64) panels laid out for the
// microkernel. This is the only place where a GEMM reads its operands.
#pragma once

#include "cpu/microkernel.h"
#include "gemm/gemm.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

// Register tiles of kPanelRows x kPanelVectors: accumulators, one row of b and one broadcast element of a fill the
// register file (27 + 3 + 1 of 32, 12 + 3 + 1 of 16), and 12 loads feed 27 multiply-adds, so the two load ports keep up.
constexpr int kPanelVectors = 3;
constexpr int kPanelRows = tile_rows(kPanelVectors);
template <class T>
constexpr int kPanelColumns = kPanelVectors * kLanes<T>;

// Products are formed kBlockK deep at a time: a packed panel of a (9 KB) then stays in L1, those of b in L2.
// An element of a product depends on this number and on nothing else: not on the threads, not on where a tile starts.
constexpr int64_t kBlockK = 192;

// to (columns, lines) = from (lines, columns) transposed, lines and columns <= lanes. `readable` >= columns elements
// may be read of each line; a whole vector of `to` is written for each column, zeros after the last line.
template <class Storage, class T = Compute<Storage>>
CUDA_EXT_INLINE void transpose_block(const Storage* from, int64_t from_stride, int64_t lines, int64_t columns,
                                     int64_t readable, T* to, int64_t to_stride) {
  constexpr int lanes = kLanes<T>;
  Vec<T> rows[lanes];
  if (lines == lanes && readable >= lanes) {
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) rows[i] = load(from + i * from_stride);
  } else {
    for (int i = 0; i < lanes; ++i)
      rows[i] = i < lines ? load_partial(from + i * from_stride, std::min<int64_t>(readable, lanes)) : Vec<T>{};
  }
  transpose<T>(rows);
  if (columns == lanes) {
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) store(to + i * to_stride, rows[i]);
  } else {
    for (int i = 0; i < columns; ++i) store(to + i * to_stride, rows[i]);
  }
}

// Rows of a for one register tile: panel (rows, kBlockK). `readable_rows` >= rows of the matrix follow `a`.
template <class Storage, class T = Compute<Storage>>
void pack_a(const Storage* a, int64_t row_stride, int64_t k_stride, int64_t rows, int64_t readable_rows, int64_t k,
            T* panel) {
  if (k_stride == 1) {
    for (int64_t i = 0; i < rows; ++i)
      for_vectors<T>(k, [&](int64_t p, int64_t count) {
        store(panel + i * kBlockK + p, load_partial(a + i * row_stride + p, count));
      });
  } else if (row_stride == 1) {
    for_vectors<T>(rows, [&](int64_t i, int64_t columns) {
      for_vectors<T>(k, [&](int64_t p, int64_t lines) {
        transpose_block(a + p * k_stride + i, k_stride, lines, columns, readable_rows - i, panel + i * kBlockK + p, kBlockK);
      });
    });
  } else {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t p = 0; p < k; ++p) panel[i * kBlockK + p] = to_compute(a[i * row_stride + p * k_stride]);
  }
}

// Columns of b for one register tile: panel (k, kPanelColumns), zeros after the last column up to a whole vector.
template <class Storage, class T = Compute<Storage>>
void pack_b(const Storage* b, int64_t k_stride, int64_t column_stride, int64_t k, int64_t columns, T* panel) {
  constexpr int64_t width = kPanelColumns<T>;
  if (column_stride == 1) {
    for (int64_t p = 0; p < k; ++p)
      for_vectors<T>(columns, [&](int64_t j, int64_t count) {
        store(panel + p * width + j, load_partial(b + p * k_stride + j, count));
      });
  } else if (k_stride == 1) {
    for_vectors<T>(columns, [&](int64_t j, int64_t lines) {
      for_vectors<T>(k, [&](int64_t p, int64_t count) {
        transpose_block(b + j * column_stride + p, column_stride, lines, count, k - p, panel + p * width + j, width);
      });
    });
  } else {
    for (int64_t p = 0; p < k; ++p)
      for_vectors<T>(columns, [&](int64_t j, int64_t count) {
        for (int64_t i = 0; i < kLanes<T>; ++i)
          panel[p * width + j + i] = i < count ? to_compute(b[p * k_stride + (j + i) * column_stride]) : T(0);
      });
  }
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
