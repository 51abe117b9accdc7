// Launches attention backward: plan, workspace, and its kernels one after the other.
#pragma once

#include "attention/attention_bwd_passes.cuh"
#include "attention/attention_bwd_sm80.cuh"
#include "rt/launch.cuh"

namespace cuda_ext::sm80 {

template <class Kernel>
void launch_backward(const AttentionBackwardParams& p, Workspace workspace, void* stream) {
  using T = typename Kernel::Element;
  constexpr const AttentionBackwardConfig& config = Kernel::kConfig;
  BackwardPlan plan = plan_backward(p, config, rt::describe_device("attention_bwd_sm80"));
  assign_workspace(p, config, workspace.data, plan).expect_fits("attention_bwd_sm80", workspace);

  launch_rows<T, Kernel::kBlockM, config.sums_dim()>(p, plan, stream);

  plan.query_pass = LinesCopy<typename Kernel::TileQ, Kernel::kThreads>::pass(p.query.seq_stride);
  plan.grad_out_pass = LinesCopy<typename Kernel::TileDO, Kernel::kThreads>::pass(p.grad_out.seq_stride);
  if (const int blocks = plan.schedule.pairs * plan.schedule.tiles * plan.splits; blocks > 0)
    rt::launch<attention_bwd_sm80<Kernel>>("attention_bwd_sm80",
                                           {.grid = {blocks},
                                            .threads = Kernel::kThreads,
                                            .shared_bytes = sizeof(typename Kernel::Storage),
                                            .waits = p.deterministic ? rt::Waits::kForEarlier : rt::Waits::kForNone,
                                            .stream = stream},
                                           p, plan);

  launch_after<T, Kernel>(p, plan, stream);
}

// Calls f(Backward<..>{}) with the instantiation that the parameters and the device require.
template <class T, int tile, class F>
auto with_backward(const AttentionBackwardParams& p, const rt::Device& device, const F& f) {
  constexpr const BackwardTile& configs = kBackwardTiles[tile];
  const auto with = [&]<AttentionBackwardConfig config>() {
    return needs_general_kernel(p) ? f(Backward<T, config, true>{}) : f(Backward<T, config, false>{});
  };
  if (configs.uses_large(device.shared_bytes)) return with.template operator()<configs.large>();
  return with.template operator()<configs.small>();
}

template <class T, int tile>
AttentionPlan AttentionBackwardSm80<T, tile>::plan(const AttentionBackwardParams& params, const rt::Device& device) {
  if (params.heads == 0) return {};
  return with_backward<T, tile>(
      params, device, [&]<class Kernel>(Kernel) { return describe_plan<Kernel>(params, Kernel::kConfig, device); });
}

template <class T, int tile>
size_t AttentionBackwardSm80<T, tile>::workspace(const AttentionBackwardParams& params) {
  return plan(params, rt::describe_device("attention_bwd_sm80")).workspace;
}

template <class T, int tile>
void AttentionBackwardSm80<T, tile>::launch(const AttentionBackwardParams& params, Workspace workspace, void* stream) {
  if (params.heads == 0) return;
  with_backward<T, tile>(params, rt::describe_device("attention_bwd_sm80"),
                         [&]<class Kernel>(Kernel) { launch_backward<Kernel>(params, workspace, stream); });
}

}  // namespace cuda_ext::sm80
