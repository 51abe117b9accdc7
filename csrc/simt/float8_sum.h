// Sums of products of 8-bit floats as the tensor cores of sm_90 are reported to form them (DeepSeek-V3 Technical
// Report, arXiv 2412.19437, section 3.5.2): an instruction aligns the products of its depth and the sum so far to the
// largest of them and cuts each to about 14 significant bits; the new sum is cut again. A long sum of small terms
// therefore stops growing, unless a kernel adds it to a float32 of its own from time to time. This models that, not the
// exact bits of a device.
#pragma once

#include <algorithm>
#include <cmath>

namespace cuda_ext::simt {

// x without what is below `bits` significant bits of a number of the magnitude of `largest`, which is not zero.
inline double cut(double x, double largest, int bits) {
  const double unit = std::ldexp(1.0, std::ilogb(largest) - (bits - 1));
  return std::trunc(x / unit) * unit;
}

// sum + a[0] * b[0] + a[1] * b[b_step] + ..
inline float add_float8_products(float sum, const float* a, const float* b, int b_step, int k, int bits) {
  double largest = std::fabs(sum);
  float plain = sum;
  for (int p = 0; p < k; ++p) {
    const float product = a[p] * b[p * b_step];
    largest = std::max(largest, double(std::fabs(product)));
    plain += product;
  }
  if (!std::isfinite(plain) || largest == 0) return plain;
  double total = cut(sum, largest, bits);
  for (int p = 0; p < k; ++p) total += cut(a[p] * b[p * b_step], largest, bits);
  return total == 0 ? 0.0f : float(cut(total, total, bits));
}

}  // namespace cuda_ext::simt
