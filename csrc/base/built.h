// Which kernels this build of the library has. The build writes build_config.h; without it, as under the emulator and
// CMake, there are all kernels.
#pragma once

#if __has_include("build_config.h")
#include "build_config.h"
#else
#define CUDA_EXT_WITH_SM90A 1
#define CUDA_EXT_HEAD_DIMS 64, 96, 128, 192, 256
#endif

namespace cuda_ext {

constexpr bool kBuiltForSm90a = CUDA_EXT_WITH_SM90A;
constexpr char kNotBuiltForSm90a[] =
    "the library has no kernels for sm_90a; build it with 9.0a in TORCH_CUDA_ARCH_LIST";

constexpr int kBuiltHeadDims[] = {CUDA_EXT_HEAD_DIMS};  // of attention
constexpr bool is_built(int head_dim) {
  for (const int built : kBuiltHeadDims)
    if (built == head_dim) return true;
  return false;
}

}  // namespace cuda_ext
