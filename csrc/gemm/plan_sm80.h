// Which of the sm_80 GEMMs makes a product, and how it is divided among blocks. All of it is decided on the host, from
// sizes, strides and alignments.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "arch/target.cuh"
#include "gemm/gemm.h"
#include "rt/device.h"

namespace cuda_ext::sm80 {

// A tile shape and all that hangs on it.
struct GemmConfig {
  int block_m;
  int block_n;
  int block_k;
  int stages;
  int warps_m;
  int warps_n;
  int min_blocks;  // of a multiprocessor at once: bounds the registers

  constexpr int threads() const { return 32 * warps_m * warps_n; }
};

// How fragments are multiplied: 16-bit ones as they are, float32 ones as tf32 in one or three products.
enum class Arithmetic { k16Bit, kTf32, kThreeTf32 };
constexpr int kNumArithmetics = 3;
constexpr int element_bytes(Arithmetic arithmetic) { return arithmetic == Arithmetic::k16Bit ? 2 : 4; }

// The shapes of each arithmetic, from large to small. All fit the 99 KiB of shared memory that sm_86 and sm_89 have, and
// those that are to share a multiprocessor do so there too.
constexpr int kMaxShapes = 3;
constexpr int kNumShapes[kNumArithmetics] = {3, 3, 2};
constexpr GemmConfig kTiles[kNumArithmetics][kMaxShapes] = {
    {
        // 64 x 64 of the output a warp reads least from shared memory; 128 x 256 a block reads least from L2, which
        // bounds mma.sync on sm_90.
        {.block_m = 128, .block_n = 256, .block_k = 32, .stages = 4, .warps_m = 2, .warps_n = 4, .min_blocks = 1},
        // Two blocks hide each other's epilogues, and half the area leaves less of a last wave idle.
        {.block_m = 128, .block_n = 128, .block_k = 32, .stages = 3, .warps_m = 2, .warps_n = 2, .min_blocks = 2},
        // Deeper k tiles: half as many waits, where there is little to do between them.
        {.block_m = 64, .block_n = 64, .block_k = 64, .stages = 3, .warps_m = 2, .warps_n = 2, .min_blocks = 3},
    },
    {
        // The same in bytes.
        {.block_m = 128, .block_n = 256, .block_k = 16, .stages = 4, .warps_m = 2, .warps_n = 4, .min_blocks = 1},
        {.block_m = 128, .block_n = 128, .block_k = 16, .stages = 3, .warps_m = 2, .warps_n = 2, .min_blocks = 2},
        {.block_m = 64, .block_n = 64, .block_k = 32, .stages = 3, .warps_m = 2, .warps_n = 2, .min_blocks = 3},
    },
    {
        // Three products want both parts of every fragment in registers, so a warp takes half as much of the output,
        // and fewer blocks fit; and they take so long that what a larger block would save does not count.
        {.block_m = 128, .block_n = 128, .block_k = 16, .stages = 4, .warps_m = 4, .warps_n = 2, .min_blocks = 1},
        {.block_m = 64, .block_n = 64, .block_k = 32, .stages = 3, .warps_m = 2, .warps_n = 2, .min_blocks = 2},
    },
};

// How an operand is walked, in bytes. It reaches the kernel as constants, which take no registers.
struct OperandWalk {
  int64_t line = 0;      // to the next line: a row or column, along which elements are contiguous
  int64_t pass = 0;      // to the line that the same thread copies next
  int64_t k_tile = 0;    // to the next k tile
  int64_t upper = 0;     // lines along k, gated: from where the second half's first line would be to where it is
  int vector_bytes = 0;  // aligned bytes that can be read at once
};

// What the host decides; the same for all blocks.
struct GemmPlan {
  int shape = 0;  // of kTiles
  int row_tiles = 0;
  int column_tiles = 0;
  int tiles = 0;          // of all batches
  int k_tiles = 0;        // of one product
  int k_tail = 0;         // depth of its last
  int all_k_tiles = 0;    // of all reduced products
  int split_k_tiles = 0;  // of one block
  int splits = 1;
  bool in_float32 = false;  // not in three products of tf32
  OperandWalk a;
  OperandWalk b;
  // In the workspace; null if not needed.
  uint32_t* arrivals = nullptr;  // (tiles,)
  float* partials = nullptr;     // (splits, tiles, block_m * block_n)
  float* bias_sums = nullptr;    // (row_tiles, n), gated: (row_tiles, 2n)
};

// The longest sums that are formed in float32's own arithmetic instead of three products of tf32: the kernel waits for
// the memory that takes the result anyway.
constexpr int64_t kMaxFloat32Sum = 8;

// What a choice depends on of a device. Rates are a cycle of one multiprocessor.
struct Rates {
  int processors;
  double multiply_adds[kNumArithmetics];  // through mma.sync
  double l2_bytes;                        // when all read
  static constexpr double kSharedBytes = 128;
};

// As published, or measured by others (L2: te42kyfo/gpu-benches), for one device of each architecture; only ratios
// matter.
inline Rates rates_of(const rt::Device& device) {
  // H100, of whose 2048 multiply-adds mma.sync reaches 63 %.
  if (device.compute_capability >= 90) return {device.num_sms, {1300, 650, 650.0 / 3}, 36};
  // RTX 4090.
  if (device.compute_capability >= 86) return {device.num_sms, {256, 128, 128.0 / 3}, 16};
  // A100.
  return {device.num_sms, {1024, 512, 512.0 / 3}, 36};
}

inline int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

inline int64_t product_of(int dims, const int64_t* sizes) {
  int64_t count = 1;
  for (int d = 0; d < dims; ++d) count *= sizes[d];
  return count;
}

// Whether columns of the product come in pairs: gate and up columns, of which the output has one.
HOST_DEVICE bool has_pairs(const GemmParams& params) { return params.gated && params.preact.data == nullptr; }

// Whether k is the dim along which an operand is read; the other one is, if it alone is contiguous.
inline bool is_k_major(int64_t k, int64_t k_stride, int64_t other_stride) {
  return k == 1 ? other_stride != 1 : k_stride == 1;
}
inline bool is_k_major_a(const GemmParams& params) {
  return is_k_major(params.k, params.a.column_stride, params.a.row_stride);
}
inline bool is_k_major_b(const GemmParams& params) {
  return is_k_major(params.k, params.b.row_stride, params.b.column_stride);
}

inline int checked_count(int64_t count, const char* of_what) {
  constexpr int64_t kMax = 1 << 27;  // eight times as many still fit an int
  if (count > kMax)
    throw std::invalid_argument("gemm_sm80: expected at most 2^27 " + std::string(of_what) + ", got " +
                                std::to_string(count) + "; divide the product");
  return int(count);
}

// `line_stride` and `columns`, the number of pairs if the operand has any, in elements; `extent`: of the tile.
inline OperandWalk walk_of(const GemmParams& params, const Operand& operand, const int64_t* reduced_strides,
                           bool k_major, int64_t line_stride, int64_t pairs, int extent, const GemmConfig& tile) {
  const int64_t size = size_of(operand.dtype);
  const int64_t chunks = (k_major ? tile.block_k : extent) * size / 16;  // of a line
  OperandWalk walk;
  walk.line = line_stride * size;
  walk.pass = tile.threads() / chunks * walk.line;
  walk.k_tile = tile.block_k * (k_major ? size : walk.line);
  if (k_major && pairs > 0) walk.upper = (pairs - extent / 2) * walk.line;
  // The largest of 16, 4 and 2 that divides the address and all steps to what is read.
  int64_t bits = line_stride | (k_major ? 0 : pairs);
  for (int d = 0; d < params.batch_dims; ++d) bits |= operand.batch_strides[d];
  for (int d = 0; d < params.reduced_dims; ++d) bits |= reduced_strides[d];
  bits = bits * size | int64_t(reinterpret_cast<uintptr_t>(operand.data));
  walk.vector_bytes = bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 2;
  return walk;
}

// Cycles until the busiest multiprocessor is done. A k tile costs the largest of its arithmetic, its way from L2, and
// its way through shared memory, where every row is read by all warps side by side; the sums of a tile cross shared
// memory once at its end, and, where k is split, go to the workspace and back.
inline double expected_cycles(const GemmPlan& plan, const GemmConfig& tile, Arithmetic arithmetic, const Rates& rates) {
  constexpr double kStart = 1500;  // fill the stages, drain the stores: shared by the blocks that run at once
  constexpr double kSplit = 4000;  // the kernel that clears the arrivals, and the wait for the last block
  const double area = double(tile.block_m) * tile.block_n;
  const double depth_bytes = tile.block_k * element_bytes(arithmetic);
  const double written = (tile.block_m + tile.block_n) * depth_bytes;
  const double read = (tile.block_m * tile.warps_n + tile.block_n * tile.warps_m) * depth_bytes;
  const double k_tile = std::max({area * tile.block_k / rates.multiply_adds[int(arithmetic)], written / rates.l2_bytes,
                                  (written + read) / Rates::kSharedBytes});
  const double sums = area * sizeof(float) / rates.l2_bytes;
  const double blocks = double(ceil_div(int64_t(plan.tiles) * plan.splits, rates.processors));
  double cycles = blocks * (plan.split_k_tiles * k_tile + sums) + std::ceil(blocks / tile.min_blocks) * kStart;
  if (plan.splits > 1) cycles += kSplit + (blocks + plan.splits) * sums;
  return cycles;
}

// The tile shape and the split of k that should be done first.
inline GemmPlan choose_plan(const GemmParams& params, Arithmetic arithmetic, const Rates& rates) {
  constexpr int kMaxSplits = 32;
  constexpr int kMinSplitTiles = 4;  // as long as the pipeline takes to fill
  const bool pairs = has_pairs(params);
  GemmPlan best;
  double best_cycles = std::numeric_limits<double>::infinity();
  for (int shape = 0; shape < kNumShapes[int(arithmetic)]; ++shape) {
    const GemmConfig& tile = kTiles[int(arithmetic)][shape];
    const int64_t row_tiles = ceil_div(params.m, tile.block_m);
    const int64_t column_tiles = ceil_div(params.n, pairs ? tile.block_n / 2 : tile.block_n);
    const int64_t k_tiles = ceil_div(params.k, tile.block_k);
    GemmPlan plan;
    plan.shape = shape;
    plan.tiles = checked_count(row_tiles * column_tiles * product_of(params.batch_dims, params.batch_sizes),
                               "tiles of the output");
    plan.row_tiles = int(row_tiles);
    plan.column_tiles = int(column_tiles);
    plan.all_k_tiles =
        checked_count(k_tiles * product_of(params.reduced_dims, params.reduced_sizes), "tiles along what is summed");
    plan.k_tiles = int(k_tiles);
    plan.k_tail = int(params.k - (k_tiles - 1) * tile.block_k);
    for (int splits = 1; splits <= kMaxSplits; ++splits) {
      plan.split_k_tiles = int(ceil_div(plan.all_k_tiles, splits));
      if (splits > 1) {
        if (plan.split_k_tiles < kMinSplitTiles) break;
        if (int64_t(plan.tiles) * splits > 2 * tile.min_blocks * rates.processors) break;  // more than two waves
        if (ceil_div(plan.all_k_tiles, plan.split_k_tiles) != splits) continue;  // one would have nothing to do
      }
      plan.splits = splits;
      const double cycles = expected_cycles(plan, tile, arithmetic, rates);
      if (cycles < best_cycles) {
        best_cycles = cycles;
        best = plan;
      }
    }
  }
  const GemmConfig& tile = kTiles[int(arithmetic)][best.shape];
  const bool a_k_major = is_k_major_a(params), b_k_major = is_k_major_b(params);
  best.in_float32 = params.k * product_of(params.reduced_dims, params.reduced_sizes) <= kMaxFloat32Sum;
  best.a = walk_of(params, params.a, params.reduced_strides_a, a_k_major,
                   a_k_major ? params.a.row_stride : params.a.column_stride, 0, tile.block_m, tile);
  best.b = walk_of(params, params.b, params.reduced_strides_b, b_k_major,
                   b_k_major ? params.b.column_stride : params.b.row_stride, pairs ? params.n : 0, tile.block_n, tile);
  return best;
}

}  // namespace cuda_ext::sm80
