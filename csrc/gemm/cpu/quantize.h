// Conversion to FP8 on the CPU: a block of rows at a time, whose blocks of columns are read twice, the second time from
// cache.
#pragma once

#include "gemm/cpu/scaled_gemm.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

// What the arithmetic of a format needs; `kBits` are those of the fraction.
template <class Storage>
struct Float8;
template <>
struct Float8<float8_e4m3_t> {
  static constexpr float kMost = 448, kLeastNormal = 0x1p-6f;
  static constexpr int kBits = 3, kBias = 7;
};
template <>
struct Float8<float8_e5m2_t> {
  static constexpr float kMost = 57344, kLeastNormal = 0x1p-14f;
  static constexpr int kBits = 2, kBias = 15;
};

CUDA_EXT_INLINE Vec<float> magnitude_of(Vec<float> v) { return (Vec<float>)((Words)v & 0x7fffffff); }

// The bits of the nearest number of the format, at most its largest, or of NaN; one in each word.
template <class Storage>
CUDA_EXT_INLINE Words float8_words(Vec<float> v) {
  using Format = Float8<Storage>;
  constexpr int kShift = 23 - Format::kBits;
  const Words sign = (Words)v >> 24 & 0x80;
  Vec<float> magnitude = magnitude_of(v);
  const auto is_nan = magnitude != magnitude;
  magnitude = magnitude > Format::kMost ? splat(Format::kMost) : magnitude;
  const Words bits = (Words)magnitude;
  const Words normal = ((bits + ((1u << (kShift - 1)) - 1) + (bits >> kShift & 1)) >> kShift) -
                       (uint32_t(127 - Format::kBias) << Format::kBits);
  // The last bit of what is added is the least subnormal, so that the sum is rounded to a multiple of it.
  const Vec<float> aligned = splat(Format::kLeastNormal * float(1 << kShift));
  const Words subnormal = (Words)(magnitude + aligned) - (Words)aligned;
  const Words finite = magnitude < Format::kLeastNormal ? subnormal : normal;
  return sign | (is_nan ? Words{} + 0x7f : finite);
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

template <class Out, class In>
void quantize_rows(const QuantizeParams& p, int64_t block, const In* input) {
  const int64_t row = block * p.block_rows, rows = std::min(p.block_rows, p.rows - row);
  const int64_t blocks = ceil_div(p.columns, p.block_columns);
  Out* const out = static_cast<Out*>(p.out.data);
  for (int64_t n = 0; n < blocks; ++n) {
    const int64_t column = n * p.block_columns, columns = std::min(p.block_columns, p.columns - column);
    const In* const from = input + row * p.input.row_stride + column;
    const float most = largest_magnitude(from, p.input.row_stride, rows, columns);
    const float scale = scale_of_block(most, Float8<Out>::kMost, p.power_of_two), inverse = 1 / scale;
    p.scales[block * blocks + n] = scale;
    for (int64_t i = 0; i < rows; ++i)
      for_vectors<float>(columns, [&](int64_t j, int64_t count) {
        store_float8(out + (row + i) * p.columns + column + j,
                     load_partial(from + i * p.input.row_stride + j, count) * inverse, count);
      });
  }
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
