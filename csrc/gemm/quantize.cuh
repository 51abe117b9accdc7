// Conversion to FP8 with scales: a matrix and its transpose, from one read if scales are of blocks, else from two.
//
// Problem        QuantizeParams in quantize.h.
// Elements       Those of the input, or of an activation of it, perhaps times a gate's other half, as they are loaded.
// Rounding       To nearest, or by random words: four adjacent elements of a line share a counter of Philox.
// Passes         Scales of blocks depend on one tile: one kernel computes them and converts. Scales of whole lines, or
//                of all: a first kernel reduces the magnitudes of each tile into `maxima`, a second one converts.
// Tile           128 x 128 elements. A thread has 8 rows and 8 columns: a half-warp loads 16 vectors of a row, which
//                are whole sectors, and all 8 rows are in flight at once.
// Largest        of rows by shuffles within a half-warp; of columns within a warp, then through shared memory.
// Transpose      A thread packs the 8 rows of a column to 8 bytes and stores them in shared memory; the block reads
//                lines of 128 bytes back, 16 a thread.
// Barriers       sync_threads: before the scales of the tile, before the conversion, before the transpose is read.
// Shared memory  Storage: 22 KB.
#pragma once

#include "arch/math.cuh"
#include "arch/memory.cuh"
#include "arch/random.cuh"
#include "arch/warp.cuh"
#include "gemm/activation.cuh"
#include "gemm/quantize.h"

namespace cuda_ext::quantize {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / arch::kWarpSize;
constexpr int kTile = int(kScaleBlock);
constexpr int kOwn = 8;  // rows and columns of a thread
static_assert(kThreads * kOwn * kOwn == kTile * kTile);
constexpr uint32_t kInfinityBits = 0x7f800000;

enum class Rounding : uint8_t { kNearest, kStochastic };

struct Storage {
  alignas(16) uint8_t transposed[kTile][kTile];  // (columns, rows), in chunks of 8 bytes, swizzled
  float columns_of_warps[kWarps][kTile];         // the largest magnitudes
  float rows[kTile];
  float warps[kWarps];
  float inverse_rows[kTile];  // of the scales
  float inverse_columns[kTile];
};

// The largest magnitudes of rows and columns, as the bits of floats, which are ordered as the floats. For kAll, only
// the first of `rows`.
struct Maxima {
  uint32_t* rows = nullptr;
  uint32_t* columns = nullptr;
};

// The part of the tile that a thread has.
template <class In, bool applies_function = false>
struct ThreadTile {
  static constexpr int kVector = 16 / sizeof(In);  // adjacent columns
  static constexpr int kVectors = kOwn / kVector;  // they are kTile / kVectors columns apart
  static constexpr int kHalfWarp = arch::kWarpSize / 2;
  int warp, row, lane;  // the first row; the lane of the half-warp

  DEVICE ThreadTile() {
    const int thread = arch::thread_index();
    warp = thread / arch::kWarpSize;
    row = thread / kHalfWarp * kOwn;
    lane = thread % kHalfWarp;
  }
  // The column of element j of a row.
  DEVICE int column(int j) const { return j / kVector * (kTile / kVectors) + lane * kVector + j % kVector; }
  // Where a thread stores 8 rows of a column in a line of the transpose: the lanes of a half-warp in all banks.
  static DEVICE int chunk_of(int column, int chunk) { return chunk ^ (column / kVector % kHalfWarp); }

  // Loads the elements of the tile that begins at (first_row, first_column). Beyond the last row and vector they are
  // those of the last one, which changes no maximum, so that all loads are in flight before the first is used.
  DEVICE void load(const QuantizeParams& params, int64_t first_row, int64_t first_column,
                   float (&x)[kOwn][kOwn]) const {
    const In* const from =
        static_cast<const In*>(params.input.data) + first_row * params.input.row_stride + first_column;
    const auto last_of_tile = [](int64_t left, int step) {
      return left < kTile ? (int(left) - 1) / step * step : kTile;
    };
    const int last_row = last_of_tile(params.rows - first_row, 1);
    const int last_vector = last_of_tile(params.columns - first_column, kVector);
    const auto vector = [&](const In* part, int i, int v) {
      const int y = row + i < last_row ? row + i : last_row, first = column(v * kVector);
      return arch::load_global<arch::Words4>(part + y * params.input.row_stride +
                                             (first < last_vector ? first : last_vector));
    };
    if constexpr (applies_function) {
#pragma unroll
      for (int i = 0; i < kOwn; i += kFunctionRows) load_function(params.function, from, i, vector, x);
    } else {
      arch::Words4 words[kOwn][kVectors];
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
#pragma unroll
        for (int v = 0; v < kVectors; ++v) words[i][v] = vector(from, i, v);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) unpack(words[i], x[i]);
    }
  }

  // Stores the largest magnitudes of the tile's rows, columns (of each warp) and warps.
  DEVICE void store_largest(const float (&x)[kOwn][kOwn], Storage& shared) const {
    // As the bits of floats, which are ordered as the floats: fewer instructions.
    const auto larger = [](uint32_t a, uint32_t b) { return a > b ? a : b; };
    uint32_t of_columns[kOwn] = {};
    float of_warp = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      uint32_t of_row = 0;
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        const uint32_t magnitude = arch::float_bits(x[i][j]) & 0x7fffffff;
        const uint32_t finite = magnitude < kInfinityBits ? magnitude : 0;
        of_row = larger(of_row, finite);
        of_columns[j] = larger(of_columns[j], finite);
      }
      const float largest = arch::max_over_lanes<kHalfWarp>(arch::bits_float(of_row));
      of_warp = largest > of_warp ? largest : of_warp;
      if (lane == i) arch::store_shared(arch::shared_address(&shared.rows[row + i]), largest);
    }
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const uint32_t largest = larger(of_columns[j], arch::shuffle_xor(of_columns[j], kHalfWarp));
      if (row / kOwn % 2 == 0)
        arch::store_shared(arch::shared_address(&shared.columns_of_warps[warp][column(j)]), arch::bits_float(largest));
    }
    of_warp = arch::max_over_lanes(of_warp);
    if (arch::lane_index() == 0) arch::store_shared(arch::shared_address(&shared.warps[warp]), of_warp);
  }

 private:
  static DEVICE void unpack(const arch::Words4 (&words)[kVectors], float (&x)[kOwn]) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float part[kVector];
      arch::unpack<In>(words[v], part);
#pragma unroll
      for (int e = 0; e < kVector; ++e) x[v * kVector + e] = part[e];
    }
  }

  // As many rows at a time as have registers for gate and up.
  static constexpr int kFunctionRows = sizeof(In) == 4 ? kOwn / 2 : kOwn;

  // kFunctionRows rows, from `first` on, of the function of what vector(begin of a part of the tile, row, vector)
  // loads.
  template <class Vector>
  static DEVICE void load_function(const QuantizedFunction& function, const In* from, int first, const Vector& vector,
                                   float (&x)[kOwn][kOwn]) {
    constexpr int kRows = kFunctionRows;
    arch::Words4 words[kRows][kVectors], of_up[kRows][kVectors] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int v = 0; v < kVectors; ++v) words[i][v] = vector(from, first + i, v);
    if (function.gated) {
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int v = 0; v < kVectors; ++v) of_up[i][v] = vector(from + function.up_column, first + i, v);
    }
    // Row by row, so that x takes the registers of the words.
    epilogue::with_activation(function.activation, [&](auto f) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float gate[kOwn], up[kOwn];
        unpack(words[i], gate);
        unpack(of_up[i], up);
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
          const float h = f.value(gate[j]) * (function.gated ? up[j] : 1.0f);
          x[first + i][j] = arch::to_float(arch::from_float<In>(h));
        }
      }
    });
  }
};

DEVICE float read(const float& shared) { return arch::load_shared<float>(arch::shared_address(&shared)); }
DEVICE float largest_of_warps(const float* first, int stride) {
  float largest = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float other = read(first[w * stride]);
    largest = other > largest ? other : largest;
  }
  return largest;
}

// A row or a column of the tile, of which a thread computes the scale: threads of the first half have columns.
struct ThreadLine {
  bool is_row;
  int index;
  int64_t line;   // in the matrix, or its transpose
  int64_t block;  // of elements along the line
  bool exists;

  DEVICE ThreadLine(const QuantizeParams& params, int64_t first_row, int64_t first_column) {
    const int thread = arch::thread_index();
    is_row = thread >= kTile;
    index = thread % kTile;
    line = (is_row ? first_row : first_column) + index;
    block = (is_row ? first_column : first_row) / kTile;
    exists = line < (is_row ? params.rows : params.columns);
  }
  DEVICE float largest_of_tile(const Storage& shared) const {
    return is_row ? read(shared.rows[index]) : largest_of_warps(&shared.columns_of_warps[0][index], kTile);
  }
};

// Grid: tiles. maxima.rows (rows,), maxima.columns (columns,), or rows (1,) for kAll; zeroed.
template <class In, bool applies_function>
GLOBAL(kThreads, 2)
largest_magnitudes(GRID_CONSTANT QuantizeParams params, int column_tiles, Maxima maxima) {
  SHARED_STORAGE(Storage, shared);
  const int64_t first_row = int64_t(arch::block_x() / column_tiles) * kTile;
  const int64_t first_column = int64_t(arch::block_x() % column_tiles) * kTile;
  const ThreadTile<In, applies_function> mine;
  float x[kOwn][kOwn];
  mine.load(params, first_row, first_column, x);
  mine.store_largest(x, shared);
  arch::sync_threads();
  if (params.shape == ScaleShape::kAll) {
    if (arch::thread_index() == 0) arch::reduce_max(maxima.rows, arch::float_bits(largest_of_warps(shared.warps, 1)));
    return;
  }
  const ThreadLine line(params, first_row, first_column);
  uint32_t* const largest = line.is_row ? maxima.rows : maxima.columns;
  if (largest != nullptr && line.exists)
    arch::reduce_max(largest + line.line, arch::float_bits(line.largest_of_tile(shared)));
}

// Computes the scales of the tile's rows and columns, and stores those that no other tile stores.
template <class Out>
DEVICE void find_scales(const QuantizeParams& params, const Maxima& maxima, int64_t first_row, int64_t first_column,
                        Storage& shared) {
  const ThreadLine line(params, first_row, first_column);
  const QuantizedMatrix& out = line.is_row ? params.along_rows : params.along_columns;
  const bool is_wanted = out.data != nullptr && line.exists;
  float largest = 0;
  if (is_wanted) {
    if (params.shape == ScaleShape::kSquareBlock)
      largest = largest_of_warps(shared.warps, 1);
    else if (params.shape == ScaleShape::kLineBlock)
      largest = line.largest_of_tile(shared);
    else
      largest = arch::bits_float(arch::load_global<uint32_t>(params.shape == ScaleShape::kAll ? maxima.rows
                                                             : line.is_row ? maxima.rows + line.line
                                                                           : maxima.columns + line.line));
  }
  const float scale = scale_of<Out>(largest, params.power_of_two);
  float& inverse = line.is_row ? shared.inverse_rows[line.index] : shared.inverse_columns[line.index];
  arch::store_shared(arch::shared_address(&inverse), 1.0f / scale);
  float* const to = is_wanted ? params.place_of_scale(out, line.line, line.block) : nullptr;
  if (to != nullptr) arch::store_global(to, scale);
}

// The bits of one of the two numbers of the format around x, by QuantizeParams::stochastic: the random bits below the
// last place of the format are added, and what is below it then is cut.
template <class Out>
DEVICE uint32_t rounded_by(uint32_t random, float x) {
  using Format = Float8Format<Out>;
  constexpr int kDropped = 23 - Format::kMantissa, kFraction = 28;
  constexpr uint32_t kRebias = uint32_t(127 - Format::kBias) << 23;
  constexpr float kToFixedPoint = 0x1p28f * (1 << Format::kMantissa) / Format::kLeastNormal;
  const uint32_t bits = arch::float_bits(x), magnitude = bits & 0x7fffffff;
  uint32_t rounded;
  if (arch::bits_float(magnitude) < Format::kLeastNormal)
    rounded = (uint32_t(arch::bits_float(magnitude) * kToFixedPoint) + (random >> (32 - kFraction))) >> kFraction;
  else
    rounded = (magnitude - kRebias + (random >> (32 - kDropped))) >> kDropped;
  if (rounded > Format::kLargest) rounded = Format::kLargest;
  return (bits >> 24 & 0x80) | (magnitude > kInfinityBits ? kFloat8Nan : rounded);
}

// Rounds adjacent elements of a line, from a multiple of 4 on.
template <class Out, Rounding rounding>
struct LineRounding {
  arch::RngState rng;
  int64_t elements;  // of a line

  DEVICE LineRounding(const QuantizeParams& params, const QuantizedMatrix& out, int64_t elements) : elements(elements) {
    if constexpr (rounding == Rounding::kStochastic) {
      rng = arch::load_rng(params.rng);
      rng.offset += out.rng_offset;
    }
  }
  template <int count>
  DEVICE arch::Words<count / 4> words_of(const float (&x)[count], int64_t line, int64_t first) const {
    if constexpr (rounding == Rounding::kNearest) {
      return arch::words_of<Out>(x);
    } else {
      arch::Words<count / 4> words = {};
#pragma unroll
      for (int i = 0; i < count; i += 4) {
        uint32_t random[4];
        arch::philox(rng, QuantizeParams::rng_counter(line, elements, first + i), random);
#pragma unroll
        for (int e = 0; e < 4; ++e) words.data[i / 4] |= rounded_by<Out>(random[e], x[i + e]) << 8 * e;
      }
      return words;
    }
  }
};

// Stores the rows of this thread in FP8.
template <class Out, Rounding rounding, class Mine>
DEVICE void store_rows(const QuantizeParams& params, const Mine& mine, int64_t first_row, int64_t first_column,
                       const Storage& shared, const float (&x)[kOwn][kOwn]) {
  constexpr int kVector = Mine::kVector;
  const LineRounding<Out, rounding> of_rows(params, params.along_rows, params.columns);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int64_t row = first_row + mine.row + i;
    const float inverse = read(shared.inverse_rows[mine.row + i]);
    uint8_t* const to = static_cast<uint8_t*>(params.along_rows.data) + row * params.along_rows.line_stride;
#pragma unroll
    for (int v = 0; v < Mine::kVectors; ++v) {
      const int64_t column = first_column + mine.column(v * kVector);
      float scaled[kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e) scaled[e] = x[i][v * kVector + e] * inverse;
      const auto words = of_rows.words_of(scaled, row, column);
      if (row < params.rows && column < params.columns) arch::store_global(to + column, words);
    }
  }
}

// Stores the columns of the tile in FP8, as rows of the transpose.
template <class Out, Rounding rounding, class Mine>
DEVICE void store_columns(const QuantizeParams& params, const Mine& mine, int64_t first_row, int64_t first_column,
                          Storage& shared, const float (&x)[kOwn][kOwn]) {
  const LineRounding<Out, rounding> of_columns(params, params.along_columns, params.rows);
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const int column = mine.column(j);
    const float inverse = read(shared.inverse_columns[column]);
    float scaled[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) scaled[i] = x[i][j] * inverse;
    const int chunk = Mine::chunk_of(column, mine.row / kOwn);
    arch::store_shared(arch::shared_address(&shared.transposed[column][chunk * kOwn]),
                       of_columns.words_of(scaled, first_column + column, first_row + mine.row));
  }
  arch::sync_threads();
  constexpr int kChunks = kTile / 16;  // of a line
#pragma unroll
  for (int i = 0; i < kTile * kChunks / kThreads; ++i) {
    const int index = i * kThreads + arch::thread_index();
    const int line = index / kChunks, first_chunk = index % kChunks * 2;
    // Two chunks that are next to each other, perhaps in the other order.
    const int chunk = Mine::chunk_of(line, first_chunk);
    const arch::SharedAddress from = arch::shared_address(&shared.transposed[line][(chunk & ~1) * kOwn]);
    const auto two = arch::load_shared<arch::Words4>(from);
    const auto ordered = chunk % 2 == 0 ? two : arch::Words4{{two.data[2], two.data[3], two.data[0], two.data[1]}};
    const int64_t row = first_row + first_chunk * kOwn, column = first_column + line;
    uint8_t* const to = static_cast<uint8_t*>(params.along_columns.data) + column * params.along_columns.line_stride;
    if (row < params.rows && column < params.columns) arch::store_global(to + row, ordered);
  }
}

// Grid: tiles. `maxima` as above, of the whole matrix; not read if scales are of blocks.
template <class In, class Out, Rounding rounding, bool applies_function>
GLOBAL(kThreads, 2)
quantize_tile(GRID_CONSTANT QuantizeParams params, int column_tiles, Maxima maxima) {
  SHARED_STORAGE(Storage, shared);
  const int64_t first_row = int64_t(arch::block_x() / column_tiles) * kTile;
  const int64_t first_column = int64_t(arch::block_x() % column_tiles) * kTile;
  const ThreadTile<In, applies_function> mine;
  float x[kOwn][kOwn];
  mine.load(params, first_row, first_column, x);
  if (!params.has_long_blocks()) {
    mine.store_largest(x, shared);
    arch::sync_threads();
  }
  find_scales<Out>(params, maxima, first_row, first_column, shared);
  arch::sync_threads();
  if (params.along_rows.data != nullptr) store_rows<Out, rounding>(params, mine, first_row, first_column, shared, x);
  if (params.along_columns.data != nullptr)
    store_columns<Out, rounding>(params, mine, first_row, first_column, shared, x);
}

}  // namespace cuda_ext::quantize
