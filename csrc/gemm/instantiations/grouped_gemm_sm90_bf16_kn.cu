// Grouped products of bfloat16; b contiguous along n.
#include "gemm/grouped_gemm_sm90_launch.cuh"

namespace cuda_ext::sm90 {

template struct GroupedGemmSm90<bfloat16_t, false>;

}  // namespace cuda_ext::sm90
