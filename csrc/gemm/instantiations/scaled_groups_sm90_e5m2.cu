// Scaled products of groups of rows: a of float8_e5m2, b of float8_e4m3.
#include "gemm/scaled_groups_sm90_launch.cuh"

namespace cuda_ext::sm90 {

template struct ScaledGroupsSm90<float8_e5m2_t>;

}  // namespace cuda_ext::sm90
