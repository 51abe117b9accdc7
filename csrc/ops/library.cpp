// Creates the op namespace; each family of ops adds to it with TORCH_LIBRARY_FRAGMENT.
#include "ops/torch_headers.h"

#include <torch/library.h>

#include "build_config.h"

#if CUDA_EXT_WITH_CUDA
#include "launchers/device_probe.h"
#endif

TORCH_LIBRARY(CUDA_EXT_NAMESPACE, m) {
#if CUDA_EXT_WITH_CUDA
  m.def("has_kernel_image(int device) -> bool",
        [](int64_t device) { return cuda_ext::cuda::has_kernel_image(static_cast<int>(device)); });
#endif
}
