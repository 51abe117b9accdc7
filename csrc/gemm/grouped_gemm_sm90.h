// The launcher of grouped products (Groups in gemm.h) on wgmma (sm_90a).
#pragma once

#include "gemm/plan_sm90.h"

namespace cuda_ext {

namespace sm90 {

struct TensorMaps;  // maps_sm90.cuh

// One instantiation per file: instantiations/grouped_gemm_sm90_{f16,bf16}_{kk,kn}.cu, named as those of gemm_sm90.
template <class T, bool b_k_major>
struct GroupedGemmSm90 {
  static void launch(const GemmParams& params, const GemmPlan& plan, const TensorMaps& maps, void* stream);
};

// The configs of grouped products: the first if the output is wide, else the second.
constexpr int kGroupedConfigs[] = {0, 2};

// The host does not know the groups: the plan is for groups of the same size.
inline GemmChoice choose_grouped_plan(const GemmParams& params, const rt::Device& device) {
  GemmChoice choice;
  const auto refuse = [&](std::string why) {
    choice.refusal = std::move(why);
    return choice;
  };
  OperandLoads a, b;
  if (params.groups.cut != Groups::Cut::kRows) return refuse("groups of terms have a kernel on mma.sync only");
  if (params.a.dtype == Dtype::kFloat32) return refuse("float32 has a kernel on mma.sync only");
  if (std::string why = refusal_of(params, false, device, a, b); !why.empty()) return refuse(why);
  if (!side_a(params).k_major) return refuse("a is not contiguous along k");
  if (!can_store_by_tma(params)) return refuse("the output's rows do not begin at multiples of 16 bytes");
  GemmParams of_all = params;  // one product, whose tiles are those of all groups
  of_all.batch_dims = 0;
  const int index = kGroupedConfigs[params.n > kConfigs[kGroupedConfigs[1]].block_n ? 0 : 1];
  const GemmConfig& config = kConfigs[index];
  // Blocks that share b must have tiles of the same group: half of them have none if it has an odd number.
  const int64_t row_tiles = ceil_div(ceil_div(params.m, params.groups.count), config.block_m);
  const int cluster = row_tiles >= 4 && device.num_sms > 1 ? 2 : 1;
  GemmPlan plan = make_plan(of_all, index, cluster, a, b);
  plan.split_k_tiles = plan.all_k_tiles;
  plan.raster = 8 / cluster;
  // Each group may have a tile that is not full.
  plan.items = checked_count((params.m / (config.block_m * cluster) + params.groups.count) * plan.column_tiles,
                             "tiles of the output");
  plan.clusters = std::min(plan.items, std::max(1, device.num_sms / cluster));
  choice.plan = plan;
  return choice;
}

}  // namespace sm90

// Launches the product on `stream`, an rt::Stream, as planned for these parameters.
void launch_grouped_gemm_sm90(const GemmParams& params, const sm90::GemmPlan& plan, void* stream);

}  // namespace cuda_ext
