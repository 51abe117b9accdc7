// Attention forward on wgmma for float16 and head dims up to 192.
#include "attention/attention_fwd_sm90_launch.cuh"

namespace cuda_ext::sm90 {

template struct AttentionForwardSm90<half_t, 3>;

}  // namespace cuda_ext::sm90
