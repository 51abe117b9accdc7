// Where the kernels of an op run, beside the CPU's own: on a CUDA device, or on the emulator.
#pragma once

#include "binding/cuda_kernels.h"
#include "binding/op.h"

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

// Makes `device` the current one and offers its current stream and memory for the time of a launch.
class LaunchScope {
 public:
  LaunchScope(at::Device device, size_t workspace_bytes);
  void* stream() const { return stream_; }
  Workspace workspace() const { return {bytes_ == 0 ? nullptr : workspace_.data_ptr(), bytes_}; }

 private:
  c10::DeviceGuard guard_;
  void* stream_ = nullptr;
  size_t bytes_;
  Tensor workspace_;
};

}  // namespace cuda_ext
