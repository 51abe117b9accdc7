// Attention over a cache for bfloat16 and head dims up to 64.
#include "attention/attention_cache_sm80_launch.cuh"

namespace cuda_ext::sm80 {

template struct AttentionCacheSm80<bfloat16_t, 0>;

}  // namespace cuda_ext::sm80
