// Launches attention over a cache; included by the files that instantiate it.
#pragma once

#include "attention/attention_cache_sm80.cuh"
#include "rt/device.h"
#include "rt/launch.cuh"

namespace cuda_ext::attention::sm80 {

// Calls f(CacheForward<..>{}) with the instantiation for the rows of a key head.
template <class T, int dim, class F>
auto with_cache_kernel(const CachedAttentionParams& p, const rt::Device& device, const F& f) {
  constexpr const CacheTile& tile = tile_of(kCacheTilesOf<T>, dim);
  const auto with = [&]<CacheConfig config>() { return f(CacheForward<T, config>{}, config); };
  const bool has_many = p.seqlen_q * (p.heads / p.heads_kv) > 2 * tile.few.block_m;
  if (is_small(device.shared_bytes))
    return has_many ? with.template operator()<tile.config(true, true)>()
                    : with.template operator()<tile.config(false, true)>();
  return has_many ? with.template operator()<tile.config(true, false)>()
                  : with.template operator()<tile.config(false, false)>();
}

// As many blocks as run at once, or fewer if there is less work.
inline int cache_grid(const CachedAttentionParams& p, const CachePlan& plan, const CacheConfig& config,
                      const rt::Device& device) {
  const int64_t tiles = p.batch * p.heads_kv * plan.row_tiles * plan.splits;
  const int64_t at_once = int64_t(device.num_sms) * config.min_blocks;
  return int(tiles < at_once ? tiles : at_once);
}

template <class T, int dim>
void CacheLauncher<T, dim>::launch(const CachedAttentionParams& params, const AllocateWorkspace& allocate,
                                   void* stream) {
  if (is_empty(params)) return;
  constexpr char kName[] = "attention_cache_sm80";
  const rt::Device device = rt::describe_device(kName);
  with_cache_kernel<T, dim>(params, device, [&]<class Kernel>(Kernel, const CacheConfig& config) {
    CachePlan plan = plan_cache(params, config, device);
    provide_workspace(kName, allocate, [&](void* data) { return assign_workspace(params, data, plan); });
    rt::launch<attention_cache_sm80<Kernel>>(kName,
                                             {.grid = {cache_grid(params, plan, config, device)},
                                              .threads = Kernel::kThreads,
                                              .shared_bytes = sizeof(typename Kernel::Storage),
                                              .stream = stream},
                                             params, plan);
    if (plan.splits == 1) return;
    constexpr int kThreads = 128;
    const int64_t blocks = (lse_rows(params) + kThreads / 32 - 1) / (kThreads / 32);
    rt::launch<attention_cache_combine<T, Kernel::kBlockN, kThreads>>(
        "attention_cache_combine", {.grid = {int(blocks)}, .threads = kThreads, .stream = stream}, params, plan);
  });
}

}  // namespace cuda_ext::attention::sm80
