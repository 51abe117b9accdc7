// Grouped products (Groups in gemm.h) on the kernel of gemm_sm80.cuh: which part of which group a block computes. Only
// the device knows the groups; the grid has as many blocks as any could need, and those without a tile end at once.
#pragma once

#include "gemm/gather_sm80.cuh"
#include "gemm/gemm_sm80.cuh"
#include "gemm/groups.cuh"

namespace cuda_ext::sm80 {

// A tile of the product of group `batch`.
template <Groups::Cut cut>
struct GroupPosition : epilogue::TilePosition {
  int begin = 0, end = 0;  // of the group, in the dim that is cut; of rows, 0 and 0 if there is no such tile
  int terms = 0;           // of a sum

  DEVICE bool is_empty() const { return cut == Groups::Cut::kRows && end == 0; }
  DEVICE int64_t row_end(const GemmParams& params) const { return cut == Groups::Cut::kRows ? end : params.m; }
  DEVICE int out_batch() const { return cut == Groups::Cut::kRows ? 0 : batch; }
  DEVICE bool has_bias(const GemmParams& params) const { return batch < params.groups.count; }
  DEVICE int64_t bias_offset(const GemmParams& params) const { return batch * params.bias.batch_strides[0]; }
};

// Operands must be contiguous along k, or b along n, if rows are cut (a_k_major); along m and n if terms are: wherever
// a group begins, they are then as aligned as the whole. gathers: rows of a, or terms of b, are those at indices.
template <class T, Arithmetic arithmetic, bool b_k_major, GemmConfig config, Groups::Cut cut, bool gathers = false>
struct GroupedGemm : Gemm<T, arithmetic, cut == Groups::Cut::kRows, b_k_major, config> {
  using Base = Gemm<T, arithmetic, cut == Groups::Cut::kRows, b_k_major, config>;
  static_assert(cut == Groups::Cut::kRows || !b_k_major);
  using Position = GroupPosition<cut>;
  using Epilogue = epilogue::TileEpilogue<epilogue::BlockThreads<Base::kThreads>, Base::kResultStride,
                                          Base::kStagedRows, Base::kWarpM, Base::kPassRows, 2, Position>;

  DEVICE static int first_k_tile(const GemmPlan&) { return 0; }
  DEVICE static int k_tiles(const GemmPlan&, const Position& p) {
    return (p.terms + Base::kBlockK - 1) / Base::kBlockK;
  }
  DEVICE static int k_tiles_of_block(const GemmPlan& plan, const Position& position) { return k_tiles(plan, position); }
  DEVICE static int k_tail(const GemmPlan& plan, const Position& position) {
    return position.terms - (k_tiles(plan, position) - 1) * Base::kBlockK;
  }
  DEVICE static auto copy_of_a(const GemmParams& params, const GemmPlan& plan, const Position& position) {
    if constexpr (gathers && cut == Groups::Cut::kRows)
      return GatheredRowsCopy<typename Base::TileA, Base::kThreads>(params, plan.a, int(position.row), position.end);
    else
      return Base::copy_of_a(params, plan, position);
  }
  DEVICE static auto copy_of_b(const GemmParams& params, const GemmPlan& plan, const Position& position) {
    if constexpr (gathers && cut == Groups::Cut::kTerms)
      return GatheredTermsCopy<typename Base::TileB, Base::kThreads>(params, plan.b, position.column, position.begin,
                                                                     position.end);
    else
      return Base::copy_of_b(params, plan, position);
  }
  DEVICE static int first_term(const Position& position) { return cut == Groups::Cut::kTerms ? position.begin : 0; }

  // By all lanes of a warp together.
  DEVICE static Position find_position(const GemmParams& params, const GemmPlan& plan, int block) {
    if constexpr (cut == Groups::Cut::kTerms) {
      Position found{find_tile(plan.row_tiles, plan.column_tiles, block, Base::kBlockM, Base::kBlockN)};
      found.begin = end_of_group(params.groups, found.batch - 1, int(params.k));
      found.end = end_of_group(params.groups, found.batch, int(params.k));
      found.terms = found.end > found.begin ? found.end - found.begin : 0;
      return found;
    }
    // The rows after the last group are one more, without terms.
    const GroupedRows<true> rows{params.groups, int(params.m), Base::kBlockM, plan.column_tiles};
    const GroupTile tile = rows.find(block);
    if (tile.end == 0) return {};
    const int columns = has_gate_up(params) ? Base::kBlockN / 2 : Base::kBlockN;
    Position found{find_tile(tile.row_tiles, plan.column_tiles, tile.index, Base::kBlockM, columns)};
    found.batch = tile.group;
    found.begin = tile.begin;
    found.end = tile.end;
    found.row += tile.begin;
    found.terms = tile.group < int(params.groups.count) ? int(params.k) : 0;
    return found;
  }
};

}  // namespace cuda_ext::sm80
