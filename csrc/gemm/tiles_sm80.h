// The tile shapes of the GEMM on mma.sync (sm_80 and later), and what the host decides for a launch: all that the
// kernel knows of its plan (plan_sm80.h).
#pragma once

#include "base/workspace.h"
#include "gemm/problem.h"

namespace cuda_ext::sm80 {

// A tile shape and everything derived from it.
struct GemmConfig {
  int block_m;
  int block_n;
  int block_k;
  int stages;
  int warps_m;
  int warps_n;
  int min_blocks;  // per SM, which limits the registers

  constexpr int threads() const { return 32 * warps_m * warps_n; }
  // Shared memory of a block: the stages, and its arrival at a split of k. Products of FP8 are not split; each line of
  // their stages has a scale.
  constexpr int shared_bytes(int element_bytes) const {
    const int lines = stages * (block_m + block_n);
    return element_bytes == 1 ? lines * (block_k + 4) : lines * block_k * element_bytes + 128;
  }
};

// How fragments are multiplied: 16-bit and 8-bit ones directly, float32 ones as tf32 in one or three products.
enum class Arithmetic { k16Bit, kTf32, kThreeTf32, kFloat8 };
constexpr int kNumArithmetics = 4;
template <class T, Float32Product float32>
constexpr Arithmetic kArithmeticOf = sizeof(T) == 2                     ? Arithmetic::k16Bit
                                     : float32 == Float32Product::kTf32 ? Arithmetic::kTf32
                                                                        : Arithmetic::kThreeTf32;
constexpr int element_bytes(Arithmetic arithmetic) {
  return arithmetic == Arithmetic::kFloat8 ? 1 : arithmetic == Arithmetic::k16Bit ? 2 : 4;
}

// The shapes of each arithmetic, from large to small. All fit in the 99 KiB of shared memory of sm_86, sm_89 and
// sm_120, several blocks where min_blocks > 1; the 64 KiB of sm_75 hold one block of any but the first.
constexpr int kMaxShapes = 3;
constexpr int kNumShapes[kNumArithmetics] = {3, 3, 2, 2};
constexpr GemmConfig kTiles[kNumArithmetics][kMaxShapes] = {
    {
        // Warps of 64 x 64 read the least from shared memory; blocks of 128 x 256 read the least from L2, which is the
        // bottleneck of mma.sync on sm_90.
        {.block_m = 128, .block_n = 256, .block_k = 32, .stages = 4, .warps_m = 2, .warps_n = 4, .min_blocks = 1},
        // Two blocks overlap each other's epilogues, and smaller tiles waste less of the last wave.
        {.block_m = 128, .block_n = 128, .block_k = 32, .stages = 3, .warps_m = 2, .warps_n = 2, .min_blocks = 2},
        // Deeper k tiles: half as many waits, as there is little work between them.
        {.block_m = 64, .block_n = 64, .block_k = 64, .stages = 3, .warps_m = 2, .warps_n = 2, .min_blocks = 3},
    },
    {
        // The same sizes in bytes.
        {.block_m = 128, .block_n = 256, .block_k = 16, .stages = 4, .warps_m = 2, .warps_n = 4, .min_blocks = 1},
        {.block_m = 128, .block_n = 128, .block_k = 16, .stages = 3, .warps_m = 2, .warps_n = 2, .min_blocks = 2},
        {.block_m = 64, .block_n = 64, .block_k = 32, .stages = 3, .warps_m = 2, .warps_n = 2, .min_blocks = 3},
    },
    {
        // Three products need both parts of every fragment in registers, so warp tiles are half as large and fewer
        // blocks fit. They take so long that the smaller traffic of larger blocks would not matter.
        {.block_m = 128, .block_n = 128, .block_k = 16, .stages = 4, .warps_m = 4, .warps_n = 2, .min_blocks = 1},
        {.block_m = 64, .block_n = 64, .block_k = 32, .stages = 3, .warps_m = 2, .warps_n = 2, .min_blocks = 2},
    },
    {
        // A k tile has the depth of a block of scales. The stages fill 99 KiB. Warps of more than 64 x 32 would have
        // too few registers for their products beside the sums (scaled_gemm_sm89.cuh).
        {.block_m = 128, .block_n = 128, .block_k = 128, .stages = 3, .warps_m = 2, .warps_n = 4, .min_blocks = 1},
        {.block_m = 64, .block_n = 64, .block_k = 128, .stages = 6, .warps_m = 2, .warps_n = 4, .min_blocks = 1},
    },
};

// Whether the kernel of FP8 has a tile on a device. From sm_90 to sm_119 operands are converted to float16, for which
// the larger one leaves too few registers.
HOST_DEVICE constexpr bool has_float8_tile(const GemmConfig& tile, int compute_capability) {
  return tile.block_m <= 64 || compute_capability < 90 || compute_capability >= 120;
}

// Strides of an operand in bytes. They are kernel parameters, i.e. constants that take no registers.
struct ByteStrides {
  int64_t line = 0;      // to the next line: the row or column along which elements are contiguous
  int64_t pass = 0;      // to the line that the same thread copies next
  int64_t k_tile = 0;    // to the next k tile
  int64_t upper = 0;     // gated, lines along k: the extra distance to the first line of the tile's second half
  int vector_bytes = 0;  // the largest aligned access: 16, 4 or 2
};

// Everything the host decides; the same for all blocks.
struct GemmPlan {
  int shape = 0;  // of kTiles
  int row_tiles = 0;
  int column_tiles = 0;
  int tiles = 0;          // of the output, all batches
  int k_tiles = 0;        // of one product
  int k_tail = 0;         // depth of the last of these
  int all_k_tiles = 0;    // of all reduced products
  int split_k_tiles = 0;  // of one block
  int splits = 1;
  bool in_float32 = false;  // float32 arithmetic instead of three tf32 products
  ByteStrides a;
  ByteStrides b;
  // In the workspace; null if not needed.
  uint32_t* arrivals = nullptr;  // (tiles,)
  float* partials = nullptr;     // (splits, tiles, block_m * block_n)
  float* bias_sums = nullptr;    // (row_tiles, n), gated: (row_tiles, 2n)
};

// Assigns the arrays of `plan` in the workspace at `data`, which may be null to find the size.
inline WorkspaceCursor assign_workspace(const GemmParams& params, const GemmConfig& tile, void* data, GemmPlan& plan) {
  WorkspaceCursor cursor(data);
  if (plan.splits > 1) {
    cursor.allocate(plan.arrivals, plan.tiles);
    cursor.allocate(plan.partials, int64_t(plan.splits) * plan.tiles * tile.block_m * tile.block_n);
  }
  if (params.bias_grad.data != nullptr)
    cursor.allocate(plan.bias_sums, plan.row_tiles * (params.gated ? 2 : 1) * params.n);
  return cursor;
}

}  // namespace cuda_ext::sm80
