// Prefix sums over the lanes of a warp, and the lane whose share contains an index.
#pragma once

#include "arch/warp.cuh"

namespace cuda_ext::tile {

// The sum of the values of this lane and those before.
DEVICE int sum_up_to_lane(int value) {
#pragma unroll
  for (int lanes = 1; lanes < arch::kWarpSize; lanes *= 2) {
    const int other = arch::shuffle_up(value, lanes);
    if (arch::lane_index() >= lanes) value += other;
  }
  return value;
}

// The first bit of `bits` that is 1; there is one.
DEVICE int lowest_bit(uint32_t bits) {
  int bit = 0;
#pragma unroll
  for (int width = 16; width > 0; width /= 2)
    if ((bits & ((1u << width) - 1)) == 0) {
      bits >>= width;
      bit += width;
    }
  return bit;
}

}  // namespace cuda_ext::tile
