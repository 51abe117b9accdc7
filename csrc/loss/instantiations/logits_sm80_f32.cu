// The kernels for float32 operands, in three products of tf32.
#include "loss/logits_sm80_launch.cuh"

namespace cuda_ext::loss {

template struct LogitsSm80<float, sm80::Arithmetic::kThreeTf32>;

}  // namespace cuda_ext::loss
