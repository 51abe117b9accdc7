#include "bucket/symmetric_kernels.cuh"

#include <stdexcept>

#include "rt/launch.cuh"

namespace cuda_ext {

namespace {

template <class T>
void launch(const SymmetricParams& params, float* stats, void* stream) {
  const symmetric::KernelParams kernel_params = symmetric::kernel_params(params, stats);
  rt::launch<symmetric::all_reduce_kernel<T>>("symmetric_all_reduce",
                                              {.grid = {symmetric::num_blocks(kernel_params.chunk, params.dtype)},
                                               .threads = symmetric::Config::kThreads,
                                               .shared_bytes = sizeof(symmetric::SharedStorage),
                                               .stream = stream},
                                              kernel_params);
}

}  // namespace

void launch_symmetric_all_reduce_cuda(const SymmetricParams& params, float* stats, void* stream) {
  switch (params.dtype) {
    case Dtype::kFloat32: return launch<float>(params, stats, stream);
    case Dtype::kFloat16: return launch<half_t>(params, stats, stream);
    case Dtype::kBFloat16: return launch<bfloat16_t>(params, stats, stream);
    default:
      throw std::invalid_argument(
          "symmetric_all_reduce: no CUDA kernel for a bucket of float64; use one of float32, float16 or bfloat16");
  }
}

}  // namespace cuda_ext
