// Attention forward for float16 and head dims up to 128.
#include "attention/attention_fwd_sm80_launch.cuh"

namespace cuda_ext::attention::sm80 {

template struct ForwardLauncher<half_t, 128>;

}  // namespace cuda_ext::attention::sm80
