// Attention over a cache for float16 and head dims up to 64.
#include "attention/attention_cache_sm80_launch.cuh"

namespace cuda_ext::attention::sm80 {

template struct CacheLauncher<half_t, 64>;

}  // namespace cuda_ext::attention::sm80
