// Attention backward for float32 and head dims up to 128.
#include "attention/attention_bwd_sm80_launch.cuh"

namespace cuda_ext::attention::sm80 {

template struct BackwardLauncher<float, 128>;

}  // namespace cuda_ext::attention::sm80
