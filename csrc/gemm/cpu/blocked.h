// Products of packed operands, after Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008.
//
// The output is cut into tasks of up to about 1000 x 480 elements (x 960 with AMX), which threads fetch from a queue. A
// task goes through k in blocks of PanelsOfA::block_k. For each block it packs the rows of b (which stay in L2) and
// then, rows_together at a time, the rows of a, and multiplies every panel of a (which stays in L1) by every
// panel of b. Partial sums are kept in scratch memory, tile by tile. After the last block a tile goes straight
// from the microkernel to the epilogue, which finds it in L1, and from there to memory, once. Packing converts to
// float32, so 16-bit operands cost no more than float32 ones. Where the CPU multiplies pairs of bfloat16, they stay
// pairs and cost half (`depth` 2: see panels.h); with AMX, a tenth (`tiles`: see cpu/amx.h).
#pragma once

#include "gemm/cpu/inner_loops.h"
#include "gemm/cpu/epilogue.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

// The panels of a: their rows, the elements along k of a block, and their distance in memory.
template <class T, bool tiles>
struct PanelsOfA {
  static constexpr int64_t rows = kPanelRows, block_k = kBlockK, size = kPanelSize<T>;
  static constexpr int64_t rows_together = kRowBlock;  // are packed at a time
};
// A panel and that of b fit in L1 together.
template <class T>
struct PanelsOfA<T, true> {
  static constexpr int64_t rows = 2 * kTileWords, block_k = 128, size = rows * kTilePanelPitch<block_k>;
  static constexpr int64_t rows_together = rows;
};

template <class T>
using MultiplyPanels = void (*)(int64_t k, const T* a, const T* b, T* tile, bool accumulate);

// tile (rows, kPanelColumns) = [tile +] a (rows, k) @ b (k, vectors * lanes), panels of k elements.
template <class T, int depth, PanelOrder order, int rows, int vectors>
void multiply_panels(int64_t k, const T* a, const T* b, T* tile, bool accumulate) {
  constexpr int64_t width = kPanelColumns<T>, row = kPanelRowStride<order>, step = kPanelStepStride<order>;
  using Element = Packed<depth, T>;
  const auto* const element_a = reinterpret_cast<const Element*>(a);
  const auto* const element_b = reinterpret_cast<const Element*>(b);
  if (accumulate)
    tile_product<T, rows, vectors, true>(k, element_a, row, step, element_b, width, tile, width);
  else
    tile_product<T, rows, vectors, false>(k, element_a, row, step, element_b, width, tile, width);
}

// One instantiation for each size, so that edges need no padding. Only one for float64, which need not be fast: at an
// edge it also multiplies whatever lies next to it in memory, and those results are never read.
template <class T, int depth, PanelOrder order, size_t... index>
MultiplyPanels<T> find_in_table(int64_t rows, int64_t vectors, std::index_sequence<index...>) {
  static constexpr MultiplyPanels<T> table[] = {
      &multiply_panels<T, depth, order, int(index) / kPanelVectors + 1, int(index) % kPanelVectors + 1>...};
  return table[(rows - 1) * kPanelVectors + vectors - 1];
}
template <class T, int depth, PanelOrder order>
MultiplyPanels<T> find_multiply_panels(int64_t rows, int64_t vectors) {
  if constexpr (std::is_same_v<T, double>) {
    return &multiply_panels<T, depth, order, kPanelRows, kPanelVectors>;
  } else {
    return find_in_table<T, depth, order>(rows, vectors, std::make_index_sequence<kPanelRows * kPanelVectors>{});
  }
}

// How the output of each batch is divided into tasks.
struct Grid {
  int64_t row_tasks;
  int64_t column_tasks;
};

// Part `index` of `size`, in `parts` parts whose sizes differ by a unit at most: [first, second).
inline std::pair<int64_t, int64_t> part_of(int64_t size, int64_t unit, int64_t parts, int64_t index) {
  const int64_t units = ceil_div(size, unit);
  const auto begin_of = [&](int64_t i) { return std::min(size, units * i / parts * unit); };
  return {begin_of(index), begin_of(index + 1)};
}

// The panels of b should fit in half of a 1 MB L2; the partial sums of a task in about 2 MB, with tiles in 4.
template <class T, bool tiles>
constexpr int64_t kMaxTaskColumns = (tiles ? 960 : 480) / int64_t(sizeof(T) / sizeof(float));
constexpr int64_t kMaxTaskRows = 15 * kRowBlock;

// Columns of tasks are multiples of this: of a panel, whose registers parts of one would not fill, or of a tile.
template <class T, bool tiles>
constexpr int64_t kColumnUnit = tiles ? int64_t(kTileWords) : int64_t(kPanelColumns<T>);

// Chooses the grid with the lowest predicted time. A task costs its multiply-adds, and packing an element as much as 12
// of them, or 30 with tiles.
template <class T, bool tiles>
Grid choose_grid(int64_t m, int64_t n, int64_t batches, int64_t parts, int64_t threads) {
  constexpr double kPackingCost = tiles ? 30 : 12;
  const int64_t max_columns = kMaxTaskColumns<T, tiles> / parts / kPanelColumns<T> * kPanelColumns<T>;
  Grid best{};
  double best_cost = std::numeric_limits<double>::infinity();
  const int64_t least_rows = ceil_div(m, kMaxTaskRows), least_columns = ceil_div(n, max_columns);
  for (int64_t r = least_rows; r <= std::min(least_rows + threads, ceil_div(m, kRowBlock)); ++r) {
    for (int64_t c = least_columns; c <= std::min(least_columns + threads, ceil_div(n, kColumnUnit<T, tiles>)); ++c) {
      const double rows = double(std::min(m, ceil_div(ceil_div(m, kRowBlock), r) * kRowBlock));
      const double columns =
          double(std::min(n, ceil_div(ceil_div(n, kColumnUnit<T, tiles>), c) * kColumnUnit<T, tiles>) * parts);
      const double cost =
          double(ceil_div(r * c * batches, threads)) * (rows * columns + kPackingCost * (rows + columns));
      if (cost < best_cost) {
        best_cost = cost;
        best = {r, c};
      }
    }
  }
  return best;
}

// with_storage for operands to be packed; pairs are always of bfloat16.
template <class T, int depth, class F>
CUDA_EXT_INLINE void with_operand(Dtype dtype, F&& f) {
  if constexpr (depth == 1)
    with_storage<T>(dtype, f);
  else
    f(static_cast<bfloat16_t*>(nullptr));
}

template <class T, int depth, bool tiles>
struct Task {
  using Panels = PanelsOfA<T, tiles>;

  const GemmParams& params;
  Operand a;  // of this batch
  Operand b;
  int64_t row;
  int64_t column;
  int64_t rows;
  int64_t columns;
  T* plain_out;  // output of this batch if the product needs no epilogue, else null

  template <class Epilogue>
  void run(const Epilogue& epilogue) const {
    const int64_t parts = params.gated && params.preact.data == nullptr ? 2 : 1;  // only the forward product is gated
    const int64_t reduced = product(params.reduced_dims, params.reduced_sizes);
    constexpr int64_t block_k = depth * Panels::block_k, tile_size = Panels::rows * kPanelColumns<T>;
    const int64_t blocks_per_product = std::max<int64_t>(1, ceil_div(params.k, block_k));  // an empty sum writes zeros
    const int64_t blocks = reduced * blocks_per_product;
    const int64_t row_tiles = ceil_div(rows, Panels::rows), column_tiles = ceil_div(columns, kPanelColumns<T>);
    const int64_t panel_steps = ceil_div(std::min(params.k, block_k), depth);
    const int64_t panel_size = (tiles ? whole_tiles(panel_steps) : panel_steps) * kPanelColumns<T>;

    const int64_t panels_b_size = column_tiles * parts * panel_size;
    const int64_t sums_size = blocks > 1 ? row_tiles * column_tiles * parts * tile_size : 0;
    constexpr int64_t panels_together = Panels::rows_together / Panels::rows;
    const int64_t panels_a_size = std::min(panels_together, row_tiles) * Panels::size;
    const Scratch scratch((panels_b_size + panels_a_size + sums_size) * int64_t(sizeof(T)));
    T* const panels_b = scratch.as<T>();
    T* const panels_a = panels_b + panels_b_size;
    T* const sums = panels_a + panels_a_size;
    alignas(64) T single_tile[2 * tile_size];
    const AmxTiles amx(tiles);
    const bool row_major = panel_order(a.row_stride, a.column_stride) == PanelOrder::kRowMajor;

    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t r = block / blocks_per_product;
      const int64_t first_k = block % blocks_per_product * block_k;
      const int64_t k = std::min(block_k, params.k - first_k);
      const auto reduced_offset = [&](const int64_t* strides) {
        return batch_offset(r, params.reduced_dims, params.reduced_sizes, strides);
      };
      const int64_t offset_a = reduced_offset(params.reduced_strides_a) + first_k * a.column_stride;
      const int64_t offset_b = reduced_offset(params.reduced_strides_b) + first_k * b.row_stride;

      if (k > 0) pack_columns(offset_b, k, parts, panel_size, panels_b);
      for (int64_t i = 0; i < row_tiles; ++i) {
        if (k > 0 && i % panels_together == 0) pack_rows(offset_a, i * Panels::rows, k, panels_a);
        const T* const panel_a = panels_a + i % panels_together * Panels::size;
        const int64_t tile_rows = std::min<int64_t>(Panels::rows, rows - i * Panels::rows);
        for (int64_t j = 0; j < column_tiles; ++j) {
          const int64_t tile_columns = std::min<int64_t>(kPanelColumns<T>, columns - j * kPanelColumns<T>);
          const int64_t vectors = ceil_div(tile_columns, kLanes<T>);
          if (blocks == 1 && plain_out != nullptr && tile_columns % kLanes<T> == 0) {
            // Straight to the output: if k is short, another pass over the tile would take as long as the product.
            find_multiply_rows<T>(tile_rows, vectors, DirectSizes{})(
                k, panel_a, row_major ? kBlockK : 1, row_major ? 1 : kPanelRows, panels_b + j * panel_size,
                kPanelColumns<T>, nullptr,
                plain_out + (row + i * kPanelRows) * params.n + column + j * kPanelColumns<T>, params.n, false);
            continue;
          }
          const auto multiply = find_multiply(row_major, tile_rows, vectors);
          T* const tile = blocks > 1 ? sums + (i * column_tiles + j) * parts * tile_size : single_tile;
          for (int64_t part = 0; part < parts; ++part)
            multiply(ceil_div(k, depth), panel_a, panels_b + (j * parts + part) * panel_size, tile + part * tile_size,
                     block > 0);
          if (block == blocks - 1)
            finish(epilogue, {row + i * Panels::rows, column + j * kPanelColumns<T>, tile_rows, tile_columns}, tile);
        }
      }
    }
  }

 private:
  static auto find_multiply(bool row_major, int64_t rows, int64_t vectors) {
    if constexpr (tiles)
      return [rows, vectors](int64_t k, const T* a, const T* b, T* tile, bool accumulate) {
        const auto product = accumulate ? &amx_product<true> : &amx_product<false>;
        product(rows, vectors * kTileWords, k, a, kTilePanelPitch<Panels::block_k>, b, kPanelColumns<T>, tile,
                kPanelColumns<T>);
      };
    else
      return row_major ? find_multiply_panels<T, depth, PanelOrder::kRowMajor>(rows, vectors)
                       : find_multiply_panels<T, depth, PanelOrder::kColumnMajor>(rows, vectors);
  }

  // Epilogues take up to kPanelRows rows, of the same row block.
  template <class Epilogue>
  static void finish(const Epilogue& epilogue, const TilePosition& position, T* tile) {
    for (int64_t i = position.row, end; i < position.row + position.rows; i = end) {
      end = std::min(position.row + position.rows, (i / kPanelRows + 1) * kPanelRows);
      epilogue({i, position.column, end - i, position.columns}, tile + (i - position.row) * kPanelColumns<T>,
               Panels::rows * kPanelColumns<T>);
    }
  }

  void pack_rows(int64_t offset_a, int64_t first, int64_t k, T* panels) const {
    with_operand<T, depth>(a.dtype, [&](auto* type) {
      const auto* data = static_cast<decltype(type)>(const_cast<void*>(a.data)) + offset_a;
      const auto* from = data + (row + first) * a.row_stride;
      const int64_t count = std::min(Panels::rows_together, rows - first), readable = params.m - row - first;
      if constexpr (tiles)
        pack_tiles_of_a<Panels::block_k>(from, a.row_stride, a.column_stride, count, readable, k, panels);
      else
        pack_a<depth>(from, a.row_stride, a.column_stride, count, readable, k, panels);
    });
  }

  // Panels in the order in which tiles use them: with two parts gate, up, gate, up.
  void pack_columns(int64_t offset_b, int64_t k, int64_t parts, int64_t panel_size, T* panels) const {
    with_operand<T, depth>(b.dtype, [&](auto* type) {
      const auto* data = static_cast<decltype(type)>(const_cast<void*>(b.data)) + offset_b;
      for (int64_t part = 0; part < parts; ++part)
        pack_b<depth>(data + (column + part * params.n) * b.column_stride, b.row_stride, b.column_stride, k, columns,
                      parts * panel_size, panels + part * panel_size);
    });
    const int64_t steps = ceil_div(k, depth);
    if (tiles && steps % kTileWords != 0)
      for (int64_t panel = 0; panel < ceil_div(columns, kPanelColumns<T>) * parts; ++panel)
        std::fill(panels + panel * panel_size + steps * kPanelColumns<T>,
                  panels + panel * panel_size + whole_tiles(steps) * kPanelColumns<T>, T(0));
  }
};

// The least number of multiply-adds that is worth waking a thread for (about 10 us of work).
constexpr double kWorkPerThread = 1e6;

template <class T, int depth, bool tiles>
void run_panels(const GemmParams& params, const Epilogues<T>& epilogues) {
  const int64_t batches = product(params.batch_dims, params.batch_sizes);
  const int64_t parts = params.gated && !epilogues.is_backward() ? 2 : 1;
  const double work = double(batches * product(params.reduced_dims, params.reduced_sizes)) * double(params.m) *
                      double(params.n * parts) * double(params.k);
  const int64_t threads = int64_t(std::min(double(num_threads()), 1.0 + work / kWorkPerThread));
  const Grid grid = choose_grid<T, tiles>(params.m, params.n, batches, parts, threads);
  const int64_t tasks_per_batch = grid.row_tasks * grid.column_tasks;

  const auto run_task = [&](int64_t index) {
    const int64_t batch = index / tasks_per_batch;
    const int64_t in_batch = index % tasks_per_batch;
    const auto [row, last_row] = part_of(params.m, kRowBlock, grid.row_tasks, in_batch % grid.row_tasks);
    const auto [column, last_column] =
        part_of(params.n, kColumnUnit<T, tiles>, grid.column_tasks, in_batch / grid.row_tasks);
    const Task<T, depth, tiles> task{params,
                                     of_batch(params, params.a, batch),
                                     of_batch(params, params.b, batch),
                                     row,
                                     column,
                                     last_row - row,
                                     last_column - column,
                                     depth == 1 ? plain_result<T>(params, batch) : nullptr};
    if (epilogues.is_backward())
      task.run(epilogues.backward());
    else
      task.run(epilogues.forward(batch));
  };
  const int64_t tasks = batches * tasks_per_batch;
  if (threads == 1) {
    for (int64_t index = 0; index < tasks; ++index) run_task(index);
  } else {
    run_workers(tasks, [&](TaskQueue& queue) {
      for (int64_t index; queue.next(index);) run_task(index);
    });
  }
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
