// One kernel source, two compilers. nvcc compiles it for the device, where each function of this room is one hardware
// instruction; a C++ compiler compiles it for the emulator (csrc/simt), where each is one call that acts the
// instruction out. Kernels use these functions and macros only: no asm, no <<<>>>, no bare __shared__, no spin loops.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/host_device.h"

#if defined(__CUDACC__)

#define DEVICE __device__ __forceinline__
#define GLOBAL(threads, min_blocks) __global__ void __launch_bounds__(threads, min_blocks)
#define GRID_CONSTANT const __grid_constant__
// The block's dynamic shared memory as one struct; static shared memory is not used.
#define SHARED_STORAGE(Storage, name)                                      \
  extern __shared__ __align__(1024) unsigned char cuda_ext_shared_bytes[]; \
  Storage& name = *reinterpret_cast<Storage*>(cuda_ext_shared_bytes)

namespace cuda_ext {
// Where in the source an instruction was called from: known to the emulator, nothing on the device.
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

// A 32-bit address in the window of shared memory, as instructions take it.
using SharedAddress = uint32_t;

template <int count>
struct alignas(4 * count) Words {
  uint32_t data[count];
};
using Words2 = Words<2>;
using Words4 = Words<4>;

}  // namespace cuda_ext::arch
