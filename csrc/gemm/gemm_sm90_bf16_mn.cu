// bfloat16; a contiguous along m, b along n.
#include "gemm/gemm_sm90_launch.cuh"

namespace cuda_ext::sm90 {

template struct Layout<bfloat16_t, Major::kMn, Major::kMn>;

}  // namespace cuda_ext::sm90
