// Launches kernels, for both compilers:
//
//   rt::launch<gemm_sm80<Config>>("gemm_sm80", {.grid = {tiles}, .threads = 128, .shared_bytes = sizeof(Storage),
//                                               .stream = stream}, params);
//
// Compiled by nvcc, this launches on the device; compiled by a C++ compiler, the emulator runs all threads before the
// call returns. Every file with kernels includes this header, so what does not depend on the kernel is in launch.cu.
#pragma once

#include <cstdint>
#include <type_traits>

#include "arch/target.cuh"

#if defined(__CUDACC__)
#include <cuda_runtime_api.h>
#endif

namespace cuda_ext::rt {

// A cudaStream_t, without including its header.
using Stream = void*;

struct Extent {
  int x = 1, y = 1, z = 1;
};

// Which other blocks a block may wait for, through global memory.
enum class Waits {
  kForNone,
  kForEarlier,  // blocks of lower index: devices start blocks in that order
  kForAny,      // all blocks must then fit on the device at once
};

struct LaunchConfig {
  Extent grid;
  int threads = 1;  // per block
  Extent cluster;
  bool nonportable_cluster = false;  // 9 to 16 blocks, which not every device supports
  size_t shared_bytes = 0;           // dynamic
  Waits waits = Waits::kForNone;
  bool programmatic = false;  // may start before the previous kernel of the stream has completed (sm_90)
  Stream stream = nullptr;
};

#if defined(__CUDACC__)

// Throws the runtime's error, with the kernel's name and what failed.
void check(cudaError_t error, const char* kernel, const char* action);

int current_device(const char* kernel);

// What was requested for a kernel, by device. Read and written by launch_kernel, from any thread.
struct Requested {
  static constexpr int kMaxDevices = 64;
  uint32_t shared_bytes[kMaxDevices];
  uint8_t nonportable_cluster[kMaxDevices];
};

// `arguments` point to one value for each parameter of the kernel.
void launch_kernel(const char* name, const void* kernel, const LaunchConfig& config, void** arguments,
                   Requested& requested);

#else

// Calls `thread(arguments)` in every thread of the grid.
void run_threads(const char* name, const LaunchConfig& config, void (*thread)(const void*), const void* arguments);

#endif

template <auto kernel, class... Params>
void launch(const char* name, const LaunchConfig& config, const Params&... params) {
  static_assert(std::is_same_v<decltype(kernel), void (*)(Params...)>,
                "arguments must have exactly the types of the kernel's parameters");
#if defined(__CUDACC__)
  static Requested requested;
  void* arguments[] = {const_cast<Params*>(&params)...};
  launch_kernel(name, reinterpret_cast<const void*>(kernel), config, arguments, requested);
#else
  const auto thread = [&] { kernel(params...); };
  run_threads(name, config, [](const void* self) { (*static_cast<decltype(&thread)>(self))(); }, &thread);
#endif
}

}  // namespace cuda_ext::rt
