// Grouped products of bfloat16: groups of rows; a contiguous along k, b along n.
#include "gemm/grouped_gemm_sm90_launch.cuh"

namespace cuda_ext::sm90 {

template struct GroupedGemmSm90<bfloat16_t, true, false>;

}  // namespace cuda_ext::sm90
