// Scaled products of groups of terms: a of float8_e4m3, b of float8_e4m3.
#include "gemm/scaled_groups_sm90_launch.cuh"

namespace cuda_ext::sm90 {

template struct ScaledTermsSm90<float8_e4m3_t>;

}  // namespace cuda_ext::sm90
