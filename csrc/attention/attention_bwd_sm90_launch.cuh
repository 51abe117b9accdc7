// Launches attention backward on wgmma: plan, workspace, tensor maps, and its kernels one after the other.
#pragma once

#include "attention/attention_bwd_passes.h"
#include "attention/attention_bwd_sm90.cuh"
#include "rt/launch.cuh"

namespace cuda_ext::sm90 {

// Calls f(Backward<..>{}) with the instantiation that the parameters require.
template <class T, int tile, class F>
auto with_backward(const AttentionBackwardParams& p, const F& f) {
  if (sm80::needs_general_kernel(p)) return f(Backward<T, kBackwardTiles[tile], true>{});
  return f(Backward<T, kBackwardTiles[tile], false>{});
}

inline BackwardMaps make_maps(const AttentionBackwardParams& p, const sm80::BackwardPlan& plan,
                              const BackwardConfig& config) {
  constexpr char kName[] = "attention_bwd_sm90";
  const bool packed = p.cu_seqlens_q != nullptr;
  const int64_t queries = packed ? p.total_q : p.seqlen_q, keys = packed ? p.total_k : p.seqlen_k;
  const int64_t lines = p.heads * plan.head_rows * config.dim / kSumsLine;
  return {heads_map(kName, p, p.query, p.dim, queries, p.heads, 1, config.block_m),
          heads_map(kName, p, p.key, p.dim, keys, p.heads_kv, 1, config.block_n),
          heads_map(kName, p, p.value, p.dim_v, keys, p.heads_kv, 1, config.block_n),
          heads_map(kName, p, p.grad_out, p.dim_v, queries, p.heads, 1, config.block_m),
          heads_map(kName, p, p.grad_key, p.dim, keys, p.heads_kv, 1, kWarpgroupRows),
          heads_map(kName, p, p.grad_value, p.dim_v, keys, p.heads_kv, 1, kWarpgroupRows),
          rt::make_tensor_map(kName, {.data = plan.grad_query,
                                      .element = rt::Element::kFloat32,
                                      .rank = 2,
                                      .sizes = {kSumsLine, lines},
                                      .strides = {kSumsLine * int64_t(sizeof(float))},
                                      .box = {kSumsLine, config.block_m * config.dim / kSumsLine}})};
}

template <class T, int tile>
AttentionPlan AttentionBackwardSm90<T, tile>::plan(const AttentionBackwardParams& params, const rt::Device& device) {
  return with_backward<T, tile>(
      params, [&]<class Kernel>(Kernel) { return sm80::describe_plan<Kernel>(params, kBackwardTiles[tile], device); });
}

template <class T, int tile>
size_t AttentionBackwardSm90<T, tile>::workspace(const AttentionBackwardParams& params) {
  return plan(params, rt::describe_device("attention_bwd_sm90")).workspace;
}

template <class T, int tile>
void AttentionBackwardSm90<T, tile>::launch(const AttentionBackwardParams& params, Workspace workspace, void* stream) {
  constexpr const BackwardConfig& config = kBackwardTiles[tile];
  sm80::BackwardPlan plan = sm80::plan_backward(params, config, rt::describe_device("attention_bwd_sm90"));
  sm80::assign_workspace(params, config, workspace.data, plan).expect_fits("attention_bwd_sm90", workspace);
  BackwardPasses<T, tile>::launch_before(params, plan, stream);
  with_backward<T, tile>(params, [&]<class Kernel>(Kernel) {
    rt::launch<attention_bwd_sm90<Kernel>>(
        "attention_bwd_sm90",
        {.grid = {plan.schedule.pairs * plan.schedule.tiles * plan.splits},
         .threads = Kernel::kThreads,
         .shared_bytes = sizeof(typename Kernel::Storage),
         .waits = params.deterministic ? rt::Waits::kForEarlier : rt::Waits::kForNone,
         .stream = stream},
        params, plan, make_maps(params, plan, config));
  });
  BackwardPasses<T, tile>::launch_after(params, plan, stream);
}

}  // namespace cuda_ext::sm90
