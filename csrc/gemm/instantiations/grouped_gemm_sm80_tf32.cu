// The kernels of grouped products for :kTf32:float32 operands rounded to tf32.
#include "gemm/grouped_gemm_sm80_launch.cuh"

namespace cuda_ext {

template struct GroupedGemmSm80<float, Float32Product::kTf32>;

}  // namespace cuda_ext
