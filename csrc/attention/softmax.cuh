// The online softmax (Milakov and Gimelshein, arXiv 1805.02867) on outputs of mma, in powers of two.
#pragma once

#include <cmath>

#include "arch/math.cuh"
#include "arch/warp.cuh"

namespace cuda_ext::sm80 {

// Of 16 row_tiles rows that a warp has to itself. A thread has rows lane / 4 and lane / 4 + 8 of each 16, and of these
// the columns of a quarter; four neighbouring lanes share a row.
template <int row_tiles>
struct OnlineSoftmax {
  float max[row_tiles][2];  // of the row so far
  float sum[row_tiles][2];  // of this thread's columns, relative to max

  // Takes columns s in: they become their weights 2^(factor (s - max)), and `out`, the weighted sums so far, is made
  // relative to the new maximum. factor > 0. A row that has seen nothing but -inf has weights of 0.
  template <int column_tiles, int out_tiles>
  DEVICE void take(float (&s)[row_tiles][column_tiles][4], float (&out)[row_tiles][out_tiles][4], float factor) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& row_max = max[m][half];
        float new_max = row_max;
#pragma unroll
        for (int n = 0; n < column_tiles; ++n)
          new_max = fmaxf(new_max, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        new_max = fmaxf(new_max, arch::shuffle_xor(new_max, 1));
        new_max = fmaxf(new_max, arch::shuffle_xor(new_max, 2));
        const float base = new_max == -INFINITY ? 0.0f : new_max * factor;
        const float rescale = arch::fast_exp2(row_max * factor - base);
        row_max = new_max;
        float& row_sum = sum[m][half];
        row_sum *= rescale;
#pragma unroll
        for (int n = 0; n < out_tiles; ++n) {
          out[m][n][2 * half] *= rescale;
          out[m][n][2 * half + 1] *= rescale;
        }
#pragma unroll
        for (int n = 0; n < column_tiles; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[m][n][2 * half + e];
            x = arch::fast_exp2(arch::fma(x, factor, -base));
            row_sum += x;
          }
      }
  }

  // The sum of the whole row, and the logarithm of the sum of exponentials; 0 and -inf of a row that saw nothing.
  DEVICE float row_sum(int m, int half) const {
    const float pair = sum[m][half] + arch::shuffle_xor(sum[m][half], 1);
    return pair + arch::shuffle_xor(pair, 2);
  }
  DEVICE float log_sum_exp(int m, int half, float row_sum, float factor) const {
    constexpr float kLn2 = 0.6931471805599453f;
    return row_sum == 0.0f ? -INFINITY : (max[m][half] * factor + arch::fast_log2(row_sum)) * kLn2;
  }
};

}  // namespace cuda_ext::sm80
