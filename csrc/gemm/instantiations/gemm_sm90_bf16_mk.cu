// bfloat16; a contiguous along m, b along k.
#include "gemm/gemm_sm90_launch.cuh"

namespace cuda_ext::sm90 {

template struct GemmSm90<bfloat16_t, false, true>;

}  // namespace cuda_ext::sm90
