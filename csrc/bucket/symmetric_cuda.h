// Launcher of the all-reduce in symmetric memory (symmetric_kernels.cuh), without a torch or CUDA header.
#pragma once

#include "base/dtype.h"
#include "bucket/symmetric.h"

namespace cuda_ext {

struct SymmetricParams {
  void* segments
      [symmetric::kMaxRanks];  // (num_ranks,), as this rank addresses them; pads are zeros before the first call
  int num_ranks;
  int rank;
  int slot;
  int64_t begin;  // of the bucket, bytes from the beginning of the segment; a multiple of kAlignment
  int64_t count;  // elements
  Dtype dtype;
  symmetric::Staging staging;  // of the slot; whether it takes the bucket decides between one-shot and two-shot
  double timeout;              // seconds
};

// Sums the bucket of all ranks in place, once they have all launched this with the same begin, count, dtype and staging. `stats`,
// on the device, receives (2,): the sum of squares, and 1 if a value is infinite or NaN, else 0. `stream` is a
// cudaStream_t. Does not synchronise and may be captured into a graph. A rank that waits longer than the timeout ends its
// kernel with an error of the device. float64 has no kernel: throws std::invalid_argument.
void launch_symmetric_all_reduce_cuda(const SymmetricParams& params, float* stats, void* stream);

}  // namespace cuda_ext
