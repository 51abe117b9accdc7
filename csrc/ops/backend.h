// Selects the CUDA kernels of an op, for a CUDA device or for the emulator, and provides what their launches need.
#pragma once

#include <stdexcept>

#include "launchers/cuda_kernels.h"
#include "ops/op.h"

namespace cuda_ext {

// The CUDA kernels for tensors on `device`; null if the CPU kernels should run. Throws for a device that this library
// was not built for. They do not compute in float64: composed.h does.
const CudaKernels* cuda_kernels(const char* op, at::Device device);

// The kernels of the emulator while it is active, else those of this build; null if it has none. They can plan for any
// device.
const CudaKernels* planning_kernels();

// The kernels that the ops run on tensors of a device; kNone: the ops raise an error.
enum class Kernels { kNone, kCpu, kCuda };
Kernels kernels_on(at::Device device);

// The tensor, copied if CUDA kernels cannot read it: they need unit stride in one of the last two dims, to load 16
// bytes at a time. CPU kernels read any strides.
Tensor with_unit_stride(const Tensor& tensor);

// The seed and offset for the random numbers of a call, from torch's default generator of the device, so that
// torch.manual_seed determines them. During graph capture they are pointers, so that each replay draws new numbers.
RngSource draw_rng(at::Device device);

// Whether the current stream of the device is captured into a graph.
bool is_capturing(at::Device device);

// Makes `device` the current device while it exists, and provides its current stream and a workspace for a launch.
class LaunchScope {
 public:
  explicit LaunchScope(at::Device device);
  void* stream() const { return stream_; }
  // For one launcher, of one workspace.
  auto allocator() {
    return [this](size_t bytes) { return workspace(bytes); };
  }

 private:
  Workspace workspace(size_t bytes);

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
