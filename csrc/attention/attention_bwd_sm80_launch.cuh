// Launches attention backward: plan, workspace, and its kernels one after the other.
#pragma once

#include "attention/attention_bwd_passes.cuh"
#include "attention/attention_bwd_sm80.cuh"
#include "attention/attention_bwd_sm80.h"
#include "rt/device.h"
#include "rt/launch.cuh"

namespace cuda_ext::attention::sm80 {

template <class Kernel>
void launch_backward(const AttentionBackwardParams& p, const AllocateWorkspace& allocate, void* stream) {
  using T = typename Kernel::Element;
  constexpr char kName[] = "attention_bwd_sm80";
  constexpr const BackwardConfig& config = Kernel::kConfig;
  BackwardPlan plan = plan_backward(p, config, rt::describe_device(kName));
  provide_workspace(kName, allocate, [&](void* data) { return assign_workspace(p, config, data, plan); });

  launch_rows<T, Kernel::kBlockM, config.sums_dim()>(p, plan, stream);

  plan.query_pass = LinesCopy<typename Kernel::TileQ, Kernel::kThreads>::pass(p.query.seq_stride);
  plan.grad_out_pass = LinesCopy<typename Kernel::TileDO, Kernel::kThreads>::pass(p.grad_out.seq_stride);
  if (const int blocks = plan.schedule.head_batches * plan.schedule.tiles * plan.splits; blocks > 0)
    rt::launch<attention_bwd_sm80<Kernel>>(kName,
                                           {.grid = {blocks},
                                            .threads = Kernel::kThreads,
                                            .shared_bytes = sizeof(typename Kernel::Storage),
                                            .waits = p.deterministic ? rt::Waits::kForEarlier : rt::Waits::kForNone,
                                            .stream = stream},
                                           p, plan);

  launch_after<T, Kernel>(p, plan, stream);
}

// Calls f(Backward<..>{}) with the instantiation that the parameters and the device require.
template <class T, int dim, class F>
auto with_backward(const AttentionBackwardParams& p, const rt::Device& device, const F& f) {
  constexpr const BackwardTile& tile = tile_of(kBackwardTilesOf<T>, dim);
  const auto with = [&]<BackwardConfig config>() {
    return has_options(p) ? f(Backward<T, config, true>{}) : f(Backward<T, config, false>{});
  };
  // On an SM of 228, 100 or 64 KiB.
  if (tile.uses_large(device.shared_bytes)) return with.template operator()<tile.config(228 << 10)>();
  if (!is_small(device.shared_bytes)) return with.template operator()<tile.config(100 << 10)>();
  constexpr HeadDims most = most_head_dims(sizeof(T) == 4, /*backward=*/true, 64 << 10);
  if constexpr (dim <= most.dim) return with.template operator()<tile.config(64 << 10)>();
  throw std::invalid_argument(
      "expected head dims of at most " + std::to_string(most.dim) + " (query and key) and " +
      std::to_string(most.dim_v) + " (value) on sm_" + std::to_string(device.compute_capability) +
      ", whose blocks have 64 KiB of shared memory, got " + std::to_string(p.dim) + " and " + std::to_string(p.dim_v));
}

template <class T, int dim>
AttentionPlan BackwardLauncher<T, dim>::plan(const AttentionBackwardParams& params, const rt::Device& device) {
  if (params.heads == 0) return {};
  return with_backward<T, dim>(
      params, device, [&]<class Kernel>(Kernel) { return describe_plan<Kernel>(params, Kernel::kConfig, device); });
}

template <class T, int dim>
void BackwardLauncher<T, dim>::launch(const AttentionBackwardParams& params, const AllocateWorkspace& allocate,
                                      void* stream) {
  if (params.heads == 0) return;
  with_backward<T, dim>(params, rt::describe_device("attention_bwd_sm80"),
                        [&]<class Kernel>(Kernel) { launch_backward<Kernel>(params, allocate, stream); });
}

}  // namespace cuda_ext::attention::sm80
