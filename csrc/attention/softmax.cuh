// The online softmax (Milakov and Gimelshein, arXiv 1805.02867) on outputs of mma, in powers of two.
#pragma once

#include <cmath>

#include "arch/math.cuh"
#include "arch/warp.cuh"

namespace cuda_ext::attention {

// ln(2^max sum), rounded once at its own size; -inf if sum is 0.
DEVICE float natural_log(float max, float sum) {
  constexpr float kLn2 = 0.6931471805599453f, kLn2Low = float(0.6931471805599453 - kLn2);
  return sum == 0.0f ? -INFINITY : arch::fma(max, kLn2, arch::fma(max, kLn2Low, arch::fast_log2(sum) * kLn2));
}

// Sums of probs over a thread's columns, for each of its rows, relative to the maximum of the row.
template <int row_tiles>
struct alignas(8 * row_tiles) RowSums {
  float of[row_tiles][2];

  // The sum of the whole row, over the four lanes that share it.
  DEVICE float row(int m, int half) const {
    const float pair = of[m][half] + arch::shuffle_xor(of[m][half], 1);
    return pair + arch::shuffle_xor(pair, 2);
  }
};

// The softmax of 16 row_tiles rows that one warp owns. A thread has rows lane / 4 and lane / 4 + 8 of each 16, and a
// quarter of their columns; four adjacent lanes share a row.
template <int row_tiles>
struct OnlineSoftmax {
  // The reference of the probs, in powers of two: the largest logit so far, or up to kMaxLag less.
  float max[row_tiles][2];

  // Processes the next columns s, which become probs 2^(factor s - max); makes `out` and `sums` relative to the new
  // maximum and adds the probs to `sums`. factor > 0. The probs of a row that has seen only -inf are 0.
  template <int column_tiles, int out_tiles>
  DEVICE void update(float (&s)[row_tiles][column_tiles][4], float (&out)[row_tiles][out_tiles][4],
                     RowSums<row_tiles>& sums, float factor) {
    RowScales by;
    if (raise_max(s, sums, factor, by)) scale(out, by);
    make_probs(s, sums, factor);
  }

  // The three parts of an update, for kernels whose `out` is not available between the first and the last.
  using RowScales = float[row_tiles][2];

  // Raises `max` if it lags behind the next columns s of any row of the warp. Then `sums` become relative to the new
  // maximum, and the outputs must be scaled by `by`.
  template <int column_tiles>
  DEVICE bool raise_max(const float (&s)[row_tiles][column_tiles][4], RowSums<row_tiles>& sums, float factor,
                        RowScales& by) {
    float new_max[row_tiles][2];
    bool lags = false;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = -INFINITY;
#pragma unroll
        for (int n = 0; n < column_tiles; ++n)
          largest = fmaxf(largest, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        largest = fmaxf(largest, arch::shuffle_xor(largest, 1));
        largest = fmaxf(largest, arch::shuffle_xor(largest, 2));
        new_max[m][half] = fmaxf(max[m][half], largest * factor);
        lags |= new_max[m][half] - max[m][half] > kMaxLag;
      }
    if (!arch::any(lags)) return false;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        by[m][half] = arch::fast_exp2(max[m][half] - finite(new_max[m][half]));
        max[m][half] = new_max[m][half];
        sums.of[m][half] *= by[m][half];
      }
    return true;
  }

  // The columns s become probs, which are added to `sums`.
  template <int column_tiles>
  DEVICE void make_probs(float (&s)[row_tiles][column_tiles][4], RowSums<row_tiles>& sums, float factor) const {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float base = finite(max[m][half]);
#pragma unroll
        for (int n = 0; n < column_tiles; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[m][n][2 * half + e];
            x = arch::fast_exp2(arch::fma(x, factor, -base));
            sums.of[m][half] += x;
          }
      }
  }

  template <int out_tiles>
  DEVICE static void scale(float (&out)[row_tiles][out_tiles][4], const RowScales& by) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
      for (int n = 0; n < out_tiles; ++n)
#pragma unroll
        for (int q = 0; q < 4; ++q) out[m][n][q] *= by[m][q / 2];
  }

  // The logarithm of the sum of exponentials; -inf if the row has seen no key.
  DEVICE float log_sum_exp(int m, int half, float row_sum) const { return natural_log(max[m][half], row_sum); }

 private:
  // `max` may be this much, in powers of two, below the largest logit seen. Probs up to 2^8 are as precise as probs
  // up to 1, and outputs are rescaled once or twice per row instead of at every step.
  static constexpr float kMaxLag = 8.0f;

  // Avoids -inf - (-inf) = NaN.
  DEVICE static float finite(float x) { return x == -INFINITY ? 0.0f : x; }
};

}  // namespace cuda_ext::attention
