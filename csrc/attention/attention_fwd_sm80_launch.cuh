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

// Calls f(Forward<..>{}) with the instantiation that the parameters and the device require.
template <class T, int dim, class F>
auto with_forward(const AttentionParams& p, const ForwardPlan& plan, const rt::Device& device, const F& f) {
  const auto with = [&]<ForwardConfig config>() {
    if (has_options(p)) return f(Forward<T, config, config.block_n.with_options, true>{});
    if (plan.block_n == config.block_n.fast) return f(Forward<T, config, config.block_n.fast, false>{});
    return f(Forward<T, config, config.block_n.small, false>{});
  };
  if (is_small(device.shared_bytes)) return with.template operator()<forward_tile<T>(dim, true)>();
  return with.template operator()<forward_tile<T>(dim, false)>();
}

template <class T, int dim>
AttentionPlan ForwardLauncher<T, dim>::plan(const AttentionParams& params, const rt::Device& device) {
  if (is_empty(params)) return {};
  const ForwardConfig config = forward_tile<T>(dim, is_small(device.shared_bytes));
  const ForwardPlan plan = plan_forward(params, config, device);
  return with_forward<T, dim>(params, plan, device, [&]<class Kernel>(Kernel) {
    return describe_plan<Kernel>(params, config, plan, plan.items());
  });
}

template <class T, int dim>
void ForwardLauncher<T, dim>::launch(const AttentionParams& params, const AllocateWorkspace& allocate, void* stream) {
  constexpr char kName[] = "attention_fwd_sm80";
  if (is_empty(params)) return;
  const rt::Device device = rt::describe_device(kName);
  ForwardPlan plan = plan_forward(params, forward_tile<T>(dim, is_small(device.shared_bytes)), device);
  provide_workspace(kName, allocate, [&](void* data) { return assign_workspace(params, data, plan); });
  with_forward<T, dim>(params, plan, device, [&]<class Kernel>(Kernel) {
    plan.key_pass = LinesCopy<typename Kernel::TileK, Kernel::kThreads>::pass(params.key.seq_stride);
    plan.value_pass = LinesCopy<typename Kernel::TileV, Kernel::kThreads>::pass(params.value.seq_stride);
    rt::launch<attention_fwd_sm80<Kernel>>(kName,
                                           {.grid = {plan.schedule.head_batches * plan.schedule.tiles, plan.splits},
                                            .threads = Kernel::kThreads,
                                            .shared_bytes = sizeof(typename Kernel::Storage),
                                            .stream = stream},
                                           params, plan);
  });
  launch_combine<T>(params, plan, stream);
}

}  // namespace cuda_ext::attention::sm80
