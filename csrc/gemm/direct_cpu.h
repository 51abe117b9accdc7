// Products of few rows, or with a small b: nothing would be read often enough to pay for packing it. Three ways, by what
// b looks like; all have the tiles of the packed kernel for the epilogue, and its order of sums, a block of kBlockK after
// the other, so that an element has the same bits whichever computes it.
//
// One row, b row-major: eight rows of b at a time are added to sums in L1, so that memory is read as long streams.
// A register tile of rows, b column-major: columns are transposed in registers on their way to the multiply-adds.
// Else a group of steps of k at a time: for each panel of kPanelColumns columns the group's piece of b is multiplied with
// all rows, read where it lies if it is row-major, in the compute type and whole vectors, otherwise copied to L1 first.
// Sums wait in memory between groups.
#pragma once

#include "gemm/epilogue_cpu.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

constexpr int64_t kMaxGroup = 64;    // steps of k; a piece of b then takes a quarter of L1
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

// For b column-major, columns ldb apart: 16 bytes of each column at a time are transposed in registers. `chains`
// sums are under way at a time, since one would wait for its own last multiply-add: chain c is a (rows, k), a_chain on
// from the last, times b (k, lanes), b_chain on. These are the next columns, or further blocks of k of the same ones; the
// latter are added up in order.
template <class T, int rows, int chains>
void multiply_columns(int64_t k, const T* a, int64_t a_row, int64_t a_col, int64_t a_chain, const T* b, int64_t ldb,
                      int64_t b_chain, bool are_blocks, T* result, int64_t result_stride, bool add) {
  constexpr int unit = 16 / int(sizeof(T));
  Vec<T> sum[rows][chains];
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < chains; ++j) sum[i][j] = Vec<T>{};
  }
  int64_t step = 0;
#pragma GCC unroll 1
  for (; step + unit <= k; step += unit, a += unit * a_col) {
#pragma GCC unroll 16
    for (int j = 0; j < chains; ++j) {
      const T* from = b + j * b_chain + step;
      asm("" : "+r"(from));  // else a pointer to each of the columns is kept, and registers do not suffice
      Vec<T> columns[unit];
      load_columns<T>(from, ldb, columns);
#pragma GCC unroll 4
      for (int c = 0; c < unit; ++c) {
#pragma GCC unroll 16
        for (int i = 0; i < rows; ++i) sum[i][j] += splat(a[i * a_row + c * a_col + j * a_chain]) * columns[c];
      }
    }
  }
  for (; step < k; ++step, a += a_col) {
#pragma GCC unroll 16
    for (int j = 0; j < chains; ++j) {
      Vec<T> column;
      for (int i = 0; i < kLanes<T>; ++i) column[i] = b[i * ldb + j * b_chain + step];
#pragma GCC unroll 16
      for (int i = 0; i < rows; ++i) sum[i][j] += splat(a[i * a_row + j * a_chain]) * column;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i, result += result_stride) {
    if (are_blocks) {
      Vec<T> total = add ? load(result) + sum[i][0] : sum[i][0];
#pragma GCC unroll 16
      for (int j = 1; j < chains; ++j) total += sum[i][j];
      store(result, total);
    } else {
#pragma GCC unroll 16
      for (int j = 0; j < chains; ++j)
        store(result + j * kLanes<T>, add ? load(result + j * kLanes<T>) + sum[i][j] : sum[i][j]);
    }
  }
}

// sums (columns,) = start or, if fresh, 0 + a (steps,) @ b (steps, columns), rows of b ldb apart. `sums` is whole vectors.
template <int steps, class Storage, class T = Compute<Storage>>
void add_rows(int64_t columns, const T* a, const Storage* b, int64_t ldb, bool fresh, T* sums) {
  Vec<T> factor[steps];
#pragma GCC unroll 16
  for (int s = 0; s < steps; ++s) factor[s] = splat(a[s]);
  for_vectors<T>(columns, [&](int64_t j, int64_t count) {
    Vec<T> sum = fresh ? Vec<T>{} : load(sums + j);
#pragma GCC unroll 16
    for (int s = 0; s < steps; ++s) sum += factor[s] * load_partial(b + s * ldb + j, count);
    store(sums + j, sum);
  });
}

using DirectSizes = std::make_index_sequence<kPanelRows * kPanelVectors>;

template <class T, size_t... index>
auto find_multiply_rows(int64_t rows, int64_t vectors, std::index_sequence<index...>) {
  static constexpr decltype(&multiply_rows<T, 1, 1>) table[] = {
      &multiply_rows<T, int(index) / kPanelVectors + 1, int(index) % kPanelVectors + 1>...};
  return table[(rows - 1) * kPanelVectors + vectors - 1];
}

template <class T, size_t... index>
auto find_multiply_columns(int64_t rows, int64_t chains, std::index_sequence<index...>) {
  static constexpr decltype(&multiply_columns<T, 1, 1>) table[] = {
      &multiply_columns<T, int(index) / kPanelVectors + 1, int(index) % kPanelVectors + 1>...};
  return table[(rows - 1) * kPanelVectors + chains - 1];
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
    if (rows == 1 && b.column_stride == 1) {
      run_row(epilogue);
    } else if (rows <= kPanelRows && b.dtype == DtypeOf<T>::value && b.row_stride == 1 && b.column_stride != 1) {
      const int64_t whole = columns / kLanes<T> * kLanes<T>;
      run_columns(epilogue, whole);
      DirectTask<T> edge = *this;
      edge.column += whole;
      edge.columns -= whole;
      if (edge.columns > 0) edge.run_pieces(epilogue);
    } else {
      run_pieces(epilogue);
    }
  }

 private:
  int64_t num_parts() const { return params.gated && params.preact.data == nullptr ? 2 : 1; }

  // One row: whole rows of b are added to sums that stay in L1.
  template <class Epilogue>
  void run_row(const Epilogue& epilogue) const {
    constexpr int kSteps = 8;
    const int64_t parts = num_parts(), reduced = product(params.reduced_dims, params.reduced_sizes);
    const int64_t width = ceil_div(columns, kPanelColumns<T>) * kPanelColumns<T>;
    const bool has_blocks = reduced > 1 || params.k > kBlockK;
    const Scratch scratch((has_blocks ? 2 : 1) * parts * width * int64_t(sizeof(T)));
    alignas(64) T a_block[kBlockK + kLanes<T>];
    for (int64_t part = 0; part < parts; ++part) {
      T* const sums = scratch.as<T>() + part * width;
      for (int64_t r = 0; r < reduced; ++r) {
        const auto reduced_offset = [&](const int64_t* strides) {
          return batch_offset(r, params.reduced_dims, params.reduced_sizes, strides);
        };
        for (int64_t first_k = 0; first_k == 0 || first_k < params.k; first_k += kBlockK) {
          const int64_t k = std::min(kBlockK, params.k - first_k);
          const bool first_block = r == 0 && first_k == 0;
          T* const block_sums = first_block ? sums : scratch.as<T>() + (parts + part) * width;
          if (k == 0) std::fill_n(block_sums, width, T(0));
          with_storage<T>(a.dtype, [&](auto* type) {
            const auto* data = static_cast<decltype(type)>(const_cast<void*>(a.data)) + row * a.row_stride;
            for (int64_t p = 0; p < k; ++p)
              a_block[p] = to_compute(data[reduced_offset(params.reduced_strides_a) + (first_k + p) * a.column_stride]);
          });
          with_storage<T>(b.dtype, [&](auto* type) {
            const auto* from = static_cast<decltype(type)>(const_cast<void*>(b.data)) +
                               reduced_offset(params.reduced_strides_b) + first_k * b.row_stride + column +
                               part * params.n;
            int64_t p = 0;
            for (; p + kSteps <= k; p += kSteps)
              add_rows<kSteps>(columns, a_block + p, from + p * b.row_stride, b.row_stride, p == 0, block_sums);
            for (; p < k; ++p)
              add_rows<1>(columns, a_block + p, from + p * b.row_stride, b.row_stride, p == 0, block_sums);
          });
          if (!first_block)
            for (int64_t j = 0; j < columns; j += kLanes<T>) store(sums + j, load(sums + j) + load(block_sums + j));
        }
      }
    }
    alignas(64) T tile[2 * kTileSize<T>];
    for (int64_t j = 0; j < columns; j += kPanelColumns<T>) {
      const int64_t tile_columns = std::min<int64_t>(kPanelColumns<T>, columns - j);
      for (int64_t part = 0; part < parts; ++part)
        std::copy_n(scratch.as<T>() + part * width + j, kPanelColumns<T>, tile + part * kTileSize<T>);
      epilogue({row, column + j, 1, tile_columns}, tile);
    }
  }

  // One tile of rows by `whole` columns, whole vectors, of a column-major b.
  template <class Epilogue>
  void run_columns(const Epilogue& epilogue, int64_t whole) const {
    const int64_t parts = num_parts(), reduced = product(params.reduced_dims, params.reduced_sizes);
    const bool are_blocks = params.k >= 2 * kBlockK;
    alignas(64) T tile[2 * kTileSize<T>];
    for (int64_t j = 0, vectors; j < whole; j += vectors * kLanes<T>) {
      vectors = are_blocks ? 1 : std::min<int64_t>(kPanelVectors, (whole - j) / kLanes<T>);
      const TilePosition at{row, column + j, rows, vectors * kLanes<T>};
      for (int64_t part = 0; part < parts; ++part) {
        T* const result = plain_out != nullptr ? plain_out + at.row * params.n + at.column : tile + part * kTileSize<T>;
        for (int64_t r = 0; r < reduced; ++r) {
          const T* from_a = static_cast<const T*>(a.data) + row * a.row_stride;
          const T* from_b = static_cast<const T*>(b.data) + (at.column + part * params.n) * b.column_stride;
          if (r > 0) {
            from_a += batch_offset(r, params.reduced_dims, params.reduced_sizes, params.reduced_strides_a);
            from_b += batch_offset(r, params.reduced_dims, params.reduced_sizes, params.reduced_strides_b);
          }
          for (int64_t first_k = 0, taken; first_k == 0 || first_k < params.k; first_k += taken) {
            const int64_t k = std::min(kBlockK, params.k - first_k);
            const int64_t blocks =
                std::clamp<int64_t>((params.k - first_k) / kBlockK, 1, are_blocks ? kPanelVectors : 1);
            taken = blocks * kBlockK;
            const auto multiply = find_multiply_columns<T>(rows, are_blocks ? blocks : vectors, DirectSizes{});
            multiply(k, from_a + first_k * a.column_stride, a.row_stride, a.column_stride,
                     are_blocks ? kBlockK * a.column_stride : 0, from_b + first_k, b.column_stride,
                     are_blocks ? kBlockK : kLanes<T> * b.column_stride, are_blocks, result,
                     plain_out != nullptr ? params.n : kPanelColumns<T>, r > 0 || first_k > 0);
          }
        }
      }
      if (plain_out == nullptr) epilogue(at, tile);
    }
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
