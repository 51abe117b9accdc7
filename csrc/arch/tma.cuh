// The tensor memory accelerator: one thread starts the copy of a whole tile (sm_90).
//
// A tensor map describes a tensor of 1 to 5 dimensions in global memory and the box that one copy moves; coordinates are
// elements, innermost first. What lies outside of the tensor is read as zeros and never written. Loads complete bytes of
// an mbarrier; stores are committed to groups that their thread waits for.
#pragma once

#include "arch/barrier.cuh"

namespace cuda_ext::arch {

// A CUtensorMap, without its header; made on the host by rt::make_tensor_map, passed by value as a GRID_CONSTANT.
struct alignas(64) TensorMap {
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

// Into shared memory at `to`, 128-byte aligned (swizzled boxes: to 1024), announced to `barrier`.
DEVICE void tma_load(SharedAddress to, const TensorMap& map, Barrier& barrier, const int (&at)[1], Site = {}) {
  CUDA_EXT_TMA(
      "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3}], [%2];" ::"r"(
          to),
      "l"(&map), "r"(shared_address(&barrier)), "r"(at[0]) : "memory");
}
DEVICE void tma_load(SharedAddress to, const TensorMap& map, Barrier& barrier, const int (&at)[2], Site = {}) {
  CUDA_EXT_TMA(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
          "r"(to),
      "l"(&map), "r"(shared_address(&barrier)), "r"(at[0]), "r"(at[1]) : "memory");
}
DEVICE void tma_load(SharedAddress to, const TensorMap& map, Barrier& barrier, const int (&at)[3], Site = {}) {
  CUDA_EXT_TMA(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(shared_address(&barrier)), "r"(at[0]), "r"(at[1]), "r"(at[2]) : "memory");
}
DEVICE void tma_load(SharedAddress to, const TensorMap& map, Barrier& barrier, const int (&at)[4], Site = {}) {
  CUDA_EXT_TMA(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(shared_address(&barrier)), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]) : "memory");
}
DEVICE void tma_load(SharedAddress to, const TensorMap& map, Barrier& barrier, const int (&at)[5], Site = {}) {
  CUDA_EXT_TMA(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, "
      "%7}], [%2];" ::"r"(to),
      "l"(&map), "r"(shared_address(&barrier)), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]) : "memory");
}

// Out of shared memory; `add`: to what is there, in the tensor's type.
template <bool add = false>
DEVICE void tma_store(const TensorMap& map, SharedAddress from, const int (&at)[1], Site = {}) {
  if constexpr (add)
    CUDA_EXT_TMA("cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group [%0, {%2}], [%1];" ::"l"(&map),
                 "r"(from), "r"(at[0]) : "memory");
  else
    CUDA_EXT_TMA("cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%0, {%2}], [%1];" ::"l"(&map), "r"(from),
                 "r"(at[0]) : "memory");
}
template <bool add = false>
DEVICE void tma_store(const TensorMap& map, SharedAddress from, const int (&at)[2], Site = {}) {
  if constexpr (add)
    CUDA_EXT_TMA(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
        "r"(from), "r"(at[0]), "r"(at[1]) : "memory");
  else
    CUDA_EXT_TMA("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
                 "r"(from), "r"(at[0]), "r"(at[1]) : "memory");
}
template <bool add = false>
DEVICE void tma_store(const TensorMap& map, SharedAddress from, const int (&at)[3], Site = {}) {
  if constexpr (add)
    CUDA_EXT_TMA(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
        "r"(from), "r"(at[0]), "r"(at[1]), "r"(at[2]) : "memory");
  else
    CUDA_EXT_TMA("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
                 "r"(from), "r"(at[0]), "r"(at[1]), "r"(at[2]) : "memory");
}

// Plain bytes, a multiple of 16, between addresses aligned to 16.
DEVICE void bulk_load(SharedAddress to, const void* from, uint32_t bytes, Barrier& barrier, Site = {}) {
  CUDA_EXT_TMA("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(shared_address(&barrier)) : "memory");
}
DEVICE void bulk_store(void* to, SharedAddress from, uint32_t bytes, Site = {}) {
  CUDA_EXT_TMA("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes) : "memory");
}
DEVICE void bulk_commit(Site = {}) { CUDA_EXT_TMA("cp.async.bulk.commit_group;" :: : "memory"); }
// Until at most `pending` of this thread's groups still read shared memory, which may then be overwritten.
template <int pending>
DEVICE void bulk_wait_read(Site = {}) {
  CUDA_EXT_TMA("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}
// Until at most `pending` of this thread's groups are under way at all.
template <int pending>
DEVICE void bulk_wait(Site = {}) {
  CUDA_EXT_TMA("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}
#undef CUDA_EXT_TMA

#else

DEVICE void tma_prefetch(const TensorMap&, Site = {}) {}
template <int rank>
DEVICE void tma_load(SharedAddress to, const TensorMap& map, Barrier& barrier, const int (&at)[rank], Site site = {}) {
  simt::tma_load(to, map.opaque, &barrier.word, at, rank, site);
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
