// float32 numbers as tf32, which mma.sync multiplies.
#pragma once

#include <cmath>

#include "arch/mma.cuh"

namespace cuda_ext::tile {

// Rounds to the nearest tf32. mma ignores the lower 13 bits, so half of the last place is added, unless that would make
// an infinity of a finite number. Infinities and NaN are unchanged. (cvt.rna does the same at a quarter of the speed
// of integer arithmetic. The comparison is one of floats because those have a free absolute value.)
DEVICE uint32_t round_to_tf32(uint32_t bits) {
  const float first_that_overflows = arch::bits_float(0x7f7ff000u);
  return fabsf(arch::bits_float(bits)) < first_that_overflows ? bits + 0x1000 : bits;
}

// A fragment of float32 numbers x as the nearest tf32 and what that drops, up to 2^-22 x if |x| > 2^-114: below, the
// hardware takes what is dropped for 0. An infinity drops nothing; a NaN is one in both. Without tensor cores for tf32
// nothing is dropped.
template <int registers>
struct Tf32Fragment {
  uint32_t kept[registers], dropped[registers];

  Tf32Fragment() = default;
  DEVICE explicit Tf32Fragment(const uint32_t* words) {
#pragma unroll
    for (int q = 0; q < registers; ++q) {
      const float x = arch::bits_float(words[q]);
      kept[q] = arch::has_sm80_mma() ? round_to_tf32(words[q]) & 0xffffe000u : words[q];
      dropped[q] = fabsf(x) == INFINITY ? 0u : arch::float_bits(x - arch::bits_float(kept[q]));
    }
  }
};

}  // namespace cuda_ext::tile
