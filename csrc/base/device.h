// What plans of kernels know about a device, and the shared memory of each architecture (CUDA C++ Programming Guide,
// "Technical Specifications per Compute Capability").
#pragma once

#include "base/host_device.h"

namespace cuda_ext::rt {

struct Device {
  int compute_capability;  // 86 for 8.6
  int num_sms;
  int shared_bytes;  // per SM
};

// Shared memory of an SM with the compute capability, such as 86 for 8.6.
HOST_DEVICE constexpr int shared_bytes_of_sm(int compute_capability) {
  const bool is_small = compute_capability >= 120 || compute_capability == 86 || compute_capability == 89;
  return (compute_capability < 80 ? 64 : is_small ? 100 : compute_capability < 90 ? 164 : 228) << 10;
}
// What a block may have of it: from 8.0 on, the system keeps 1 KiB for each block.
HOST_DEVICE constexpr int shared_bytes_of_block(int compute_capability) {
  return shared_bytes_of_sm(compute_capability) - (compute_capability < 80 ? 0 : 1024);
}

}  // namespace cuda_ext::rt
