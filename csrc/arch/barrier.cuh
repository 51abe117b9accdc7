// mbarrier: a barrier in shared memory that also counts the bytes of asynchronous copies (sm_90).
//
// A phase completes when all expected arrivals and all announced bytes have arrived; then the parity flips. A wait for
// parity p returns once the phase of that parity has completed. The first phase has parity 0, so a wait for parity 1 on
// a new barrier returns immediately.
#pragma once

#include "arch/memory.cuh"

namespace cuda_ext::arch {

struct alignas(8) Barrier {
  uint64_t word;
};

#if defined(__CUDACC__)

DEVICE void barrier_init(Barrier& barrier, int arrivals, Site = {}) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}
// After this the memory can be reused.
DEVICE void barrier_invalidate(Barrier& barrier, Site = {}) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
// Makes initialised barriers visible to asynchronous copies and to the cluster; called by the thread that initialised
// them.
DEVICE void fence_barrier_init(Site = {}) {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
DEVICE void barrier_arrive(Barrier& barrier, Site = {}) {
  asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(shared_address(&barrier))
               : "memory");
}
// Arrives, and announces `bytes` that copies will complete in this phase.
DEVICE void barrier_arrive_expect(Barrier& barrier, uint32_t bytes, Site = {}) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
#endif
}
// Announces bytes without arriving.
DEVICE void barrier_expect(Barrier& barrier, uint32_t bytes, Site = {}) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
#endif
}
DEVICE void barrier_wait(Barrier& barrier, uint32_t parity, Site = {}) {
#if __CUDA_ARCH__ >= 900
  const SharedAddress address = shared_address(&barrier);
  uint32_t done;
  do {
    asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(address), "r"(parity)
                 : "memory");
  } while (done == 0);
#endif
}
// Orders this thread's plain accesses to shared memory before later asynchronous ones (TMA stores, wgmma).
DEVICE void fence_async_shared(Site = {}) {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#else

DEVICE void barrier_init(Barrier& barrier, int arrivals, Site site = {}) {
  simt::barrier_init(&barrier.word, arrivals, site);
}
DEVICE void barrier_invalidate(Barrier& barrier, Site site = {}) { simt::barrier_invalidate(&barrier.word, site); }
DEVICE void fence_barrier_init(Site site = {}) { simt::fence_barrier_init(site); }
DEVICE void barrier_arrive(Barrier& barrier, Site site = {}) { simt::barrier_arrive(&barrier.word, site); }
DEVICE void barrier_arrive_expect(Barrier& barrier, uint32_t bytes, Site site = {}) {
  simt::barrier_arrive_expect(&barrier.word, bytes, site);
}
DEVICE void barrier_expect(Barrier& barrier, uint32_t bytes, Site site = {}) {
  simt::barrier_expect(&barrier.word, bytes, site);
}
DEVICE void barrier_wait(Barrier& barrier, uint32_t parity, Site site = {}) {
  simt::barrier_wait(&barrier.word, parity, false, site);
}
DEVICE void fence_async_shared(Site site = {}) { simt::fence_async_shared(site); }

#endif

}  // namespace cuda_ext::arch
