// The all-reduce in symmetric memory for test_symmetric_kernels.py: one launch has all ranks, each a group of blocks.
#include "bucket/symmetric_kernels.cuh"

#include <cstdio>
#include <exception>

#include "rt/launch.cuh"

namespace cuda_ext::symmetric {

// Like the kernels, but a block's index determines its rank; stats (num_ranks, 2). With values (rounds, num_ranks,
// count) and one block per rank, each rank packs values[i, rank], sums, and stores the sum there, one round after the
// other, like consecutive kernels in a stream.
template <class T>
GLOBAL(Config::kThreads, Config::kMinBlocks)
all_ranks_kernel(GRID_CONSTANT KernelParams params, int is_one_shot, int rounds, T* values) {
  SHARED_STORAGE(SharedStorage, shared);
  const int blocks = arch::grid_x() / params.num_ranks;
  const int rank = arch::block_x() / blocks;
  const int block = arch::block_x() % blocks;
  for (int round = 0; round < rounds; ++round) {
    T* const bucket = bucket_of<T>(params, rank);
    T* const row = values + (round * params.num_ranks + rank) * params.count;
    const int64_t packed = values == nullptr ? 0 : params.count;
    arch::sync_threads();
    for (int64_t i = arch::thread_index(); i < packed; i += Config::kThreads) arch::store_global(bucket + i, row[i]);
    arch::sync_threads();
    if (is_one_shot)
      one_shot<T>(params, rank, block, blocks, params.stats + 2 * rank, shared);
    else
      two_shot<T>(params, rank, block, blocks, params.stats + 2 * rank, shared);
    arch::sync_threads();
    for (int64_t i = arch::thread_index(); i < packed; i += Config::kThreads) row[i] = bucket[i];
  }
}

template <class T>
void launch_all_ranks(const SymmetricParams& params, int blocks, int rounds, void* values, float* stats) {
  rt::launch<all_ranks_kernel<T>>("symmetric_all_reduce",
                                  {.grid = {blocks * params.num_ranks},
                                   .threads = Config::kThreads,
                                   .shared_bytes = sizeof(SharedStorage),
                                   .waits = rt::Waits::kForAny},
                                  kernel_params(params, stats), int(is_one_shot(params)), rounds,
                                  static_cast<T*>(values));
}

}  // namespace cuda_ext::symmetric

using namespace cuda_ext;

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT int symmetric_num_blocks(int64_t count, int num_ranks, int dtype, int64_t row_bytes) {
  return symmetric::num_blocks(
      {.num_ranks = num_ranks, .count = count, .dtype = Dtype(dtype), .staging = {.row_bytes = row_bytes}});
}

// If `rank` is -1, runs all ranks, with `blocks`, `rounds` and `values` as above; otherwise the kernel itself as that
// rank. Staging of the slot begins at `staging`, in rows of `row_bytes`. Returns 0, or 1 with a message in `error`.
EXPORT int symmetric_run(void** segments, int num_ranks, int rank, int slot, int64_t begin, int64_t count, int dtype,
                         int64_t staging, int64_t row_bytes, int blocks, int rounds, void* values, float* stats,
                         char* error, size_t error_size) {
  try {
    SymmetricParams params{{}, num_ranks, rank, slot, begin, count, Dtype(dtype), {staging, row_bytes}, 1.0};
    for (int i = 0; i < num_ranks; ++i) params.segments[i] = segments[i];
    if (rank >= 0)
      launch_symmetric_all_reduce_cuda(params, stats, nullptr);
    else if (params.dtype == Dtype::kFloat32)
      symmetric::launch_all_ranks<float>(params, blocks, rounds, values, stats);
    else if (params.dtype == Dtype::kFloat16)
      symmetric::launch_all_ranks<half_t>(params, blocks, rounds, values, stats);
    else
      symmetric::launch_all_ranks<bfloat16_t>(params, blocks, rounds, values, stats);
    return 0;
  } catch (const std::exception& e) {
    std::snprintf(error, error_size, "%s", e.what());
    return 1;
  }
}
}
