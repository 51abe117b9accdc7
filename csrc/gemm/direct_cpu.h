// Products of few rows, or with a small b: nothing would be read often enough to pay for packing it. Three ways, by what
// b looks like; all end in the tiles of the packed kernel, for its epilogue.
//
// b column-major: dot products, whole vectors along k. A lane sums every kLanes-th product of a block of kDotBlock, and
// the lanes are summed at the block's end, whatever the number of rows.
// Up to kStreamedRows rows, b row-major: a few rows of b at a time are added to sums in L1, so that memory is read as
// long streams.
// Else a group of steps of k at a time: for each panel of kPanelColumns columns the group's piece of b is multiplied with
// all rows, read where it lies or copied to L1 first. Sums wait in memory between groups.
//
// The last two have the packed kernel's order of sums, a block of kBlockK after the other, so that there an element has
// the same bits whichever computes it.
#pragma once

#include "gemm/epilogue_cpu.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

constexpr int64_t kMaxGroup = 96;    // steps of k; a piece of b then takes a third of L1
constexpr int64_t kFewSteps = 4;     // of k, that a row takes in one pass over its results
constexpr int64_t kShortGroup = 16;  // with one or two register tiles of rows: fewer streams from memory

// result (rows, vectors * lanes) [+]= start (0 if null) + what add_to(sum) adds.
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

// a (rows, k) @ b (k, vectors * lanes), b row-major with rows ldb apart.
template <class T, int rows, int vectors>
void multiply_rows(int64_t k, const T* a, int64_t a_row, int64_t a_col, const T* b, int64_t ldb, const T* start,
                   T* result, int64_t result_stride, bool add) {
  sum_tile<T, rows, vectors>(start, result, result_stride, add,
                             [&](auto& sum) { add_products<T, rows, vectors>(k, a, a_row, a_col, b, ldb, sum); });
}

// sum_of[i] = the sum of the lanes of vectors[i], added in pairs.
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

// sums (rows, columns) = or, unless fresh, += a (rows, k) @ b (k, columns), columns of b ldb apart; both are read along k.
template <int rows, int columns, class Storage, class T = Compute<Storage>>
CUDA_EXT_INLINE void add_dots(int64_t k, const T* a, int64_t a_row, const Storage* b, int64_t ldb, bool fresh, T* sums,
                              int64_t sums_row) {
  constexpr int lanes = kLanes<T>, count = (rows * columns + lanes - 1) / lanes * lanes;
  Vec<T> sum[count];
#pragma GCC unroll 32
  for (int i = 0; i < count; ++i) sum[i] = Vec<T>{};
  for_vectors<T>(k, [&](int64_t p, int64_t elements) {
    // All loads come first: a branch of one between a product and its sum would keep the compiler from fusing the two.
    Vec<T> column[columns], row[rows];
#pragma GCC unroll 8
    for (int j = 0; j < columns; ++j) column[j] = load_partial(b + j * ldb + p, elements);
#pragma GCC unroll 4
    for (int i = 0; i < rows; ++i) row[i] = load_partial(a + i * a_row + p, elements);
#pragma GCC unroll 4
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < columns; ++j) sum[i * columns + j] += row[i] * column[j];
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

// Columns at a time: sums that hide the latency of a multiply-add, and in registers with a column each and one of a.
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
      for (int i = 0; i < rows; ++i) sum[i] += factor[i][s] * of_b;
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

// f(std::integral_constant<int, count>) for 1 <= count <= most.
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

template <class T>
struct DirectTask {
  const GemmParams& params;
  Operand a;  // of this batch
  Operand b;
  int64_t row;
  int64_t column;
  int64_t rows;  // <= kRowBlock
  int64_t columns;
  T* plain_out;  // of this batch, if there is nothing to do after the product: it is then formed there

  template <class Epilogue>
  void run(const Epilogue& epilogue) const {
    if (has_columns() && params.k >= (rows <= kDotRows ? 64 : 256))
      run_sums<kDotBlock>(epilogue);
    else if (b.column_stride == 1 && rows <= kStreamedRows)
      run_sums<kBlockK>(epilogue);
    else if (plain_out != nullptr && has_few_steps())
      run_few_steps();
    else
      run_pieces(epilogue);
  }

 private:
  static constexpr int64_t kDotBlock = 2048;
  static constexpr int64_t kStreamedRows = 3;

  bool has_few_steps() const {
    return params.k > 0 && params.k <= kFewSteps && product(params.reduced_dims, params.reduced_sizes) == 1 &&
           a.dtype == DtypeOf<T>::value && b.dtype == DtypeOf<T>::value && (b.column_stride == 1 || params.n == 1);
  }

  int64_t num_parts() const { return params.gated && params.preact.data == nullptr ? 2 : 1; }

  bool has_columns() const { return b.row_stride == 1 && b.column_stride != 1; }

  // Dot products or streamed rows: sums of all rows and columns wait in memory between blocks of `block_k` steps of k.
  template <int64_t block_k, class Epilogue>
  void run_sums(const Epilogue& epilogue) const {
    const int64_t parts = num_parts(), reduced = product(params.reduced_dims, params.reduced_sizes);
    const int64_t width = ceil_div(columns, kPanelColumns<T>) * kPanelColumns<T>, size = rows * width;
    const bool has_blocks = !has_columns() && (reduced > 1 || params.k > block_k);
    const bool a_in_place = a.dtype == DtypeOf<T>::value && a.column_stride == 1;
    const Scratch scratch(((parts + (has_blocks ? 1 : 0)) * size + (a_in_place ? 0 : rows * block_k)) *
                          int64_t(sizeof(T)));
    T* const all_sums = scratch.as<T>();
    T* const block_sums = all_sums + parts * size;
    T* const copied_a = block_sums + (has_blocks ? size : 0);
    for (int64_t r = 0; r < reduced; ++r) {
      const auto reduced_offset = [&](const int64_t* strides) {
        return batch_offset(r, params.reduced_dims, params.reduced_sizes, strides);
      };
      for (int64_t first_k = 0; first_k == 0 || first_k < params.k; first_k += block_k) {
        const int64_t k = std::min(block_k, params.k - first_k);
        const bool first_block = r == 0 && first_k == 0;
        const int64_t offset_a =
            reduced_offset(params.reduced_strides_a) + row * a.row_stride + first_k * a.column_stride;
        if (!a_in_place) copy_rows(offset_a, k, block_k, copied_a);
        const T* const block_a = a_in_place ? static_cast<const T*>(a.data) + offset_a : copied_a;
        const int64_t a_row = a_in_place ? a.row_stride : block_k;
        for (int64_t part = 0; part < parts; ++part) {
          T* const sums = all_sums + part * size;
          with_storage<T>(b.dtype, [&](auto* type) {
            const auto* from = static_cast<decltype(type)>(const_cast<void*>(b.data)) +
                               reduced_offset(params.reduced_strides_b) + first_k * b.row_stride +
                               (column + part * params.n) * b.column_stride;
            if (has_columns()) {
              add_dots_of_tiles(k, block_a, a_row, from, first_block, sums, width);
            } else {
              T* const to = first_block ? sums : block_sums;
              if (k == 0) std::fill_n(to, size, T(0));
              with_count<kStreamedRows>(rows, [&](auto count) {
                stream_rows<count>(columns, k, block_a, a_row, from, b.row_stride, to, width);
              });
              if (!first_block)
                for (int64_t i = 0; i < size; i += kLanes<T>) store(sums + i, load(sums + i) + load(to + i));
            }
          });
        }
      }
    }
    alignas(64) T tile[2 * kTileSize<T>];
    for (int64_t i = 0; i < rows; i += kPanelRows) {
      for (int64_t j = 0; j < columns; j += kPanelColumns<T>) {
        const TilePosition at{row + i, column + j, std::min<int64_t>(kPanelRows, rows - i),
                              std::min<int64_t>(kPanelColumns<T>, columns - j)};
        for (int64_t part = 0; part < parts; ++part)
          for (int64_t tile_row = 0; tile_row < at.rows; ++tile_row)
            std::copy_n(all_sums + part * size + (i + tile_row) * width + j, kPanelColumns<T>,
                        tile + part * kTileSize<T> + tile_row * kPanelColumns<T>);
        epilogue(at, tile);
      }
    }
  }

  // So few steps of k that writing the result is what takes time: whole rows of it at once.
  void run_few_steps() const {
    const T* const from_b = static_cast<const T*>(b.data) + column;
    with_count<kFewSteps>(params.k, [&](auto steps) {
      for (int64_t i = 0; i < rows; i += kStreamedRows) {
        with_count<kStreamedRows>(std::min(kStreamedRows, rows - i), [&](auto count) {
          const T* const from_a = static_cast<const T*>(a.data) + (row + i) * a.row_stride;
          T factors[count * steps];
          for (int f = 0; f < count * steps; ++f)
            factors[f] = from_a[f / steps * a.row_stride + f % steps * a.column_stride];
          add_rows<count, steps>(columns, factors, steps, from_b, b.row_stride, true,
                                 plain_out + (row + i) * params.n + column, params.n);
        });
      }
    });
  }

  // All rows with a panel of columns, which stays in cache, then the next.
  template <class Storage>
  void add_dots_of_tiles(int64_t k, const T* from_a, int64_t a_row, const Storage* from_b, bool fresh, T* sums,
                         int64_t width) const {
    for (int64_t j = 0; j < columns; j += kPanelColumns<T>)
      for (int64_t i = 0; i < rows; i += kDotRows)
        with_count<kDotRows>(std::min<int64_t>(kDotRows, rows - i), [&](auto count) {
          add_dots_of_rows<count>(std::min<int64_t>(kPanelColumns<T>, columns - j), k, from_a + i * a_row, a_row,
                                  from_b + j * b.column_stride, b.column_stride, fresh, sums + i * width + j, width);
        });
  }

  // to (rows, k), rows block_k apart = the rows of a from `offset` on.
  void copy_rows(int64_t offset, int64_t k, int64_t block_k, T* to) const {
    with_storage<T>(a.dtype, [&](auto* type) {
      const auto* from = static_cast<decltype(type)>(const_cast<void*>(a.data)) + offset;
      for (int64_t i = 0; i < rows; ++i, from += a.row_stride, to += block_k)
        for (int64_t p = 0; p < k; ++p) to[p] = to_compute(from[p * a.column_stride]);
    });
  }

  template <class Epilogue>
  void run_pieces(const Epilogue& epilogue) const {
    const int64_t parts = num_parts();
    const int64_t reduced = product(params.reduced_dims, params.reduced_sizes);
    const int64_t blocks_per_product = std::max<int64_t>(1, ceil_div(params.k, kBlockK));
    const int64_t blocks = reduced * blocks_per_product;
    const int64_t row_tiles = ceil_div(rows, kPanelRows), column_tiles = ceil_div(columns, kPanelColumns<T>);
    const bool a_in_place =
        a.dtype == DtypeOf<T>::value && (a.column_stride == 1 || params.k <= kMaxGroup || rows <= 8);
    const bool by_rows = b.dtype == DtypeOf<T>::value && b.column_stride == 1;
    const int64_t group_k = by_rows && row_tiles <= 2 ? kShortGroup : kMaxGroup;
    const bool one_group = blocks == 1 && params.k <= group_k;

    // Sums of the blocks so far, and of the groups so far of this block, tile by tile.
    const int64_t sums_size = one_group ? 0 : row_tiles * column_tiles * parts * kTileSize<T>;
    const int64_t packed_a_size = a_in_place ? 0 : row_tiles * kPanelSize<T>;
    const Scratch scratch((packed_a_size + sums_size * (blocks > 1 ? 2 : 1)) * int64_t(sizeof(T)));
    alignas(64) T single_tile[2 * kTileSize<T>];
    alignas(64) T pieces[2][kMaxGroup * kPanelColumns<T>];
    T* const packed_a = scratch.as<T>();
    T* const sums = one_group ? single_tile : packed_a + packed_a_size;
    T* const block_sums = blocks > 1 ? sums + sums_size : sums;
    const PanelOrder order = panel_order(a.row_stride, a.column_stride);
    const int64_t a_row = a_in_place ? a.row_stride : order == PanelOrder::kRowMajor ? kBlockK : 1;
    const int64_t a_col = a_in_place ? a.column_stride : order == PanelOrder::kRowMajor ? 1 : kPanelRows;

    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t r = block / blocks_per_product;
      const int64_t first_k = block % blocks_per_product * kBlockK;
      const int64_t block_k = std::min(kBlockK, params.k - first_k);
      const auto reduced_offset = [&](const int64_t* strides) {
        return r == 0 ? 0 : batch_offset(r, params.reduced_dims, params.reduced_sizes, strides);
      };
      const int64_t offset_a =
          reduced_offset(params.reduced_strides_a) + first_k * a.column_stride + row * a.row_stride;
      const int64_t offset_b = reduced_offset(params.reduced_strides_b) + first_k * b.row_stride;
      if (!a_in_place) pack_rows(offset_a, block_k, packed_a);
      const T* const block_a = a_in_place ? static_cast<const T*>(a.data) + offset_a : packed_a;
      const int64_t panel_a = a_in_place ? kPanelRows * a.row_stride : kPanelSize<T>;

      const int64_t groups = std::max<int64_t>(1, ceil_div(block_k, group_k));
      for (int64_t step = 0; step < groups * column_tiles; ++step) {
        const int64_t j = by_rows ? step % column_tiles : step / groups;
        const int64_t group = by_rows ? step / column_tiles : step % groups;
        const int64_t k = std::min(group_k, block_k - group * group_k);
        const int64_t tile_columns = std::min<int64_t>(kPanelColumns<T>, columns - j * kPanelColumns<T>);
        const bool whole = tile_columns % kLanes<T> == 0;
        const bool ends_block = group == groups - 1, ends = ends_block && block == blocks - 1;
        const bool in_place = by_rows && whole;
        const T* piece[2];
        for (int64_t part = 0; part < parts; ++part) {
          const int64_t offset = offset_b + group * group_k * b.row_stride +
                                 (column + j * kPanelColumns<T> + part * params.n) * b.column_stride;
          if (!in_place) pack_piece(offset, k, tile_columns, pieces[part]);
          piece[part] = in_place ? static_cast<const T*>(b.data) + offset : pieces[part];
        }
        for (int64_t i = 0; i < row_tiles; ++i) {
          const TilePosition at{row + i * kPanelRows, column + j * kPanelColumns<T>,
                                std::min<int64_t>(kPanelRows, rows - i * kPanelRows), tile_columns};
          const auto multiply = find_multiply_rows<T>(at.rows, ceil_div(tile_columns, kLanes<T>), DirectSizes{});
          const int64_t index = one_group ? 0 : (i * column_tiles + j) * parts;
          T* const tile = sums + index * kTileSize<T>;
          T* const block_tile = block_sums + index * kTileSize<T>;
          const bool direct_result = plain_out != nullptr && whole && ends_block;
          for (int64_t part = 0; part < parts; ++part) {
            T* const result = direct_result ? plain_out + at.row * params.n + at.column
                                            : (ends_block ? tile : block_tile) + part * kTileSize<T>;
            multiply(k, block_a + i * panel_a + group * group_k * a_col, a_row, a_col, piece[part],
                     in_place ? b.row_stride : kPanelColumns<T>,
                     group == 0 ? nullptr : block_tile + part * kTileSize<T>, result,
                     direct_result ? params.n : kPanelColumns<T>, ends_block && block > 0);
          }
          if (ends && !direct_result) epilogue(at, tile);
        }
      }
    }
  }

  void pack_rows(int64_t offset_a, int64_t k, T* panels) const {
    with_storage<T>(a.dtype, [&](auto* type) {
      pack_a<1>(static_cast<decltype(type)>(const_cast<void*>(a.data)) + offset_a, a.row_stride, a.column_stride, rows,
                params.m - row, k, panels);
    });
  }

  void pack_piece(int64_t offset_b, int64_t k, int64_t tile_columns, T* piece) const {
    with_storage<T>(b.dtype, [&](auto* type) {
      pack_b<1>(static_cast<decltype(type)>(const_cast<void*>(b.data)) + offset_b, b.row_stride, b.column_stride, k,
                tile_columns, 0, piece);
    });
  }
};

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
