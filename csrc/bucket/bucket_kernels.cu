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

struct Workspace {
  static constexpr size_t kTableOffset = 16;  // the counter, padded
  uint32_t* counter;
  TableEntry* table;  // (num_entries,)
  float* stats;       // (2,), used if the caller wants none
  double* partial;    // (blocks,)

  Workspace(void* memory, int64_t num_entries)
      : counter(static_cast<uint32_t*>(memory)),
        table(reinterpret_cast<TableEntry*>(static_cast<char*>(memory) + kTableOffset)),
        stats(reinterpret_cast<float*>(table + num_entries)),
        partial(reinterpret_cast<double*>(stats + 2)) {}
};

TableEntry device_entry(const std::string& name, const BucketEntry& entry) {
  if (entry.dtype == Dtype::kFloat64)
    throw std::invalid_argument(name + ": no CUDA kernel for a tensor of float64; convert it with .float()");
  return {entry.data, entry.begin, entry.begin + entry.count, entry.dtype};
}

template <int capacity>
void write_chunk(const std::string& name, const BucketEntry* entries, int count, const Workspace& workspace,
                 TableEntry* target, void* stream) {
  TableChunk<capacity> chunk{target, workspace.counter, count, {}};
  for (int i = 0; i < count; ++i) chunk.entries[i] = device_entry(name, entries[i]);
  const int blocks = count > 0 ? (count + arch::kWarpSize - 1) / arch::kWarpSize : 1;
  rt::launch<bucket::bucket_table_kernel<capacity>>(
      (name + "_table").c_str(), {.grid = {blocks}, .threads = arch::kWarpSize, .stream = stream}, chunk);
}

// Launches at least once, to clear the counter.
void write_table(const char* name, const BucketParams& params, const Workspace& workspace, void* stream) {
  int64_t first = 0;
  do {
    const BucketEntry* const entries = params.entries + first;
    const int64_t left = params.num_entries - first;
    const int count = left < bucket::kLargeChunk ? int(left) : bucket::kLargeChunk;
    if (count <= bucket::kSmallChunk)
      write_chunk<bucket::kSmallChunk>(name, entries, count, workspace, workspace.table + first, stream);
    else
      write_chunk<bucket::kLargeChunk>(name, entries, count, workspace, workspace.table + first, stream);
    first += count;
  } while (first < params.num_entries);
}

// Whether the entries of a pack fit in the parameters of its kernel, which then needs no workspace.
bool is_one_launch(int64_t num_entries, bool stats) { return !stats && num_entries <= bucket::kSmallChunk; }

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
void launch(const char* name, const BucketParams& params, float* stats, void* memory, void* stream) {
  if constexpr (op == BucketOp::kPack) {
    if (is_one_launch(params.num_entries, stats != nullptr)) return launch_pack<Bucket>(name, params, stream);
  }
  const Workspace workspace(memory, params.num_entries);
  write_table(name, params, workspace, stream);
  const bucket::Params kernel_params{
      .move = {{workspace.table}, params.num_entries, params.bucket, params.count, float(params.scale)},
      .stats = stats == nullptr ? workspace.stats : stats,
      .counter = workspace.counter,
      .partial = workspace.partial,
  };
  rt::launch<bucket::bucket_kernel<op, Bucket>>(name,
                                                {.grid = {int(num_blocks(params.count))},
                                                 .threads = BucketConfig::kThreads,
                                                 .shared_bytes = sizeof(bucket::SharedStorage),
                                                 .stream = stream},
                                                kernel_params);
}

template <BucketOp op>
void launch_for_dtype(const char* name, const BucketParams& params, float* stats, void* workspace, void* stream) {
  switch (params.bucket_dtype) {
    case Dtype::kFloat32: return launch<op, float>(name, params, stats, workspace, stream);
    case Dtype::kFloat16: return launch<op, half_t>(name, params, stats, workspace, stream);
    case Dtype::kBFloat16: return launch<op, bfloat16_t>(name, params, stats, workspace, stream);
    default:
      throw std::invalid_argument(std::string(name) +
                                  ": no CUDA kernel for a bucket of float64; use one of float32, float16 or bfloat16");
  }
}

}  // namespace

size_t bucket_cuda_workspace(int64_t count, int64_t num_entries, bool stats) {
  if (is_one_launch(num_entries, stats)) return 0;
  return Workspace::kTableOffset + size_t(num_entries) * sizeof(TableEntry) + 2 * sizeof(float) +
         size_t(num_blocks(count)) * sizeof(double);
}

void launch_bucket_pack_cuda(const BucketParams& params, float* stats, void* workspace, void* stream) {
  launch_for_dtype<BucketOp::kPack>("bucket_pack", params, stats, workspace, stream);
}
void launch_bucket_unpack_cuda(const BucketParams& params, float* stats, void* workspace, void* stream) {
  launch_for_dtype<BucketOp::kUnpack>("bucket_unpack", params, stats, workspace, stream);
}
void launch_bucket_stats_cuda(const BucketParams& params, float* stats, void* workspace, void* stream) {
  launch<BucketOp::kStats, float>("bucket_stats", params, stats, workspace, stream);  // any type: there is no bucket
}

}  // namespace cuda_ext
