// cp.async: asynchronous copies from global to shared memory, which each thread issues, groups and waits for (sm_80).
// Before sm_80 the same calls copy through registers, at once: groups and waits do nothing.
#pragma once

#include "arch/memory.cuh"

namespace cuda_ext::arch {

#if defined(__CUDACC__)

#if __CUDA_ARCH__ >= 800
#define CUDA_EXT_CP_ASYNC(...) asm volatile(__VA_ARGS__)
DEVICE constexpr bool has_cp_async() { return true; }
#else
#define CUDA_EXT_CP_ASYNC(...)
DEVICE constexpr bool has_cp_async() { return false; }
#endif

template <int bytes>
DEVICE void issue_cp_async(SharedAddress shared, const void* global, int valid, Site = {}) {
  if constexpr (bytes == 16)  // .cg bypasses L1: the data is not reused from there
    CUDA_EXT_CP_ASYNC("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
                      "r"(valid) : "memory");
  else
    CUDA_EXT_CP_ASYNC("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(bytes),
                      "r"(valid) : "memory");
}
DEVICE void cp_async_commit(Site = {}) { CUDA_EXT_CP_ASYNC("cp.async.commit_group;" :: : "memory"); }
// Waits until at most `pending` of this thread's groups are in flight. To see other threads' copies, add a barrier.
template <int pending>
DEVICE void cp_async_wait(Site = {}) {
  CUDA_EXT_CP_ASYNC("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
#undef CUDA_EXT_CP_ASYNC

#else

DEVICE bool has_cp_async() { return simt::compute_capability() >= 80; }
template <int bytes>
DEVICE void issue_cp_async(SharedAddress shared, const void* global, int valid, Site site = {}) {
  simt::cp_async(shared, global, bytes, valid, site);
}
DEVICE void cp_async_commit(Site site = {}) {
  if (has_cp_async()) simt::cp_async_commit(site);
}
template <int pending>
DEVICE void cp_async_wait(Site site = {}) {
  if (has_cp_async()) simt::cp_async_wait(pending, site);
}

#endif

// The same copy by a load and a store; the words of a chunk that is not whole one after the other.
template <int bytes>
DEVICE void copy_through_registers(SharedAddress shared, const void* global, int valid, Site site = {}) {
  if (valid == bytes) {
    store_shared(shared, load_global<Words<bytes / 4>>(global, site), site);
    return;
  }
  const char* const from = static_cast<const char*>(global);
#pragma unroll 1
  for (int i = 0; i < bytes; i += 4) {
    uint32_t word = 0;
#pragma unroll
    for (int byte = 0; byte < 4; ++byte)
      if (i + byte < valid) word |= uint32_t(load_global<uint8_t>(from + i + byte, site)) << 8 * byte;
    store_shared(shared + i, word, site);
  }
}

// Writes `bytes` (4, 8 or 16): the first `valid` come from global memory, the others are zeros. Both addresses must be
// aligned to `bytes`. With valid = 0 nothing is read, and `global` may be any address.
template <int bytes>
DEVICE void cp_async(SharedAddress shared, const void* global, int valid = bytes, Site site = {}) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16);
  if (has_cp_async())
    issue_cp_async<bytes>(shared, global, valid, site);
  else
    copy_through_registers<bytes>(shared, global, valid, site);
}

}  // namespace cuda_ext::arch
