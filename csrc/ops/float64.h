// float64 on CUDA devices, for checking gradients: the ops composed of PyTorch's, correct and slow. There are no
// float64 kernels because training has no use for them.
#pragma once

#include "bucket/bucket.h"
#include "ops/product.h"

namespace cuda_ext {

// What the launchers of the same names do.
void gemm_in_float64(const GemmParams& params, at::Device device);
void activation_grad_in_float64(const ActivationGradParams& params, at::Device device);
void bucket_pack_in_float64(const BucketParams& params, at::Device device, const Tensor& stats);
void bucket_unpack_in_float64(const BucketParams& params, at::Device device, const Tensor& stats);
void bucket_stats_in_float64(const BucketParams& params, at::Device device, const Tensor& stats);

}  // namespace cuda_ext
