#include "bucket/symmetric_kernels.cuh"

#include <stdexcept>

#include "rt/launch.cuh"

namespace cuda_ext {

namespace {

template <auto kernel>
void launch(const char* name, const SymmetricParams& params, float* stats, void* stream) {
  rt::launch<kernel>(name,
                     {.grid = {symmetric::num_blocks(params)},
                      .threads = symmetric::Config::kThreads,
                      .shared_bytes = sizeof(symmetric::SharedStorage),
                      .stream = stream},
                     symmetric::kernel_params(params, stats));
}

template <class T>
void launch(const SymmetricParams& params, float* stats, void* stream) {
  if (symmetric::is_one_shot(params))
    launch<symmetric::one_shot_kernel<T>>("symmetric_one_shot", params, stats, stream);
  else
    launch<symmetric::two_shot_kernel<T>>("symmetric_two_shot", params, stats, stream);
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
