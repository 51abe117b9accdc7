// Attention backward on wgmma for float16 and head dims up to 256.
#include "attention/attention_bwd_sm90_launch.cuh"

namespace cuda_ext::attention::sm90 {

template struct BackwardLauncher<half_t, 256>;

}  // namespace cuda_ext::attention::sm90
