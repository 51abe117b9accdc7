// Whether the kernels of this library can run on a GPU at all: code for another architecture fails only at the launch, as "no kernel image".
#pragma once

namespace cuda_ext::cuda {

// Whether the library holds code, machine code or PTX, that `device` (an ordinal) can execute. False also where there is no such device.
bool has_kernel_image(int device);

}  // namespace cuda_ext::cuda
