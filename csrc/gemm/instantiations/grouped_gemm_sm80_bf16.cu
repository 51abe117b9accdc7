// The kernels of grouped products for bfloat16 operands.
#include "gemm/grouped_gemm_sm80_launch.cuh"

namespace cuda_ext {

template struct GroupedGemmSm80<bfloat16_t>;

}  // namespace cuda_ext
