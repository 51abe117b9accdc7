// The tile sizes of attention on mma.sync, with reasons.
#pragma once

#include "attention/head_dims.h"

namespace cuda_ext::attention::sm80 {

struct KeysOfTile {
  bool operator==(const KeysOfTile&) const = default;
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
  bool operator==(const ForwardConfig&) const = default;

  // Keys of a tile on an SM with `sm_bytes` of shared memory.
  constexpr int keys(bool with_options, int sm_bytes) const {
    constexpr int kOther = 4 << 10;  // reserved by the driver, sums of probs, the task
    if (with_options) return block_n.with_options;
    const int block_bytes = kOther + 2 * (block_m * dim + block_n.fast * (dim + dim_v));
    return min_blocks * block_bytes <= sm_bytes ? block_n.fast : block_n.small;
  }
};

// By head dims. All except `fast` fit in the 99 KiB of shared memory of sm_86, sm_89 and sm_120: block_m
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
// Those that replace them in 64 KiB, where the others fit.
constexpr ForwardConfig kSmallForwardTiles[] = {
    // 44 KiB
    {.dim = 192, .dim_v = 128, .block_m = 64, .block_n = {32, 32, 32}, .warps = 4, .min_blocks = 1},
    // 48 KiB
    {.dim = 256, .dim_v = 256, .block_m = 64, .block_n = {16, 16, 16}, .warps = 4, .min_blocks = 1},
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
// In 64 KiB, or else. float32 has kernels there for head dims up to 64 only (head_dims.h).
template <class T>
constexpr ForwardConfig forward_tile(int dim, bool small) {
  if (sizeof(T) == 4) return tile_of(kFloat32ForwardTiles, dim);
  if (small && dim > 128) return tile_of(kSmallForwardTiles, dim);
  return tile_of(kForwardTiles, dim);
}
// Whether code for a compute capability needs the kernel of a tile; 0: not known. sm_75 has 64 KiB. Code for sm_80 also
// runs on devices with less shared memory than an A100, so that it needs all others.
template <class T>
constexpr bool is_needed(const ForwardConfig& config, bool with_options, int block_n, int compute_capability) {
  const bool small = compute_capability == 75;
  if (sizeof(T) == 4) return !small || has_kernel(true, false, 64 << 10, config.dim, config.dim_v);
  return compute_capability == 0 ||
         (config == forward_tile<T>(config.dim, small) && (!small || block_n == config.keys(with_options, 64 << 10)));
}

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
  bool operator==(const BackwardConfig&) const = default;
};

// The configs for head dims up to these; `small` fits in the 99 KiB of shared memory of sm_86, sm_89 and sm_120,
// `smallest` in the 64 KiB of sm_75.
struct BackwardTile {
  struct Shape {
    int block_m, block_n, key_warps, query_warps = 2, warps = 4, min_blocks = 2;
  };
  int dim, dim_v;
  Shape small, large = small, smallest = small;

  static constexpr bool uses_large(int sm_bytes) { return sm_bytes >= 128 << 10; }
  constexpr BackwardConfig config(int sm_bytes) const {
    const Shape& shape = uses_large(sm_bytes) ? large : is_small(sm_bytes) ? smallest : small;
    return {dim,         dim_v,           shape.block_m, shape.block_n, shape.key_warps, shape.query_warps,
            shape.warps, shape.min_blocks};
  }
};

// By head dims: block_n keys and values, block_m queries and output gradients, and a tile of dS. dK and dV of a warp's
// keys are in registers during the whole loop.
constexpr BackwardTile kBackwardTiles[] = {
    // 49 KiB. With 32 keys per warp, each fragment of the queries serves two products; dK and dV take 128 registers. On
    // sm_75, where copies need registers too, it would spill: 28 KiB.
    {.dim = 64,
     .dim_v = 64,
     .small = {.block_m = 32, .block_n = 128, .key_warps = 4},
     .smallest = {.block_m = 32, .block_n = 64, .key_warps = 4}},
    // 56 KiB. dK and dV of 16 keys take 96 registers, P and dS of 64 queries 64. On sm_75 40 KiB, for the same reason.
    {.dim = 96,
     .dim_v = 96,
     .small = {.block_m = 64, .block_n = 64, .key_warps = 4},
     .smallest = {.block_m = 32, .block_n = 64, .key_warps = 4, .min_blocks = 1}},
    // 73 KiB, or 53. dK and dV of 16 keys take 128 registers, P and dS of 64 queries 64.
    {.dim = 128,
     .dim_v = 128,
     .small = {.block_m = 64, .block_n = 64, .key_warps = 4},
     .smallest = {.block_m = 32, .block_n = 64, .key_warps = 4, .min_blocks = 1}},
    // 64 KiB, or 44. dK and dV of 16 keys take 160 registers; of the latter, two warps share them.
    {.dim = 192,
     .dim_v = 128,
     .small = {.block_m = 32, .block_n = 64, .key_warps = 4},
     .smallest = {.block_m = 32, .block_n = 32, .key_warps = 2, .min_blocks = 1}},
    // 68 KiB, or 104 for one block of 8 warps, which adds to dQ half as often. dK and dV of 16 keys would take 256
    // registers, so two warps share them, each with half of the head dims. In 64 KiB there is no
    // tile (has_backward_kernel).
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

template <class T>
constexpr bool is_needed(const BackwardConfig& config, int compute_capability) {
  const BackwardTile& tile = tile_of(kBackwardTilesOf<T>, config.dim);
  const bool has_small = has_kernel(sizeof(T) == 4, true, 64 << 10, config.dim, config.dim_v);
  return compute_capability == 0 ||
         (compute_capability == 75 ? has_small && config == tile.config(64 << 10)
                                   : config == tile.config(100 << 10) || config == tile.config(228 << 10));
}

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
  bool operator==(const CacheConfig&) const = default;
};

// By head dims: for few rows, as in decoding, and for more of them.
struct CacheTile {
  struct Shape {
    int block_m, block_n, key_warps, min_blocks;
  };
  int dim, dim_v;
  Shape few, many, small_few = few, small_many = many;  // small: in the 64 KiB of sm_75

  constexpr CacheConfig config(bool has_many, bool small) const {
    const Shape& shape = has_many ? small ? small_many : many : small ? small_few : few;
    return {dim, dim_v, shape.block_m, shape.block_n, shape.key_warps, shape.min_blocks};
  }
};
constexpr CacheTile kCacheTiles[] = {
    // 34 and 40 KiB
    {.dim = 64,
     .dim_v = 64,
     .few = {.block_m = 16, .block_n = 64, .key_warps = 4, .min_blocks = 2},
     .many = {.block_m = 64, .block_n = 64, .key_warps = 1, .min_blocks = 2}},
    // 68 and 80 KiB; small: 36 and 48
    {.dim = 128,
     .dim_v = 128,
     .few = {.block_m = 16, .block_n = 64, .key_warps = 4, .min_blocks = 2},
     .many = {.block_m = 64, .block_n = 64, .key_warps = 1, .min_blocks = 2},
     .small_few = {.block_m = 16, .block_n = 32, .key_warps = 2, .min_blocks = 1},
     .small_many = {.block_m = 64, .block_n = 32, .key_warps = 1, .min_blocks = 1}},
    // 72 and 96 KiB; small: 40 and 48
    {.dim = 256,
     .dim_v = 256,
     .few = {.block_m = 16, .block_n = 32, .key_warps = 2, .min_blocks = 2},
     .many = {.block_m = 64, .block_n = 32, .key_warps = 1, .min_blocks = 1},
     .small_few = {.block_m = 16, .block_n = 16, .key_warps = 1, .min_blocks = 1},
     .small_many = {.block_m = 32, .block_n = 16, .key_warps = 1, .min_blocks = 1}},
};

// Of float32.
constexpr CacheTile kFloat32CacheTiles[] = {
    // 36 and 48 KiB
    {.dim = 64,
     .dim_v = 64,
     .few = {.block_m = 16, .block_n = 32, .key_warps = 2, .min_blocks = 2},
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

template <class T>
constexpr bool is_needed(const CacheConfig& config, int compute_capability) {
  const CacheTile& tile = tile_of(kCacheTilesOf<T>, config.dim);
  const bool small = compute_capability == 75;
  if (small && !has_kernel(sizeof(T) == 4, false, 64 << 10, config.dim, config.dim_v)) return false;
  return compute_capability == 0 || config == tile.config(false, small) || config == tile.config(true, small);
}

}  // namespace cuda_ext::attention::sm80
