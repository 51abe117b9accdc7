// Attention over a cache for float32 and head dims up to 256.
#include "attention/attention_cache_sm80_launch.cuh"

namespace cuda_ext::attention::sm80 {

template struct CacheLauncher<float, 256>;

}  // namespace cuda_ext::attention::sm80
