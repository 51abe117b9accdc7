// Conversion to FP8 on the CPU, in panels of rows. Scales of whole columns, or of all, need a pass before it.
#pragma once

#include "gemm/cpu/scaled_gemm.h"
#include "gemm/quantize.h"

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
void store_float8(uint8_t* to, Vec<float> v, int64_t count) {
  const Words words = float8_words<Storage>(v);
  const Bytes bytes = __builtin_convertvector(words, Bytes);
  if (count == kLanes<float>)
    std::memcpy(to, &bytes, sizeof bytes);
  else
    std::memcpy(to, &bytes, size_t(count));
}

// The larger of `largest` and the magnitude of v, where it is finite.
CUDA_EXT_INLINE Vec<float> larger_magnitude(Vec<float> largest, Vec<float> v) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const Vec<float> magnitude = magnitude_of(v);
  return magnitude < kInfinity && magnitude > largest ? magnitude : largest;  // not if NaN
}

// to (columns, rows) = the transpose of from (rows, columns), in squares of 8 bytes that are transposed in registers.
inline void transpose_bytes(const uint8_t* from, int64_t from_stride, int64_t rows, int64_t columns, uint8_t* to,
                            int64_t to_stride) {
  constexpr int kSquare = 8;
  const auto exchange = [](uint64_t& low, uint64_t& high, int bits, uint64_t mask) {
    const uint64_t changed = ((low >> bits) ^ high) & mask;
    high ^= changed;
    low ^= changed << bits;
  };
  for (int64_t row = 0; row < rows; row += kSquare)
    for (int64_t column = 0; column < columns; column += kSquare) {
      const int64_t count_rows = std::min<int64_t>(kSquare, rows - row);
      const int64_t count_columns = std::min<int64_t>(kSquare, columns - column);
      uint64_t square[kSquare] = {};
      for (int i = 0; i < count_rows; ++i)
        std::memcpy(&square[i], from + (row + i) * from_stride + column, size_t(count_columns));
      for (int i = 0; i < 4; ++i) exchange(square[i], square[i + 4], 32, 0x00000000ffffffff);
      for (int i : {0, 1, 4, 5}) exchange(square[i], square[i + 2], 16, 0x0000ffff0000ffff);
      for (int i : {0, 2, 4, 6}) exchange(square[i], square[i + 1], 8, 0x00ff00ff00ff00ff);
      for (int i = 0; i < count_columns; ++i)
        std::memcpy(to + (column + i) * to_stride + row, &square[i], size_t(count_rows));
    }
}

template <class Out, class In>
class Quantizer {
 public:
  explicit Quantizer(const QuantizeParams& params) : p_(params) {}

  void run() {
    const bool has_columns = p_.along_columns.data != nullptr;
    // Panels are of many rows if scales or the transpose need them, tiles of whole rows if nothing forbids.
    const bool whole_rows = p_.has_long_blocks() && !has_columns;
    const int64_t width = whole_rows ? p_.columns : kScaleBlock;
    const int64_t panel = has_columns || p_.shape == ScaleShape::kSquareBlock
                              ? kScaleBlock
                              : std::clamp<int64_t>(32768 / p_.columns, 1, kScaleBlock);
    const bool first_pass = p_.has_long_blocks() && !(p_.shape == ScaleShape::kLine && whole_rows);
    const int64_t panels = ceil_div(p_.rows, panel);
    const int64_t lines = !has_columns ? 0 : p_.shape == ScaleShape::kLine ? 1 + panels : 1;  // of of_columns
    const Scratch scratch(first_pass ? (p_.rows + lines * p_.columns) * int64_t(sizeof(float)) : 0);
    float *const of_rows = scratch.as<float>(), *const of_columns = of_rows + p_.rows;
    if (first_pass) find_long_blocks(panel, of_rows, of_columns);
    parallel_for(panels, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin * panel; row < std::min(end * panel, p_.rows); row += panel)
        for (int64_t column = 0; column < p_.columns; column += width) {
          const Tile tile{row, std::min(panel, p_.rows - row), column, std::min(width, p_.columns - column)};
          if (first_pass)
            convert(tile, of_rows + row, of_columns + column);
          else
            convert_block(tile);
        }
    });
  }

 private:
  struct Tile {
    int64_t row, rows, column, columns;
  };

  const In* input(const Tile& tile, int64_t i) const {
    return static_cast<const In*>(p_.input.data) + (tile.row + i) * p_.input.row_stride + tile.column;
  }

  // of_rows = the largest finite magnitudes of the tile's rows, of_columns = those of its columns or what was there.
  void find_largest(const Tile& tile, float* of_rows, float* of_columns) const {
    for (int64_t i = 0; i < tile.rows; ++i) {
      const In* const from = input(tile, i);
      Vec<float> largest{};
      for_vectors<float>(tile.columns, [&](int64_t j, int64_t count) {
        const Vec<float> v = load_partial(from + j, count);
        largest = larger_magnitude(largest, v);
        if (of_columns != nullptr)
          store_partial(of_columns + j, larger_magnitude(load_partial(of_columns + j, count), v), count);
      });
      of_rows[i] = 0;
      for (int l = 0; l < kLanes<float>; ++l) of_rows[i] = std::max(of_rows[i], largest[l]);
    }
  }

  // of_rows (rows,) and of_columns (1, columns), or (1 + panels, columns) for scales of columns: the largest magnitudes
  // of whole rows and, in the first line, columns, or of all.
  void find_long_blocks(int64_t panel, float* of_rows, float* of_columns) const {
    const bool has_columns = p_.along_columns.data != nullptr && p_.shape == ScaleShape::kLine;
    const int64_t panels = ceil_div(p_.rows, panel);
    parallel_for(panels, 1, [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) {
        float* const of_panel = of_columns + (1 + index) * p_.columns;
        if (has_columns) std::fill_n(of_panel, p_.columns, 0.0f);
        const int64_t row = index * panel;
        find_largest({row, std::min(panel, p_.rows - row), 0, p_.columns}, of_rows + row,
                     has_columns ? of_panel : nullptr);
      }
    });
    if (p_.shape == ScaleShape::kAll) {
      const float largest = *std::max_element(of_rows, of_rows + p_.rows);
      std::fill_n(of_rows, p_.rows, largest);
      if (p_.along_columns.data != nullptr) std::fill_n(of_columns, p_.columns, largest);
    } else if (has_columns) {
      std::fill_n(of_columns, p_.columns, 0.0f);
      for (int64_t index = 1; index <= panels; ++index)
        for (int64_t j = 0; j < p_.columns; ++j)
          of_columns[j] = std::max(of_columns[j], of_columns[index * p_.columns + j]);
    }
  }

  // A tile whose scales depend on nothing else.
  void convert_block(const Tile& tile) const {
    alignas(64) float of_rows[kScaleBlock], of_columns[kScaleBlock] = {};
    find_largest(tile, of_rows, p_.along_columns.data != nullptr ? of_columns : nullptr);
    if (p_.shape == ScaleShape::kSquareBlock) {
      const float largest = *std::max_element(of_rows, of_rows + tile.rows);
      std::fill_n(of_rows, kScaleBlock, largest);
      std::fill_n(of_columns, kScaleBlock, largest);
    }
    convert(tile, of_rows, of_columns);
  }

  // Stores the scale of a line in a block, unless another block stores it. Returns the reciprocal.
  float store_scale(const QuantizedMatrix& out, int64_t line, int64_t block, float largest) const {
    const float scale = scale_of<Out>(largest, p_.power_of_two);
    if (float* const to = p_.place_of_scale(out, line, block)) *to = scale;
    return 1 / scale;
  }

  // of_rows (tile.rows,) and of_columns (tile.columns,): the largest magnitudes of what has one scale.
  void convert(const Tile& tile, const float* of_rows, const float* of_columns) const {
    if (p_.along_rows.data != nullptr)
      for (int64_t i = 0; i < tile.rows; ++i) {
        const int64_t row = tile.row + i;
        const float inverse = store_scale(p_.along_rows, row, tile.column / kScaleBlock, of_rows[i]);
        const In* const from = input(tile, i);
        uint8_t* const to = static_cast<uint8_t*>(p_.along_rows.data) + row * p_.along_rows.line_stride + tile.column;
        for_vectors<float>(tile.columns, [&](int64_t j, int64_t count) {
          store_float8<Out>(to + j, load_partial(from + j, count) * inverse, count);
        });
      }
    if (p_.along_columns.data == nullptr) return;
    alignas(64) float inverse[kScaleBlock];
    alignas(64) uint8_t rows[kScaleBlock][kScaleBlock];
    for (int64_t j = 0; j < tile.columns; ++j)
      inverse[j] = store_scale(p_.along_columns, tile.column + j, tile.row / kScaleBlock, of_columns[j]);
    for (int64_t i = 0; i < tile.rows; ++i) {
      const In* const from = input(tile, i);
      for_vectors<float>(tile.columns, [&](int64_t j, int64_t count) {
        store_float8<Out>(rows[i] + j, load_partial(from + j, count) * load_partial(inverse + j, count), count);
      });
    }
    transpose_bytes(
        rows[0], kScaleBlock, tile.rows, tile.columns,
        static_cast<uint8_t*>(p_.along_columns.data) + tile.column * p_.along_columns.line_stride + tile.row,
        p_.along_columns.line_stride);
  }

  const QuantizeParams& p_;
};

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
