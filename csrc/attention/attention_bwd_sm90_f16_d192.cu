// Attention backward on wgmma for float16 and head dims up to 192 (values: 128).
#include "attention/attention_bwd_sm90_launch.cuh"

namespace cuda_ext::sm90 {

template struct AttentionBackwardSm90<half_t, 3>;

}  // namespace cuda_ext::sm90
