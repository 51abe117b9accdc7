// The gradient through an activation and the bias before it, in one pass over the gradient of the output.
//
// Problem        ActivationGradParams in gemm.h.
// Tile           A block has kTileColumns columns and loops over block_rows rows. A warp processes whole rows of the
//                tile, so that all accesses are full sectors, each once.
// Sums           Each thread adds its columns, the block its threads through shared memory, and a small kernel the
//                blocks, in an order that depends only on the shape.
// Barriers       One sync_threads, of all threads, in the block's sum.
// Shared memory  (kTileRows, 2 kTileColumns) floats for that sum.
#pragma once

#include "gemm/column_sums.cuh"

namespace cuda_ext::activation_grad {

constexpr int kThreads = 256;
constexpr int kTileColumns = arch::kWarpSize * epilogue::kVector;
constexpr int kRowsAtOnce = 4;
constexpr int kTileRows = kThreads / arch::kWarpSize * kRowsAtOnce;  // in flight per block

struct Storage {
  alignas(16) float sums[kThreads * 2 * epilogue::kVector];
};

// Grid: (column tiles, row tiles). block_sums (row tiles, n), gated: (row tiles, 2n); null if not wanted.
template <int threads>
GLOBAL(threads, 2)
activation_grad(GRID_CONSTANT ActivationGradParams params, int64_t block_rows, float* block_sums) {
  SHARED_STORAGE(Storage, shared);
  using namespace epilogue;
  const int64_t first_column = int64_t(arch::block_x()) * kTileColumns;
  const int64_t first_row = arch::block_y() * block_rows;
  using Threads = BlockThreads<threads>;
  const ThreadColumns mine(threads, Threads::index(), kTileColumns);

  PiecePosition<kRowsAtOnce> position;
  position.column = first_column + mine.column;
  const int64_t left = params.n - position.column;
  position.count = left <= 0 ? 0 : left < kVector ? int(left) : kVector;
  const Output no_hidden;
  const ActivationBackward through{params.activation, params.gated,       params.n,
                                   params.preact,     params.grad_preact, no_hidden};
  float sums[2][kVector] = {};
#pragma unroll 1
  for (int64_t row = first_row; row < first_row + block_rows; row += kTileRows) {
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      position.row[r] = row + mine.row + r * mine.rows;
      position.exists[r] = position.row[r] < params.rows;
    }
    Piece<kRowsAtOnce> grad;
    read(params.grad_out, 0, position, 0, grad);
    through.run(position, grad, sums);
  }
  if (block_sums == nullptr) return;
  const int parts = params.gated ? 2 : 1;
  store_block_sums<Threads>(sums, parts, mine, first_column, params.n, shared.sums,
                            block_sums + arch::block_y() * parts * params.n);
}

}  // namespace cuda_ext::activation_grad
