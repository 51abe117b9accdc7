// Scaled products of groups of rows on the kernel of scaled_gemm_sm90.cuh: which tile of which group a work item is, as
// in groups_sm90.cuh. The matrices b of all groups are one, (groups n, k).
#pragma once

#include "gemm/groups.cuh"
#include "gemm/scaled_gemm_sm90.cuh"

namespace cuda_ext::sm90 {

struct ScaledGroupItem {
  int row, column, line_b;
  int row_end, group;
};

template <class A, class B, ScaledConfig config>
struct ScaledGroups : ScaledGemm<A, B, config, false> {
  using Base = ScaledGemm<A, B, config, false>;
  using Item = ScaledGroupItem;
  using Position = GroupPosition;
  static constexpr Groups::Cut kCut = Groups::Cut::kRows;

  DEVICE static GroupedRows<false> rows(const ScaledGemmParams& params, const ScaledPlan& plan) {
    return {params.groups, int(params.m), Base::kBlockM, plan.column_groups};
  }
  DEVICE static int items(const ScaledGemmParams& params, const ScaledPlan& plan) { return rows(params, plan).tiles(); }
  DEVICE static Item item(const ScaledGemmParams& params, const ScaledPlan& plan, int index) {
    const GroupTile tile = rows(params, plan).find(index);
    const RowAndColumn place = place_in_bands(tile.index, tile.row_tiles, plan.column_groups, plan.raster);
    const int column = (place.column * plan.cluster + (plan.cluster > 1 ? arch::cluster_rank() : 0)) * kScaledBlockN;
    return {.row = tile.begin + place.row * Base::kBlockM,
            .column = column,
            .line_b = tile.group * int(params.n) + column,
            .row_end = tile.end,
            .group = tile.group};
  }
  DEVICE static Scales scales_of_columns(const ScaledGemmParams& params, const Item& item) {
    Scales scales = params.scale_b;
    scales.data += item.group * params.scale_b_group_stride;
    return scales;
  }
  DEVICE static int64_t bias_offset(const ScaledGemmParams& params, const Item& item) {
    return item.group * params.bias_group_stride;
  }
  DEVICE static int rows_left(const ScaledGemmParams&, const Item& item) { return item.row_end - item.row; }
  DEVICE static Position position(const Item& item) {
    return {{0, item.row + Base::first_row(), item.column, Base::Rows::kColumns}, item.row_end};
  }
};

}  // namespace cuda_ext::sm90
