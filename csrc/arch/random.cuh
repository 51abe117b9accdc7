// The random numbers of a kernel: seed and offset of its call, and the words of a counter.
#pragma once

#include "arch/memory.cuh"
#include "base/philox.h"

namespace cuda_ext::arch {

// The seed and offset of one call, after adding those in memory.
struct RngState {
  uint64_t seed, offset;
};
DEVICE RngState load_rng(const RngSource& source) {
  RngState state{source.seed, source.offset};
  if (source.seed_at != nullptr) {
    state.seed = load_global<uint64_t>(source.seed_at);
    state.offset += load_global<uint64_t>(source.offset_at);
  }
  return state;
}

// Philox4x32-10, as base/philox.h, for one counter: of loops over counters, attention kernels have no registers.
DEVICE void philox(const RngState& state, uint64_t counter, uint32_t (&words)[4]) {
  uint32_t key0 = uint32_t(state.seed), key1 = uint32_t(state.seed >> 32);
  words[0] = uint32_t(counter);
  words[1] = uint32_t(counter >> 32);
  words[2] = uint32_t(state.offset);
  words[3] = uint32_t(state.offset >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t(0xD2511F53) * words[0];
    const uint64_t product1 = uint64_t(0xCD9E8D57) * words[2];
    words[0] = uint32_t(product1 >> 32) ^ words[1] ^ key0;
    words[1] = uint32_t(product1);
    words[2] = uint32_t(product0 >> 32) ^ words[3] ^ key1;
    words[3] = uint32_t(product0);
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
}

}  // namespace cuda_ext::arch
