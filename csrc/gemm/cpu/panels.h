// Packing: copies blocks of a and b, of any dtype and strides, to float32 (float64) panels in the layout that the
// microkernel reads. `depth`: see cpu/bfloat16_pair.h.
#pragma once

#include "cpu/amx.h"
#include "cpu/microkernel.h"
#include "gemm/gemm.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

// A register tile is kPanelRows x kPanelVectors: accumulators, one row of b and one broadcast element of a fill the
// register file (27 + 3 + 1 of 32, 12 + 3 + 1 of 16). 12 loads feed 27 multiply-adds, so two load ports keep up.
constexpr int kPanelVectors = 3;
constexpr int kPanelRows = tile_rows(kPanelVectors);
template <class T>
constexpr int kPanelColumns = kPanelVectors * kLanes<T>;

// k is divided into blocks of kBlockK: a panel of a (9 KB) then stays in L1, those of b in L2. The rounding of a
// product depends on this number only, not on the threads or on where a tile starts.
constexpr int64_t kBlockK = 256;

// One element of a panel, from the first of `k` values that are k_stride apart.
template <int depth, class Storage, class T = Compute<Storage>>
CUDA_EXT_INLINE T load_element(const Storage* p, int64_t k_stride, int64_t k) {
  if constexpr (depth == 1) return to_compute(*p);
  if constexpr (depth == 2) return bits_to_float(p->bits | (k > 1 ? uint32_t(p[k_stride].bits) << 16 : 0));
}
// The elements that begin at p, p + 1, ..., one per lane; only `count` exist.
template <int depth, class Storage, class T = Compute<Storage>>
CUDA_EXT_INLINE Vec<T> load_across_k(const Storage* p, int64_t k_stride, int64_t k, int64_t count) {
  const Vec<T> first = load_partial(p, count);
  if constexpr (depth == 1) return first;
  if constexpr (depth == 2) {
    const Vec<T> second = k > 1 ? load_partial(p + k_stride, count) : Vec<T>{};
    return (Vec<T>)((Words)first >> 16 | (Words)second);
  }
}
// to (columns, lines) = the transpose of from (lines, `columns` elements), where k values are left and lines, columns
// <= lanes. Writes a whole vector for each column, with zeros after the last line.
template <int depth, class Storage, class T = Compute<Storage>>
CUDA_EXT_INLINE void transpose_block(const Storage* from, int64_t from_stride, int64_t lines, int64_t k,
                                     int64_t columns, T* to, int64_t to_stride) {
  constexpr int lanes = kLanes<T>;
  if (lines == lanes && columns == lanes && (depth == 1 || k >= depth * lanes)) {
    Vec<T> rows[lanes];
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) rows[i] = load_along_k<depth>(from + i * from_stride, depth * lanes, lanes);
    transpose<T>(rows);
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) store(to + i * to_stride, rows[i]);
  } else {
    Vec<T> rows[lanes];
    for (int i = 0; i < lanes; ++i)
      rows[i] = i < lines ? load_along_k<depth>(from + i * from_stride, k, columns) : Vec<T>{};
    transpose<T>(rows);
    for (int i = 0; i < columns; ++i) store(to + i * to_stride, rows[i]);
  }
}

// The layout of a panel of a: the order that a itself has, so that packing only copies.
enum class PanelOrder { kRowMajor, kColumnMajor };
template <PanelOrder order>
constexpr int64_t kPanelRowStride = order == PanelOrder::kRowMajor ? kBlockK : 1;
template <PanelOrder order>
constexpr int64_t kPanelStepStride = order == PanelOrder::kRowMajor ? 1 : kPanelRows;
// One vector longer than the panel, because whole vectors are stored and the last may reach past the end. A multiple of
// a vector, so that panels stay aligned.
template <class T>
constexpr int64_t kPanelSize = kPanelRows * kBlockK + kLanes<T>;

inline PanelOrder panel_order(int64_t row_stride, int64_t k_stride) {
  return row_stride == 1 && k_stride != 1 ? PanelOrder::kColumnMajor : PanelOrder::kRowMajor;
}

// Packs a block of a into panels of kPanelRows rows each. `readable_rows` >= rows is the number of rows from `a` to the
// end of the matrix.
template <int depth, class Storage, class T = Compute<Storage>>
void pack_a(const Storage* a, int64_t row_stride, int64_t k_stride, int64_t rows, int64_t readable_rows, int64_t k,
            T* panels) {
  if (panel_order(row_stride, k_stride) == PanelOrder::kColumnMajor) {
    for (int64_t p = 0; p < k; p += depth, a += depth * k_stride) {
      T* to = panels + p / depth * kPanelRows;
      for (int64_t first = 0; first < rows; first += kPanelRows, to += kPanelSize<T>)
        for (int64_t i = 0; i < kPanelRows && first + i < rows; i += kLanes<T>)
          store(to + i, load_across_k<depth>(a + first + i, k_stride, k - p, readable_rows - first - i));
    }
    return;
  }
  const int64_t elements = (k + depth - 1) / depth;
  for (int64_t i = 0; i < rows; ++i, a += row_stride) {
    T* const to = panels + i / kPanelRows * kPanelSize<T> + i % kPanelRows * kBlockK;
    if (k_stride == 1) {
      for_vectors<T>(elements, [&](int64_t p, int64_t count) {
        store(to + p, load_along_k<depth>(a + depth * p, k - depth * p, count));
      });
    } else {
      for (int64_t p = 0; p < elements; ++p)
        to[p] = load_element<depth>(a + depth * p * k_stride, k_stride, k - depth * p);
    }
  }
}

// The panel of a that products of tiles need: row-major, with zeros up to a whole tile. One tile more than the elements
// of a row, so that rows do not compete for the few cache sets that a power of two would map them to.
template <int64_t block_k>
constexpr int64_t kTilePanelPitch = block_k + kTileWords;

// Packs rows of a, as pairs, into such a panel.
template <int64_t block_k>
void pack_tiles_of_a(const bfloat16_t* a, int64_t row_stride, int64_t k_stride, int64_t rows, int64_t readable_rows,
                     int64_t k, float* panel) {
  constexpr int64_t pitch = kTilePanelPitch<block_k>, lanes = kLanes<float>;
  const int64_t pairs = (k + 1) / 2;
  if (panel_order(row_stride, k_stride) == PanelOrder::kColumnMajor) {
    for (int64_t i = 0; i < rows; i += lanes)
      for (int64_t p = 0; p < pairs; p += lanes) {
        Vec<float> square[lanes];
        for (int64_t c = 0; c < lanes; ++c)
          square[c] = p + c < pairs ? load_across_k<2>(a + i + 2 * (p + c) * k_stride, k_stride, k - 2 * (p + c),
                                                       readable_rows - i)
                                    : Vec<float>{};
        transpose<float>(square);
        for (int64_t r = 0; r < lanes; ++r) store(panel + (i + r) * pitch + p, square[r]);
      }
    return;
  }
  for (int64_t i = 0; i < rows; ++i, a += row_stride, panel += pitch) {
    if (k_stride == 1) {
      for_vectors<float>(
          pairs, [&](int64_t p, int64_t count) { store(panel + p, load_along_k<2>(a + 2 * p, k - 2 * p, count)); });
    } else {
      for (int64_t p = 0; p < whole_tiles(pairs); ++p)
        panel[p] = p < pairs ? load_element<2>(a + 2 * p * k_stride, k_stride, k - 2 * p) : 0.0f;
    }
  }
}

// Packs a block of b into panels (k, kPanelColumns), `panel_stride` apart. The last column is followed by zeros up to a
// whole vector.
template <int depth, class Storage, class T = Compute<Storage>>
void pack_b(const Storage* b, int64_t k_stride, int64_t column_stride, int64_t k, int64_t columns, int64_t panel_stride,
            T* panels) {
  constexpr int64_t width = kPanelColumns<T>;
  const int64_t elements = (k + depth - 1) / depth;
  const auto panel = [&](int64_t column) { return panels + column / width * panel_stride + column % width; };
  if (column_stride == 1) {
    for (int64_t p = 0; p < elements; ++p)
      for_vectors<T>(columns, [&](int64_t j, int64_t count) {
        store(panel(j) + p * width, load_across_k<depth>(b + depth * p * k_stride + j, k_stride, k - depth * p, count));
      });
  } else if (k_stride == 1) {
    for_vectors<T>(columns, [&](int64_t j, int64_t lines) {
      for_vectors<T>(elements, [&](int64_t p, int64_t count) {
        transpose_block<depth>(b + j * column_stride + depth * p, column_stride, lines, k - depth * p, count,
                               panel(j) + p * width, width);
      });
    });
  } else {
    for (int64_t p = 0; p < elements; ++p)
      for_vectors<T>(columns, [&](int64_t j, int64_t count) {
        const auto* const from = b + depth * p * k_stride + j * column_stride;
        for (int64_t i = 0; i < kLanes<T>; ++i)
          panel(j)[p * width + i] =
              i < count ? load_element<depth>(from + i * column_stride, k_stride, k - depth * p) : T(0);
      });
  }
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
