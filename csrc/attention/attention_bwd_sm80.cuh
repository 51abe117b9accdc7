// Flash attention backward for sm_80 and later (Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 2), for float16
// and bfloat16.
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
//                that makes too few blocks, the loop is divided among several, whose parts kernel 3 adds. Sizes:
//                kBackwardTiles in tile_size.h.
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
// General        A second instantiation supports softcap, ALiBi, dropout, a bias or mask, and scales that are not
//                positive, by run-time flags. The gradient of a bias is added to global memory by float32 reductions.
#pragma once

#include <cstddef>

#include "attention/attention_bwd_plan.cuh"
#include "attention/bias.cuh"
#include "attention/mask.cuh"
#include "attention/rows.cuh"
#include "attention/shared_struct.cuh"
#include "tile/results.cuh"

namespace cuda_ext::sm80 {

// A tile of queries of one head.
struct QueryTile {
  int head, tile;
  bool operator==(const QueryTile&) const = default;
};

// The work of a block. It is in shared memory, in structs that a thread loads with one instruction.
struct BackwardTask {
  struct alignas(16) Queries {
    int batch, begin, count;  // the sequence, and its rows in the packing
    int first_padded;         // its first row in the padded layout of the workspace
  };
  struct alignas(16) Keys {
    Visibility visible;
    int first;  // the block's first key
  };
  struct alignas(16) Head {
    int head_kv, k_begin;
  };
  // The block's steps: tiles [tiles_begin, tiles_end) of each head, one head after the other, up to `last`.
  struct alignas(16) Steps {
    int tiles_begin, tiles_end;
    QueryTile last;
    DEVICE QueryTile next(const QueryTile& at) const {
      return at.tile + 1 < tiles_end ? QueryTile{at.head, at.tile + 1} : QueryTile{at.head + 1, tiles_begin};
    }
  };
  Queries queries;
  Keys keys;
  Head head;
  Steps steps;
};

// One instantiation of the kernel.
template <class T, AttentionBackwardConfig config, bool general>
struct Backward {
  using Element = T;
  static constexpr const AttentionBackwardConfig& kConfig = config;
  static constexpr bool kGeneral = general;
  static constexpr int kThreads = config.threads();
  static constexpr int kMinBlocks = config.min_blocks;
  static constexpr int kBlockM = config.block_m;
  static constexpr int kBlockN = config.block_n;
  static constexpr int kSplit = config.warps / config.key_warps;

  using Scores = WarpTiles<kBlockN, kBlockM, config.key_warps, kSplit>;
  using GradK = WarpTiles<kBlockN, config.dim, config.key_warps, kSplit>;
  using GradV = WarpTiles<kBlockN, config.dim_v, config.key_warps, kSplit>;
  using GradQ = WarpTiles<kBlockM, config.dim, config.query_warps, config.warps / config.query_warps>;

  // TileXOfY: the bytes of tile X as the operand of the product that gives Y.
  using TileK = OperandTile<T, Side::kA, true, kBlockN, config.dim>;
  using TileKOfDQ = OperandTile<T, Side::kB, false, config.dim, kBlockN>;
  using TileV = OperandTile<T, Side::kA, true, kBlockN, config.dim_v>;
  using TileQ = OperandTile<T, Side::kB, true, kBlockM, config.dim>;
  using TileQOfDK = OperandTile<T, Side::kB, false, config.dim, kBlockM>;
  using TileDO = OperandTile<T, Side::kB, true, kBlockM, config.dim_v>;
  using TileDOOfDV = OperandTile<T, Side::kB, false, config.dim_v, kBlockM>;
  using TileScores = OperandTile<T, Side::kA, true, kBlockN, kBlockM>;
  using TileScoresOfDQ = OperandTile<T, Side::kA, false, kBlockM, kBlockN>;

  struct Storage {
    alignas(128) unsigned char k[TileK::kBytes];
    alignas(128) unsigned char v[TileV::kBytes];
    alignas(128) unsigned char q[TileQ::kBytes];
    alignas(128) unsigned char grad_out[TileDO::kBytes];
    alignas(128) unsigned char grad_scores[TileScores::kBytes];
    alignas(128) unsigned char weights[kSplit > 1 ? TileScores::kBytes : 16];
    float minus_lse[kBlockM], minus_delta[kBlockM];
    BackwardTask task;
  };
};

// The tiles of queries that see any key of the tile that begins at `first_key`.
template <class Kernel>
DEVICE Span query_tiles(const Visibility& visible, int q_len, int first_key) {
  constexpr int kBlockM = Kernel::kBlockM;
  const int past_key = first_key + Kernel::kBlockN < visible.k_len ? first_key + Kernel::kBlockN : visible.k_len;
  const int past_query = visible.query_end(past_key - 1) < q_len ? visible.query_end(past_key - 1) : q_len;
  const int begin = visible.query_begin(first_key) / kBlockM, end = (past_query + kBlockM - 1) / kBlockM;
  return {begin, end > begin ? end : begin};
}

// The other inputs of a step of the general kernel.
struct GeneralStep {
  int64_t first_row;  // of the head in lse, which numbers the rows for dropout
  float slope;
  int q_len;
  int64_t bias, grad_bias;  // offsets of the head's first elements
};

// Initialises accumulators with one value per column. Starting scores at -lse and dP at -delta makes P = 2^(factor
// scores) and dS = P dP.
template <class Tiles>
DEVICE void start_columns(typename Tiles::Accumulators& x, const float* columns) {
  const int thread = arch::opaque_thread_index();
#pragma unroll
  for (int n = 0; n < Tiles::kColumnTiles; ++n) {
    const auto pair =
        arch::load_shared<arch::Words2>(arch::shared_address(columns + Tiles::column(thread) + Tiles::column_step(n)));
#pragma unroll
    for (int m = 0; m < Tiles::kRowTiles; ++m)
#pragma unroll
      for (int q = 0; q < 4; ++q) x[m][n][q] = arch::bits_float(pair.data[q % 2]);
  }
}

// Turns scores - lse and dP - delta into P and dS. first_key, first_query: of the tile.
template <class Kernel>
DEVICE void softmax_gradient(typename Kernel::Scores::Accumulators& s, typename Kernel::Scores::Accumulators& grad,
                             const BackwardPlan& plan, const Visibility& visible, int first_key, int first_query,
                             bool is_masked) {
  using Scores = typename Kernel::Scores;
  const int thread = arch::opaque_thread_index();
  if (is_masked)
    apply_mask<Scores>(s, [&](int m, int half) {
      return visible.queries(first_key + Scores::row(m, half, thread)).from(first_query + Scores::column(thread));
    });
#pragma unroll
  for (int m = 0; m < Scores::kRowTiles; ++m)
#pragma unroll
    for (int n = 0; n < Scores::kColumnTiles; ++n)
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        s[m][n][q] = arch::fast_exp2(s[m][n][q] * plan.factor);
        grad[m][n][q] *= s[m][n][q];
      }
}

// The same for the general kernel, from scores and dP without lse and delta subtracted. Elements of P that dropout
// drops are 0; the others are not yet divided by 1 - dropout_p.
template <class Kernel>
DEVICE void general_softmax_gradient(typename Kernel::Scores::Accumulators& s,
                                     typename Kernel::Scores::Accumulators& grad, const AttentionBackwardParams& p,
                                     const BackwardPlan& plan, const Visibility& visible, const GeneralStep& general,
                                     const float* minus_lse, const float* minus_delta, int first_key, int first_query,
                                     bool is_masked) {
  using T = typename Kernel::Element;
  using Scores = typename Kernel::Scores;
  const int thread = arch::opaque_thread_index();
#pragma unroll
  for (int n = 0; n < Scores::kColumnTiles; ++n) {
    const int column = Scores::column(thread) + Scores::column_step(n);
    const auto row_lse = arch::load_shared<arch::Words2>(arch::shared_address(minus_lse + column));
    const auto row_delta = arch::load_shared<arch::Words2>(arch::shared_address(minus_delta + column));
#pragma unroll
    for (int m = 0; m < Scores::kRowTiles; ++m) {
      uint32_t random[4] = {};
      if (plan.dropout.drop_below > 0)
        plan.dropout.words_of_columns(general.first_row + first_query + column, first_key + Scores::row(m, 0, thread),
                                      random);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int key = first_key + Scores::row(m, q / 2, thread), query = first_query + column + q % 2;
        float logit = s[m][n][q] * plan.scale, slope_of_cap = 1.0f;
        if (plan.softcap > 0.0f) {
          const float t = arch::tanh(logit * plan.inverse_softcap);
          logit = plan.softcap * t;
          slope_of_cap = 1.0f - t * t;
        }
        logit -= general.slope * fabsf(float(query + (visible.k_len - general.q_len) - key));
        const bool exists = query < general.q_len && key < visible.k_len;
        if (p.bias_kind != BiasKind::kNone && exists)
          logit += bias_at<T>(p, general.bias + query * p.bias_strides[2] + key * p.bias_strides[3]);
        if (is_masked && !visible.queries(key).has(query)) logit = -INFINITY;
        const bool kept = random[q] >= plan.dropout.drop_below;
        const float weight = arch::fast_exp2((logit + arch::bits_float(row_lse.data[q % 2])) * plan.factor);
        float& x = grad[m][n][q];
        x = weight * ((kept ? x * plan.kept_scale : 0.0f) + arch::bits_float(row_delta.data[q % 2]));
        if (p.grad_bias != nullptr && exists)
          arch::reduce_add(static_cast<float*>(p.grad_bias) + general.grad_bias + query * p.grad_bias_strides[2] +
                               key * p.grad_bias_strides[3],
                           x);
        x *= slope_of_cap;
        s[m][n][q] = kept ? weight : 0.0f;
      }
    }
  }
}

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
  SHARED_STORAGE(Storage, shared);

  QueryTile at{};
  int steps;  // of this block
  {
    const int split = arch::block_x() % plan.splits;
    const TileIndex block = plan.schedule.find(arch::block_x() / plan.splits);
    const Sequence sequence(p, block.batch);
    // The first keys come first: with a causal mask they have the most work.
    const int first_key = (plan.schedule.tiles - 1 - block.tile) * kBlockN;
    if (first_key >= sequence.k_len) return;
    const Visibility visible(p, sequence);
    const Span seen = query_tiles<Kernel>(visible, sequence.q_len, first_key);
    const int tiles = seen.end - seen.begin, group = int(p.heads / p.heads_kv);
    const int split_steps = (tiles * group + plan.splits - 1) / plan.splits;
    const int begin = split * split_steps;
    const int end = begin + split_steps < tiles * group ? begin + split_steps : tiles * group;
    steps = end - begin;
    QueryTile last{};
    if (steps > 0) {
      const auto tile_at = [&](int step) {
        return QueryTile{block.head * group + step / tiles, seen.begin + step % tiles};
      };
      at = tile_at(begin);
      last = tile_at(end - 1);
    }
    if (arch::thread_index() == 0) {
      store_struct(shared.task.queries, {block.batch, sequence.q_begin, sequence.q_len,
                                         first_tile<kBlockM>(p, plan, block.batch) * kBlockM});
      store_struct(shared.task.keys, {visible, first_key});
      store_struct(shared.task.head, {block.head, sequence.k_begin});
      store_struct(shared.task.steps, {seen.begin, seen.end, last});
    }
  }
  arch::sync_threads();  // the task is written

  const arch::SharedAddress base = arch::shared_address(&shared);
  const arch::SharedAddress tile_k = arch::shared_address(shared.k), tile_v = arch::shared_address(shared.v),
                            tile_q = arch::shared_address(shared.q), tile_do = arch::shared_address(shared.grad_out),
                            tile_ds = arch::shared_address(shared.grad_scores),
                            tile_p = arch::shared_address(shared.weights);

  const auto copy = [&]<class Tile>(const HeadsView& view, const QueryTile& at, arch::SharedAddress to, int64_t width,
                                    const int64_t& pass) {
    const BackwardTask::Queries queries = load_struct(shared.task.queries);
    const int first = at.tile * kBlockM;
    LinesCopy<Tile, kThreads>::start(to, row_of<const T>(view, queries.batch, queries.begin + first, at.head),
                                     view.seq_stride, pass, queries.count - first, int(width));
  };
  const auto copy_queries = [&](const QueryTile& at) {
    copy.template operator()<typename Kernel::TileQ>(p.query, at, tile_q, p.dim, plan.query_pass);
  };
  const auto copy_grad_out = [&](const QueryTile& at) {
    copy.template operator()<typename Kernel::TileDO>(p.grad_out, at, tile_do, p.dim_v, plan.grad_out_pass);
    constexpr int kChunks = kBlockM / 4;  // of lse; delta has as many
    static_assert(2 * kChunks <= kThreads);
    const int thread = arch::opaque_thread_index();
    if (thread < 2 * kChunks) {
      const bool is_lse = thread < kChunks;
      const int row = thread % kChunks * 4;
      const int first = at.head * plan.head_rows + load_struct(shared.task.queries).first_padded + at.tile * kBlockM;
      arch::cp_async<16>(arch::shared_address((is_lse ? shared.minus_lse : shared.minus_delta) + row),
                         (is_lse ? plan.minus_lse : plan.minus_delta) + first + row);
    }
  };

  typename GradK::Accumulators grad_key = {};
  typename GradV::Accumulators grad_value = {};
  if (steps > 0) {
    const int batch = load_struct(shared.task.queries).batch;
    const BackwardTask::Keys keys = load_struct(shared.task.keys);
    const BackwardTask::Head head = load_struct(shared.task.head);
    const int keys_left = keys.visible.k_len - keys.first;
    copy_lines<typename Kernel::TileK, kThreads>(tile_k, keys_left, int(p.dim), [&](int i) {
      return row_of<const T>(p.key, batch, head.k_begin + keys.first + i, head.head_kv);
    });
    copy_lines<typename Kernel::TileV, kThreads>(tile_v, keys_left, int(p.dim_v), [&](int i) {
      return row_of<const T>(p.value, batch, head.k_begin + keys.first + i, head.head_kv);
    });
    copy_grad_out(at);
    copy_queries(at);
    arch::cp_async_commit();
  }

#pragma unroll 1
  for (bool more = steps > 0; more; at = load_struct(shared.task.steps).next(at)) {
    arch::cp_async_wait<0>();
    arch::sync_threads();  // queries and output gradients have arrived, and dS has been read

    more = at != load_struct(shared.task.steps).last;
    const int first_query = at.tile * kBlockM;
    typename Scores::Accumulators s = {}, grad = {};
    if constexpr (!Kernel::kGeneral) start_columns<Scores>(s, shared.minus_lse);
    multiply<typename Kernel::TileQ, kSplit>(rows_of<Scores, typename Kernel::TileK>(base, offsetof(Storage, k)),
                                             columns_of<Scores, typename Kernel::TileQ>(base, offsetof(Storage, q)), s);
    if constexpr (!Kernel::kGeneral) start_columns<Scores>(grad, shared.minus_delta);
    multiply<typename Kernel::TileDO, kSplit>(
        rows_of<Scores, typename Kernel::TileV>(base, offsetof(Storage, v)),
        columns_of<Scores, typename Kernel::TileDO>(base, offsetof(Storage, grad_out)), grad);

    const BackwardTask::Keys keys = load_struct(shared.task.keys);
    const bool is_masked =
        !keys.visible.all_visible(first_query, first_query + kBlockM - 1, keys.first, keys.first + kBlockN);
    if constexpr (Kernel::kGeneral) {
      const BackwardTask::Queries queries = load_struct(shared.task.queries);
      GeneralStep general{};
      if (p.alibi_slopes != nullptr)
        general.slope = arch::load_global<float>(static_cast<const float*>(p.alibi_slopes) +
                                                 queries.batch * p.alibi_batch_stride + at.head);
      general.q_len = queries.count;
      general.bias = bias_offset(p.bias_strides, queries.batch, at.head, 0);
      general.grad_bias = bias_offset(p.grad_bias_strides, queries.batch, at.head, 0);
      general.first_row = first_lse_row(p, queries.begin, queries.batch, at.head);
      general_softmax_gradient<Kernel>(s, grad, p, plan, keys.visible, general, shared.minus_lse, shared.minus_delta,
                                       keys.first, first_query, is_masked);
    } else {
      softmax_gradient<Kernel>(s, grad, plan, keys.visible, keys.first, first_query, is_masked);
    }

    stage<Scores, typename Kernel::TileScores>(tile_ds, grad, 1.0f);
    const LaneAddress lane_do = columns_of<GradV, typename Kernel::TileDOOfDV>(base, offsetof(Storage, grad_out));
    const LaneAddress lane_q = columns_of<GradK, typename Kernel::TileQOfDK>(base, offsetof(Storage, q));
    if constexpr (kSplit == 1) {
      multiply<typename Kernel::TileDOOfDV>(operand_of<T>(s), lane_do, grad_value);
      arch::sync_threads();  // dS is written, and the output gradients have been read
      if (more) copy_grad_out(load_struct(shared.task.steps).next(at));
      multiply<typename Kernel::TileQOfDK>(operand_of<T>(grad), lane_q, grad_key);
      arch::sync_threads();  // the queries have been read
    } else {
      stage<Scores, typename Kernel::TileScores>(tile_p, s, 1.0f);
      arch::sync_threads();  // P and dS are written
      multiply<typename Kernel::TileDOOfDV, kSplit>(
          rows_of<Scores, typename Kernel::TileScores>(base, offsetof(Storage, weights)), lane_do, grad_value);
      multiply<typename Kernel::TileQOfDK, kSplit>(
          rows_of<Scores, typename Kernel::TileScores>(base, offsetof(Storage, grad_scores)), lane_q, grad_key);
      arch::sync_threads();  // queries and output gradients have been read
      if (more) copy_grad_out(load_struct(shared.task.steps).next(at));
    }
    if (more) copy_queries(load_struct(shared.task.steps).next(at));
    arch::cp_async_commit();

    typename GradQ::Accumulators grad_query = {};
    multiply<typename Kernel::TileKOfDQ, GradQ::kWarpsN>(
        rows_of<GradQ, typename Kernel::TileScoresOfDQ>(base, offsetof(Storage, grad_scores)),
        columns_of<GradQ, typename Kernel::TileKOfDQ>(base, offsetof(Storage, k)), grad_query);
    const int row = at.head * plan.head_rows + load_struct(shared.task.queries).first_padded + first_query;
    const WorkspaceTile<GradQ> sums(plan.grad_query + int64_t(row) * GradQ::kColumns);
    if (plan.turns == nullptr) {
      sums.reduce_add(grad_query);
    } else {
      uint32_t* const turn = plan.turns + row / kBlockM;
      const BackwardTask::Keys own = load_struct(shared.task.keys);
      // The number of blocks with earlier keys that these queries see.
      const uint32_t earlier = own.first / kBlockN - own.visible.key_begin(first_query) / kBlockN;
      if (arch::opaque_thread_index() == 0) arch::wait_equal(turn, earlier);
      arch::sync_threads();  // it is this block's turn
      sums.reduce_add(grad_query);
      arch::sync_threads();  // all have added
      if (arch::opaque_thread_index() == 0) arch::store_release(turn, earlier + 1);
    }
  }

  const BackwardTask::Keys keys = load_struct(shared.task.keys);
  const BackwardTask::Head head = load_struct(shared.task.head);
  const int batch = load_struct(shared.task.queries).batch;
  const float value_factor = Kernel::kGeneral ? plan.kept_scale : 1.0f;
  if (plan.splits > 1) {
    const int64_t part = arch::block_x() % plan.splits;
    const int64_t tile =
        (part * plan.schedule.pairs + batch * p.heads_kv + head.head_kv) * plan.schedule.tiles + keys.first / kBlockN;
    WorkspaceTile<GradK>(plan.grad_key + tile * GradK::kRows * GradK::kColumns).store(grad_key, plan.scale);
    WorkspaceTile<GradV>(plan.grad_value + tile * GradV::kRows * GradV::kColumns).store(grad_value, value_factor);
    return;
  }
  arch::sync_threads();  // keys and values have been read
  stage<GradK, typename Kernel::TileK>(tile_k, grad_key, plan.scale);
  stage<GradV, typename Kernel::TileV>(tile_v, grad_value, value_factor);
  arch::sync_threads();  // dK and dV are written
  const int first_row = head.k_begin + keys.first, count = keys.visible.k_len - keys.first;
  write_lines<typename Kernel::TileK, kThreads>(tile_k, row_of<T>(p.grad_key, batch, first_row, head.head_kv),
                                                p.grad_key.seq_stride, count, int(p.dim));
  write_lines<typename Kernel::TileV, kThreads>(tile_v, row_of<T>(p.grad_value, batch, first_row, head.head_kv),
                                                p.grad_value.seq_stride, count, int(p.dim_v));
}

}  // namespace cuda_ext::sm80
