// The kernels for float16 operands.
#include "gemm/gemm_sm80_launch.cuh"

namespace cuda_ext {

template struct GemmSm80<half_t>;

}  // namespace cuda_ext
