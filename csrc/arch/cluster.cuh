// Clusters: blocks that run concurrently and can access each other's shared memory (sm_90); and programmatic dependent
// launch.
//
// mapa returns shared addresses of other blocks, which only the functions of this file accept. A block must not exit
// while another may still access its shared memory, so a cluster barrier comes last.
#pragma once

#include "arch/barrier.cuh"

namespace cuda_ext::arch {

#if defined(__CUDACC__)

#if __CUDA_ARCH__ >= 900
#define CUDA_EXT_SM90(...) asm volatile(__VA_ARGS__)
#else
#define CUDA_EXT_SM90(...)
#endif

DEVICE int cluster_rank() {
  int rank = 0;
  CUDA_EXT_SM90("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
DEVICE int cluster_size() {
  int size = 1;
  CUDA_EXT_SM90("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// The barrier of all threads of the cluster, in two steps; lanes of a warp may arrive separately. A relaxed arrival
// publishes only mbarriers that were initialised and fenced before it.
DEVICE void cluster_arrive(Site = {}) { CUDA_EXT_SM90("barrier.cluster.arrive.release;" :: : "memory"); }
DEVICE void cluster_arrive_relaxed(Site = {}) { CUDA_EXT_SM90("barrier.cluster.arrive.relaxed;" :: : "memory"); }
DEVICE void cluster_wait(Site = {}) { CUDA_EXT_SM90("barrier.cluster.wait.acquire;" :: : "memory"); }

// The address in block `rank` of the cluster that corresponds to `address` in this block.
DEVICE SharedAddress mapa(SharedAddress address, int rank, Site = {}) {
  SharedAddress mapped = 0;
  CUDA_EXT_SM90("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
// Arrives at a barrier of any block of the cluster.
DEVICE void barrier_arrive_remote(SharedAddress barrier, Site = {}) {
  CUDA_EXT_SM90("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The same for a thread that has only read: its writes do not become visible to the other block. No fence is needed.
DEVICE void barrier_arrive_remote_relaxed(SharedAddress barrier, Site = {}) {
  CUDA_EXT_SM90("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Like barrier_wait, with cluster scope: what threads of other blocks did before they arrived is visible after it.
DEVICE void barrier_wait_cluster(Barrier& barrier, uint32_t parity, Site = {}) {
#if __CUDA_ARCH__ >= 900
  const SharedAddress address = shared_address(&barrier);
  uint32_t done;
  do {
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, "
        "0, "
        "p;\n}"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
  } while (done == 0);
#endif
}

// The same for a thread that only overwrites what the others have read: nothing they wrote becomes visible, so L1 is
// not invalidated.
DEVICE void barrier_wait_relaxed(Barrier& barrier, uint32_t parity, Site = {}) {
#if __CUDA_ARCH__ >= 900
  const SharedAddress address = shared_address(&barrier);
  uint32_t done;
  do {
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, "
        "0, "
        "p;\n}"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
  } while (done == 0);
#endif
}

// 4 to 16 bytes of any block of the cluster.
template <class Vector>
DEVICE Vector load_shared_cluster(SharedAddress address, Site = {}) {
  static_assert(sizeof(Vector) == 4 || sizeof(Vector) == 8 || sizeof(Vector) == 16);
  Vector v{};
  uint32_t* w = reinterpret_cast<uint32_t*>(&v);
  if constexpr (sizeof(Vector) == 16)
    CUDA_EXT_SM90("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]),
                  "=r"(w[3]) : "r"(address) : "memory");
  else if constexpr (sizeof(Vector) == 8)
    CUDA_EXT_SM90("ld.shared::cluster.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(address) : "memory");
  else
    CUDA_EXT_SM90("ld.shared::cluster.u32 %0, [%1];" : "=r"(w[0]) : "r"(address) : "memory");
  return v;
}
template <class Vector>
DEVICE void store_shared_cluster(SharedAddress address, const Vector& v, Site = {}) {
  static_assert(sizeof(Vector) == 4 || sizeof(Vector) == 8 || sizeof(Vector) == 16);
  [[maybe_unused]] const uint32_t* w = reinterpret_cast<const uint32_t*>(&v);
  if constexpr (sizeof(Vector) == 16)
    CUDA_EXT_SM90("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(w[0]), "r"(w[1]), "r"(w[2]),
                  "r"(w[3]) : "memory");
  else if constexpr (sizeof(Vector) == 8)
    CUDA_EXT_SM90("st.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(w[0]), "r"(w[1]) : "memory");
  else
    CUDA_EXT_SM90("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(w[0]) : "memory");
}

// For programmatic launches: waits until the previous kernel of the stream has completed and its writes are visible;
// and allows the next kernel to start.
DEVICE void grid_dependency_wait(Site = {}) { CUDA_EXT_SM90("griddepcontrol.wait;" :: : "memory"); }
DEVICE void grid_launch_dependents(Site = {}) { CUDA_EXT_SM90("griddepcontrol.launch_dependents;" :: : "memory"); }

#undef CUDA_EXT_SM90

#else

DEVICE int cluster_rank() { return simt::cluster_rank(); }
DEVICE int cluster_size() { return simt::cluster_size(); }
DEVICE void cluster_arrive(Site site = {}) { simt::cluster_arrive(false, site); }
DEVICE void cluster_arrive_relaxed(Site site = {}) { simt::cluster_arrive(true, site); }
DEVICE void cluster_wait(Site site = {}) { simt::cluster_wait(site); }
DEVICE SharedAddress mapa(SharedAddress address, int rank, Site site = {}) { return simt::mapa(address, rank, site); }
DEVICE void barrier_arrive_remote(SharedAddress barrier, Site site = {}) { simt::barrier_arrive_remote(barrier, site); }
DEVICE void barrier_arrive_remote_relaxed(SharedAddress barrier, Site site = {}) {
  simt::barrier_arrive_remote(barrier, site);
}
DEVICE void barrier_wait_cluster(Barrier& barrier, uint32_t parity, Site site = {}) {
  simt::barrier_wait(&barrier.word, parity, true, site);
}
DEVICE void barrier_wait_relaxed(Barrier& barrier, uint32_t parity, Site site = {}) {
  simt::barrier_wait(&barrier.word, parity, true, site);
}
template <class Vector>
DEVICE Vector load_shared_cluster(SharedAddress address, Site site = {}) {
  static_assert(sizeof(Vector) == 4 || sizeof(Vector) == 8 || sizeof(Vector) == 16);
  Vector v;
  simt::load_shared_cluster(&v, address, sizeof v, site);
  return v;
}
template <class Vector>
DEVICE void store_shared_cluster(SharedAddress address, const Vector& v, Site site = {}) {
  static_assert(sizeof(Vector) == 4 || sizeof(Vector) == 8 || sizeof(Vector) == 16);
  simt::store_shared_cluster(address, &v, sizeof v, site);
}
DEVICE void grid_dependency_wait(Site site = {}) { simt::grid_dependency_wait(site); }
DEVICE void grid_launch_dependents(Site site = {}) { simt::grid_launch_dependents(site); }

#endif

}  // namespace cuda_ext::arch
