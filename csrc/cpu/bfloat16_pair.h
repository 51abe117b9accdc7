// Two consecutive bfloat16 values along k, the first in the low half: the operand type of VDPBF16PS and BFDOT, which
// multiply pairs and add both products to a float32. Instruction sets that have one define CUDA_EXT_BFLOAT16_PAIRS, and
// CUDA_EXT_ISA_WITHOUT_PAIRS, the variant for other types. For tests, CUDA_EXT_BFLOAT16_PAIRS_MODEL replaces VDPBF16PS
// by arithmetic that every CPU has.
//
// Both flush subnormal operands and sums to zero. BFDOT adds the two products to each other first, and rounds both sums
// to odd: an error of up to one unit in the last place of float32, where the nearest has half.
//
// `depth` is the number of values along k in an element of a packed operand: 1, or 2 where bfloat16 values stay
// unconverted. Such a pair is stored in a float32, which is only moved until the microkernel reads it as a
// BFloat16Pair; an odd k is padded with a zero.
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

// Replaces subnormal numbers by zeros of the same sign.
CUDA_EXT_INLINE Vec<float> flush(Words bits) {
  return (Vec<float>)((bits & 0x7f800000) == 0 ? bits & 0x80000000 : bits);
}

// As specified (Intel, Software Developer's Manual): adds the product of the second elements, then that of the first;
// each sum is rounded to nearest even; subnormal operands and sums are flushed to zero.
CUDA_EXT_INLINE Vec<float> multiply_add(Vec<float> sum, Words a, Words b) {
  sum = flush((Words)(flush((Words)sum) + flush(a & 0xffff0000) * flush(b & 0xffff0000)));
  return flush((Words)(sum + flush(a << 16) * flush(b << 16)));
}

#elif defined(CUDA_EXT_BFLOAT16_PAIRS) && defined(CUDA_EXT_NEON)

CUDA_EXT_INLINE Vec<float> multiply_add(Vec<float> sum, Words a, Words b) {
  return (Vec<float>)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}

#elif defined(CUDA_EXT_BFLOAT16_PAIRS)

CUDA_EXT_INLINE Vec<float> multiply_add(Vec<float> sum, Words a, Words b) {
  return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

#endif

// The type as which the microkernel reads elements of a packed operand.
template <int depth, class T>
using Packed = std::conditional_t<depth == 1, T, BFloat16Pair>;

// `count` consecutive elements of an operand whose values along k are adjacent; k values are left.
template <int depth, class Storage, class T = Compute<Storage>>
CUDA_EXT_INLINE Vec<T> load_along_k(const Storage* p, int64_t k, int64_t count) {
  if constexpr (depth == 1) return load_partial(p, count);
  if constexpr (depth == 2) {
    Vec<T> elements{};
    if (count >= kLanes<T> && k >= 2 * kLanes<T>)
      std::memcpy(&elements, p, sizeof elements);
    else
      std::memcpy(&elements, p, size_t(std::min(k, 2 * count)) * sizeof(Storage));
    return elements;
  }
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
