// The launch plan of attention backward, and its workspace.
#pragma once

#include <limits>
#include <stdexcept>
#include <string>

#include "attention/attention_plan.h"
#include "attention/dropout.cuh"
#include "attention/mask.cuh"
#include "attention/options.cuh"
#include "attention/scheduler.cuh"
#include "base/device.h"
#include "base/workspace.h"

namespace cuda_ext::attention {

// Everything the host decides; the same for all blocks.
struct BackwardPlan {
  Schedule schedule;    // of tiles of keys
  int query_tiles = 0;  // of the longest sequence
  int splits = 1;       // blocks that share the loop over the queries of a tile of keys
  int head_rows = 0;    // rows of a head in the workspace, all sequences padded to tiles
  float factor;         // converts scores, if nothing modifies them, to powers of two
  bool modifies;        // the logits are more than that, or probs are dropped
  float lse_factor;     // converts natural logarithms to the unit of minus_lse
  LogitOptions logits;
  float kept_scale = 1.0f;  // 1 / (1 - dropout_p)
  float lse_to_powers;      // converts minus_lse to powers of two
  Dropout dropout;
  int64_t query_pass = 0, grad_out_pass = 0;  // bytes between the lines that a thread copies
  // In the workspace.
  float* minus_lse = nullptr;    // (heads, head_rows), -lse_factor lse; -inf if the row sees no key
  float* minus_delta = nullptr;  // (heads, head_rows)
  float* grad_query = nullptr;   // sums, (heads, head_rows / block_m) tiles; null if dQ has a separate kernel
  uint32_t* dq_semaphore =
      nullptr;                // deterministic: (heads, head_rows / block_m), how many blocks have added to a tile
  float* grad_key = nullptr;  // parts: (splits, head_batches, tiles) tiles or, of long lists, (most_parts, slots)
  float* grad_value = nullptr;
  LongLists long_lists;
};

// In the workspace the tiles of a head's queries are contiguous, and each sequence starts with a new tile. Returns the
// first tile of a sequence.
template <int block_m>
DEVICE int first_tile(const AttentionParams& p, const BackwardPlan& plan, int batch) {
  return p.cu_seqlens_q == nullptr ? batch * plan.query_tiles
                                   : arch::load_global<int32_t>(p.cu_seqlens_q + batch) / block_m + batch;
}

// The sequence to which tile `tile` of a head belongs. With varlen there may be tiles without queries between them.
template <int block_m>
DEVICE int sequence_of_tile(const AttentionParams& p, const BackwardPlan& plan, int tile) {
  if (p.cu_seqlens_q == nullptr) return tile / plan.query_tiles;
  int batch = 0;
  for (int end = int(p.batch); end - batch > 1;) {
    const int middle = batch + (end - batch) / 2;
    (first_tile<block_m>(p, plan, middle) <= tile ? batch : end) = middle;
  }
  return batch;
}

template <class Config>
BackwardPlan plan_backward(const AttentionBackwardParams& p, const Config& config, const rt::Device& device) {
  constexpr double kLog2e = 1.4426950408889634;
  const auto tiles_of = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
  BackwardPlan plan;
  const int64_t head_batches = p.heads_kv * p.batch, group = p.heads / p.heads_kv;
  plan.query_tiles = int(tiles_of(p.seqlen_q, config.block_m));
  // A block mask orders whole blocks of keys.
  plan.schedule.tiles = int(p.block_mask ? p.block_mask.key_blocks * (kMaskBlock / config.block_n)
                                         : tiles_of(p.seqlen_k, config.block_n));
  plan.schedule.heads = int(p.heads_kv);
  plan.schedule.section = section_size(p.seqlen_q * group * (4 * p.dim + 2 * (p.dim + p.dim_v)), head_batches);
  plan.splits = choose_splits(head_batches * plan.schedule.tiles, int64_t(device.num_sms) * config.min_blocks,
                              group * plan.query_tiles);
  // With `deterministic` blocks wait for those of earlier keys, so the longest cannot start first.
  if (p.block_mask && plan.splits == 1 && !p.deterministic)
    plan.long_lists = choose_long_lists(p.block_mask.key_blocks, config.block_n, head_batches,
                                        int64_t(device.num_sms) * config.min_blocks);
  plan.schedule.tiles += plan.long_lists.extra_blocks();
  // Per head; each sequence starts with a new tile.
  const int64_t query_tiles =
      p.cu_seqlens_q != nullptr && p.batch > 0 ? p.total_q / config.block_m + p.batch : p.batch * plan.query_tiles;
  const auto check = [&](const char* what, int64_t count) {
    if (count > std::numeric_limits<int>::max())
      throw std::invalid_argument(std::string("expected at most 2^31 ") + what + ", got " + std::to_string(count) +
                                  "; divide the batch");
  };
  check("tiles of keys", head_batches * plan.schedule.tiles * plan.splits);
  check("padded queries of all heads", p.heads * query_tiles * config.block_m);
  plan.schedule.head_batches = int(head_batches);
  plan.head_rows = int(query_tiles * config.block_m);
  plan.factor = float(p.scale * kLog2e);
  plan.modifies = modifies_logits(p) || p.dropout_p > 0;
  // float32 has it in the unit of the lse that it gets, which another would round again (MinusLse in bwd_scores.cuh).
  const bool natural_lse = plan.modifies || p.dtype == Dtype::kFloat32;
  plan.lse_factor = float(natural_lse ? 1.0 : 1.0 / p.scale);
  plan.lse_to_powers = float(natural_lse ? kLog2e : p.scale * kLog2e);
  plan.logits = logit_options_of(p);
  plan.kept_scale = float(1 / (1 - p.dropout_p));
  plan.dropout = dropout_of(p);
  return plan;
}

// Assigns the arrays of `plan` in the workspace at `data`, which may be null to find the size.
template <class Config>
WorkspaceCursor assign_workspace(const AttentionBackwardParams& p, const Config& config, void* data,
                                 BackwardPlan& plan) {
  WorkspaceCursor cursor(data);
  const int64_t rows = p.heads * plan.head_rows;
  cursor.allocate(plan.minus_lse, rows);
  cursor.allocate(plan.minus_delta, rows);
  if (!config.separate) cursor.allocate(plan.grad_query, rows * config.sums_dim());
  if (!config.separate && p.deterministic) cursor.allocate(plan.dq_semaphore, rows / config.block_m);
  const int64_t tiles = plan.splits > 1 ? int64_t(plan.splits) * plan.schedule.head_batches * plan.schedule.tiles
                                        : int64_t(plan.long_lists.most_parts) * plan.long_lists.slots;
  if (tiles > 0) {
    cursor.allocate(plan.grad_key, tiles * config.block_n * config.dim);
    cursor.allocate(plan.grad_value, tiles * config.block_n * config.dim_v);
  }
  return cursor;
}

// What a launch of `Kernel` would run.
template <class Kernel, class Config>
AttentionPlan describe_plan(const AttentionBackwardParams& p, const Config& config, const rt::Device& device) {
  BackwardPlan plan = plan_backward(p, config, device);
  const int64_t tiles = int64_t(plan.schedule.head_batches) * (plan.schedule.tiles - plan.long_lists.extra_blocks());
  return {.dim = config.dim,
          .dim_v = config.dim_v,
          .block_m = Kernel::kBlockM,
          .block_n = Kernel::kBlockN,
          .with_options = Kernel::kWithOptions,
          .splits = plan.splits,
          .most_parts = plan.long_lists.most_parts,
          .tiles = tiles,
          .blocks = int64_t(plan.schedule.head_batches) * plan.schedule.tiles * plan.splits,
          .threads = Kernel::kThreads,
          .workspace = assign_workspace(p, config, nullptr, plan).used()};
}

}  // namespace cuda_ext::attention
