// Whether this library has kernels for a GPU. Without this check, missing code is only detected at a launch, which
// fails with "no kernel image is available".
#pragma once

namespace cuda_ext::cuda {

// Whether the library contains machine code or PTX that the GPU with index `device` can execute; false if there is no
// such GPU.
bool has_kernel_image(int device);

// 86 for a GPU of compute capability 8.6; 0 if there is none.
int compute_capability(int device);

}  // namespace cuda_ext::cuda
