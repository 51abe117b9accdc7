// Launches attention backward on wgmma: plan, workspace, tensor maps, and its kernels one after the other.
#pragma once

#include "attention/attention_bwd_passes.h"
#include "attention/attention_bwd_keys_sm90.cuh"
#include "attention/attention_bwd_queries_sm90.cuh"
#include "attention/attention_bwd_sm90.cuh"
#include "rt/device.h"
#include "rt/launch.cuh"

namespace cuda_ext::attention::sm90 {

// The kernel with keys resident.
template <class T, int dim, bool has_options, BackwardConfig config = tile_of(kBackwardTiles, dim)>
using KeysKernel =
    std::conditional_t<config.separate, BackwardKeys<T, config, has_options>, Backward<T, config, has_options>>;

// Calls f(KeysKernel<..>{}) with the instantiation that the parameters require.
template <class T, int dim, class F>
auto with_backward(const AttentionBackwardParams& p, const F& f) {
  return has_options(p) ? f(KeysKernel<T, dim, true>{}) : f(KeysKernel<T, dim, false>{});
}

// The tensor maps of queries, keys and so on, for launches of `kernel`.
struct HeadsMaps {
  const char* kernel;
  const AttentionBackwardParams& p;

  HeadsMap of_queries(const HeadsView& view, int64_t dim, int lines) const {
    return heads_map(kernel, p, view, dim, p.cu_seqlens_q != nullptr ? p.total_q : p.seqlen_q, p.heads, 1, lines);
  }
  HeadsMap of_keys(const HeadsView& view, int64_t dim, int lines) const {
    return heads_map(kernel, p, view, dim, p.cu_seqlens_q != nullptr ? p.total_k : p.seqlen_k, p.heads_kv, 1, lines);
  }
};

inline KeysMaps keys_maps(const char* kernel, const AttentionBackwardParams& p, const BackwardConfig& config) {
  const HeadsMaps maps{kernel, p};
  return {maps.of_queries(p.query, p.dim, config.block_m), maps.of_keys(p.key, p.dim, config.block_n),
          maps.of_keys(p.value, p.dim_v, config.block_n),  maps.of_queries(p.grad_out, p.dim_v, config.block_m),
          maps.of_keys(p.grad_key, p.dim, kWarpgroupRows), maps.of_keys(p.grad_value, p.dim_v, kWarpgroupRows)};
}

inline QueriesMaps queries_maps(const char* kernel, const AttentionBackwardParams& p, const BackwardConfig& config) {
  const HeadsMaps maps{kernel, p};
  return {maps.of_queries(p.query, p.dim, kQueriesOfSeparate), maps.of_queries(p.grad_out, p.dim_v, kQueriesOfSeparate),
          maps.of_keys(p.key, p.dim, config.block_n), maps.of_keys(p.value, p.dim_v, config.block_n),
          maps.of_queries(p.grad_query, p.dim, kWarpgroupRows)};
}

// The sums of dQ in the workspace.
inline arch::TensorMap sums_map(const char* kernel, const AttentionBackwardParams& p, const BackwardPlan& plan,
                                const BackwardConfig& config) {
  return rt::make_tensor_map(kernel, {.data = plan.grad_query,
                                      .element = rt::Element::kFloat32,
                                      .rank = 2,
                                      .sizes = {kSumsLine, p.heads * plan.head_rows * config.sums_dim() / kSumsLine},
                                      .strides = {kSumsLine * int64_t(sizeof(float))},
                                      .box = {kSumsLine, config.block_m * config.sums_dim() / kSumsLine}});
}

// One kernel for all gradients.
template <class Kernel>
void launch_backward(const AttentionBackwardParams& p, const BackwardPlan& plan, const BackwardConfig& config,
                     void* stream) {
  constexpr char kName[] = "attention_bwd_sm90";
  rt::launch<attention_bwd_sm90<Kernel>>(kName,
                                         {.grid = {plan.schedule.head_batches * plan.schedule.tiles * plan.splits},
                                          .threads = Kernel::kThreads,
                                          .shared_bytes = sizeof(typename Kernel::Storage),
                                          .waits = p.deterministic ? rt::Waits::kForEarlier : rt::Waits::kForNone,
                                          .stream = stream},
                                         p, plan,
                                         BackwardMaps{keys_maps(kName, p, config), sums_map(kName, p, plan, config)});
}

// The order of tiles of queries.
inline Schedule queries_schedule(const AttentionBackwardParams& p, int block_m) {
  const int64_t head_batches = p.heads * p.batch;
  return {.tiles = int((p.seqlen_q + block_m - 1) / block_m),
          .heads = int(p.heads),
          .head_batches = int(head_batches),
          .section = section_size(p.seqlen_k * (p.dim + p.dim_v) * 2 * p.heads_kv / p.heads, head_batches)};
}

// One kernel for dK and dV, one for dQ.
template <class Keys, class Queries>
void launch_separate(const AttentionBackwardParams& p, const BackwardPlan& plan, const BackwardConfig& config,
                     void* stream) {
  rt::launch<attention_bwd_keys_sm90<Keys>>("attention_bwd_keys_sm90",
                                            {.grid = {plan.schedule.head_batches * plan.schedule.tiles * plan.splits},
                                             .threads = Keys::kThreads,
                                             .shared_bytes = sizeof(typename Keys::Storage),
                                             .stream = stream},
                                            p, plan, keys_maps("attention_bwd_keys_sm90", p, config));
  const Schedule schedule = queries_schedule(p, Queries::kBlockM);
  rt::launch<attention_bwd_queries_sm90<Queries>>("attention_bwd_queries_sm90",
                                                  {.grid = {schedule.head_batches * schedule.tiles},
                                                   .threads = Queries::kThreads,
                                                   .shared_bytes = sizeof(typename Queries::Storage),
                                                   .stream = stream},
                                                  p, plan, schedule,
                                                  queries_maps("attention_bwd_queries_sm90", p, config));
}

template <class T, int dim>
AttentionPlan BackwardLauncher<T, dim>::plan(const AttentionBackwardParams& params, const rt::Device& device) {
  return with_backward<T, dim>(params, [&]<class Kernel>(Kernel) {
    return describe_plan<Kernel>(params, tile_of(kBackwardTiles, dim), device);
  });
}

template <class T, int dim>
void BackwardLauncher<T, dim>::launch(const AttentionBackwardParams& params, const AllocateWorkspace& allocate,
                                      void* stream) {
  constexpr char kName[] = "attention_bwd_sm90";
  constexpr const BackwardConfig& config = tile_of(kBackwardTiles, dim);
  BackwardPlan plan = plan_backward(params, config, rt::describe_device(kName));
  provide_workspace(kName, allocate, [&](void* data) { return assign_workspace(params, config, data, plan); });
  BackwardPasses<T, dim>::launch_before(params, plan, stream);
  with_backward<T, dim>(params, [&]<class Kernel>(Kernel) {
    if constexpr (config.separate)
      launch_separate<Kernel, BackwardQueries<T, config, Kernel::kWithOptions>>(params, plan, config, stream);
    else
      launch_backward<Kernel>(params, plan, config, stream);
  });
  BackwardPasses<T, dim>::launch_after(params, plan, stream);
}

}  // namespace cuda_ext::attention::sm90
