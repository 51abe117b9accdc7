// Attention over a cache for float16 and head dims up to 128.
#include "attention/attention_cache_sm80_launch.cuh"

namespace cuda_ext::sm80 {

template struct AttentionCacheSm80<half_t, 1>;

}  // namespace cuda_ext::sm80
