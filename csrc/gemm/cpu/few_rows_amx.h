// Products of a few rows with AMX, as in text generation: packing b would take longer than reading it. The columns of
// b, whose elements along k are adjacent, are the rows of a tile as they are, so the product is computed transposed:
//   tile^T (32 columns of b, rows) = b^T (32, k) @ a^T (k, rows)
// a^T is packed once, for all tasks; a task has some of the columns of b. Sums stay in tiles for all of k.
#pragma once

#include "gemm/cpu/in_place.h"
#include "gemm/cpu/blocked.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

constexpr int64_t kFewTileRows = 256;             // the most rows for which this method is faster
constexpr int64_t kTileColumns = 2 * kTileWords;  // of b, at a time
constexpr int64_t kMaxColumnsPerTask = 4 * kTileColumns;

inline bool prefers_few_rows(const GemmParams& params) {
  const Operand& b = params.b;
  return params.m <= kFewTileRows && params.preact.data == nullptr && params.k > 0 &&
         params.k % (2 * kTileWords) == 0 && b.row_stride == 1 && b.column_stride >= params.k &&
         b.column_stride % 2 == 0 && product(params.reduced_dims, params.reduced_sizes) == 1;
}

// One batch of the product; a_t: a^T in panels (k / 2, kPanelColumns) of pairs.
template <class Epilogue>
class FewRowsTask {
 public:
  FewRowsTask(const GemmParams& params, const Operand& b, const float* a_t, const Epilogue& epilogue)
      : params_(params), b_(b), a_t_(a_t), epilogue_(epilogue) {}

  void run(int64_t begin, int64_t end) const {
    const AmxTiles amx;
    const Scratch tail(end % kTileColumns != 0 ? kTileColumns * params_.k * int64_t(sizeof(bfloat16_t)) : 0);
    alignas(64) float tile[2 * kTileElements], transposed[kTileElements];
    const int64_t parts = params_.gated ? 2 : 1, pairs = params_.k / 2;
    for (int64_t column = begin; column < end; column += kTileColumns) {
      const int64_t columns = std::min(kTileColumns, end - column);
      for (int64_t row = 0; row < params_.m; row += kPanelColumns<float>) {
        const int64_t rows = std::min<int64_t>(kPanelColumns<float>, params_.m - row);
        for (int64_t part = 0; part < parts; ++part) {
          int64_t stride = b_.column_stride;
          const bfloat16_t* from =
              static_cast<const bfloat16_t*>(b_.data) + (column + part * params_.n) * b_.column_stride;
          if (columns < kTileColumns) {
            copy_columns(from, columns, tail.as<bfloat16_t>());
            from = tail.as<bfloat16_t>();
            stride = params_.k;
          }
          amx_product<false>(columns, rows, pairs, reinterpret_cast<const float*>(from), stride / 2, a_t_ + row * pairs,
                             kPanelColumns<float>, transposed, kPanelColumns<float>);
          transpose_tile(transposed, rows, columns, tile + part * kTileElements);
        }
        for (int64_t i = 0; i < rows; i += kPanelRows)
          epilogue_({row + i, column, std::min<int64_t>(kPanelRows, rows - i), columns},
                    tile + i * kPanelColumns<float>, kTileElements);
      }
    }
  }

 private:
  static constexpr int64_t kTileElements = kPanelColumns<float> * kPanelColumns<float>;

  // Tiles past the last column of b would read outside it.
  void copy_columns(const bfloat16_t* from, int64_t columns, bfloat16_t* to) const {
    for (int64_t i = 0; i < columns; ++i) std::copy_n(from + i * b_.column_stride, params_.k, to + i * params_.k);
    std::fill(to + columns * params_.k, to + kTileColumns * params_.k, bfloat16_t{});
  }

  // from (columns, rows) -> to (rows, columns), both kPanelColumns apart.
  static void transpose_tile(const float* from, int64_t rows, int64_t columns, float* to) {
    constexpr int64_t pitch = kPanelColumns<float>, lanes = kLanes<float>;
    for (int64_t j = 0; j < columns; j += lanes)
      for (int64_t i = 0; i < rows; i += lanes) {
        Vec<float> square[lanes];
#pragma GCC unroll 16
        for (int64_t c = 0; c < lanes; ++c) square[c] = load(from + (j + c) * pitch + i);
        transpose<float>(square);
#pragma GCC unroll 16
        for (int64_t r = 0; r < lanes; ++r) store(to + (i + r) * pitch + j, square[r]);
      }
  }

  const GemmParams& params_;
  const Operand& b_;
  const float* a_t_;
  const Epilogue& epilogue_;
};

inline void run_few_rows(const GemmParams& params, const Epilogues<float>& epilogues) {
  const int64_t batches = product(params.batch_dims, params.batch_sizes), pairs = params.k / 2;
  const int64_t panel_size = pairs * kPanelColumns<float>, size = ceil_div(params.m, kPanelColumns<float>) * panel_size;
  const auto pack = [&](int64_t batch, float* a_t) {
    const Operand a = of_batch(params, params.a, batch);
    pack_b<2>(static_cast<const bfloat16_t*>(a.data), a.column_stride, a.row_stride, params.k, params.m, panel_size,
              a_t);
  };
  const auto run_columns = [&](int64_t batch, const float* a_t, int64_t begin, int64_t end) {
    const auto epilogue = epilogues.forward(batch);
    const Operand b = of_batch(params, params.b, batch);
    FewRowsTask(params, b, a_t, epilogue).run(begin, std::min(params.n, end));
  };
  // Reading an element of b takes as long as 8 multiply-adds of the direct method, whose threshold this is.
  const double work = double(batches * params.n) * double(pairs) * double(16 + params.m / 4);
  const int64_t threads = int64_t(std::min(double(num_threads()), 1 + work / kDirectWorkPerThread));
  if (threads == 1 || batches >= threads) {
    const auto worker = [&](TaskQueue& queue) {
      const Scratch a_t(size * int64_t(sizeof(float)));
      for (int64_t batch; queue.next(batch);) {
        pack(batch, a_t.as<float>());
        run_columns(batch, a_t.as<float>(), 0, params.n);
      }
    };
    if (threads > 1) return run_workers(batches, worker);
    TaskQueue queue(batches);
    return worker(queue);
  }
  // Several threads share a batch, and its packed a.
  const Scratch panels(batches * size * int64_t(sizeof(float)));
  parallel_for(batches, 1, [&](int64_t begin, int64_t end) {
    for (int64_t batch = begin; batch < end; ++batch) pack(batch, panels.as<float>() + batch * size);
  });
  const int64_t share = ceil_div(ceil_div(batches * params.n, 4 * threads), kTileColumns) * kTileColumns;
  const int64_t columns = std::min(share, kMaxColumnsPerTask), tasks = ceil_div(params.n, columns);
  run_workers(batches * tasks, [&](TaskQueue& queue) {
    for (int64_t task; queue.next(task);) {
      const int64_t batch = task / tasks, begin = task % tasks * columns;
      run_columns(batch, panels.as<float>() + batch * size, begin, begin + columns);
    }
  });
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
