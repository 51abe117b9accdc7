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

// A float32 number x as the nearest tf32 and what that drops, up to 2^-22 x if |x| > 2^-114: below, the hardware takes
// what is dropped for 0. An infinity drops nothing; a NaN is one in both. Without tensor cores for tf32 nothing is
// dropped.
struct Tf32Pair {
  uint32_t kept, dropped;

  Tf32Pair() = default;
  DEVICE explicit Tf32Pair(uint32_t bits) {
    const float x = arch::bits_float(bits);
    kept = arch::has_sm80_mma() ? round_to_tf32(bits) & 0xffffe000u : bits;
    dropped = fabsf(x) == INFINITY ? 0u : arch::float_bits(x - arch::bits_float(kept));
  }
};

}  // namespace cuda_ext::tile
