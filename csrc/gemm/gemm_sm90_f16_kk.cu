// float16; a contiguous along k, b along k.
#include "gemm/gemm_sm90_launch.cuh"

namespace cuda_ext::sm90 {

template struct Layout<half_t, Major::kK, Major::kK>;

}  // namespace cuda_ext::sm90
