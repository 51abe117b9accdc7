// Conversions between storage types and float, and special functions.
#pragma once

#include "arch/target.cuh"
#include "base/float8.h"

#if !defined(__CUDACC__)
#include <cmath>
#endif

namespace cuda_ext::arch {

#if defined(__CUDACC__)

// As instructions, without cuda_fp16.h and cuda_bf16.h, which every file with kernels would have to parse.
DEVICE float to_float(half_t x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
DEVICE float to_float(bfloat16_t x) { return __uint_as_float(uint32_t(x.bits) << 16); }

// Round to nearest, ties to even.
template <class T>
DEVICE T from_float(float x);
template <>
DEVICE float from_float<float>(float x) {
  return x;
}
template <>
DEVICE half_t from_float<half_t>(float x) {
  half_t y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <>
DEVICE bfloat16_t from_float<bfloat16_t>(float x) {
  bfloat16_t y;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
  const uint32_t bits = __float_as_uint(x);
  y.bits = x != x ? 0x7fff : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
  return y;
}

// Two elements in one register, `low` in the lower half.
template <class T>
DEVICE uint32_t pack(float low, float high) {
#if __CUDA_ARCH__ >= 800
  uint32_t packed;
  if constexpr (DtypeOf<T>::value == Dtype::kFloat16)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
#else
  return uint32_t(from_float<T>(high).bits) << 16 | from_float<T>(low).bits;
#endif
}

// The names of the 8-bit formats in instructions.
template <class T>
struct Float8Name {
  static constexpr char value[] = "e4m3";
};
template <>
struct Float8Name<float8_e5m2_t> {
  static constexpr char value[] = "e5m2";
};

// Two adjacent elements of an 8-bit format as two of float16, exactly; the first is in the lower half.
template <class T>
DEVICE uint32_t float8_to_half(uint16_t pair) {
#if __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("cvt.rn.f16x2.%2x2 %0, %1;" : "=r"(halves) : "h"(pair), "C"(Float8Name<T>::value));
  return halves;
#else
  if constexpr (DtypeOf<T>::value == Dtype::kFloat8E5M2)
    return uint32_t(pair & 0xff) << 8 | uint32_t(pair & 0xff00) << 16;
  else
    return pack<half_t>(float8_to_float(T{uint8_t(pair)}), float8_to_float(T{uint8_t(pair >> 8)}));
#endif
}
// The nearest elements of an 8-bit format, ties to even, `low` in the lower half. What is beyond the largest finite
// number becomes that number, infinity too; a NaN stays one.
template <class T>
DEVICE uint16_t pack_float8(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.%3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low), "C"(Float8Name<T>::value));
  return pair;
#else
  return uint16_t(uint32_t(float_to_float8<T>(high).bits) << 8 | float_to_float8<T>(low).bits);
#endif
}

// The nearest tf32 (ties away from zero), as the bits of a float.
DEVICE uint32_t to_tf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

DEVICE uint32_t float_bits(float x) { return __float_as_uint(x); }
DEVICE float bits_float(uint32_t x) { return __uint_as_float(x); }

// The hardware's approximations: within 2 ulp; tanh within 2^-11, relative.
DEVICE float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float fast_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float fast_tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Within a few ulp.
DEVICE float exp(float x) { return expf(x); }
DEVICE float erf(float x) { return erff(x); }
DEVICE float tanh(float x) { return tanhf(x); }
DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }

#else

DEVICE float to_float(half_t x) { return simt::to_float(x); }
DEVICE float to_float(bfloat16_t x) { return simt::to_float(x); }
template <class T>
DEVICE T from_float(float x);
template <>
DEVICE float from_float<float>(float x) {
  return x;
}
template <>
DEVICE half_t from_float<half_t>(float x) {
  return simt::to_half(x);
}
template <>
DEVICE bfloat16_t from_float<bfloat16_t>(float x) {
  return simt::to_bfloat16(x);
}
template <class T>
DEVICE uint32_t pack(float low, float high) {
  return uint32_t(from_float<T>(high).bits) << 16 | from_float<T>(low).bits;
}
template <class T>
DEVICE uint32_t float8_to_half(uint16_t pair) {
  return pack<half_t>(simt::to_float(T{uint8_t(pair)}), simt::to_float(T{uint8_t(pair >> 8)}));
}
template <class T>
DEVICE uint16_t pack_float8(float low, float high) {
  return uint16_t(uint32_t(simt::to_float8<T>(high).bits) << 8 | simt::to_float8<T>(low).bits);
}
DEVICE uint32_t float_bits(float x) { return simt::float_bits(x); }
DEVICE float bits_float(uint32_t x) { return simt::bits_float(x); }
DEVICE uint32_t to_tf32(float x) { return simt::to_tf32(x); }
DEVICE float fast_exp2(float x) { return simt::flush(std::exp2(simt::flush(x))); }
DEVICE float fast_log2(float x) { return simt::flush(std::log2(simt::flush(x))); }
DEVICE float fast_reciprocal(float x) { return simt::flush(1.0f / simt::flush(x)); }
DEVICE float fast_tanh(float x) { return std::tanh(x); }
DEVICE float exp(float x) { return std::exp(x); }
DEVICE float erf(float x) { return std::erf(x); }
DEVICE float tanh(float x) { return std::tanh(x); }
DEVICE float fma(float a, float b, float c) { return std::fma(a, b, c); }

#endif

DEVICE float to_float(float x) { return x; }

// The elements of a register written by `pack`.
template <class T>
DEVICE float unpack_low(uint32_t packed) {
  return to_float(T{uint16_t(packed)});
}
template <class T>
DEVICE float unpack_high(uint32_t packed) {
  return to_float(T{uint16_t(packed >> 16)});
}

DEVICE float to_float(float8_e4m3_t x) { return unpack_low<half_t>(float8_to_half<float8_e4m3_t>(x.bits)); }
DEVICE float to_float(float8_e5m2_t x) { return unpack_low<half_t>(float8_to_half<float8_e5m2_t>(x.bits)); }
// They saturate, as pack_float8 does.
template <>
DEVICE float8_e4m3_t from_float<float8_e4m3_t>(float x) {
  return {uint8_t(pack_float8<float8_e4m3_t>(x, 0.0f))};
}
template <>
DEVICE float8_e5m2_t from_float<float8_e5m2_t>(float x) {
  return {uint8_t(pack_float8<float8_e5m2_t>(x, 0.0f))};
}

// Adjacent elements in memory, of one, two or four bytes each.
template <class T, int count>
DEVICE Words<count* int(sizeof(T)) / 4> words_of(const float (&x)[count]) {
  Words<count* int(sizeof(T)) / 4> words;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < count; ++i) words.data[i] = float_bits(x[i]);
  } else if constexpr (sizeof(T) == 1) {
    static_assert(count % 4 == 0);
#pragma unroll
    for (int i = 0; i < count; i += 4)
      words.data[i / 4] = uint32_t(pack_float8<T>(x[i + 2], x[i + 3])) << 16 | pack_float8<T>(x[i], x[i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < count; i += 2) words.data[i / 2] = pack<T>(x[i], x[i + 1]);
  }
  return words;
}
template <class T>
using Pair = Words<sizeof(T) / 2>;
template <class T>
DEVICE Pair<T> pair_of(float first, float second) {
  const float x[2] = {first, second};
  return words_of<T>(x);
}

// The inverse.
template <class T, int words, int count>
DEVICE void unpack(const Words<words>& from, float (&x)[count]) {
  static_assert(count * sizeof(T) == 4 * words);
#pragma unroll
  for (int i = 0; i < words; ++i) {
    if constexpr (sizeof(T) == 4) {
      x[i] = bits_float(from.data[i]);
    } else if constexpr (sizeof(T) == 1) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t two = float8_to_half<T>(uint16_t(from.data[i] >> 16 * half));
        x[4 * i + 2 * half] = unpack_low<half_t>(two);
        x[4 * i + 2 * half + 1] = unpack_high<half_t>(two);
      }
    } else {
      x[2 * i] = unpack_low<T>(from.data[i]);
      x[2 * i + 1] = unpack_high<T>(from.data[i]);
    }
  }
}

}  // namespace cuda_ext::arch
