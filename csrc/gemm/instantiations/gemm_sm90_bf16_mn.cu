// bfloat16; a contiguous along m, b along n.
#include "gemm/gemm_sm90_launch.cuh"

namespace cuda_ext::sm90 {

template struct GemmSm90<bfloat16_t, false, false>;

}  // namespace cuda_ext::sm90
