// Attention forward on wgmma for bfloat16 and head dims up to 256.
#include "attention/attention_fwd_sm90_launch.cuh"

namespace cuda_ext::sm90 {

template struct AttentionForwardSm90<bfloat16_t, 4>;

}  // namespace cuda_ext::sm90
