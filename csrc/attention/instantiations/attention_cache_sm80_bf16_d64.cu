// Attention over a cache for bfloat16 and head dims up to 64.
#include "attention/attention_cache_sm80_launch.cuh"

namespace cuda_ext::attention::sm80 {

template struct CacheLauncher<bfloat16_t, 64>;

}  // namespace cuda_ext::attention::sm80
