// AMX: tiles of 16 rows of 16 words, and products of tiles of bfloat16 pairs (cpu/bfloat16_pair.h), summed in float32.
// Functions may use it after has_amx() (cpu/isa.h), on a thread that holds an AmxTiles.
//
// A product needs whole tiles: callers pad with zeros along k, where garbage would reach the result, and leave space
// along m and n, where it stays in rows and columns that nobody reads.
#pragma once

#include "cpu/bfloat16_pair.h"
#include "cpu/host.h"
#include "cpu/isa.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

constexpr int64_t kTileWords = 16;  // rows of a tile, and words in a row: floats, or pairs of bfloat16
constexpr int64_t whole_tiles(int64_t n) { return (n + kTileWords - 1) / kTileWords * kTileWords; }

// Whether variants of kernels for this type have products of tiles; they may use them if has_amx().
#if defined(CUDA_EXT_HAS_AMX_TILES)
template <class Storage>
constexpr bool kHasTiles = std::is_same_v<Storage, bfloat16_t>;
#else
template <class Storage>
constexpr bool kHasTiles = false;
#endif

// C (m, n) = A (m, k) @ B (k, n), or += it; m, n and k, in words, count up to whole tiles. Row-major, with distances
// between rows in words.
template <bool accumulate>
void amx_product(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                 int64_t ldc);

// Calls f(std::bool_constant): whether to use them.
template <class Storage, class F>
void with_tiles(F&& f) {
  if constexpr (kHasTiles<Storage>)
    if (has_amx()) return f(std::true_type{});
  f(std::false_type{});
}

#if !defined(CUDA_EXT_HAS_AMX_TILES)

struct AmxTiles {
  explicit AmxTiles(bool) {}
};

#else

#if defined(CUDA_EXT_BFLOAT16_PAIRS_MODEL)

// The tiles of the only thread of a test, on CPUs that have none. They must be configured before use, and start as NaN.
struct TilesModel {
  alignas(64) float words[8][kTileWords][kTileWords];
  bool configured = false;

  void configure(bool on) {
    if (configured == on) std::abort();
    configured = on;
    std::memset(words, 0xff, sizeof words);
  }
  auto& at(int tile) {
    if (!configured) std::abort();
    return words[tile];
  }
  void zero(int tile) { std::memset(at(tile), 0, sizeof words[tile]); }
  void load(int tile, const void* from, int64_t stride) {
    for (int64_t i = 0; i < kTileWords; ++i)
      std::memcpy(at(tile)[i], static_cast<const char*>(from) + i * stride, sizeof words[tile][i]);
  }
  void store(int tile, void* to, int64_t stride) {
    for (int64_t i = 0; i < kTileWords; ++i)
      std::memcpy(static_cast<char*>(to) + i * stride, at(tile)[i], sizeof words[tile][i]);
  }
  void multiply_add(int sum, int a, int b) {
    for (int64_t i = 0; i < kTileWords; ++i)
      for (int64_t k = 0; k < kTileWords; ++k) {
        const auto* const pairs_a = reinterpret_cast<const BFloat16Pair*>(at(a)[i]);
        const auto* const pairs_b = reinterpret_cast<const BFloat16Pair*>(at(b)[k]);
        float* const row = at(sum)[i];
        for (int64_t j = 0; j < kTileWords; j += kLanes<float>)
          cpu::CUDA_EXT_ISA::store(row + j,
                                   cpu::CUDA_EXT_ISA::multiply_add(cpu::CUDA_EXT_ISA::load(row + j), splat(pairs_a[k]),
                                                                   cpu::CUDA_EXT_ISA::load(pairs_b + j)));
      }
  }
};
inline TilesModel tiles_model;

#define CUDA_EXT_AMX __attribute__((noinline))
#define CUDA_EXT_TILE_ZERO(tile) tiles_model.zero(tile)
#define CUDA_EXT_TILE_LOAD(tile, from, stride) tiles_model.load(tile, from, stride)
#define CUDA_EXT_TILE_STORE(tile, to, stride) tiles_model.store(tile, to, stride)
#define CUDA_EXT_TILE_MULTIPLY_ADD(sum, a, b) tiles_model.multiply_add(sum, a, b)

#else

#define CUDA_EXT_AMX                                                                                               \
  __attribute__((target("amx-tile,amx-bf16,avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2"), \
                 noinline))
// Tiles are numbers 0 to 7, as literals.
#define CUDA_EXT_TILE_ZERO(tile) _tile_zero(tile)
#define CUDA_EXT_TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define CUDA_EXT_TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define CUDA_EXT_TILE_MULTIPLY_ADD(sum, a, b) _tile_dpbf16ps(sum, a, b)

#endif

// GCC does not know that a load of a tile reads memory, nor that a store writes it.
CUDA_EXT_INLINE void order_tiles_and_memory() { __asm__ volatile("" ::: "memory"); }

// The calling thread's tiles, all of 16 x 16 words, until the end of the scope.
class AmxTiles {
 public:
  explicit AmxTiles(bool used = true) : used_(used) {
    if (used_) configure();
  }
  ~AmxTiles() {
    if (used_) release();
  }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;

 private:
#if defined(CUDA_EXT_BFLOAT16_PAIRS_MODEL)
  static void configure() { tiles_model.configure(true); }
  static void release() { tiles_model.configure(false); }
#else
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  CUDA_EXT_AMX static void configure() {
    static const Config config;
    _tile_loadconfig(&config);
  }
  CUDA_EXT_AMX static void release() { _tile_release(); }
#endif

  bool used_;
};

// Two tiles of rows and two of columns, or one: tiles 0 to 3 are sums, 4 and 5 of a, 6 and 7 of b. Strides in bytes.
template <int row_tiles, int column_tiles, bool accumulate>
CUDA_EXT_AMX void multiply_tiles(int64_t k, const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                                 float* c, int64_t c_stride) {
  constexpr bool two_rows = row_tiles == 2, two_columns = column_tiles == 2;
  const float* const a1 = a + kTileWords * a_stride / 4;
  float* const c1 = c + kTileWords * c_stride / 4;
  order_tiles_and_memory();
  if constexpr (accumulate) {
    CUDA_EXT_TILE_LOAD(0, c, c_stride);
    if constexpr (two_columns) CUDA_EXT_TILE_LOAD(1, c + kTileWords, c_stride);
    if constexpr (two_rows) CUDA_EXT_TILE_LOAD(2, c1, c_stride);
    if constexpr (two_rows && two_columns) CUDA_EXT_TILE_LOAD(3, c1 + kTileWords, c_stride);
  } else {
    CUDA_EXT_TILE_ZERO(0);
    if constexpr (two_columns) CUDA_EXT_TILE_ZERO(1);
    if constexpr (two_rows) CUDA_EXT_TILE_ZERO(2);
    if constexpr (two_rows && two_columns) CUDA_EXT_TILE_ZERO(3);
  }
  for (int64_t step = 0; step < k; step += kTileWords, b += kTileWords * b_stride / 4) {
    CUDA_EXT_TILE_LOAD(6, b, b_stride);
    CUDA_EXT_TILE_LOAD(4, a + step, a_stride);
    CUDA_EXT_TILE_MULTIPLY_ADD(0, 4, 6);
    if constexpr (two_columns) {
      CUDA_EXT_TILE_LOAD(7, b + kTileWords, b_stride);
      CUDA_EXT_TILE_MULTIPLY_ADD(1, 4, 7);
    }
    if constexpr (two_rows) {
      CUDA_EXT_TILE_LOAD(5, a1 + step, a_stride);
      CUDA_EXT_TILE_MULTIPLY_ADD(2, 5, 6);
    }
    if constexpr (two_rows && two_columns) CUDA_EXT_TILE_MULTIPLY_ADD(3, 5, 7);
  }
  CUDA_EXT_TILE_STORE(0, c, c_stride);
  if constexpr (two_columns) CUDA_EXT_TILE_STORE(1, c + kTileWords, c_stride);
  if constexpr (two_rows) CUDA_EXT_TILE_STORE(2, c1, c_stride);
  if constexpr (two_rows && two_columns) CUDA_EXT_TILE_STORE(3, c1 + kTileWords, c_stride);
  order_tiles_and_memory();
}

template <bool accumulate>
void amx_product(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                 int64_t ldc) {
  const auto row_of_tiles = [&](auto row_tiles, int64_t i) {
    int64_t j = 0;
    for (; j + kTileWords < n; j += 2 * kTileWords)
      multiply_tiles<decltype(row_tiles)::value, 2, accumulate>(k, a + i * lda, lda * 4, b + j, ldb * 4,
                                                                c + i * ldc + j, ldc * 4);
    if (j < n)
      multiply_tiles<decltype(row_tiles)::value, 1, accumulate>(k, a + i * lda, lda * 4, b + j, ldb * 4,
                                                                c + i * ldc + j, ldc * 4);
  };
  int64_t i = 0;
  for (; i + kTileWords < m; i += 2 * kTileWords) row_of_tiles(std::integral_constant<int, 2>{}, i);
  if (i < m) row_of_tiles(std::integral_constant<int, 1>{}, i);
}

#endif

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
