// The small kernels of attention backward, before and after the main one: row sums, conversion of float32 sums to
// gradients, and the gradient of sinks.
#pragma once

#include "attention/block_lists.cuh"
#include "attention/plan_bwd.cuh"
#include "attention/rows.cuh"
#include "rt/launch.cuh"
#include "tile/results.cuh"

namespace cuda_ext::attention {

// Stores -delta and -lse of every row, and zeros in the tiles (block_m, dim) where dQ will be summed, none if dim is 0.
// Grid: (tiles of queries of all sequences) x heads, heads innermost. 8 lanes share a row.
template <class T, int block_m, int dim, int threads>
GLOBAL(threads, 1)
attention_bwd_rows(GRID_CONSTANT AttentionBackwardParams p, GRID_CONSTANT BackwardPlan plan) {
  constexpr int kLanes = 8;
  const int head = arch::block_x() % int(p.heads), tile = arch::block_x() / int(p.heads);
  const int batch = sequence_of_tile<block_m>(p, plan, tile);
  const int first = (tile - first_tile<block_m>(p, plan, batch)) * block_m;
  const Sequence sequence(p, batch);
  if (first >= sequence.q_len) return;
  const int padded = head * plan.head_rows + tile * block_m;

  for (int row = arch::thread_index() / kLanes; row < block_m; row += threads / kLanes) {
    const int query = first + row;
    const bool exists = query < sequence.q_len;
    float sum = 0.0f;
    if (exists) {
      const T* const out = row_of<const T>(p.out, batch, sequence.q_begin + query, head);
      const T* const grad_out = row_of<const T>(p.grad_out, batch, sequence.q_begin + query, head);
      constexpr int kElements = 16 / sizeof(T);
      for (int d = arch::thread_index() % kLanes * kElements; d < p.dim_v; d += kLanes * kElements) {
        float x[kElements], y[kElements];
        arch::unpack<T>(arch::load_global<arch::Words4>(out + d), x);
        arch::unpack<T>(arch::load_global<arch::Words4>(grad_out + d), y);
#pragma unroll
        for (int i = 0; i < kElements; ++i) sum = arch::fma(x[i], y[i], sum);
      }
    }
    sum = arch::sum_over_lanes<kLanes>(sum);
    if (arch::thread_index() % kLanes != 0) continue;
    float minus_lse = -INFINITY;
    if (exists) {
      const int64_t lse_index = lse_row(p, sequence, batch, head, query);
      const float lse = arch::load_global<float>(static_cast<const float*>(p.lse) + lse_index);
      if (lse != -INFINITY) minus_lse = -lse * plan.lse_factor;
      if (p.grad_lse != nullptr) sum -= arch::load_global<float>(static_cast<const float*>(p.grad_lse) + lse_index);
    }
    // A row that sees no key has no gradient, whatever the gradient of its lse.
    arch::store_global(plan.minus_lse + padded + row, minus_lse);
    arch::store_global(plan.minus_delta + padded + row, minus_lse == -INFINITY ? 0.0f : -sum);
  }

  constexpr int kWords = block_m * dim / 4;
  for (int i = arch::thread_index(); i < kWords; i += threads)
    arch::store_global(plan.grad_query + int64_t(padded) * dim + 4 * i, arch::Words4{});
  if (plan.dq_semaphore != nullptr && arch::thread_index() == 0)
    arch::store_global(plan.dq_semaphore + padded / block_m, uint32_t(0));
}

// A gradient that attention_bwd_finish computes from float32 tiles in the workspace.
struct FinishParams {
  enum class Of : uint8_t { kQueries, kKeys, kLongLists };  // kLongLists: of keys whose lists are divided
  HeadsView to;
  float* tiles = nullptr;
  int parts = 1;  // added in order; of long lists, those that a list has
  int64_t part_stride = 0;
  float factor = 1.0f;
  int width = 0;
  Of of = Of::kKeys;
};

// A tile of rows, and where its first part is in the workspace. None if it has no parts.
struct FinishTile {
  int batch = 0, head = 0;
  int first = kFar;   // row of the sequence
  int64_t index = 0;  // of the tile in the workspace
  int parts = 0;
};

template <int rows>
DEVICE FinishTile find_finish_tile(const AttentionBackwardParams& p, const BackwardPlan& plan,
                                   const FinishParams& finish) {
  if (finish.of == FinishParams::Of::kLongLists) {
    const LongLists& long_lists = plan.long_lists;
    const BlockLists& lists = p.block_mask.queries_of_keys;
    const int slot = arch::block_x(), head_batch = slot / long_lists.tiles, n = slot % long_lists.tiles;
    const int batch = head_batch / int(p.heads_kv), head = head_batch % int(p.heads_kv);
    const int first_head = head * int(p.heads / p.heads_kv);
    const int parts = divided_among(lists, batch, first_head, long_lists, n);
    if (parts == 1) return {};
    return {batch, head, longest_tile(lists, batch, first_head, n, rows) * rows, slot, parts};
  }
  const bool of_queries = finish.of == FinishParams::Of::kQueries;
  const int heads = int(of_queries ? p.heads : p.heads_kv);
  const int head = arch::block_x() % heads, tile = arch::block_x() / heads;  // among all sequences
  const int batch = of_queries ? sequence_of_tile<rows>(p, plan, tile) : tile / plan.schedule.tiles;
  const int first_of_batch = of_queries ? first_tile<rows>(p, plan, batch) : batch * plan.schedule.tiles;
  const int64_t index = of_queries ? head * (plan.head_rows / rows) + tile
                                   : (int64_t(batch) * heads + head) * plan.schedule.tiles + (tile - first_of_batch);
  return {batch, head, (tile - first_of_batch) * rows, index, finish.parts};
}

// Adds the parts of a gradient and stores it. Grid: (tiles of all sequences) x heads, heads innermost; of long lists,
// the slots. One barrier, between staging the tile in shared memory (kRows, kColumns) and storing it.
template <class T, class Tiles>
GLOBAL(Tiles::kThreads, 1)
attention_bwd_finish(GRID_CONSTANT AttentionBackwardParams p, GRID_CONSTANT BackwardPlan plan,
                     GRID_CONSTANT FinishParams finish) {
  using Tile = OperandTile<T, Side::kA, true, Tiles::kRows, Tiles::kColumns>;
  struct Storage {
    alignas(128) unsigned char tile[Tile::kBytes];
  };
  SHARED_STORAGE(Storage, shared);
  const bool of_queries = finish.of == FinishParams::Of::kQueries;
  const FinishTile tile = find_finish_tile<Tiles::kRows>(p, plan, finish);
  const Sequence sequence(p, tile.batch);
  const int left = (of_queries ? sequence.q_len : sequence.k_len) - tile.first;
  if (left <= 0) return;

  float* const from = finish.tiles + tile.index * Tiles::kRows * Tiles::kColumns;
  typename Tiles::Accumulators sum = {};
  for (int part = 0; part < tile.parts; ++part) WorkspaceTile<Tiles>(from + part * finish.part_stride).add_to(sum);
  const int first = (of_queries ? sequence.q_begin : sequence.k_begin) + tile.first;
  if (sizeof(T) == 2 && p.float32_grads) {
    write_float32<Tiles>(sum, finish.factor, row_of<float>(finish.to, tile.batch, first, tile.head),
                         finish.to.seq_stride, left, finish.width);
    return;
  }
  const arch::SharedAddress staged = arch::shared_address(shared.tile);
  stage<Tiles, Tile>(staged, sum, finish.factor);
  arch::sync_threads();
  write_lines<Tile, Tiles::kThreads>(staged, row_of<T>(finish.to, tile.batch, first, tile.head), finish.to.seq_stride,
                                     left, finish.width);
}

// grad_sinks = -sum over rows of exp(sink - lse) delta, because a sink has a logit but no value. Grid: heads.
template <int block_m, int threads>
GLOBAL(threads, 1)
attention_bwd_sinks(GRID_CONSTANT AttentionBackwardParams p, GRID_CONSTANT BackwardPlan plan) {
  constexpr float kLog2e = 1.4426950408889634f;
  constexpr int kWarps = threads / arch::kWarpSize;
  struct Storage {
    float sums[kWarps];
  };
  SHARED_STORAGE(Storage, shared);
  const int head = arch::block_x();
  const float sink = arch::load_global<float>(static_cast<const float*>(p.sinks) + head) * kLog2e;
  float sum = 0.0f;
  for (int batch = 0; batch < p.batch; ++batch) {
    const Sequence sequence(p, batch);
    const int first = head * plan.head_rows + first_tile<block_m>(p, plan, batch) * block_m;
    for (int i = arch::thread_index(); i < sequence.q_len; i += threads)
      sum += arch::fast_exp2(sink + arch::load_global<float>(plan.minus_lse + first + i) * plan.lse_to_powers) *
             arch::load_global<float>(plan.minus_delta + first + i);
  }
  sum = arch::sum_over_lanes(sum);
  if (arch::lane_index() == 0) shared.sums[arch::thread_index() / arch::kWarpSize] = sum;
  arch::sync_threads();
  if (arch::thread_index() > 0) return;
  float total = 0.0f;
  for (int warp = 0; warp < kWarps; ++warp) total += shared.sums[warp];
  arch::store_global(static_cast<float*>(p.grad_sinks) + head, total);
}

template <class T, int block_m, int dim>
void launch_rows(const AttentionBackwardParams& p, const BackwardPlan& plan, void* stream) {
  constexpr int kThreads = 128;
  const int blocks = int(p.heads) * (plan.head_rows / block_m);
  if (blocks == 0) return;
  rt::launch<attention_bwd_rows<T, block_m, dim, kThreads>>(
      "attention_bwd_rows", {.grid = {blocks}, .threads = kThreads, .stream = stream}, p, plan);
}

// Launches attention_bwd_finish for one gradient.
template <class T, class Tiles>
void launch_finish(const AttentionBackwardParams& p, const BackwardPlan& plan, const FinishParams& finish,
                   void* stream) {
  using Of = FinishParams::Of;
  const int blocks = finish.of == Of::kQueries     ? int(p.heads) * (plan.head_rows / Tiles::kRows)
                     : finish.of == Of::kLongLists ? plan.long_lists.slots
                                                   : plan.schedule.head_batches * plan.schedule.tiles;
  if (blocks == 0 || finish.width == 0) return;
  rt::launch<attention_bwd_finish<T, Tiles>>("attention_bwd_finish",
                                             {.grid = {blocks},
                                              .threads = Tiles::kThreads,
                                              .shared_bytes = size_t(Tiles::kRows) * Tiles::kColumns * sizeof(T),
                                              .stream = stream},
                                             p, plan, finish);
}

template <int block_m>
void launch_sinks(const AttentionBackwardParams& p, const BackwardPlan& plan, void* stream) {
  constexpr int kThreads = 256;
  rt::launch<attention_bwd_sinks<block_m, kThreads>>("attention_bwd_sinks",
                                                     {.grid = {int(p.heads)},
                                                      .threads = kThreads,
                                                      .shared_bytes = kThreads / arch::kWarpSize * sizeof(float),
                                                      .stream = stream},
                                                     p, plan);
}

// Launches what follows the main kernel. Results: its kBlockM and the WarpTiles GradK, GradV and, if it has summed dQ
// in the workspace, GradQ.
template <class T, class Results>
void launch_after(const AttentionBackwardParams& p, const BackwardPlan& plan, void* stream) {
  using GradK = typename Results::GradK;
  using GradV = typename Results::GradV;
  if constexpr (requires { typename Results::GradQ; })
    launch_finish<T, typename Results::GradQ>(p, plan,
                                              {.to = p.grad_query,
                                               .tiles = plan.grad_query,
                                               .factor = plan.logits.scale,
                                               .width = int(p.dim),
                                               .of = FinishParams::Of::kQueries},
                                              stream);
  if (plan.splits > 1 || plan.long_lists.slots > 0) {
    const int64_t tiles =
        plan.splits > 1 ? int64_t(plan.schedule.head_batches) * plan.schedule.tiles : plan.long_lists.slots;
    FinishParams finish{.to = p.grad_key,
                        .tiles = plan.grad_key,
                        .parts = plan.splits,
                        .part_stride = tiles * GradK::kRows * GradK::kColumns,
                        .width = int(p.dim),
                        .of = plan.splits > 1 ? FinishParams::Of::kKeys : FinishParams::Of::kLongLists};
    launch_finish<T, GradK>(p, plan, finish, stream);
    finish.to = p.grad_value;
    finish.tiles = plan.grad_value;
    finish.part_stride = tiles * GradV::kRows * GradV::kColumns;
    finish.width = int(p.dim_v);
    launch_finish<T, GradV>(p, plan, finish, stream);
  }
  if (p.grad_sinks != nullptr) launch_sinks<Results::kBlockM>(p, plan, stream);
}

}  // namespace cuda_ext::attention
