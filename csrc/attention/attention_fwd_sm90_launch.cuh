// Launches attention forward on wgmma: plan, tensor maps, and the instantiation that the parameters require.
#pragma once

#include "attention/attention_combine.h"
#include "attention/attention_fwd_sm90.cuh"
#include "rt/launch.cuh"

namespace cuda_ext::sm90 {

inline sm80::ForwardPlan plan_forward(const AttentionParams& p, const ForwardTile& tile, const rt::Device& device) {
  const ForwardConfig& config = sm80::needs_general_kernel(p) ? tile.general : tile.plain;
  return sm80::plan_forward(
      p, {.block_m = config.block_m, .block_n = config.block_n, .at_once = device.num_sms, .packs_any_group = false});
}

inline int persistent_blocks(const sm80::ForwardPlan& plan, const rt::Device& device) {
  return plan.items() < device.num_sms ? plan.items() : device.num_sms;
}

// Calls f(Forward<..>{}) with the instantiation that the parameters require.
template <class T, int tile, class F>
auto with_forward(const AttentionParams& p, const F& f) {
  constexpr const ForwardTile& configs = kForwardTiles[tile];
  if (sm80::needs_general_kernel(p)) return f(Forward<T, configs.general, true>{});
  return f(Forward<T, configs.plain, false>{});
}

inline ForwardMaps make_maps(const AttentionParams& p, const sm80::ForwardPlan& plan, int block_m, int block_n) {
  constexpr char kName[] = "attention_fwd_sm90";
  const bool packed = p.cu_seqlens_q != nullptr;
  const int64_t queries = packed ? p.total_q : p.seqlen_q, keys = packed ? p.total_k : p.seqlen_k;
  return {heads_map(kName, p, p.query, p.dim, queries, p.heads, plan.pack, block_m),
          heads_map(kName, p, p.key, p.dim, keys, p.heads_kv, 1, block_n),
          heads_map(kName, p, p.value, p.dim_v, keys, p.heads_kv, 1, block_n),
          heads_map(kName, p, p.out, p.dim_v, queries, p.heads, 1, kWarpgroupRows)};
}

template <class T, int tile>
AttentionPlan AttentionForwardSm90<T, tile>::plan(const AttentionParams& params, const rt::Device& device) {
  if (sm80::is_empty(params)) return {};
  sm80::ForwardPlan plan = plan_forward(params, kForwardTiles[tile], device);
  const size_t workspace = sm80::assign_workspace(params, nullptr, plan).used();
  return with_forward<T, tile>(params, [&]<class Kernel>(Kernel) -> AttentionPlan {
    return {.dim = Kernel::kConfig.dim,
            .dim_v = Kernel::kConfig.dim_v,
            .block_m = Kernel::kBlockM,
            .block_n = Kernel::kBlockN,
            .general = Kernel::kGeneral,
            .pack = plan.pack,
            .splits = plan.splits,
            .tiles = int64_t(plan.schedule.pairs) * plan.schedule.tiles,
            .blocks = persistent_blocks(plan, device),
            .threads = Kernel::kThreads,
            .workspace = workspace};
  });
}

template <class T, int tile>
size_t AttentionForwardSm90<T, tile>::workspace(const AttentionParams& params) {
  return plan(params, rt::describe_device("attention_fwd_sm90")).workspace;
}

template <class T, int tile>
void AttentionForwardSm90<T, tile>::launch(const AttentionParams& params, Workspace workspace, void* stream) {
  if (sm80::is_empty(params)) return;
  const rt::Device device = rt::describe_device("attention_fwd_sm90");
  sm80::ForwardPlan plan = plan_forward(params, kForwardTiles[tile], device);
  sm80::assign_workspace(params, workspace.data, plan).expect_fits("attention_fwd_sm90", workspace);
  with_forward<T, tile>(params, [&]<class Kernel>(Kernel) {
    const ForwardMaps maps = make_maps(params, plan, Kernel::kBlockM, Kernel::kBlockN);
    rt::launch<attention_fwd_sm90<Kernel>>("attention_fwd_sm90",
                                           {.grid = {persistent_blocks(plan, device)},
                                            .threads = Kernel::kThreads,
                                            .shared_bytes = sizeof(typename Kernel::Storage),
                                            .stream = stream},
                                           params, plan, maps);
  });
  if (plan.splits > 1) sm80::launch_combine<T>(params, plan, stream);
}

}  // namespace cuda_ext::sm90
