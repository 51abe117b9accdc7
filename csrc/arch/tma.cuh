// The tensor memory accelerator (TMA): one thread starts the copy of a whole tile (sm_90).
//
// A tensor map describes a tensor of 1 to 5 dimensions in global memory and the box that one copy moves. Coordinates
// are in elements, innermost first, and the first is a multiple of 16 bytes. Elements outside the tensor are read as
// zeros and never written.
//
// tma_load fills shared memory at `to`, which is aligned to 128 bytes (1024 for the 128-byte swizzle), and completes
// the box's bytes at `barrier`; tma_load_multicast does this at the same addresses in every block of the cluster whose
// rank is a set bit of `blocks`. tma_store writes from shared memory, or adds in the tensor's type. A thread commits
// its stores to groups and waits for these.
#pragma once

#include "arch/barrier.cuh"

namespace cuda_ext::arch {

// A CUtensorMap, without including its header. rt::make_tensor_map creates it on the host; kernels take it by value as
// a GRID_CONSTANT.
struct alignas(128) TensorMap {
  uint64_t opaque[16];
};

#if defined(__CUDACC__)

#if __CUDA_ARCH__ >= 900
#define CUDA_EXT_TMA(...) asm volatile(__VA_ARGS__)
#else
#define CUDA_EXT_TMA(...)
#endif

DEVICE void tma_prefetch(const TensorMap& map, Site = {}) {
  CUDA_EXT_TMA("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Defines the functions for one rank. The strings are asm operands: the coordinates after three other operands (at3),
// then the multicast mask, and the coordinates after two other operands (at2).
#define CUDA_EXT_TMA_RANK(rank, at3, mask, at2, ...)                                                                 \
  DEVICE void tma_load(SharedAddress to, const TensorMap& map, Barrier& barrier, const int (&at)[rank], Site = {}) { \
    CUDA_EXT_TMA("cp.async.bulk.tensor." #rank                                                                       \
                 "d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, " at3 "], [%2];" ::"r"(to),  \
                 "l"(&map), "r"(shared_address(&barrier)), __VA_ARGS__ : "memory");                                  \
  }                                                                                                                  \
  DEVICE void tma_load_multicast(SharedAddress to, const TensorMap& map, Barrier& barrier, const int (&at)[rank],    \
                                 uint16_t blocks, Site = {}) {                                                       \
    CUDA_EXT_TMA("cp.async.bulk.tensor." #rank                                                                       \
                 "d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, " at3     \
                 "], [%2], " mask ";" ::"r"(to),                                                                     \
                 "l"(&map), "r"(shared_address(&barrier)), __VA_ARGS__, "h"(blocks) : "memory");                     \
  }                                                                                                                  \
  template <bool add = false>                                                                                        \
  DEVICE void tma_store(const TensorMap& map, SharedAddress from, const int (&at)[rank], Site = {}) {                \
    if constexpr (add)                                                                                               \
      CUDA_EXT_TMA("cp.reduce.async.bulk.tensor." #rank "d.global.shared::cta.add.tile.bulk_group [%0, " at2         \
                   "], [%1];" ::"l"(&map),                                                                           \
                   "r"(from), __VA_ARGS__ : "memory");                                                               \
    else                                                                                                             \
      CUDA_EXT_TMA("cp.async.bulk.tensor." #rank "d.global.shared::cta.tile.bulk_group [%0, " at2                    \
                   "], [%1];" ::"l"(&map),                                                                           \
                   "r"(from), __VA_ARGS__ : "memory");                                                               \
  }
CUDA_EXT_TMA_RANK(1, "{%3}", "%4", "{%2}", "r"(at[0]))
CUDA_EXT_TMA_RANK(2, "{%3, %4}", "%5", "{%2, %3}", "r"(at[0]), "r"(at[1]))
CUDA_EXT_TMA_RANK(3, "{%3, %4, %5}", "%6", "{%2, %3, %4}", "r"(at[0]), "r"(at[1]), "r"(at[2]))
CUDA_EXT_TMA_RANK(4, "{%3, %4, %5, %6}", "%7", "{%2, %3, %4, %5}", "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]))
CUDA_EXT_TMA_RANK(5, "{%3, %4, %5, %6, %7}", "%8", "{%2, %3, %4, %5, %6}", "r"(at[0]), "r"(at[1]), "r"(at[2]),
                  "r"(at[3]), "r"(at[4]))
#undef CUDA_EXT_TMA_RANK

// Copies bytes, a multiple of 16, between addresses aligned to 16.
DEVICE void bulk_load(SharedAddress to, const void* from, uint32_t bytes, Barrier& barrier, Site = {}) {
  CUDA_EXT_TMA("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(shared_address(&barrier)) : "memory");
}
DEVICE void bulk_store(void* to, SharedAddress from, uint32_t bytes, Site = {}) {
  CUDA_EXT_TMA("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes) : "memory");
}
DEVICE void bulk_commit(Site = {}) { CUDA_EXT_TMA("cp.async.bulk.commit_group;" :: : "memory"); }
// Waits until at most `pending` of this thread's groups still read shared memory, which may then be overwritten.
template <int pending>
DEVICE void bulk_wait_read(Site = {}) {
  CUDA_EXT_TMA("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}
// Waits until at most `pending` of this thread's groups are incomplete.
template <int pending>
DEVICE void bulk_wait(Site = {}) {
  CUDA_EXT_TMA("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}
#undef CUDA_EXT_TMA

#else

DEVICE void tma_prefetch(const TensorMap&, Site = {}) {}
template <int rank>
DEVICE void tma_load(SharedAddress to, const TensorMap& map, Barrier& barrier, const int (&at)[rank], Site site = {}) {
  simt::tma_load(to, map.opaque, &barrier.word, at, rank, 0, site);
}
template <int rank>
DEVICE void tma_load_multicast(SharedAddress to, const TensorMap& map, Barrier& barrier, const int (&at)[rank],
                               uint16_t blocks, Site site = {}) {
  simt::tma_load(to, map.opaque, &barrier.word, at, rank, blocks, site);
}
template <bool add = false, int rank>
DEVICE void tma_store(const TensorMap& map, SharedAddress from, const int (&at)[rank], Site site = {}) {
  simt::tma_store(map.opaque, from, at, rank, add, site);
}
DEVICE void bulk_load(SharedAddress to, const void* from, uint32_t bytes, Barrier& barrier, Site site = {}) {
  simt::bulk_load(to, from, bytes, &barrier.word, site);
}
DEVICE void bulk_store(void* to, SharedAddress from, uint32_t bytes, Site site = {}) {
  simt::bulk_store(to, from, bytes, site);
}
DEVICE void bulk_commit(Site site = {}) { simt::bulk_commit(site); }
template <int pending>
DEVICE void bulk_wait_read(Site site = {}) {
  simt::bulk_wait(pending, true, site);
}
template <int pending>
DEVICE void bulk_wait(Site site = {}) {
  simt::bulk_wait(pending, false, site);
}

#endif

}  // namespace cuda_ext::arch
