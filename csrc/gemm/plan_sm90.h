// Chooses how a GEMM runs on wgmma (sm_90a): which tile, and how the work is divided among persistent blocks. Decided
// on the host, from sizes, strides and alignments; no header of CUDA is needed.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

#include "base/device.h"
#include "gemm/copy_operand_sm90.h"

namespace cuda_ext::sm90 {

// Device properties the cost model uses: those of an H200 while wgmma multiplies random numbers; sources are in
// benchmarks/model/gpus.py. Rates are per cycle and SM, and only their ratios matter.
struct Rates {
  int num_sms;
  static constexpr double kMultiplyAdds = 0.963 * 2048;  // of 16-bit operands; half of tf32
  static constexpr double kL2Bytes = 39.5;               // while all SMs read
  static constexpr double kL2PortBytes = 64;             // of one SM, while few read
  static constexpr double kSharedBytes = 128;
  static constexpr double kMemoryBytes = 19.3;
  // Of an epilogue: instructions of each of the 4 schedulers, and the cycles of it that the products of the other
  // consumer hide. From products with gelu and without an epilogue on an H100, in both schedules (docs/gpu.md).
  static constexpr double kEpilogueIssue = 0.5;
  static constexpr double kHiddenEpilogue = 5000;
  static constexpr double kL2Capacity = 50 << 20;
  static constexpr double kRemoteBytes = 16;     // to the shared memory of another SM
  static constexpr double kRemoteLatency = 180;  // cycles

  // Of L2, for each of the blocks that run: few share all of it, up to what one can receive.
  double l2_bytes_of(int blocks) const { return std::min(kL2PortBytes, kL2Bytes * num_sms / blocks); }

  // Clusters that run at once. They do not cross the borders of GPCs, which have 16 or 18 SMs, or fewer: on an H100, 32
  // clusters of 4 took two waves.
  int clusters_at_once(int blocks) const {
    constexpr int kGpc = 16;
    if (blocks <= 2 || num_sms < 2 * kGpc) return std::max(1, num_sms / blocks);
    return (num_sms / kGpc - 1) * (kGpc / blocks);
  }
};

// Cycles of the kernel on mma.sync for a product whose operands TMA cannot read, about as on an H100 (docs/gpu.md):
// there elements that are not aligned to 16 bytes are loaded a few at a time, and tf32 reaches 155 TFLOP/s.
inline double cycles_of_mma_sync(const GemmParams& params, const Copies& copies, int num_sms) {
  constexpr double kMultiplyAdds = 700, kMultiplyAddsTf32 = 370;  // per cycle and SM
  constexpr double kKTile = 500, kWarpLoad = 6;                   // cycles; of a tile of 128 x 128 x 32
  constexpr int kTile = 128, kDepth = 32;
  const double columns = double(params.n) * (has_gate_up(params) ? 2 : 1);
  const double batches = double(product_of(params.batch_dims, params.batch_sizes));
  const double depth = double(params.k) * double(product_of(params.reduced_dims, params.reduced_sizes));
  double loads = 0;  // warp instructions of a k tile
  const auto add = [&](const Operand& operand) {
    const int64_t size = size_of(operand.dtype);
    const int64_t strides = operand.row_stride == 1 ? operand.column_stride : operand.row_stride;
    const uint64_t bits = uint64_t(reinterpret_cast<uintptr_t>(operand.data)) | uint64_t(strides * size) | 16;
    loads += kTile * kDepth * double(size) / (32 * double(bits & (~bits + 1)));
  };
  if (copies.a) add(params.a);
  if (copies.b) add(params.b);
  const double tiles = std::ceil(double(params.m) / kTile) * std::ceil(columns / kTile) * batches;
  const double of_sm = std::ceil(tiles / num_sms);
  const double k_tiles = std::ceil(depth / kDepth);
  const double rate = params.a.dtype == Dtype::kFloat32 ? kMultiplyAddsTf32 : kMultiplyAdds;
  return std::max(of_sm * k_tiles * (kKTile + kWarpLoad * loads),
                  double(params.m) * columns * depth * batches / (rate * num_sms));
}

struct GemmChoice {
  std::optional<GemmPlan> plan;
  std::string refusal;  // why there is none
};

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

// Predicted cycles of the busiest SM.
struct Estimate {
  // What each resource would take alone.
  double tensor, shared, l2, memory;
  double epilogue;  // during which no products are computed
  double latency;   // filling the pipeline; adding the sums of parts of k
  double total;

  const char* limit() const {
    const double most = std::max({tensor, shared, l2, memory, epilogue, latency});
    return most == tensor     ? "tensor cores"
           : most == memory   ? "memory"
           : most == l2       ? "L2"
           : most == shared   ? "shared memory"
           : most == epilogue ? "epilogue"
                              : "latency";
  }
};

// Bytes of a row of the output in all tensors that the epilogue reads and writes, per column.
inline double epilogue_bytes(const GemmParams& params) {
  const double size = double(size_of(params.out.dtype));
  double bytes = params.gated && params.preact.data != nullptr ? 2 * size : size;
  const auto add = [&](const void* data, Dtype dtype, int columns) {
    if (data != nullptr) bytes += columns * double(size_of(dtype));
  };
  const int parts = params.gated ? 2 : 1;
  add(params.c.data, params.c.dtype, 1);
  add(params.residual.data, params.residual.dtype, 1);
  add(params.preact_out.data, params.preact_out.dtype, parts);
  add(params.preact.data, params.preact.dtype, parts);
  add(params.hidden.data, params.hidden.dtype, 1);
  return bytes;
}

// Instructions of a warp's epilogue for 16 rows and 16 columns, about as in the machine code.
inline double epilogue_instructions(const GemmParams& params, bool tma_store) {
  const double activation = params.activation == Activation::kNone ? 0 : 300;
  if (!tma_store) return 400 + activation;
  if (has_gate_up(params)) return 160 + activation / 2;
  const bool is_plain = activation == 0 && params.bias.data == nullptr && params.preact_out.data == nullptr;
  return is_plain ? 90 : 190 + activation;
}

// Cycles of the epilogue of a tile of `area` sums: of its instructions, and of all.
inline double epilogue_issue(const GemmParams& params, bool tma_store, double area) {
  return area * epilogue_instructions(params, tma_store) / (4 * 16 * 16 * Rates::kEpilogueIssue);
}
inline double epilogue_cycles(const GemmParams& params, bool tma_store, double area, double l2_rate) {
  const double staged = tma_store ? 2 * double(size_of(params.out.dtype)) : 2 * sizeof(float);
  const double moved = area * std::max(staged / Rates::kSharedBytes, epilogue_bytes(params) / l2_rate);
  return std::max(moved, epilogue_issue(params, tma_store, area)) + 500;
}

// Cycles that splits of k add: an SM stores the sums of its items, and the last block of a tile reads those of all.
constexpr double kSplit = 5500;  // clear_words, and waiting for the last block
inline double split_cycles(double area, double items, int splits) {
  return splits == 1 ? 0.0 : kSplit + (items + splits) * area * sizeof(float) / Rates::kL2Bytes;
}
constexpr int kMaxSplits = 32;
constexpr int kMinSplitTiles = 4;  // about the time to fill the pipeline

// The time of two resources in use at the same time, which contend if they take equally long: the 8-norm.
inline double together(double x, double y) {
  const double most = std::max(x, y), ratio = std::min(x, y) / most;
  const double square = ratio * ratio, fourth = square * square;
  return most * std::sqrt(std::sqrt(std::sqrt(1 + fourth * fourth)));
}

constexpr double kStart = 1500;  // filling the pipeline

// A k tile costs its arithmetic or its traffic in shared memory, where each row block of 64 reads all columns, and its
// transfer from L2. Epilogues come on top, except where the other consumer multiplies meanwhile.
inline Estimate estimate(const GemmParams& params, const GemmPlan& plan, const GemmConfig& config, const Rates& rates) {
  const double element = double(size_of(params.a.dtype)), depth = kLineBytes / element;
  const double area = double(config.block_m) * config.block_n;
  const double lines = config.block_m + config.block_n;
  const int clusters = std::min(plan.clusters, rates.clusters_at_once(plan.cluster_blocks()));
  const double items = double(ceil_div(plan.items, clusters)), k_tiles = items * plan.split_k_tiles;
  const double l2_rate = rates.l2_bytes_of(clusters * plan.cluster_blocks());
  // Lines of a tile beyond the matrix are not transferred.
  const double columns = config.swapped ? double(params.m) : double(params.n) * (has_gate_up(params) ? 2 : 1);
  const double rows = config.swapped ? double(params.n) * (has_gate_up(params) ? 2 : 1) : double(params.m);
  const double loaded =
      std::min<double>(config.block_m, rows) + std::min<double>(config.block_n, columns) / plan.cluster;
  const double row_blocks = double(config.block_m) / kRowBlock;

  Estimate cost;
  cost.tensor = k_tiles * area * depth / (Rates::kMultiplyAdds * 2 / element);
  cost.shared = k_tiles * (lines + row_blocks * (kRowBlock + config.block_n)) * kLineBytes / Rates::kSharedBytes;
  cost.l2 = k_tiles * loaded * kLineBytes / l2_rate;

  const double issue = epilogue_issue(params, plan.tma_store, area);
  const double epilogue = epilogue_cycles(params, plan.tma_store, area, l2_rate);
  const double products = together(std::max(cost.tensor, cost.shared), cost.l2);
  double busy = products + items * epilogue;
  if (config.ping_pong)  // of the last epilogue nothing is hidden, unless a consumer's own tiles take longer
    busy = std::max(products + epilogue + (items - 1) * std::max(0.0, issue - Rates::kHiddenEpilogue),
                    ceil_div(int64_t(items), 2) * (products / items + epilogue));
  cost.epilogue = busy - products;

  // All blocks together cannot read faster than memory.
  const double bytes = (double(params.m) * params.k + double(params.k) * params.n * (has_gate_up(params) ? 2 : 1)) *
                           element * double(plan.batches) * plan.all_k_tiles / plan.k_tiles +
                       double(params.m) * params.n * plan.batches * epilogue_bytes(params);
  cost.memory = bytes / (Rates::kMemoryBytes * rates.num_sms);
  cost.latency = kStart;
  if (plan.cluster_blocks() > 1)
    cost.latency += 2 * Rates::kRemoteLatency;  // its barriers at the beginning and the end
  if (plan.k_blocks > 1)                        // the first block receives the sums of the others
    cost.latency += Rates::kRemoteLatency + (plan.k_blocks - 1) * area * sizeof(float) / Rates::kRemoteBytes;
  cost.latency += split_cycles(area, items, plan.splits);
  cost.total = together(busy, cost.memory) + cost.latency;
  return cost;
}

// Bytes of the operands that a product without batches reads from memory, with bands of `raster` row groups. Concurrent
// blocks advance through k together, and so share what they read. What later blocks read again must stay in L2 until
// then, beside the operands and the output of all concurrent blocks.
inline double operand_bytes(const GemmPlan& plan, const GemmConfig& config, int raster) {
  const double k_bytes = double(plan.all_k_tiles) * kLineBytes;
  const double row_bytes = double(plan.cluster) * config.block_m * k_bytes, column_bytes = config.block_n * k_bytes;
  const int64_t band = int64_t(raster) * plan.column_tiles, clusters = plan.clusters;
  const int64_t bands = std::max<int64_t>(1, clusters / band);  // at once
  // Where bands and sets of concurrent blocks do not end together, a set has parts of more bands.
  const bool ends_together = band % clusters == 0 || clusters % band == 0;
  const int64_t most_bands = ends_together ? bands : (clusters - 2) / band + 2;
  const double columns = double(std::min<int64_t>(ceil_div(clusters, raster), plan.column_tiles));
  const double written = double(clusters) * plan.cluster * config.block_m * config.block_n * 2;
  // The room for columns beside the rows of `live_bands` bands.
  const auto kept = [&](int64_t live_bands) {
    const double rows = double(std::min<int64_t>(live_bands * raster, plan.row_groups));
    return Rates::kL2Capacity - rows * row_bytes - written;
  };
  const auto fits = [&](double column_count, int64_t live_bands) {
    return column_count * column_bytes <= kept(live_bands);
  };
  // A set that has parts of two long bands reads the rows again, but there is one such set for each band.
  const bool is_long = band > clusters;
  double a_passes = std::ceil(plan.column_tiles / columns);
  if (fits(columns, most_bands))
    a_passes = 1;
  else if (is_long && fits(columns, bands))
    a_passes = std::min(a_passes, 2.0);
  const double b_passes = fits(plan.column_tiles, most_bands) ? 1 : double(ceil_div(plan.row_groups, bands * raster));
  return plan.row_groups * row_bytes * a_passes + plan.column_tiles * column_bytes * b_passes;
}

// Row groups of a band. Of those that read the least from memory, the one that makes the tiles of concurrent blocks
// most nearly a square.
inline int choose_raster(const GemmPlan& plan, const GemmConfig& config) {
  const double square = std::sqrt(double(plan.clusters) * config.block_n / (plan.cluster * config.block_m));
  const auto distance = [&](int raster) { return std::abs(std::log(raster / square)); };
  int best = 0;
  double least = 0;
  for (int bands = 1; bands <= 64; ++bands) {
    const int raster = int(ceil_div(plan.row_groups, bands));
    if (raster == best) continue;
    const double bytes = operand_bytes(plan, config, raster);
    if (best == 0 || bytes < least || (bytes == least && distance(raster) < distance(best))) {
      best = raster;
      least = bytes;
    }
  }
  return best;
}

inline void assign_pieces(const GemmParams& params, const GemmConfig& config, GemmPlan& plan) {
  const Side sides[] = {config.swapped ? side_b(params) : side_a(params),
                        config.swapped ? side_a(params) : side_b(params)};
  const int extents[] = {config.block_m, config.block_n};
  OperandLoads* const loads[] = {&plan.a, &plan.b};
  for (int i = 0; i < 2; ++i) {
    const bool gate_up = has_gate_up(params) && sides[i].operand == &params.b;
    // A run of columns of one kind: half of a tile, or of a row block, so that a warpgroup has gate and up of its
    // columns.
    const int run = !gate_up ? extents[i] : config.swapped ? kRowBlock / 2 : extents[i] / 2;
    const int piece = sides[i].k_major ? (i == 1 && plan.cluster > 1 ? std::min(run, extents[i] / plan.cluster) : run)
                                       : kLineBytes / size_of(sides[i].operand->dtype);
    loads[i]->piece_lines = piece;
    loads[i]->pieces = int(ceil_div(extents[i], piece));
    loads[i]->tile_lines = gate_up ? extents[i] / 2 : extents[i];
    loads[i]->run_shift = 30;
    if (!gate_up) continue;
    loads[i]->run_shift = run / piece == 1 ? 0 : run / piece == 2 ? 1 : 2;
    loads[i]->run_lines = run;
    loads[i]->upper = params.n;
  }
}

// Whether a config and a cluster fit the problem.
inline bool is_legal(const GemmParams& params, const GemmConfig& config, int cluster, int64_t row_tiles) {
  if (config.swapped && params.m > config.block_n) return false;
  // Lines along m are as long as a line of the swizzle.
  if (config.swapped && !side_a(params).k_major && config.block_n * size_of(params.a.dtype) < kLineBytes) return false;
  if (config.tma_only && (has_gate_up(params) || !can_store_by_tma(params))) return false;
  if (cluster > row_tiles) return false;
  const int run = has_gate_up(params) ? (config.swapped ? kRowBlock / 2 : config.block_n / 2) : config.block_n;
  const int piece = kLineBytes / size_of(params.b.dtype);
  return side_b(params).k_major || !has_gate_up(params) || run % piece == 0;
}

// A plan for one config and cluster, without splits.
inline GemmPlan make_plan(const GemmParams& params, int index, int cluster, const OperandLoads& a,
                          const OperandLoads& b) {
  const GemmConfig& config = kConfigs[index];
  const int parts = has_gate_up(params) ? 2 : 1;
  const int64_t rows = config.swapped ? params.n * parts : params.m;
  const int64_t columns = config.swapped ? params.m : params.n * parts;
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
  assign_pieces(params, config, plan);
  return plan;
}

// The plan with the lowest predicted time, of operands where they are.
inline GemmChoice choose_in_place(const GemmParams& params, bool tf32, const rt::Device& device,
                                  const Restriction& only) {
  constexpr int kMaxCluster = 8;  // that every device supports
  GemmChoice choice;
  OperandLoads a, b;
  choice.refusal = refusal_of(params, tf32, device, a, b);
  if (!choice.refusal.empty()) return choice;
  const Rates rates{device.num_sms};
  // Without splits the terms of a row are added in the same order in all configs. Swapped ones are left out, because
  // nothing is documented about the order inside of a wgmma whose operands are exchanged.
  for (int index = 0; index < kNumConfigs; ++index) {
    const GemmConfig& config = kConfigs[index];
    if ((only.config >= 0 && index != only.config) || (params.batch_invariant && config.swapped)) continue;
    const int64_t row_tiles = ceil_div(config.swapped ? params.n : params.m, config.block_m);
    for (int cluster = 1; cluster <= 2; ++cluster) {
      if (only.cluster > 0 && cluster != only.cluster) continue;
      if (!is_legal(params, config, cluster, row_tiles)) continue;
      GemmPlan plan = make_plan(params, index, cluster, a, b);
      const int64_t tiles = int64_t(plan.row_groups) * plan.column_tiles * plan.batches;  // of a block
      const auto consider = [&](int k_blocks, int splits) {
        plan.split_k_tiles = int(ceil_div(plan.all_k_tiles, k_blocks * splits));
        if (ceil_div(plan.all_k_tiles, plan.split_k_tiles) != k_blocks * splits) return;  // a part would be empty
        plan.k_blocks = k_blocks;
        plan.splits = splits;
        plan.items = checked_count(tiles * splits, "work items");
        const int at_once = rates.clusters_at_once(plan.cluster_blocks());
        // As few as finish in the same time: equal work keeps them in step, so that they share operands in L2. Blocks
        // that divide k take one item, because their buffers for sums are filled once.
        plan.clusters = k_blocks > 1 ? plan.items : int(ceil_div(plan.items, ceil_div(plan.items, at_once)));
        plan.cycles = estimate(params, plan, config, rates).total;
        if (!choice.plan || plan.cycles < choice.plan->cycles) choice.plan = plan;
      };
      // More parts than asked for are worth their cost only if they run at once.
      const auto divides = [&](int parts, int asked, int64_t most_blocks) {
        if (parts == 1 || asked > 0) return asked == 0 || parts == asked;
        return ceil_div(plan.all_k_tiles, parts) >= kMinSplitTiles && tiles * cluster * parts <= most_blocks;
      };
      for (int splits = 1; splits <= (params.batch_invariant ? 1 : kMaxSplits); ++splits)
        if (divides(splits, only.splits, 2 * int64_t(device.num_sms)) && only.k_blocks <= 1) consider(1, splits);
      for (int k_blocks = 2; k_blocks <= config.k_blocks && k_blocks * cluster <= kMaxCluster; ++k_blocks)
        if (divides(k_blocks, only.k_blocks, device.num_sms) && only.splits <= 1) consider(k_blocks, 1);
    }
  }
  if (choice.plan)
    choice.plan->raster = choose_raster(*choice.plan, kConfigs[choice.plan->config]);
  else
    choice.refusal = "no tile shape fits the restriction";
  return choice;
}

// The plan with the lowest predicted time. `tf32`: float32 operands may be rounded to tf32. Operands that TMA cannot
// read are copied first where that takes less time than the kernel on mma.sync.
inline GemmChoice choose_plan(const GemmParams& params, bool tf32, const rt::Device& device,
                              const Restriction& only = {}) {
  constexpr int64_t kMostBytes = 1 << 30;  // of copies
  constexpr int kFewRows = 64;             // copies take longer than reading the weights once
  constexpr double kCopy = 4000;           // cycles of a launch
  GemmChoice choice = choose_in_place(params, tf32, device, only);
  // The choice must not depend on the number of rows if the bits of one must not.
  if (choice.plan || only.copies == 0 || params.batch_invariant || params.k == 0) return choice;
  const Copies copies = copies_for(params, tf32);
  WorkspaceCursor cursor(reinterpret_cast<void*>(256));
  const CopiedProduct product = with_copies(params, copies, cursor);
  if (product.count == 0) return choice;
  GemmChoice with = choose_in_place(product.params, tf32, device, only);
  if (!with.plan) return choice;
  with.plan->cycles += product.count * kCopy + 2.0 * double(product.bytes) / (Rates::kMemoryBytes * device.num_sms);
  const bool pays = std::min(params.m, params.n) >= kFewRows && product.bytes <= kMostBytes &&
                    with.plan->cycles < 0.9 * cycles_of_mma_sync(params, copies, device.num_sms);
  if (!pays && only.copies != 1) return choice;
  with.plan->copies = copies;
  return with;
}

}  // namespace cuda_ext::sm90
