// The kernels for bfloat16 operands.
#include "gemm/gemm_sm80_launch.cuh"

namespace cuda_ext {

template struct GemmSm80<bfloat16_t>;

}  // namespace cuda_ext
