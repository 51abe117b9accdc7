// Where the kernels of an op run, beside the CPU's own: on a CUDA device, or on the emulator.
#pragma once

#include <stdexcept>

#include "launchers/cuda_kernels.h"
#include "ops/op.h"

namespace cuda_ext {

// The CUDA kernels for tensors on `device`; null if those of the CPU are to run. Refuses a device that this library was
// not built for, and float64.
const CudaKernels* cuda_kernels(const char* op, at::Device device, at::ScalarType type);

// A tensor as CUDA kernels read it: with a unit stride in one of the last two dims, so that 16 bytes hold neighbours.
// Kernels of the CPU read any.
Tensor with_unit_stride(const Tensor& tensor);

// The random numbers of a call on `device`, from torch's default generator of the device, so that torch.manual_seed
// rules. While a CUDA graph is captured they are pointers, so that each replay has numbers of its own.
RngSource draw_rng(at::Device device);

// Makes `device` the current one, as long as it lives, and offers its current stream and memory for a launch. Kernels ask
// the current device how large a workspace they need, so that is to be asked once there is a scope.
class LaunchScope {
 public:
  explicit LaunchScope(at::Device device);
  void* stream() const { return stream_; }
  Workspace workspace(size_t bytes);

 private:
  at::Device device_;
  c10::DeviceGuard guard_;
  void* stream_ = nullptr;
  Tensor workspace_;
};

// Calls a launcher of CUDA kernels, which throws std::invalid_argument for what it cannot do; the error names the op.
template <class Launch>
void launch_for(const char* op, const Launch& launch) {
  try {
    launch();
  } catch (const std::invalid_argument& refusal) {
    CUDA_EXT_CHECK(false, op, refusal.what());
  }
}

}  // namespace cuda_ext
