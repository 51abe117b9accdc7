// Gradient buckets: many tensors of mixed dtype and one flat buffer, moved in one pass with scale, cast and statistics.
//
// The work is cut by position in the buffer, never by tensor: block b owns elements [b, b + 1) * kBlockElements, finds
// its first tensor by binary search and walks on from there. A thousand biases and one embedding therefore load threads
// (later: CTAs) equally, and since each block leaves one partial sum and these are added in block order, the statistics
// do not depend on how many threads ran.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "cpu/isa.h"

namespace cuda_ext {

// One tensor: `count` contiguous elements that correspond to bucket elements [begin, begin + count). Null data: those
// elements are neither read nor written, nor part of the statistics.
struct BucketEntry {
  void* data;
  int64_t begin;
  int64_t count;
  Dtype dtype;
};

// Statistics are of the values as the destination stores them, after scale and cast: the sum of their squares, and
// whether one of them is infinite or NaN.
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

// bucket = cast(tensors * scale), gaps = 0. An entry whose data is its place in the bucket is scaled where it is.
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

// Every target = cast(sum of all sources), each element added in the order of the sources and rounded once.
CUDA_EXT_CPU_LAUNCHER(launch_bucket_sum, BucketSumParams)

}  // namespace cuda_ext
