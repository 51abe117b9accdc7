// Attention forward on wgmma for bfloat16 and head dims up to 128.
#include "attention/attention_fwd_sm90_launch.cuh"

namespace cuda_ext::sm90 {

template struct AttentionForwardSm90<bfloat16_t, 2>;

}  // namespace cuda_ext::sm90
