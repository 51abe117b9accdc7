// The kernels for float32 operands, rounded to tf32.
#include "loss/logits_sm90_launch.cuh"

namespace cuda_ext::loss {

template struct LogitsSm90<float>;

}  // namespace cuda_ext::loss
