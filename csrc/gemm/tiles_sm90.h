// The tile shapes of the GEMM on wgmma (sm_90a), and what the host decides for a launch: all that the kernel knows of
// its plan (plan_sm90.h). No header of CUDA is needed.
#pragma once

#include "base/workspace.h"
#include "gemm/problem.h"

namespace cuda_ext::sm90 {

// A line of an operand tile in shared memory: a row of the 128-byte swizzle. Operands that are contiguous along k have
// one line per row or column of the tile; others have runs of kLineBytes along it, one line per k.
constexpr int kLineBytes = 128;
constexpr int kRowBlock = 64;  // rows of a wgmma
constexpr int kConsumers = 2;  // warpgroups that multiply

// A tile shape and everything derived from it.
struct GemmConfig {
  int block_m;
  int block_n;
  int stages;
  bool ping_pong;  // a tile belongs to one consumer, and the other stores its own meanwhile; else they share each tile
  bool swapped;    // the tile is transposed: its rows are columns of the output
  bool tma_only = false;  // the accumulators leave registers only for GemmPlan::tma_store without gate and up
  int k_blocks = 1;       // the most blocks of a cluster that divide k of a tile

  constexpr int warpgroup_m() const { return ping_pong ? block_m : block_m / kConsumers; }
};

constexpr GemmConfig kConfigs[] = {
    // The least traffic per product, in L2 and in shared memory: 128 x 256 saturates neither.
    {.block_m = 128, .block_n = 256, .stages = 4, .ping_pong = false, .swapped = false},
    // The epilogue of one tile overlaps the products of the next: for short k.
    {.block_m = 128, .block_n = 192, .stages = 4, .ping_pong = true, .swapped = false, .tma_only = true},
    // The same for any epilogue, and less waste at the edges and in the last wave.
    {.block_m = 128, .block_n = 128, .stages = 6, .ping_pong = true, .swapped = false},
    // Up to 64 rows: limited by reading b, which has small tiles so that many blocks read it.
    {.block_m = 64, .block_n = 64, .stages = 9, .ping_pong = true, .swapped = true, .k_blocks = 4},
    // Up to 16 rows: less traffic in shared memory, 160 instead of 256 cycles per k tile.
    {.block_m = 64, .block_n = 16, .stages = 19, .ping_pong = true, .swapped = true, .k_blocks = 8},
};
constexpr int kNumConfigs = int(sizeof kConfigs / sizeof kConfigs[0]);

// How the boxes of an operand's tile are loaded: pieces of `lines` lines each. Of gate and up columns a tile has runs
// of 2^run_shift pieces alternately.
struct OperandLoads {
  bool batched = false;  // the tensor map has 5 dimensions, else 2
  int tile_lines = 0;    // from one tile to the next
  int piece_lines = 0;
  int pieces = 0;                            // of a tile
  int run_shift = 30;                        // no gate and up: one run
  int run_lines = 0;                         // lines of the output from one run of gate columns to the next
  int64_t upper = 0;                         // lines from gate to up
  int8_t batch_slots[kMaxBatchDims] = {};    // which of the 3 outer dimensions of the map a batch dim is; -1: broadcast
  int8_t reduced_slots[kMaxBatchDims] = {};  // the same for reduced dims
};

// Which operands are copied before the product, because TMA cannot read them, and which copies are contiguous along k.
struct Copies {
  bool a = false, b = false;
  bool a_k_major = false, b_k_major = false;

  HOST_DEVICE bool any() const { return a || b; }
};

// Everything the host decides; the same for all blocks.
struct GemmPlan {
  int config = 0;    // of kConfigs
  int cluster = 1;   // 1 or 2 blocks with adjacent row tiles that load the tile of b once for all of them
  int k_blocks = 1;  // blocks of a cluster that divide k of a tile and add their sums in shared memory
  int clusters = 0;  // of the grid; each has cluster x k_blocks blocks
  // Tiles of the product; its rows are columns of the output if the config is swapped.
  int row_groups = 0;  // of `cluster` row tiles
  int column_tiles = 0;
  int batches = 0;
  int raster = 1;          // row groups of a band, which blocks cover before the next column
  int k_tiles = 0;         // of one product
  int all_k_tiles = 0;     // of all reduced products
  int split_k_tiles = 0;   // of a block for a work item
  int splits = 1;          // work items that divide k of a tile and add their sums in the workspace
  int items = 0;           // work items of a cluster: (splits, batches, row_groups x column_tiles)
  bool tma_store = false;  // the epilogue is of scale, bias and activation alone, and TMA can write the outputs
  bool tma_add = false;    // TMA adds the product to the output
  OperandLoads a, b;       // of the product
  double cycles = 0;       // predicted
  // In the workspace; null if not needed.
  uint32_t* arrivals = nullptr;  // (tiles(), kConsumers)
  float* partials = nullptr;     // (splits, tiles(), block_m * block_n)
  float* bias_sums = nullptr;    // (64-row blocks of the output, n), gated: (.., 2n)
  Copies copies;                 // after these arrays (copy_operand_sm90.h)

  HOST_DEVICE int tiles() const { return row_groups * cluster * column_tiles * batches; }
  HOST_DEVICE int cluster_blocks() const { return cluster * k_blocks; }
  // The place of block `rank` of a cluster among those of a row of tiles, and among those that divide k.
  HOST_DEVICE int row_rank(int rank) const { return rank & (cluster - 1); }
  HOST_DEVICE int k_rank(int rank) const { return rank >> (cluster - 1); }
};

// Consecutive tiles, which concurrent blocks compute, should share operands in L2: they go through the tiles column by
// column within bands of `band` rows.
struct RowAndColumn {
  int row, column;
};
HOST_DEVICE RowAndColumn place_in_bands(int tile, int rows, int columns, int band) {
  const int band_tiles = band * columns, first = tile / band_tiles * band, in_band = tile % band_tiles;
  const int rows_of_band = rows - first < band ? rows - first : band;
  return {first + in_band % rows_of_band, in_band / rows_of_band};
}

// The place of a work item: a part of k, a batch, and a tile for each block of the cluster, adjacent along m.
struct ItemPlace {
  int split;
  int batch;
  int row_group;
  int column_tile;
};

HOST_DEVICE ItemPlace place_of_item(const GemmPlan& plan, int item) {
  const int tiles = plan.row_groups * plan.column_tiles, outer = item / tiles;
  const RowAndColumn place = place_in_bands(item % tiles, plan.row_groups, plan.column_tiles, plan.raster);
  return {outer / plan.batches, outer % plan.batches, place.row, place.column};
}

// Assigns the arrays of a plan that divides k. `area`: of a tile.
template <class Plan>
void assign_splits(WorkspaceCursor& cursor, int64_t area, Plan& plan) {
  if (plan.splits == 1) return;
  cursor.allocate(plan.arrivals, int64_t(plan.tiles()) * kConsumers);
  cursor.allocate(plan.partials, int64_t(plan.splits) * plan.tiles() * area);
}

// Assigns the arrays of `plan` in the workspace at `data`, which may be null to find the size.
inline WorkspaceCursor assign_workspace(const GemmParams& params, void* data, GemmPlan& plan) {
  const GemmConfig& config = kConfigs[plan.config];
  WorkspaceCursor cursor(data);
  assign_splits(cursor, config.block_m * config.block_n, plan);
  if (params.bias_grad.data != nullptr)
    cursor.allocate(plan.bias_sums, ceil_div(params.m, kRowBlock) * (params.gated ? 2 : 1) * params.n);
  return cursor;
}

}  // namespace cuda_ext::sm90
