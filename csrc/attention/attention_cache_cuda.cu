#include "attention/attention_cache_append.cuh"
#include "attention/attention_fwd_sm80.h"
#include "rt/launch.cuh"

namespace cuda_ext {
namespace {

template <class F>
auto with_launcher(const CachedAttentionParams& params, const F& f) {
  return sm80::with_attention_tile<sm80::AttentionCacheSm80>("attention_cache_sm80", sm80::kCacheTiles, params, f);
}

}  // namespace

size_t attention_cache_cuda_workspace(const CachedAttentionParams& params) {
  return with_launcher(params, [&](auto launcher) { return launcher.workspace(params); });
}

void launch_attention_cache_cuda(const CachedAttentionParams& params, Workspace workspace, void* stream) {
  with_launcher(params, [&](auto launcher) { launcher.launch(params, workspace, stream); });
}

void launch_cache_append_cuda(const CacheAppendParams& params, void* stream) {
  constexpr int kThreads = 128;
  const int64_t queries = params.rotated_query.data != nullptr ? params.batch * params.seqlen_q * params.heads : 0;
  const int64_t lines = queries + 2 * params.batch * params.count * params.heads_kv;
  if (lines == 0) return;
  const rt::LaunchConfig config{
      .grid = {int((lines + kThreads / 32 - 1) / (kThreads / 32))}, .threads = kThreads, .stream = stream};
  if (params.dtype == Dtype::kFloat16)
    rt::launch<sm80::attention_cache_append<half_t, kThreads>>("attention_cache_append", config, params);
  else
    rt::launch<sm80::attention_cache_append<bfloat16_t, kThreads>>("attention_cache_append", config, params);
}

}  // namespace cuda_ext
