// The epilogue of an output tile: the formulas of GemmParams, on rows of the tile that are in shared memory as floats.
//
// A thread always has the same kVector adjacent columns. A warp reads and writes whole rows of the tile, so that all
// sectors it accesses in global memory are fully used, and column sums stay in registers until the end.
#pragma once

#include "gemm/column_sums.cuh"

namespace cuda_ext::epilogue {

// Offset in elements of batch (or reduced product) `index`; dims are innermost first. The host has checked that there
// are fewer than 2^31, because 64-bit divisions are slow.
DEVICE int64_t offset_of(int index, int dims, const int64_t (&sizes)[kMaxBatchDims],
                         const int64_t (&strides)[kMaxBatchDims]) {
  int64_t elements = 0;
#pragma unroll 1
  for (int d = 0; d < dims; ++d) {
    const int size = int(sizes[d]);
    elements += index % size * strides[d];
    index /= size;
  }
  return elements;
}

// The part of the output that a block computes. `columns` is the tile's width in the output: half of block_n if there
// are gate and up columns, which are then next to each other in the tile.
struct TilePosition {
  int batch;
  int64_t row;
  int64_t column;
  int columns;

  DEVICE bool is_empty() const { return false; }
  DEVICE int64_t row_end(const GemmParams& params) const { return params.m; }  // after the last row of the product
  DEVICE int out_batch() const { return batch; }
  DEVICE bool has_bias(const GemmParams&) const { return true; }  // if there is one
  DEVICE int64_t bias_offset(const GemmParams&) const { return 0; }
};

// The epilogue of a tile that Threads share. `stride`: floats between rows in shared memory. The tile consists of runs
// of warp_rows rows (one per row of warps); shared memory has pass_rows of each run at a time. `rows_at_once`: as many
// as fit in registers next to the accumulators that are still to be staged. Tile: its position.
template <class Threads, int stride, int staged_rows, int warp_rows, int pass_rows, int rows_at_once = 2,
          class Tile = TilePosition>
class TileEpilogue {
 public:
  static constexpr int kRowsAtOnce = rows_at_once;

  DEVICE TileEpilogue(const GemmParams& params, const Tile& tile)
      : params_(params),
        tile_(tile),
        mine_(Threads::kThreads, Threads::index(), tile.columns),
        column_(tile.column + mine_.column),
        offset_c_(offset_of(tile.batch, params.batch_dims, params.batch_sizes, params.c.batch_strides)),
        offset_residual_(offset_of(tile.batch, params.batch_dims, params.batch_sizes, params.residual.batch_strides)),
        alpha_(float(params.alpha)),
        beta_(float(params.beta)) {
    const int64_t left = params.n - column_;
    count_ = left <= 0 ? 0 : left < kVector ? int(left) : kVector;
    if (params.bias.data != nullptr && count_ > 0 && tile.has_bias(params)) {
      read_bias(0, bias_[0]);
      if (params.gated) read_bias(params.n, bias_[1]);
    }
  }

  // Processes the rows of pass `pass`.
  DEVICE void run(const float* staged, int pass) {
    if (count_ == 0) return;
    const auto run_backward = [&](const auto& position, const auto& products) { backward(position, products); };
    const auto run_forward = [&](const auto& position, const auto& products) { forward(position, products); };
    if constexpr (kRowsAtOnce == 1) {  // registers are scarce: a loop for each, because each needs others
      if (params_.preact.data != nullptr)
        for_rows(staged, pass, run_backward);
      else
        for_rows(staged, pass, run_forward);
    } else {
      for_rows(staged, pass, [&](const auto& position, const auto& products) {
        if (params_.preact.data != nullptr)
          run_backward(position, products);
        else
          run_forward(position, products);
      });
    }
  }

  // Stores the sums of the tile's columns, which belong to its row of tiles.
  DEVICE void store_sums(float* shared, float* bias_sums) const {
    store_block_sums<Threads>(sums_, params_.gated ? 2 : 1, mine_, tile_.column, params_.n, shared, bias_sums);
  }

 private:
  using Rows = Piece<kRowsAtOnce>;
  using Position = PiecePosition<kRowsAtOnce>;

  template <class F>
  DEVICE void for_rows(const float* staged, int pass, const F& f) const {
#pragma unroll 1  // the code is long
    for (int i = mine_.row; i < staged_rows; i += kRowsAtOnce * mine_.rows) {
      Position position;
      position.column = column_;
      position.count = count_;
      const float* products[kRowsAtOnce];
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        const int row = i + r * mine_.rows;
        position.row[r] = tile_.row + row / pass_rows * warp_rows + pass * pass_rows + row % pass_rows;
        position.exists[r] = position.row[r] < tile_.row_end(params_);
        products[r] = staged + row * stride + mine_.column;
      }
      f(position, products);
    }
  }

  DEVICE void read_bias(int64_t right, float (&bias)[kVector]) const {
    const Operand& operand = params_.bias;
    with_storage(operand.dtype, [&](auto tag) {
      using T = decltype(tag);
      read_vector(
          static_cast<const T*>(operand.data) + tile_.bias_offset(params_) + (column_ + right) * operand.column_stride,
          operand.column_stride, count_, bias);
    });
  }

  // z = alpha * products + beta * c + bias; also stores it in preact_out if present.
  DEVICE void make_preact(const Position& position, int part, const float* const (&products)[kRowsAtOnce],
                          Rows& z) const {
    load_products(products, part * tile_.columns, z);
    if (params_.c.data != nullptr) {
      Rows term;
      read(params_.c, offset_c_, position, 0, term);
      for_elements<kRowsAtOnce>([&](int r, int i) { z.values[r][i] += beta_ * term.values[r][i]; });
    }
    if (params_.bias.data != nullptr)
      for_elements<kRowsAtOnce>([&](int r, int i) { z.values[r][i] += bias_[part][i]; });
    if (params_.preact_out.data != nullptr) {
      const int64_t width = (params_.gated ? 2 : 1) * params_.n;
      write(params_.preact_out, tile_.out_batch() * params_.m * width, width, position, part * params_.n, z);
    }
  }

  DEVICE void forward(const Position& position, const float* const (&products)[kRowsAtOnce]) const {
    Rows y;
    make_preact(position, 0, products, y);
    if (params_.gated) {
      Rows up;
      make_preact(position, 1, products, up);
      with_activation(params_.activation, [&](auto f) {
        for_elements<kRowsAtOnce>([&](int r, int i) { y.values[r][i] = f.value(y.values[r][i]) * up.values[r][i]; });
      });
    } else {
      with_activation(params_.activation, [&](auto f) {
        for_elements<kRowsAtOnce>([&](int r, int i) { y.values[r][i] = f.value(y.values[r][i]); });
      });
    }
    if (params_.residual.data != nullptr) {
      Rows term;
      read(params_.residual, offset_residual_, position, 0, term);
      for_elements<kRowsAtOnce>([&](int r, int i) { y.values[r][i] += term.values[r][i]; });
    }
    write(params_.out, tile_.out_batch() * params_.m * params_.n, params_.n, position, 0, y);
  }

  DEVICE void backward(const Position& position, const float* const (&products)[kRowsAtOnce]) {
    Rows grad;
    load_products(products, 0, grad);
    const ActivationBackward through{params_.activation, params_.gated, params_.n,
                                     params_.preact,     params_.out,   params_.hidden};
    through.run(position, grad, sums_);
  }

  DEVICE void load_products(const float* const (&products)[kRowsAtOnce], int right, Rows& v) const {
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      const auto words = arch::load_shared<arch::Words4>(arch::shared_address(products[r] + right));
#pragma unroll
      for (int i = 0; i < kVector; ++i) v.values[r][i] = alpha_ * arch::bits_float(words.data[i]);
    }
  }

  const GemmParams& params_;
  const Tile tile_;
  const ThreadColumns mine_;
  const int64_t column_;  // this thread's first column in the output
  const int64_t offset_c_;
  const int64_t offset_residual_;
  const float alpha_;
  const float beta_;
  int count_;  // this thread's columns that are inside the matrix
  float bias_[2][kVector] = {};
  float sums_[2][kVector] = {};  // backward: column sums of out; gated: of gate and up
};

}  // namespace cuda_ext::epilogue
