// The kernels for bfloat16 operands.
#include "loss/logits_sm80_launch.cuh"

namespace cuda_ext::loss {

template struct LogitsSm80<bfloat16_t, sm80::Arithmetic::k16Bit>;

}  // namespace cuda_ext::loss
