// The kernels for float32 operands, as sums of two tf32.
#include "gemm/gemm_sm80_launch.cuh"

namespace cuda_ext {

template struct GemmSm80<float>;

}  // namespace cuda_ext
