// The launch plan of attention forward, and its workspace.
#pragma once

#include <limits>
#include <stdexcept>
#include <string>

#include "attention/attention_plan.h"
#include "attention/bias.cuh"
#include "attention/dropout.cuh"
#include "attention/options.cuh"
#include "attention/scheduler.cuh"
#include "base/workspace.h"

namespace cuda_ext::attention {

// Everything the host decides; the same for all blocks.
struct ForwardPlan {
  Schedule schedule;
  int block_n;       // keys of a tile
  int pack_gqa = 1;  // heads of a tile
  int splits = 1;    // of the keys
  float factor;      // converts the argument of softmax to powers of two
  // With options:
  bool modifies_logits = false;
  LogitOptions logits;
  bool bias_two_keys = false;  // two keys by one load
  float kept_scale = 1.0f;     // 1 / (1 - dropout_p)
  Dropout dropout;
  int64_t key_pass = 0, value_pass = 0;  // bytes between the lines that a thread copies
  // In the workspace, of tiles that are divided among several blocks: (splits, rows of lse) or, of long lists,
  // (most_parts, slots, rows).
  float* partial_out = nullptr;  // (.., dim_v)
  float* partial_lse = nullptr;
  LongLists long_lists;
  // Of rows that are in no slot of these: parts in the workspace or, if the keys are not divided, the results.
  float* lse = nullptr;
  HeadsView float32_out;

  HOST_DEVICE int items() const { return schedule.head_batches * schedule.tiles * splits; }  // tiles, or parts of tiles
};

// Kernel properties that the plan needs.
struct ForwardShape {
  int block_m;
  int block_n;
  int64_t at_once;              // blocks that the device runs concurrently
  bool packs_any_group = true;  // else only groups that divide block_m
};

inline int64_t lse_rows(const AttentionParams& p) {
  return p.heads * (p.cu_seqlens_q != nullptr ? p.total_q : p.batch * p.seqlen_q);
}

inline ForwardPlan plan_forward(const AttentionParams& p, const ForwardShape& shape) {
  constexpr double kLog2e = 1.4426950408889634;
  const auto tiles_of = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
  const int64_t group = p.heads / p.heads_kv;
  // A block mask orders whole blocks of queries.
  const int64_t tiles =
      p.block_mask ? p.block_mask.query_blocks * (kMaskBlock / shape.block_m) : tiles_of(p.seqlen_q, shape.block_m);
  const int64_t gqa_tiles = tiles_of(p.seqlen_q * group, shape.block_m);
  ForwardPlan plan;
  const bool can_pack = shape.packs_any_group || shape.block_m % group == 0;
  // The lists of a block mask are those of 128 queries of a head.
  plan.pack_gqa = int(can_pack && !p.block_mask && gqa_tiles * p.heads_kv < tiles * p.heads ? group : 1);
  plan.schedule.tiles = int(plan.pack_gqa > 1 ? gqa_tiles : tiles);
  plan.schedule.heads = int(p.heads / plan.pack_gqa);
  const int64_t head_batches = plan.schedule.heads * p.batch;
  if (head_batches * plan.schedule.tiles > std::numeric_limits<int>::max())
    throw std::invalid_argument("expected at most 2^31 tiles of queries, got " +
                                std::to_string(head_batches * plan.schedule.tiles) + "; divide the batch");
  plan.schedule.head_batches = int(head_batches);
  plan.schedule.section =
      section_size(p.seqlen_k * (p.dim + p.dim_v) * 2 * p.heads_kv / plan.schedule.heads, head_batches);
  plan.block_n = shape.block_n;
  plan.splits = choose_splits(head_batches * plan.schedule.tiles, shape.at_once, tiles_of(p.seqlen_k, shape.block_n));
  if (p.block_mask && plan.splits == 1)
    plan.long_lists = choose_long_lists(p.block_mask.query_blocks, shape.block_m, head_batches, shape.at_once);
  plan.schedule.tiles += plan.long_lists.extra_blocks();
  plan.modifies_logits = modifies_logits(p);
  plan.factor = float(plan.modifies_logits ? kLog2e : p.scale * kLog2e);
  plan.logits = logit_options_of(p);
  plan.bias_two_keys = can_read_two_keys(p);
  plan.kept_scale = float(1 / (1 - p.dropout_p));
  plan.dropout = dropout_of(p);
  return plan;
}

// Assigns the arrays of `plan` in the workspace at `data`, which may be null to find the size.
inline WorkspaceCursor assign_workspace(const AttentionParams& p, void* data, ForwardPlan& plan) {
  WorkspaceCursor cursor(data);
  const LongLists& lists = plan.long_lists;
  const int64_t rows =
      plan.splits > 1 ? plan.splits * lse_rows(p) : int64_t(lists.slots) * lists.rows * lists.most_parts;
  if (rows > 0) {
    cursor.allocate(plan.partial_out, rows * p.dim_v);
    cursor.allocate(plan.partial_lse, rows);
  }
  plan.lse = static_cast<float*>(p.lse);
  plan.float32_out = p.out;
  if (plan.splits > 1) {
    const bool varlen = p.cu_seqlens_q != nullptr;
    const int64_t head_stride = (varlen ? p.total_q : p.seqlen_q) * p.dim_v;
    plan.lse = plan.partial_lse;
    plan.float32_out = {plan.partial_out, varlen ? 0 : p.heads * head_stride, p.dim_v, head_stride};
  }
  return cursor;
}

inline bool is_empty(const AttentionParams& p) { return lse_rows(p) == 0 || p.seqlen_q == 0 || p.batch == 0; }

// What a launch of `Kernel` in `blocks` blocks would run.
template <class Kernel, class Config>
AttentionPlan describe_plan(const AttentionParams& p, const Config& config, ForwardPlan plan, int blocks) {
  return {.dim = config.dim,
          .dim_v = config.dim_v,
          .block_m = Kernel::kBlockM,
          .block_n = Kernel::kBlockN,
          .with_options = Kernel::kWithOptions,
          .pack_gqa = plan.pack_gqa,
          .splits = plan.splits,
          .most_parts = plan.long_lists.most_parts,
          .tiles = int64_t(plan.schedule.head_batches) * (plan.schedule.tiles - plan.long_lists.extra_blocks()),
          .blocks = blocks,
          .threads = Kernel::kThreads,
          .workspace = assign_workspace(p, nullptr, plan).used()};
}

}  // namespace cuda_ext::attention
