// Launchers of the bucket kernels (bucket_kernels.cuh), without a torch or CUDA header.
#pragma once

#include <cstddef>

#include "bucket/bucket.h"

namespace cuda_ext {

// Bytes of workspace, on the device and aligned to 16 bytes, for a bucket of `count` elements, with or without statistics
// (only a pack goes without). What it holds does not matter, before or after; launches that may run at the same time need
// one each.
size_t bucket_cuda_workspace(int64_t count, int64_t num_entries, bool stats);

// As launch_bucket_pack, launch_bucket_unpack and launch_bucket_stats in bucket.h, with tensors and bucket on the device.
// The table of entries is on the host and may go when the call returns. In place of params.stats, `stats` on the device
// receives (2,): the sum of squares, and 1 if a value is infinite or NaN, else 0; a pack takes null for none, and then is
// a single launch for up to 126 entries. `stream` is a cudaStream_t. None synchronises, and all may be captured into a
// graph. float64 has no kernel: they throw std::invalid_argument.
void launch_bucket_pack_cuda(const BucketParams& params, float* stats, void* workspace, void* stream);
void launch_bucket_unpack_cuda(const BucketParams& params, float* stats, void* workspace, void* stream);
void launch_bucket_stats_cuda(const BucketParams& params, float* stats, void* workspace, void* stream);

}  // namespace cuda_ext
