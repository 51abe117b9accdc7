// a in E4M3, b in E4M3.
#include "gemm/scaled_gemm_sm89_launch.cuh"

namespace cuda_ext {

template struct ScaledGemmSm89<float8_e4m3_t, float8_e4m3_t>;

}  // namespace cuda_ext
