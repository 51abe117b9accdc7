// Scaled products of groups on the kernel of scaled_gemm_sm90.cuh: which tile of which group a work item is, as in
// groups_sm90.cuh.
//
// Rows     The matrices b of all groups are one, (groups n, k).
// Terms    The groups are the batches of the output, each with its own k tiles. A sum begins at a k tile, so the ends
//          of groups are rounded up to whole ones; no term is then cleared. A group without terms has one k tile,
//          before the first, which TMA fills with zeros.
#pragma once

#include "gemm/groups.cuh"
#include "gemm/scaled_gemm_sm90.cuh"

namespace cuda_ext::sm90 {

// The tile of this block in a work item of a group of rows.
struct ScaledGroupsItem {
  int row, column;  // the first
  int row_end;      // of the group
  int group;

  DEVICE arch::Words4 words() const { return {{uint32_t(row), uint32_t(column), uint32_t(row_end), uint32_t(group)}}; }
  DEVICE static ScaledGroupsItem of(const arch::Words4& words) {
    return {int(words.data[0]), int(words.data[1]), int(words.data[2]), int(words.data[3])};
  }
  DEVICE int end_of_rows(const ScaledGemmParams&) const { return row_end; }
  DEVICE int line_of_b(const ScaledGemmParams& params) const { return group * int(params.n) + column; }
  DEVICE int first_k_tile(const ScaledPlan&) const { return 0; }
  DEVICE int k_tiles(const ScaledPlan& plan) const { return plan.k_tiles; }
};

template <class A, class B, ScaledConfig config>
struct ScaledGroups : ScaledGemm<A, B, config, false> {
  using Base = ScaledGemm<A, B, config, false>;
  using Item = ScaledGroupsItem;
  using Position = GroupPosition;
  static constexpr Groups::Cut kCut = Groups::Cut::kRows;

  DEVICE static GroupedRows<false> rows(const ScaledGemmParams& params, const ScaledPlan& plan) {
    return {params.groups, int(params.m), Base::kBlockM, plan.column_groups};
  }
  DEVICE static int items(const ScaledGemmParams& params, const ScaledPlan& plan) { return rows(params, plan).tiles(); }
  DEVICE static ScaledGroupsItem item(const ScaledGemmParams& params, const ScaledPlan& plan, int index) {
    const GroupTile tile = rows(params, plan).find(index);
    const RowAndColumn place = place_in_bands(tile.index, tile.row_tiles, plan.column_groups, plan.raster);
    return {tile.begin + place.row * Base::kBlockM, Base::first_column(plan, place.column), tile.end, tile.group};
  }
  DEVICE static GroupPosition position(const ScaledGroupsItem& item) {
    return {{0, item.row + Base::first_row(), item.column, Base::Rows::kColumns}, item.row_end};
  }
};

// The tile of this block in a work item of a group of terms.
struct ScaledTermsItem {
  int row, column;  // the first
  int group;
  int count;       // of k tiles
  int first = -1;  // of them; what consumers get does not have it

  DEVICE arch::Words4 words() const { return {{uint32_t(row), uint32_t(column), uint32_t(group), uint32_t(count)}}; }
  DEVICE static ScaledTermsItem of(const arch::Words4& words) {
    return {int(words.data[0]), int(words.data[1]), int(words.data[2]), int(words.data[3])};
  }
  DEVICE int end_of_rows(const ScaledGemmParams& params) const { return int(params.m); }
  DEVICE int line_of_b(const ScaledGemmParams&) const { return column; }
  DEVICE int first_k_tile(const ScaledPlan&) const { return first; }
  DEVICE int k_tiles(const ScaledPlan&) const { return count; }
};

template <class A, class B, ScaledConfig config>
struct ScaledTerms : ScaledGemm<A, B, config, true> {
  using Base = ScaledGemm<A, B, config, true>;
  using Item = ScaledTermsItem;
  using Position = epilogue::TilePosition;
  static constexpr Groups::Cut kCut = Groups::Cut::kTerms;

  DEVICE static int items(const ScaledGemmParams& params, const ScaledPlan& plan) {
    return int(params.groups.count) * plan.items();
  }
  // The k tile in which the next group begins.
  DEVICE static int end_of(const ScaledGemmParams& params, int group) {
    return (end_of_group(params.groups, group, int(params.k)) + kLineBytes - 1) / kLineBytes;
  }
  DEVICE static ScaledTermsItem item(const ScaledGemmParams& params, const ScaledPlan& plan, int index) {
    const int group = index / plan.items();
    const RowAndColumn place = place_in_bands(index % plan.items(), plan.row_tiles, plan.column_groups, plan.raster);
    const int begin = end_of(params, group - 1), end = end_of(params, group);
    const bool has_terms = begin < end;
    return {.row = place.row * Base::kBlockM,
            .column = Base::first_column(plan, place.column),
            .group = group,
            .count = has_terms ? end - begin : 1,
            .first = has_terms ? begin : -1};
  }
  DEVICE static epilogue::TilePosition position(const ScaledTermsItem& item) {
    return {item.group, item.row + Base::first_row(), item.column, Base::Rows::kColumns};
  }
};

}  // namespace cuda_ext::sm90
