// Launchers of the bucket kernels (bucket_kernels.cuh), without a torch or CUDA header.
#pragma once

#include <cstddef>

#include "bucket/bucket.h"

namespace cuda_ext {

// Bytes of workspace for a bucket of `count` elements. The workspace is aligned to 16 bytes and zero before its first
// use; every launch leaves it ready for the next. Launches that may run at the same time need one each.
size_t bucket_cuda_workspace(int64_t count);

// As launch_bucket_pack, launch_bucket_unpack and launch_bucket_stats in bucket.h, with every pointer on the device:
// the table of entries, the tensors, the bucket and the stats. `stream` is a cudaStream_t. None synchronises. float64
// has no kernel: for a bucket of it they throw std::invalid_argument; entries of it are the caller's to refuse.
void launch_bucket_pack_cuda(const BucketParams& params, void* workspace, void* stream);
void launch_bucket_unpack_cuda(const BucketParams& params, void* workspace, void* stream);
void launch_bucket_stats_cuda(const BucketParams& params, void* workspace, void* stream);

}  // namespace cuda_ext
