// One way to start a kernel, for both compilers:
//
//   rt::launch<gemm_sm80<Config>>("gemm_sm80", {.grid = {tiles}, .threads = 128, .shared_bytes = sizeof(Storage),
//                                               .stream = stream}, params);
//
// nvcc sends it to the device; a C++ compiler has the emulator run every thread of it before the call returns.
#pragma once

#include <array>
#include <atomic>
#include <stdexcept>
#include <string>

#include "arch/target.cuh"

#if defined(__CUDACC__)
#include <cuda_runtime_api.h>
#else
#include "simt/launch.h"
#endif

namespace cuda_ext::rt {

// A cudaStream_t, without its header.
using Stream = void*;

struct Extent {
  int x = 1, y = 1, z = 1;
};

// Which other blocks a block waits for, through global memory.
enum class Waits {
  kForNone,
  kForEarlier,  // of lower index: devices start blocks in that order
  kForAny,      // so all of them must fit the device at once
};

struct LaunchConfig {
  Extent grid;
  int threads = 1;  // of a block
  Extent cluster;
  bool nonportable_cluster = false;  // of 9 to 16 blocks, which not every device can run
  size_t shared_bytes = 0;           // dynamic
  Waits waits = Waits::kForNone;
  bool programmatic = false;  // may start before the kernel ahead of it in the stream has ended (sm_90)
  Stream stream = nullptr;
};

// The limits of clusters, which the error of a launch would not tell.
inline void check_cluster(const char* name, const LaunchConfig& config) {
  constexpr int kMaxCluster = 16, kMaxPortableCluster = 8;
  const Extent& c = config.cluster;
  const Extent& g = config.grid;
  const auto text = [](const Extent& e) {
    return "(" + std::to_string(e.x) + ", " + std::to_string(e.y) + ", " + std::to_string(e.z) + ")";
  };
  const int limit = config.nonportable_cluster ? kMaxCluster : kMaxPortableCluster;
  if (c.x < 1 || c.y < 1 || c.z < 1 || c.x * c.y * c.z > limit)
    throw std::runtime_error(std::string(name) + ": a cluster of " + text(c) + " blocks; it has 1 to " +
                             std::to_string(limit) + " of them" +
                             (config.nonportable_cluster ? "" : ", or 16 if asked for as nonportable_cluster"));
  if (g.x % c.x != 0 || g.y % c.y != 0 || g.z % c.z != 0)
    throw std::runtime_error(std::string(name) + ": a cluster of " + text(c) + " blocks does not divide the grid of " +
                             text(g));
}

#if defined(__CUDACC__)

// Throws what the runtime said, with the name of the kernel and what was being done.
inline void check(cudaError_t error, const char* kernel, const char* action) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // leave no error behind for the next caller to find
  throw std::runtime_error(std::string(kernel) + ": " + action + ": " + cudaGetErrorString(error));
}

constexpr int kMaxDevices = 64;

inline int current_device(const char* name) {
  int device = 0;
  check(cudaGetDevice(&device), name, "ask for the current device");
  return device;
}

// Shared memory beyond 48 KiB has to be asked for, once per kernel and device; not while a graph is captured, so the
// flag is set by the first launch and read by all others.
template <auto kernel>
void allow_shared_memory(const char* name, size_t bytes) {
  constexpr size_t kFree = 48 * 1024;
  static std::array<std::atomic<size_t>, kMaxDevices> allowed{};
  if (bytes <= kFree) return;
  const int device = current_device(name);
  if (device < kMaxDevices && allowed[device].load(std::memory_order_acquire) >= bytes) return;
  int limit = 0;
  check(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), name, "ask for its limits");
  if (bytes > size_t(limit))
    throw std::runtime_error(std::string(name) + ": needs " + std::to_string(bytes) +
                             " bytes of shared memory a block, and device " + std::to_string(device) + " has " +
                             std::to_string(limit));
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             int(bytes)),
        name, "reserve shared memory");
  if (device < kMaxDevices) allowed[device].store(bytes, std::memory_order_release);
}

// So have clusters of more than 8 blocks.
template <auto kernel>
void allow_nonportable_cluster(const char* name) {
  static std::array<std::atomic<bool>, kMaxDevices> allowed{};
  const int device = current_device(name);
  if (device < kMaxDevices && allowed[device].load(std::memory_order_acquire)) return;
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
        name, "allow a cluster of more than 8 blocks");
  if (device < kMaxDevices) allowed[device].store(true, std::memory_order_release);
}

template <auto kernel, class... Params>
void launch(const char* name, const LaunchConfig& config, const Params&... params) {
  check_cluster(name, config);
  allow_shared_memory<kernel>(name, config.shared_bytes);
  if (config.nonportable_cluster) allow_nonportable_cluster<kernel>(name);
  cudaLaunchAttribute attributes[3];
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(config.grid.x, config.grid.y, config.grid.z);
  launch.blockDim = dim3(config.threads);
  launch.dynamicSmemBytes = config.shared_bytes;
  launch.stream = static_cast<cudaStream_t>(config.stream);
  launch.attrs = attributes;
  if (config.cluster.x * config.cluster.y * config.cluster.z > 1) {
    cudaLaunchAttribute& attribute = attributes[launch.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {unsigned(config.cluster.x), unsigned(config.cluster.y), unsigned(config.cluster.z)};
  }
  if (config.waits == Waits::kForAny) {
    cudaLaunchAttribute& attribute = attributes[launch.numAttrs++];
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  if (config.programmatic) {
    cudaLaunchAttribute& attribute = attributes[launch.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  check(cudaLaunchKernelEx(&launch, kernel, params...), name, "launch");
}

#else

template <auto kernel, class... Params>
void launch(const char* name, const LaunchConfig& config, const Params&... params) {
  check_cluster(name, config);
  simt::Geometry geometry;
  geometry.grid = {config.grid.x, config.grid.y, config.grid.z};
  geometry.block = config.threads;
  geometry.cluster = {config.cluster.x, config.cluster.y, config.cluster.z};
  geometry.shared_bytes = config.shared_bytes;
  constexpr int kSome = 6;  // as many as a device may run at once, whichever they are
  geometry.concurrent_clusters = config.waits == Waits::kForAny ? 0 : config.waits == Waits::kForEarlier ? kSome : 1;
  simt::launch(name, geometry, [&] { kernel(params...); });
}

#endif

}  // namespace cuda_ext::rt
