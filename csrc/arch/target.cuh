// Kernels are compiled by two compilers: by nvcc for the device, where each function of csrc/arch is one hardware
// instruction, and by a C++ compiler for the emulator (csrc/simt), where each is a call that emulates the instruction.
// Kernels use only these functions and macros: no asm, no <<<>>>, no bare __shared__, no spin loops.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/device.h"
#include "base/dtype.h"
#include "base/host_device.h"

#if defined(__CUDACC__)

#define DEVICE __device__ __forceinline__
#define GLOBAL(threads, min_blocks) __global__ void __launch_bounds__(threads, min_blocks)
#define GRID_CONSTANT const __grid_constant__
// Declares `name` as the block's dynamic shared memory, one struct; static shared memory is not used. A kernel that
// needs more than the architecture has is never launched there; it returns at once, so that it takes no space.
#define SHARED_STORAGE(Storage, name)                                                                              \
  if constexpr (cuda_ext::arch::kComputeCapability != 0 &&                                                         \
                sizeof(Storage) > size_t(cuda_ext::rt::shared_bytes_of_block(cuda_ext::arch::kComputeCapability))) \
    return;                                                                                                        \
  extern __shared__ __align__(1024) unsigned char cuda_ext_shared_bytes[];                                         \
  Storage& name = *reinterpret_cast<Storage*>(cuda_ext_shared_bytes)

namespace cuda_ext {
// The source line that called an instruction, for the emulator; empty on the device.
struct Site {};
}  // namespace cuda_ext

#else

#include "simt/api.h"

#define DEVICE inline
#define GLOBAL(threads, min_blocks) void
#define GRID_CONSTANT const
#define SHARED_STORAGE(Storage, name) Storage& name = *static_cast<Storage*>(simt::shared_storage(sizeof(Storage)))

#endif

namespace cuda_ext::arch {

// The compute capability that is compiled for, such as 86 for 8.6; 0 if it is not known: in the emulator, and when nvcc
// reads kernels for the host.
#if defined(__CUDA_ARCH__)
constexpr int kComputeCapability = __CUDA_ARCH__ / 10;
#else
constexpr int kComputeCapability = 0;
#endif

// A 32-bit address in shared memory, the form that instructions take.
using SharedAddress = uint32_t;

template <int count>
struct alignas(4 * count) Words {
  uint32_t data[count];
};
using Words2 = Words<2>;
using Words4 = Words<4>;

}  // namespace cuda_ext::arch
