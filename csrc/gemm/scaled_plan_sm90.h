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

// Why TMA cannot read an operand with this distance between its lines; empty if it can.
inline std::string line_refusal(const char* name, const Operand& operand, int64_t k, int64_t k_stride, int64_t lines,
                                int64_t line_stride) {
  const std::string operand_name(name);
  if (k > 1 && k_stride != 1) return operand_name + " is not contiguous along k, as wgmma needs it for FP8";
  if (reinterpret_cast<uintptr_t>(operand.data) % 16 != 0)
    return operand_name + " does not begin at a multiple of 16 bytes";
  if (lines > 1 && (line_stride <= 0 || line_stride % 16 != 0))
    return operand_name + " has a stride that is no multiple of 16 bytes";
  return "";
}

inline bool can_store_scaled_by_tma(const ScaledGemmParams& params) {
  return params.c.data == nullptr && params.n * size_of(params.out.dtype) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(params.out.data) % 16 == 0;
}

// Of the configs, the one whose busiest SM takes least. A row of the larger tile costs less traffic in shared memory.
inline ScaledChoice choose_scaled_plan(const ScaledGemmParams& params, const rt::Device& device) {
  ScaledChoice choice;
  const auto refuse = [&](std::string why) {
    choice.refusal = std::move(why);
    return choice;
  };
  if (device.compute_capability != 90)
    return refuse("the device has no wgmma; it is sm_" + std::to_string(device.compute_capability));
  if (params.k == 0) return refuse("k is 0");
  if (std::max({params.m, params.n, params.k}) >= int64_t(1) << 31) return refuse("a size is 2^31 or more");
  for (const std::string& why :
       {line_refusal("mat_a", params.a, params.k, params.a.column_stride, params.m, params.a.row_stride),
        line_refusal("mat_b", params.b, params.k, params.b.row_stride, params.n, params.b.column_stride)})
    if (!why.empty()) return refuse(why);
  constexpr int kRowCost[] = {10, 11};
  int64_t least = 0;
  for (int config = 0; config < kScaledConfigs; ++config) {
    ScaledPlan plan;
    plan.config = config;
    plan.row_tiles = checked_count(ceil_div(params.m, kScaledBlockM[config]), "rows of tiles");
    const int64_t columns = ceil_div(params.n, kScaledBlockN);
    plan.cluster = columns > 1 && device.num_sms > 1 ? 2 : 1;
    plan.column_groups = checked_count(ceil_div(columns, plan.cluster), "columns of tiles");
    checked_count(int64_t(plan.row_tiles) * plan.column_groups, "tiles of the output");
    const int at_once = std::max(1, device.num_sms / plan.cluster);
    const int64_t waves = ceil_div(plan.items(), at_once);
    plan.clusters = int(ceil_div(plan.items(), waves));
    // About a square of tiles at once.
    plan.raster = std::min(plan.row_tiles, 2048 / kScaledBlockM[config]);
    plan.k_tiles = int(ceil_div(params.k, kScaleBlock));
    plan.columns_vary = params.scale_b.has_blocks && params.scale_b.line_shift == 0;
    plan.tma_store = can_store_scaled_by_tma(params);
    const int64_t work = waves * kScaledBlockM[config] * kRowCost[config];
    if (config == 0 || work < least) {
      choice.plan = plan;
      least = work;
    }
  }
  return choice;
}

}  // namespace cuda_ext::sm90
