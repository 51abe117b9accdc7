// Launches attention forward: plan, workspace, and the instantiation that the parameters require.
#pragma once

#include "attention/attention_combine.h"
#include "attention/attention_fwd_sm80.cuh"
#include "attention/attention_fwd_sm80.h"
#include "rt/device.h"
#include "rt/launch.cuh"

namespace cuda_ext::attention::sm80 {

inline ForwardPlan plan_forward(const AttentionParams& p, const ForwardConfig& config, const rt::Device& device) {
  return attention::plan_forward(p, {.block_m = config.block_m,
                                     .block_n = config.keys(has_options(p), device.shared_bytes),
                                     .at_once = int64_t(device.num_sms) * config.min_blocks});
}

// Calls f(Forward<..>{}) with the instantiation that the parameters require.
template <class T, int dim, class F>
auto with_forward(const AttentionParams& p, const ForwardPlan& plan, const F& f) {
  constexpr const ForwardConfig& config = tile_of(kForwardTilesOf<T>, dim);
  if (has_options(p)) return f(Forward<T, config, config.block_n.with_options, true>{});
  if (plan.block_n == config.block_n.fast) return f(Forward<T, config, config.block_n.fast, false>{});
  return f(Forward<T, config, config.block_n.small, false>{});
}

template <class T, int dim>
AttentionPlan ForwardLauncher<T, dim>::plan(const AttentionParams& params, const rt::Device& device) {
  if (is_empty(params)) return {};
  const ForwardPlan plan = plan_forward(params, tile_of(kForwardTilesOf<T>, dim), device);
  return with_forward<T, dim>(params, plan, [&]<class Kernel>(Kernel) {
    return describe_plan<Kernel>(params, tile_of(kForwardTilesOf<T>, dim), plan, plan.items());
  });
}

template <class T, int dim>
void ForwardLauncher<T, dim>::launch(const AttentionParams& params, const AllocateWorkspace& allocate, void* stream) {
  constexpr char kName[] = "attention_fwd_sm80";
  if (is_empty(params)) return;
  ForwardPlan plan = plan_forward(params, tile_of(kForwardTilesOf<T>, dim), rt::describe_device(kName));
  provide_workspace(kName, allocate, [&](void* data) { return assign_workspace(params, data, plan); });
  with_forward<T, dim>(params, plan, [&]<class Kernel>(Kernel) {
    plan.key_pass = LinesCopy<typename Kernel::TileK, Kernel::kThreads>::pass(params.key.seq_stride);
    plan.value_pass = LinesCopy<typename Kernel::TileV, Kernel::kThreads>::pass(params.value.seq_stride);
    rt::launch<attention_fwd_sm80<Kernel>>(kName,
                                           {.grid = {plan.schedule.head_batches * plan.schedule.tiles, plan.splits},
                                            .threads = Kernel::kThreads,
                                            .shared_bytes = sizeof(typename Kernel::Storage),
                                            .stream = stream},
                                           params, plan);
  });
  if (plan.splits > 1) launch_combine<T>(params, plan, stream);
}

}  // namespace cuda_ext::attention::sm80
