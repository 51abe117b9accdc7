#include "gemm/split_k.h"

#include "arch/memory.cuh"
#include "rt/launch.cuh"

namespace cuda_ext {

// Resets the counters.
template <int threads>
GLOBAL(threads, 1)
clear_arrivals(uint32_t* arrivals, int count) {
  const int i = arch::block_x() * threads + arch::thread_index();
  if (i < count) arch::store_global(arrivals + i, 0u);
}

void launch_clear_arrivals(uint32_t* arrivals, int count, void* stream) {
  constexpr int kThreads = 256;
  rt::launch<clear_arrivals<kThreads>>(
      "clear_arrivals", {.grid = {(count + kThreads - 1) / kThreads}, .threads = kThreads, .stream = stream}, arrivals,
      count);
}

}  // namespace cuda_ext
