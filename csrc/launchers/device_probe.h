// Whether this library has kernels for a GPU. Code for another architecture is noticed no earlier than at a launch, which
// then fails with "no kernel image is available".
#pragma once

namespace cuda_ext::cuda {

// Whether the library holds code, machine code or PTX, that the GPU number `device` can execute; false if there is none.
bool has_kernel_image(int device);

// 86 for a GPU of compute capability 8.6; 0 if there is none.
int compute_capability(int device);

}  // namespace cuda_ext::cuda
