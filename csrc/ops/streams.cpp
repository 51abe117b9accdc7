// What data parallel training asks about streams of GPUs.
#include "ops/torch_headers.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include "build_config.h"
#include "ops/op.h"

#if CUDA_EXT_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

namespace cuda_ext {

namespace {

bool is_reached([[maybe_unused]] int64_t event, at::Device device) {
  CUDA_EXT_CHECK(device.is_cuda(), "_is_reached", "expected a CUDA device, got ", device);
#if CUDA_EXT_WITH_CUDA
  // Without the guard, a thread that has not used the runtime yet would create a context on GPU 0.
  const c10::DeviceGuard guard(device);
  // In other modes a query fails, and ends the capture, while any thread captures a stream.
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  const cudaError_t status = cudaEventQuery(reinterpret_cast<cudaEvent_t>(event));
  if (status == cudaSuccess) return true;
  (void)cudaGetLastError();  // which the next check of a launch would report
  if (status != cudaErrorNotReady) C10_CUDA_CHECK(status);
#endif
  return false;
}

int64_t accumulated_in_default_stream(at::TensorList parameters) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto node = torch::autograd::impl::try_get_grad_accumulator(parameters[i]);
    const auto stream = node == nullptr ? std::nullopt : node->stream();
    if (stream && *stream == c10::impl::VirtualGuardImpl(stream->device_type()).getDefaultStream(stream->device()))
      return int64_t(i);
  }
  return -1;
}

}  // namespace

}  // namespace cuda_ext

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  // Whether a recorded event, given by its handle, has been reached. Any thread may ask at any time.
  m.def("_is_reached(int event, Device device) -> bool", cuda_ext::is_reached);
  // The index of the first parameter whose gradients autograd accumulates in the default stream of its device; or -1.
  m.def("_accumulated_in_default_stream(Tensor[] parameters) -> int", cuda_ext::accumulated_in_default_stream);
}
