// The tile sizes of attention on mma.sync, with reasons.
#pragma once

#include "attention/head_dims.h"

namespace cuda_ext::attention::sm80 {

struct KeysOfTile {
  int fast;
  int small;         // if min_blocks with `fast` do not fit in the shared memory of an SM
  int with_options;  // options need registers, too
};

// A tile shape and everything derived from it.
struct ForwardConfig {
  int dim;      // of query and key, padded with zeros
  int dim_v;    // of value and output
  int block_m;  // rows: queries of a head, or of all heads that share a key head
  KeysOfTile block_n;
  int warps;       // each owns block_m / warps rows, so that softmax stays within a warp
  int min_blocks;  // per SM

  constexpr int threads() const { return 32 * warps; }

  // Keys of a tile on an SM with `sm_bytes` of shared memory.
  constexpr int keys(bool with_options, int sm_bytes) const {
    constexpr int kOther = 4 << 10;  // reserved by the driver, sums of probs, the task
    if (with_options) return block_n.with_options;
    const int block_bytes = kOther + 2 * (block_m * dim + block_n.fast * (dim + dim_v));
    return min_blocks * block_bytes <= sm_bytes ? block_n.fast : block_n.small;
  }
};

// By head dims. All except `fast` fit in the 99 KiB of shared memory of sm_86 and sm_89: block_m
// queries, block_n keys and values. With 32 rows per warp, each fragment of keys and values that is read serves two
// products.
constexpr ForwardConfig kForwardTiles[] = {
    // 50 or 32 KiB. Logits of 32 rows take 128 of 255 registers, their output 64.
    {.dim = 64, .dim_v = 64, .block_m = 128, .block_n = {128, 64, 64}, .warps = 4, .min_blocks = 2},
    // 48 KiB, or 36. Logits take 64 of 255 registers, the output 96.
    {.dim = 96, .dim_v = 96, .block_m = 128, .block_n = {64, 32, 32}, .warps = 4, .min_blocks = 2},
    // 66 or 48 KiB. Two blocks overlap each other's softmax.
    {.dim = 128, .dim_v = 128, .block_m = 128, .block_n = {64, 32, 32}, .warps = 4, .min_blocks = 2},
    // 88 KiB, for one block, so it has 8 warps of 16 rows.
    {.dim = 192, .dim_v = 128, .block_m = 128, .block_n = {64, 64, 64}, .warps = 8, .min_blocks = 1},
    // 128 or 96 KiB, for one block of 8 warps. The output of 16 rows takes 128 registers.
    {.dim = 256, .dim_v = 256, .block_m = 128, .block_n = {64, 32, 32}, .warps = 8, .min_blocks = 1},
};

// Of float32. Warps have 16 rows: what rounding drops of an operand takes as many registers as the operand.
constexpr ForwardConfig kFloat32ForwardTiles[] = {
    // 48 KiB
    {.dim = 64, .dim_v = 64, .block_m = 64, .block_n = {64, 64, 64}, .warps = 4, .min_blocks = 2},
    // 64 KiB
    {.dim = 128, .dim_v = 128, .block_m = 64, .block_n = {32, 32, 32}, .warps = 4, .min_blocks = 2},
    // 96 KiB
    {.dim = 256, .dim_v = 256, .block_m = 64, .block_n = {16, 16, 16}, .warps = 4, .min_blocks = 1},
};
template <class T>
constexpr const auto& kForwardTilesOf = kForwardTiles;
template <>
inline constexpr const auto& kForwardTilesOf<float> = kFloat32ForwardTiles;

// A tile shape of backward, where a block owns keys and loops over queries.
struct BackwardConfig {
  int dim;
  int dim_v;
  int block_m;          // queries
  int block_n;          // keys
  int key_warps;        // warps along the keys of scores, dK and dV; if fewer than `warps`, several share keys
  int query_warps = 2;  // warps along the queries of dQ
  int warps = 4;
  int min_blocks = 2;

  static constexpr bool separate = false;  // one kernel computes all gradients
  constexpr int sums_dim() const { return dim; }
  constexpr int threads() const { return 32 * warps; }
};

// The configs for head dims up to these; `small` fits in the 99 KiB of shared memory of sm_86 and sm_89.
struct BackwardTile {
  struct Shape {
    int block_m, block_n, key_warps, query_warps = 2, warps = 4, min_blocks = 2;
  };
  int dim, dim_v;
  Shape small, large = small;

  constexpr bool uses_large(int sm_bytes) const { return sm_bytes >= 128 << 10; }
  constexpr BackwardConfig config(bool is_large) const {
    const Shape& shape = is_large ? large : small;
    return {dim,         dim_v,           shape.block_m, shape.block_n, shape.key_warps, shape.query_warps,
            shape.warps, shape.min_blocks};
  }
};

// By head dims: block_n keys and values, block_m queries and output gradients, and a tile of dS. dK and dV of a warp's
// keys are in registers during the whole loop.
constexpr BackwardTile kBackwardTiles[] = {
    // 49 KiB. With 32 keys per warp, each fragment of the queries serves two products; dK and dV take 128 registers.
    {.dim = 64, .dim_v = 64, .small = {.block_m = 32, .block_n = 128, .key_warps = 4}},
    // 56 KiB. dK and dV of 16 keys take 96 registers, P and dS of 64 queries 64.
    {.dim = 96, .dim_v = 96, .small = {.block_m = 64, .block_n = 64, .key_warps = 4}},
    // 73 KiB. dK and dV of 16 keys take 128 registers, P and dS of 64 queries 64.
    {.dim = 128, .dim_v = 128, .small = {.block_m = 64, .block_n = 64, .key_warps = 4}},
    // 64 KiB. dK and dV of 16 keys take 160 registers.
    {.dim = 192, .dim_v = 128, .small = {.block_m = 32, .block_n = 64, .key_warps = 4}},
    // 68 KiB, or 104 for one block of 8 warps, which adds to dQ half as often. dK and dV of 16 keys would take 256
    // registers, so two warps share them, each with half of the head dims.
    {.dim = 256,
     .dim_v = 256,
     .small = {.block_m = 32, .block_n = 32, .key_warps = 2},
     .large = {.block_m = 32, .block_n = 64, .key_warps = 4, .warps = 8, .min_blocks = 1}},
};

// Of float32.
constexpr BackwardTile kFloat32BackwardTiles[] = {
    // 56 KiB. dK and dV of 16 keys take 64 registers.
    {.dim = 64, .dim_v = 64, .small = {.block_m = 32, .block_n = 64, .key_warps = 4}},
    // 72 KiB. dK and dV of 16 keys would take 128 registers, so two warps share them.
    {.dim = 128, .dim_v = 128, .small = {.block_m = 32, .block_n = 32, .key_warps = 2}},
};
template <class T>
constexpr const auto& kBackwardTilesOf = kBackwardTiles;
template <>
inline constexpr const auto& kBackwardTilesOf<float> = kFloat32BackwardTiles;

// A tile shape of the kernel that reads a cache, and everything derived from it.
struct CacheConfig {
  int dim;         // of query and key, padded with zeros
  int dim_v;       // of value and output
  int block_m;     // rows: queries x heads of a group; 16 for each warp
  int block_n;     // keys
  int key_warps;   // warps that share rows, each with block_n / key_warps keys
  int min_blocks;  // per SM

  constexpr int warps() const { return block_m / 16 * key_warps; }
  constexpr int threads() const { return 32 * warps(); }
};

// By head dims: for few rows, as in decoding, and for more of them.
struct CacheTile {
  struct Shape {
    int block_m, block_n, key_warps, min_blocks;
  };
  int dim, dim_v;
  Shape few, many;

  constexpr CacheConfig config(bool has_many) const {
    const Shape& shape = has_many ? many : few;
    return {dim, dim_v, shape.block_m, shape.block_n, shape.key_warps, shape.min_blocks};
  }
};
constexpr CacheTile kCacheTiles[] = {
    // 34 and 40 KiB
    {.dim = 64,
     .dim_v = 64,
     .few = {.block_m = 16, .block_n = 64, .key_warps = 4, .min_blocks = 2},
     .many = {.block_m = 64, .block_n = 64, .key_warps = 1, .min_blocks = 2}},
    // 68 and 80 KiB
    {.dim = 128,
     .dim_v = 128,
     .few = {.block_m = 16, .block_n = 64, .key_warps = 4, .min_blocks = 2},
     .many = {.block_m = 64, .block_n = 64, .key_warps = 1, .min_blocks = 2}},
    // 72 and 96 KiB
    {.dim = 256,
     .dim_v = 256,
     .few = {.block_m = 16, .block_n = 32, .key_warps = 2, .min_blocks = 2},
     .many = {.block_m = 64, .block_n = 32, .key_warps = 1, .min_blocks = 1}},
};

// Of float32.
constexpr CacheTile kFloat32CacheTiles[] = {
    // 68 and 48 KiB
    {.dim = 64,
     .dim_v = 64,
     .few = {.block_m = 16, .block_n = 64, .key_warps = 4, .min_blocks = 2},
     .many = {.block_m = 64, .block_n = 32, .key_warps = 1, .min_blocks = 2}},
    // 72 and 96 KiB
    {.dim = 128,
     .dim_v = 128,
     .few = {.block_m = 16, .block_n = 32, .key_warps = 2, .min_blocks = 2},
     .many = {.block_m = 64, .block_n = 32, .key_warps = 1, .min_blocks = 1}},
    // 96 KiB, which leaves no room for a larger tile of many rows.
    {.dim = 256,
     .dim_v = 256,
     .few = {.block_m = 32, .block_n = 16, .key_warps = 1, .min_blocks = 1},
     .many = {.block_m = 32, .block_n = 16, .key_warps = 1, .min_blocks = 1}},
};
template <class T>
constexpr const auto& kCacheTilesOf = kCacheTiles;
template <>
inline constexpr const auto& kCacheTilesOf<float> = kFloat32CacheTiles;

}  // namespace cuda_ext::attention::sm80
