// Which weights are dropped: the same ones as on a CPU (attention_tiles.h), and again in the backward.
#pragma once

#include "arch/warp.cuh"

namespace cuda_ext::sm80 {

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
DEVICE void philox(uint64_t seed, uint64_t offset, uint64_t counter, uint32_t (&words)[4]) {
  uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
  words[0] = uint32_t(counter);
  words[1] = uint32_t(counter >> 32);
  words[2] = uint32_t(offset);
  words[3] = uint32_t(offset >> 32);
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

struct Dropout {
  uint64_t seed, offset;
  int64_t row_groups;   // counters of a row: one for 4 keys
  uint32_t drop_below;  // of 2^32; 0: none is dropped

  // Sets dropped weights to 0; those kept are not scaled. s: (row_tiles, key_tiles) outputs of mma, whose first key,
  // a multiple of 4, is `first_key`; rows: the numbers of this thread's rows.
  //
  // Four keys share a counter, and two lanes have two of them each, in the same two rows. So each lane makes the words
  // of one of these rows, and they trade halves.
  template <int row_tiles, int key_tiles>
  DEVICE void drop(float (&s)[row_tiles][key_tiles][4], const int64_t (&rows)[row_tiles][2], int first_key) const {
    const bool odd = arch::lane_index() % 2 == 1;
    const int group = first_key / 4 + arch::lane_index() % 4 / 2;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
      const uint64_t counter = uint64_t(odd ? rows[m][1] : rows[m][0]) * uint64_t(row_groups) + uint64_t(group);
#pragma unroll
      for (int n = 0; n < key_tiles; ++n) {
        uint32_t words[4];
        philox(seed, offset, counter + 2 * n, words);
        const uint32_t got0 = arch::shuffle_xor(odd ? words[0] : words[2], 1);
        const uint32_t got1 = arch::shuffle_xor(odd ? words[1] : words[3], 1);
        const uint32_t mine[4] = {odd ? got0 : words[0], odd ? got1 : words[1], odd ? words[2] : got0,
                                  odd ? words[3] : got1};
#pragma unroll
        for (int q = 0; q < 4; ++q)
          if (mine[q] < drop_below) s[m][n][q] = 0.0f;
      }
    }
  }
};

}  // namespace cuda_ext::sm80
