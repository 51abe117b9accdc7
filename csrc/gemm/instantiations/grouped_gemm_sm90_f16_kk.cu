// Grouped products of float16: groups of rows; a contiguous along k, b along k.
#include "gemm/grouped_gemm_sm90_launch.cuh"

namespace cuda_ext::sm90 {

template struct GroupedGemmSm90<half_t, true, true>;

}  // namespace cuda_ext::sm90
