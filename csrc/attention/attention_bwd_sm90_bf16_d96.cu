// Attention backward on wgmma for bfloat16 and head dims up to 96.
#include "attention/attention_bwd_sm90_launch.cuh"

namespace cuda_ext::sm90 {

template struct AttentionBackwardSm90<bfloat16_t, 1>;

}  // namespace cuda_ext::sm90
