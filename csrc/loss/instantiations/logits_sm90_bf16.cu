// The kernels for bfloat16 operands.
#include "loss/logits_sm90_launch.cuh"

namespace cuda_ext::loss {

template struct LogitsSm90<bfloat16_t>;

}  // namespace cuda_ext::loss
