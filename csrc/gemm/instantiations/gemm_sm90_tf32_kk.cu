// float32 operands in tf32, both contiguous along k.
#include "gemm/gemm_sm90_launch.cuh"

namespace cuda_ext::sm90 {

template struct GemmSm90<float, true, true>;

}  // namespace cuda_ext::sm90
