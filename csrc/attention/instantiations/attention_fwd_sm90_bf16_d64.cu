// Attention forward on wgmma for bfloat16 and head dims up to 64.
#include "attention/attention_fwd_sm90_launch.cuh"

namespace cuda_ext::attention::sm90 {

template struct ForwardLauncher<bfloat16_t, 64>;

}  // namespace cuda_ext::attention::sm90
