// Flash attention backward for sm_80 and later (Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 2), for float16,
// bfloat16 and float32 (in tf32, or as exact as float32: tile/products.cuh).
//
// Problem        AttentionBackwardParams in attention.h:
//                P = exp(logits - lse)     dP = dO V^T     dS = P o (dP - delta), delta = rowsum(dO o O) - dlse
//                dV = P^T dO               dQ = scale dS K               dK = scale dS^T Q
// Kernels        1. attention_bwd_rows: delta and lse of every row, and zeros for the sums of dQ.
//                2. attention_bwd_sm80: this file.
//                3. attention_bwd_finish: dQ (and dK, dV if they have several parts) from float32 sums.
//                4. attention_bwd_sinks: the gradient of sinks. 1, 3 and 4 are in attention_bwd_passes.cuh.
// Tile           A block has block_n keys of one key head, and loops over the tiles of block_m queries that see any of
//                them, of all query heads of the group one after the other. dK and dV are complete after the loop. If
//                that makes too few blocks, the loop is divided among several, whose parts kernel 3 adds; so are lists
//                of a block mask that are much longer than others (LongLists). Sizes:
//                kBackwardTiles in tiles_sm80.h.
// Warps          Scores are transposed, (keys, queries). A warp has 16 or 32 keys, and its P^T and dS^T, in the layout
//                of mma results, are operands of dV and dK without leaving registers. dQ is a sum over keys, so dS goes
//                through shared memory, and all warps share dQ's tile. If warps share keys (kSplit > 1: each has half
//                of the queries and half of the head dims), P goes through shared memory, too.
// Barriers       sync_threads, all threads. Three per step. First: queries and output gradients have arrived, and the
//                previous dS has been read. Second: dS is written and the output gradients have been read; the next
//                begin to arrive. Third: the queries have been read; the next begin to arrive during the product of dQ.
//                Two more per step with `deterministic`, one before the loop, after the task is written, and two around
//                the final stores. If warps share keys, the second only says that P and dS are written, and both copies
//                start after the third.
// Shared memory  keys (block_n, dim), values (block_n, dim_v), queries (block_m, dim), output gradients (block_m,
//                dim_v), dS (block_n, block_m), P likewise if kSplit > 1, -lse and -delta (block_m), the block's
//                BackwardTask. dK and dV are finally staged in the memory of keys and values.
// Registers      Per warp, dK and dV of its keys during the whole loop; scores and dP, later its part of dQ; all in
//                float32.
// dQ             is summed in the workspace by float32 reductions: of four adjacent elements at once on sm_90,
//                otherwise of one element per lane, adjacent across the warp. Their order varies, so the last bits
//                differ between runs. With `deterministic` the blocks add to a tile in the order of their keys, which
//                is also the order in which blocks start, so that they cannot deadlock.
// Options        A second instantiation supports all that has_options (attention_plan.h) counts, by run-time flags. The
//                gradient of a bias is added to global memory by float32 reductions.
// Block mask     Also in the second instantiation. The loop goes through the lists of the block's keys, of one head
//                after the other, and a thread's bits of a step are those of its keys, as in attention_fwd_sm80.cuh.
#pragma once

#include <cstddef>

#include "attention/bwd_scores.cuh"
#include "attention/tiles_sm80.h"
#include "tile/results.cuh"

namespace cuda_ext::attention::sm80 {

// One instantiation of the kernel.
template <class T, BackwardConfig config, bool with_options>
struct Backward {
  using Element = T;
  static constexpr const BackwardConfig& kConfig = config;
  static constexpr bool kIsFloat32 = sizeof(T) == 4;
  static constexpr bool kWithOptions = with_options;
  static constexpr int kThreads = config.threads();
  static constexpr int kMinBlocks = config.min_blocks;
  static constexpr bool kIsNeeded = is_needed<T>(config, arch::kComputeCapability);
  static constexpr int kBlockM = config.block_m;
  static constexpr int kBlockN = config.block_n;
  static constexpr int kSplit = config.warps / config.key_warps;
  DEVICE static int thread() { return arch::opaque_thread_index(); }

  using Scores = WarpTiles<kBlockN, kBlockM, config.key_warps, kSplit>;
  using GradK = WarpTiles<kBlockN, config.dim, config.key_warps, kSplit>;
  using GradV = WarpTiles<kBlockN, config.dim_v, config.key_warps, kSplit>;
  using GradQ = WarpTiles<kBlockM, config.dim, config.query_warps, config.warps / config.query_warps>;

  // TileXOfY: the bytes of tile X as the operand of the product that gives Y.
  using TileK = OperandTile<T, Side::kA, true, kBlockN, config.dim>;
  using TileKOfDQ = OperandTile<T, Side::kB, false, config.dim, kBlockN, OrderOfK::kPairs>;
  using TileV = OperandTile<T, Side::kA, true, kBlockN, config.dim_v>;
  using TileQ = OperandTile<T, Side::kB, true, kBlockM, config.dim>;
  using TileQOfDK = OperandTile<T, Side::kB, false, config.dim, kBlockM, OrderOfK::kPairs>;
  using TileDO = OperandTile<T, Side::kB, true, kBlockM, config.dim_v>;
  using TileDOOfDV = OperandTile<T, Side::kB, false, config.dim_v, kBlockM, OrderOfK::kPairs>;
  using TileScores = OperandTile<T, Side::kA, true, kBlockN, kBlockM, OrderOfK::kPairs>;
  using TileScoresOfDQ = OperandTile<T, Side::kA, false, kBlockM, kBlockN, OrderOfK::kPairs>;

  struct Storage {
    alignas(128) unsigned char k[TileK::kBytes];
    alignas(128) unsigned char v[TileV::kBytes];
    alignas(128) unsigned char q[TileQ::kBytes];
    alignas(128) unsigned char grad_out[TileDO::kBytes];
    alignas(128) unsigned char grad_scores[TileScores::kBytes];
    alignas(128) unsigned char probs[kSplit > 1 ? TileScores::kBytes : 16];
    float minus_lse[kBlockM], minus_delta[kBlockM];
    BackwardTask task;
  };
};

// Grid: tiles of keys of all key heads and sequences, `splits` blocks for each. One function, because all its parts
// share registers across the loop.
template <class Kernel>
GLOBAL(Kernel::kThreads, Kernel::kMinBlocks)
attention_bwd_sm80(GRID_CONSTANT AttentionBackwardParams p, GRID_CONSTANT BackwardPlan plan) {
  using T = typename Kernel::Element;
  using Scores = typename Kernel::Scores;
  using GradK = typename Kernel::GradK;
  using GradV = typename Kernel::GradV;
  using GradQ = typename Kernel::GradQ;
  constexpr int kThreads = Kernel::kThreads, kBlockM = Kernel::kBlockM, kBlockN = Kernel::kBlockN;
  constexpr int kSplit = Kernel::kSplit;
  using Storage = typename Kernel::Storage;
  if constexpr (!Kernel::kIsNeeded) return;
  SHARED_STORAGE(Storage, shared);

  QueryStep step;
  bool more;
  {
    const BackwardWork work = find_work<Kernel>(p, plan);
    if (!work.has_keys) return;
    step = work.first;
    more = work.has_steps;
    if (arch::thread_index() == 0) work.task.store<Kernel>(shared.task);
  }
  arch::sync_threads();  // the task is written

  const arch::SharedAddress base = arch::shared_address(&shared);
  const arch::SharedAddress tile_k = arch::shared_address(shared.k), tile_v = arch::shared_address(shared.v),
                            tile_q = arch::shared_address(shared.q), tile_do = arch::shared_address(shared.grad_out),
                            tile_ds = arch::shared_address(shared.grad_scores),
                            tile_p = arch::shared_address(shared.probs);

  const auto copy = [&]<class Tile>(const HeadsView& view, const QueryTile& tile, arch::SharedAddress to, int64_t width,
                                    const int64_t& pass) {
    const BackwardTask::Queries queries = load_struct(shared.task.queries);
    const int first = tile.index * kBlockM;
    LinesCopy<Tile, kThreads>::start(to, row_of<const T>(view, queries.batch, queries.begin + first, tile.head),
                                     view.seq_stride, pass, queries.count - first, int(width));
  };
  const auto copy_queries = [&](const QueryTile& tile) {
    copy.template operator()<typename Kernel::TileQ>(p.query, tile, tile_q, p.dim, plan.query_pass);
  };
  const auto copy_grad_out = [&](const QueryTile& tile) {
    copy.template operator()<typename Kernel::TileDO>(p.grad_out, tile, tile_do, p.dim_v, plan.grad_out_pass);
    constexpr int kChunks = kBlockM / 4;  // of lse; delta has as many
    static_assert(2 * kChunks <= kThreads);
    const int thread = arch::opaque_thread_index();
    if (thread < 2 * kChunks) {
      const bool is_lse = thread < kChunks;
      const int row = thread % kChunks * 4;
      const int first = padded_row<Kernel>(plan, load_struct(shared.task.queries), tile);
      arch::cp_async<16>(arch::shared_address((is_lse ? shared.minus_lse : shared.minus_delta) + row),
                         (is_lse ? plan.minus_lse : plan.minus_delta) + first + row);
    }
  };

  typename GradK::Accumulators grad_key = {};
  typename GradV::Accumulators grad_value = {};
  if (more) {
    const int batch = load_struct(shared.task.queries).batch;
    const BackwardTask::Keys keys = load_struct(shared.task.keys);
    const BackwardTask::Head head = load_struct(shared.task.head);
    const int keys_left = keys.visible.k_len - keys.first;
    // Keys and values stay in shared memory for the whole loop.
    copy_lines<typename Kernel::TileK, kThreads>(tile_k, keys_left, int(p.dim), [&](int i) {
      return row_of<const T>(p.key, batch, head.k_begin + keys.first + i, head.head_kv);
    });
    copy_lines<typename Kernel::TileV, kThreads>(tile_v, keys_left, int(p.dim_v), [&](int i) {
      return row_of<const T>(p.value, batch, head.k_begin + keys.first + i, head.head_kv);
    });
    const QueryTile tile = tile_of<Kernel>(p, shared.task, step);
    copy_grad_out(tile);
    copy_queries(tile);
    arch::cp_async_commit();
  }
  const auto next_tile = [&] { return tile_of<Kernel>(p, shared.task, next_step<Kernel>(p, shared.task, step)); };

#pragma unroll 1
  for (; more; step = next_step<Kernel>(p, shared.task, step)) {
    arch::cp_async_wait<0>();
    arch::sync_threads();  // queries and output gradients have arrived, and dS has been read

    more = step != load_struct(shared.task.steps).last;
    const auto this_tile = [&] { return tile_of<Kernel>(p, shared.task, step); };
    const int first_query = this_tile().index * kBlockM;
    typename Scores::Accumulators s = {}, grad = {};
    // S^T = K Q^T - lse; in float32, and with options, lse is subtracted later.
    if constexpr (!Kernel::kWithOptions && !Kernel::kIsFloat32) start_columns<Kernel>(s, shared.minus_lse);
    multiply<typename Kernel::TileQ, kSplit>(rows_of<Scores, typename Kernel::TileK>(base, offsetof(Storage, k)),
                                             columns_of<Scores, typename Kernel::TileQ>(base, offsetof(Storage, q)), s,
                                             p.in_tf32);
    // dP^T = V dO^T - delta; with options delta is subtracted later.
    if constexpr (!Kernel::kWithOptions) start_columns<Kernel>(grad, shared.minus_delta);
    multiply<typename Kernel::TileDO, kSplit>(
        rows_of<Scores, typename Kernel::TileV>(base, offsetof(Storage, v)),
        columns_of<Scores, typename Kernel::TileDO>(base, offsetof(Storage, grad_out)), grad, p.in_tf32);

    const BackwardTask::Keys keys = load_struct(shared.task.keys);
    const bool is_masked =
        !keys.visible.all_visible(first_query, first_query + kBlockM - 1, keys.first, keys.first + kBlockN);
    // S becomes P, and dP becomes dS.
    apply_block_mask<Kernel>(s, p, plan, shared.task, step);
    if (modifies<Kernel>(plan)) {
      if constexpr (Kernel::kWithOptions) {
        const OptionsStep options(p, load_struct(shared.task.queries), keys.visible, step.head);
        softmax_gradient_with_options<Kernel>(s, grad, p, plan, keys.visible, options, shared.minus_lse,
                                              shared.minus_delta, keys.first, first_query, is_masked);
      }
    } else {
      if constexpr (Kernel::kIsFloat32)
        make_float32_probs<Kernel>(s, shared.minus_lse, plan, keys.visible, keys.first, first_query, is_masked);
      else if constexpr (Kernel::kWithOptions)
        make_probs<Kernel>(s, shared.minus_lse, plan, keys.visible, keys.first, first_query, is_masked);
      else
        make_probs<Kernel>(s, plan, keys.visible, keys.first, first_query, is_masked);
      if constexpr (Kernel::kWithOptions)
        multiply_probs<Kernel>(grad, s, shared.minus_delta);
      else
        multiply_probs(grad, s);
    }

    // dS for dQ, a sum over the keys of all warps.
    stage<Scores, typename Kernel::TileScores>(tile_ds, grad, 1.0f);
    const LaneAddress lane_do = columns_of<GradV, typename Kernel::TileDOOfDV>(base, offsetof(Storage, grad_out));
    const LaneAddress lane_q = columns_of<GradK, typename Kernel::TileQOfDK>(base, offsetof(Storage, q));
    if constexpr (kSplit == 1) {
      // dV += P^T dO, with P from registers.
      multiply<typename Kernel::TileDOOfDV>(operand_of<T>(s), lane_do, grad_value, p.in_tf32);
      arch::sync_threads();  // dS is written, and the output gradients have been read
      // The next output gradients arrive during dK.
      if (more) copy_grad_out(next_tile());
      // dK += dS^T Q, with dS from registers.
      multiply<typename Kernel::TileQOfDK>(operand_of<T>(grad), lane_q, grad_key, p.in_tf32);
      arch::sync_threads();  // the queries have been read
    } else {
      // A warp has half of the queries of its keys, and dV needs all: P goes through shared memory, too.
      stage<Scores, typename Kernel::TileScores>(tile_p, s, 1.0f);
      arch::sync_threads();  // P and dS are written
      multiply<typename Kernel::TileDOOfDV, kSplit>(
          rows_of<Scores, typename Kernel::TileScores>(base, offsetof(Storage, probs)), lane_do, grad_value, p.in_tf32);
      multiply<typename Kernel::TileQOfDK, kSplit>(
          rows_of<Scores, typename Kernel::TileScores>(base, offsetof(Storage, grad_scores)), lane_q, grad_key,
          p.in_tf32);
      arch::sync_threads();  // queries and output gradients have been read
      if (more) copy_grad_out(next_tile());
    }
    // The next queries arrive during dQ.
    if (more) copy_queries(next_tile());
    arch::cp_async_commit();

    // dQ = dS K, added to the sums in the workspace.
    typename GradQ::Accumulators grad_query = {};
    multiply<typename Kernel::TileKOfDQ, GradQ::kWarpsN>(
        rows_of<GradQ, typename Kernel::TileScoresOfDQ>(base, offsetof(Storage, grad_scores)),
        columns_of<GradQ, typename Kernel::TileKOfDQ>(base, offsetof(Storage, k)), grad_query, p.in_tf32);
    const int row = padded_row<Kernel>(plan, load_struct(shared.task.queries), this_tile());
    const WorkspaceTile<GradQ> sums(plan.grad_query + int64_t(row) * GradQ::kColumns);
    if (plan.dq_semaphore == nullptr) {
      sums.reduce_add(grad_query);
    } else {
      // Blocks add in the order of their keys.
      uint32_t* const semaphore = plan.dq_semaphore + row / kBlockM;
      const uint32_t earlier = earlier_blocks<Kernel>(p, shared.task, this_tile());
      if (arch::opaque_thread_index() == 0) arch::wait_equal(semaphore, earlier);
      arch::sync_threads();  // all earlier blocks have added
      sums.reduce_add(grad_query);
      arch::sync_threads();  // all have added
      if (arch::opaque_thread_index() == 0) arch::store_release(semaphore, earlier + 1);
    }
  }

  const BackwardTask::Keys keys = load_struct(shared.task.keys);
  const BackwardTask::Head head = load_struct(shared.task.head);
  const int batch = load_struct(shared.task.queries).batch;
  const float value_factor = Kernel::kWithOptions ? plan.kept_scale : 1.0f;
  if (is_part<Kernel>(plan, shared.task)) {
    WorkspaceTile<GradK>(part_of<Kernel, GradK>(p, plan, shared.task, plan.grad_key))
        .store(grad_key, plan.logits.scale);
    WorkspaceTile<GradV>(part_of<Kernel, GradV>(p, plan, shared.task, plan.grad_value)).store(grad_value, value_factor);
    return;
  }
  if (write_float32_grad<Kernel, GradK>(p, shared.task, p.grad_key, p.dim, grad_key, plan.logits.scale)) {
    write_float32_grad<Kernel, GradV>(p, shared.task, p.grad_value, p.dim_v, grad_value, value_factor);
    return;
  }
  arch::sync_threads();  // keys and values have been read
  stage<GradK, typename Kernel::TileK>(tile_k, grad_key, plan.logits.scale);
  stage<GradV, typename Kernel::TileV>(tile_v, grad_value, value_factor);
  arch::sync_threads();  // dK and dV are written
  const int first_row = head.k_begin + keys.first, count = keys.visible.k_len - keys.first;
  write_lines<typename Kernel::TileK, kThreads>(tile_k, row_of<T>(p.grad_key, batch, first_row, head.head_kv),
                                                p.grad_key.seq_stride, count, int(p.dim));
  write_lines<typename Kernel::TileV, kThreads>(tile_v, row_of<T>(p.grad_value, batch, first_row, head.head_kv),
                                                p.grad_value.seq_stride, count, int(p.dim_v));
}

}  // namespace cuda_ext::attention::sm80
