// The kernels for float16 operands.
#include "loss/logits_sm80_launch.cuh"

namespace cuda_ext::loss {

template struct LogitsSm80<half_t, sm80::Arithmetic::k16Bit>;

}  // namespace cuda_ext::loss
