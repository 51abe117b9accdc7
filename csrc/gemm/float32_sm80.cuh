// float32 operands: conversion to one or two tf32 for mma.sync, and products in float32 arithmetic where these fail.
#pragma once

#include "gemm/epilogue.cuh"
#include "gemm/plan_sm80.h"
#include "tile/tf32.cuh"

namespace cuda_ext::sm80 {

using tile::round_to_tf32;

// x = high + low / kLowScale, up to 2^-23 x. high is the nearest tf32, not a truncated one: low is then half as large
// and of either sign, so that the dropped products of two lows have no bias. The scale preserves the bits of a low that
// would be subnormal. Some x cannot be split and make the sums they enter infinities or NaN: infinities and NaN
// (low is NaN), the largest numbers (high overflows), and others beyond 2^126 (low overflows).
constexpr float kLowScale = 0x1p13f;
DEVICE void split_tf32(uint32_t bits, uint32_t& high, uint32_t& low) {
  high = (bits + 0x1000) & 0xffffe000u;
  low = arch::float_bits((arch::bits_float(bits) - arch::bits_float(high)) * kLowScale);
}

// The column of b for column `index` of a tile; -1 if it is outside the matrix.
DEVICE int64_t column_of_b(const GemmParams& params, const epilogue::TilePosition& position, int index) {
  const bool up = index >= position.columns;
  const int64_t column = position.column + index - (up ? position.columns : 0);
  return column >= params.n ? -1 : up ? column + params.n : column;
}

// A thread's sums over its block's k tiles, in float32 arithmetic, directly from global memory.
template <class Gemm>
DEVICE void multiply_in_float32(const GemmParams& params, const GemmPlan& plan, const typename Gemm::Position& position,
                                typename Gemm::Accumulators& sums) {
  using epilogue::offset_of;
  const int64_t row = position.row + Gemm::warp_row() * Gemm::kWarpM + arch::lane_index() / 4;
  const int column = Gemm::warp_column() * Gemm::kWarpN + arch::lane_index() % 4 * 2;  // of the tile
  const auto* const batch_a = static_cast<const float*>(params.a.data) + row * params.a.row_stride +
                              offset_of(position.batch, params.batch_dims, params.batch_sizes, params.a.batch_strides);
  const auto* const batch_b = static_cast<const float*>(params.b.data) +
                              offset_of(position.batch, params.batch_dims, params.batch_sizes, params.b.batch_strides);
#pragma unroll
  for (auto& row_of_sums : sums)
#pragma unroll
    for (auto& fragment : row_of_sums)
#pragma unroll
      for (float& x : fragment) x = 0.0f;
  const int first = Gemm::first_k_tile(plan), end = first + Gemm::k_tiles_of_block(plan, position);
#pragma unroll 1
  for (int tile = first; tile < end; ++tile) {
    const int product = tile / Gemm::k_tiles(plan, position), k_tile = tile % Gemm::k_tiles(plan, position);
    const int depth = k_tile + 1 == Gemm::k_tiles(plan, position) ? Gemm::k_tail(plan, position) : Gemm::kBlockK;
    const int64_t k = Gemm::first_term(position) + int64_t(k_tile) * Gemm::kBlockK;
    const float* from_a = batch_a + k * params.a.column_stride +
                          offset_of(product, params.reduced_dims, params.reduced_sizes, params.reduced_strides_a);
    const float* from_b = batch_b + k * params.b.row_stride +
                          offset_of(product, params.reduced_dims, params.reduced_sizes, params.reduced_strides_b);
#pragma unroll 1
    for (int step = 0; step < depth; ++step) {
      float a[2 * Gemm::kRows];
#pragma unroll
      for (int i = 0; i < 2 * Gemm::kRows; ++i)
        a[i] = row + i * 8 < position.row_end(params) ? arch::load_global<float>(from_a + i * 8 * params.a.row_stride)
                                                      : 0.0f;
#pragma unroll
      for (int j = 0; j < Gemm::kColumns; ++j)
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          const int64_t b_column = column_of_b(params, position, column + j * 8 + q);
          const float b = b_column >= 0 ? arch::load_global<float>(from_b + b_column * params.b.column_stride) : 0.0f;
#pragma unroll
          for (int i = 0; i < 2 * Gemm::kRows; ++i) sums[i / 2][j][i % 2 * 2 + q] += a[i] * b;
        }
      from_a += params.a.column_stride;
      from_b += params.b.row_stride;
    }
  }
}

}  // namespace cuda_ext::sm80
