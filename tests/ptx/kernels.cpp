// The table of launchers in this library, for the op _emulate.
#include "launchers/cuda_kernels.h"

extern "C" __attribute__((visibility("default"))) const void* ptx_kernels() {
  static const cuda_ext::CudaKernels kernels = cuda_ext::linked_cuda_kernels();
  return &kernels;
}
