// What launchers ask of the device they launch on, to choose a kernel for it.
#pragma once

#include "rt/launch.cuh"

namespace cuda_ext::rt {

struct Device {
  int compute_capability;  // 86 for 8.6
  int processors;          // multiprocessors
};

#if defined(__CUDACC__)

inline Device describe_device(const char* kernel) {
  const int device = current_device(kernel);
  int major = 0, minor = 0, processors = 0;
  const auto read = [&](int& value, cudaDeviceAttr attribute) {
    check(cudaDeviceGetAttribute(&value, attribute, device), kernel, "ask what the device has");
  };
  read(major, cudaDevAttrComputeCapabilityMajor);
  read(minor, cudaDevAttrComputeCapabilityMinor);
  read(processors, cudaDevAttrMultiProcessorCount);
  return {10 * major + minor, processors};
}

#else

inline Device describe_device(const char*) { return {simt::options().compute_capability, simt::options().processors}; }

#endif

}  // namespace cuda_ext::rt
