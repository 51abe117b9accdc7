// Scaled products of groups of rows: a of float8_e5m2, b of float8_e4m3.
#include "gemm/scaled_gemm_sm89_launch.cuh"

namespace cuda_ext {

template struct ScaledGroupsSm89<float8_e5m2_t>;

}  // namespace cuda_ext
