// Launches attention forward: plan, workspace, and the instantiation that the parameters require.
#pragma once

#include "attention/attention_combine.h"
#include "attention/attention_fwd_sm80.cuh"
#include "rt/launch.cuh"

namespace cuda_ext::sm80 {

// Calls f(Forward<..>{}) with the instantiation that the parameters require.
template <class T, int tile, class F>
auto with_forward(const AttentionParams& p, const ForwardPlan& plan, const F& f) {
  constexpr const AttentionConfig& config = kForwardTiles[tile];
  if (needs_general_kernel(p)) return f(Forward<T, config, config.block_n.general, true>{});
  if (plan.block_n == config.block_n.fast) return f(Forward<T, config, config.block_n.fast, false>{});
  return f(Forward<T, config, config.block_n.small, false>{});
}

template <class T, int tile>
AttentionPlan AttentionForwardSm80<T, tile>::plan(const AttentionParams& params, const rt::Device& device) {
  if (is_empty(params)) return {};
  ForwardPlan plan = plan_forward(params, kForwardTiles[tile], device);
  const size_t workspace = assign_workspace(params, nullptr, plan).used();
  return with_forward<T, tile>(params, plan, [&]<class Kernel>(Kernel) -> AttentionPlan {
    return {.dim = kForwardTiles[tile].dim,
            .dim_v = kForwardTiles[tile].dim_v,
            .block_m = Kernel::kBlockM,
            .block_n = Kernel::kBlockN,
            .general = Kernel::kGeneral,
            .pack = plan.pack,
            .splits = plan.splits,
            .tiles = int64_t(plan.schedule.pairs) * plan.schedule.tiles,
            .blocks = plan.items(),
            .threads = Kernel::kThreads,
            .workspace = workspace};
  });
}

template <class T, int tile>
size_t AttentionForwardSm80<T, tile>::workspace(const AttentionParams& params) {
  return plan(params, rt::describe_device("attention_fwd_sm80")).workspace;
}

template <class T, int tile>
void AttentionForwardSm80<T, tile>::launch(const AttentionParams& params, Workspace workspace, void* stream) {
  if (is_empty(params)) return;
  ForwardPlan plan = plan_forward(params, kForwardTiles[tile], rt::describe_device("attention_fwd_sm80"));
  assign_workspace(params, workspace.data, plan).expect_fits("attention_fwd_sm80", workspace);
  with_forward<T, tile>(params, plan, [&]<class Kernel>(Kernel) {
    plan.key_pass = LinesCopy<typename Kernel::TileK, Kernel::kThreads>::pass(params.key.seq_stride);
    plan.value_pass = LinesCopy<typename Kernel::TileV, Kernel::kThreads>::pass(params.value.seq_stride);
    rt::launch<attention_fwd_sm80<Kernel>>("attention_fwd_sm80",
                                           {.grid = {plan.schedule.pairs * plan.schedule.tiles, plan.splits},
                                            .threads = Kernel::kThreads,
                                            .shared_bytes = sizeof(typename Kernel::Storage),
                                            .stream = stream},
                                           params, plan);
  });
  if (plan.splits > 1) launch_combine<T>(params, plan, stream);
}

}  // namespace cuda_ext::sm80
