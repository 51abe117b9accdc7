// Grouped products (Groups in gemm.h) whose rows are cut, on the kernel of gemm_sm90.cuh: which tile of which group a
// work item is. Only the device knows the groups; every warp finds the group of an item from their ends.
//
// A tile reads the rows of the next group behind those of its own, and stores only its own: slabs of 16 rows that are
// whole by TMA, the others by the lanes of the warp. The epilogue has scale and bias alone.
#pragma once

#include "gemm/gemm_sm90.cuh"
#include "gemm/groups.cuh"

namespace cuda_ext::sm90 {

struct GroupItem {
  int batch;  // the group
  int row, row_end;
  int column_tile;
  int first_k_tile = 0, k_tiles;
};

struct GroupPosition : epilogue::TilePosition {
  int end;  // of the group's rows

  DEVICE int64_t row_end(const GemmParams&) const { return end; }
  DEVICE int out_batch() const { return 0; }
};

template <class T, Major b_major, GemmConfig config>
struct GroupedGemm : Gemm<T, Major::kK, b_major, config> {
  using Base = Gemm<T, Major::kK, b_major, config>;
  using Position = GroupPosition;
  static constexpr bool kTmaOnly = true, kGrouped = true;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // 3 * 168: the producer finds groups, too

  DEVICE static GroupedRows<false> rows(const GemmParams& params, const GemmPlan& plan) {
    return {params.groups, int(params.m), Base::kBlockM * plan.cluster, plan.column_tiles};
  }
  DEVICE static int items(const GemmParams& params, const GemmPlan& plan) { return rows(params, plan).tiles(); }
  DEVICE static GroupItem work_item(const GemmParams& params, const GemmPlan& plan, int item) {
    const GroupTile tile = rows(params, plan).find(item);
    const RowAndColumn place = place_in_bands(tile.index, tile.row_tiles, plan.column_tiles, plan.raster);
    const int row_tile = place.row * plan.cluster + arch::cluster_rank();
    return {.batch = tile.group,
            .row = tile.begin + row_tile * Base::kBlockM,
            .row_end = tile.end,
            .column_tile = place.column,
            .k_tiles = plan.all_k_tiles};
  }
  DEVICE static int first_line_a(const GemmPlan&, const GroupItem& work) { return work.row; }
  DEVICE static int64_t bias_offset(const GemmParams& params, const GroupItem& work) {
    return work.batch * params.bias.batch_strides[0];
  }
  DEVICE static GroupPosition position(const GemmParams&, const GroupItem& work) {
    return {{work.batch, work.row + Base::first_row(), int64_t(work.column_tile) * Base::kBlockN, Base::Rows::kColumns},
            work.row_end};
  }
};

}  // namespace cuda_ext::sm90
