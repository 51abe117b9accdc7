// Grouped products of float16: groups of terms; a contiguous along m, b along n.
#include "gemm/grouped_gemm_sm90_launch.cuh"

namespace cuda_ext::sm90 {

template struct GroupedGemmSm90<half_t, false, false>;

}  // namespace cuda_ext::sm90
