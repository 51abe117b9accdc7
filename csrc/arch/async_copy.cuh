// cp.async: asynchronous copies from global to shared memory, which each thread issues, groups and waits for (sm_80).
#pragma once

#include "arch/memory.cuh"

namespace cuda_ext::arch {

// Writes `bytes` (4, 8 or 16): the first `valid` come from global memory, the others are zeros. Both addresses must be
// aligned to `bytes`. With valid = 0 nothing is read, and `global` may be any address.
#if defined(__CUDACC__)

template <int bytes>
DEVICE void cp_async(SharedAddress shared, const void* global, int valid = bytes, Site = {}) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16);
  if constexpr (bytes == 16)  // .cg bypasses L1: the data is not reused from there
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(bytes), "r"(valid)
                 : "memory");
}
DEVICE void cp_async_commit(Site = {}) { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` of this thread's groups are in flight. To see other threads' copies, add a barrier.
template <int pending>
DEVICE void cp_async_wait(Site = {}) {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

#else

template <int bytes>
DEVICE void cp_async(SharedAddress shared, const void* global, int valid = bytes, Site site = {}) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16);
  simt::cp_async(shared, global, bytes, valid, site);
}
DEVICE void cp_async_commit(Site site = {}) { simt::cp_async_commit(site); }
template <int pending>
DEVICE void cp_async_wait(Site site = {}) {
  simt::cp_async_wait(pending, site);
}

#endif

}  // namespace cuda_ext::arch
