#include "bucket/bucket_kernels.cuh"

#include <stdexcept>

#include "bucket/bucket_cuda.h"
#include "rt/launch.cuh"

namespace cuda_ext {

namespace {

using bucket::TableChunk;
using bucket::TableEntry;

// At least one block, which writes the statistics.
int64_t num_blocks(int64_t count) { return count > 0 ? (count + kBlockElements - 1) / kBlockElements : 1; }

struct Arrays {
  uint32_t* counter = nullptr;
  TableEntry* table = nullptr;  // (num_entries,)
  float* stats = nullptr;       // (2,), used if the caller wants none
  double* partial = nullptr;    // (blocks,)
};

TableEntry device_entry(const std::string& name, const BucketEntry& entry) {
  if (entry.dtype == Dtype::kFloat64)
    throw std::invalid_argument(name + ": no CUDA kernel for a tensor of float64; convert it with .float()");
  return {entry.data, entry.begin, entry.begin + entry.count, entry.dtype};
}

template <int capacity>
void write_chunk(const std::string& name, const BucketEntry* entries, int count, const Arrays& arrays,
                 TableEntry* target, void* stream) {
  TableChunk<capacity> chunk{target, arrays.counter, count, {}};
  for (int i = 0; i < count; ++i) chunk.entries[i] = device_entry(name, entries[i]);
  const int blocks = count > 0 ? (count + arch::kWarpSize - 1) / arch::kWarpSize : 1;
  rt::launch<bucket::bucket_table_kernel<capacity>>(
      (name + "_table").c_str(), {.grid = {blocks}, .threads = arch::kWarpSize, .stream = stream}, chunk);
}

// Launches at least once, to clear the counter.
void write_table(const char* name, const BucketParams& params, const Arrays& arrays, void* stream) {
  int64_t first = 0;
  do {
    const BucketEntry* const entries = params.entries + first;
    const int64_t left = params.num_entries - first;
    const int count = left < bucket::kLargeChunk ? int(left) : bucket::kLargeChunk;
    if (count <= bucket::kSmallChunk)
      write_chunk<bucket::kSmallChunk>(name, entries, count, arrays, arrays.table + first, stream);
    else
      write_chunk<bucket::kLargeChunk>(name, entries, count, arrays, arrays.table + first, stream);
    first += count;
  } while (first < params.num_entries);
}

template <class Bucket>
void launch_pack(const char* name, const BucketParams& params, void* stream) {
  bucket::PackParams kernel_params{params.bucket, params.count, float(params.scale), int(params.num_entries), {}};
  for (int64_t i = 0; i < params.num_entries; ++i) kernel_params.entries[i] = device_entry(name, params.entries[i]);
  rt::launch<bucket::bucket_pack_kernel<Bucket>>(name,
                                                 {.grid = {int(num_blocks(params.count))},
                                                  .threads = BucketConfig::kThreads,
                                                  .shared_bytes = sizeof(bucket::SharedEntries),
                                                  .stream = stream},
                                                 kernel_params);
}

template <BucketOp op, class Bucket>
void launch(const char* name, const BucketParams& params, float* stats, const AllocateWorkspace& allocate,
            void* stream) {
  if constexpr (op == BucketOp::kPack) {
    // The entries then fit in the parameters of the kernel.
    if (stats == nullptr && params.num_entries <= bucket::kSmallChunk) return launch_pack<Bucket>(name, params, stream);
  }
  Arrays arrays;
  provide_workspace(name, allocate, [&](void* data) {
    WorkspaceCursor cursor(data);
    cursor.allocate(arrays.counter, 1);
    cursor.allocate(arrays.table, params.num_entries);
    cursor.allocate(arrays.stats, 2);
    cursor.allocate(arrays.partial, num_blocks(params.count));
    return cursor;
  });
  write_table(name, params, arrays, stream);
  const bucket::Params kernel_params{
      .move = {{arrays.table}, params.num_entries, params.bucket, params.count, float(params.scale)},
      .stats = stats == nullptr ? arrays.stats : stats,
      .counter = arrays.counter,
      .partial = arrays.partial,
  };
  rt::launch<bucket::bucket_kernel<op, Bucket>>(name,
                                                {.grid = {int(num_blocks(params.count))},
                                                 .threads = BucketConfig::kThreads,
                                                 .shared_bytes = sizeof(bucket::SharedStorage),
                                                 .stream = stream},
                                                kernel_params);
}

template <BucketOp op>
void launch_for_dtype(const char* name, const BucketParams& params, float* stats, const AllocateWorkspace& allocate,
                      void* stream) {
  switch (params.bucket_dtype) {
    case Dtype::kFloat32: return launch<op, float>(name, params, stats, allocate, stream);
    case Dtype::kFloat16: return launch<op, half_t>(name, params, stats, allocate, stream);
    case Dtype::kBFloat16: return launch<op, bfloat16_t>(name, params, stats, allocate, stream);
    default:
      throw std::invalid_argument(std::string(name) +
                                  ": no CUDA kernel for a bucket of float64; use one of float32, float16 or bfloat16");
  }
}

}  // namespace

void launch_bucket_pack_cuda(const BucketParams& params, float* stats, const AllocateWorkspace& allocate,
                             void* stream) {
  launch_for_dtype<BucketOp::kPack>("bucket_pack", params, stats, allocate, stream);
}
void launch_bucket_unpack_cuda(const BucketParams& params, float* stats, const AllocateWorkspace& allocate,
                               void* stream) {
  launch_for_dtype<BucketOp::kUnpack>("bucket_unpack", params, stats, allocate, stream);
}
void launch_bucket_stats_cuda(const BucketParams& params, float* stats, const AllocateWorkspace& allocate,
                              void* stream) {
  launch<BucketOp::kStats, float>("bucket_stats", params, stats, allocate, stream);  // any type: there is no bucket
}

}  // namespace cuda_ext
