// Attention over a cache for float16 and head dims up to 256.
#include "attention/attention_cache_sm80_launch.cuh"

namespace cuda_ext::sm80 {

template struct AttentionCacheSm80<half_t, 2>;

}  // namespace cuda_ext::sm80
