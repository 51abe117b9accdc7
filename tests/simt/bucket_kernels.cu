// C interface of the bucket launchers for test_bucket_kernels.py.
#include <cstdio>
#include <exception>

#include "bucket/bucket_cuda.h"

using namespace cuda_ext;

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// op: 0 packs, 1 unpacks, 2 computes statistics, 3 packs without stats. allocate(bytes) returns memory. Returns 0, or 1
// with a message in `error`.
EXPORT int bucket_run(int op, const BucketEntry* entries, int64_t num_entries, void* bucket, int64_t count, int dtype,
                      double scale, float* stats, void* (*allocate)(size_t), char* error, size_t error_size) {
  constexpr decltype(&launch_bucket_pack_cuda) kLaunchers[] = {launch_bucket_pack_cuda, launch_bucket_unpack_cuda,
                                                               launch_bucket_stats_cuda, launch_bucket_pack_cuda};
  try {
    kLaunchers[op](
        {entries, num_entries, bucket, count, Dtype(dtype), scale, nullptr}, stats,
        [&](size_t bytes) { return Workspace{allocate(bytes), bytes}; }, nullptr);
    return 0;
  } catch (const std::exception& e) {
    std::snprintf(error, error_size, "%s", e.what());
    return 1;
  }
}
}
