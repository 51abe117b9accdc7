// float16; a contiguous along m, b along n.
#include "gemm/gemm_sm90_launch.cuh"

namespace cuda_ext::sm90 {

template struct Layout<half_t, Major::kMn, Major::kMn>;

}  // namespace cuda_ext::sm90
