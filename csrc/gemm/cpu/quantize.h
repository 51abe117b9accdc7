// Conversion to FP8 on the CPU, in panels of rows. Scales of whole columns, or of all, need a pass before it.
#pragma once

#include "gemm/cpu/activation.h"
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

// The bits of one of the two numbers around v, by QuantizeParams::stochastic: the random bits below the last place of
// the format are added, and what is below it then is cut.
template <class Storage>
CUDA_EXT_INLINE Words float8_words(Vec<float> v, Words random) {
  using Format = Float8Format<Storage>;
  constexpr int kDropped = 23 - Format::kMantissa, kFraction = 28;
  constexpr float kToFixedPoint = 0x1p28f * (1 << Format::kMantissa) / Format::kLeastNormal;
  const Words sign = (Words)v >> 24 & 0x80;
  Vec<float> magnitude = magnitude_of(v);
  const auto is_nan = magnitude != magnitude;
  magnitude = magnitude > Format::kMost ? splat(Format::kMost) : magnitude;
  const auto is_subnormal = magnitude < Format::kLeastNormal;
  const Words normal = (((Words)magnitude + (random >> (32 - kDropped))) >> kDropped) -
                       (uint32_t(127 - Format::kBias) << Format::kMantissa);
  const Vec<float> fixed_point = (is_subnormal ? magnitude : Vec<float>{}) * kToFixedPoint;
  const Words subnormal =
      ((Words) __builtin_convertvector(fixed_point, IntVec<float>) + (random >> (32 - kFraction))) >> kFraction;
  const Words finite = is_subnormal ? subnormal : normal;
  return sign | (is_nan ? Words{} + kFloat8Nan : finite);
}

// The random words of the elements of a line. Vectors are asked for one after the other, from a multiple of kScaleBlock
// on.
class LineOfRandomWords {
 public:
  LineOfRandomWords(const QuantizeParams& params, const QuantizedMatrix& out, int64_t line, int64_t elements)
      : rng_(params.rng), offset_(rng_.offset + out.rng_offset), line_(line), elements_(elements) {}

  Words from(int64_t element) {
    if (element % kBuffered == 0) fill(element);
    Words words;
    std::memcpy(&words, buffer_ + element % kBuffered, sizeof words);
    return words;
  }

 private:
  static constexpr int kCounters = kLanes<float>, kBuffered = 4 * kCounters;
  static_assert(kScaleBlock % kBuffered == 0);

  void fill(int64_t element) {
    uint64_t counter[kCounters];
    uint32_t words[4][kCounters];
    for (int i = 0; i < kCounters; ++i) counter[i] = QuantizeParams::rng_counter(line_, elements_, element + 4 * i);
    philox<kCounters>(rng_.seed, offset_, counter, words);
    for (int i = 0; i < kBuffered; ++i) buffer_[i] = words[i % 4][i / 4];
  }

  const RngSource& rng_;
  uint64_t offset_;
  int64_t line_, elements_;
  uint32_t buffer_[kBuffered];
};

inline void store_bytes(uint8_t* to, Words words, int64_t count) {
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
          const Elements elements(p_, tile);
          if (first_pass)
            convert(tile, elements, of_rows + row, of_columns + column);
          else
            convert_block(tile, elements);
        }
    });
  }

 private:
  struct Tile {
    int64_t row, rows, column, columns;
  };

  // The elements of a tile: those of the input, or of its function, computed once.
  class Elements {
   public:
    Elements(const QuantizeParams& p, const Tile& tile)
        : rows_(static_cast<const In*>(p.input.data) + tile.row * p.input.row_stride + tile.column),
          stride_(p.input.row_stride),
          computed_(p.function.is_identity() ? 0 : tile.rows * tile.columns * int64_t(sizeof(In))) {
      if (p.function.is_identity()) return;
      In* const to = computed_.template as<In>();
      for (int64_t i = 0; i < tile.rows; ++i) compute(p.function, row(i), tile.columns, to + i * tile.columns);
      rows_ = to;
      stride_ = tile.columns;
    }
    const In* row(int64_t i) const { return rows_ + i * stride_; }

   private:
    static void compute(const QuantizedFunction& function, const In* x, int64_t columns, In* to) {
      with_activation<float>(function.activation, [&](auto f) {
        for_vectors<float>(columns, [&](int64_t j, int64_t count) {
          const Vec<float> h = f.value(load_partial(x + j, count));
          const Vec<float> up = function.gated ? load_partial(x + function.up_column + j, count) : splat(1.0f);
          store_partial(to + j, function.gated ? h * up : h, count);
        });
      });
    }

    const In* rows_;
    int64_t stride_;
    Scratch computed_;
  };

  // of_rows = the largest finite magnitudes of the tile's rows, of_columns = those of its columns or what was there.
  void find_largest(const Tile& tile, const Elements& elements, float* of_rows, float* of_columns) const {
    for (int64_t i = 0; i < tile.rows; ++i) {
      const In* const from = elements.row(i);
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
        const Tile tile{row, std::min(panel, p_.rows - row), 0, p_.columns};
        find_largest(tile, Elements(p_, tile), of_rows + row, has_columns ? of_panel : nullptr);
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
  void convert_block(const Tile& tile, const Elements& elements) const {
    alignas(64) float of_rows[kScaleBlock], of_columns[kScaleBlock] = {};
    find_largest(tile, elements, of_rows, p_.along_columns.data != nullptr ? of_columns : nullptr);
    if (p_.shape == ScaleShape::kSquareBlock) {
      const float largest = *std::max_element(of_rows, of_rows + tile.rows);
      std::fill_n(of_rows, kScaleBlock, largest);
      std::fill_n(of_columns, kScaleBlock, largest);
    }
    convert(tile, elements, of_rows, of_columns);
  }

  // Stores the scale of a line in a block, unless another block stores it. Returns the reciprocal.
  float store_scale(const QuantizedMatrix& out, int64_t line, int64_t block, float largest) const {
    const float scale = scale_of<Out>(largest, p_.power_of_two);
    if (float* const to = p_.place_of_scale(out, line, block)) *to = scale;
    return 1 / scale;
  }

  // The bits of the numbers of FP8 for `scaled`. random(): the random words for them.
  template <class Random>
  CUDA_EXT_INLINE Words words_of(Vec<float> scaled, const Random& random) const {
    return p_.stochastic ? float8_words<Out>(scaled, random()) : float8_words<Out>(scaled);
  }

  // random (4, tile.columns) = the words of the columns' elements in rows i to i + 3 of the tile.
  void draw_columns(const Tile& tile, int64_t i, uint32_t (&random)[4][kScaleBlock]) const {
    constexpr int kWidth = kLanes<float>;
    for (int64_t j = 0; j < tile.columns; j += kWidth) {
      uint64_t counter[kWidth];
      uint32_t words[4][kWidth];
      for (int l = 0; l < kWidth; ++l)
        counter[l] = QuantizeParams::rng_counter(tile.column + j + l, p_.rows, tile.row + i);
      philox<kWidth>(p_.rng.seed, p_.rng.offset + p_.along_columns.rng_offset, counter, words);
      for (int r = 0; r < 4; ++r) std::memcpy(random[r] + j, words[r], sizeof words[r]);
    }
  }

  // of_rows (tile.rows,) and of_columns (tile.columns,): the largest magnitudes of what has one scale.
  void convert(const Tile& tile, const Elements& elements, const float* of_rows, const float* of_columns) const {
    if (p_.along_rows.data != nullptr)
      for (int64_t i = 0; i < tile.rows; ++i) {
        const int64_t row = tile.row + i;
        const float inverse = store_scale(p_.along_rows, row, tile.column / kScaleBlock, of_rows[i]);
        LineOfRandomWords random(p_, p_.along_rows, row, p_.columns);
        const In* const from = elements.row(i);
        uint8_t* const to = static_cast<uint8_t*>(p_.along_rows.data) + row * p_.along_rows.line_stride + tile.column;
        for_vectors<float>(tile.columns, [&](int64_t j, int64_t count) {
          const Vec<float> scaled = load_partial(from + j, count) * inverse;
          store_bytes(to + j, words_of(scaled, [&] { return random.from(tile.column + j); }), count);
        });
      }
    if (p_.along_columns.data == nullptr) return;
    alignas(64) float inverse[kScaleBlock];
    alignas(64) uint8_t rows[kScaleBlock][kScaleBlock];
    for (int64_t j = 0; j < tile.columns; ++j)
      inverse[j] = store_scale(p_.along_columns, tile.column + j, tile.row / kScaleBlock, of_columns[j]);
    alignas(64) uint32_t random[4][kScaleBlock];  // of four rows
    for (int64_t i = 0; i < tile.rows; ++i) {
      const In* const from = elements.row(i);
      if (p_.stochastic && i % 4 == 0) draw_columns(tile, i, random);
      for_vectors<float>(tile.columns, [&](int64_t j, int64_t count) {
        const Vec<float> scaled = load_partial(from + j, count) * load_partial(inverse + j, count);
        const auto random_words = [&] {
          Words words;
          std::memcpy(&words, random[i % 4] + j, sizeof words);
          return words;
        };
        store_bytes(rows[i] + j, words_of(scaled, random_words), count);
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
