// Gradient buckets: copies between many tensors of mixed dtype and one flat buffer, in one pass with scale, cast and
// statistics.
//
// The work is divided by position in the buffer, not by tensor: block b owns elements [b, b + 1) * kBlockElements,
// finds its first tensor by binary search, and continues from there. A thousand biases and one embedding therefore load
// threads (on a GPU: thread blocks) equally. Each block stores one partial sum and these are added in order, so the
// statistics do not depend on the number of threads.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "cpu/isa.h"

namespace cuda_ext {

// One tensor: `count` contiguous elements that correspond to bucket elements [begin, begin + count). If data is null,
// these elements are neither read nor written, nor part of the statistics.
struct BucketEntry {
  void* data;
  int64_t begin;
  int64_t count;
  Dtype dtype;
};

// Statistics of the values as stored in the destination, after scale and cast: the sum of their squares, and whether
// any of them is infinite or NaN.
struct BucketStats {
  double squares = 0.0;
  bool nonfinite = false;
};

struct BucketParams {
  const BucketEntry* entries;  // (num_entries,), ascending in begin, disjoint
  int64_t num_entries;
  void* bucket;  // (count,)
  int64_t count;
  Dtype bucket_dtype;
  double scale;
  BucketStats* stats;  // (1,)
};

constexpr int64_t kBlockElements = 16384;

// bucket = cast(tensors * scale), gaps = 0. A tensor that already lies in the bucket at its own elements is scaled in
// place.
CUDA_EXT_CPU_LAUNCHER(launch_bucket_pack, BucketParams)
// tensors = cast(bucket * scale).
CUDA_EXT_CPU_LAUNCHER(launch_bucket_unpack, BucketParams)
// Statistics of the tensors alone; bucket, bucket_dtype and scale are not read.
CUDA_EXT_CPU_LAUNCHER(launch_bucket_stats, BucketParams)

struct BucketSumParams {
  void* const* sources;  // (num_sources,), each (count,)
  int64_t num_sources;   // at least 1
  void* const* targets;  // (num_targets,), each (count,); may be sources
  int64_t num_targets;   // at least 1
  int64_t count;
  Dtype dtype;
  BucketStats* stats;  // (1,)
};

// Every target = cast(sum of all sources). Sources are added in order, and the sum is rounded once.
CUDA_EXT_CPU_LAUNCHER(launch_bucket_sum, BucketSumParams)

}  // namespace cuda_ext
