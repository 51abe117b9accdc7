// bfloat16; a contiguous along k, b along k.
#include "gemm/gemm_sm90_launch.cuh"

namespace cuda_ext::sm90 {

template struct GemmSm90<bfloat16_t, true, true>;

}  // namespace cuda_ext::sm90
