// Dropout: the same probs are dropped as on the CPU (attention/cpu/logits.h), and in forward and backward.
#pragma once

#include "arch/random.cuh"
#include "arch/warp.cuh"
#include "attention/attention.h"

namespace cuda_ext::attention {

using arch::load_rng;
using arch::RngState;
DEVICE void store_rng(uint64_t* to, const RngState& state) {
  arch::store_global(to, state.seed);
  arch::store_global(to + 1, state.offset);
}

struct Dropout {
  RngSource rng;
  int64_t row_groups;   // counters per row: one for 4 keys
  int64_t first_group;  // the counter of row 0 and key 0
  uint32_t drop_below;  // drops random words below this; 0: no dropout

  // Sets dropped probs to 0; the others are not scaled. s: (row_tiles, key_tiles) outputs of mma, whose first key,
  // `first_key`, is a multiple of 4; number_of(m, half): the number of this thread's row.
  //
  // Four keys share a counter, and two lanes have two of them each, in the same two rows. So each lane computes the
  // words of one of these rows, and they exchange halves.
  template <int row_tiles, int key_tiles, class Number>
  DEVICE void drop(float (&s)[row_tiles][key_tiles][4], const Number& number_of, int first_key) const {
    const int lane = arch::opaque_thread_index() % 4;
    const bool odd = lane % 2 == 1;
    const int64_t group = first_group + (first_key / 4 + lane / 2);
    const RngState state = load_rng(rng);
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
      const uint64_t counter = uint64_t(number_of(m, lane % 2)) * uint64_t(row_groups) + uint64_t(group);
#pragma unroll
      for (int n = 0; n < key_tiles; ++n) {
        uint32_t words[4];
        arch::philox(state, counter + 2 * n, words);
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

  // For transposed logits: the words of a thread's four elements of a tile. Rows are keys, of which the thread's first
  // is `key`; columns are rows of the softmax, the thread's `first_number` and the next.
  //
  // Four adjacent keys are in four lanes, 4 apart, which need one word each of four counters: two groups of keys by two
  // rows. So each lane computes the words of one counter, and the lanes transpose them.
  DEVICE void words_of_columns(int64_t first_number, int key, uint32_t (&mine)[4]) const {
    const int lane = arch::opaque_thread_index() / 4 % 4;
    const bool odd = lane % 2 == 1, high = lane / 2 == 1;
    const RngState state = load_rng(rng);
    uint32_t words[4];
    const int64_t group = first_group + (key / 4 + lane / 2 * 2);
    arch::philox(state, uint64_t(first_number + lane % 2) * uint64_t(row_groups) + uint64_t(group), words);
    uint32_t exchanged[4];
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
      const uint32_t got = arch::shuffle_xor(odd ? words[k] : words[k + 1], 4);
      exchanged[k] = odd ? got : words[k];
      exchanged[k + 1] = odd ? words[k + 1] : got;
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t got = arch::shuffle_xor(high ? exchanged[k] : exchanged[k + 2], 8);
      mine[k] = high ? got : exchanged[k];
      mine[k + 2] = high ? exchanged[k + 2] : got;
    }
  }
};

inline Dropout dropout_of(const AttentionParams& p) {
  return {p.rng, p.dropout_counters.of_row, p.dropout_counters.first, uint32_t(p.dropout_p * 4294967296.0)};
}

}  // namespace cuda_ext::attention
