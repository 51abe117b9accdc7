// Attention backward for float16 and head dims up to 256.
#include "attention/attention_bwd_sm80_launch.cuh"

namespace cuda_ext::sm80 {

template struct AttentionBackwardSm80<half_t, 4>;

}  // namespace cuda_ext::sm80
