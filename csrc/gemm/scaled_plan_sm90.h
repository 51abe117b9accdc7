// Chooses how a scaled product runs on wgmma (sm_90a). No header of CUDA is needed.
#pragma once

#include <algorithm>
#include <string>

#include "base/device.h"
#include "gemm/problem.h"
#include "gemm/scaled_tiles_sm90.h"

namespace cuda_ext::sm90 {

struct ScaledChoice {
  ScaledPlan plan;
  std::string refusal;  // why there is none
};

inline bool can_store_scaled_by_tma(const ScaledGemmParams& params) {
  return params.c.data == nullptr && params.n * size_of(params.out.dtype) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(params.out.data) % 16 == 0;
}

// Why the kernel cannot run, whatever the config; empty if it can.
inline std::string reason_to_refuse(const ScaledGemmParams& params, const rt::Device& device) {
  if (device.compute_capability != 90)
    return "the device has no wgmma; it is sm_" + std::to_string(device.compute_capability);
  if (params.k == 0) return "k is 0";
  const int64_t lines_of_b = std::max<int64_t>(params.groups.count, 1) * params.n;
  return std::max({params.m, lines_of_b, params.k}) >= int64_t(1) << 31 ? "a size is 2^31 or more" : "";
}

// Of groups of rows. The host does not know them: the plan is for groups of the same size.
inline ScaledChoice choose_scaled_groups_plan(const ScaledGemmParams& params, const rt::Device& device) {
  ScaledChoice choice{.plan = {}, .refusal = reason_to_refuse(params, device)};
  if (!choice.refusal.empty()) return choice;
  const auto refuse = [&](std::string why) {
    choice.refusal = std::move(why);
    return choice;
  };
  if (params.b.dtype != Dtype::kFloat8E4M3) return refuse("mat_b is not of float8_e4m3fn");
  if (!can_store_scaled_by_tma(params)) return refuse("the output's rows do not begin at multiples of 16 bytes");
  const int64_t rows = ceil_div(params.m, params.groups.count), columns = ceil_div(params.n, kScaledBlockN);
  const auto cost = [&](const ScaledConfig& config) {  // as below
    return ceil_div(rows, config.block_m) * config.block_m * (config.block_m == 256 ? 10 : 11);
  };
  ScaledPlan& plan = choice.plan;
  plan.config = cost(kScaledConfigs[0]) <= cost(kScaledConfigs[1]) ? 0 : 1;
  const int block_m = kScaledConfigs[plan.config].block_m;
  plan.cluster = columns > 1 && device.num_sms > 1 ? 2 : 1;
  plan.column_groups = checked_count(ceil_div(columns, plan.cluster), "columns of tiles");
  // Each group may have a tile that is not full.
  plan.row_tiles = checked_count(params.m / block_m + params.groups.count, "rows of tiles");
  checked_count(int64_t(plan.row_tiles) * plan.column_groups, "tiles of the output");
  plan.clusters = std::min(plan.items(), std::max(1, device.num_sms / plan.cluster));
  plan.raster = 1024 / block_m;
  plan.k_tiles = int(ceil_div(params.k, kScaleBlock));
  plan.tma_store = true;
  return choice;
}

// Of the configs, the one whose busiest SM takes least. Operands do not matter: those that TMA cannot read are copied.
inline ScaledChoice choose_scaled_plan(const ScaledGemmParams& params, const rt::Device& device) {
  ScaledChoice choice{.plan = {}, .refusal = reason_to_refuse(params, device)};
  if (!choice.refusal.empty()) return choice;
  int64_t least = 0;
  for (int index = 0; index < kNumScaledConfigs; ++index) {
    const ScaledConfig& config = kScaledConfigs[index];
    ScaledPlan plan;
    plan.config = index;
    plan.row_tiles = checked_count(ceil_div(params.m, config.block_m), "rows of tiles");
    const int64_t columns = ceil_div(params.n, kScaledBlockN);
    plan.cluster = columns > 1 && device.num_sms > 1 ? 2 : 1;
    plan.column_groups = checked_count(ceil_div(columns, plan.cluster), "columns of tiles");
    checked_count(int64_t(plan.row_tiles) * plan.column_groups, "tiles of the output");
    const int at_once = std::max(1, device.num_sms / plan.cluster);
    const int64_t waves = ceil_div(plan.items(), at_once);
    plan.clusters = int(ceil_div(plan.items(), waves));
    // About a square of tiles at once.
    plan.raster = std::min(plan.row_tiles, 2048 / config.block_m);
    plan.k_tiles = int(ceil_div(params.k, kScaleBlock));
    plan.columns_vary = params.scale_b.has_blocks && params.scale_b.line_shift == 0;
    plan.tma_store = can_store_scaled_by_tma(params);
    // A row of the larger tile takes less time: fewer reads of shared memory, which is the limit.
    const int64_t cost = waves * config.block_m * (config.block_m == 256 ? 10 : 11);
    if (index == 0 || cost < least) {
      choice.plan = plan;
      least = cost;
    }
  }
  return choice;
}

}  // namespace cuda_ext::sm90
