// Conversion to FP8 on the CPU: a block is read twice, the second time from cache if it is small.
#pragma once

#include "gemm/cpu/scaled_gemm.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

CUDA_EXT_INLINE Vec<float> magnitude_of(Vec<float> v) { return (Vec<float>)((Words)v & 0x7fffffff); }

// The bits of the nearest number of the format, at most its largest, or of NaN; one in each word.
template <class Storage>
CUDA_EXT_INLINE Words float8_words(Vec<float> v) {
  using Format = Float8Format<Storage>;
  constexpr int kDropped = 23 - Format::kMantissa;
  const Words sign = (Words)v >> 24 & 0x80;
  Vec<float> magnitude = magnitude_of(v);
  const auto is_nan = magnitude != magnitude;
  magnitude = magnitude > Format::kMost ? splat(Format::kMost) : magnitude;
  const Words bits = (Words)magnitude;
  const Words normal = ((bits + ((1u << (kDropped - 1)) - 1) + (bits >> kDropped & 1)) >> kDropped) -
                       (uint32_t(127 - Format::kBias) << Format::kMantissa);
  const Vec<float> aligner = splat(Format::kAligner);
  const Words subnormal = (Words)(magnitude + aligner) - (Words)aligner;
  const Words finite = magnitude < Format::kLeastNormal ? subnormal : normal;
  return sign | (is_nan ? Words{} + kFloat8Nan : finite);
}

template <class Storage>
void store_float8(Storage* to, Vec<float> v, int64_t count) {
  const Words words = float8_words<Storage>(v);
  const Bytes bytes = __builtin_convertvector(words, Bytes);
  if (count == kLanes<float>)
    std::memcpy(to, &bytes, sizeof bytes);
  else
    std::memcpy(to, &bytes, size_t(count));
}

// Of the finite elements.
template <class Storage>
float largest_magnitude(const Storage* rows, int64_t row_stride, int64_t count_rows, int64_t columns) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Vec<float> most{};
  for (int64_t i = 0; i < count_rows; ++i)
    for_vectors<float>(columns, [&](int64_t j, int64_t count) {
      const Vec<float> magnitude = magnitude_of(load_partial(rows + i * row_stride + j, count));
      most = magnitude < kInfinity && magnitude > most ? magnitude : most;  // not if NaN
    });
  float largest = 0;
  for (int l = 0; l < kLanes<float>; ++l) largest = std::max(largest, most[l]);
  return largest;
}

// Of a block whose largest magnitude is `most`.
inline float scale_of_block(float most, float most_of_format, bool power_of_two) {
  if (most == 0) return 1;
  const float scale = std::max(most / most_of_format, 0x1p-126f);
  if (!power_of_two) return scale;
  const uint32_t bits = float_to_bits(scale);
  return bits_to_float((bits + 0x7fffff) & 0x7f800000);
}

// out = rows [row, row + rows) and columns [column, column + columns) of the input, divided by `scale`.
template <class Out, class In>
void convert(const QuantizeParams& p, int64_t row, int64_t rows, int64_t column, int64_t columns, float scale) {
  const float inverse = 1 / scale;
  const In* from = static_cast<const In*>(p.input.data) + row * p.input.row_stride + column;
  Out* to = static_cast<Out*>(p.out.data) + row * p.columns + column;
  for (int64_t i = 0; i < rows; ++i, from += p.input.row_stride, to += p.columns)
    for_vectors<float>(columns, [&](int64_t j, int64_t count) {
      store_float8(to + j, load_partial(from + j, count) * inverse, count);
    });
}

// Calls f(index, first column, columns) for each block of columns.
template <class F>
void for_column_blocks(const QuantizeParams& p, F&& f) {
  for (int64_t n = 0, column = 0; column < p.columns; ++n, column += p.block_columns)
    f(n, column, std::min(p.block_columns, p.columns - column));
}

template <class In>
float largest_of(const QuantizeParams& p, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  const In* const from = static_cast<const In*>(p.input.data) + row * p.input.row_stride + column;
  return largest_magnitude(from, p.input.row_stride, rows, columns);
}

// Blocks of few rows: each is read from memory once.
template <class Out, class In>
void quantize_short_blocks(const QuantizeParams& p) {
  const int64_t grain = std::max<int64_t>(1, 32768 / (p.block_rows * p.columns));
  const int64_t column_blocks = ceil_div(p.columns, p.block_columns);
  parallel_for(ceil_div(p.rows, p.block_rows), grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t row = block * p.block_rows, rows = std::min(p.block_rows, p.rows - row);
      for_column_blocks(p, [&](int64_t n, int64_t column, int64_t columns) {
        const float most = largest_of<In>(p, row, rows, column, columns);
        const float scale = scale_of_block(most, Float8Format<Out>::kMost, p.power_of_two);
        p.scales[block * column_blocks + n] = scale;
        convert<Out, In>(p, row, rows, column, columns, scale);
      });
    }
  });
}

// Blocks of many rows: all threads read pieces of them, then convert the pieces.
template <class Out, class In>
void quantize_long_blocks(const QuantizeParams& p) {
  constexpr int64_t kPiece = 64;  // rows
  const int64_t pieces = ceil_div(p.block_rows, kPiece), row_blocks = ceil_div(p.rows, p.block_rows);
  const int64_t column_blocks = ceil_div(p.columns, p.block_columns);
  const Scratch scratch(row_blocks * pieces * column_blocks * int64_t(sizeof(float)));
  float* const most = scratch.as<float>();  // (row blocks, pieces, column blocks)
  // Calls f(row block, index of the piece, first row, rows).
  const auto for_pieces = [&](const auto& f) {
    parallel_for(row_blocks * pieces, 1, [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) {
        const int64_t block = index / pieces, first = index % pieces * kPiece, row = block * p.block_rows + first;
        f(block, index, row, std::clamp<int64_t>(std::min(p.block_rows - first, p.rows - row), 0, kPiece));
      }
    });
  };
  for_pieces([&](int64_t, int64_t index, int64_t row, int64_t rows) {
    for_column_blocks(p, [&](int64_t n, int64_t column, int64_t columns) {
      most[index * column_blocks + n] = rows > 0 ? largest_of<In>(p, row, rows, column, columns) : 0.0f;
    });
  });
  for (int64_t block = 0; block < row_blocks; ++block)
    for (int64_t n = 0; n < column_blocks; ++n) {
      float largest = 0;
      for (int64_t piece = 0; piece < pieces; ++piece)
        largest = std::max(largest, most[(block * pieces + piece) * column_blocks + n]);
      p.scales[block * column_blocks + n] = scale_of_block(largest, Float8Format<Out>::kMost, p.power_of_two);
    }
  for_pieces([&](int64_t block, int64_t, int64_t row, int64_t rows) {
    if (rows > 0)
      for_column_blocks(p, [&](int64_t n, int64_t column, int64_t columns) {
        convert<Out, In>(p, row, rows, column, columns, p.scales[block * column_blocks + n]);
      });
  });
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
