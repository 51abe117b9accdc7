// Attention backward for bfloat16 and head dims up to 96.
#include "attention/attention_bwd_sm80_launch.cuh"

namespace cuda_ext::attention::sm80 {

template struct BackwardLauncher<bfloat16_t, 96>;

}  // namespace cuda_ext::attention::sm80
