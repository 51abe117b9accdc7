// Steps of attention for few queries in bfloat16 with AMX; otherwise as in few_queries.h, which calls it.
//   S^T (keys, rows) = K Q^T      K is read in place: its rows are those of a tile
//   out (rows, dim_v) += P V      P is rounded to bfloat16, as in the CUDA kernels; pairs of rows of V are interleaved
// The rows of a key head are padded with zeros to whole tiles of 16.
#pragma once

#include "attention/cpu/cache.h"
#include "cpu/amx.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

constexpr int64_t kAmxRows = 16, kAmxDepth = 32, kAmxTile = kAmxRows * kAmxDepth;  // bfloat16 elements of a tile

// s (2, 16, 16) = the products of two tiles of keys, rows `stride` elements apart, with 16 rows q (depth, tile).
CUDA_EXT_AMX inline void amx_scores(const bfloat16_t* k0, const bfloat16_t* k1, int64_t stride, const bfloat16_t* q,
                                    int64_t depth, float* s) {
  order_tiles_and_memory();
  CUDA_EXT_TILE_ZERO(0);
  CUDA_EXT_TILE_ZERO(1);
  for (int64_t d = 0; d < depth; ++d) {
    CUDA_EXT_TILE_LOAD(2, k0 + d * kAmxDepth, stride * 2);
    CUDA_EXT_TILE_LOAD(3, k1 + d * kAmxDepth, stride * 2);
    CUDA_EXT_TILE_LOAD(4, q + d * kAmxTile, 64);
    CUDA_EXT_TILE_MULTIPLY_ADD(0, 2, 4);
    CUDA_EXT_TILE_MULTIPLY_ADD(1, 3, 4);
  }
  CUDA_EXT_TILE_STORE(0, s, 64);
  CUDA_EXT_TILE_STORE(1, s + 256, 64);
  order_tiles_and_memory();
}

// out (16, columns), rows `pitch` apart, += p (keys / 32, tile) @ v (keys / 32, columns / 16, tile). columns: whole 32.
CUDA_EXT_AMX inline void amx_add_values(const bfloat16_t* p, const bfloat16_t* v, int64_t key_tiles, int64_t columns,
                                        float* out, int64_t pitch) {
  order_tiles_and_memory();
  for (int64_t c = 0; c < columns / 16; c += 2) {
    CUDA_EXT_TILE_LOAD(0, out + c * 16, pitch * 4);
    CUDA_EXT_TILE_LOAD(1, out + c * 16 + 16, pitch * 4);
    for (int64_t n = 0; n < key_tiles; ++n) {
      const bfloat16_t* const tile = v + (n * (columns / 16) + c) * kAmxTile;
      CUDA_EXT_TILE_LOAD(2, p + n * kAmxTile, 64);
      CUDA_EXT_TILE_LOAD(3, tile, 64);
      CUDA_EXT_TILE_LOAD(4, tile + kAmxTile, 64);
      CUDA_EXT_TILE_MULTIPLY_ADD(0, 2, 3);
      CUDA_EXT_TILE_MULTIPLY_ADD(1, 2, 4);
    }
    CUDA_EXT_TILE_STORE(0, out + c * 16, pitch * 4);
    CUDA_EXT_TILE_STORE(1, out + c * 16 + 16, pitch * 4);
  }
  order_tiles_and_memory();
}

// Columns [0, dim) of two rows, interleaved: pair `pair` of the tiles (dim / 16, tile) at `to`.
inline void interleave_rows(const bfloat16_t* first, const bfloat16_t* second, int64_t dim, int64_t pair,
                            bfloat16_t* to) {
  for (int64_t d = 0; d < dim; d += kLanes<float>, to += kAmxTile) {
    const Words low = first != nullptr ? (Words)load(first + d) >> 16 : Words{};
    const Words high = second != nullptr ? (Words)load(second + d) : Words{};
    store(reinterpret_cast<float*>(to + pair * kAmxDepth), (Vec<float>)(low | high));
  }
}

// Whether the products of a call can use AMX, and are worth it.
inline bool uses_amx(const AttentionParams& p, int64_t head_rows) {
  constexpr int64_t kLeastRows = 4;
  return p.dim % kAmxDepth == 0 && p.dim_v % kAmxDepth == 0 && p.dim > 0 && p.dim_v > 0 && head_rows >= kLeastRows &&
         has_amx();
}

// The buffers of one thread, for tiles of up to `rows` rows of each of `heads` key heads.
struct AmxScratch {
  bfloat16_t *q, *k, *v,
      *probs;            // (heads, rows / 16, dim / 32, tile); (2, 16, dim); (heads, keys, dim_v); (keys / 32, tile)
  float *scores, *step;  // (2, 16, 16); (heads, rows, dim_v)
  Scratch scratch;

  static constexpr int64_t kKeys = 128;
  static int64_t whole(int64_t rows) { return (rows + kAmxRows - 1) / kAmxRows * kAmxRows; }

  AmxScratch(const AttentionParams& p, int64_t heads, int64_t rows) : scratch(make(p, heads, whole(rows))) {}

 private:
  Scratch make(const AttentionParams& p, int64_t heads, int64_t rows) {
    float *q_words, *k_words, *v_words, *prob_words;
    Scratch made = allocate<float>({{&q_words, heads * rows * p.dim / 2},
                                    {&k_words, 2 * kAmxRows * p.dim / 2},
                                    {&v_words, heads * kKeys * p.dim_v / 2},
                                    {&prob_words, kKeys * kAmxRows / 2},
                                    {&scores, 2 * 256},
                                    {&step, heads * rows * p.dim_v}});
    q = reinterpret_cast<bfloat16_t*>(q_words);
    k = reinterpret_cast<bfloat16_t*>(k_words);
    v = reinterpret_cast<bfloat16_t*>(v_words);
    probs = reinterpret_cast<bfloat16_t*>(prob_words);
    return made;
  }
};

constexpr int64_t kRowPointers = AmxScratch::kKeys;

// (count, dim) queries of each head of a tile -> (heads, rows / 16, dim / 32) tiles of pairs of elements x rows.
template <class Tile>
void pack_queries(const Tile& tile, bfloat16_t* q) {
  const AttentionParams& p = tile.p;
  const int64_t rows = tile.head_rows();
  for (int64_t h = 0; h < tile.kv_heads; ++h)
    for (int64_t r = 0; r < rows; r += kAmxRows)
      for (int64_t d = 0; d < p.dim; d += kAmxDepth, q += kAmxTile) {
        Vec<float> words[16] = {};  // pairs of elements
        for (int64_t i = 0; i < std::min(kAmxRows, rows - r); ++i) {
          const int64_t row = h * rows + r + i;
          const bfloat16_t* const from =
              rows_of<const bfloat16_t>(p.query, tile.batch, tile.s.q_begin, tile.head(row))[tile.query(row)] + d;
          words[i] = load(reinterpret_cast<const float*>(from));
        }
        transpose<float>(words);
        for (int i = 0; i < 16; ++i) store(reinterpret_cast<float*>(q + i * kAmxDepth), words[i]);
      }
}

// logits (count, 16), rows pitch apart, = factor * the transpose of s (16, 16).
template <int64_t pitch>
void store_logits(const float* s, int64_t count, float factor, float* logits) {
  Vec<float> square[16];
  for (int i = 0; i < 16; ++i) square[i] = load(s + i * 16);
  transpose<float>(square);
  for (int64_t r = 0; r < count; ++r) store(logits + r * pitch, square[r] * factor);
}

// probs (count, keys), rows pitch apart, padded with zeros to a whole vector -> (key_tiles) tiles of rows x keys.
template <int64_t pitch>
void round_probs(const float* probs, int64_t count, int64_t keys, int64_t key_tiles, bfloat16_t* to) {
  for (int64_t n = 0; n < key_tiles; ++n)
    for (int64_t r = 0; r < kAmxRows; ++r) {
      const float* const from = probs + r * pitch + n * kAmxDepth;
      const int64_t left = r < count ? keys - n * kAmxDepth : 0;
      store_as_pairs(reinterpret_cast<float*>(to + n * kAmxTile + r * kAmxDepth), left > 0 ? load(from) : Vec<float>{},
                     left > 16 ? load(from + 16) : Vec<float>{});
    }
}

// Two tiles of 16 keys, rows `stride` elements apart.
struct TwoTiles {
  const bfloat16_t* of[2];
  int64_t stride;
};

// Calls f(j, h, tiles) for every 32 of the keys [j_begin, j_begin + keys), j relative to j_begin, alternating between
// the key heads of a tile. Keys that are not 16 equidistant rows are copied to `copies` (2, 16, dim), with zeros after
// them.
template <class Tile, class F>
void for_tiles_of_keys(const Tile& tile, const HeadsView& view, int64_t dim, int64_t j_begin, int64_t keys,
                       bfloat16_t* copies, F&& f) {
  const bfloat16_t* rows[kRowPointers];
  find_rows(tile.p, view, tile.s, tile.batch, tile.kv_head, j_begin, keys, rows);
  for (int64_t j = 0; j < keys; j += 2 * kAmxRows)
    for (int64_t h = 0; h < tile.kv_heads; ++h) {
      const auto is_whole = [&](int64_t first) {
        for (int64_t i = 1; i < kAmxRows; ++i)
          if (first + i >= keys || rows[first + i] - rows[first] != i * view.seq_stride) return false;
        return true;
      };
      for (int64_t i = 0; i < std::min<int64_t>(2 * kAmxRows, keys - j); ++i)
        prefetch_row(rows[std::min(j + i + 2 * kAmxRows, keys - 1)] + h * view.head_stride, dim);
      TwoTiles tiles{{}, view.seq_stride};
      if (is_whole(j) && is_whole(j + kAmxRows)) {
        for (int n = 0; n < 2; ++n) tiles.of[n] = rows[j + n * kAmxRows] + h * view.head_stride;
      } else {
        tiles.stride = dim;
        for (int64_t i = 0; i < 2 * kAmxRows; ++i) {
          bfloat16_t* const to = copies + i * dim;
          if (j + i < keys)
            std::copy_n(rows[j + i] + h * view.head_stride, dim, to);
          else
            std::fill_n(to, dim, bfloat16_t{});
        }
        for (int n = 0; n < 2; ++n) tiles.of[n] = copies + n * kAmxRows * dim;
      }
      f(j, h, tiles);
    }
}

// Values [j_begin, j_begin + keys) -> (heads, keys / 32, dim_v / 16) tiles of pairs of keys x columns; zeros after
// them.
template <class Tile>
void interleave_values(const Tile& tile, int64_t j_begin, int64_t keys, bfloat16_t* v) {
  const AttentionParams& p = tile.p;
  const bfloat16_t* rows[kRowPointers];
  find_rows(p, p.value, tile.s, tile.batch, tile.kv_head, j_begin, keys, rows);
  for (int64_t j = 0; j < (keys + kAmxDepth - 1) / kAmxDepth * kAmxDepth; j += 2)
    for (int64_t h = 0; h < tile.kv_heads; ++h) {
      bfloat16_t* const to = v + h * AmxScratch::kKeys * p.dim_v + j / kAmxDepth * kAmxDepth * p.dim_v;
      const auto row = [&](int64_t i) { return i < keys ? rows[i] + h * p.value.head_stride : nullptr; };
      for (int64_t i = j; i < j + 2; ++i)
        prefetch_row(rows[std::min(i + kRowsAhead, keys - 1)] + h * p.value.head_stride, p.dim_v);
      interleave_rows(row(j), row(j + 1), p.dim_v, j % kAmxDepth / 2, to);
    }
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
