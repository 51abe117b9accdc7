// Chooses how a scaled product runs on wgmma (sm_90a). No header of CUDA is needed.
#pragma once

#include <algorithm>
#include <string>

#include "base/device.h"
#include "gemm/plan_sm90.h"
#include "gemm/scaled_tiles_sm90.h"

namespace cuda_ext::sm90 {

struct ScaledChoice {
  ScaledPlan plan;
  std::string refusal;  // why there is none
};

inline bool can_store_scaled_by_tma(const ScaledGemmParams& params) {
  return (params.c.data == nullptr || can_add_by_tma(without_scales(params))) &&
         params.n * size_of(params.out.dtype) % 16 == 0 && reinterpret_cast<uintptr_t>(params.out.data) % 16 == 0;
}

// Why the kernel cannot run, whatever the config; empty if it can.
inline std::string reason_to_refuse(const ScaledGemmParams& params, const rt::Device& device) {
  if (device.compute_capability != 90)
    return "the device has no wgmma; it is sm_" + std::to_string(device.compute_capability);
  if (params.k == 0) return "k is 0";
  const int64_t lines_of_b = (params.groups.cut == Groups::Cut::kRows ? params.groups.count : 1) * params.n;
  return std::max({params.m, lines_of_b, params.k}) >= int64_t(1) << 31 ? "a size is 2^31 or more" : "";
}

// Lines of 128 bytes that a k tile writes to and reads from shared memory, which limits the speed. A block of 64 rows
// is written, and read once with all columns.
constexpr int64_t shared_lines(const ScaledConfig& config, int64_t tiles, int64_t row_blocks) {
  return tiles * config.block_n + row_blocks * (2 * kRowBlock + config.block_n);
}

// As `estimate` of a GEMM.
inline Estimate estimate_scaled(const ScaledGemmParams& params, const ScaledPlan& plan, const Rates& rates) {
  constexpr double kTurn = 130;  // cycles of a consumer from its last product to its next, and one for two columns
  const ScaledConfig& config = kScaledConfigs[plan.config];
  const bool of_terms = params.groups.cut == Groups::Cut::kTerms;
  const int64_t products = of_terms ? params.groups.count : 1;
  // Row blocks after the last row are neither loaded nor multiplied.
  const int64_t row_blocks = std::min<int64_t>(config.block_m / kRowBlock, ceil_div(params.m, kRowBlock));
  const double area = double(row_blocks) * kRowBlock * config.block_n;
  const double items = double(ceil_div(products * plan.splits * plan.items(), plan.clusters));
  const double k_tiles = items * double(of_terms ? ceil_div(plan.k_tiles, products) : plan.split_k_tiles);
  const double l2_rate = rates.l2_bytes_of(plan.clusters * plan.cluster);
  const double loaded = double(std::min<int64_t>(config.block_m, params.m)) / plan.cluster +
                        double(std::min<int64_t>(config.block_n, params.n));
  const GemmParams product = without_scales(params);

  Estimate cost;
  cost.tensor = k_tiles * area * kLineBytes / (2 * Rates::kMultiplyAdds);
  cost.shared = k_tiles * double(shared_lines(config, 1, row_blocks)) * kLineBytes / Rates::kSharedBytes;
  cost.l2 = k_tiles * loaded * kLineBytes / l2_rate;
  double products_of_sm = together(std::max(cost.tensor, cost.shared), cost.l2);
  // A consumer alone multiplies and adds by turns.
  if (config.promotes && row_blocks == 1)
    products_of_sm = std::max(products_of_sm, cost.tensor + k_tiles * (kTurn + config.block_n / 2));
  cost.epilogue = items * epilogue_cycles(product, plan.tma_store, area, l2_rate);
  cost.memory = (double(params.m + params.n) * double(params.k) +
                 double(products * params.m) * double(params.n) * epilogue_bytes(product)) /
                (Rates::kMemoryBytes * rates.num_sms);
  cost.latency = kStart + (plan.cluster > 1 ? 2 * Rates::kRemoteLatency : 0) + split_cycles(area, items, plan.splits);
  cost.total = together(products_of_sm + cost.epilogue, cost.memory) + cost.latency;
  return cost;
}

inline bool can_run(int config, const ScaledGemmParams& params, const Restriction& only) {
  const bool is_allowed = only.config < 0 || only.config == config;
  const bool may_be_fast =
      params.fast_accum && !params.batch_invariant && !params.has_blocks() && params.groups.cut != Groups::Cut::kTerms;
  const bool fits = params.groups.cut == Groups::Cut::kNone || config < kNumGroupedScaledConfigs;
  return is_allowed && fits && (kScaledConfigs[config].promotes || may_be_fast);
}

// What the plans of all products have in common.
inline ScaledPlan plan_columns(const ScaledGemmParams& params, const rt::Device& device, int config,
                               const Restriction& only) {
  ScaledPlan plan;
  plan.config = config;
  const int64_t columns = ceil_div(params.n, kScaledConfigs[config].block_n);
  plan.cluster = columns > 1 && device.num_sms > 1 && only.cluster != 1 ? 2 : 1;
  plan.column_groups = checked_count(ceil_div(columns, plan.cluster), "columns of tiles");
  plan.k_tiles = plan.split_k_tiles = int(ceil_div(params.k, kScaleBlock));
  plan.tma_store = can_store_scaled_by_tma(params);
  plan.tma_add = plan.tma_store && params.c.data != nullptr;
  return plan;
}

inline std::string reason_to_refuse_terms(const ScaledGemmParams& params) {
  if (params.a.dtype != Dtype::kFloat8E4M3 || params.b.dtype != Dtype::kFloat8E4M3)
    return "an operand is not of float8_e4m3fn";
  return can_store_scaled_by_tma(params) ? "" : "the output's rows do not begin at multiples of 16 bytes";
}

// Of groups of rows. The host does not know them: the plan is for groups of the same size.
inline ScaledChoice choose_scaled_groups_plan(const ScaledGemmParams& params, const rt::Device& device,
                                              const Restriction& only = {}) {
  ScaledChoice choice{.plan = {}, .refusal = reason_to_refuse(params, device)};
  if (!choice.refusal.empty()) return choice;
  if (params.b.dtype != Dtype::kFloat8E4M3) {
    choice.refusal = "mat_b is not of float8_e4m3fn";
    return choice;
  }
  if (!can_store_scaled_by_tma(params)) {
    choice.refusal = "the output's rows do not begin at multiples of 16 bytes";
    return choice;
  }
  const int64_t rows = ceil_div(params.m, params.groups.count);
  bool found = false;
  for (int index = 0; index < kNumScaledConfigs; ++index) {
    const ScaledConfig& config = kScaledConfigs[index];
    if (!can_run(index, params, only)) continue;
    ScaledPlan plan = plan_columns(params, device, index, only);
    const int64_t columns = int64_t(plan.column_groups) * plan.cluster;
    // In shared memory, for a group on one SM.
    plan.cycles = double(columns * shared_lines(config, ceil_div(rows, config.block_m), ceil_div(rows, kRowBlock)) *
                         plan.k_tiles);
    if (found && plan.cycles > choice.plan.cycles) continue;  // of equal ones the later, which has more stages
    found = true;
    // Each group may have a tile that is not full.
    plan.row_tiles = checked_count(params.m / config.block_m + params.groups.count, "rows of tiles");
    checked_count(int64_t(plan.row_tiles) * plan.column_groups, "tiles of the output");
    plan.clusters = std::min(plan.items(), std::max(1, device.num_sms / plan.cluster));
    plan.raster = 1024 / config.block_m;
    choice.plan = plan;
  }
  if (!found) choice.refusal = "no tile shape fits the restriction";
  return choice;
}

// The config and the split of k with the lowest predicted time. Operands do not matter: those that TMA cannot read are
// copied. Of groups of terms, which the host does not know, all are of the same size.
inline ScaledChoice choose_scaled_plan(const ScaledGemmParams& params, const rt::Device& device,
                                       const Restriction& only = {}) {
  const bool of_terms = params.groups.cut == Groups::Cut::kTerms;
  ScaledChoice choice{.plan = {}, .refusal = reason_to_refuse(params, device)};
  if (choice.refusal.empty() && of_terms) choice.refusal = reason_to_refuse_terms(params);
  if (!choice.refusal.empty()) return choice;
  const int64_t products = of_terms ? params.groups.count : 1;
  const bool divides_k = !of_terms && !params.batch_invariant;
  const Rates rates{device.num_sms};
  bool found = false;
  for (int index = 0; index < kNumScaledConfigs; ++index) {
    const ScaledConfig& config = kScaledConfigs[index];
    if (!can_run(index, params, only)) continue;
    ScaledPlan plan = plan_columns(params, device, index, only);
    plan.row_tiles = checked_count(ceil_div(params.m, config.block_m), "rows of tiles");
    checked_count(products * plan.row_tiles * plan.column_groups * plan.cluster, "tiles of the output");
    // About a square of tiles at once.
    plan.raster = std::min(plan.row_tiles, 2048 / config.block_m);
    plan.columns_vary = of_terms || (params.scale_b.has_blocks && params.scale_b.line_shift == 0);
    for (int splits = 1; splits <= (divides_k ? kMaxSplits : 1); ++splits) {
      if (only.splits > 0 && splits != only.splits) continue;
      plan.split_k_tiles = int(ceil_div(plan.k_tiles, splits));
      if (ceil_div(plan.k_tiles, plan.split_k_tiles) != splits) continue;  // a part would be empty
      // More parts than asked for are worth their cost only if they run at once.
      if (splits > 1 && only.splits == 0 &&
          (plan.split_k_tiles < kMinSplitTiles || int64_t(plan.tiles()) * splits > 2 * device.num_sms))
        break;
      plan.splits = splits;
      const int items = checked_count(products * splits * plan.items(), "work items");
      plan.clusters = int(ceil_div(items, ceil_div(items, std::max(1, device.num_sms / plan.cluster))));
      plan.cycles = estimate_scaled(params, plan, rates).total;
      if (found && plan.cycles > choice.plan.cycles) continue;  // of equal ones the later, which has more stages
      found = true;
      choice.plan = plan;
    }
  }
  if (!found) choice.refusal = "no tile shape fits the restriction";
  return choice;
}

}  // namespace cuda_ext::sm90
