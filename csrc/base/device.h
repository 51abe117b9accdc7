// What plans of kernels know about a device.
#pragma once

namespace cuda_ext::rt {

struct Device {
  int compute_capability;  // 86 for 8.6
  int num_sms;
  int shared_bytes;  // per SM
};

}  // namespace cuda_ext::rt
