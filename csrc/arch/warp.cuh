// Shuffles, votes and reductions within a warp.
#pragma once

#include <bit>

#include "arch/thread.cuh"

namespace cuda_ext::arch {

#if defined(__CUDACC__)

template <class T>
DEVICE T shuffle(T value, int lane, uint32_t mask = kFullWarp, Site = {}) {
  return __shfl_sync(mask, value, lane);
}
template <class T>
DEVICE T shuffle_xor(T value, int lanes, uint32_t mask = kFullWarp, Site = {}) {
  return __shfl_xor_sync(mask, value, lanes);
}
template <class T>
DEVICE T shuffle_down(T value, int lanes, uint32_t mask = kFullWarp, Site = {}) {
  return __shfl_down_sync(mask, value, lanes);
}
template <class T>
DEVICE T shuffle_up(T value, int lanes, uint32_t mask = kFullWarp, Site = {}) {
  return __shfl_up_sync(mask, value, lanes);
}
DEVICE uint32_t ballot(bool predicate, uint32_t mask = kFullWarp, Site = {}) { return __ballot_sync(mask, predicate); }

// True in one lane of the warp; all lanes must call it.
DEVICE bool elect_one(Site = {}) {
#if __CUDA_ARCH__ >= 900
  uint32_t elected;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
#else
  return lane_index() == 0;
#endif
}

#else

// The value of lane `lane`. For lanes out of range, callers pass the calling lane.
template <class T>
DEVICE T shuffle_from(T value, int lane, uint32_t mask, Site site) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  if constexpr (sizeof(T) == 4)
    return std::bit_cast<T>(simt::shuffle(std::bit_cast<uint32_t>(value), lane, mask, site));
  else
    return std::bit_cast<T>(simt::shuffle(std::bit_cast<uint64_t>(value), lane, mask, site));
}
template <class T>
DEVICE T shuffle(T value, int lane, uint32_t mask = kFullWarp, Site site = {}) {
  return shuffle_from(value, lane % kWarpSize, mask, site);
}
template <class T>
DEVICE T shuffle_xor(T value, int lanes, uint32_t mask = kFullWarp, Site site = {}) {
  return shuffle_from(value, lane_index() ^ lanes, mask, site);
}
template <class T>
DEVICE T shuffle_down(T value, int lanes, uint32_t mask = kFullWarp, Site site = {}) {
  const int from = lane_index() + lanes;
  return shuffle_from(value, from < kWarpSize ? from : lane_index(), mask, site);
}
template <class T>
DEVICE T shuffle_up(T value, int lanes, uint32_t mask = kFullWarp, Site site = {}) {
  const int from = lane_index() - lanes;
  return shuffle_from(value, from >= 0 ? from : lane_index(), mask, site);
}
DEVICE uint32_t ballot(bool predicate, uint32_t mask = kFullWarp, Site site = {}) {
  return simt::ballot(predicate, mask, site);
}
DEVICE bool elect_one(Site site = {}) {
  simt::ballot(true, kFullWarp, site);  // fails unless all lanes call it
  return lane_index() == 0;
}

#endif

DEVICE bool any(bool predicate, uint32_t mask = kFullWarp, Site site = {}) {
  return ballot(predicate, mask, site) != 0;
}
DEVICE bool all(bool predicate, uint32_t mask = kFullWarp, Site site = {}) {
  return ballot(predicate, mask, site) == mask;
}

// The sum or the maximum over each aligned group of `width` lanes, returned in all of them.
template <int width = kWarpSize>
DEVICE float sum_over_lanes(float value, Site site = {}) {
#pragma unroll
  for (int lanes = width / 2; lanes > 0; lanes /= 2) value += shuffle_xor(value, lanes, kFullWarp, site);
  return value;
}
template <int width = kWarpSize>
DEVICE float max_over_lanes(float value, Site site = {}) {
#pragma unroll
  for (int lanes = width / 2; lanes > 0; lanes /= 2) {
    const float other = shuffle_xor(value, lanes, kFullWarp, site);
    value = value > other ? value : other;
  }
  return value;
}

}  // namespace cuda_ext::arch
