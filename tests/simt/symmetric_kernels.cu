// The all-reduce in symmetric memory with all ranks in one launch, for test_symmetric_kernels.py: each has a group of blocks.
#include "bucket/symmetric_kernels.cuh"

#include <cstdio>
#include <exception>

#include "rt/launch.cuh"

namespace cuda_ext::symmetric {

// As all_reduce_kernel, where the index of a block tells its rank; stats (num_ranks, 2). With values (num_ranks, count),
// and one block a rank, that packs them first, as an earlier kernel of its stream would.
template <class T>
GLOBAL(Config::kThreads, Config::kMinBlocks)
all_ranks_kernel(GRID_CONSTANT KernelParams params, const T* values) {
  SHARED_STORAGE(SharedStorage, shared);
  const int blocks = arch::grid_x() / params.num_ranks;
  const int rank = arch::block_x() / blocks;
  if (values != nullptr)
    for (int64_t i = arch::thread_index(); i < params.count; i += Config::kThreads)
      arch::store_global(bucket_of<T>(params, rank) + i, values[rank * params.count + i]);
  all_reduce<T>(params, rank, arch::block_x() % blocks, blocks, params.stats + 2 * rank, shared);
}

template <class T>
void launch_all_ranks(const KernelParams& params, int blocks, const void* values) {
  rt::launch<all_ranks_kernel<T>>("symmetric_all_reduce",
                                  {.grid = {blocks * params.num_ranks},
                                   .threads = Config::kThreads,
                                   .shared_bytes = sizeof(SharedStorage),
                                   .waits = rt::Waits::kForAny},
                                  params, static_cast<const T*>(values));
}

}  // namespace cuda_ext::symmetric

using namespace cuda_ext;

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT int symmetric_num_blocks(int64_t count, int num_ranks, int dtype) {
  return symmetric::num_blocks(symmetric::chunk_elements(count, num_ranks, size_of(Dtype(dtype))), Dtype(dtype));
}

// All ranks at once if `rank` is -1, with `blocks` each and `values` as above; else the kernel itself, as that rank. Returns 0, or 1 with what
// went wrong in `error`.
EXPORT int symmetric_run(void** segments, int num_ranks, int rank, int slot, int64_t begin, int64_t count, int dtype,
                         int blocks, const void* values, float* stats, char* error, size_t error_size) {
  try {
    SymmetricParams params{{}, num_ranks, rank, slot, begin, count, Dtype(dtype), 1.0};
    for (int i = 0; i < num_ranks; ++i) params.segments[i] = segments[i];
    const symmetric::KernelParams kernel_params = symmetric::kernel_params(params, stats);
    if (rank >= 0)
      launch_symmetric_all_reduce_cuda(params, stats, nullptr);
    else if (params.dtype == Dtype::kFloat32)
      symmetric::launch_all_ranks<float>(kernel_params, blocks, values);
    else if (params.dtype == Dtype::kFloat16)
      symmetric::launch_all_ranks<half_t>(kernel_params, blocks, values);
    else
      symmetric::launch_all_ranks<bfloat16_t>(kernel_params, blocks, values);
    return 0;
  } catch (const std::exception& e) {
    std::snprintf(error, error_size, "%s", e.what());
    return 1;
  }
}
}
