// The kernels of grouped products for float16 operands.
#include "gemm/grouped_gemm_sm80_launch.cuh"

namespace cuda_ext {

template struct GroupedGemmSm80<half_t>;

}  // namespace cuda_ext
