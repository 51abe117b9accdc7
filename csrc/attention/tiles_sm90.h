// The tile sizes of attention on wgmma, with reasons.
#pragma once

#include "attention/head_dims.h"

namespace cuda_ext::attention::sm90 {

// Registers of a thread of the producer's warpgroup, and of a consumer; with two and with three consumers 64 K in all.
struct RoleRegisters {
  int producer, consumer;
};
constexpr RoleRegisters kRegistersOfTwo = {24, 240};
constexpr RoleRegisters kRegistersOfThree = {32, 160};

// A tile shape and everything derived from it.
struct ForwardConfig {
  int dim;      // of query and key, padded with zeros
  int dim_v;    // of value and output
  int block_m;  // rows: queries of a head, or of all heads that share a key head; 64 for each consumer
  int block_n;  // keys
  bool turns;   // consumers issue their products in turn, so that the softmax of one runs under those of another
  int stages;   // of keys, and of values; last, because a mangled name omits zeros at its end

  constexpr int consumers() const { return block_m / 64; }
  constexpr int threads() const { return 128 * (1 + consumers()); }
  constexpr RoleRegisters registers() const { return consumers() == 2 ? kRegistersOfTwo : kRegistersOfThree; }
};

// By head dims: one for the plain kernel, one for the kernel with options, which need registers.
struct ForwardTile {
  struct Shape {
    int block_m, block_n;
    bool turns;
    int stages;
  };
  int dim, dim_v;
  Shape plain, with_options;

  constexpr ForwardConfig config(bool has_options) const {
    const Shape& shape = has_options ? with_options : plain;
    return {dim, dim_v, shape.block_m, shape.block_n, shape.turns, shape.stages};
  }
};
constexpr ForwardTile kForwardTiles[] = {
    // 108 KiB. Logits take 56 registers, probs 28, output 32, of 160: with 128 keys some would be spilled.
    {.dim = 64,
     .dim_v = 64,
     .plain = {.block_m = 192, .block_n = 112, .turns = true, .stages = 3},
     .with_options = {.block_m = 128, .block_n = 128, .turns = true, .stages = 3}},
    // 192 KiB, as for 128 columns. Logits take 80 registers, probs 40, output 48, of 240. With options the keys are a
    // block of a block mask; turns would spill a register.
    {.dim = 96,
     .dim_v = 96,
     .plain = {.block_m = 128, .block_n = 160, .turns = true, .stages = 2},
     .with_options = {.block_m = 128, .block_n = 128, .turns = false, .stages = 2}},
    // 160 KiB. Logits and output take 64 registers each, probs 32, of 240.
    {.dim = 128,
     .dim_v = 128,
     .plain = {.block_m = 128, .block_n = 128, .turns = true, .stages = 2},
     .with_options = {.block_m = 128, .block_n = 128, .turns = true, .stages = 2}},
    // 208 KiB.
    {.dim = 192,
     .dim_v = 128,
     .plain = {.block_m = 128, .block_n = 128, .turns = true, .stages = 2},
     .with_options = {.block_m = 128, .block_n = 128, .turns = true, .stages = 2}},
    // 224 KiB. The output takes 128 registers, logits 40, probs 20.
    {.dim = 256,
     .dim_v = 256,
     .plain = {.block_m = 128, .block_n = 80, .turns = false, .stages = 2},
     .with_options = {.block_m = 128, .block_n = 64, .turns = false, .stages = 2}},
};

// A tile shape of backward, where a block owns keys and loops over queries.
struct BackwardConfig {
  int dim;
  int dim_v;
  bool separate = false;  // dQ has a separate kernel
  int block_m;            // queries
  int block_n;            // keys: 64 for each consumer or, if `separate`, for both; last, as in ForwardConfig

  static constexpr int min_blocks = 1;                             // per SM
  static constexpr int stages = 2;                                 // of queries, and of output gradients
  constexpr int sums_dim() const { return (dim + 63) / 64 * 64; }  // of the sums of dQ, whose last columns may be zeros
  constexpr int threads() const { return 128 * (1 + (separate ? 2 : block_n / 64)); }
};
constexpr int kQueriesOfSeparate = 128;  // of a tile of the kernel that computes dQ, 64 for each consumer

// By head dims. In registers, of 240: dK and dV of 64 keys, scores and dP, and 32 sums of dQ. In
// shared memory: keys, values, two stages of queries and of output gradients, dS, and the sums of dQ.
constexpr BackwardConfig kBackwardTiles[] = {
    // 162 KiB. dK and dV take 64 registers, scores and dP 128.
    {.dim = 64, .dim_v = 64, .block_m = 128, .block_n = 128},
    // 177 KiB, as for 128 columns, which dQ has. dK and dV take 96 registers, scores and dP 64.
    {.dim = 96, .dim_v = 96, .block_m = 64, .block_n = 128},
    // 177 KiB. dK and dV take 128 registers, scores and dP 64.
    {.dim = 128, .dim_v = 128, .block_m = 64, .block_n = 128},
    // 153 KiB, and 144 for dQ: the gradients of a block of keys are divided between two consumers.
    {.dim = 192, .dim_v = 128, .separate = true, .block_m = 64, .block_n = 64},
    // 225 KiB, and 224 for dQ.
    {.dim = 256, .dim_v = 256, .separate = true, .block_m = 64, .block_n = 64},
};

}  // namespace cuda_ext::attention::sm90
