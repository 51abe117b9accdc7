// Launchers of the bucket kernels (bucket_kernels.cuh), without a torch or CUDA header.
#pragma once

#include <cstddef>

#include "bucket/bucket.h"

namespace cuda_ext {

// Bytes of workspace, on the device and aligned to 16 bytes, for a bucket of `count` elements, with or without
// statistics (only pack can do without). It need not be initialised. Launches that may run concurrently need one each.
size_t bucket_cuda_workspace(int64_t count, int64_t num_entries, bool stats);

// As launch_bucket_pack, launch_bucket_unpack and launch_bucket_stats in bucket.h, with tensors and bucket on the
// device. params.entries is on the host and may be freed when the call returns. Statistics go to `stats` on the device,
// (2,), instead of params.stats: the sum of squares, and 1 if a value is infinite or NaN, else 0. For pack `stats` may
// be null; it is then a single launch for up to 126 entries. `stream` is a cudaStream_t. None of them synchronises, and
// all can be captured in a CUDA graph. There is no kernel for float64: they throw std::invalid_argument.
void launch_bucket_pack_cuda(const BucketParams& params, float* stats, void* workspace, void* stream);
void launch_bucket_unpack_cuda(const BucketParams& params, float* stats, void* workspace, void* stream);
void launch_bucket_stats_cuda(const BucketParams& params, float* stats, void* workspace, void* stream);

}  // namespace cuda_ext
