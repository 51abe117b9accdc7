// Two bfloat16 that are neighbours along k, the first in the low half: what VDPBF16PS multiplies and adds to a float32
// at once. An instruction set that has it defines CUDA_EXT_BFLOAT16_PAIRS; CUDA_EXT_BFLOAT16_PAIRS_MODEL puts
// arithmetic that every processor has in the place of the instruction, for tests.
#pragma once

#include "cpu/simd.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

struct __attribute__((may_alias)) BFloat16Pair {
  uint32_t bits;
};

CUDA_EXT_INLINE Words load(const BFloat16Pair* p) {
  Words pairs;
  std::memcpy(&pairs, p, sizeof pairs);
  return pairs;
}
CUDA_EXT_INLINE Words splat(BFloat16Pair pair) { return Words{} + pair.bits; }

#if defined(CUDA_EXT_BFLOAT16_PAIRS_MODEL)

// Subnormal numbers as zeros of their sign.
CUDA_EXT_INLINE Vec<float> flush(Words bits) {
  return (Vec<float>)((bits & 0x7f800000) == 0 ? bits & 0x80000000 : bits);
}

// As specified (Intel, Software Developer's Manual): the second elements, then the first; each sum is rounded to
// nearest even; subnormal operands are zeros, and so are subnormal sums.
CUDA_EXT_INLINE Vec<float> multiply_add(Vec<float> sum, Words a, Words b) {
  sum = flush((Words)(flush((Words)sum) + flush(a & 0xffff0000) * flush(b & 0xffff0000)));
  return flush((Words)(sum + flush(a << 16) * flush(b << 16)));
}

#elif defined(CUDA_EXT_BFLOAT16_PAIRS)

CUDA_EXT_INLINE Vec<float> multiply_add(Vec<float> sum, Words a, Words b) {
  return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

#endif

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
