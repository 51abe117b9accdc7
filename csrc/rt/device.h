// Asks the current device for the properties from which launchers choose a kernel.
#pragma once

#include "base/device.h"
#include "rt/launch.cuh"

namespace cuda_ext::rt {

#if defined(__CUDACC__)

inline Device describe_device(const char* kernel) {
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

#else

inline Device describe_device(const char*) {
  const simt::Options& options = simt::options();
  return {options.compute_capability, options.num_sms, options.shared_bytes()};
}

#endif

}  // namespace cuda_ext::rt
