// The kernels of grouped products for float32 operands in three products of tf32.
#include "gemm/grouped_gemm_sm80_launch.cuh"

namespace cuda_ext {

template struct GroupedGemmSm80<float>;

}  // namespace cuda_ext
