// Tells whether this library has kernels for a GPU. Without this check, code for another architecture is noticed only
// at the first launch, which fails with "no kernel image is available".
#pragma once

namespace cuda_ext::cuda {

// Whether the library holds code, machine code or PTX, that GPU `device` can execute; false if there is no such GPU.
bool has_kernel_image(int device);

// 86 for a GPU of compute capability 8.6; 0 if there is none.
int compute_capability(int device);

}  // namespace cuda_ext::cuda
