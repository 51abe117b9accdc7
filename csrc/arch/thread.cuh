// Thread and block indices, barriers of the block, fences.
#pragma once

#include "arch/target.cuh"

namespace cuda_ext::arch {

constexpr int kWarpSize = 32;
constexpr uint32_t kFullWarp = 0xffffffff;

#if defined(__CUDACC__)

DEVICE int thread_index() { return threadIdx.x; }
DEVICE int block_size() { return blockDim.x; }
DEVICE int block_x() { return blockIdx.x; }
DEVICE int block_y() { return blockIdx.y; }
DEVICE int block_z() { return blockIdx.z; }
DEVICE int grid_x() { return gridDim.x; }
DEVICE int grid_y() { return gridDim.y; }
DEVICE int grid_z() { return gridDim.z; }

DEVICE void sync_threads(Site = {}) { __syncthreads(); }
DEVICE void sync_warp(uint32_t mask = kFullWarp, Site = {}) { __syncwarp(mask); }

// Barriers 1 to 15 of the block. `threads`, a multiple of 32, counts the threads that sync and those that only arrive.
DEVICE void named_barrier_sync(int barrier, int threads, Site = {}) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
DEVICE void named_barrier_arrive(int barrier, int threads, Site = {}) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Orders this thread's accesses before it and after it, for the whole device.
DEVICE void fence_device(Site = {}) { __threadfence(); }

// Values that the compiler cannot trace to their origin: it computes what depends on them where it is used, instead of
// keeping it in registers.
DEVICE int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
DEVICE int opaque_thread_index() {
  int index = int(threadIdx.x);
  asm volatile("" : "+r"(index));
  __builtin_assume(index >= 0 && index < 1024);  // so that divisions by powers of two are shifts
  return index;
}
DEVICE int opaque_block_x() {
  int index = int(blockIdx.x);
  asm volatile("" : "+r"(index));
  __builtin_assume(index >= 0);
  return index;
}

#else

DEVICE int thread_index() { return simt::thread_index(); }
DEVICE int block_size() { return simt::block_size(); }
DEVICE int block_x() { return simt::block_index(0); }
DEVICE int block_y() { return simt::block_index(1); }
DEVICE int block_z() { return simt::block_index(2); }
DEVICE int grid_x() { return simt::grid_size(0); }
DEVICE int grid_y() { return simt::grid_size(1); }
DEVICE int grid_z() { return simt::grid_size(2); }

DEVICE void sync_threads(Site site = {}) { simt::sync_threads(site); }
DEVICE void sync_warp(uint32_t mask = kFullWarp, Site site = {}) { simt::sync_warp(mask, site); }
DEVICE void named_barrier_sync(int barrier, int threads, Site site = {}) {
  simt::named_barrier(barrier, threads, true, site);
}
DEVICE void named_barrier_arrive(int barrier, int threads, Site site = {}) {
  simt::named_barrier(barrier, threads, false, site);
}
DEVICE void fence_device(Site site = {}) { simt::fence_device(site); }

DEVICE int opaque(int value) { return value; }
DEVICE int opaque_thread_index() { return thread_index(); }
DEVICE int opaque_block_x() { return block_x(); }

#endif

DEVICE int lane_index() { return thread_index() % kWarpSize; }

}  // namespace cuda_ext::arch
