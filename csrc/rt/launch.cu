// The part of rt::launch that is the same for all kernels, and the properties of the device.
#include "rt/launch.cuh"

#include <atomic>
#include <stdexcept>
#include <string>

#include "rt/device.h"

#if !defined(__CUDACC__)
#include "simt/launch.h"
#endif

namespace cuda_ext::rt {
namespace {

// Checks the limits of clusters here, because the runtime's error would not name them.
void check_cluster(const char* name, const LaunchConfig& config) {
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

}  // namespace

#if defined(__CUDACC__)

void check(cudaError_t error, const char* kernel, const char* action) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears the error, so that later calls do not report it
  throw std::runtime_error(std::string(kernel) + ": " + action + ": " + cudaGetErrorString(error));
}

int current_device(const char* kernel) {
  int device = 0;
  check(cudaGetDevice(&device), kernel, "query the current device");
  return device;
}

Device describe_device(const char* kernel) {
  const int device = current_device(kernel);
  int major = 0, minor = 0, num_sms = 0, shared_bytes = 0;
  const auto read = [&](int& value, cudaDeviceAttr attribute) {
    check(cudaDeviceGetAttribute(&value, attribute, device), kernel, "query the device's attributes");
  };
  read(major, cudaDevAttrComputeCapabilityMajor);
  read(minor, cudaDevAttrComputeCapabilityMinor);
  read(num_sms, cudaDevAttrMultiProcessorCount);
  read(shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  return {10 * major + minor, num_sms, shared_bytes};
}

namespace {

// More than 48 KiB of shared memory must be requested once per kernel and device. This is not allowed while a graph is
// captured, so the first launch requests it and later ones only read what was requested.
void request_shared_memory(const char* name, const void* kernel, size_t bytes, Requested& requested) {
  constexpr size_t kFree = 48 * 1024;
  if (bytes <= kFree) return;
  const int device = current_device(name);
  const bool known = device < Requested::kMaxDevices;
  if (known && std::atomic_ref(requested.shared_bytes[device]).load(std::memory_order_acquire) >= bytes) return;
  int limit = 0;
  check(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), name,
        "query the limit of shared memory");
  if (bytes > size_t(limit))
    throw std::runtime_error(std::string(name) + ": needs " + std::to_string(bytes) +
                             " bytes of shared memory per block, but device " + std::to_string(device) + " has " +
                             std::to_string(limit));
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)), name,
        "reserve shared memory");
  if (known) std::atomic_ref(requested.shared_bytes[device]).store(uint32_t(bytes), std::memory_order_release);
}

// Clusters of more than 8 blocks must be requested too.
void request_nonportable_cluster(const char* name, const void* kernel, Requested& requested) {
  const int device = current_device(name);
  const bool known = device < Requested::kMaxDevices;
  if (known && std::atomic_ref(requested.nonportable_cluster[device]).load(std::memory_order_acquire)) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), name,
        "allow a cluster of more than 8 blocks");
  if (known) std::atomic_ref(requested.nonportable_cluster[device]).store(1, std::memory_order_release);
}

}  // namespace

void launch_kernel(const char* name, const void* kernel, const LaunchConfig& config, void** arguments,
                   Requested& requested) {
  check_cluster(name, config);
  request_shared_memory(name, kernel, config.shared_bytes, requested);
  if (config.nonportable_cluster) request_nonportable_cluster(name, kernel, requested);
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
  check(cudaLaunchKernelExC(&launch, kernel, arguments), name, "launch");
}

#else

Device describe_device(const char*) {
  const simt::Options& options = simt::options();
  return {options.compute_capability, options.num_sms, options.shared_bytes()};
}

void run_threads(const char* name, const LaunchConfig& config, void (*thread)(const void*), const void* arguments) {
  check_cluster(name, config);
  simt::Geometry geometry;
  geometry.grid = {config.grid.x, config.grid.y, config.grid.z};
  geometry.block = config.threads;
  geometry.cluster = {config.cluster.x, config.cluster.y, config.cluster.z};
  geometry.shared_bytes = config.shared_bytes;
  constexpr int kSome = 6;  // like a device that holds only a few blocks at once
  geometry.concurrent_clusters = config.waits == Waits::kForAny ? 0 : config.waits == Waits::kForEarlier ? kSome : 1;
  simt::launch(name, geometry, [&] { thread(arguments); });
}

#endif

}  // namespace cuda_ext::rt
