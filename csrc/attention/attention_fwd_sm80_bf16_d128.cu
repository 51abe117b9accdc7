// Attention forward for bfloat16 and head dims up to 128.
#include "attention/attention_fwd_sm80_launch.cuh"

namespace cuda_ext::sm80 {

template struct AttentionForwardSm80<bfloat16_t, 2>;

}  // namespace cuda_ext::sm80
