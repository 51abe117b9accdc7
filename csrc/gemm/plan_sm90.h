// Chooses how a GEMM runs on wgmma (sm_90a): which tile, and how the work is divided among persistent blocks. Decided on
// the host, from sizes, strides and alignments; no header of CUDA is needed.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

#include "gemm/problem.h"
#include "rt/device.h"

namespace cuda_ext::sm90 {

// A line of an operand tile in shared memory: a row of the 128-byte swizzle. Operands that are contiguous along k have
// one line per row or column of the tile; others have runs of kLineBytes along it, one line per k.
constexpr int kLineBytes = 128;
constexpr int kRowBlock = 64;  // rows of a wgmma
constexpr int kConsumers = 2;  // warpgroups that multiply

// A tile shape and everything derived from it.
struct GemmConfig {
  int block_m;
  int block_n;
  int stages;
  bool ping_pong;  // a tile belongs to one consumer, and the other stores its own meanwhile; else they share each tile
  bool swapped;    // the tile is transposed: its rows are columns of the output
  bool tma_only = false;  // the accumulators leave registers only for GemmPlan::tma_store without pairs

  constexpr int warpgroup_m() const { return ping_pong ? block_m : block_m / kConsumers; }
};

constexpr GemmConfig kConfigs[] = {
    // The least traffic per product, in L2 and in shared memory: 128 x 256 saturates neither.
    {.block_m = 128, .block_n = 256, .stages = 4, .ping_pong = false, .swapped = false},
    // The epilogue of one tile overlaps the products of the next: for short k.
    {.block_m = 128, .block_n = 192, .stages = 4, .ping_pong = true, .swapped = false, .tma_only = true},
    // The same for any epilogue, and less waste at the edges and in the last wave.
    {.block_m = 128, .block_n = 128, .stages = 6, .ping_pong = true, .swapped = false},
    // Up to 64 rows: limited by reading b, which is the side with 128 lines, so that little of the tile is empty.
    {.block_m = 128, .block_n = 64, .stages = 7, .ping_pong = false, .swapped = true},
};
constexpr int kNumConfigs = int(sizeof kConfigs / sizeof kConfigs[0]);

// How the boxes of an operand's tile are loaded: pieces of `lines` lines each. Of column pairs, gate and up, a tile has
// runs of 2^run_shift pieces of the one and of the other in turn.
struct OperandLoads {
  bool batched = false;  // the tensor map has 5 dimensions, else 2
  int tile_lines = 0;    // from one tile to the next
  int piece_lines = 0;
  int run_shift = 30;                        // no pairs: one run
  int run_lines = 0;                         // lines of the output from one pair of runs to the next
  int64_t upper = 0;                         // lines from gate to up
  int8_t batch_slots[kMaxBatchDims] = {};    // which of the 3 outer dimensions of the map a batch dim is; -1: broadcast
  int8_t reduced_slots[kMaxBatchDims] = {};  // the same for reduced dims
};

// Everything the host decides; the same for all blocks.
struct GemmPlan {
  int config = 0;    // of kConfigs
  int cluster = 1;   // blocks with adjacent row tiles that load the tile of b once for all of them
  int clusters = 0;  // of the grid
  // Tiles of the product; its rows are columns of the output if the config is swapped.
  int row_groups = 0;  // of `cluster` row tiles
  int column_tiles = 0;
  int batches = 0;
  int raster = 1;         // row groups that blocks cover before the next column
  int k_tiles = 0;        // of one product
  int all_k_tiles = 0;    // of all reduced products
  int split_k_tiles = 0;  // of a work item
  int splits = 1;
  int items = 0;           // work items of a cluster: (splits, batches, row_groups x column_tiles)
  bool tma_store = false;  // the epilogue is of scale, bias and activation alone, and TMA can write the outputs
  bool tma_add = false;    // TMA adds the product to the output
  OperandLoads a, b;       // of the product
  double cycles = 0;       // predicted
  // In the workspace; null if not needed.
  uint32_t* arrivals = nullptr;  // (tiles(), kConsumers)
  float* partials = nullptr;     // (splits, tiles(), block_m * block_n)
  float* bias_sums = nullptr;    // (64-row blocks of the output, n), gated: (.., 2n)

  HOST_DEVICE int tiles() const { return row_groups * cluster * column_tiles * batches; }
};

// Device properties the heuristic uses; rates are per cycle and SM, of an H200. Only their ratios matter.
struct Rates {
  int num_sms;
  static constexpr double kMultiplyAdds = 0.95 * 2048;  // of 16-bit operands; half of tf32
  static constexpr double kL2Bytes = 36;
  static constexpr double kSharedBytes = 128;
  static constexpr double kMemoryBytes = 17.6;
};

// Restricts the choice of a plan, for tests, for measurements, and for results that do not depend on m.
struct Restriction {
  int config = -1;               // of kConfigs; -1: any
  int cluster = 0;               // 0: any
  int splits = 0;                // 0: any
  bool batch_invariant = false;  // the bits of a row of the output must not depend on m: k is not split
};

struct GemmChoice {
  std::optional<GemmPlan> plan;
  std::string refusal;  // why there is none
};

// A product as the kernel sees it: out = a @ b, or its transpose.
struct Side {
  const char* name;
  const Operand* operand;
  const int64_t* reduced_strides;
  bool k_major;
  int64_t lines;        // along the contiguous dim of the other layout: rows of a, columns of b
  int64_t line_stride;  // elements
};
inline Side side_a(const GemmParams& params) {
  const bool k_major = is_k_major_a(params);
  return {"a",     &params.a, params.reduced_strides_a,
          k_major, params.m,  k_major ? params.a.row_stride : params.a.column_stride};
}
inline Side side_b(const GemmParams& params) {
  const bool k_major = is_k_major_b(params);
  return {"b",
          &params.b,
          params.reduced_strides_b,
          k_major,
          has_pairs(params) ? 2 * params.n : params.n,
          k_major ? params.b.column_stride : params.b.row_stride};
}

// Why TMA cannot read an operand; empty if it can. Fills the slots of `loads`.
inline std::string tma_refusal(const GemmParams& params, const Side& side, OperandLoads& loads) {
  const int64_t size = size_of(side.operand->dtype);
  const auto refuse = [&](const std::string& what) { return std::string(side.name) + " " + what; };
  if (reinterpret_cast<uintptr_t>(side.operand->data) % 16 != 0)
    return refuse("does not begin at a multiple of 16 bytes");
  // The stride of a single line has no meaning if it is less than the line; then that of lines without gaps decides, so
  // that the choice does not depend on the number of lines.
  const int64_t inner = side.k_major ? params.k : side.lines, outer = side.k_major ? side.lines : params.k;
  const int64_t stride = outer == 1 ? std::max(inner, side.line_stride) : side.line_stride;
  if (stride <= 0) return refuse("has rows or columns with a stride of 0");
  if (stride * size % 16 != 0) return refuse("has a stride that is no multiple of 16 bytes");
  int slots = 0;
  const auto assign = [&](int dims, const int64_t* sizes, const int64_t* strides, int8_t* of_dim) {
    for (int d = 0; d < dims; ++d) of_dim[d] = sizes[d] > 1 && strides[d] != 0 ? int8_t(slots++) : int8_t(-1);
    for (int d = 0; d < dims; ++d)
      if (of_dim[d] >= 0 && (strides[d] < 0 || strides[d] * size % 16 != 0)) return false;
    return true;
  };
  if (!assign(params.batch_dims, params.batch_sizes, side.operand->batch_strides, loads.batch_slots) ||
      !assign(params.reduced_dims, params.reduced_sizes, side.reduced_strides, loads.reduced_slots))
    return refuse("has a batch stride that is no multiple of 16 bytes");
  if (slots > 3) return refuse("has more than 3 batch dims");
  loads.batched = slots > 0;
  return "";
}

// Why the kernel cannot run a problem; empty if it can.
inline std::string refusal_of(const GemmParams& params, bool tf32, const rt::Device& device, OperandLoads& a,
                              OperandLoads& b) {
  if (device.compute_capability != 90)
    return "the device has no wgmma; it is sm_" + std::to_string(device.compute_capability);
  if (params.a.dtype == Dtype::kFloat32 && !tf32) return "float32 takes three products of tf32";
  if (params.k == 0) return "k is 0";
  const Side sides[] = {side_a(params), side_b(params)};
  OperandLoads* const loads[] = {&a, &b};
  for (int i = 0; i < 2; ++i) {
    if (tf32 && !sides[i].k_major)
      return std::string(sides[i].name) + " is not contiguous along k, as wgmma needs it for tf32";
    if (sides[i].lines >= int64_t(1) << 31 || params.k >= int64_t(1) << 31) return "a size is 2^31 or more";
    if (std::string refusal = tma_refusal(params, sides[i], *loads[i]); !refusal.empty()) return refusal;
  }
  return "";
}

// Whether TMA can add the product to the output: c is the output itself.
inline bool can_add_by_tma(const GemmParams& params) {
  return params.c.data == params.out.data && params.out.dtype == Dtype::kFloat32 && params.beta == 1.0 &&
         params.bias.data == nullptr && params.activation == Activation::kNone && params.preact_out.data == nullptr;
}

// Whether the epilogue can go from registers through shared memory to TMA.
inline bool can_store_by_tma(const GemmParams& params) {
  if (params.residual.data != nullptr || params.preact.data != nullptr) return false;
  if (params.c.data != nullptr && !can_add_by_tma(params)) return false;
  if (params.out.dtype != params.a.dtype && (params.gated || params.out.dtype != Dtype::kFloat32)) return false;
  if (params.preact_out.data != nullptr && params.preact_out.dtype != params.out.dtype) return false;
  // Three slabs of float32 do not fit in the buffers.
  if (params.preact_out.data != nullptr && params.gated && params.out.dtype == Dtype::kFloat32) return false;
  const auto is_aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  return params.n * int64_t(size_of(params.out.dtype)) % 16 == 0 && is_aligned(params.out.data) &&
         is_aligned(params.preact_out.data);
}

// Predicted cycles until the busiest SM has finished. A k tile costs the maximum of its arithmetic, its transfer from
// L2, and its traffic in shared memory, where each row block of 64 reads all columns. Epilogues come on top, except
// where the other consumer multiplies meanwhile.
inline double expected_cycles(const GemmParams& params, const GemmPlan& plan, const GemmConfig& config,
                              const Rates& rates) {
  constexpr double kStart = 1500;  // filling the pipeline
  constexpr double kSplit = 4000;  // clear_arrivals, and waiting for the last block
  const double element = double(size_of(params.a.dtype)), depth = kLineBytes / element;
  const double area = double(config.block_m) * config.block_n;
  const double lines = config.block_m + config.block_n;
  const double tensor = area * depth / (Rates::kMultiplyAdds * 2 / element);
  const double l2 = (config.block_m + double(config.block_n) / plan.cluster) * kLineBytes / Rates::kL2Bytes;
  const double row_blocks = double(config.block_m) / kRowBlock;
  const double shared = (lines + row_blocks * (kRowBlock + config.block_n)) * kLineBytes / Rates::kSharedBytes;
  const double products = plan.split_k_tiles * std::max({tensor, l2, shared});

  const double out_bytes = double(size_of(params.out.dtype)) * (params.preact_out.data || params.hidden.data ? 3 : 1);
  const double staged = plan.tma_store ? 2 * double(size_of(params.out.dtype)) : 2 * sizeof(float);
  const double epilogue = area * std::max(staged / Rates::kSharedBytes, out_bytes / Rates::kL2Bytes) +
                          (plan.tma_store ? 500 : 500 + 10 * config.block_n);
  const double items = double(ceil_div(plan.items, plan.clusters));
  const double busy = config.ping_pong ? std::max(items * products, (items + 1) / 2 * (products + epilogue)) + epilogue
                                       : items * (products + epilogue);
  // All blocks together cannot read faster than memory.
  const double bytes = (double(params.m) * params.k + double(params.k) * params.n * (has_pairs(params) ? 2 : 1)) *
                           element * double(plan.batches) +
                       double(params.m) * params.n * plan.batches * out_bytes;
  double cycles = kStart + std::max(busy, bytes / (Rates::kMemoryBytes * rates.num_sms));
  if (plan.splits > 1) {
    const double sums = area * sizeof(float) / Rates::kL2Bytes;
    cycles += kSplit + (items + plan.splits) * sums;
  }
  return cycles;
}

// Row groups to cover before the next column, such that concurrent blocks cover about a square of the output and read
// the least from L2 and memory.
inline int choose_raster(const GemmPlan& plan, const GemmConfig& config, int num_sms) {
  const double rows = std::sqrt(double(num_sms) * config.block_n / config.block_m) / plan.cluster;
  return std::clamp(int(std::lround(rows)), 1, plan.row_groups);
}

inline void assign_pieces(const GemmParams& params, const GemmConfig& config, GemmPlan& plan) {
  const Side sides[] = {config.swapped ? side_b(params) : side_a(params),
                        config.swapped ? side_a(params) : side_b(params)};
  const int extents[] = {config.block_m, config.block_n};
  OperandLoads* const loads[] = {&plan.a, &plan.b};
  for (int i = 0; i < 2; ++i) {
    const bool pairs = has_pairs(params) && sides[i].operand == &params.b;
    // A run of columns of one kind: half of a tile, or of a row block, so that a warpgroup has both of each pair.
    const int run = !pairs ? extents[i] : config.swapped ? kRowBlock / 2 : extents[i] / 2;
    const int piece = sides[i].k_major ? (i == 1 && plan.cluster > 1 ? std::min(run, extents[i] / plan.cluster) : run)
                                       : kLineBytes / size_of(sides[i].operand->dtype);
    loads[i]->piece_lines = piece;
    loads[i]->tile_lines = pairs ? extents[i] / 2 : extents[i];
    loads[i]->run_shift = 30;
    if (!pairs) continue;
    loads[i]->run_shift = run / piece == 1 ? 0 : run / piece == 2 ? 1 : 2;
    loads[i]->run_lines = run;
    loads[i]->upper = params.n;
  }
}

// Whether a config and a cluster fit the problem.
inline bool is_legal(const GemmParams& params, const GemmConfig& config, int cluster, int64_t row_tiles) {
  constexpr int64_t kMaxSwapped = 64;
  if (config.swapped && (params.m > kMaxSwapped || cluster > 1)) return false;
  if (config.tma_only && (has_pairs(params) || !can_store_by_tma(params))) return false;
  if (cluster > row_tiles) return false;
  const int run = has_pairs(params) ? (config.swapped ? kRowBlock / 2 : config.block_n / 2) : config.block_n;
  const int piece = kLineBytes / size_of(params.b.dtype);
  return side_b(params).k_major || !has_pairs(params) || run % piece == 0;
}

// A plan for one config and cluster, without splits.
inline GemmPlan make_plan(const GemmParams& params, int index, int cluster, const OperandLoads& a,
                          const OperandLoads& b, const rt::Device& device) {
  const GemmConfig& config = kConfigs[index];
  const int of_pair = has_pairs(params) ? 2 : 1;
  const int64_t rows = config.swapped ? params.n * of_pair : params.m;
  const int64_t columns = config.swapped ? params.m : params.n * of_pair;
  GemmPlan plan;
  plan.config = index;
  plan.cluster = cluster;
  plan.a = config.swapped ? b : a;
  plan.b = config.swapped ? a : b;
  plan.row_groups = checked_count(ceil_div(ceil_div(rows, config.block_m), cluster), "rows of tiles");
  plan.column_tiles = checked_count(ceil_div(columns, config.block_n), "columns of tiles");
  plan.batches = checked_count(product_of(params.batch_dims, params.batch_sizes), "batches");
  checked_count(int64_t(plan.row_groups) * cluster * plan.column_tiles * plan.batches, "tiles of the output");
  plan.k_tiles = int(ceil_div(params.k * size_of(params.a.dtype), kLineBytes));
  plan.all_k_tiles =
      checked_count(plan.k_tiles * product_of(params.reduced_dims, params.reduced_sizes), "tiles along k");
  plan.tma_store = !config.swapped && can_store_by_tma(params);
  plan.tma_add = plan.tma_store && params.c.data != nullptr;
  plan.raster = choose_raster(plan, config, device.num_sms);
  assign_pieces(params, config, plan);
  return plan;
}

// The plan with the lowest predicted time. `tf32`: float32 operands may be rounded to tf32.
inline GemmChoice choose_plan(const GemmParams& params, bool tf32, const rt::Device& device,
                              const Restriction& only = {}) {
  constexpr int kMaxSplits = 32;
  constexpr int kMinSplitTiles = 4;  // about the time to fill the pipeline
  GemmChoice choice;
  OperandLoads a, b;
  choice.refusal = refusal_of(params, tf32, device, a, b);
  if (!choice.refusal.empty()) return choice;
  const Rates rates{device.num_sms};
  for (int index = 0; index < kNumConfigs; ++index) {
    const GemmConfig& config = kConfigs[index];
    if (only.config >= 0 && index != only.config) continue;
    const int64_t row_tiles = ceil_div(config.swapped ? params.n : params.m, config.block_m);
    for (int cluster = 1; cluster <= 2; ++cluster) {
      if (only.cluster > 0 && cluster != only.cluster) continue;
      if (!is_legal(params, config, cluster, row_tiles) || cluster > device.num_sms) continue;
      GemmPlan plan = make_plan(params, index, cluster, a, b, device);
      const int64_t tiles = int64_t(plan.row_groups) * plan.column_tiles * plan.batches;  // of a block
      for (int splits = 1; splits <= (only.batch_invariant ? 1 : kMaxSplits); ++splits) {
        plan.split_k_tiles = int(ceil_div(plan.all_k_tiles, splits));
        if (ceil_div(plan.all_k_tiles, plan.split_k_tiles) != splits) continue;  // a split would be empty
        if (only.splits > 0 && splits != only.splits) continue;
        if (splits > 1 && only.splits == 0) {
          if (plan.split_k_tiles < kMinSplitTiles) break;
          if (tiles * cluster * splits > 2 * int64_t(device.num_sms)) break;  // more than two waves
        }
        plan.splits = splits;
        plan.items = checked_count(tiles * splits, "work items");
        plan.clusters = int(std::min<int64_t>(plan.items, device.num_sms / cluster));
        plan.cycles = expected_cycles(params, plan, config, rates);
        if (!choice.plan || plan.cycles < choice.plan->cycles) choice.plan = plan;
      }
    }
  }
  if (!choice.plan) choice.refusal = "no tile shape fits the restriction";
  return choice;
}

}  // namespace cuda_ext::sm90
