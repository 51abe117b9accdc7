// The kernels for float32 operands, rounded to tf32.
#include "gemm/gemm_sm80_launch.cuh"

namespace cuda_ext {

template struct GemmSm80<float, Float32Product::kTf32>;

}  // namespace cuda_ext
