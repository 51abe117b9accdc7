// Attention backward for bfloat16 and head dims up to 96.
#include "attention/attention_bwd_sm80_launch.cuh"

namespace cuda_ext::sm80 {

template struct AttentionBackwardSm80<bfloat16_t, 1>;

}  // namespace cuda_ext::sm80
