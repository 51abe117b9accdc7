// What the kernels of attention backward on wgmma share that keep a tile of keys and loop over queries: loads, products
// of a step, and the stores of dK and dV.
//
// A kernel has kBlockM (queries), kBlockN (keys), kStages, kConsumers, Scores, TileK, TileV, TileQ and TileDO; its
// Storage has the tiles k, v, q[stage] and grad_out[stage], minus_lse and minus_delta [stage], a BackwardTask, and the
// barriers keys_full, {q,do}_full[stage] and {q,do}_empty[stage].
#pragma once

#include "attention/bwd_scores.cuh"
#include "attention/consumer_tiles_sm90.cuh"

namespace cuda_ext::attention::sm90 {

struct KeysMaps {
  HeadsMap query, key, value, grad_out, grad_key, grad_value;
};

// Issues x (64, columns) = or, if `adds`, += A B^T; rows of A and of B are lines of their tiles.
template <class T, class TileA, class TileB, int tiles>
DEVICE void multiply_lines(float (&x)[1][tiles][4], SharedAddress a, SharedAddress b, bool adds) {
  const uint64_t rows = TileA::descriptor(a, Major::kK), columns = TileB::descriptor(b, Major::kK);
#pragma unroll
  for (int step = 0; step < TileA::kColumns / 16; ++step)
    arch::wgmma_m64k16<T, Major::kK, Major::kK>(
        registers_of(x), arch::advance_descriptor(rows, TileA::step_bytes(step, Major::kK)),
        arch::advance_descriptor(columns, TileB::step_bytes(step, Major::kK)), adds || step > 0);
}

// Issues x (64, columns) += A B as a group, with A (64, 16 steps) from registers and its columns the lines of B.
template <class T, class TileB, int steps, int tiles>
DEVICE void multiply_fragments(float (&x)[1][tiles][4], uint32_t (&a)[steps][4], SharedAddress b) {
  const uint64_t columns = TileB::descriptor(b, Major::kMn);
  arch::wgmma_fence(registers_of(x), a);
#pragma unroll
  for (int step = 0; step < steps; ++step)
    arch::wgmma_m64k16<T, Major::kMn>(registers_of(x), a[step],
                                      arch::advance_descriptor(columns, TileB::step_bytes(step, Major::kMn)), 1);
  arch::wgmma_commit();
}

// The producer, one thread. `step`: the block's first.
template <class Kernel>
DEVICE void produce(const AttentionParams& p, const BackwardPlan& plan, const KeysMaps& maps,
                    typename Kernel::Storage& shared, QueryStep step) {
  const BackwardTask::Queries queries = load_struct(shared.task.queries);
  const BackwardTask::Head head = load_struct(shared.task.head);
  const int first_key = head.k_begin + load_struct(shared.task.keys).first;
  arch::barrier_arrive_expect(shared.keys_full, Kernel::TileK::kBytes + Kernel::TileV::kBytes);
  load_pieces<typename Kernel::TileK>(arch::shared_address(shared.k), maps.key, shared.keys_full, first_key,
                                      head.head_kv, queries.batch);
  load_pieces<typename Kernel::TileV>(arch::shared_address(shared.v), maps.value, shared.keys_full, first_key,
                                      head.head_kv, queries.batch);
  Ring<Kernel::kStages> ring;
#pragma unroll 1
  for (bool more = true; more; step = next_step<Kernel>(p, shared.task, step)) {
    more = step != load_struct(shared.task.steps).last;
    const QueryTile tile = tile_of<Kernel>(p, shared.task, step);
    const int row = queries.begin + tile.index * Kernel::kBlockM;
    const int padded = padded_row<Kernel>(plan, queries, tile);
    const auto load = [&]<class Tile>(Barrier& empty, Barrier& full, unsigned char (&to)[Tile::kBytes],
                                      const HeadsMap& map, float (&columns)[Kernel::kBlockM], const float* from) {
      arch::barrier_wait(empty, ring.parity ^ 1);
      arch::barrier_arrive_expect(full, Tile::kBytes + sizeof columns);
      load_pieces<Tile>(arch::shared_address(to), map, full, row, tile.head, queries.batch);
      arch::bulk_load(arch::shared_address(columns), from + padded, sizeof columns, full);
    };
    const int stage = ring.stage;
    load.template operator()<typename Kernel::TileQ>(shared.q_empty[stage], shared.q_full[stage], shared.q[stage],
                                                     maps.query, shared.minus_lse[stage], plan.minus_lse);
    load.template operator()<typename Kernel::TileDO>(shared.do_empty[stage], shared.do_full[stage],
                                                      shared.grad_out[stage], maps.grad_out, shared.minus_delta[stage],
                                                      plan.minus_delta);
    ring.advance();
  }
}

// One thread initialises the barriers of what is loaded. `arrivals`: of consumers, when a tile has been read.
template <class Kernel>
DEVICE void init_load_barriers(typename Kernel::Storage& shared, int arrivals) {
  arch::barrier_init(shared.keys_full, 1);
  for (int stage = 0; stage < Kernel::kStages; ++stage) {
    arch::barrier_init(shared.q_full[stage], 1);
    arch::barrier_init(shared.q_empty[stage], arrivals);
    arch::barrier_init(shared.do_full[stage], 1);
    arch::barrier_init(shared.do_empty[stage], arrivals);
  }
}

// Clears the lines of a tile from `line` on, if it has any, by the threads of all consumers, which must be synchronised
// before a product reads them. Returns whether it has any.
template <class Kernel, class Tile>
DEVICE bool clear_from(SharedAddress tile, int line) {
  constexpr int kLines = Tile::kPieceSize / kPieceBytes;
  if (line >= kLines) return false;
  clear_lines<Tile>(tile, line > 0 ? line : 0, kLines, arch::opaque_thread_index() - kWarpgroup,
                    Kernel::kConsumers * kWarpgroup);
  return true;
}

// Lines of a tile of queries that belong to the sequence, where those after them are of the next one.
template <class Kernel>
DEVICE int lines_left(const AttentionBackwardParams& p, const typename Kernel::Storage& shared, const QueryStep& step) {
  if (p.cu_seqlens_q == nullptr) return Kernel::kBlockM;
  return load_struct(shared.task.queries).count - tile_of<Kernel>(p, shared.task, step).index * Kernel::kBlockM;
}

// Issues x = A B^T + columns for 64 lines of A; the kernel with options, which lacks registers, adds them later.
template <class Kernel, class TileA, class TileB>
DEVICE void start_rows(typename Kernel::Scores::Accumulators& x, SharedAddress a, SharedAddress b,
                       const float* columns) {
  if constexpr (!Kernel::kWithOptions) start_columns<Kernel>(x, columns);
  arch::wgmma_fence(registers_of(x));
  multiply_lines<typename Kernel::Element, TileA, TileB>(x, a, b, !Kernel::kWithOptions);
  arch::wgmma_commit();
}

// Rounds dK or dV of a consumer's keys, lines of the block from `own` on, to `staged`.
template <class T, class Tile, int tiles>
DEVICE void stage_gradient(SharedAddress staged, int own, float (&gradient)[1][tiles][4], float factor) {
  scale(gradient, factor);
  stage_rows<T, Tile>(staged, own, gradient);
}

// Stores it, after the threads of the consumer have been synchronised.
template <class T, class Tile>
DEVICE void store_gradient(const AttentionBackwardParams& p, const BackwardTask& task, SharedAddress staged, int own,
                           const HeadsMap& map, const HeadsView& to, int64_t width) {
  const BackwardTask::Keys keys = load_struct(task.keys);
  const BackwardTask::Head head = load_struct(task.head);
  const int batch = load_struct(task.queries).batch;
  const int first = head.k_begin + keys.first, left = keys.visible.k_len - keys.first - own;
  if (p.cu_seqlens_k == nullptr || left >= kWarpgroupRows)
    store_pieces<Tile>(map, staged, own, first + own, head.head_kv, batch);
  else
    store_lines<T, Tile>(staged, own, left, int(width),
                         [&](int line) { return row_of<T>(to, batch, first + line, head.head_kv); });
}

}  // namespace cuda_ext::attention::sm90
