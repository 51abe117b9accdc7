#include "attention/attention_cache_append.cuh"
#include "attention/dispatch.h"
#include "rt/launch.cuh"

namespace cuda_ext {

void launch_attention_cache_cuda(const CachedAttentionParams& params, const AllocateWorkspace& allocate, void* stream) {
  attention::with_kernel<attention::sm80::CacheLauncher, attention::kCacheHeadDims, attention::kFloat32HeadDims>(
      "flash_attention_with_kvcache", params, [&](auto launcher) { launcher.launch(params, allocate, stream); });
}

void launch_cache_append_cuda(const CacheAppendParams& params, void* stream) {
  constexpr int kThreads = 128;
  const int64_t queries = params.rotated_query.data != nullptr ? params.batch * params.seqlen_q * params.heads : 0;
  const int64_t lines = queries + 2 * params.batch * params.count * params.heads_kv;
  if (lines == 0) return;
  const rt::LaunchConfig config{
      .grid = {int((lines + kThreads / 32 - 1) / (kThreads / 32))}, .threads = kThreads, .stream = stream};
  if (params.dtype == Dtype::kFloat32)
    rt::launch<attention::attention_cache_append<float, kThreads>>("attention_cache_append", config, params);
  else if (params.dtype == Dtype::kFloat16)
    rt::launch<attention::attention_cache_append<half_t, kThreads>>("attention_cache_append", config, params);
  else
    rt::launch<attention::attention_cache_append<bfloat16_t, kThreads>>("attention_cache_append", config, params);
}

}  // namespace cuda_ext
