#include "ops/torch_headers.h"

#include "ops/backend.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <mutex>

#include "build_config.h"

#if CUDA_EXT_WITH_CUDA
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include "launchers/device_probe.h"
#endif

namespace cuda_ext {

namespace {

// Not null while ops on CPU tensors run on the emulator.
std::atomic<const CudaKernels*> emulated_kernels = nullptr;

// Emulates the state of a generator during CUDA graph capture.
struct EmulatedCapture {
  Tensor seed_and_offset;  // int64; undefined: no capture
  uint64_t drawn = 0;      // calls of draw_rng since it began
};
std::mutex capture_mutex;
EmulatedCapture emulated_capture;

// Offsets of torch's generators are multiples of this.
constexpr uint64_t kOffsetStep = 4;

#if CUDA_EXT_WITH_CUDA

const CudaKernels& linked_kernels() {
  static const CudaKernels kernels = linked_cuda_kernels();
  return kernels;
}

// Whether this library was built for the architecture of a device. The driver is asked once per device.
bool has_kernel_image(at::Device device) {
  constexpr int kMaxDevices = 64;
  enum Answer : int8_t { kUnknown, kYes, kNo };
  static std::array<std::atomic<Answer>, kMaxDevices> answers{};
  const int index = device.index();
  if (index < 0 || index >= kMaxDevices) return cuda::has_kernel_image(index);
  Answer answer = answers[index].load(std::memory_order_acquire);
  if (answer == kUnknown) {
    // So that the probe finds the device selected. The runtime, unlike this guard, would create a context on the device
    // that it returns to: on GPU 0, in every rank.
    const c10::DeviceGuard guard(device);
    answer = cuda::has_kernel_image(index) ? kYes : kNo;
    answers[index].store(answer, std::memory_order_release);
  }
  return answer == kYes;
}

// Checked before a launch, because CUDA's error would say less.
void check_architecture(const char* op, at::Device device) {
  if (has_kernel_image(device)) return;
  const int capability = cuda::compute_capability(device.index());
  CUDA_EXT_CHECK(capability >= 75, op, "expected a device of compute capability 7.5 or newer, got ", device,
                 ", which is sm_", capability, "; move the tensors to the CPU with .cpu()");
  CUDA_EXT_CHECK(false, op, "expected a device of the architectures that cuda_ext was built for, ", CUDA_EXT_CUDA_ARCHS,
                 ", got ", device, ", which is sm_", capability,
                 "; rebuild with TORCH_CUDA_ARCH_LIST=", capability / 10, ".", capability % 10,
                 capability / 10 == 9 ? "a" : "", " pip install --no-build-isolation .");
}

#endif

}  // namespace

const CudaKernels* cuda_kernels(const char* op, at::Device device) {
  const CudaKernels* kernels = nullptr;
  if (device.is_cpu()) {
    kernels = emulated_kernels.load(std::memory_order_acquire);
    if (kernels == nullptr) return nullptr;
  }
#if CUDA_EXT_WITH_CUDA
  if (device.is_cuda()) {
    check_architecture(op, device);
    kernels = &linked_kernels();
  }
#else
  TORCH_CHECK_NOT_IMPLEMENTED(!device.is_cuda(), CUDA_EXT_OP(""), op, ": expected tensors on the CPU, got device ",
                              device,
                              ": this build of cuda_ext has no CUDA kernels, and `python -m cuda_ext.info` says "
                              "why; rebuild with CUDA_EXT_CUDA=1 pip install --no-build-isolation .");
#endif
  TORCH_CHECK_NOT_IMPLEMENTED(kernels != nullptr, CUDA_EXT_OP(""), op,
                              ": expected tensors on a CUDA device or the CPU, ", "got device ", device);
  return kernels;
}

const CudaKernels* planning_kernels() {
  const CudaKernels* const emulated = emulated_kernels.load(std::memory_order_acquire);
#if CUDA_EXT_WITH_CUDA
  return emulated != nullptr ? emulated : &linked_kernels();
#else
  return emulated;
#endif
}

Kernels kernels_on(at::Device device) {
  if (device.is_cpu())
    return emulated_kernels.load(std::memory_order_acquire) == nullptr ? Kernels::kCpu : Kernels::kCuda;
#if CUDA_EXT_WITH_CUDA
  if (device.is_cuda() && has_kernel_image(device)) return Kernels::kCuda;
#endif
  return Kernels::kNone;
}

Tensor with_unit_stride(const Tensor& tensor) {
  if (tensor.is_cpu() && emulated_kernels.load(std::memory_order_acquire) == nullptr) return tensor;
  const int64_t dims = tensor.dim();
  if (dims == 0 || tensor.size(-1) == 1 || tensor.stride(-1) == 1) return tensor;
  if (dims >= 2 && tensor.size(-2) != 1 && tensor.stride(-2) == 1) return tensor;
  return tensor.contiguous();
}

RngSource draw_rng(at::Device device) {
#if CUDA_EXT_WITH_CUDA
  if (device.is_cuda()) {
    // Keeps our numbers apart from those of torch's kernels, whose counters never reach this value.
    constexpr uint64_t kApart = uint64_t(1) << 63;
    auto* const generator =
        at::check_generator<at::CUDAGeneratorImpl>(at::cuda::detail::getDefaultCUDAGenerator(device.index()));
    const std::lock_guard<std::mutex> lock(generator->mutex_);
    const at::PhiloxCudaState state = generator->philox_cuda_state(kOffsetStep);
    if (!state.captured_) return {nullptr, nullptr, state.seed_.val, state.offset_.val + kApart};
    return {reinterpret_cast<const uint64_t*>(state.seed_.ptr), reinterpret_cast<const uint64_t*>(state.offset_.ptr), 0,
            state.offset_intragraph_ + kApart};
  }
#endif
  {
    const std::lock_guard<std::mutex> lock(capture_mutex);
    if (emulated_kernels.load() != nullptr && emulated_capture.seed_and_offset.defined()) {
      const auto* const values = static_cast<const uint64_t*>(emulated_capture.seed_and_offset.const_data_ptr());
      return {values, values + 1, 0, kOffsetStep * emulated_capture.drawn++};
    }
  }
  auto* const generator = at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  return {nullptr, nullptr, generator->random64(), 0};
}

bool is_capturing(at::Device device) {
#if CUDA_EXT_WITH_CUDA
  if (device.is_cuda()) return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
#endif
  const std::lock_guard<std::mutex> lock(capture_mutex);
  return device.is_cpu() && emulated_capture.seed_and_offset.defined();
}

LaunchScope::LaunchScope(at::Device device) : device_(device), guard_(device) {
#if CUDA_EXT_WITH_CUDA
  if (device.is_cuda()) stream_ = c10::cuda::getCurrentCUDAStream(device.index()).stream();
#endif
}

Workspace LaunchScope::workspace(size_t bytes) {
  if (bytes == 0) return {nullptr, 0};
  // CUDA's allocator aligns to the 256 bytes that kernels rely on; the CPU's aligns to 64.
  workspace_ = empty_on(device_, {int64_t(bytes)}, at::kByte);
  return {workspace_.data_ptr(), bytes};
}

}  // namespace cuda_ext

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  // Sets the kernels for CPU tensors: the address of a CudaKernels, or 0 for the CPU kernels.
  m.def("_emulate(int kernels) -> ()", [](int64_t address) {
    const auto* kernels = reinterpret_cast<const cuda_ext::CudaKernels*>(address);
    CUDA_EXT_CHECK(kernels == nullptr || kernels->layout == cuda_ext::CudaKernels::kLayout, "_emulate",
                   "expected kernels compiled from the same sources as this library, got others; rebuild it");
    cuda_ext::emulated_kernels.store(kernels, std::memory_order_release);
  });
  // Begins an emulated graph capture: kernels read seed and offset of their random numbers from this int64 tensor. None
  // ends it.
  m.def("_emulate_capture(Tensor? seed_and_offset) -> ()", [](const cuda_ext::OptionalTensor& seed_and_offset) {
    CUDA_EXT_CHECK(!seed_and_offset || cuda_ext::emulated_kernels.load() != nullptr, "_emulate_capture",
                   "expected an active emulation, got none; CPU kernels do not support capture");
    const std::lock_guard<std::mutex> lock(cuda_ext::capture_mutex);
    cuda_ext::emulated_capture = {cuda_ext::value_or_empty(seed_and_offset)};
  });
}
