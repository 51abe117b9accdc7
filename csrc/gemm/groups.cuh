// The groups of rows of a grouped product (Groups in gemm.h), on the device: only it knows them.
#pragma once

#include "arch/memory.cuh"
#include "gemm/gemm.h"
#include "tile/warp_scan.cuh"

namespace cuda_ext {

// The end of a group in the dim that is cut, of this size; of group -1 it is 0.
DEVICE int end_of_group(const Groups& groups, int group, int size) {
  const int end = group < 0 ? 0 : arch::load_global<int32_t>(groups.ends + group);
  return end < 0 ? 0 : end < size ? end : size;
}

// The row in memory of row or term `at`, if the rows of an operand are gathered; -1 if there is none. `end`: of the
// rows or terms of the group.
DEVICE int gathered_row(const Groups& groups, int at, int end) {
  if (at >= end) return -1;
  const int row = arch::load_global<int32_t>(groups.indices + at);
  return row >= 0 && row < groups.source_rows ? row : -1;
}

// A tile of a group of rows.
struct GroupTile {
  int group = 0;
  int begin = 0, end = 0;  // of the group's rows; 0 and 0 if there is no such tile
  int row_tiles = 0;       // of the group
  int index = 0;           // among the tiles of the group
};

// The tiles of all groups, one group after the other. with_rest: the rows after the last group are one more. Functions
// are called by all lanes of a warp together.
template <bool with_rest>
struct GroupedRows {
  const Groups& groups;
  int rows;          // in all
  int tile_rows;     // of a tile
  int column_tiles;  // beside each other

  DEVICE int count() const { return int(groups.count) + with_rest; }

  // Calls f(tiles of the groups up to that of this lane, the lane's group) for 32 groups at a time, until it is true.
  template <class F>
  DEVICE void scan(const F& f) const {
    int before = 0;  // tiles of the groups before those of the lanes
#pragma unroll 1
    for (int first = 0; first < count(); first += arch::kWarpSize) {
      GroupTile tile;
      tile.group = first + arch::lane_index();
      const bool exists = tile.group < count();
      tile.begin = exists ? end_of_group(groups, tile.group - 1, rows) : rows;
      tile.end = exists && tile.group < int(groups.count) ? end_of_group(groups, tile.group, rows) : rows;
      tile.row_tiles = tile.end > tile.begin ? (tile.end - tile.begin + tile_rows - 1) / tile_rows : 0;
      const int sum = before + tile::sum_up_to_lane(tile.row_tiles * column_tiles);
      if (f(sum, tile)) return;
      before = arch::shuffle(sum, arch::kWarpSize - 1);
    }
  }

  DEVICE int tiles() const {
    int count = 0;
    scan([&](int sum, const GroupTile&) {
      count = arch::shuffle(sum, arch::kWarpSize - 1);
      return false;
    });
    return count;
  }

  DEVICE GroupTile find(int tile) const {
    GroupTile found;
    scan([&](int sum, const GroupTile& own) {
      const uint32_t later = arch::ballot(sum > tile);  // the lane that has it, and those after
      if (later == 0) return false;
      const int lane = tile::lowest_bit(later);
      found.group = arch::shuffle(own.group, lane);
      found.begin = arch::shuffle(own.begin, lane);
      found.end = arch::shuffle(own.end, lane);
      found.row_tiles = arch::shuffle(own.row_tiles, lane);
      found.index = tile - (arch::shuffle(sum, lane) - found.row_tiles * column_tiles);
      return true;
    });
    return found;
  }
};

}  // namespace cuda_ext
