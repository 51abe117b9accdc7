// Grouped products of float16; b contiguous along k.
#include "gemm/grouped_gemm_sm90_launch.cuh"

namespace cuda_ext::sm90 {

template struct GroupedGemmSm90<half_t, true>;

}  // namespace cuda_ext::sm90
