#include "bucket/bucket_kernels.cuh"

#include <stdexcept>

#include "bucket/bucket_cuda.h"
#include "rt/launch.cuh"

namespace cuda_ext {

namespace {

constexpr size_t kPartialOffset = 16;  // the counter, padded

// A bucket of no elements has a block too: it writes the statistics.
int64_t num_blocks(int64_t count) { return count > 0 ? (count + kBlockElements - 1) / kBlockElements : 1; }

template <BucketOp op, class Bucket>
void launch(const char* name, const BucketParams& params, void* workspace, void* stream) {
  char* const bytes = static_cast<char*>(workspace);
  const BucketWorkspace memory{reinterpret_cast<uint32_t*>(bytes), reinterpret_cast<double*>(bytes + kPartialOffset)};
  rt::launch<bucket_kernel<op, Bucket>>(name,
                                        {.grid = {int(num_blocks(params.count))},
                                         .threads = BucketConfig::kThreads,
                                         .shared_bytes = sizeof(bucket::SharedStorage),
                                         .stream = stream},
                                        params, memory);
}

template <BucketOp op>
void launch_for_dtype(const char* name, const BucketParams& params, void* workspace, void* stream) {
  switch (params.bucket_dtype) {
    case Dtype::kFloat32: return launch<op, float>(name, params, workspace, stream);
    case Dtype::kFloat16: return launch<op, half_t>(name, params, workspace, stream);
    case Dtype::kBFloat16: return launch<op, bfloat16_t>(name, params, workspace, stream);
    default: throw std::invalid_argument(std::string(name) + ": no CUDA kernel for a bucket of float64");
  }
}

}  // namespace

size_t bucket_cuda_workspace(int64_t count) { return kPartialOffset + size_t(num_blocks(count)) * sizeof(double); }

void launch_bucket_pack_cuda(const BucketParams& params, void* workspace, void* stream) {
  launch_for_dtype<BucketOp::kPack>("bucket_pack", params, workspace, stream);
}
void launch_bucket_unpack_cuda(const BucketParams& params, void* workspace, void* stream) {
  launch_for_dtype<BucketOp::kUnpack>("bucket_unpack", params, workspace, stream);
}
void launch_bucket_stats_cuda(const BucketParams& params, void* workspace, void* stream) {
  launch<BucketOp::kStats, float>("bucket_stats", params, workspace, stream);  // no bucket, so one type will do
}

}  // namespace cuda_ext
