// The tile shapes of scaled products on wgmma (sm_90a), and what the host decides for a launch. No header of CUDA is
// needed.
#pragma once

#include "gemm/scaled_gemm.h"

namespace cuda_ext::sm90 {

constexpr int kScaledBlockN = 128;
// Rows of a tile: 256 read each operand least often; 128 leave fewer SMs idle.
constexpr int kScaledBlockM[] = {256, 128};
constexpr int kScaledConfigs = int(sizeof kScaledBlockM / sizeof kScaledBlockM[0]);

// Everything the host decides; the same for all blocks.
struct ScaledPlan {
  int config = 0;   // of kScaledBlockM
  int cluster = 1;  // 1 or 2 blocks with adjacent column tiles that load the tile of a once for both
  int clusters = 0;
  int row_tiles = 0;
  int column_groups = 0;  // of `cluster` column tiles
  int raster = 1;         // row tiles of a band, which blocks cover before the next columns
  int k_tiles = 0;
  bool columns_vary = false;  // within a tile, and along k: scales of the columns are read for each k tile
  bool tma_store = false;

  HOST_DEVICE int items() const { return row_tiles * column_groups; }
};

}  // namespace cuda_ext::sm90
