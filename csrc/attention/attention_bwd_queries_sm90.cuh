// Flash attention backward for Hopper (sm_90a) and large head dims, second of two kernels: dQ.
//
// Problem        as in attention_bwd_sm90.cuh, dQ and the gradient of a bias only; attention_bwd_keys_sm90.cuh computes
//                dK and dV, and its head says why there are two.
// Tile           128 queries of one head. A block has one, and loops over the keys that any of them sees, 64 at a
//                time.
// Warpgroups     0: its first thread, the producer, loads. The others are consumers: each owns 64 queries.
// Step           The consumer issues scores and dP, (queries, keys). P is computed under dP. dS is an operand of dQ
//                from registers. One consumer multiplies while the other computes exponentials.
// Barriers       queries_full: 1 arrival, of the producer, and the bytes of queries and output gradients.
//                k_full[stage], v_full: 1 arrival and bytes. k_empty[stage], v_empty: 1 arrival per consumer.
//                Named barriers 1 and 2: the 128 threads of a consumer. 7: both consumers.
// Shared memory  queries (128, dim) and output gradients (128, dim_v), two stages of keys (64, dim), values
//                (64, dim_v), in pieces of 64 columns in the 128-byte swizzle; the block's ForwardTask; barriers. At
//                the end dQ is staged in the memory of the queries.
// Registers      24 for the producer's warpgroup, 240 for consumers: dim / 2 of dQ, 32 of scores, 32 of dP, 16 of dS.
// Lengths        TMA reads zeros beyond the tensor. With varlen the keys and values beyond a sequence are those
//                of the next one; they are cleared in shared memory, because 0 times infinity is NaN.
#pragma once

#include "attention/attention_bwd_sm90.h"
#include "attention/bwd_loop_sm90.cuh"
#include "attention/fwd_rows.cuh"

namespace cuda_ext::attention::sm90 {

struct QueriesMaps {
  HeadsMap query, grad_out, key, value, grad_query;
};

// One instantiation of the kernel.
template <class T, BackwardConfig config, bool with_options>
struct BackwardQueries {
  using Element = T;
  static constexpr bool kWithOptions = with_options;
  static constexpr int kBlockM = kQueriesOfSeparate;
  static constexpr int kBlockN = config.block_n;
  static constexpr int kPaddedM = config.block_m;  // the workspace pads sequences to tiles of the other kernel
  static constexpr int kStages = config.stages;
  static constexpr int kConsumers = kBlockM / kWarpgroupRows;
  static constexpr int kThreads = kWarpgroup * (1 + kConsumers);
  static_assert(config.separate);

  using Scores = WarpTiles<kBlockM, kBlockN, 4 * kConsumers, 1>;
  using GradQ = WarpTiles<kBlockM, config.dim, 4 * kConsumers, 1>;
  using Fragments = uint32_t[kBlockN / 16][4];  // of dS

  using TileQ = PiecesTile<kBlockM, config.dim>;
  using TileDO = PiecesTile<kBlockM, config.dim_v>;
  using TileK = PiecesTile<kBlockN, config.dim>;
  using TileV = PiecesTile<kBlockN, config.dim_v>;

  DEVICE static int thread() { return arch::opaque_thread_index() - kWarpgroup; }

  struct Storage {
    alignas(1024) unsigned char q[TileQ::kBytes];
    alignas(1024) unsigned char grad_out[TileDO::kBytes];
    alignas(1024) unsigned char k[kStages][TileK::kBytes];
    alignas(1024) unsigned char v[TileV::kBytes];
    ForwardTask task;
    Barrier queries_full, k_full[kStages], k_empty[kStages], v_full, v_empty;
  };
  static_assert(sizeof(Storage) <= 227 * 1024);
};

// Minus lse and minus delta of the two rows of a thread; lse in powers of two, if nothing modifies logits or probs.
struct RowGradients {
  float minus_lse[2], minus_delta[2];
};

template <class Kernel>
DEVICE RowGradients load_rows(const AttentionBackwardParams& p, const BackwardPlan& plan, const ForwardTask& task) {
  const TileRows rows = load_struct(task.rows);
  const int64_t first_row = rows.first_head * int64_t(plan.head_rows) +
                            first_tile<Kernel::kPaddedM>(p, plan, load_struct(task.position).batch) * Kernel::kPaddedM;
  const float lse_factor = modifies<Kernel>(plan) ? 1.0f : plan.factor;
  RowGradients loaded;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = rows.first + Kernel::Scores::row(0, half, Kernel::thread());
    const int64_t row = first_row + query;
    const bool exists = query < rows.count;
    loaded.minus_lse[half] = exists ? arch::load_global<float>(plan.minus_lse + row) * lse_factor : -INFINITY;
    loaded.minus_delta[half] = exists ? arch::load_global<float>(plan.minus_delta + row) : 0.0f;
  }
  return loaded;
}

// The producer, one thread.
template <class Kernel>
DEVICE void produce_keys(const QueriesMaps& maps, typename Kernel::Storage& shared) {
  using TileK = typename Kernel::TileK;
  using TileV = typename Kernel::TileV;
  const TileRows rows = load_struct(shared.task.rows);
  const TilePosition position = load_struct(shared.task.position);
  arch::barrier_arrive_expect(shared.queries_full, Kernel::TileQ::kBytes + Kernel::TileDO::kBytes);
  load_pieces<typename Kernel::TileQ>(arch::shared_address(shared.q), maps.query, shared.queries_full,
                                      position.q_begin + rows.first, rows.first_head, position.batch);
  load_pieces<typename Kernel::TileDO>(arch::shared_address(shared.grad_out), maps.grad_out, shared.queries_full,
                                       position.q_begin + rows.first, rows.first_head, position.batch);
  Ring<Kernel::kStages> keys;
  Ring<1> values;
#pragma unroll 1
  for (int step = load_struct(shared.task.keys).begin; step < load_struct(shared.task.end).step;
       step = next_step<Kernel>(shared.task, step, 1)) {
    const int first_key = position.k_begin + tile_of<Kernel>(shared.task, step) * Kernel::kBlockN;
    // Wait until both consumers have released the stage.
    arch::barrier_wait(shared.k_empty[keys.stage], keys.parity ^ 1);
    arch::barrier_arrive_expect(shared.k_full[keys.stage], TileK::kBytes);
    load_pieces<TileK>(arch::shared_address(shared.k[keys.stage]), maps.key, shared.k_full[keys.stage], first_key,
                       position.head_kv, position.batch);
    keys.advance();
    // One stage of values is enough: they are released in the middle of a step.
    arch::barrier_wait(shared.v_empty, values.parity ^ 1);
    arch::barrier_arrive_expect(shared.v_full, TileV::kBytes);
    load_pieces<TileV>(arch::shared_address(shared.v), maps.value, shared.v_full, first_key, position.head_kv,
                       position.batch);
    values.advance();
  }
}

// The scores s become P, while dP is in flight, and then dP becomes dS. between(): called before
// the wait for dP.
template <class Kernel, class Between>
DEVICE void softmax_gradient(const AttentionBackwardParams& p, const BackwardPlan& plan, const ForwardTask& task,
                             int step, const RowGradients& of_rows, typename Kernel::Scores::Accumulators& s,
                             typename Kernel::Scores::Accumulators& grad, const Between& between) {
  using Scores = typename Kernel::Scores;
  const TileRows rows = load_struct(task.rows);
  const Visibility visible = load_struct(task.keys).visible;
  const int first_key = tile_of<Kernel>(task, step) * Kernel::kBlockN, thread = Kernel::thread();
  const bool is_masked =
      !visible.all_visible(rows.first, rows.first + Kernel::kBlockM - 1, first_key, first_key + Kernel::kBlockN);
  const auto query_at = [&](int half) { return rows.first + Scores::row(0, half, thread); };
  if constexpr (Kernel::kWithOptions) {
    apply_bits<Scores>(s, row_bits<Kernel, Scores>(p, task, step, thread), plan.modifies ? kHiddenScore : -INFINITY);
    if (plan.modifies) {
      const TilePosition position = load_struct(task.position);
      const OptionsStep options(p, {position.batch, position.q_begin, rows.count, 0}, visible, rows.first_head);
      between();
      arch::wgmma_wait<0>(registers_of(grad));
      if (plan.dropout.drop_below > 0)
        plan.dropout.drop(grad, [&](int, int half) { return options.first_number + query_at(half); }, first_key);
#pragma unroll
      for (int n = 0; n < Scores::kColumnTiles; ++n)
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const int key = first_key + Scores::column(thread) + Scores::column_step(n) + q % 2, query = query_at(q / 2);
          const OptionsProb of = prob_with_options<typename Kernel::Element>(
              p, plan, visible, options, s[0][n][q], of_rows.minus_lse[q / 2], key, query, is_masked);
          float& x = grad[0][n][q];
          x = of.prob * (x * plan.kept_scale + of_rows.minus_delta[q / 2]);
          if (p.grad_bias != nullptr && of.exists) add_grad_bias(p, options, key, query, x);
          x *= of.slope_of_cap;
        }
      return;
    }
  }
  if (is_masked) {
    const int origin = first_key + Scores::column(thread);
    apply_mask<Scores>(s, [&](int, int half) { return visible.keys(query_at(half)).from(origin); });
  }
#pragma unroll
  for (int n = 0; n < Scores::kColumnTiles; ++n)
#pragma unroll
    for (int q = 0; q < 4; ++q)
      s[0][n][q] = arch::fast_exp2(arch::fma(s[0][n][q], plan.factor, of_rows.minus_lse[q / 2]));
  between();
  arch::wgmma_wait<0>(registers_of(grad));
#pragma unroll
  for (int n = 0; n < Scores::kColumnTiles; ++n)
#pragma unroll
    for (int q = 0; q < 4; ++q) grad[0][n][q] = s[0][n][q] * (grad[0][n][q] + of_rows.minus_delta[q / 2]);
}

// sums = dS K, over the keys of the block's task, at least one.
template <class Kernel>
DEVICE void accumulate_queries(const AttentionBackwardParams& p, const BackwardPlan& plan,
                               typename Kernel::Storage& shared, typename Kernel::GradQ::Accumulators& sums) {
  using T = typename Kernel::Element;
  using TileK = typename Kernel::TileK;
  using TileV = typename Kernel::TileV;
  const int own = ConsumerThreads::consumer() * kWarpgroupRows * kPieceBytes;
  const SharedAddress q = arch::shared_address(shared.q) + own, grad_out = arch::shared_address(shared.grad_out) + own,
                      v = arch::shared_address(shared.v);
  const RowGradients of_rows = load_rows<Kernel>(p, plan, shared.task);
  typename Kernel::Scores::Accumulators s, grad;
  typename Kernel::Fragments grad_scores;
  Ring<Kernel::kStages> keys;
  Ring<1> values;
  const auto await_keys = [&](const Ring<Kernel::kStages>& ring) {
    arch::barrier_wait(shared.k_full[ring.stage], ring.parity);
  };
  // Keys of a step that belong to the sequence, where those after them are of the next one.
  const auto keys_left = [&](int step) {
    if (p.cu_seqlens_k == nullptr) return Kernel::kBlockN;
    return load_struct(shared.task.keys).visible.k_len - tile_of<Kernel>(shared.task, step) * Kernel::kBlockN;
  };
  // Queries and output gradients stay for the whole loop.
  arch::barrier_wait(shared.queries_full, 0);
  await_keys(keys);
#pragma unroll 1
  for (int step = load_struct(shared.task.keys).begin; step < load_struct(shared.task.end).step;
       step = next_step<Kernel>(shared.task, step, 1)) {
    const SharedAddress k = arch::shared_address(shared.k[keys.stage]);
    // Clear the keys and values of the next sequence.
    if (const int left = keys_left(step); left < Kernel::kBlockN) {
      arch::barrier_wait(shared.v_full, values.parity);
      clear_from<Kernel, TileK>(k, left);
      clear_from<Kernel, TileV>(v, left);
      sync_consumers<Kernel::kConsumers>();
    }
    // Issue S = Q K^T.
    arch::wgmma_fence(registers_of(s));
    multiply_lines<T, typename Kernel::TileQ, TileK>(s, q, k, false);
    arch::wgmma_commit();
    // Issue dP = dO V^T.
    arch::barrier_wait(shared.v_full, values.parity);
    arch::wgmma_fence(registers_of(grad));
    multiply_lines<T, typename Kernel::TileDO, TileV>(grad, grad_out, v, false);
    arch::wgmma_commit();
    // Wait for S alone.
    arch::wgmma_wait<1>(registers_of(s));
    Ring<Kernel::kStages> next = keys;
    next.advance();
    // A loop, across which ptxas does not move the exponentials: they belong before the wait for dP.
    softmax_gradient<Kernel>(p, plan, shared.task, step, of_rows, s, grad, [&] {
      if (step + 1 < load_struct(shared.task.end).step) await_keys(next);
    });
    // Release the values to the producer: dP is complete.
    ConsumerThreads::arrive(shared.v_empty);
    values.advance();
    round_operand<T>(grad, grad_scores);
    // Issue dQ += dS K.
    multiply_fragments<T, TileK>(sums, grad_scores, k);
    // Release the keys to the producer.
    arch::wgmma_wait<0>(registers_of(sums));
    ConsumerThreads::arrive(shared.k_empty[keys.stage]);
    keys = next;
  }
}

// Stores dQ of a consumer's queries, staged in their memory.
template <class Kernel>
DEVICE void store_grad_query(const AttentionBackwardParams& p, const BackwardPlan& plan, const QueriesMaps& maps,
                             typename Kernel::Storage& shared, typename Kernel::GradQ::Accumulators& sums) {
  using T = typename Kernel::Element;
  using TileQ = typename Kernel::TileQ;
  const TileRows rows = load_struct(shared.task.rows);
  const TilePosition position = load_struct(shared.task.position);
  if (p.float32_grads) {
    write_float32<typename Kernel::GradQ>(
        sums, plan.logits.scale,
        row_of<float>(p.grad_query, position.batch, position.q_begin + rows.first, rows.first_head),
        p.grad_query.seq_stride, rows.count - rows.first, int(p.dim), Kernel::thread());
    return;
  }
  const SharedAddress staged = arch::shared_address(shared.q);
  const int own = ConsumerThreads::consumer() * kWarpgroupRows, first = rows.first + own;
  ConsumerThreads::sync();  // all warps have read their queries
  stage_gradient<T, TileQ>(staged, own, sums, plan.logits.scale);
  arch::fence_async_shared();
  ConsumerThreads::sync();
  if (p.cu_seqlens_q == nullptr || first + kWarpgroupRows <= rows.count)
    store_pieces<TileQ>(maps.grad_query, staged, own, position.q_begin + first, rows.first_head, position.batch);
  else
    store_lines<T, TileQ>(staged, own, rows.count - first, int(p.dim), [&](int line) {
      return row_of<T>(p.grad_query, position.batch, position.q_begin + rows.first + line, rows.first_head);
    });
}

// Grid: tiles of queries of all heads and sequences.
template <class Kernel>
GLOBAL(Kernel::kThreads, 1)
attention_bwd_queries_sm90(GRID_CONSTANT AttentionBackwardParams p, GRID_CONSTANT BackwardPlan plan,
                           GRID_CONSTANT Schedule schedule, GRID_CONSTANT QueriesMaps maps) {
  SHARED_STORAGE(typename Kernel::Storage, shared);
  bool has_keys;
  {
    TileIndex index = schedule.find(arch::block_x());
    if constexpr (Kernel::kWithOptions)
      if (p.block_mask.query_blocks > 0) index.tile = ForwardTask::list_part<Kernel>(p, schedule, {}, index).tile;
    const Sequence sequence(p, index.batch);
    const TileRows rows{index.tile * Kernel::kBlockM, sequence.q_len, 1, index.head};
    if (rows.first >= rows.count) return;
    const Visibility visible(p, sequence);
    const ForwardTask::List list =
        ForwardTask::find_list<Kernel>(p, rows, index.batch, key_tiles<Kernel>(visible, rows));
    const Span steps = ForwardTask::trim<Kernel>(list, ForwardTask::steps_of<Kernel>(list));
    has_keys = steps.begin < steps.end;
    if (arch::thread_index() == 0)
      ForwardTask{.rows = rows,
                  .position = {index.batch, sequence.q_begin, sequence.k_begin, index.head / int(p.heads / p.heads_kv)},
                  .keys = {visible, steps.begin},
                  .end = {steps.end, 0},
                  .list = list}
          .store<Kernel::kWithOptions>(shared.task);
  }
  if (arch::thread_index() == 0) {
    arch::barrier_init(shared.queries_full, 1);
    for (int stage = 0; stage < Kernel::kStages; ++stage) {
      arch::barrier_init(shared.k_full[stage], 1);
      arch::barrier_init(shared.k_empty[stage], Kernel::kConsumers);
    }
    arch::barrier_init(shared.v_full, 1);
    arch::barrier_init(shared.v_empty, Kernel::kConsumers);
    arch::fence_barrier_init();
  }
  arch::sync_threads();
  if (arch::thread_index() < kWarpgroup) {
    arch::decrease_registers<kRegistersOfTwo.producer>();
    if (has_keys && arch::thread_index() == 0) produce_keys<Kernel>(maps, shared);
    return;
  }
  arch::increase_registers<kRegistersOfTwo.consumer>();
  typename Kernel::GradQ::Accumulators sums = {};
  if (has_keys) accumulate_queries<Kernel>(p, plan, shared, sums);
  store_grad_query<Kernel>(p, plan, maps, shared, sums);
}

}  // namespace cuda_ext::attention::sm90
