// The kernels for bfloat16 operands.
#include "gemm/gemm_sm80.cuh"

namespace cuda_ext {

template size_t gemm_sm80_workspace_of<bfloat16_t>(const GemmParams&, Float32Product);
template void launch_gemm_sm80_of<bfloat16_t>(const GemmParams&, Workspace, void*, Float32Product);

}  // namespace cuda_ext
