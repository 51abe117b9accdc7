// Launches attention forward on wgmma: plan, tensor maps, and the instantiation that the parameters require.
#pragma once

#include "attention/attention_combine.h"
#include "attention/attention_fwd_sm90.cuh"
#include "rt/device.h"
#include "rt/launch.cuh"

namespace cuda_ext::attention::sm90 {

inline ForwardPlan plan_forward(const AttentionParams& p, const ForwardTile& tile, const rt::Device& device) {
  const ForwardConfig config = tile.config(has_options(p));
  return attention::plan_forward(
      p, {.block_m = config.block_m, .block_n = config.block_n, .at_once = device.num_sms, .packs_any_group = false});
}

inline int persistent_blocks(const ForwardPlan& plan, const rt::Device& device) {
  return plan.items() < device.num_sms ? plan.items() : device.num_sms;
}

// Calls f(Forward<..>{}) with the instantiation that the parameters require.
template <class T, int dim, class F>
auto with_forward(const AttentionParams& p, const F& f) {
  constexpr const ForwardTile& tile = tile_of(kForwardTiles, dim);
  if (has_options(p)) return f(Forward<T, tile.config(true), true>{});
  return f(Forward<T, tile.config(false), false>{});
}

inline ForwardMaps make_maps(const AttentionParams& p, const ForwardPlan& plan, int block_m, int block_n) {
  constexpr char kName[] = "attention_fwd_sm90";
  const bool varlen = p.cu_seqlens_q != nullptr;
  const int64_t queries = varlen ? p.total_q : p.seqlen_q, keys = varlen ? p.total_k : p.seqlen_k;
  return {heads_map(kName, p, p.query, p.dim, queries, p.heads, plan.pack_gqa, block_m),
          heads_map(kName, p, p.key, p.dim, keys, p.heads_kv, 1, block_n),
          heads_map(kName, p, p.value, p.dim_v, keys, p.heads_kv, 1, block_n),
          heads_map(kName, p, p.out, p.dim_v, queries, p.heads, 1, kWarpgroupRows)};
}

template <class T, int dim>
AttentionPlan ForwardLauncher<T, dim>::plan(const AttentionParams& params, const rt::Device& device) {
  if (is_empty(params)) return {};
  const ForwardPlan plan = plan_forward(params, tile_of(kForwardTiles, dim), device);
  return with_forward<T, dim>(params, [&]<class Kernel>(Kernel) {
    return describe_plan<Kernel>(params, Kernel::kConfig, plan, persistent_blocks(plan, device));
  });
}

template <class T, int dim>
void ForwardLauncher<T, dim>::launch(const AttentionParams& params, const AllocateWorkspace& allocate, void* stream) {
  constexpr char kName[] = "attention_fwd_sm90";
  if (is_empty(params)) return;
  const rt::Device device = rt::describe_device(kName);
  ForwardPlan plan = plan_forward(params, tile_of(kForwardTiles, dim), device);
  provide_workspace(kName, allocate, [&](void* data) { return assign_workspace(params, data, plan); });
  with_forward<T, dim>(params, [&]<class Kernel>(Kernel) {
    const ForwardMaps maps = make_maps(params, plan, Kernel::kBlockM, Kernel::kBlockN);
    rt::launch<attention_fwd_sm90<Kernel>>(kName,
                                           {.grid = {persistent_blocks(plan, device)},
                                            .threads = Kernel::kThreads,
                                            .shared_bytes = sizeof(typename Kernel::Storage),
                                            .stream = stream},
                                           params, plan, maps);
  });
  launch_combine<T>(params, plan, stream);
}

}  // namespace cuda_ext::attention::sm90
