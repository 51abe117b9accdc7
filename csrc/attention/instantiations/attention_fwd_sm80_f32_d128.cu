// Attention forward for float32 and head dims up to 128.
#include "attention/attention_fwd_sm80_launch.cuh"

namespace cuda_ext::attention::sm80 {

template struct ForwardLauncher<float, 128>;

}  // namespace cuda_ext::attention::sm80
