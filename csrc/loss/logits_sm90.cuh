// Products whose results are logits, on wgmma: the kernel of gemm_sm90.cuh with the epilogues of logits.cuh.
//
// Problem        x = alpha a b + bias (rows, vocabulary), of which only statistics or gradients leave the kernel.
// Tile, warpgroups, cluster, barriers, operands: those of gemm_sm90.cuh, of the config kLogitConfig: the two consumers
//                share a tile, and multiply nothing while they compute its exponentials.
// Shared memory  Those of the config; the epilogue uses none.
// Registers      240 of a consumer; 128 are accumulators, and 32 or 16 a copy of some, which become logits.
#pragma once

#include "gemm/gemm_sm90.cuh"
#include "loss/logits.cuh"

namespace cuda_ext::loss {

using tile::ConsumerThreads;

// Grid: (plan.clusters * plan.cluster_blocks(),).
template <class Gemm, class Epilogue>
GLOBAL(Gemm::kThreads, 1)
logits_sm90(GRID_CONSTANT GemmParams product, GRID_CONSTANT sm90::GemmPlan plan, GRID_CONSTANT sm90::TensorMaps maps,
            GRID_CONSTANT Epilogue store) {
  SHARED_STORAGE(typename Gemm::Storage, shared);
  const auto store_tile = [&](const epilogue::TilePosition& tile, const typename Gemm::Accumulators& sums) {
    constexpr int kColumns = Epilogue::kColumnsSm90, kCount = kColumns / 2, kParts = Gemm::kBlockN / kColumns;
#pragma unroll 1
    for (int i = 0; i < Gemm::kRowBlocks * kParts; ++i) {
      Fragment<kCount> fragment;
      copy_part<Gemm::kRowBlocks * kParts>([&](int p, int r) { return sums[p / kParts][p % kParts * kCount + r]; }, i,
                                           fragment.x);
      const int64_t row = tile.row + i / kParts * sm90::kRowBlock + ConsumerThreads::index() / arch::kWarpSize * 16;
      const int64_t column = tile.column + i % kParts * kColumns;
      fragment.place(int(row), int(column));
      store.run(product, fragment, column / kColumns);
    }
  };
  sm90::run_block<Gemm>(product, plan, maps, shared, store_tile);
}

}  // namespace cuda_ext::loss
