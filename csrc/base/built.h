// Which kernels this build of the library has. The build writes build_config.h; without it, as under the emulator and
// CMake, there are all kernels.
#pragma once

#include <initializer_list>

#if __has_include("build_config.h")
#include "build_config.h"
#else
#define CUDA_EXT_WITH_SM90A 1
#define CUDA_EXT_SM89_CODE {89, true}
#define CUDA_EXT_HEAD_DIMS 64, 96, 128, 192, 256
#endif

namespace cuda_ext {

constexpr bool kBuiltForSm90a = CUDA_EXT_WITH_SM90A;
constexpr char kNotBuiltForSm90a[] =
    "the library has no kernels for sm_90a; build it with 9.0a in TORCH_CUDA_ARCH_LIST";

// Code of a kernel: for a compute capability and later ones of its generation, as PTX for all later ones.
struct BuiltCode {
  int compute_capability;
  bool is_ptx;
};
constexpr std::initializer_list<BuiltCode> kSm89Code = {CUDA_EXT_SM89_CODE};  // of kernels that need sm_89
constexpr bool kBuiltForSm89 = kSm89Code.size() > 0;
constexpr char kNotBuiltForSm89[] =
    "the library has no kernels of FP8 for this device; build it with the device's architecture in "
    "TORCH_CUDA_ARCH_LIST";
// Whether the code of these kernels runs on a device.
constexpr bool is_built_for_sm89(int compute_capability) {
  for (const BuiltCode& code : kSm89Code)
    if (compute_capability >= code.compute_capability &&
        (code.is_ptx || compute_capability / 10 == code.compute_capability / 10))
      return true;
  return false;
}

constexpr int kBuiltHeadDims[] = {CUDA_EXT_HEAD_DIMS};  // of attention
constexpr bool is_built(int head_dim) {
  for (const int built : kBuiltHeadDims)
    if (built == head_dim) return true;
  return false;
}

}  // namespace cuda_ext
