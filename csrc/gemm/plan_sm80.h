// Chooses the tile shape of a GEMM on sm_80 and later, and how it is divided among blocks. Decided on the host, from
// sizes, strides and alignments.
#pragma once

#include <cmath>
#include <limits>

#include "base/device.h"
#include "gemm/tiles_sm80.h"

namespace cuda_ext::sm80 {

// The longest sums that are formed in float32 arithmetic instead of three tf32 products. With so short a k, the kernel
// is limited by writing the result anyway.
constexpr int64_t kMaxFloat32Sum = 8;

// Device properties the heuristic uses; rates are per cycle and SM.
struct Rates {
  int num_sms;
  double multiply_adds[kNumArithmetics];  // through mma.sync
  double l2_bytes;                        // when all SMs read
  int block_shared_bytes;                 // shared memory that a block may have
  double shared_bytes = 128;              // read from shared memory
};

// Published or measured by others (L2: te42kyfo/gpu-benches), for one device per architecture; only their ratios
// matter.
inline Rates rates_of(const rt::Device& device) {
  const int block = rt::shared_bytes_of_block(device.compute_capability);
  switch (device.compute_capability) {
    // T4 (Jia et al., arXiv 1903.07486). float32 is multiplied in float32 arithmetic, at the rate of the shuffles.
    case 75: return {device.num_sms, {512, 32, 32, 512}, 20, block, 64};
    // A10 and L4. RTX 3090 and 4090 have half of these multiply-adds, but lose less by tiles that are too large than
    // the others by tiles that read too much from L2.
    case 86:
    case 89: return {device.num_sms, {512, 256, 256.0 / 3, 1024}, 16, block};
    // RTX 5090, assumed to have the L2 bandwidth of an L40, for more SMs.
    case 120:
    case 121: return {device.num_sms, {256, 128, 128.0 / 3, 512}, 12.7, block};
    // H100. mma.sync reaches 63 % of its 2048 multiply-adds.
    case 90: return {device.num_sms, {1300, 650, 650.0 / 3, 1300}, 36, block};
    // A100. On a B200, mma.sync reaches 75 % of these multiply-adds (409 TFLOP/s), and multiplies FP8 as 16 bits.
    default: return {device.num_sms, {1024, 512, 512.0 / 3, 1024}, 36, block};
  }
}

// `line_stride` in elements; `gate_columns`: 0 if there are no gate and up; `extent`: of the tile.
inline ByteStrides byte_strides(const GemmParams& params, const Operand& operand, const int64_t* reduced_strides,
                                bool k_major, int64_t line_stride, int64_t gate_columns, int extent,
                                const GemmConfig& tile) {
  const int64_t size = size_of(operand.dtype);
  const int64_t chunks = (k_major ? tile.block_k : extent) * size / 16;  // of a line
  ByteStrides strides;
  strides.line = line_stride * size;
  strides.pass = tile.threads() / chunks * strides.line;
  strides.k_tile = tile.block_k * (k_major ? size : strides.line);
  if (k_major && gate_columns > 0) strides.upper = (gate_columns - extent / 2) * strides.line;
  // The largest of 16, 4 and 2 that divides the address and all steps to what is read.
  int64_t bits = line_stride | (k_major ? 0 : gate_columns);
  for (int d = 0; d < params.batch_dims; ++d) bits |= operand.batch_strides[d];
  for (int d = 0; d < params.reduced_dims; ++d) bits |= reduced_strides[d];
  bits = bits * size | int64_t(reinterpret_cast<uintptr_t>(operand.data));
  strides.vector_bytes = bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 2;
  return strides;
}

// Cycles that each resource takes for a k tile. In shared memory each row is read by all warps that use it.
struct TileCost {
  double tensor, l2, shared;
  double most() const {
    const double memory = l2 > shared ? l2 : shared;
    return tensor > memory ? tensor : memory;
  }
  const char* limit() const { return most() == tensor ? "tensor cores" : most() == l2 ? "L2" : "shared memory"; }
};
inline TileCost cost_of_k_tile(const GemmConfig& tile, Arithmetic arithmetic, const Rates& rates) {
  const double depth_bytes = tile.block_k * element_bytes(arithmetic);
  const double written = (tile.block_m + tile.block_n) * depth_bytes;
  const double read = (tile.block_m * tile.warps_n + tile.block_n * tile.warps_m) * depth_bytes;
  return {double(tile.block_m) * tile.block_n * tile.block_k / rates.multiply_adds[int(arithmetic)],
          written / rates.l2_bytes, (written + read) / rates.shared_bytes};
}

// Predicted cycles until the busiest SM has finished. At the end, the sums of a tile are written; if k is split, they
// also go to the workspace and back.
inline double expected_cycles(const GemmPlan& plan, const GemmConfig& tile, Arithmetic arithmetic, const Rates& rates) {
  constexpr double kStart = 1500;  // filling the pipeline and draining the stores, once per wave
  constexpr double kSplit = 4000;  // clear_words, and waiting for the last block
  const double area = double(tile.block_m) * tile.block_n;
  const double k_tile = cost_of_k_tile(tile, arithmetic, rates).most();
  const double sums = area * sizeof(float) / rates.l2_bytes;
  const double blocks = double(ceil_div(int64_t(plan.tiles) * plan.splits, rates.num_sms));
  double cycles = blocks * (plan.split_k_tiles * k_tile + sums) + std::ceil(blocks / tile.min_blocks) * kStart;
  if (plan.splits > 1) cycles += kSplit + (blocks + plan.splits) * sums;
  return cycles;
}

inline Arithmetic arithmetic_of(const GemmParams& params, Float32Product float32) {
  if (params.a.dtype != Dtype::kFloat32) return Arithmetic::k16Bit;
  return float32 == Float32Product::kTf32 ? Arithmetic::kTf32 : Arithmetic::kThreeTf32;
}

// The tile shape and the split of k with the lowest predicted time.
inline GemmPlan choose_plan(const GemmParams& params, Arithmetic arithmetic, const Rates& rates,
                            const Restriction& only = {}) {
  constexpr int kMaxSplits = 32;
  constexpr int kMinSplitTiles = 4;  // about the time to fill the pipeline
  const bool gate_up = has_gate_up(params);
  GemmPlan best;
  double best_cycles = std::numeric_limits<double>::infinity();
  for (int shape = 0; shape < kNumShapes[int(arithmetic)]; ++shape) {
    if (only.config >= 0 && shape != only.config) continue;
    const GemmConfig& tile = kTiles[int(arithmetic)][shape];
    if (tile.shared_bytes(element_bytes(arithmetic)) > rates.block_shared_bytes) continue;
    const int64_t row_tiles = ceil_div(params.m, tile.block_m);
    const int64_t column_tiles = ceil_div(params.n, gate_up ? tile.block_n / 2 : tile.block_n);
    const int64_t k_tiles = ceil_div(params.k, tile.block_k);
    GemmPlan plan;
    plan.shape = shape;
    plan.tiles = checked_count(row_tiles * column_tiles * product_of(params.batch_dims, params.batch_sizes),
                               "tiles of the output");
    plan.row_tiles = int(row_tiles);
    plan.column_tiles = int(column_tiles);
    plan.all_k_tiles = checked_count(k_tiles * product_of(params.reduced_dims, params.reduced_sizes), "tiles along k");
    plan.k_tiles = int(k_tiles);
    plan.k_tail = int(params.k - (k_tiles - 1) * tile.block_k);
    // All shapes add the terms of a row in the same order, but a split of k would depend on the number of tiles.
    for (int splits = 1; splits <= (params.batch_invariant ? 1 : kMaxSplits); ++splits) {
      plan.split_k_tiles = int(ceil_div(plan.all_k_tiles, splits));
      if (splits > 1) {
        if (plan.split_k_tiles < kMinSplitTiles) break;
        if (int64_t(plan.tiles) * splits > 2 * tile.min_blocks * rates.num_sms) break;  // more than two waves
        if (ceil_div(plan.all_k_tiles, plan.split_k_tiles) != splits) continue;         // a split would be empty
      }
      if (only.splits > 0 && splits != only.splits) continue;
      plan.splits = splits;
      const double cycles = expected_cycles(plan, tile, arithmetic, rates);
      if (cycles < best_cycles) {
        best_cycles = cycles;
        best = plan;
      }
    }
  }
  if (best_cycles == std::numeric_limits<double>::infinity())  // no plan fits the restriction
    return choose_plan(params, arithmetic, rates);
  const GemmConfig& tile = kTiles[int(arithmetic)][best.shape];
  const bool a_k_major = is_k_major_a(params), b_k_major = is_k_major_b(params);
  best.in_float32 = params.k * product_of(params.reduced_dims, params.reduced_sizes) <= kMaxFloat32Sum;
  best.a = byte_strides(params, params.a, params.reduced_strides_a, a_k_major,
                        a_k_major ? params.a.row_stride : params.a.column_stride, 0, tile.block_m, tile);
  best.b = byte_strides(params, params.b, params.reduced_strides_b, b_k_major,
                        b_k_major ? params.b.column_stride : params.b.row_stride, gate_up ? params.n : 0, tile.block_n,
                        tile);
  return best;
}

// The shapes of grouped products, from this one on: the last two, because most groups have few rows; of three tf32
// products the last, because the other would spill.
constexpr int first_grouped_shape(Arithmetic arithmetic) {
  return kNumShapes[int(arithmetic)] - (arithmetic == Arithmetic::kThreeTf32 ? 1 : 2);
}

// Of a grouped product. The host does not know the groups: the shape is chosen as if they had the same size.
inline GemmPlan choose_grouped_plan(const GemmParams& params, Arithmetic arithmetic, const Rates& rates,
                                    const Restriction& only = {}) {
  const bool of_rows = params.groups.cut == Groups::Cut::kRows;
  const int64_t count = params.groups.count;
  GemmParams average = params;
  average.batch_invariant = true;  // k is not split
  int64_t& cut = of_rows ? average.m : average.k;
  cut = ceil_div(cut, count);
  GemmPlan best;
  double best_cycles = std::numeric_limits<double>::infinity();
  for (int shape = first_grouped_shape(arithmetic); shape < kNumShapes[int(arithmetic)]; ++shape) {
    if (only.config >= 0 && shape != only.config) continue;
    const GemmPlan plan = choose_plan(average, arithmetic, rates, {.config = shape});
    const double cycles = expected_cycles(plan, kTiles[int(arithmetic)][shape], arithmetic, rates);
    if (plan.shape == shape && cycles < best_cycles) {
      best = plan;
      best_cycles = cycles;
    }
  }
  const GemmConfig& tile = kTiles[int(arithmetic)][best.shape];
  // Each group, and the rows after the last, may have a tile that is not full.
  if (of_rows)
    best.tiles = checked_count((params.m / tile.block_m + count + 1) * best.column_tiles, "tiles of the output");
  best.in_float32 = params.k <= kMaxFloat32Sum;
  const bool b_k_major = is_grouped_b_k_major(params);
  best.a = byte_strides(params, params.a, params.reduced_strides_a, of_rows,
                        of_rows ? params.a.row_stride : params.a.column_stride, 0, tile.block_m, tile);
  best.b = byte_strides(params, params.b, params.reduced_strides_b, b_k_major,
                        b_k_major ? params.b.column_stride : params.b.row_stride, has_gate_up(params) ? params.n : 0,
                        tile.block_n, tile);
  return best;
}

}  // namespace cuda_ext::sm80
