// Flash attention backward for Hopper (sm_90a) and head dims up to 128: TMA, wgmma and warp specialisation, for float16
// and bfloat16 (Shah et al., "FlashAttention-3", arXiv 2407.08608). Larger ones: attention_bwd_keys_sm90.cuh.
//
// Problem        AttentionBackwardParams in attention.h:
//                P = exp(logits - lse)     dP = dO V^T     dS = P o (dP - delta), delta = rowsum(dO o O) - dlse
//                dV = P^T dO               dQ = scale dS K               dK = scale dS^T Q
// Kernels        as in attention_bwd_sm80.cuh; this one replaces the second.
// Tile           A block has block_n keys of one key head, and loops over the tiles of block_m queries that see any of
//                them, of all query heads of the group one after the other. dK and dV are complete after the loop. If
//                that makes too few blocks, the loop is divided among several. Sizes: kBackwardTiles in tiles_sm90.h.
// Warpgroups     0: its first thread, the producer, loads; the first thread of its second warp, the adder, adds dQ to
//                the workspace. The others are consumers: each owns 64 keys.
// Step           Scores are transposed, (keys, queries), so that P^T and dS^T are operands of dV and dK without leaving
//                registers. A step begins with the scores S in registers. The consumer issues dP; P is computed under
//                it. Then it issues dV, stores dS^T for the other consumer, and issues dQ, dK and the S of the next
//                step, under which dQ leaves through shared memory. dQ is a sum over the keys of both consumers, which
//                share its tile: by rows or, if it has 64, by columns.
// Barriers       keys_full: 1 arrival, of the producer, and the bytes of keys and values. {q,do}_full[stage]: 1 arrival
//                and the bytes of queries and lse, or of output gradients and delta. {q,do}_empty[stage]: 1 arrival per
//                consumer. scores_read: 1 arrival per consumer, when its product of dQ has read dS. sums_full: 1
//                arrival per consumer, when its part of dQ is written. sums_empty: 1 arrival, of the adder.
//                Named barriers 1 and 2: the 128 threads of a consumer. 7: all consumers, once per step, when dS is
//                written.
// Shared memory  keys (block_n, dim), values (block_n, dim_v), two stages of queries (block_m, dim) and of output
//                gradients (block_m, dim_v), dS^T (block_n, block_m), in pieces of 64 columns in the 128-byte swizzle;
//                float32 sums of dQ in the order of WorkspaceTile; two stages of -lse and -delta; the BackwardTask;
//                barriers. At the end dK and dV are staged in the memory of keys and values.
// Registers      24 for the producer's warpgroup, 240 for consumers: see kBackwardTiles.
// dQ             is summed in the workspace by bulk reductions of a whole tile. Their order varies, so the last bits
//                differ between runs. With `deterministic` adders wait for those of earlier keys, whose blocks start
//                earlier.
// Lengths        TMA reads zeros beyond the tensor. With varlen the rows beyond a sequence are those of the
//                next one; they are cleared in shared memory, because 0 times infinity is NaN.
// Options, block masks, splits: as in attention_bwd_sm80.cuh.
#pragma once

#include "attention/attention_bwd_sm90.h"
#include "attention/bwd_loop_sm90.cuh"
#include "attention/bwd_results_sm90.cuh"

namespace cuda_ext::attention::sm90 {

constexpr int kSumsLine = 256;  // floats of a line of the tensor map of the sums of dQ

struct BackwardMaps {
  KeysMaps loop;
  arch::TensorMap sums;
};

// One instantiation of the kernel.
template <class T, BackwardConfig config, bool with_options>
struct Backward {
  using Element = T;
  static constexpr bool kWithOptions = with_options;
  static constexpr int kThreads = config.threads();
  static constexpr int kBlockM = config.block_m;
  static constexpr int kBlockN = config.block_n;
  static constexpr int kStages = config.stages;
  static constexpr int kSteps = kBlockM / 16;  // of dV and dK
  static constexpr int kProducerRegisters = kRegistersOfTwo.producer;
  static constexpr int kConsumerRegisters = kRegistersOfTwo.consumer;

  using Results = BackwardResults<config>;
  static constexpr int kConsumers = Results::kConsumers;
  using Scores = WarpTiles<kBlockN, kBlockM, 4 * kConsumers, 1>;
  using GradK = typename Results::GradK;
  using GradV = typename Results::GradV;
  using GradQ = typename Results::GradQ;
  using Fragments = uint32_t[kSteps][4];  // of P^T or dS^T

  using TileK = PiecesTile<kBlockN, config.dim>;
  using TileV = PiecesTile<kBlockN, config.dim_v>;
  using TileQ = PiecesTile<kBlockM, config.dim>;
  using TileDO = PiecesTile<kBlockM, config.dim_v>;
  using TileScores = PiecesTile<kBlockN, kBlockM>;
  static constexpr int kSumsBytes = kBlockM * config.sums_dim() * int(sizeof(float));

  DEVICE static int thread() { return arch::opaque_thread_index() - kWarpgroup; }

  struct Storage {
    alignas(1024) unsigned char k[TileK::kBytes];
    alignas(1024) unsigned char v[TileV::kBytes];
    alignas(1024) unsigned char q[kStages][TileQ::kBytes];
    alignas(1024) unsigned char grad_out[kStages][TileDO::kBytes];
    alignas(1024) unsigned char grad_scores[TileScores::kBytes];
    alignas(128) unsigned char sums[kSumsBytes];
    alignas(128) float minus_lse[kStages][kBlockM];
    alignas(128) float minus_delta[kStages][kBlockM];
    BackwardTask task;
    Barrier keys_full, q_full[kStages], q_empty[kStages], do_full[kStages], do_empty[kStages];
    Barrier scores_read, sums_full, sums_empty;
  };
  static_assert(sizeof(Storage) <= 227 * 1024);

  // sums (64 queries, 64) = the consumer's part of dS K
  DEVICE static void multiply_keys(typename GradQ::Accumulators& sums, SharedAddress grad_scores, SharedAddress k) {
    const int piece = ConsumerThreads::consumer();
    const int row_piece = Results::kSharesRows ? 0 : piece, column_piece = Results::kSharesRows ? piece : 0;
    const uint64_t a = TileScores::descriptor(grad_scores + row_piece * TileScores::kPieceSize, Major::kMn);
    const uint64_t b = TileK::descriptor(k + column_piece * TileK::kPieceSize, Major::kMn);
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step)
      arch::wgmma_m64k16<T, Major::kMn, Major::kMn>(
          registers_of(sums), arch::advance_descriptor(a, TileScores::step_bytes(step, Major::kMn)),
          arch::advance_descriptor(b, TileK::step_bytes(step, Major::kMn)), step > 0);
  }
};

// The adder, one thread: adds the sums of each step to those in the workspace.
template <class Kernel>
DEVICE void add_sums(const AttentionParams& p, const BackwardPlan& plan, const BackwardMaps& maps,
                     typename Kernel::Storage& shared, QueryStep step) {
  const BackwardTask::Queries queries = load_struct(shared.task.queries);
  uint32_t parity = 0;
#pragma unroll 1
  for (bool more = true; more; step = next_step<Kernel>(p, shared.task, step), parity ^= 1) {
    more = step != load_struct(shared.task.steps).last;
    const QueryTile tile = tile_of<Kernel>(p, shared.task, step);
    const int padded = padded_row<Kernel>(plan, queries, tile);
    const int to[2] = {0, int(int64_t(padded) * Kernel::GradQ::kColumns / kSumsLine)};
    const uint32_t earlier = plan.dq_semaphore != nullptr ? earlier_blocks<Kernel>(p, shared.task, tile) : 0;
    // Wait for the sums of both consumers.
    arch::barrier_wait(shared.sums_full, parity);
    // Wait for the blocks of earlier keys.
    if (plan.dq_semaphore != nullptr) arch::wait_equal(plan.dq_semaphore + padded / Kernel::kBlockM, earlier);
    arch::tma_store<true>(maps.sums, arch::shared_address(shared.sums), to);
    arch::bulk_commit();
    // Release the buffer to the consumers.
    arch::bulk_wait_read<0>();
    arch::barrier_arrive(shared.sums_empty);
    if (plan.dq_semaphore != nullptr) {
      arch::bulk_wait<0>();
      arch::store_release(plan.dq_semaphore + padded / Kernel::kBlockM, earlier + 1);
    }
  }
}

// The first line of a consumer in a tile of keys.
DEVICE int first_line() { return ConsumerThreads::consumer() * kWarpgroupRows; }

// Clears the lines of a tile from `line` on, for all consumers.
template <class Kernel, class Tile>
DEVICE void clear_tail(SharedAddress tile, int line) {
  if (clear_from<Kernel, Tile>(tile, line)) sync_consumers<Kernel::kConsumers>();
}

// Waits for keys and values, and clears those of the next sequence.
template <class Kernel>
DEVICE void await_keys(const AttentionBackwardParams& p, typename Kernel::Storage& shared) {
  arch::barrier_wait(shared.keys_full, 0);
  if (p.cu_seqlens_k == nullptr) return;
  const BackwardTask::Keys keys = load_struct(shared.task.keys);
  clear_tail<Kernel, typename Kernel::TileK>(arch::shared_address(shared.k), keys.visible.k_len - keys.first);
  clear_tail<Kernel, typename Kernel::TileV>(arch::shared_address(shared.v), keys.visible.k_len - keys.first);
}

// The scores s become P, while dP is in flight, and dP becomes dS. Afterwards the dS of the step before has been read.
template <class Kernel>
DEVICE void softmax_gradient(const AttentionBackwardParams& p, const BackwardPlan& plan,
                             typename Kernel::Storage& shared, const QueryStep& at, int step,
                             typename Kernel::Scores::Accumulators& s, typename Kernel::Scores::Accumulators& grad) {
  const int first_query = tile_of<Kernel>(p, shared.task, at).index * Kernel::kBlockM;
  const BackwardTask::Keys keys = load_struct(shared.task.keys);
  const bool is_masked = !keys.visible.all_visible(first_query, first_query + Kernel::kBlockM - 1, keys.first,
                                                   keys.first + Kernel::kBlockN);
  const int stage = step % Kernel::kStages;
  // A loop, across which ptxas does not move the exponentials: they belong before the wait for dP.
  const auto await_products = [&] {
    arch::barrier_wait(shared.scores_read, step % 2 ^ 1);
    arch::wgmma_wait<0>(registers_of(grad));
  };
  apply_block_mask<Kernel>(s, p, plan, shared.task, at);
  if constexpr (Kernel::kWithOptions) {
    if (plan.modifies) {
      await_products();
      const OptionsStep options(p, load_struct(shared.task.queries), keys.visible, at.head);
      softmax_gradient_with_options<Kernel>(s, grad, p, plan, keys.visible, options, shared.minus_lse[stage],
                                            shared.minus_delta[stage], keys.first, first_query, is_masked);
      return;
    }
  }
  if constexpr (Kernel::kWithOptions) {
    make_probs<Kernel>(s, shared.minus_lse[stage], plan, keys.visible, keys.first, first_query, is_masked);
    await_products();
    multiply_probs<Kernel>(grad, s, shared.minus_delta[stage]);
  } else {
    make_probs<Kernel>(s, plan, keys.visible, keys.first, first_query, is_masked);
    await_products();
    multiply_probs(grad, s);
  }
}

// Puts dS^T where all consumers read it, for dQ, which is a sum over the keys of all.
template <class Kernel>
DEVICE void share_grad_scores(typename Kernel::Storage& shared, const typename Kernel::Fragments& grad_scores) {
#pragma unroll
  for (int step = 0; step < Kernel::kSteps; ++step)
    stage_fragment<typename Kernel::TileScores>(arch::shared_address(shared.grad_scores), first_line(), step,
                                                grad_scores[step]);
  arch::fence_async_shared();
  sync_consumers<Kernel::kConsumers>();  // dS is written
}

// Hands the consumer's part of dQ to the adder, in the order of WorkspaceTile.
template <class Kernel>
DEVICE void store_sums(typename Kernel::Storage& shared, int step, const typename Kernel::GradQ::Accumulators& sums) {
  arch::barrier_wait(shared.sums_empty, step % 2 ^ 1);
#pragma unroll
  for (int n = 0; n < Kernel::GradQ::kColumnTiles; ++n)
    arch::store_shared(arch::shared_address(shared.sums) + (n * Kernel::GradQ::kThreads + Kernel::thread()) * 16,
                       arch::Words4{{arch::float_bits(sums[0][n][0]), arch::float_bits(sums[0][n][1]),
                                     arch::float_bits(sums[0][n][2]), arch::float_bits(sums[0][n][3])}});
  arch::fence_async_shared();
  ConsumerThreads::sync();
  ConsumerThreads::arrive(shared.sums_full);
}

// The steps of a block, at least one, for a consumer.
template <class Kernel>
DEVICE void accumulate(const AttentionBackwardParams& p, const BackwardPlan& plan, typename Kernel::Storage& shared,
                       QueryStep at, typename Kernel::GradK::Accumulators& grad_key,
                       typename Kernel::GradV::Accumulators& grad_value) {
  using T = typename Kernel::Element;
  using TileK = typename Kernel::TileK;
  using TileV = typename Kernel::TileV;
  using TileQ = typename Kernel::TileQ;
  using TileDO = typename Kernel::TileDO;
  const SharedAddress k = arch::shared_address(shared.k), v = arch::shared_address(shared.v),
                      scores = arch::shared_address(shared.grad_scores);
  typename Kernel::Scores::Accumulators s, grad;
  typename Kernel::GradQ::Accumulators sums;
  typename Kernel::Fragments probs, grad_scores;
  int step = 0;  // one register gives all stages and parities
  const auto await_queries = [&] {
    const int stage = step % Kernel::kStages;
    arch::barrier_wait(shared.q_full[stage], step / Kernel::kStages % 2);
    clear_tail<Kernel, TileQ>(arch::shared_address(shared.q[stage]), lines_left<Kernel>(p, shared, at));
  };
  const auto start_scores = [&] {
    const int stage = step % Kernel::kStages;
    start_rows<Kernel, TileK, TileQ>(s, k + first_line() * kPieceBytes, arch::shared_address(shared.q[stage]),
                                     shared.minus_lse[stage]);
  };

  // S of the first step.
  await_keys<Kernel>(p, shared);
  await_queries();
  start_scores();
  arch::wgmma_wait<0>(registers_of(s));

#pragma unroll 1
  for (bool more = true; more;) {
    more = at != load_struct(shared.task.steps).last;
    const int stage = step % Kernel::kStages, this_step = step;
    const SharedAddress grad_out = arch::shared_address(shared.grad_out[stage]);
    // Issue dP = V dO^T.
    arch::barrier_wait(shared.do_full[stage], step / Kernel::kStages % 2);
    clear_tail<Kernel, TileDO>(grad_out, lines_left<Kernel>(p, shared, at));
    start_rows<Kernel, TileV, TileDO>(grad, v + first_line() * kPieceBytes, grad_out, shared.minus_delta[stage]);
    // S becomes P while dP is in flight, and dP becomes dS.
    softmax_gradient<Kernel>(p, plan, shared, at, step, s, grad);
    round_operand<T>(s, probs);
    round_operand<T>(grad, grad_scores);
    // Issue dV += P^T dO.
    multiply_fragments<T, TileDO>(grad_value, probs, grad_out);

    share_grad_scores<Kernel>(shared, grad_scores);
    // Issue dQ = dS K.
    arch::wgmma_fence(registers_of(sums));
    Kernel::multiply_keys(sums, scores, k);
    arch::wgmma_commit();
    // Issue dK += dS^T Q.
    multiply_fragments<T, TileQ>(grad_key, grad_scores, arch::shared_address(shared.q[stage]));
    // Release the output gradients to the producer.
    arch::wgmma_wait<2>(registers_of(grad_value));  // which frees the registers of P
    ConsumerThreads::arrive(shared.do_empty[stage]);
    // The scores of the next step or, after the last one, of the same queries, because a product under a condition
    // would make ptxas wait for each product.
    if (more) {
      ++step;
      at = next_step<Kernel>(p, shared.task, at);
      await_queries();
    }
    start_scores();

    // Hand dQ to the adder while dK and the next S are in flight.
    arch::wgmma_wait<2>(registers_of(sums));
    ConsumerThreads::arrive(shared.scores_read);
    store_sums<Kernel>(shared, this_step, sums);
    // Release the queries to the producer.
    arch::wgmma_wait<1>(registers_of(grad_key));
    ConsumerThreads::arrive(shared.q_empty[stage]);
    arch::wgmma_wait<0>(registers_of(s));
  }
  arch::wgmma_wait<0>(registers_of(grad_value));
  arch::wgmma_wait<0>(registers_of(grad_key));
}

// Stores dK and dV of a consumer's keys: staged in the memory of keys and values or, if they are parts of a sum, in the
// workspace.
template <class Kernel>
DEVICE void store_gradients(const AttentionBackwardParams& p, const BackwardPlan& plan, const KeysMaps& maps,
                            typename Kernel::Storage& shared, typename Kernel::GradK::Accumulators& grad_key,
                            typename Kernel::GradV::Accumulators& grad_value) {
  using T = typename Kernel::Element;
  using TileK = typename Kernel::TileK;
  using TileV = typename Kernel::TileV;
  using GradK = typename Kernel::GradK;
  using GradV = typename Kernel::GradV;
  const float value_factor = Kernel::kWithOptions ? plan.kept_scale : 1.0f;
  if (is_part<Kernel>(plan, shared.task)) {
    WorkspaceTile<GradK>(part_of<Kernel, GradK>(p, plan, shared.task, plan.grad_key), Kernel::thread())
        .store(grad_key, plan.logits.scale);
    WorkspaceTile<GradV>(part_of<Kernel, GradV>(p, plan, shared.task, plan.grad_value), Kernel::thread())
        .store(grad_value, value_factor);
    return;
  }
  if (write_float32_grad<Kernel, GradK>(p, shared.task, p.grad_key, p.dim, grad_key, plan.logits.scale)) {
    write_float32_grad<Kernel, GradV>(p, shared.task, p.grad_value, p.dim_v, grad_value, value_factor);
    return;
  }
  const SharedAddress k = arch::shared_address(shared.k), v = arch::shared_address(shared.v);
  const int own = first_line();
  sync_consumers<Kernel::kConsumers>();  // keys and values have been read
  stage_gradient<T, TileK>(k, own, grad_key, plan.logits.scale);
  stage_gradient<T, TileV>(v, own, grad_value, value_factor);
  arch::fence_async_shared();
  ConsumerThreads::sync();
  store_gradient<T, TileK>(p, shared.task, k, own, maps.grad_key, p.grad_key, p.dim);
  store_gradient<T, TileV>(p, shared.task, v, own, maps.grad_value, p.grad_value, p.dim_v);
}

// Grid: tiles of keys of all key heads and sequences, `splits` blocks for each.
template <class Kernel>
GLOBAL(Kernel::kThreads, 1)
attention_bwd_sm90(GRID_CONSTANT AttentionBackwardParams p, GRID_CONSTANT BackwardPlan plan,
                   GRID_CONSTANT BackwardMaps maps) {
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
    init_load_barriers<Kernel>(shared, Kernel::kConsumers);
    arch::barrier_init(shared.scores_read, Kernel::kConsumers);
    arch::barrier_init(shared.sums_full, Kernel::kConsumers);
    arch::barrier_init(shared.sums_empty, 1);
    arch::fence_barrier_init();
  }
  arch::sync_threads();
  if (arch::thread_index() < kWarpgroup) {
    arch::decrease_registers<Kernel::kProducerRegisters>();
    if (!has_steps) return;
    if (arch::thread_index() == 0) produce<Kernel>(p, plan, maps.loop, shared, first);
    if (arch::thread_index() == arch::kWarpSize) add_sums<Kernel>(p, plan, maps, shared, first);
  } else {
    arch::increase_registers<Kernel::kConsumerRegisters>();
    typename Kernel::GradK::Accumulators grad_key = {};
    typename Kernel::GradV::Accumulators grad_value = {};
    if (has_steps) accumulate<Kernel>(p, plan, shared, first, grad_key, grad_value);
    store_gradients<Kernel>(p, plan, maps.loop, shared, grad_key, grad_value);
  }
}

}  // namespace cuda_ext::attention::sm90
