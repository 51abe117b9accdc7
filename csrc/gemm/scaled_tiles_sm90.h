// The tile shapes of scaled products on wgmma (sm_90a), and what the host decides for a launch. No header of CUDA is
// needed.
#pragma once

#include "gemm/scaled_gemm.h"
#include "gemm/tiles_sm90.h"

namespace cuda_ext::sm90 {

// A tile shape, and the k tiles that fit in shared memory.
struct ScaledConfig {
  int block_m;
  int block_n;
  int stages;
  bool promotes;  // adds each k tile's product to sums in float32; else the tensor cores sum
};
// Tiles of 256 rows read each operand least often; those of 128 leave fewer SMs idle. Without promotion there are
// registers for the accumulators of 256 columns, which read shared memory least, the limit of all three.
constexpr ScaledConfig kScaledConfigs[] = {
    {.block_m = 256, .block_n = 128, .stages = 3, .promotes = true},
    {.block_m = 128, .block_n = 128, .stages = 5, .promotes = true},
    {.block_m = 128, .block_n = 256, .stages = 4, .promotes = false},
    // Few rows: limited by reading b, which has small tiles so that many SMs read it.
    {.block_m = 128, .block_n = 64, .stages = 7, .promotes = true},
};
constexpr int kNumScaledConfigs = int(sizeof kScaledConfigs / sizeof kScaledConfigs[0]);
constexpr int kNumGroupedScaledConfigs = 3;  // the first are also those of groups

// Everything the host decides; the same for all blocks.
struct ScaledPlan {
  int config = 0;   // of kScaledConfigs
  int cluster = 1;  // 1 or 2 blocks with adjacent column tiles that load the tile of a once for both
  int clusters = 0;
  int row_tiles = 0;
  int column_groups = 0;  // of `cluster` column tiles
  int raster = 1;         // row tiles of a band, which blocks cover before the next columns
  int k_tiles = 0;
  int splits = 1;             // work items that divide k of a tile and add their sums in the workspace
  int split_k_tiles = 0;      // of a work item
  bool columns_vary = false;  // within a tile, and along k: scales of the columns are read for each k tile
  bool tma_store = false;
  bool tma_add = false;  // TMA adds the product to the output
  double cycles = 0;     // predicted
  // In the workspace; null if not needed.
  uint32_t* arrivals = nullptr;  // (tiles(), kConsumers)
  float* partials = nullptr;     // (splits, tiles(), block_m * block_n)

  // Work items of a cluster for each part of k.
  HOST_DEVICE int items() const { return row_tiles * column_groups; }
  HOST_DEVICE int tiles() const { return items() * cluster; }
};

// Assigns the arrays of `plan` in the workspace at `data`, which may be null to find the size.
inline WorkspaceCursor assign_workspace(void* data, ScaledPlan& plan) {
  WorkspaceCursor cursor(data);
  assign_splits(cursor, kScaledConfigs[plan.config].block_m * kScaledConfigs[plan.config].block_n, plan);
  return cursor;
}

}  // namespace cuda_ext::sm90
