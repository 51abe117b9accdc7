// Attention forward for float32 and head dims up to 64.
#include "attention/attention_fwd_sm80_launch.cuh"

namespace cuda_ext::attention::sm80 {

template struct ForwardLauncher<float, 64>;

}  // namespace cuda_ext::attention::sm80
