// exp, tanh and erf on vectors. float: polynomials with minimal relative error over the reduced range (stated for each,
// without rounding errors of the evaluation). double: the standard library lane by lane, because float64 is for
// checking gradients and need not be fast.
#pragma once

#include "cpu/simd.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

constexpr double kLog2E = 1.4426950408889634;

// c[0] + c[1] x + c[2] x^2 + ..., by Horner's rule.
template <size_t N>
CUDA_EXT_INLINE Vec<float> polynomial(Vec<float> x, const float (&c)[N]) {
  Vec<float> sum = splat(c[N - 1]);
#pragma GCC unroll 16
  for (size_t i = 2; i <= N; ++i) sum = sum * x + c[N - i];
  return sum;
}

// Adding and then subtracting this rounds to the nearest integer; in between, the low mantissa bits hold that integer.
constexpr float kRound = 0x1.8p23f;

CUDA_EXT_INLINE Vec<float> scale_by_power_of_two(Vec<float> x, Vec<float> shifted_exponent) {
  return (Vec<float>)((IntVec<float>)x + ((IntVec<float>)shifted_exponent << 23));
}

// e^x for -87.3 <= x <= 88.7228.
CUDA_EXT_INLINE Vec<float> exp_in_range(Vec<float> x) {
  const Vec<float> shifted = x * float(kLog2E) + kRound;
  const Vec<float> n = shifted - kRound;
  // ln 2 in two parts, the first with zeros in its low bits so that n times it is exact.
  const Vec<float> r = (x - n * 0x1.62e4p-1f) - n * 1.42860677e-6f;
  const Vec<float> mantissa =
      polynomial(r, {1.0f, 1.00000003f, 0.499999942f, 0.166664312f, 0.0416680028f, 0.00837416274f, 0.00138436302f});
  return scale_by_power_of_two(mantissa, shifted);
}

// e^x; relative error 2e-9. 0 below -87.3 (no subnormals), inf above 88.7228; NaN stays NaN.
CUDA_EXT_INLINE Vec<float> exp(Vec<float> x) {
  const Vec<float> clamped = x < -87.3f ? splat(-87.3f) : x > 88.7228f ? splat(88.7228f) : x;
  const Vec<float> value = exp_in_range(clamped);
  const Vec<float> large = x > 88.7228f ? splat(std::numeric_limits<float>::infinity()) : value;
  return x >= -87.3f ? large : x < -87.3f ? Vec<float>{} : x;
}

// The same for x <= 88 or NaN, as in a softmax shifted by approximately its maximum: 0 below -70. What is so small
// beside 1 changes no sum of numbers of one size, but its products with small ones would be subnormal, which is slow.
CUDA_EXT_INLINE Vec<float> exp_below_88(Vec<float> x) {
  const Vec<float> value = exp_in_range(x < -70.0f ? splat(-70.0f) : x);
  return x >= -70.0f ? value : x < -70.0f ? Vec<float>{} : x;
}
CUDA_EXT_INLINE Vec<double> exp(Vec<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::exp(x[i]);
  return x;
}

CUDA_EXT_INLINE Vec<double> exp_below_88(Vec<double> x) { return exp(x); }

// tanh x = x P(x^2) / Q(x^2); relative error 1.3e-9 up to |x| = 9, where tanh rounds to 1 in float.
CUDA_EXT_INLINE Vec<float> tanh(Vec<float> x) {
  const Vec<float> c = x < -9.0f ? splat(-9.0f) : x > 9.0f ? splat(9.0f) : x;
  const Vec<float> u = c * c;
  const Vec<float> p =
      polynomial(u, {1.0f, 0.136808903f, 0.00386954987f, 2.80321242e-5f, 3.0644354e-8f, -1.22474818e-11f});
  const Vec<float> q = polynomial(u, {1.0f, 0.470142224f, 0.0272503112f, 0.00039407861f, 1.2890902e-6f});
  return c * p / q;
}
CUDA_EXT_INLINE Vec<double> tanh(Vec<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::tanh(x[i]);
  return x;
}

// erf x = x P(x^2) / Q(x^2); relative error 2.1e-9 up to |x| = 4, where erf rounds to 1 in float.
CUDA_EXT_INLINE Vec<float> erf(Vec<float> x) {
  const Vec<float> c = x < -4.0f ? splat(-4.0f) : x > 4.0f ? splat(4.0f) : x;
  const Vec<float> u = c * c;
  const Vec<float> p = polynomial(
      u, {1.12837917f, 0.185207119f, 0.0543173381f, 0.00384976187f, 0.000379607879f, 4.68464298e-6f, -1.32017541e-8f});
  const Vec<float> q = polynomial(u, {1.0f, 0.497468949f, 0.113959947f, 0.0154623847f, 0.00130759964f, 6.31093894e-5f});
  return c * p / q;
}
CUDA_EXT_INLINE Vec<double> erf(Vec<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::erf(x[i]);
  return x;
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
