#include "launchers/device_probe.h"

#include <cuda_runtime_api.h>

namespace cuda_ext::cuda {

namespace {

// Compiled for the same architectures as all other kernels, so it represents them.
__global__ void __launch_bounds__(1) probe() {}

}  // namespace

bool has_kernel_image(int device) {
  int current = 0;
  if (cudaGetDevice(&current) != cudaSuccess || cudaSetDevice(device) != cudaSuccess) {
    cudaGetLastError();  // clear the error, or the next caller would find it
    return false;
  }
  cudaFuncAttributes attributes;
  const bool found = cudaFuncGetAttributes(&attributes, probe) == cudaSuccess;
  if (!found) cudaGetLastError();
  cudaSetDevice(current);
  return found;
}

int compute_capability(int device) {
  int major = 0, minor = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return 10 * major + minor;
}

}  // namespace cuda_ext::cuda
