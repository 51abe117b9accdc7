// Attention over a cache for bfloat16 and head dims up to 256.
#include "attention/attention_cache_sm80_launch.cuh"

namespace cuda_ext::sm80 {

template struct AttentionCacheSm80<bfloat16_t, 2>;

}  // namespace cuda_ext::sm80
