// The gradient through an activation and the bias before it, in one pass over the gradient of the output.
//
// Tile     A block takes kTileColumns columns and goes down rows_of_block rows, a warp one row at a time: all that it
//          reads and writes are whole sectors, once.
// Sums     Each thread adds up its columns, the block adds its threads through shared memory, and a small kernel the
//          blocks, all in an order that depends on nothing but the shape.
// Shared   (kTileRows, 2 kTileColumns) floats for that, used once at the end.
#pragma once

#include "gemm/column_sums.cuh"

namespace cuda_ext::activation_grad {

constexpr int kThreads = 256;
constexpr int kTileColumns = arch::kWarpSize * epilogue::kVector;
constexpr int kRowsAtOnce = 4;
constexpr int kTileRows = kThreads / arch::kWarpSize * kRowsAtOnce;  // that a block has under way

struct Storage {
  alignas(16) float sums[kThreads * 2 * epilogue::kVector];
};

// Grid: (column tiles, row tiles). block_sums (row tiles, n), gated: (row tiles, 2n); null if nobody wants them.
template <int threads>
GLOBAL(threads, 2)
activation_grad(GRID_CONSTANT ActivationGradParams params, int64_t rows_of_block, float* block_sums) {
  SHARED_STORAGE(Storage, shared);
  using namespace epilogue;
  const int64_t first_column = int64_t(arch::block_x()) * kTileColumns;
  const int64_t first_row = arch::block_y() * rows_of_block;
  const ThreadColumns mine(threads, kTileColumns);

  PiecePosition<kRowsAtOnce> at;
  at.column = first_column + mine.column;
  const int64_t left = params.n - at.column;
  at.count = left <= 0 ? 0 : left < kVector ? int(left) : kVector;
  const Output no_hidden;
  const ActivationBackward through{params.activation, params.gated,       params.n,
                                   params.preact,     params.grad_preact, no_hidden};
  float sums[2][kVector] = {};
#pragma unroll 1
  for (int64_t row = first_row; row < first_row + rows_of_block; row += kTileRows) {
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      at.row[r] = row + mine.row + r * mine.rows;
      at.exists[r] = at.row[r] < params.rows;
    }
    Piece<kRowsAtOnce> grad;
    read(params.grad_out, 0, at, 0, grad);
    through.run(at, grad, sums);
  }
  if (block_sums == nullptr) return;
  const int parts = params.gated ? 2 : 1;
  store_block_sums<threads>(sums, parts, mine, first_column, params.n, shared.sums,
                            block_sums + arch::block_y() * parts * params.n);
}

}  // namespace cuda_ext::activation_grad
