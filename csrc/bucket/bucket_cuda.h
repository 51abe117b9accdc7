// Launchers of the bucket kernels (bucket_kernels.cuh), without a torch or CUDA header.
#pragma once

#include "base/workspace.h"
#include "bucket/bucket.h"

namespace cuda_ext {

// As launch_bucket_pack, launch_bucket_unpack and launch_bucket_stats in bucket.h, with tensors and bucket on the
// device. params.entries is on the host and may be freed when the call returns. Statistics go to `stats` on the device,
// (2,), instead of params.stats: the sum of squares, and 1 if a value is infinite or NaN, else 0. For pack `stats` may
// be null; it is then a single launch for up to 126 entries. `stream` is a cudaStream_t. None of them synchronises, and
// all can be captured in a CUDA graph. There is no kernel for float64: they throw std::invalid_argument.
void launch_bucket_pack_cuda(const BucketParams& params, float* stats, const AllocateWorkspace& allocate, void* stream);
void launch_bucket_unpack_cuda(const BucketParams& params, float* stats, const AllocateWorkspace& allocate,
                               void* stream);
void launch_bucket_stats_cuda(const BucketParams& params, float* stats, const AllocateWorkspace& allocate,
                              void* stream);

}  // namespace cuda_ext
