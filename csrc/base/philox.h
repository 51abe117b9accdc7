// The counter-based random numbers of dropout and of stochastic rounding; in kernels arch/random.cuh has the same.
#pragma once

#include <cstdint>

namespace cuda_ext {

// Seed and offset of random numbers. In a captured CUDA graph they are in memory, because each replay has new ones:
// written by the graph's generator, or by forward for its backward. `offset` is then added to the one in memory.
struct RngSource {
  const uint64_t* seed_at = nullptr;  // null: use `seed` and `offset`
  const uint64_t* offset_at = nullptr;
  uint64_t seed = 0;
  uint64_t offset = 0;
};

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) for `Width` counters at once.
// `static`, because it is compiled for several instruction sets.
template <int Width>
static inline void philox(uint64_t seed, uint64_t offset, const uint64_t (&counter)[Width],
                          uint32_t (&words)[4][Width]) {
  uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
  for (int i = 0; i < Width; ++i) {
    words[0][i] = uint32_t(counter[i]);
    words[1][i] = uint32_t(counter[i] >> 32);
    words[2][i] = uint32_t(offset);
    words[3][i] = uint32_t(offset >> 32);
  }
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < Width; ++i) {
      const uint64_t product0 = uint64_t(0xD2511F53) * words[0][i];
      const uint64_t product1 = uint64_t(0xCD9E8D57) * words[2][i];
      words[0][i] = uint32_t(product1 >> 32) ^ words[1][i] ^ key0;
      words[1][i] = uint32_t(product1);
      words[2][i] = uint32_t(product0 >> 32) ^ words[3][i] ^ key1;
      words[3][i] = uint32_t(product0);
    }
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
}

}  // namespace cuda_ext
