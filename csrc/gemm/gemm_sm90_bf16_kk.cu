// bfloat16; a contiguous along k, b along k.
#include "gemm/gemm_sm90_launch.cuh"

namespace cuda_ext::sm90 {

template struct Layout<bfloat16_t, Major::kK, Major::kK>;

}  // namespace cuda_ext::sm90
