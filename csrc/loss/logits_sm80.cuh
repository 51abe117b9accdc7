// Products whose results are logits, on mma.sync: the main loop of gemm_sm80.cuh with the epilogues of logits.cuh.
//
// Problem        x = alpha a b + bias (rows, vocabulary), of which only statistics or gradients leave the kernel.
// Tile, warps, pipeline, operands: those of gemm_sm80.cuh, of one shape (kLogitShape). a and b are contiguous along k,
//                which is never split.
// Barriers       Those of the main loop; the epilogue has none.
// Registers      The accumulators, and a copy of some of them, which become logits.
#pragma once

#include "gemm/gemm_sm80.cuh"
#include "loss/logits.cuh"

namespace cuda_ext::loss {

// Grid: (tiles).
template <class Gemm, class Epilogue>
GLOBAL(Gemm::kThreads, Gemm::kMinBlocks)
logits_sm80(GRID_CONSTANT GemmParams product, GRID_CONSTANT sm80::GemmPlan plan, GRID_CONSTANT Epilogue store) {
  SHARED_STORAGE(typename Gemm::Storage, shared);
  const auto find_position = [&](int block) {
    return sm80::find_tile(plan.row_tiles, plan.column_tiles, block, Gemm::kBlockM, Gemm::kBlockN);
  };
  epilogue::TilePosition position = find_position(arch::block_x());
  typename Gemm::Accumulators sums = {};
  sm80::multiply_block<Gemm>(product, plan, position, find_position, shared, sums);
  position = find_position(arch::opaque_block_x());  // again, because the products leave no registers to keep it

  constexpr int kColumns = kPartColumnsSm80;  // of a fragment
  constexpr int kCount = kColumns / 2, kParts = Gemm::kWarpN / kColumns;
  const int64_t row = position.row + Gemm::warp_row() * Gemm::kWarpM;
  const int64_t column = position.column + Gemm::warp_column() * Gemm::kWarpN;
#pragma unroll 1
  for (int i = 0; i < Gemm::kRows * kParts; ++i) {
    Fragment<kCount> fragment;
    const auto at = [&](int p, int r) { return sums[p / kParts][p % kParts * (kColumns / 8) + r / 4][r % 4]; };
    copy_part<Gemm::kRows * kParts>(at, i, fragment.x);
    const int64_t fragment_column = column + i % kParts * kColumns;
    fragment.place(int(row) + i / kParts * 16, int(fragment_column));
    store.run(product, fragment, fragment_column / kColumns);
  }
}

}  // namespace cuda_ext::loss
