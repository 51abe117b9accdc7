// Scaled products of groups of rows on the kernel of scaled_gemm_sm90.cuh: which tile of which group a work item is, as
// in groups_sm90.cuh. The matrices b of all groups are one, (groups n, k).
#pragma once

#include "gemm/groups.cuh"
#include "gemm/scaled_gemm_sm90.cuh"

namespace cuda_ext::sm90 {

template <class A, class B, ScaledConfig config>
struct ScaledGroups : ScaledGemm<A, B, config, false> {
  using Base = ScaledGemm<A, B, config, false>;
  static constexpr Groups::Cut kCut = Groups::Cut::kRows;

  DEVICE static GroupedRows<false> rows(const ScaledGemmParams& params, const ScaledPlan& plan) {
    return {params.groups, int(params.m), Base::kBlockM, plan.column_groups};
  }
  DEVICE static int items(const ScaledGemmParams& params, const ScaledPlan& plan) { return rows(params, plan).tiles(); }
  DEVICE static ScaledItem item(const ScaledGemmParams& params, const ScaledPlan& plan, int index) {
    const GroupTile tile = rows(params, plan).find(index);
    const RowAndColumn place = place_in_bands(tile.index, tile.row_tiles, plan.column_groups, plan.raster);
    return {tile.begin + place.row * Base::kBlockM, Base::first_column(plan, place.column), tile.end, tile.group};
  }
};

}  // namespace cuda_ext::sm90
