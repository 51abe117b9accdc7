// Launcher of the all-reduce in symmetric memory (symmetric_kernels.cuh), without a torch or CUDA header.
#pragma once

#include "base/dtype.h"
#include "bucket/symmetric.h"

namespace cuda_ext {

struct SymmetricParams {
  // (num_ranks,), as this rank addresses them. Pads must be zero before the first call.
  void* segments[symmetric::kMaxRanks];
  int num_ranks;
  int rank;
  int slot;
  int64_t begin;  // bytes from the start of the segment to the bucket; a multiple of kAlignment
  int64_t count;  // elements
  Dtype dtype;
  symmetric::Staging staging;  // of the slot; a bucket that fits in it is summed one-shot, others two-shot
  double timeout;              // seconds
};

// Sums the buckets of all ranks in place, once all have launched this with the same begin, count, dtype and staging.
// `stats` on the device, (2,), receives the sum of squares, and 1 if a value is infinite or NaN, else 0. `stream` is a
// cudaStream_t. Does not synchronise and can be captured in a CUDA graph. If a rank waits longer than the timeout, its
// kernel traps, which is an error of the device. There is no kernel for float64: throws std::invalid_argument.
void launch_symmetric_all_reduce_cuda(const SymmetricParams& params, float* stats, void* stream);

}  // namespace cuda_ext
