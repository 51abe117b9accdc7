// Flash attention backward on mma.sync (Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 2), for sm_80 and later,
// float16 and bfloat16.
//
//   P = exp(logits - lse)     dP = dO V^T     dS = P o (dP - delta), delta = rowsum(dO o O) - dlse
//   dV = P^T dO               dQ = scale dS K               dK = scale dS^T Q
//
// Passes    1. attention_bwd_rows: delta and lse of every row, dQ's sums set to zero. 2. attention_bwd_sm80, below.
//           3. attention_bwd_finish: dQ (and dK, dV if they have several parts) from float32 sums. 4. The sinks'.
// Tile      A block has block_n keys of one key head, and walks the tiles of block_m queries that see any of them, of
//           all query heads of the group one after the other: dK and dV are complete at its end. Where that makes too
//           few blocks, a walk is divided among several, whose parts the third pass adds. Sizes: kBackwardTiles.
// Warps     Scores are transposed, (keys, queries): a warp has 16 or 32 keys, and its P^T and dS^T, as mma leaves them,
//           are operands of dV and dK that never leave registers. dQ sums over keys, so dS goes through shared memory,
//           and all warps share dQ's tile. Where warps share keys (split > 1: each has half of the queries and half
//           of the head dims) P goes through shared memory too.
// Waiting   Three sync_threads a step. First: queries and output gradients have arrived, and dS has been read. Second:
//           dS is written, and the output gradients have been read, so the next begin to arrive. Third: the queries
//           have been read, and the next begin to arrive while dQ is multiplied. Two more where blocks take turns; one
//           ahead of all steps, when the task is written, and two around the last stores.
// Shared    keys (block_n, dim), values (block_n, dim_v), queries (block_m, dim), output gradients (block_m, dim_v), dS
//           (block_n, block_m), P if split, -lse and -delta (block_m), and what the block has to do. dK and dV leave
//           through the places of keys and values.
// Registers dK, dV of a warp's keys all the time; scores and dP, later dQ of a warp's part, in float32.
// dQ        is summed in the workspace by float32 reductions, each thread's elements where the whole warp's are
//           neighbours. Their order, and so the last bits, change from run to run; with `deterministic`, blocks take
//           turns at a tile, in the order of their keys, which is also the order in which they start.
// General   A second instantiation has softcap, ALiBi, dropout, a bias and scales that are not positive, by run-time
//           flags. The gradient of a bias is added by float32 reductions to where its elements are.
#pragma once

#include <cstddef>
#include <limits>
#include <stdexcept>
#include <string>

#include "attention/attention_bwd_sm80.h"
#include "attention/bias.cuh"
#include "attention/dropout.cuh"
#include "attention/mask.cuh"
#include "attention/rows.cuh"
#include "attention/scheduler.cuh"
#include "rt/device.h"
#include "tile/products.cuh"

namespace cuda_ext::sm80 {

// What the host decides; the same for all blocks.
struct BackwardPlan {
  Schedule schedule;    // of tiles of keys
  int query_tiles = 0;  // of the longest sequence
  int splits = 1;       // of a walk
  int head_rows = 0;    // of a head, all sequences padded to tiles
  float factor;         // of what softmax is taken of, to powers of two
  float lse_factor;     // of natural logarithms, to what softmax is taken of
  float scale;
  float softcap;  // 0: none
  float inverse_softcap;
  float kept_scale = 1.0f;  // of weights that dropout keeps
  Dropout dropout;
  int64_t query_pass = 0, grad_out_pass = 0;  // bytes to a thread's next line
  // In the workspace.
  float* minus_lse = nullptr;    // (heads, head_rows), in units of logits before `factor`; -inf: the row has no weights
  float* minus_delta = nullptr;  // (heads, head_rows)
  float* grad_query = nullptr;   // sums, (heads, head_rows / block_m) tiles
  uint32_t* turns = nullptr;     // deterministic: (heads, head_rows / block_m), how many blocks have added to a tile
  float* grad_key = nullptr;     // of each split; null if there is but one: (splits, pairs, tiles) tiles
  float* grad_value = nullptr;
};

// The first of a sequence's padded rows.
template <int block_m>
DEVICE int padded_begin(const AttentionParams& p, const BackwardPlan& plan, const Sequence& s, int batch) {
  return (p.cu_seqlens_q == nullptr ? batch * plan.query_tiles : s.q_begin / block_m + batch) * block_m;
}

// Of a tile in the workspace: element i of all threads, then the next.
template <class Tiles, class Float, class F>
DEVICE void for_elements(Float* tile, const F& f) {
  Float* at = tile + arch::thread_index();
#pragma unroll
  for (int m = 0; m < Tiles::kRowTiles; ++m)
#pragma unroll
    for (int n = 0; n < Tiles::kColumnTiles; ++n)
#pragma unroll
      for (int q = 0; q < 4; ++q, at += Tiles::kThreads) f(at, m, n, q);
}

// Puts factor * x into a tile in shared memory, in storage precision.
template <class Tiles, class Tile>
DEVICE void stage(arch::SharedAddress tile, const typename Tiles::Accumulators& x, float factor) {
  // All addresses come from one, by numbers that the compiler knows, where they are used: kept, they would take the
  // registers that the loop has not.
  const int thread = int(arch::opaque(arch::thread_index()));
  const arch::SharedAddress first =
      tile + Tile::offset(Tiles::row(0, 0, thread), Tiles::first_column(thread) / 8) + thread % 4 * 4;
#pragma unroll
  for (int n = 0; n < Tiles::kColumnTiles; ++n) {
    constexpr int kLineBytes = Tile::kLineBytes;
    const int chunk = Tiles::column_step(n) / 8;
    const arch::SharedAddress at = (first ^ chunk % 8 * 16) + chunk / 8 * 128;
#pragma unroll
    for (int m = 0; m < Tiles::kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        arch::store_shared(
            at + (m * 16 + half * 8) * kLineBytes,
            arch::pack<typename Tile::Element>(factor * x[m][n][2 * half], factor * x[m][n][2 * half + 1]));
  }
}

// Writes the first `count` lines of a tile, `width` elements of each, to lines that are `stride` elements apart.
template <class Tile, int threads>
DEVICE void write_lines(arch::SharedAddress tile, typename Tile::Element* lines, int64_t stride, int count, int width) {
#pragma unroll 1
  for (int index = arch::thread_index(); index < Tile::kLines * Tile::kChunks; index += threads) {
    const int line = index / Tile::kChunks, chunk = index % Tile::kChunks;
    if (line >= count || chunk * Tile::kElements >= width) continue;
    arch::store_global(lines + line * stride + chunk * Tile::kElements,
                       arch::load_shared<arch::Words4>(tile + Tile::offset(line, chunk)));
  }
}

// Where this lane begins to read what it multiplies: the rows of A, or the columns of B, that `Tiles` deals to its warp,
// in a tile `offset` bytes after `base`. Found from the thread's index at every use, for the reason above.
template <class Tiles, class Tile>
DEVICE SharedOperand<Tile> rows_of(arch::SharedAddress base, int offset) {
  const int thread = int(arch::opaque(arch::thread_index()));
  return {{base + Tile::lane_offset(Tiles::first_row(thread), thread % arch::kWarpSize), offset}};
}
template <class Tiles, class Tile>
DEVICE LaneAddress columns_of(arch::SharedAddress base, int offset) {
  const int thread = int(arch::opaque(arch::thread_index()));
  return {base + Tile::lane_offset(Tiles::first_column(thread), thread % arch::kWarpSize), offset};
}

// What a block has to do: the same for all its threads. It is in shared memory until it is asked for, since the loop has
// no registers to keep it, in parts that are read at once.
struct alignas(16) QueriesOfTask {
  int batch, begin, count;  // the sequence, and its rows of the packing
  int first_padded;
};
struct alignas(16) KeysOfTask {
  Visibility visible;
  int first;  // of the block
};
struct alignas(16) WalkOfTask {
  int head_kv, k_begin;
  int tiles_begin, tiles_end;  // of queries, in each head
};
template <class Part>
DEVICE Part load_part(const Part& shared) {
  return __builtin_bit_cast(Part, arch::load_shared<arch::Words4>(arch::shared_address(&shared)));
}
template <class Part>
DEVICE void store_part(Part& shared, const Part& part) {
  arch::store_shared(arch::shared_address(&shared), __builtin_bit_cast(arch::Words4, part));
}

// A tile of queries on a block's walk: through those of a head, then through those of the next.
struct Stop {
  int head, tile;
  DEVICE Stop next(const WalkOfTask& walk) const {
    return tile + 1 < walk.tiles_end ? Stop{head, tile + 1} : Stop{head + 1, walk.tiles_begin};
  }
};

// One instantiation of the kernel.
template <class T, AttentionBackwardConfig config, bool general>
struct Backward {
  using Element = T;
  static constexpr AttentionBackwardConfig kConfig = config;
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

  // The same bytes, as operands of one product and of another.
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
    QueriesOfTask queries;
    KeysOfTask keys;
    WalkOfTask walk;
  };
};

// What the general kernel asks of a step beside its tiles.
struct GeneralStep {
  int64_t first_number;  // of the head's first row, for dropout
  float slope;
  int diagonal;  // Sk - Sq
  int q_len;
  int64_t bias, grad_bias;  // offsets of the head's first element
};

// What scores and dP begin with, so that P is a power of two of their sums, and dS their product.
template <class Tiles>
DEVICE void start_columns(typename Tiles::Accumulators& x, const float* columns) {
  const int thread = int(arch::opaque(arch::thread_index()));
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

// From products and dP, less lse and delta, to P and dS. first_key, first_query: of the tile.
template <class Kernel>
DEVICE void softmax_gradient(typename Kernel::Scores::Accumulators& s, typename Kernel::Scores::Accumulators& grad,
                             const BackwardPlan& plan, const Visibility& visible, int first_key, int first_query,
                             bool hide_some) {
  using Scores = typename Kernel::Scores;
  const int thread = int(arch::opaque(arch::thread_index()));
  if (hide_some)
    hide<Scores>(s, [&](int m, int half) {
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

// The same from products and dP as they are, where there is more to logits; P without those that dropout takes, and not
// yet scaled for it.
template <class Kernel>
DEVICE void general_softmax_gradient(typename Kernel::Scores::Accumulators& s,
                                     typename Kernel::Scores::Accumulators& grad, const AttentionBackwardParams& p,
                                     const BackwardPlan& plan, const Visibility& visible, const GeneralStep& general,
                                     const float* minus_lse, const float* minus_delta, int first_key, int first_query,
                                     bool hide_some) {
  using T = typename Kernel::Element;
  using Scores = typename Kernel::Scores;
  const int thread = int(arch::opaque(arch::thread_index()));
#pragma unroll
  for (int n = 0; n < Scores::kColumnTiles; ++n) {
    const int column = Scores::column(thread) + Scores::column_step(n);
    const auto row_lse = arch::load_shared<arch::Words2>(arch::shared_address(minus_lse + column));
    const auto row_delta = arch::load_shared<arch::Words2>(arch::shared_address(minus_delta + column));
#pragma unroll
    for (int m = 0; m < Scores::kRowTiles; ++m) {
      uint32_t random[4] = {};
      if (plan.dropout.drop_below > 0)
        plan.dropout.words_of_columns(general.first_number + first_query + column,
                                      first_key + Scores::row(m, 0, thread), random);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int key = first_key + Scores::row(m, q / 2, thread), query = first_query + column + q % 2;
        float logit = s[m][n][q] * plan.scale, slope_of_cap = 1.0f;
        if (plan.softcap > 0.0f) {
          const float t = arch::tanh(logit * plan.inverse_softcap);
          logit = plan.softcap * t;
          slope_of_cap = 1.0f - t * t;
        }
        logit -= general.slope * fabsf(float(query + general.diagonal - key));
        const bool exists = query < general.q_len && key < visible.k_len;
        if (p.bias_kind != BiasKind::kNone && exists)
          logit += bias_at<T>(p, general.bias + query * p.bias_strides[2] + key * p.bias_strides[3]);
        if (hide_some && !visible.queries(key).has(query)) logit = -INFINITY;
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

// Grid: tiles of keys of all key heads and sequences, each as often as its walk is divided.
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

  const int split = arch::block_x() % plan.splits;
  const TileIndex at = plan.schedule.find(arch::block_x() / plan.splits);
  const Sequence sequence(p, at.batch);
  // The first keys come first: where a mask is causal they have most to do.
  const int key_tile = plan.schedule.tiles - 1 - at.tile, first_key = key_tile * kBlockN;
  if (first_key >= sequence.k_len) return;
  const int keys_left = sequence.k_len - first_key;
  const Visibility visible(p, sequence);
  const int group = int(p.heads / p.heads_kv);

  const int last_key = first_key + (keys_left < kBlockN ? keys_left : kBlockN) - 1;
  const int past_query = visible.query_end(last_key) < sequence.q_len ? visible.query_end(last_key) : sequence.q_len;
  const int tiles_begin = visible.query_begin(first_key) / kBlockM;
  const int tiles_end = (past_query + kBlockM - 1) / kBlockM;
  const int tiles = tiles_end > tiles_begin ? tiles_end - tiles_begin : 0;
  const int steps = tiles * group, of_split = (steps + plan.splits - 1) / plan.splits;
  const int begin = split * of_split;
  const int end = begin + of_split < steps ? begin + of_split : steps;

  if (arch::thread_index() == 0) {
    store_part(shared.queries,
               {at.batch, sequence.q_begin, sequence.q_len, padded_begin<kBlockM>(p, plan, sequence, at.batch)});
    store_part(shared.keys, {visible, first_key});
    store_part(shared.walk, {at.head, sequence.k_begin, tiles_begin, tiles_end});
  }
  arch::sync_threads();  // the task is written

  const arch::SharedAddress base = arch::shared_address(&shared);
  const arch::SharedAddress tile_k = arch::shared_address(shared.k), tile_v = arch::shared_address(shared.v),
                            tile_q = arch::shared_address(shared.q), tile_do = arch::shared_address(shared.grad_out),
                            tile_ds = arch::shared_address(shared.grad_scores),
                            tile_p = arch::shared_address(shared.weights);

  const auto copy_queries = [&](const Stop& stop) {
    using Copies = TileCopies<typename Kernel::TileQ, kThreads, false>;
    const QueriesOfTask queries = load_part(shared.queries);
    Copies(row_of<const T>(p.query, queries.batch, queries.begin, stop.head), p.query.seq_stride, stop.tile,
           int(arch::opaque(arch::thread_index())))
        .copy_next(tile_q, queries.count - stop.tile * kBlockM, int(p.dim), plan.query_pass, 0);
  };
  const auto copy_grad_out = [&](const Stop& stop) {
    using Copies = TileCopies<typename Kernel::TileDO, kThreads, false>;
    const QueriesOfTask queries = load_part(shared.queries);
    Copies(row_of<const T>(p.grad_out, queries.batch, queries.begin, stop.head), p.grad_out.seq_stride, stop.tile,
           int(arch::opaque(arch::thread_index())))
        .copy_next(tile_do, queries.count - stop.tile * kBlockM, int(p.dim_v), plan.grad_out_pass, 0);
    constexpr int kChunks = kBlockM / 4;  // of lse, and of delta
    static_assert(2 * kChunks <= kThreads);
    const int thread = int(arch::opaque(arch::thread_index()));
    if (thread < 2 * kChunks) {
      const bool of_lse = thread < kChunks;
      const int row = thread % kChunks * 4;
      const int first = stop.head * plan.head_rows + queries.first_padded + stop.tile * kBlockM;
      arch::cp_async<16>(arch::shared_address((of_lse ? shared.minus_lse : shared.minus_delta) + row),
                         (of_lse ? plan.minus_lse : plan.minus_delta) + first + row);
    }
  };

  typename GradK::Accumulators grad_key = {};
  typename GradV::Accumulators grad_value = {};
  Stop stop{};
  if (begin < end) {
    stop = {at.head * group + begin / tiles, tiles_begin + begin % tiles};
    copy_lines<typename Kernel::TileK, kThreads, false>(tile_k, keys_left, int(p.dim), [&](int i) {
      return row_of<const T>(p.key, at.batch, sequence.k_begin + first_key + i, at.head);
    });
    copy_lines<typename Kernel::TileV, kThreads, false>(tile_v, keys_left, int(p.dim_v), [&](int i) {
      return row_of<const T>(p.value, at.batch, sequence.k_begin + first_key + i, at.head);
    });
    copy_grad_out(stop);
    copy_queries(stop);
    arch::cp_async_commit();
  }

#pragma unroll 1
  for (int left = end - begin; left > 0; --left) {
    arch::cp_async_wait<0>();
    arch::sync_threads();  // queries and output gradients are here, and dS has been read

    const int first_query = stop.tile * kBlockM;
    typename Scores::Accumulators s = {}, grad = {};
    if constexpr (!Kernel::kGeneral) start_columns<Scores>(s, shared.minus_lse);
    multiply<typename Kernel::TileQ, kSplit>(rows_of<Scores, typename Kernel::TileK>(base, offsetof(Storage, k)),
                                             columns_of<Scores, typename Kernel::TileQ>(base, offsetof(Storage, q)), s);
    if constexpr (!Kernel::kGeneral) start_columns<Scores>(grad, shared.minus_delta);
    multiply<typename Kernel::TileDO, kSplit>(
        rows_of<Scores, typename Kernel::TileV>(base, offsetof(Storage, v)),
        columns_of<Scores, typename Kernel::TileDO>(base, offsetof(Storage, grad_out)), grad);

    const KeysOfTask keys = load_part(shared.keys);
    const bool hide_some =
        !keys.visible.all_visible(first_query, first_query + kBlockM - 1, keys.first, keys.first + kBlockN);
    if constexpr (Kernel::kGeneral) {
      const QueriesOfTask queries = load_part(shared.queries);
      GeneralStep general{};
      if (p.alibi_slopes != nullptr)
        general.slope = arch::load_global<float>(static_cast<const float*>(p.alibi_slopes) +
                                                 queries.batch * p.alibi_batch_stride + stop.head);
      general.diagonal = keys.visible.k_len - queries.count;
      general.q_len = queries.count;
      general.bias = bias_offset(p.bias_strides, queries.batch, stop.head, 0);
      general.grad_bias = bias_offset(p.grad_bias_strides, queries.batch, stop.head, 0);
      general.first_number = first_lse_row(p, queries.begin, queries.batch, stop.head);
      general_softmax_gradient<Kernel>(s, grad, p, plan, keys.visible, general, shared.minus_lse, shared.minus_delta,
                                       keys.first, first_query, hide_some);
    } else {
      softmax_gradient<Kernel>(s, grad, plan, keys.visible, keys.first, first_query, hide_some);
    }

    stage<Scores, typename Kernel::TileScores>(tile_ds, grad, 1.0f);
    const LaneAddress lane_do = columns_of<GradV, typename Kernel::TileDOOfDV>(base, offsetof(Storage, grad_out));
    const LaneAddress lane_q = columns_of<GradK, typename Kernel::TileQOfDK>(base, offsetof(Storage, q));
    if constexpr (kSplit == 1) {
      multiply<typename Kernel::TileDOOfDV>(operand_of<T>(s), lane_do, grad_value);
      arch::sync_threads();  // dS is written, and the output gradients have been read
      if (left > 1) copy_grad_out(stop.next(load_part(shared.walk)));
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
      if (left > 1) copy_grad_out(stop.next(load_part(shared.walk)));
    }
    if (left > 1) copy_queries(stop.next(load_part(shared.walk)));
    arch::cp_async_commit();

    typename GradQ::Accumulators grad_query = {};
    multiply<typename Kernel::TileKOfDQ, GradQ::kWarpsN>(
        rows_of<GradQ, typename Kernel::TileScoresOfDQ>(base, offsetof(Storage, grad_scores)),
        columns_of<GradQ, typename Kernel::TileKOfDQ>(base, offsetof(Storage, k)), grad_query);
    const int row = stop.head * plan.head_rows + load_part(shared.queries).first_padded + first_query;
    const auto add = [&] {
      for_elements<GradQ>(plan.grad_query + int64_t(row) * GradQ::kColumns,
                          [&](float* to, int m, int n, int q) { arch::reduce_add(to, grad_query[m][n][q]); });
    };
    if (plan.turns == nullptr) {
      add();
    } else {
      uint32_t* const turn = plan.turns + row / kBlockM;
      const KeysOfTask of = load_part(shared.keys);
      // Blocks of earlier keys that these queries see.
      const uint32_t earlier = of.first / kBlockN - of.visible.key_begin(first_query) / kBlockN;
      if (arch::thread_index() == 0) arch::wait_equal(turn, earlier);
      arch::sync_threads();  // it is this block's turn
      add();
      arch::sync_threads();  // all have added
      if (arch::thread_index() == 0) arch::store_release(turn, earlier + 1);
    }
    stop = stop.next(load_part(shared.walk));
  }

  const KeysOfTask keys = load_part(shared.keys);
  const WalkOfTask task = load_part(shared.walk);
  const int batch = load_part(shared.queries).batch;
  const float value_factor = Kernel::kGeneral ? plan.kept_scale : 1.0f;
  if (plan.splits > 1) {
    const int64_t part = arch::block_x() % plan.splits;
    const int64_t tile =
        (part * plan.schedule.pairs + batch * p.heads_kv + task.head_kv) * plan.schedule.tiles + keys.first / kBlockN;
    for_elements<GradK>(plan.grad_key + tile * GradK::kRows * GradK::kColumns, [&](float* to, int m, int n, int q) {
      arch::store_global(to, plan.scale * grad_key[m][n][q]);
    });
    for_elements<GradV>(plan.grad_value + tile * GradV::kRows * GradV::kColumns, [&](float* to, int m, int n, int q) {
      arch::store_global(to, value_factor * grad_value[m][n][q]);
    });
    return;
  }
  arch::sync_threads();  // keys and values have been read
  stage<GradK, typename Kernel::TileK>(tile_k, grad_key, plan.scale);
  stage<GradV, typename Kernel::TileV>(tile_v, grad_value, value_factor);
  arch::sync_threads();  // dK and dV are written
  const int first_row = task.k_begin + keys.first, count = keys.visible.k_len - keys.first;
  write_lines<typename Kernel::TileK, kThreads>(tile_k, row_of<T>(p.grad_key, batch, first_row, task.head_kv),
                                                p.grad_key.seq_stride, count, int(p.dim));
  write_lines<typename Kernel::TileV, kThreads>(tile_v, row_of<T>(p.grad_value, batch, first_row, task.head_kv),
                                                p.grad_value.seq_stride, count, int(p.dim_v));
}

// Grid: tiles of queries of all sequences, heads. 8 lanes share a row.
template <class Kernel>
GLOBAL(Kernel::kThreads, 1)
attention_bwd_rows(GRID_CONSTANT AttentionBackwardParams p, GRID_CONSTANT BackwardPlan plan) {
  using T = typename Kernel::Element;
  constexpr int kThreads = Kernel::kThreads, kBlockM = Kernel::kBlockM, kDim = Kernel::GradQ::kColumns, kLanes = 8;
  const int batch = arch::block_x() / plan.query_tiles, tile = arch::block_x() % plan.query_tiles;
  const int head = arch::block_y(), first = tile * kBlockM;
  const Sequence sequence(p, batch);
  if (first >= sequence.q_len) return;
  const int padded = head * plan.head_rows + padded_begin<kBlockM>(p, plan, sequence, batch) + first;

  for (int row = arch::thread_index() / kLanes; row < kBlockM; row += kThreads / kLanes) {
    const int query = first + row;
    const bool exists = query < sequence.q_len;
    float sum = 0.0f;
    if (exists) {
      const T* const out = row_of<const T>(p.out, batch, sequence.q_begin + query, head);
      const T* const grad_out = row_of<const T>(p.grad_out, batch, sequence.q_begin + query, head);
      for (int d = arch::thread_index() % kLanes * 8; d < p.dim_v; d += kLanes * 8) {
        const auto x = arch::load_global<arch::Words4>(out + d), y = arch::load_global<arch::Words4>(grad_out + d);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum = arch::fma(arch::unpack_low<T>(x.data[i]), arch::unpack_low<T>(y.data[i]), sum);
          sum = arch::fma(arch::unpack_high<T>(x.data[i]), arch::unpack_high<T>(y.data[i]), sum);
        }
      }
    }
    sum = arch::sum_over_lanes<kLanes>(sum);
    if (arch::thread_index() % kLanes != 0) continue;
    float minus_lse = -INFINITY;
    if (exists) {
      const int64_t number = lse_row(p, sequence, batch, head, query);
      const float lse = arch::load_global<float>(static_cast<const float*>(p.lse) + number);
      if (lse != -INFINITY) minus_lse = -lse * plan.lse_factor;
      if (p.grad_lse != nullptr) sum -= arch::load_global<float>(static_cast<const float*>(p.grad_lse) + number);
    }
    // A row without weights has no gradient, whatever that of its lse.
    arch::store_global(plan.minus_lse + padded + row, minus_lse);
    arch::store_global(plan.minus_delta + padded + row, minus_lse == -INFINITY ? 0.0f : -sum);
  }

  constexpr int kWords = kBlockM * kDim / 4;
  for (int i = arch::thread_index(); i < kWords; i += kThreads)
    arch::store_global(plan.grad_query + int64_t(padded) * kDim + 4 * i, arch::Words4{});
  if (plan.turns != nullptr && arch::thread_index() == 0)
    arch::store_global(plan.turns + padded / kBlockM, uint32_t(0));
}

// Rows of one of the gradients, from float32 tiles of the workspace.
struct FinishParams {
  HeadsView to;
  const float* tiles = nullptr;
  int parts = 1;  // that are added, in order
  int64_t part_stride = 0;
  float factor = 1.0f;
  int width = 0;
  int tiles_of_sequence = 0;
  bool of_queries = false;
};

// Grid: tiles of all sequences, heads.
template <class T, class Tiles>
GLOBAL(Tiles::kThreads, 1)
attention_bwd_finish(GRID_CONSTANT AttentionBackwardParams p, GRID_CONSTANT BackwardPlan plan,
                     GRID_CONSTANT FinishParams finish) {
  using Tile = OperandTile<T, Side::kA, true, Tiles::kRows, Tiles::kColumns>;
  struct Storage {
    alignas(128) unsigned char tile[Tile::kBytes];
  };
  SHARED_STORAGE(Storage, shared);
  const int batch = arch::block_x() / finish.tiles_of_sequence, tile = arch::block_x() % finish.tiles_of_sequence;
  const int head = arch::block_y(), first = tile * Tiles::kRows;
  const Sequence sequence(p, batch);
  const int left = (finish.of_queries ? sequence.q_len : sequence.k_len) - first;
  if (left <= 0) return;

  const int64_t index =
      finish.of_queries
          ? (head * plan.head_rows + padded_begin<Tiles::kRows>(p, plan, sequence, batch)) / Tiles::kRows + tile
          : (int64_t(batch) * p.heads_kv + head) * plan.schedule.tiles + tile;
  const float* const from = finish.tiles + index * Tiles::kRows * Tiles::kColumns;
  typename Tiles::Accumulators sum = {};
  for (int part = 0; part < finish.parts; ++part)
    for_elements<Tiles>(from + part * finish.part_stride,
                        [&](const float* at, int m, int n, int q) { sum[m][n][q] += arch::load_global<float>(at); });
  const arch::SharedAddress staged = arch::shared_address(shared.tile);
  stage<Tiles, Tile>(staged, sum, finish.factor);
  arch::sync_threads();
  write_lines<Tile, Tiles::kThreads>(
      staged, row_of<T>(finish.to, batch, (finish.of_queries ? sequence.q_begin : sequence.k_begin) + first, head),
      finish.to.seq_stride, left, finish.width);
}

// -sum over rows of exp(sink - lse) delta: a sink's logit has no value behind it. Grid: heads.
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
    const int first = head * plan.head_rows + padded_begin<block_m>(p, plan, sequence, batch);
    for (int i = arch::thread_index(); i < sequence.q_len; i += threads)
      sum += arch::fast_exp2(sink + arch::load_global<float>(plan.minus_lse + first + i) * plan.factor) *
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

inline BackwardPlan plan_backward(const AttentionBackwardParams& p, const AttentionBackwardConfig& config,
                                  const rt::Device& device) {
  constexpr double kLog2e = 1.4426950408889634;
  const auto tiles_of = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
  BackwardPlan plan;
  const int64_t pairs = p.heads_kv * p.batch, group = p.heads / p.heads_kv;
  plan.query_tiles = int(tiles_of(p.seqlen_q, config.block_m));
  plan.schedule.tiles = int(tiles_of(p.seqlen_k, config.block_n));
  plan.schedule.heads = int(p.heads_kv);
  plan.schedule.section = section_of(p.seqlen_q * group * (4 * p.dim + 2 * (p.dim + p.dim_v)), pairs);
  plan.splits = choose_splits(pairs * plan.schedule.tiles, int64_t(device.processors) * config.min_blocks,
                              group * plan.query_tiles);
  // Of a head: a sequence begins with a tile of its own.
  const int64_t query_tiles =
      p.cu_seqlens_q != nullptr ? p.total_q / config.block_m + p.batch : p.batch * plan.query_tiles;
  const auto check = [&](const char* of, int64_t count) {
    if (count > std::numeric_limits<int>::max())
      throw std::invalid_argument(std::string("attention_bwd_sm80: expected at most 2^31 ") + of + ", got " +
                                  std::to_string(count) + "; divide the batch");
  };
  check("tiles of keys", pairs * plan.schedule.tiles * plan.splits);
  check("padded queries of all heads", p.heads * query_tiles * config.block_m);
  plan.schedule.pairs = int(pairs);
  plan.head_rows =
      config.block_m * (p.cu_seqlens_q != nullptr ? p.total_q / config.block_m + p.batch : p.batch * plan.query_tiles);
  const bool general = needs_general_kernel(p);
  plan.scale = float(p.scale);
  plan.factor = float(general ? kLog2e : p.scale * kLog2e);
  plan.lse_factor = float(general ? 1.0 : 1.0 / p.scale);
  plan.softcap = float(p.softcap);
  plan.inverse_softcap = p.softcap > 0 ? float(1 / p.softcap) : 0.0f;
  plan.kept_scale = float(1 / (1 - p.dropout_p));
  plan.dropout = dropout_of(p);
  return plan;
}

// Divides the workspace.
inline WorkspaceCursor place(const AttentionBackwardParams& p, const AttentionBackwardConfig& config, void* data,
                             BackwardPlan& plan) {
  WorkspaceCursor cursor(data);
  const int64_t rows = p.heads * plan.head_rows;
  cursor.take(plan.minus_lse, rows);
  cursor.take(plan.minus_delta, rows);
  cursor.take(plan.grad_query, rows * config.dim);
  if (p.deterministic) cursor.take(plan.turns, rows / config.block_m);
  if (plan.splits > 1) {
    const int64_t tiles = int64_t(plan.splits) * plan.schedule.pairs * plan.schedule.tiles;
    cursor.take(plan.grad_key, tiles * config.block_n * config.dim);
    cursor.take(plan.grad_value, tiles * config.block_n * config.dim_v);
  }
  return cursor;
}

template <class Kernel>
size_t backward_workspace(const AttentionBackwardParams& p) {
  BackwardPlan plan = plan_backward(p, Kernel::kConfig, rt::describe_device("attention_bwd_sm80"));
  return place(p, Kernel::kConfig, nullptr, plan).used();
}

// Writes a gradient from its sums in the workspace.
template <class T, class Tiles>
void finish_gradient(const AttentionBackwardParams& p, const BackwardPlan& plan, const FinishParams& finish, int heads,
                     void* stream) {
  const rt::Extent grid{int(p.batch) * finish.tiles_of_sequence, heads};
  if (grid.x == 0 || finish.width == 0) return;
  rt::launch<attention_bwd_finish<T, Tiles>>("attention_bwd_finish",
                                             {.grid = grid,
                                              .threads = Tiles::kThreads,
                                              .shared_bytes = size_t(Tiles::kRows) * Tiles::kColumns * sizeof(T),
                                              .stream = stream},
                                             p, plan, finish);
}

template <class Kernel>
void launch_backward(const AttentionBackwardParams& p, Workspace workspace, void* stream) {
  using T = typename Kernel::Element;
  constexpr const AttentionBackwardConfig& config = Kernel::kConfig;
  BackwardPlan plan = plan_backward(p, config, rt::describe_device("attention_bwd_sm80"));
  place(p, config, workspace.data, plan).expect_room("attention_bwd_sm80", workspace);
  const int heads = int(p.heads), heads_kv = int(p.heads_kv);

  if (p.batch * plan.query_tiles > 0)
    rt::launch<attention_bwd_rows<Kernel>>(
        "attention_bwd_rows",
        {.grid = {int(p.batch) * plan.query_tiles, heads}, .threads = config.threads(), .stream = stream}, p, plan);

  int64_t to_next_tile;  // a walk has no use for it
  TileCopies<typename Kernel::TileQ, Kernel::kThreads>::set_steps(p.query.seq_stride, plan.query_pass, to_next_tile);
  TileCopies<typename Kernel::TileDO, Kernel::kThreads>::set_steps(p.grad_out.seq_stride, plan.grad_out_pass,
                                                                   to_next_tile);
  if (const int blocks = plan.schedule.pairs * plan.schedule.tiles * plan.splits; blocks > 0)
    rt::launch<attention_bwd_sm80<Kernel>>("attention_bwd_sm80",
                                           {.grid = {blocks},
                                            .threads = Kernel::kThreads,
                                            .shared_bytes = sizeof(typename Kernel::Storage),
                                            .waits = p.deterministic ? rt::Waits::kForEarlier : rt::Waits::kForNone,
                                            .stream = stream},
                                           p, plan);

  finish_gradient<T, typename Kernel::GradQ>(p, plan,
                                             {.to = p.grad_query,
                                              .tiles = plan.grad_query,
                                              .factor = plan.scale,
                                              .width = int(p.dim),
                                              .tiles_of_sequence = plan.query_tiles,
                                              .of_queries = true},
                                             heads, stream);
  if (plan.splits > 1) {
    const int64_t tiles = int64_t(plan.schedule.pairs) * plan.schedule.tiles;
    FinishParams finish{.to = p.grad_key,
                        .tiles = plan.grad_key,
                        .parts = plan.splits,
                        .part_stride = tiles * config.block_n * config.dim,
                        .width = int(p.dim),
                        .tiles_of_sequence = plan.schedule.tiles};
    finish_gradient<T, typename Kernel::GradK>(p, plan, finish, heads_kv, stream);
    finish.to = p.grad_value;
    finish.tiles = plan.grad_value;
    finish.part_stride = tiles * config.block_n * config.dim_v;
    finish.width = int(p.dim_v);
    finish_gradient<T, typename Kernel::GradV>(p, plan, finish, heads_kv, stream);
  }
  if (p.grad_sinks != nullptr) {
    constexpr int kThreads = 256;
    rt::launch<attention_bwd_sinks<config.block_m, kThreads>>(
        "attention_bwd_sinks",
        {.grid = {heads}, .threads = kThreads, .shared_bytes = kThreads / 32 * sizeof(float), .stream = stream}, p,
        plan);
  }
}

// Calls f(Backward<..>{}) for what the parameters ask for.
template <class T, int tile, class F>
auto with_backward(const AttentionBackwardParams& p, const F& f) {
  return needs_general_kernel(p) ? f(Backward<T, kBackwardTiles[tile].general, true>{})
                                 : f(Backward<T, kBackwardTiles[tile].fast, false>{});
}

template <class T, int tile>
size_t AttentionBackwardSm80<T, tile>::workspace(const AttentionBackwardParams& params) {
  if (params.heads == 0) return 0;
  return with_backward<T, tile>(params, [&]<class Kernel>(Kernel) { return backward_workspace<Kernel>(params); });
}

template <class T, int tile>
void AttentionBackwardSm80<T, tile>::launch(const AttentionBackwardParams& params, Workspace workspace, void* stream) {
  if (params.heads == 0) return;
  with_backward<T, tile>(params, [&]<class Kernel>(Kernel) { launch_backward<Kernel>(params, workspace, stream); });
}

}  // namespace cuda_ext::sm80
