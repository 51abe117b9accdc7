// Attention backward on wgmma for float16 and head dims up to 192 (values: 128).
#include "attention/attention_bwd_sm90_launch.cuh"

namespace cuda_ext::attention::sm90 {

template struct BackwardLauncher<half_t, 192>;

}  // namespace cuda_ext::attention::sm90
