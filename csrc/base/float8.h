// The 8-bit formats, and their conversions as arithmetic on bits: for devices without instructions for them, and the
// emulator. The vectors of CPUs do the same (cpu/simd.h, gemm/cpu/quantize.h).
#pragma once

#include <cstring>

#include "base/dtype.h"
#include "base/host_device.h"

namespace cuda_ext {

template <class T>
struct Float8Format;
template <>
struct Float8Format<float8_e4m3_t> {
  static constexpr int kMantissa = 3, kBias = 7;
  static constexpr uint32_t kLargest = 0x7e, kInfinity = 0x80;  // there is no infinity
  static constexpr float kMost = 448;                           // the number kLargest
  static constexpr float kLeastNormal = 0x1p-6f;
  static constexpr float kToFloat = 0x1p120f;  // the ratio of float's bias and this one
  static constexpr float kAligner = 0x1p14f;   // its last place in float is that of the subnormals
};
template <>
struct Float8Format<float8_e5m2_t> {
  static constexpr int kMantissa = 2, kBias = 15;
  static constexpr uint32_t kLargest = 0x7b, kInfinity = 0x7c;
  static constexpr float kMost = 57344, kLeastNormal = 0x1p-14f;
  static constexpr float kToFloat = 0x1p112f;
  static constexpr float kAligner = 0x1p7f;
};
constexpr uint8_t kFloat8Nan = 0x7f;  // of both formats, as conversions write it

template <class To, class From>
HOST_DEVICE To same_bits(From from) {  // nvcc 13.0 fails on __builtin_bit_cast in a template
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

template <class T>
HOST_DEVICE float float8_to_float(T x) {
  using Format = Float8Format<T>;
  const uint32_t sign = uint32_t(x.bits & 0x80) << 24, magnitude = x.bits & 0x7f;
  if (magnitude > Format::kLargest)
    return same_bits<float>(sign | (magnitude == Format::kInfinity ? 0x7f800000 : 0x7fc00000));
  // Shifted into float's exponent field, the number is too small by the ratio of the biases; also if subnormal.
  const float small = same_bits<float>(magnitude << (23 - Format::kMantissa));
  return same_bits<float>(sign | same_bits<uint32_t>(small * Format::kToFloat));
}

// Rounds to nearest, ties to even. What is beyond the largest finite number becomes that number, infinity too.
template <class T>
HOST_DEVICE T float_to_float8(float x) {
  using Format = Float8Format<T>;
  constexpr int kDropped = 23 - Format::kMantissa;
  constexpr uint32_t kRebias = uint32_t(127 - Format::kBias) << 23, kSmallestNormal = kRebias + (1u << 23);
  const uint32_t bits = same_bits<uint32_t>(x), magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return {kFloat8Nan};
  uint32_t rounded;
  if (magnitude < kSmallestNormal)
    rounded =
        same_bits<uint32_t>(same_bits<float>(magnitude) + Format::kAligner) - same_bits<uint32_t>(Format::kAligner);
  else
    rounded = (magnitude - kRebias + (1u << (kDropped - 1)) - 1 + (magnitude >> kDropped & 1)) >> kDropped;
  return {uint8_t((bits >> 24 & 0x80) | (rounded < Format::kLargest ? rounded : Format::kLargest))};
}

// The scale of elements of this largest magnitude: with it, they reach the largest number of the format.
template <class T>
HOST_DEVICE float scale_of(float largest, bool power_of_two) {
  if (largest == 0) return 1;
  const float least = 0x1p-126f, ratio = largest / Float8Format<T>::kMost;
  const float scale = ratio > least ? ratio : least;
  return power_of_two ? same_bits<float>((same_bits<uint32_t>(scale) + 0x7fffff) & 0x7f800000) : scale;
}

}  // namespace cuda_ext
