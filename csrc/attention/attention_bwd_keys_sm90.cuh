// Flash attention backward for Hopper (sm_90a) and large head dims, first of two kernels: dK and dV.
//
// Problem        as in attention_bwd_sm90.cuh, without dQ, which attention_bwd_queries_sm90.cuh computes.
// Two kernels    The sums of dQ of a tile of 64 queries and 256 columns are 64 KiB, which each block of keys would add
//                to L2 at a step: more than the products of the step take. Scores and dP are multiplied twice
//                instead, 7 products where one kernel has 5; nothing is added in L2 but the gradient of a bias, so
//                the others have the same bits in every run.
// Tile           A block has 64 keys of one key head, and loops over the tiles of 64 queries that see any of them, of
//                all query heads of the group one after the other. If that makes too few blocks, the loop is divided
//                among several. Sizes: kBackwardTiles in tiles_sm90.h.
// Warpgroups     0: its first thread, the producer, loads. 1, "values": P and dV. 2, "keys": dS and dK. Each of the two
//                consumers multiplies all 64 keys and has one gradient in registers.
// Step           Scores are transposed, (keys, queries). The first consumer multiplies scores, which become P, hands P
//                to the second, and adds P^T dO to dV. The second multiplies dP, which becomes dS by P, and adds
//                dS^T Q to dK. P^T and dS^T are operands from registers. One consumer multiplies while the other
//                computes exponentials.
// Barriers       keys_full: 1 arrival, of the producer, and the bytes of keys and values. {q,do}_full[stage]: 1 arrival
//                and the bytes of queries and lse, or of output gradients and delta. {q,do}_empty[stage]: 1 arrival per
//                warp of both consumers. probs_full[stage]: 1 arrival per warp of the first; its probs have been
//                read when the queries of the stage have, because the second consumer needs those later.
//                Named barriers 1 and 2: the 128 threads of a consumer. 7: both consumers.
// Shared memory  keys (64, dim), values (64, dim_v), two stages of queries (64, dim) and of output gradients
//                (64, dim_v), in pieces of 64 columns in the 128-byte swizzle; two stages of P, float32, in the order
//                of registers, and of -lse and -delta; the BackwardTask; barriers. At the end dK and dV are staged in
//                the memory of keys and values.
// Registers      24 for the producer's warpgroup, 240 for consumers: dim / 2 of dK or dim_v / 2 of dV, 32 of scores or
//                dP, 16 of P^T or dS^T.
// Lengths        as in attention_bwd_sm90.cuh. Rows of keys beyond a sequence reach only their own rows of dK and dV,
//                which are not stored.
#pragma once

#include "attention/attention_bwd_sm90.h"
#include "attention/bwd_loop_sm90.cuh"
#include "tile/results.cuh"

namespace cuda_ext::attention::sm90 {

// One instantiation of the kernel.
template <class T, BackwardConfig config, bool with_options>
struct BackwardKeys {
  using Element = T;
  static constexpr bool kWithOptions = with_options;
  static constexpr int kThreads = config.threads();
  static constexpr int kBlockM = config.block_m;
  static constexpr int kBlockN = config.block_n;
  static constexpr int kStages = config.stages;
  static constexpr int kConsumers = 2;
  static_assert(config.separate && kBlockN == kWarpgroupRows);

  using Scores = WarpTiles<kBlockN, kBlockM, 4, 1>;
  using GradK = WarpTiles<kBlockN, config.dim, 4, 1>;
  using GradV = WarpTiles<kBlockN, config.dim_v, 4, 1>;
  using Fragments = uint32_t[kBlockM / 16][4];  // of P^T or dS^T

  using TileK = PiecesTile<kBlockN, config.dim>;
  using TileV = PiecesTile<kBlockN, config.dim_v>;
  using TileQ = PiecesTile<kBlockM, config.dim>;
  using TileDO = PiecesTile<kBlockM, config.dim_v>;

  DEVICE static int thread() { return ConsumerThreads::index(); }

  struct Storage {
    alignas(1024) unsigned char k[TileK::kBytes];
    alignas(1024) unsigned char v[TileV::kBytes];
    alignas(1024) unsigned char q[kStages][TileQ::kBytes];
    alignas(1024) unsigned char grad_out[kStages][TileDO::kBytes];
    alignas(128) float probs[kStages][kBlockN * kBlockM];
    alignas(128) float minus_lse[kStages][kBlockM];
    alignas(128) float minus_delta[kStages][kBlockM];
    BackwardTask task;
    Barrier keys_full, q_full[kStages], q_empty[kStages], do_full[kStages], do_empty[kStages];
    Barrier probs_full[kStages];
  };
  static_assert(sizeof(Storage) <= 227 * 1024);

  // Where a thread of one consumer leaves four probs for the same thread of the other.
  DEVICE static SharedAddress probs_at(const Storage& shared, int stage, int n) {
    return arch::shared_address(shared.probs[stage]) + (n * kWarpgroup + thread()) * 16;
  }
};

constexpr int kWarps = kWarpgroup / arch::kWarpSize;  // of a consumer

// What both consumers do at the beginning of a step: waits for the tile that `full` belongs to. Rows of the next
// sequence are cleared in both tiles, by both consumers together.
template <class Kernel>
DEVICE void await_rows(const AttentionBackwardParams& p, typename Kernel::Storage& shared, const QueryStep& at,
                       Barrier& full, int step) {
  const int stage = step % Kernel::kStages;
  const uint32_t parity = step / Kernel::kStages % 2;
  arch::barrier_wait(full, parity);
  const int left = lines_left<Kernel>(p, shared, at);
  if (left >= Kernel::kBlockM) return;
  arch::barrier_wait(shared.q_full[stage], parity);
  arch::barrier_wait(shared.do_full[stage], parity);
  clear_from<Kernel, typename Kernel::TileQ>(arch::shared_address(shared.q[stage]), left);
  clear_from<Kernel, typename Kernel::TileDO>(arch::shared_address(shared.grad_out[stage]), left);
  sync_consumers<Kernel::kConsumers>();
}

// One arrival of each warp of a consumer.
DEVICE void arrive_warps(Barrier& barrier, Site site = {}) {
  arch::sync_warp();
  if (ConsumerThreads::is_first_lane()) arch::barrier_arrive(barrier, site);
}

// Hands four probs to the other consumer.
template <class Kernel>
DEVICE void hand_over(typename Kernel::Storage& shared, int stage, int n, const float (&probs)[4]) {
  arch::store_shared(Kernel::probs_at(shared, stage, n),
                     arch::Words4{{arch::float_bits(probs[0]), arch::float_bits(probs[1]), arch::float_bits(probs[2]),
                                   arch::float_bits(probs[3])}});
}

// Scores become P, and what the kernel with options hands over: P times the derivative of the logit, negative if
// dropout drops it.
template <class Kernel>
DEVICE void make_probs_with_options(const AttentionBackwardParams& p, const BackwardPlan& plan,
                                    typename Kernel::Storage& shared, const QueryTile& tile, int stage, bool is_masked,
                                    typename Kernel::Scores::Accumulators& s) {
  using Scores = typename Kernel::Scores;
  const int first_query = tile.index * Kernel::kBlockM, thread = Kernel::thread();
  const BackwardTask::Keys keys = load_struct(shared.task.keys);
  const OptionsStep options(p, load_struct(shared.task.queries), keys.visible, tile.head);
#pragma unroll
  for (int n = 0; n < Scores::kColumnTiles; ++n) {
    const int column = Scores::column(thread) + Scores::column_step(n);
    const auto row_lse = arch::load_shared<arch::Words2>(arch::shared_address(shared.minus_lse[stage] + column));
    uint32_t random[4] = {};
    if (plan.dropout.drop_below > 0)
      plan.dropout.words_of_columns(options.first_number + first_query + column, keys.first + Scores::row(0, 0, thread),
                                    random);
    float handed[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const OptionsProb of = prob_with_options<typename Kernel::Element>(
          p, plan, keys.visible, options, s[0][n][q], arch::bits_float(row_lse.data[q % 2]),
          keys.first + Scores::row(0, q / 2, thread), first_query + column + q % 2, is_masked);
      const bool kept = random[q] >= plan.dropout.drop_below;
      s[0][n][q] = kept ? of.prob : 0.0f;
      handed[q] = kept ? of.prob * of.slope_of_cap : -(of.prob * of.slope_of_cap);
    }
    hand_over<Kernel>(shared, stage, n, handed);
  }
}

// Scores become P, which is handed to the other consumer.
template <class Kernel>
DEVICE void make_probs_of_step(const AttentionBackwardParams& p, const BackwardPlan& plan,
                               typename Kernel::Storage& shared, const QueryStep& at, int step,
                               typename Kernel::Scores::Accumulators& s) {
  const QueryTile tile = tile_of<Kernel>(p, shared.task, at);
  const int first_query = tile.index * Kernel::kBlockM, stage = step % Kernel::kStages;
  const BackwardTask::Keys keys = load_struct(shared.task.keys);
  const bool is_masked = !keys.visible.all_visible(first_query, first_query + Kernel::kBlockM - 1, keys.first,
                                                   keys.first + Kernel::kBlockN);
  apply_block_mask<Kernel>(s, p, plan, shared.task, at);
  if (modifies<Kernel>(plan)) {
    if constexpr (Kernel::kWithOptions) make_probs_with_options<Kernel>(p, plan, shared, tile, stage, is_masked, s);
  } else {
    if constexpr (Kernel::kWithOptions)
      make_probs<Kernel>(s, shared.minus_lse[stage], plan, keys.visible, keys.first, first_query, is_masked);
    else
      make_probs<Kernel>(s, plan, keys.visible, keys.first, first_query, is_masked);
#pragma unroll
    for (int n = 0; n < Kernel::Scores::kColumnTiles; ++n) hand_over<Kernel>(shared, stage, n, s[0][n]);
  }
  arrive_warps(shared.probs_full[stage]);
}

// dP becomes dS, by the probs that the other consumer has handed over.
template <class Kernel>
DEVICE void multiply_handed(const BackwardPlan& plan, typename Kernel::Storage& shared, int step,
                            typename Kernel::Scores::Accumulators& grad) {
  using Scores = typename Kernel::Scores;
  const int stage = step % Kernel::kStages, thread = Kernel::thread();
#pragma unroll
  for (int n = 0; n < Scores::kColumnTiles; ++n) {
    const auto handed = arch::load_shared<arch::Words4>(Kernel::probs_at(shared, stage, n));
    if constexpr (Kernel::kWithOptions) {
      const auto row_delta = load_columns(shared.minus_delta[stage] + Scores::column(thread) + Scores::column_step(n));
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const float kept = handed.data[q] >> 31 == 0 ? grad[0][n][q] * plan.kept_scale : 0.0f;
        grad[0][n][q] = fabsf(arch::bits_float(handed.data[q])) * (kept + arch::bits_float(row_delta.data[q % 2]));
      }
    } else {
#pragma unroll
      for (int q = 0; q < 4; ++q) grad[0][n][q] *= arch::bits_float(handed.data[q]);
    }
  }
}

// The steps of a block, at least one, for the consumer that has dV.
template <class Kernel>
DEVICE void accumulate_values(const AttentionBackwardParams& p, const BackwardPlan& plan,
                              typename Kernel::Storage& shared, QueryStep at,
                              typename Kernel::GradV::Accumulators& grad_value) {
  using T = typename Kernel::Element;
  typename Kernel::Scores::Accumulators s;
  typename Kernel::Fragments probs;
  arch::barrier_wait(shared.keys_full, 0);
  int step = 0;  // one register gives all stages and parities
#pragma unroll 1
  for (bool more = true; more; ++step, at = next_step<Kernel>(p, shared.task, at)) {
    more = at != load_struct(shared.task.steps).last;
    const int stage = step % Kernel::kStages;
    await_rows<Kernel>(p, shared, at, shared.q_full[stage], step);
    // Issue S^T = K Q^T.
    start_rows<Kernel, typename Kernel::TileK, typename Kernel::TileQ>(
        s, arch::shared_address(shared.k), arch::shared_address(shared.q[stage]), shared.minus_lse[stage]);
    arch::wgmma_wait<0>(registers_of(s));
    // S becomes P, also for the other consumer.
    make_probs_of_step<Kernel>(p, plan, shared, at, step, s);
    // Release the queries; the other consumer does so when it has added to dK.
    arrive_warps(shared.q_empty[stage]);
    round_operand<T>(s, probs);
    // Issue dV += P^T dO.
    arch::barrier_wait(shared.do_full[stage], step / Kernel::kStages % 2);
    multiply_fragments<T, typename Kernel::TileDO>(grad_value, probs, arch::shared_address(shared.grad_out[stage]));
    arch::wgmma_wait<0>(registers_of(grad_value));
    // Release the output gradients.
    arrive_warps(shared.do_empty[stage]);
  }
}

// The same for the consumer that has dK.
template <class Kernel>
DEVICE void accumulate_keys(const AttentionBackwardParams& p, const BackwardPlan& plan,
                            typename Kernel::Storage& shared, QueryStep at,
                            typename Kernel::GradK::Accumulators& grad_key) {
  using T = typename Kernel::Element;
  typename Kernel::Scores::Accumulators grad;
  typename Kernel::Fragments grad_scores;
  arch::barrier_wait(shared.keys_full, 0);
  int step = 0;
#pragma unroll 1
  for (bool more = true; more; ++step, at = next_step<Kernel>(p, shared.task, at)) {
    more = at != load_struct(shared.task.steps).last;
    const int stage = step % Kernel::kStages;
    await_rows<Kernel>(p, shared, at, shared.do_full[stage], step);
    // Issue dP^T = V dO^T.
    start_rows<Kernel, typename Kernel::TileV, typename Kernel::TileDO>(
        grad, arch::shared_address(shared.v), arch::shared_address(shared.grad_out[stage]), shared.minus_delta[stage]);
    // Wait for P of the other consumer, and for dP.
    arch::barrier_wait(shared.probs_full[stage], step / Kernel::kStages % 2);
    arch::wgmma_wait<0>(registers_of(grad));
    // dP becomes dS.
    multiply_handed<Kernel>(plan, shared, step, grad);
    // Release the output gradients.
    arrive_warps(shared.do_empty[stage]);
    round_operand<T>(grad, grad_scores);
    // Issue dK += dS^T Q.
    arch::barrier_wait(shared.q_full[stage], step / Kernel::kStages % 2);
    multiply_fragments<T, typename Kernel::TileQ>(grad_key, grad_scores, arch::shared_address(shared.q[stage]));
    arch::wgmma_wait<0>(registers_of(grad_key));
    // Release the queries, and with them P of the stage.
    arrive_warps(shared.q_empty[stage]);
  }
}

// Stores a consumer's gradient: staged in `tile` or, if it is a part of a sum, among the `parts` in the workspace.
template <class Kernel, class Grad, class Tile>
DEVICE void store_sum(const AttentionBackwardParams& p, const BackwardPlan& plan, const BackwardTask& task,
                      SharedAddress tile, const HeadsMap& map, const HeadsView& to, int64_t width, float* parts,
                      float factor, typename Grad::Accumulators& gradient) {
  using T = typename Kernel::Element;
  if (is_part<Kernel>(plan, task)) {
    WorkspaceTile<Grad>(part_of<Kernel, Grad>(p, plan, task, parts), Kernel::thread()).store(gradient, factor);
    return;
  }
  if (write_float32_grad<Kernel, Grad>(p, task, to, width, gradient, factor)) return;
  sync_consumers<Kernel::kConsumers>();  // keys and values have been read
  stage_gradient<T, Tile>(tile, 0, gradient, factor);
  arch::fence_async_shared();
  ConsumerThreads::sync();
  store_gradient<T, Tile>(p, task, tile, 0, map, to, width);
}

// Grid: tiles of keys of all key heads and sequences, `splits` blocks for each.
template <class Kernel>
GLOBAL(Kernel::kThreads, 1)
attention_bwd_keys_sm90(GRID_CONSTANT AttentionBackwardParams p, GRID_CONSTANT BackwardPlan plan,
                        GRID_CONSTANT KeysMaps maps) {
  SHARED_STORAGE(typename Kernel::Storage, shared);
  QueryStep first;
  bool has_steps;
  {
    const BackwardWork work = find_work<Kernel>(p, plan);
    if (!work.has_keys) return;
    first = work.first;
    has_steps = work.has_steps;
    if (arch::thread_index() == 0) work.task.store<Kernel>(shared.task);
  }
  if (arch::thread_index() == 0) {
    init_load_barriers<Kernel>(shared, Kernel::kConsumers * kWarps);
    for (int stage = 0; stage < Kernel::kStages; ++stage) arch::barrier_init(shared.probs_full[stage], kWarps);
    arch::fence_barrier_init();
  }
  arch::sync_threads();
  if (arch::thread_index() < kWarpgroup) {
    arch::decrease_registers<kRegistersOfTwo.producer>();
    if (has_steps && arch::thread_index() == 0) produce<Kernel>(p, plan, maps, shared, first);
    return;
  }
  arch::increase_registers<kRegistersOfTwo.consumer>();
  if (ConsumerThreads::consumer() == 0) {
    typename Kernel::GradV::Accumulators grad_value = {};
    if (has_steps) accumulate_values<Kernel>(p, plan, shared, first, grad_value);
    store_sum<Kernel, typename Kernel::GradV, typename Kernel::TileV>(
        p, plan, shared.task, arch::shared_address(shared.v), maps.grad_value, p.grad_value, p.dim_v, plan.grad_value,
        Kernel::kWithOptions ? plan.kept_scale : 1.0f, grad_value);
  } else {
    typename Kernel::GradK::Accumulators grad_key = {};
    if (has_steps) accumulate_keys<Kernel>(p, plan, shared, first, grad_key);
    store_sum<Kernel, typename Kernel::GradK, typename Kernel::TileK>(
        p, plan, shared.task, arch::shared_address(shared.k), maps.grad_key, p.grad_key, p.dim, plan.grad_key,
        plan.logits.scale, grad_key);
  }
}

}  // namespace cuda_ext::attention::sm90
