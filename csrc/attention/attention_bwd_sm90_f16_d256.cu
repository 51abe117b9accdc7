// Attention backward on wgmma for float16 and head dims up to 256.
#include "attention/attention_bwd_sm90_launch.cuh"

namespace cuda_ext::sm90 {

template struct AttentionBackwardSm90<half_t, 4>;

}  // namespace cuda_ext::sm90
