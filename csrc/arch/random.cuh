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

DEVICE void philox(const RngState& state, uint64_t counter, uint32_t (&words)[4]) {
  const uint64_t one_counter[1] = {counter};
  uint32_t its_words[4][1];
  cuda_ext::philox<1>(state.seed, state.offset, one_counter, its_words);
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = its_words[i][0];
}

}  // namespace cuda_ext::arch
