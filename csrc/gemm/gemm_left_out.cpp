// Stands in for the kernels on wgmma in a build for devices without it. Their plan is then refused, so nothing calls
// the launcher.
#include "build_config.h"

#if CUDA_EXT_WITH_CUDA && !CUDA_EXT_WITH_SM90A

#include <stdexcept>

#include "gemm/gemm_sm90.h"

namespace cuda_ext {

bool has_gemm_sm90() { return false; }

size_t gemm_sm90_workspace(const GemmParams&, sm90::GemmPlan) { return 0; }

void launch_gemm_sm90(const GemmParams&, sm90::GemmPlan, Workspace, void*) {
  throw std::logic_error("gemm_sm90: the library has no kernels for sm_90a");
}

}  // namespace cuda_ext

#endif
