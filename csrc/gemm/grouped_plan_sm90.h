// Chooses how a grouped product runs on wgmma (sm_90a). No header of CUDA is needed.
#pragma once

#include "gemm/grouped_gemm_sm90.h"
#include "gemm/plan_sm90.h"

namespace cuda_ext::sm90 {

// The host does not know the groups: the plan is for groups of the same size.
inline GemmChoice choose_grouped_plan(const GemmParams& params, const rt::Device& device) {
  GemmChoice choice;
  const auto refuse = [&](std::string why) {
    choice.refusal = std::move(why);
    return choice;
  };
  OperandLoads a, b;
  const bool of_rows = params.groups.cut == Groups::Cut::kRows;
  if (params.a.dtype == Dtype::kFloat32) return refuse("float32 has a kernel on mma.sync only");
  if (std::string why = refusal_of(params, false, device, a, b); !why.empty()) return refuse(why);
  if (side_a(params).k_major != of_rows || (side_b(params).k_major && !of_rows))
    return refuse(of_rows ? "a is not contiguous along k" : "an operand is contiguous along k");
  if (!can_store_by_tma(params))
    return refuse(params.n * size_of(params.out.dtype) % 16 != 0
                      ? "the output's rows do not begin at multiples of 16 bytes"
                      : "the output has neither the dtype of a nor, without a gate, float32");
  GemmParams of_all = params;  // one product, whose tiles are those of all groups
  if (of_rows) of_all.batch_dims = 0;
  const bool gathers = params.groups.indices != nullptr;
  const auto plan_of = [&](int index) {
    const GemmConfig& config = kConfigs[index];
    // Blocks that share b have tiles of the same group: of an odd number, one block has none.
    const int64_t row_tiles = ceil_div(of_rows ? ceil_div(params.m, params.groups.count) : params.m, config.block_m);
    const bool shares_b = of_rows || !gathers;
    const int cluster = shares_b && (of_rows ? row_tiles >= 4 : row_tiles % 2 == 0) && device.num_sms > 1 ? 2 : 1;
    GemmPlan plan = make_plan(of_all, index, cluster, a, b);
    if (gathers) (of_rows ? plan.a : plan.b).pieces = 0;  // TMA does not load it
    plan.split_k_tiles = plan.all_k_tiles;
    plan.raster = 8 / cluster;
    // Each group of rows may have a tile that is not full.
    const int64_t row_groups =
        of_rows ? params.m / (config.block_m * cluster) + params.groups.count : int64_t(plan.row_groups) * plan.batches;
    plan.items = checked_count(row_groups * plan.column_tiles, "tiles of the output");
    plan.clusters = std::min(plan.items, std::max(1, device.num_sms / cluster));
    return plan;
  };
  const int64_t columns = has_gate_up(params) ? 2 * params.n : params.n;
  const GemmPlan wide = plan_of(kGroupedConfigs[0]), narrow = plan_of(kGroupedConfigs[1]);
  const auto cycles = [&](const GemmPlan& plan) {
    return estimate(of_all, plan, kConfigs[plan.config], {device.num_sms}).total;
  };
  // An activation takes long: with narrow tiles, the other consumer multiplies meanwhile. But gathered rows come too
  // slowly for tiles that take half as long.
  const bool is_narrow = columns <= kConfigs[narrow.config].block_n ||
                         (params.activation != Activation::kNone && !gathers && cycles(narrow) < cycles(wide));
  choice.plan = is_narrow ? narrow : wide;
  return choice;
}

}  // namespace cuda_ext::sm90
