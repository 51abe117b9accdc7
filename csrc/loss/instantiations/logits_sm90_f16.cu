// The kernels for float16 operands.
#include "loss/logits_sm90_launch.cuh"

namespace cuda_ext::loss {

template struct LogitsSm90<half_t>;

}  // namespace cuda_ext::loss
