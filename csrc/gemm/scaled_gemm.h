// Products of operands in FP8 with scales.
#pragma once

#include "base/host_device.h"
#include "gemm/gemm.h"

namespace cuda_ext {

// Scales are for blocks of this many elements along k, and of 1 or of this many lines (rows of a, columns of b).
constexpr int64_t kScaleBlock = 128;

// The float32 scales of an operand, with any strides.
struct Scales {
  const float* data = nullptr;
  int line_shift = 0;       // 2^line_shift lines share a scale
  bool has_blocks = false;  // each block of k has its own
  int64_t line_stride = 0;
  int64_t block_stride = 0;

  // The scale of a line in a block of k.
  HOST_DEVICE const float* at(int64_t line, int64_t block) const {
    return data + (line >> line_shift) * line_stride + block * block_stride;
  }
};

// out (m, n) = sum over the blocks of k of (scale_a a) @ (scale_b b) + bias + beta * c. Products of a and b are exact,
// sums are in float32: scales multiply the sum of a block or, on a CPU and if no scale depends on the block, of all k.
struct ScaledGemmParams {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  Operand a;  // (m, k), float8_e4m3_t or float8_e5m2_t, as b
  Operand b;  // (k, n)
  Scales scale_a, scale_b;
  Operand bias;  // (n,) by column_stride
  double beta = 1.0;
  Operand c;  // (m, n)
  // Sums may stay in the tensor cores, which keep about 14 bits of them. Without effect if scales depend on the block.
  bool fast_accum = false;
  bool batch_invariant = false;  // the bits of a row do not depend on the number of rows
  Output out;
  // Not on the CPU, where each group is a product of its own. Groups of rows: b (k, n) is the first of the matrices,
  // which are one, (groups n, k), in memory; its scales and the bias have these strides; without c. Groups of terms:
  // out and c are (groups, m, n); without bias. Ends that are no multiples of kScaleBlock are rounded up.
  Groups groups;
  int64_t scale_b_group_stride = 0;
  int64_t bias_group_stride = 0;

  bool has_blocks() const { return scale_a.has_blocks || scale_b.has_blocks; }
};

// The same product without scales, as the parts that all kernels share see it.
inline GemmParams without_scales(const ScaledGemmParams& params) {
  GemmParams product;
  product.m = params.m;
  product.n = params.n;
  product.k = params.k;
  product.a = params.a;
  product.b = params.b;
  product.groups = params.groups;
  product.bias = params.bias;
  product.bias.batch_strides[0] = params.bias_group_stride;
  product.c = params.c;
  product.beta = params.beta;
  product.out = params.out;
  return product;
}

CUDA_EXT_CPU_LAUNCHER(launch_scaled_gemm, ScaledGemmParams)

}  // namespace cuda_ext
