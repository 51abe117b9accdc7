// Grouped products (Groups in gemm.h) on the kernel of gemm_sm90.cuh: which part of which group a work item is. Only
// the device knows the groups. The epilogue is one that stores by TMA, of terms with scale alone.
//
// Rows     Every warp finds the group of an item from the ends. A tile reads the rows of the next group behind those of
//          its own, and stores only its own: slabs of 16 rows that are whole by TMA, others by the lanes of the warp.
// Terms    The groups are the batches of the output, each with its own number of k tiles, at least one. The last k tile
//          has terms of the next group, which the consumers clear in shared memory, of both operands: 0 x NaN is NaN.
// Gathered Rows of a, or terms of b, are at indices: gather_sm90.cuh loads them.
#pragma once

#include "gemm/gather_sm90.cuh"
#include "gemm/gemm_sm90.cuh"
#include "gemm/groups.cuh"

namespace cuda_ext::sm90 {

struct GroupRowsItem {
  int batch;  // the group
  int row, row_end;
  int column_tile;
  int first_k_tile = 0, k_tiles;
};
struct GroupTermsItem {
  int batch, row_tile, column_tile;
  int first_term;
  int first_k_tile = 0, k_tiles;
  int last_terms;  // of the last k tile
};

template <class T, Major b_major, GemmConfig config, bool gathers>
struct GroupsOfRows : Gemm<T, Major::kK, b_major, config> {
  using Base = Gemm<T, Major::kK, b_major, config>;
  using Position = GroupPosition;
  static constexpr bool kTmaOnly = true;
  static constexpr Groups::Cut kCut = Groups::Cut::kRows;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // 3 * 168: the producer finds groups, too
  static constexpr int kGathersWith = gathers ? kGatherThreads : 0;
  static constexpr int kTmaBytes = gathers ? sizeof(Base::Stage::b) : sizeof(typename Base::Stage);

  DEVICE static void gather(const GemmParams& params, const GemmPlan& plan, typename Base::Storage& shared) {
    sm90::gather<GroupsOfRows>(params, plan, shared);
  }
  DEVICE static auto gather_item(const GemmParams& params, const GroupRowsItem& work) {
    return [&params, rows = RowsGather<Base::kBlockM>(params.groups, work.row, work.row_end)](
               typename Base::Stage& stage, int k_tile) {
      constexpr int64_t kBytes = sizeof(T);
      rows.copy(arch::shared_address(stage.a), params.a.data, params.a.row_stride * kBytes, params.k * kBytes,
                int64_t(k_tile) * kLineBytes);
    };
  }

  DEVICE static GroupedRows<false> rows(const GemmParams& params, const GemmPlan& plan) {
    return {params.groups, int(params.m), Base::kBlockM * plan.cluster, plan.column_tiles};
  }
  DEVICE static int items(const GemmParams& params, const GemmPlan& plan) { return rows(params, plan).tiles(); }
  DEVICE static GroupRowsItem work_item(const GemmParams& params, const GemmPlan& plan, int item) {
    const GroupTile tile = rows(params, plan).find(item);
    const RowAndColumn place = place_in_bands(tile.index, tile.row_tiles, plan.column_tiles, plan.raster);
    const int row_tile = place.row * plan.cluster + arch::cluster_rank();
    return {.batch = tile.group,
            .row = tile.begin + row_tile * Base::kBlockM,
            .row_end = tile.end,
            .column_tile = place.column,
            .k_tiles = plan.all_k_tiles};
  }
  DEVICE static int first_line_a(const GemmPlan&, const GroupRowsItem& work) { return work.row; }
  DEVICE static int first_term(const GroupRowsItem&) { return 0; }
  DEVICE static int64_t bias_offset(const GemmParams& params, const GroupRowsItem& work) {
    return work.batch * params.bias.batch_strides[0];
  }
  DEVICE static GroupPosition position(const GemmParams& params, const GroupRowsItem& work) {
    const int parts = has_gate_up(params) ? 2 : 1;
    return {{work.batch, work.row + Base::first_row(), int64_t(work.column_tile) * (Base::kBlockN / parts),
             Base::Rows::kColumns / parts},
            work.row_end};
  }
};

template <class T, GemmConfig config, bool gathers>
struct GroupsOfTerms : Gemm<T, Major::kMn, Major::kMn, config> {
  using Base = Gemm<T, Major::kMn, Major::kMn, config>;
  static constexpr bool kTmaOnly = true, kTmaGateUp = false;
  static constexpr Groups::Cut kCut = Groups::Cut::kTerms;
  static constexpr int kProducerRegisters = gathers ? GatherTermsRegisters::kProducerRegisters : 40;
  static constexpr int kConsumerRegisters = gathers ? GatherTermsRegisters::kConsumerRegisters : 232;
  static constexpr int kGathersWith = gathers ? kGatherThreads : 0;
  static constexpr int kTmaBytes = gathers ? sizeof(Base::Stage::a) : sizeof(typename Base::Stage);

  DEVICE static void gather(const GemmParams& params, const GemmPlan& plan, typename Base::Storage& shared) {
    sm90::gather<GroupsOfTerms>(params, plan, shared);
  }
  DEVICE static auto gather_item(const GemmParams& params, const GroupTermsItem& work) {
    constexpr int64_t kBytes = sizeof(T);
    const int terms = (work.k_tiles - 1) * Base::kBlockK + work.last_terms;
    return [&params, column = work.column_tile * Base::kBlockN * kBytes,
            rows = TermsGather<Base::kBlockN * kBytes / kLineBytes>(
                params.groups, work.first_term, work.first_term + terms)](typename Base::Stage& stage, int) mutable {
      rows.copy(params.groups, arch::shared_address(stage.b), params.b.data, params.b.row_stride * kBytes,
                params.n * kBytes, column);
    };
  }

  DEVICE static GroupTermsItem work_item(const GemmParams& params, const GemmPlan& plan, int item) {
    const ItemPlace place = place_of_item(plan, item);
    const int begin = end_of_group(params.groups, place.batch - 1, int(params.k));
    const int end = end_of_group(params.groups, place.batch, int(params.k)), terms = end > begin ? end - begin : 0;
    const int k_tiles = terms > 0 ? (terms + Base::kBlockK - 1) / Base::kBlockK : 1;
    return {.batch = place.batch,
            .row_tile = place.row_group * plan.cluster + arch::cluster_rank(),
            .column_tile = place.column_tile,
            .first_term = begin,
            .k_tiles = k_tiles,
            .last_terms = terms - (k_tiles - 1) * Base::kBlockK};
  }
  DEVICE static int first_line_a(const GemmPlan& plan, const GroupTermsItem& work) {
    return work.row_tile * plan.a.tile_lines;
  }
  DEVICE static int first_term(const GroupTermsItem& work) { return work.first_term; }
  DEVICE static int64_t bias_offset(const GemmParams&, const GroupTermsItem&) { return 0; }
  DEVICE static epilogue::TilePosition position(const GemmParams&, const GroupTermsItem& work) {
    return {work.batch, int64_t(work.row_tile) * Base::kBlockM + Base::first_row(),
            int64_t(work.column_tile) * Base::kBlockN, Base::Rows::kColumns};
  }
};

}  // namespace cuda_ext::sm90
