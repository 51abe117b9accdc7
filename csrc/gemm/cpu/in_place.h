// Products with few rows or a small b, whose elements are not read often enough to make packing worthwhile. The method
// depends on the layout of b; all of them end with the tiles of panels (blocked.h), for its epilogue.
//
// b is column-major: dot products, with vectors along k. A lane sums every kLanes-th product of a block of kDotBlock;
// the lanes are summed at the end of the block, so that the order does not depend on the number of rows.
// b is row-major, and there are up to kStreamedRows rows: a few rows of b at a time are added to sums in L1, so that
// memory is read sequentially.
// Otherwise: groups of k steps. For each panel of kPanelColumns columns, the group's piece of b is multiplied by all
// rows; it is read in place or copied to L1 first. Partial sums are kept in memory between groups.
//
// The last two sum in the order of panels, one block of kBlockK after the other, so that all three give the
// same bits.
#pragma once

#include "gemm/cpu/inner_loops.h"
#include "gemm/cpu/epilogue.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

constexpr int64_t kMaxGroup = 96;    // k steps of a group; a piece of b then occupies a third of L1
constexpr int64_t kFewSteps = 4;     // the most k steps that a single pass over a row of results can add
constexpr int64_t kShortGroup = 16;  // for one or two register tiles of rows: reads fewer rows of b concurrently

template <class T>
struct DirectTask {
  const GemmParams& params;
  Operand a;  // of this batch
  Operand b;
  int64_t row;
  int64_t column;
  int64_t rows;  // <= kRowBlock
  int64_t columns;
  T* plain_out;  // output of this batch if the product needs no epilogue, else null

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

  // Dot products or streamed rows. Sums of all rows and columns stay in memory between blocks of `block_k` steps.
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
        const TilePosition position{row + i, column + j, std::min<int64_t>(kPanelRows, rows - i),
                                    std::min<int64_t>(kPanelColumns<T>, columns - j)};
        for (int64_t part = 0; part < parts; ++part)
          for (int64_t tile_row = 0; tile_row < position.rows; ++tile_row)
            std::copy_n(all_sums + part * size + (i + tile_row) * width + j, kPanelColumns<T>,
                        tile + part * kTileSize<T> + tile_row * kPanelColumns<T>);
        epilogue(position, tile);
      }
    }
  }

  // With so few k steps writing the result dominates: whole rows of it at once.
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

  // Multiplies one panel of columns, which stays in cache, by all rows, then the next panel.
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

  // to (rows, k), rows block_k apart = the rows of a from element `offset` on.
  void copy_rows(int64_t offset, int64_t k, int64_t block_k, T* to) const {
    with_storage<T>(a.dtype, [&](auto* type) {
      const auto* from = static_cast<decltype(type)>(const_cast<void*>(a.data)) + offset;
      for (int64_t i = 0; i < rows; ++i, from += a.row_stride, to += block_k)
        for (int64_t p = 0; p < k; ++p) to[p] = to_compute(from[p * a.column_stride]);
    });
  }

  // Groups of k steps.
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

    // Sums of all previous blocks, and of the previous groups of this block, tile by tile.
    const int64_t sums_size = one_group ? 0 : row_tiles * column_tiles * parts * kTileSize<T>;
    const int64_t panels_a_size = a_in_place ? 0 : row_tiles * kPanelSize<T>;
    const Scratch scratch((panels_a_size + sums_size * (blocks > 1 ? 2 : 1)) * int64_t(sizeof(T)));
    alignas(64) T single_tile[2 * kTileSize<T>];
    alignas(64) T pieces[2][kMaxGroup * kPanelColumns<T>];
    T* const panels_a = scratch.as<T>();
    T* const sums = one_group ? single_tile : panels_a + panels_a_size;
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
      if (!a_in_place) pack_rows(offset_a, block_k, panels_a);
      const T* const block_a = a_in_place ? static_cast<const T*>(a.data) + offset_a : panels_a;
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
          const TilePosition position{row + i * kPanelRows, column + j * kPanelColumns<T>,
                                      std::min<int64_t>(kPanelRows, rows - i * kPanelRows), tile_columns};
          const auto multiply = find_multiply_rows<T>(position.rows, ceil_div(tile_columns, kLanes<T>), DirectSizes{});
          const int64_t index = one_group ? 0 : (i * column_tiles + j) * parts;
          T* const tile = sums + index * kTileSize<T>;
          T* const block_tile = block_sums + index * kTileSize<T>;
          const bool direct_result = plain_out != nullptr && whole && ends_block;
          for (int64_t part = 0; part < parts; ++part) {
            T* const result = direct_result ? plain_out + position.row * params.n + position.column
                                            : (ends_block ? tile : block_tile) + part * kTileSize<T>;
            multiply(k, block_a + i * panel_a + group * group_k * a_col, a_row, a_col, piece[part],
                     in_place ? b.row_stride : kPanelColumns<T>,
                     group == 0 ? nullptr : block_tile + part * kTileSize<T>, result,
                     direct_result ? params.n : kPanelColumns<T>, ends_block && block > 0);
          }
          if (ends && !direct_result) epilogue(position, tile);
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

// Limits up to which reading b in place costs less than packing it: few rows, or a b that stays in cache if there is
// one task of rows or k is short.
constexpr int64_t kFewRows = 36;
constexpr int64_t kSmallBytes = 64 << 10;

template <class T>
bool prefers_direct(const GemmParams& params, int64_t parts) {
  if (params.m <= (has_competing_rows<T>(params.b) ? 2 * kPanelRows : kFewRows)) return true;
  return params.k * params.n * parts * int64_t(sizeof(T)) <= kSmallBytes &&
         (params.m <= kRowBlock || params.k <= kFewSteps);
}

constexpr double kDirectWorkPerThread = 3e5;  // multiply-adds that are worth waking a thread for

// The columns of a task: at most `most`, and few enough that all threads have about as many tasks, where `others` is
// the number of tasks that differ in batch or rows.
template <class T>
int64_t direct_task_columns(int64_t n, int64_t most, int64_t others, int64_t threads) {
  const int64_t per_other = ceil_div(threads, std::max<int64_t>(1, others));
  const int64_t tasks = ceil_div(ceil_div(n, most), per_other) * per_other;
  return ceil_div(ceil_div(n, tasks), kLanes<T>) * kLanes<T>;
}

template <class T>
void run_direct(const GemmParams& params, const Epilogues<T>& epilogues) {
  const bool backward = epilogues.is_backward();
  const int64_t batches = product(params.batch_dims, params.batch_sizes);
  const int64_t row_tasks = ceil_div(params.m, kRowBlock);
  // The cost of a column of a task in multiply-adds; reading an element of b counts as 8 of them.
  const double column_work = double(params.k) * double(std::min(params.m, kRowBlock) + 8) *
                             double(product(params.reduced_dims, params.reduced_sizes));
  const double all_work = column_work * double(params.n) * double(batches * row_tasks);
  const int64_t threads = int64_t(std::min(double(num_threads()), 1 + all_work / kDirectWorkPerThread));
  // The sums of a task stay in L1 or L2. Longer pieces of b's rows are prefetched better.
  const int64_t most_columns = (params.m == 1 ? 168 : 42) * kPanelColumns<T>;
  const int64_t task_columns = direct_task_columns<T>(params.n, most_columns, batches * row_tasks, threads);
  const int64_t column_tasks = ceil_div(params.n, task_columns);
  const int64_t tasks = batches * row_tasks * column_tasks;
  const double work = column_work * double(std::min(params.n, task_columns));
  parallel_for(tasks, int64_t(1 + kDirectWorkPerThread / (1 + work)), [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t batch = index / (row_tasks * column_tasks);
      const int64_t row = index % row_tasks * kRowBlock;
      const int64_t column = index / row_tasks % column_tasks * task_columns;
      const DirectTask<T> task{params,
                               of_batch(params, params.a, batch),
                               of_batch(params, params.b, batch),
                               row,
                               column,
                               std::min(kRowBlock, params.m - row),
                               std::min(task_columns, params.n - column),
                               plain_result<T>(params, batch)};
      if (backward)
        task.run(epilogues.backward());
      else
        task.run(epilogues.forward(batch));
    }
  });
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
