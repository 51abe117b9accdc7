// Flash attention forward for Hopper (sm_90a): TMA, wgmma and warp specialisation, for float16 and bfloat16 (Shah et
// al., "FlashAttention-3", arXiv 2407.08608).
//
// Problem        AttentionParams in attention.h: out = softmax(logits) V and the log-sum-exp of each row of logits.
// Tile           block_m rows: queries of one head or, if there are few queries, of all heads that share a key head,
//                which is then read once for all of them (pack_gqa). It loops over the keys that any of its rows sees,
//                block_n at a time, from the last to the first, so that only the first steps meet a causal mask.
//                Sizes: kForwardTiles in tiles_sm90.h.
// Blocks         are persistent: each computes one tile of each round, longest tiles first, in alternating order.
// Warpgroups     0: its first thread is the producer, which loads. The others are consumers: each owns 64 rows of the
//                tile.
// Step           The consumer issues S' = Q K'^T for the next keys K' and O += P V for the current values; when S' has
//                arrived, its softmax runs while P V is in flight. Then O is rescaled, and S' becomes P.
// Turns          Consumers issue the products of a step one after the other, so that tensor cores compute for one while
//                another computes its softmax.
// Barriers       q_full: 1 arrival, of the producer, when it has written the task, and the bytes of the queries.
//                q_empty: 1 arrival per consumer, when it has stored its output. {k,v}_full[stage]: 1 arrival and
//                bytes. {k,v}_empty[stage]: 1 arrival per consumer.
//                Named barriers 1 to 3: the 128 threads of a consumer. 4 to 6: its turn; its threads wait, and those
//                of the consumer before it arrive. 7: all consumers.
// Shared memory  queries (block_m, dim); rings of keys (block_n, dim) and of values (block_n, dim_v), in pieces of 64
//                columns in the 128-byte swizzle; the tile's ForwardTask, written by the producer; barriers. At the end
//                each consumer stages its output in the memory of its queries.
// Registers      24 (32 with three consumers) for the producer's warpgroup, 240 (160) for consumers: per thread
//                block_n / 2 logits, block_n / 4 probs, dim_v / 2 outputs.
// Lengths        TMA reads zeros beyond the tensor. With varlen the rows beyond a sequence are those of the
//                next one: keys are masked, values are cleared in shared memory, because 0 times infinity is NaN.
// Options, block masks, splits: as in attention_fwd_sm80.cuh.
#pragma once

#include "attention/attention_fwd_sm90.h"
#include "attention/consumer_tiles_sm90.cuh"
#include "attention/fwd_rows.cuh"

namespace cuda_ext::attention::sm90 {

struct ForwardMaps {
  HeadsMap query, key, value, out;
};

// One instantiation of the kernel.
template <class T, ForwardConfig config, bool with_options>
struct Forward {
  using Element = T;
  static constexpr bool kWithOptions = with_options;
  static constexpr ForwardConfig kConfig = config;
  static constexpr int kConsumers = config.consumers();
  static constexpr int kThreads = config.threads();
  static constexpr int kBlockM = config.block_m;
  static constexpr int kBlockN = config.block_n;
  static constexpr int kSteps = kBlockN / 16;  // of P V
  static constexpr int kProducerRegisters = config.registers().producer;
  static constexpr int kConsumerRegisters = config.registers().consumer;

  using TileQ = PiecesTile<kBlockM, config.dim>;
  using TileK = PiecesTile<kBlockN, config.dim>;
  using TileV = PiecesTile<kBlockN, config.dim_v>;
  using TileOut = PiecesTile<kBlockM, config.dim_v>;
  static_assert(TileOut::kBytes <= TileQ::kBytes);

  // Rows and columns of a thread's accumulators: those of mma.sync with a warp for each 16 rows.
  using LogitTiles = WarpTiles<kBlockM, kBlockN, 4 * kConsumers, 1>;
  using OutTiles = WarpTiles<kBlockM, config.dim_v, 4 * kConsumers, 1>;
  using Logits = typename LogitTiles::Accumulators;
  using Out = typename OutTiles::Accumulators;
  using Probs = uint32_t[kSteps][4];  // fragments of P
  DEVICE static int thread() { return arch::opaque_thread_index() - kWarpgroup; }
  DEVICE static int row_at(int m, int half) { return LogitTiles::row(m, half, thread()); }

  struct Storage {
    alignas(1024) unsigned char q[TileQ::kBytes];
    alignas(1024) unsigned char k[config.stages][TileK::kBytes];
    alignas(1024) unsigned char v[config.stages][TileV::kBytes];
    ForwardTask task;  // without rows: the last
    Barrier q_full, q_empty;
    Barrier k_full[config.stages], k_empty[config.stages], v_full[config.stages], v_empty[config.stages];
  };
  static_assert(sizeof(Storage) <= 227 * 1024);

  // s (64, block_n) = Q K^T for the consumer whose rows begin at `q`.
  DEVICE static void multiply_keys(Logits& s, SharedAddress q, SharedAddress k) {
    const uint64_t a = TileQ::descriptor(q, Major::kK), b = TileK::descriptor(k, Major::kK);
#pragma unroll
    for (int step = 0; step < config.dim / 16; ++step)
      arch::wgmma_m64k16<T, Major::kK, Major::kK>(
          registers_of(s), arch::advance_descriptor(a, TileQ::step_bytes(step, Major::kK)),
          arch::advance_descriptor(b, TileK::step_bytes(step, Major::kK)), step > 0);
  }
  // out (64, dim_v) += P V
  DEVICE static void multiply_values(Out& out, const Probs& probs, SharedAddress v) {
    const uint64_t b = TileV::descriptor(v, Major::kMn);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      arch::wgmma_m64k16<T, Major::kMn>(registers_of(out), probs[step],
                                        arch::advance_descriptor(b, TileV::step_bytes(step, Major::kMn)), 1);
  }
};

// The item of a block in a round; at least plan.items() if there is none. In odd rounds blocks are in reverse order, so
// that none has the longest tile of every round.
DEVICE int item_of_round(int round) {
  const int block = arch::block_x(), blocks = arch::grid_x();
  return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
}

// The producer, one thread.
template <class Kernel>
DEVICE void produce(const AttentionParams& p, const ForwardPlan& plan, const ForwardMaps& maps,
                    typename Kernel::Storage& shared) {
  using TileK = typename Kernel::TileK;
  using TileV = typename Kernel::TileV;
  Ring<Kernel::kConfig.stages> keys, values;
  uint32_t q_parity = 1;
  const auto wait_for_consumers = [&] {
    arch::barrier_wait(shared.q_empty, q_parity);
    q_parity ^= 1;
  };
#pragma unroll 1
  for (int round = 0; round * arch::grid_x() < plan.items(); ++round) {
    const int item = item_of_round(round);
    if (item >= plan.items()) break;
    const ForwardTask task = ForwardTask::find<Kernel>(p, plan, item / plan.splits, item % plan.splits);
    if (task.has_no_rows()) continue;
    const TilePosition& position = task.position;
    // Wait until the consumers have stored the item before.
    wait_for_consumers();
    task.store<Kernel::kWithOptions>(shared.task);
    // Publish the task, and load its queries.
    arch::barrier_arrive_expect(shared.q_full, Kernel::TileQ::kBytes);
    load_pieces<typename Kernel::TileQ>(arch::shared_address(shared.q), maps.query, shared.q_full,
                                        position.q_begin + task.rows.first / plan.pack_gqa,
                                        task.rows.first_head / plan.pack_gqa, position.batch);
    const auto load_keys = [&](int tile) {
      // Wait until all consumers have released the stage.
      arch::barrier_wait(shared.k_empty[keys.stage], keys.parity ^ 1);
      arch::barrier_arrive_expect(shared.k_full[keys.stage], TileK::kBytes);
      load_pieces<TileK>(arch::shared_address(shared.k[keys.stage]), maps.key, shared.k_full[keys.stage],
                         position.k_begin + tile * Kernel::kBlockN, position.head_kv, position.batch);
      keys.advance();
    };
    const int begin = task.keys.begin, end = task.end.step;
    // The task that was just published is read back: with options the walk along its list needs it.
    const auto tile_at = [&](int step) { return tile_of<Kernel>(shared.task, step); };
    if (begin < end) load_keys(tile_at(end - 1));
#pragma unroll 1
    for (int step = end - 1, next; step >= begin; step = next) {
      next = next_step<Kernel>(shared.task, step, -1);
      if (step > begin) load_keys(tile_at(next));  // needed before the values
      arch::barrier_wait(shared.v_empty[values.stage], values.parity ^ 1);
      arch::barrier_arrive_expect(shared.v_full[values.stage], TileV::kBytes);
      load_pieces<TileV>(arch::shared_address(shared.v[values.stage]), maps.value, shared.v_full[values.stage],
                         position.k_begin + tile_at(step) * Kernel::kBlockN, position.head_kv, position.batch);
      values.advance();
    }
  }
  wait_for_consumers();
  store_struct(shared.task.rows, TileRows{.first = 0, .count = 0, .pack_gqa = 1, .first_head = 0});
  arch::barrier_arrive(shared.q_full);
}

// The order in which consumers issue products. Nobody gives consumer 0 its very first turn, so it waits at the end for
// the last one, which nobody takes.
template <int consumers, bool enabled>
struct Turns {
  static constexpr int kFirstBarrier = 4;
  bool had_first = false;

  DEVICE void wait() {
    if constexpr (enabled) {
      if (ConsumerThreads::consumer() > 0 || had_first)
        arch::named_barrier_sync(kFirstBarrier + ConsumerThreads::consumer(), 2 * kWarpgroup);
      had_first = true;
    }
  }
  DEVICE void pass() const {
    if constexpr (enabled)
      arch::named_barrier_arrive(kFirstBarrier + (ConsumerThreads::consumer() + 1) % consumers, 2 * kWarpgroup);
  }
  DEVICE void finish() {
    if (enabled && ConsumerThreads::consumer() == 0 && had_first) wait();
  }
};

// logits -> probs, which are relative to the maximum that softmax then has. Returns whether that has grown; then the
// output must be scaled by `by`.
template <class Kernel>
DEVICE bool softmax_of_keys(const AttentionParams& p, const ForwardPlan& plan, const ForwardTask& task, int step,
                            typename Kernel::Logits& s, OnlineSoftmax<1>& softmax, RowSums<1>& sums,
                            float (&by)[1][2]) {
  using LogitTiles = typename Kernel::LogitTiles;
  const auto first_key = [&] { return tile_of<Kernel>(task, step) * Kernel::kBlockN; };
  if constexpr (Kernel::kWithOptions) {
    if (plan.modifies_logits)
      modify_logits<typename Kernel::Element, LogitTiles>(
          s, p, plan, load_struct(task.rows), load_struct(task.position).batch, load_struct(task.keys).visible.k_len,
          Kernel::row_at, first_key());
    apply_block_mask<Kernel, LogitTiles>(s, p, task, step, Kernel::thread());
  }
  if (const int first = first_key(); !load_struct(task.unmasked).has_all(first, first + Kernel::kBlockN)) {
    const TileRows rows = load_struct(task.rows);
    const Visibility visible = load_struct(task.keys).visible;
    const int origin = first + LogitTiles::column(arch::opaque_thread_index());
    apply_mask<LogitTiles>(
        s, [&](int m, int half) { return visible.keys(rows.query(Kernel::row_at(m, half))).from(origin); });
  }
  const bool grew = softmax.raise_max(s, sums, plan.factor, by);
  softmax.make_probs(s, sums, plan.factor);
  if constexpr (Kernel::kWithOptions)
    if (plan.dropout.drop_below > 0) {
      plan.dropout.drop(
          s,
          [&](int m, int half) {
            const TileRows rows = load_struct(task.rows);
            const TilePosition position = load_struct(task.position);
            const int row = Kernel::row_at(m, half);
            return first_dropout_row(p, position.q_begin, position.batch, rows.head(row)) + rows.query(row);
          },
          first_key());
    }
  return grew;
}

// Clears queries of the next sequence. They would take part in the decision of a warp to rescale, and so change its
// last bits.
template <class Kernel>
DEVICE void clear_queries(const AttentionParams& p, typename Kernel::Storage& shared) {
  if (p.cu_seqlens_q == nullptr) return;
  const TileRows rows = load_struct(shared.task.rows);
  const int own = ConsumerThreads::consumer() * kWarpgroupRows, left = rows.count - rows.first - own;
  if (left >= kWarpgroupRows) return;
  clear_lines<typename Kernel::TileQ>(arch::shared_address(shared.q) + own * kPieceBytes, left > 0 ? left : 0,
                                      kWarpgroupRows, ConsumerThreads::index(), kWarpgroup);
  ConsumerThreads::sync();
}

// Clears the values of the next sequence that are in the tile of a step, by all consumers together.
template <class Kernel>
DEVICE void clear_values(const AttentionParams& p, typename Kernel::Storage& shared,
                         const Ring<Kernel::kConfig.stages>& values, int step) {
  if (p.cu_seqlens_k == nullptr) return;
  const int left = load_struct(shared.task.keys).visible.k_len - tile_of<Kernel>(shared.task, step) * Kernel::kBlockN;
  if (left >= Kernel::kBlockN) return;
  arch::barrier_wait(shared.v_full[values.stage], values.parity);
  clear_lines<typename Kernel::TileV>(arch::shared_address(shared.v[values.stage]), left, Kernel::kBlockN,
                                      Kernel::thread(), Kernel::kConsumers * kWarpgroup);
  sync_consumers<Kernel::kConsumers>();
}

// out = the weighted sum of the values of an item that has keys.
template <class Kernel>
DEVICE void attend(const AttentionParams& p, const ForwardPlan& plan, typename Kernel::Storage& shared,
                   Ring<Kernel::kConfig.stages>& keys, Ring<Kernel::kConfig.stages>& values,
                   Turns<Kernel::kConsumers, Kernel::kConfig.turns>& turns, typename Kernel::Out& out,
                   OnlineSoftmax<1>& softmax, RowSums<1>& sums) {
  const SharedAddress q = arch::shared_address(shared.q) + ConsumerThreads::consumer() * kWarpgroupRows * kPieceBytes;
  typename Kernel::Logits s;
  typename Kernel::Probs probs;
  float by[1][2];
  const auto await_keys = [&] { arch::barrier_wait(shared.k_full[keys.stage], keys.parity); };
  const auto start_keys = [&] {
    arch::wgmma_fence(registers_of(s));
    Kernel::multiply_keys(s, q, arch::shared_address(shared.k[keys.stage]));
    arch::wgmma_commit();
  };
  const auto start_values = [&] {
    arch::barrier_wait(shared.v_full[values.stage], values.parity);
    arch::wgmma_fence(registers_of(out), probs);
    Kernel::multiply_values(out, probs, arch::shared_address(shared.v[values.stage]));
    arch::wgmma_commit();
  };
  const auto release = [](Barrier* empty, Ring<Kernel::kConfig.stages>& ring) {
    ConsumerThreads::arrive(empty[ring.stage]);
    ring.advance();
  };

  int step = load_struct(shared.task.end).step - 1;
  clear_queries<Kernel>(p, shared);
  // S and P of the first keys. There are no values to multiply yet.
  await_keys();
  start_keys();
  arch::wgmma_wait<0>(registers_of(s));
  release(shared.k_empty, keys);
  softmax_of_keys<Kernel>(p, plan, shared.task, step, s, softmax, sums, by);
  round_operand<typename Kernel::Element>(s, probs);
  clear_values<Kernel>(p, shared, values, step);
  if (step > load_struct(shared.task.keys).begin) await_keys();

#pragma unroll 1
  for (step = next_step<Kernel>(shared.task, step, -1); step >= load_struct(shared.task.keys).begin;
       step = next_step<Kernel>(shared.task, step, -1)) {
    // Wait for this consumer's turn.
    turns.wait();
    // Issue Q K^T of these keys, and P V of those before.
    start_keys();
    start_values();
    // The next consumer multiplies while this one computes its softmax.
    turns.pass();
    // Wait for S alone, and release the keys to the producer.
    arch::wgmma_wait<1>(registers_of(s));
    release(shared.k_empty, keys);
    // S becomes P while P V is in flight.
    const bool grew = softmax_of_keys<Kernel>(p, plan, shared.task, step, s, softmax, sums, by);
    // A loop, across which ptxas does not move the exponentials: they belong before the wait for P V.
    if (step > load_struct(shared.task.keys).begin) await_keys();
    // Wait for P V, and release the values to the producer.
    arch::wgmma_wait<0>(registers_of(out));
    release(shared.v_empty, values);
    // The output is complete up to here: only now can it be rescaled.
    if (grew) softmax.scale(out, by);
    round_operand<typename Kernel::Element>(s, probs);
    // A list may have the last keys anywhere.
    if constexpr (Kernel::kWithOptions) clear_values<Kernel>(p, shared, values, step);
  }
  // P V of the last keys.
  start_values();
  arch::wgmma_wait<0>(registers_of(out));
  release(shared.v_empty, values);
}

// Stores the consumer's rows, staged in the memory of its queries.
template <class Kernel>
DEVICE void store_out(const AttentionParams& p, const ForwardMaps& maps, const TileRows& rows,
                      const TilePosition& position, typename Kernel::Storage& shared, const typename Kernel::Out& out) {
  using T = typename Kernel::Element;
  using Tile = typename Kernel::TileOut;
  const SharedAddress staged = arch::shared_address(shared.q);
  const int first_row = ConsumerThreads::consumer() * kWarpgroupRows;
  ConsumerThreads::sync();  // all warps have read their queries
  stage_rows<T, Tile>(staged, first_row, out);
  arch::fence_async_shared();
  ConsumerThreads::sync();
  const int first = rows.first + first_row;
  const bool varlen = p.cu_seqlens_q != nullptr;
  if (rows.pack_gqa == 1 && (!varlen || first + kWarpgroupRows <= rows.count))
    store_pieces<Tile>(maps.out, staged, first_row, position.q_begin + first, rows.first_head, position.batch);
  else
    store_lines<T, Tile>(staged, first_row, rows.count - first, int(p.dim_v), [&](int row) {
      return row_of<T>(p.out, position.batch, position.q_begin + rows.query(row), rows.head(row));
    });
}

template <class Kernel>
DEVICE void consume(const AttentionParams& p, const ForwardPlan& plan, const ForwardMaps& maps,
                    typename Kernel::Storage& shared) {
  Ring<Kernel::kConfig.stages> keys, values;
  Turns<Kernel::kConsumers, Kernel::kConfig.turns> turns;
#pragma unroll 1
  for (uint32_t q_parity = 0;; q_parity ^= 1) {
    arch::barrier_wait(shared.q_full, q_parity);
    typename Kernel::Out out = {};
    OnlineSoftmax<1> softmax;
    RowSums<1> sums;
    {
      const TileRows rows = load_struct(shared.task.rows);
      if (rows.count == 0) break;
      begin_rows(p, rows, load_struct(shared.task.end).split == 0, Kernel::row_at, softmax, sums);
    }
    if (load_struct(shared.task.keys).begin < load_struct(shared.task.end).step)
      attend<Kernel>(p, plan, shared, keys, values, turns, out, softmax, sums);
    const TileRows rows = load_struct(shared.task.rows);
    const TilePosition position = load_struct(shared.task.position);
    finish_rows<Kernel>(p, plan, shared.task, rows, position, load_struct(shared.task.end).split, Kernel::row_at,
                        softmax, sums, out);
    if (!stores_float32<Kernel>(p, plan, shared.task))
      store_out<Kernel>(p, maps, rows, position, shared, out);
    else
      ConsumerThreads::sync();  // all warps have read their queries and their task
    ConsumerThreads::arrive(shared.q_empty);
  }
  turns.finish();
}

// Grid: at most one block per SM.
template <class Kernel>
GLOBAL(Kernel::kThreads, 1)
attention_fwd_sm90(GRID_CONSTANT AttentionParams p, GRID_CONSTANT ForwardPlan plan, GRID_CONSTANT ForwardMaps maps) {
  SHARED_STORAGE(typename Kernel::Storage, shared);
  if constexpr (Kernel::kWithOptions)
    if (p.rng_state != nullptr && arch::block_x() == 0 && arch::thread_index() == 0)
      store_rng(p.rng_state, load_rng(plan.dropout.rng));
  if (arch::thread_index() == 0) {
    arch::tma_prefetch(maps.query.map);
    arch::tma_prefetch(maps.key.map);
    arch::tma_prefetch(maps.value.map);
    arch::tma_prefetch(maps.out.map);
    arch::barrier_init(shared.q_full, 1);
    arch::barrier_init(shared.q_empty, Kernel::kConsumers);
    for (int stage = 0; stage < Kernel::kConfig.stages; ++stage) {
      arch::barrier_init(shared.k_full[stage], 1);
      arch::barrier_init(shared.k_empty[stage], Kernel::kConsumers);
      arch::barrier_init(shared.v_full[stage], 1);
      arch::barrier_init(shared.v_empty[stage], Kernel::kConsumers);
    }
    arch::fence_barrier_init();
  }
  arch::sync_threads();
  if (arch::thread_index() < kWarpgroup) {
    arch::decrease_registers<Kernel::kProducerRegisters>();
    if (arch::thread_index() == 0) produce<Kernel>(p, plan, maps, shared);
  } else {
    arch::increase_registers<Kernel::kConsumerRegisters>();
    consume<Kernel>(p, plan, maps, shared);
  }
}

}  // namespace cuda_ext::attention::sm90
