// Launches kernels, for both compilers:
//
//   rt::launch<gemm_sm80<Config>>("gemm_sm80", {.grid = {tiles}, .threads = 128, .shared_bytes = sizeof(Storage),
//                                               .stream = stream}, params);
//
// Compiled by nvcc, this launches on the device; compiled by a C++ compiler, the emulator runs all threads before the
// call returns.
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

// Checks the limits of clusters here, because the runtime's error would not name them.
inline void check_cluster(const char* name, const LaunchConfig& config) {
  constexpr int kMaxCluster = 16, kMaxPortableCluster = 8;
  const Extent& c = config.cluster;
  const Extent& g = config.grid;
  const auto text = [](const Extent& e) {
    return "(" + std::to_string(e.x) + ", " + std::to_string(e.y) + ", " + std::to_string(e.z) + ")";
  };
  const int limit = config.nonportable_cluster ? kMaxCluster : kMaxPortableCluster;
  if (c.x < 1 || c.y < 1 || c.z < 1 || c.x * c.y * c.z > limit)
    throw std::runtime_error(std::string(name) + ": a cluster of " + text(c) + " blocks; expected 1 to " +
                             std::to_string(limit) +
                             (config.nonportable_cluster ? "" : ", or up to 16 with nonportable_cluster"));
  if (g.x % c.x != 0 || g.y % c.y != 0 || g.z % c.z != 0)
    throw std::runtime_error(std::string(name) + ": a cluster of " + text(c) + " blocks does not divide the grid of " +
                             text(g));
}

#if defined(__CUDACC__)

// Throws the runtime's error, with the kernel's name and what failed.
inline void check(cudaError_t error, const char* kernel, const char* action) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears the error, so that later calls do not report it
  throw std::runtime_error(std::string(kernel) + ": " + action + ": " + cudaGetErrorString(error));
}

constexpr int kMaxDevices = 64;

inline int current_device(const char* name) {
  int device = 0;
  check(cudaGetDevice(&device), name, "query the current device");
  return device;
}

// More than 48 KiB of shared memory must be requested once per kernel and device. This is not allowed while a graph is
// captured, so the first launch requests it and later ones only read the flag.
template <auto kernel>
void allow_shared_memory(const char* name, size_t bytes) {
  constexpr size_t kFree = 48 * 1024;
  static std::array<std::atomic<size_t>, kMaxDevices> allowed{};
  if (bytes <= kFree) return;
  const int device = current_device(name);
  if (device < kMaxDevices && allowed[device].load(std::memory_order_acquire) >= bytes) return;
  int limit = 0;
  check(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), name,
        "query the limit of shared memory");
  if (bytes > size_t(limit))
    throw std::runtime_error(std::string(name) + ": needs " + std::to_string(bytes) +
                             " bytes of shared memory per block, but device " + std::to_string(device) + " has " +
                             std::to_string(limit));
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             int(bytes)),
        name, "reserve shared memory");
  if (device < kMaxDevices) allowed[device].store(bytes, std::memory_order_release);
}

// Clusters of more than 8 blocks must be requested too.
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
  constexpr int kSome = 6;  // like a device that holds only a few blocks at once
  geometry.concurrent_clusters = config.waits == Waits::kForAny ? 0 : config.waits == Waits::kForEarlier ? kSome : 1;
  simt::launch(name, geometry, [&] { kernel(params...); });
}

#endif

}  // namespace cuda_ext::rt
