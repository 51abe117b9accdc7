// Flash attention forward on sm_80 and later (Dao, "FlashAttention-2", arXiv 2307.08691), for float16 and bfloat16.
//
// Tile      A block has block_m rows: queries of one head, or, where there are few queries, of all heads that share a
//           key head, which then is read once for all of them ("packed"). It walks the keys that any of its rows sees,
//           block_n at a time, from the last to the first, so that a causal mask is met in the first steps. Sizes: the
//           table kForwardTiles of tile_size.h.
// Warps     All do the same: each has 16 kRowTiles rows of the tile to itself, and all threads share every copy.
// Waiting   Tiles of keys and of values arrive by cp.async, one of each at a time: the values while Q K^T is
//           multiplied, the next keys during softmax and P V. Each thread waits for its own copies, then one
//           sync_threads says both that all have arrived and that what they replace has been read: two per step.
//           One more ahead of all steps, when the task is written.
// Shared    queries (block_m, dim), keys (block_n, dim), values (block_n, dim_v), as OperandTiles, and what the block has
//           to do. The output leaves through the queries' place, which nobody reads after the last step's second barrier.
// Registers Logits (16 kRowTiles, block_n) and output (16 kRowTiles, dim_v) of a warp in float32, as mma has them. The
//           logits' layout is that of mma's first operand, so weights go from softmax to P V without leaving registers.
//           The two take up to 192 of 255, so all else is found anew where it is used: the task in shared memory, what
//           comes of the thread's index. Where they do, sums of weights wait in shared memory too.
// Softmax   online; outputs are rescaled only where a row's maximum has grown by more than 2^8 (softmax.cuh).
// General   A second instantiation has softcap, ALiBi, dropout, a bias and scales that are not positive, by run-time
//           flags.
// Splits    Where tiles would not fill the device the keys of a tile are divided among blocks. Each leaves its output
//           and log-sum-exp in the workspace, and a second kernel weighs them.
#pragma once

#include <cstddef>

#include "attention/attention_fwd_plan.cuh"
#include "attention/bias.cuh"
#include "attention/mask.cuh"
#include "attention/rows.cuh"
#include "attention/softmax.cuh"
#include "attention/task.cuh"
#include "tile/results.cuh"

namespace cuda_ext::sm80 {

// The rows of a tile: query and head of each.
struct alignas(16) TileRows {
  int first;  // row of the sequence's (queries x pack)
  int count;  // of all its rows
  int pack;
  int first_head;

  DEVICE int query(int row) const { return pack == 1 ? first + row : (first + row) / pack; }
  DEVICE int head(int row) const { return pack == 1 ? first_head : first_head + (first + row) % pack; }
  DEVICE int last_query(int rows) const { return (first + rows < count ? first + rows - 1 : count - 1) / pack; }
};

// Tiles of keys that any row of a tile sees.
template <class Kernel>
DEVICE Span key_tiles(const Visibility& visible, const TileRows& rows) {
  constexpr int kBlockN = Kernel::kBlockN;
  return {visible.key_begin(rows.query(0)) / kBlockN,
          (visible.key_end(rows.last_query(Kernel::kBlockM)) + kBlockN - 1) / kBlockN};
}

// What a block has to do.
struct ForwardTask {
  struct alignas(16) Place {
    int batch, q_begin, k_begin, head_kv;
  };
  struct alignas(16) Keys {
    Visibility visible;
    int begin;  // of this block's, in tiles
  };
  TileRows rows;
  Place place;
  Keys keys;
};

// One instantiation of the kernel.
template <class T, AttentionConfig config, int block_n, bool general>
struct Forward {
  using Element = T;
  static constexpr bool kGeneral = general;
  static constexpr int kThreads = config.threads();
  static constexpr int kMinBlocks = config.min_blocks;
  static constexpr int kBlockM = config.block_m;
  static constexpr int kBlockN = block_n;

  using LogitTiles = WarpTiles<kBlockM, kBlockN, config.warps, 1>;
  using OutTiles = WarpTiles<kBlockM, config.dim_v, config.warps, 1>;
  static constexpr int kWarpRows = kBlockM / config.warps;
  static constexpr int kRowTiles = OutTiles::kRowTiles;
  static constexpr int kOutTiles = OutTiles::kColumnTiles;
  // Logits and output take most of the registers.
  static constexpr bool kSumsWait = 4 * kRowTiles * (LogitTiles::kColumnTiles + kOutTiles) >= 192;

  using TileQ = OperandTile<T, Side::kA, true, kBlockM, config.dim>;
  using TileK = OperandTile<T, Side::kB, true, kBlockN, config.dim>;
  using TileV = OperandTile<T, Side::kB, false, config.dim_v, kBlockN>;
  using TileOut = OperandTile<T, Side::kA, true, kBlockM, config.dim_v>;
  static_assert(TileOut::kBytes <= TileQ::kBytes);

  struct Storage {
    alignas(128) unsigned char q[TileQ::kBytes];
    alignas(128) unsigned char k[TileK::kBytes];
    alignas(128) unsigned char v[TileV::kBytes];
    alignas(128) RowSums<kRowTiles> sums[kSumsWait ? kThreads : 1];
    ForwardTask task;
  };
};

// Scale, softcap, ALiBi and bias, of keys from `first_key` on. row_at(m, half): a row of this thread's within the tile.
template <class T, class Tiles, class RowAt>
DEVICE void shape_logits(typename Tiles::Accumulators& s, const AttentionParams& p, const ForwardPlan& plan,
                         const TileRows& rows, int batch, int k_len, const RowAt& row_at, int first_key) {
#pragma unroll
  for (int m = 0; m < Tiles::kRowTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = first_key + Tiles::column(arch::thread_index_anew());
      const int row = row_at(m, half), head = rows.head(row), query = rows.query(row);
      const float slope = p.alibi_slopes == nullptr
                              ? 0.0f
                              : arch::load_global<float>(static_cast<const float*>(p.alibi_slopes) +
                                                         batch * p.alibi_batch_stride + head);
      const int last_key = query + k_len - rows.count / rows.pack;  // of the diagonal
      const bool has_bias = p.bias_kind != BiasKind::kNone && rows.first + row < rows.count;
      const int64_t bias = bias_offset(p.bias_strides, batch, head, query);
#pragma unroll
      for (int n = 0; n < Tiles::kColumnTiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = column + Tiles::column_step(n) + e;
          float& x = s[m][n][2 * half + e];
          x *= plan.scale;
          if (plan.softcap > 0.0f) x = plan.softcap * arch::tanh(x * plan.inverse_softcap);
          x -= slope * fabsf(float(last_key - key));
          if (has_bias && key < k_len) x += bias_at<T>(p, bias + key * p.bias_strides[3]);
        }
    }
}

// Grid: (tiles of all heads and sequences, splits).
template <class Kernel>
GLOBAL(Kernel::kThreads, Kernel::kMinBlocks)
attention_fwd_sm80(GRID_CONSTANT AttentionParams p, GRID_CONSTANT ForwardPlan plan) {
  using T = typename Kernel::Element;
  using LogitTiles = typename Kernel::LogitTiles;
  using OutTiles = typename Kernel::OutTiles;
  using TileQ = typename Kernel::TileQ;
  using TileK = typename Kernel::TileK;
  using TileV = typename Kernel::TileV;
  using TileOut = typename Kernel::TileOut;
  using Storage = typename Kernel::Storage;
  constexpr int kRowTiles = Kernel::kRowTiles, kBlockN = Kernel::kBlockN;
  SHARED_STORAGE(Storage, shared);

  if constexpr (Kernel::kGeneral)
    if (p.rng_state != nullptr && arch::block_x() == 0 && arch::block_y() == 0 && arch::thread_index() == 0)
      store_rng(p.rng_state, load_rng(plan.dropout.rng));

  int begin, end;  // tiles of keys
  {
    const TileIndex at = plan.schedule.find(arch::block_x());
    const Sequence sequence(p, at.batch);
    const TileRows rows{at.tile * Kernel::kBlockM, sequence.q_len * plan.pack, plan.pack, at.head * plan.pack};
    if (rows.first >= rows.count) return;
    const Visibility visible(p, sequence);
    const Span seen = key_tiles<Kernel>(visible, rows);
    const int of_split = (seen.end - seen.begin + plan.splits - 1) / plan.splits;
    begin = seen.begin + arch::block_y() * of_split;
    end = begin + of_split < seen.end ? begin + of_split : seen.end;
    if (arch::thread_index() == 0) {
      store_part(shared.task.rows, rows);
      store_part(shared.task.place,
                 {at.batch, sequence.q_begin, sequence.k_begin, rows.first_head / int(p.heads / p.heads_kv)});
      store_part(shared.task.keys, {visible, begin});
    }
  }
  arch::sync_threads();  // the task is written

  const arch::SharedAddress base = arch::shared_address(&shared);
  const auto row_at = [](int m, int half) { return LogitTiles::row(m, half, arch::thread_index_anew()); };

  typename OutTiles::Accumulators out = {};
  OnlineSoftmax<kRowTiles> softmax;
  RowSums<kRowTiles> sums;
  {
    const TileRows rows = load_part(shared.task.rows);
    const ForwardTask::Place place = load_part(shared.task.place);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int head = rows.head(row_at(m, half));
        // A sink is a key seen before all others, with no value. One of the four lanes of a row counts it.
        const bool has_sink = p.sinks != nullptr && arch::block_y() == 0;
        constexpr float kLog2e = 1.4426950408889634f;
        softmax.max[m][half] =
            has_sink ? arch::load_global<float>(static_cast<const float*>(p.sinks) + head) * kLog2e : -INFINITY;
        sums.of[m][half] = has_sink && arch::lane_index() % 4 == 0 ? 1.0f : 0.0f;
      }
    if constexpr (Kernel::kSumsWait) store_part(shared.sums[arch::thread_index()], sums);
    if (begin < end)
      copy_lines<TileQ, Kernel::kThreads>(
          arch::shared_address(shared.q), rows.count - rows.first, int(p.dim),
          [&](int i) { return row_of<const T>(p.query, place.batch, place.q_begin + rows.query(i), rows.head(i)); });
  }

  const auto copy = [&]<class Tile>(const HeadsView& view, int offset, int tile, int64_t width, const int64_t& pass) {
    const ForwardTask::Place place = load_part(shared.task.place);
    const int first = tile * kBlockN;
    LinesCopy<Tile, Kernel::kThreads>::start(
        base + offset, row_of<const T>(view, place.batch, place.k_begin + first, place.head_kv), view.seq_stride, pass,
        load_part(shared.task.keys).visible.k_len - first, int(width));
    arch::cp_async_commit();
  };
  const auto copy_keys = [&](int tile) {
    copy.template operator()<TileK>(p.key, offsetof(Storage, k), tile, p.dim, plan.key_pass);
  };
  const auto copy_values = [&](int tile) {
    copy.template operator()<TileV>(p.value, offsetof(Storage, v), tile, p.dim_v, plan.value_pass);
  };
  if (begin < end) copy_keys(end - 1);

#pragma unroll 1
  for (int tile = end - 1; tile >= load_part(shared.task.keys).begin; --tile) {
    arch::cp_async_wait<0>();
    arch::sync_threads();  // these keys are here, and the values before have been read
    copy_values(tile);
    typename LogitTiles::Accumulators logits = {};
    multiply<TileK>(rows_of<LogitTiles, TileQ>(base, offsetof(Storage, q)),
                    columns_of<LogitTiles, TileK>(base, offsetof(Storage, k)), logits);

    arch::cp_async_wait<0>();
    arch::sync_threads();  // these values are here, and the keys have been read
    if (tile > load_part(shared.task.keys).begin) copy_keys(tile - 1);
    const TileRows rows = load_part(shared.task.rows);
    const Visibility visible = load_part(shared.task.keys).visible;
    const int first_key = tile * kBlockN;
    if constexpr (Kernel::kGeneral)
      shape_logits<T, LogitTiles>(logits, p, plan, rows, load_part(shared.task.place).batch, visible.k_len, row_at,
                                  first_key);
    if (!visible.all_visible(rows.query(0), rows.last_query(Kernel::kBlockM), first_key, first_key + kBlockN)) {
      // What this thread's columns are counted from.
      const int origin = first_key + LogitTiles::column(arch::thread_index_anew());
      hide<LogitTiles>(logits, [&](int m, int half) { return visible.keys(rows.query(row_at(m, half))).from(origin); });
    }
    if constexpr (Kernel::kSumsWait) sums = load_part(shared.sums[arch::thread_index_anew()]);
    softmax.take(logits, out, sums, plan.factor);
    if constexpr (Kernel::kSumsWait) store_part(shared.sums[arch::thread_index_anew()], sums);
    if constexpr (Kernel::kGeneral)
      if (plan.dropout.drop_below > 0) {
        const TileRows rows = load_part(shared.task.rows);
        const ForwardTask::Place place = load_part(shared.task.place);
        plan.dropout.drop(
            logits,
            [&](int m, int half) {
              const int row = row_at(m, half);
              return first_lse_row(p, place.q_begin, place.batch, rows.head(row)) + rows.query(row);
            },
            first_key);
      }
    multiply<TileV>(operand_of<T>(logits), columns_of<OutTiles, TileV>(base, offsetof(Storage, v)), out);
  }

  const TileRows rows = load_part(shared.task.rows);
  const ForwardTask::Place place = load_part(shared.task.place);
  if constexpr (Kernel::kSumsWait) sums = load_part(shared.sums[arch::thread_index_anew()]);
  const int64_t split_rows =
      arch::block_y() * (p.cu_seqlens_q != nullptr ? p.heads * p.total_q : p.batch * p.heads * p.seqlen_q);
  const int pair = arch::lane_index() % 4 * 2;  // columns of 8
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_at(m, half), query = rows.query(row);
      const float sum = sums.row(m, half);
      const float lse = softmax.log_sum_exp(m, half, sum);
      const float weight = lse == -INFINITY ? 0.0f : (Kernel::kGeneral ? plan.kept_scale : 1.0f) / sum;
#pragma unroll
      for (int n = 0; n < Kernel::kOutTiles; ++n) {
        out[m][n][2 * half] *= weight;
        out[m][n][2 * half + 1] *= weight;
      }
      if (rows.first + row >= rows.count) continue;
      const int64_t number = first_lse_row(p, place.q_begin, place.batch, rows.head(row)) + query;
      if (plan.splits > 1) {
        if (pair == 0) arch::store_global(plan.partial_lse + split_rows + number, lse);
        float* const to = plan.partial_out + (split_rows + number) * p.dim_v + pair;
#pragma unroll
        for (int n = 0; n < Kernel::kOutTiles; ++n)
          if (n * 8 < p.dim_v)
            arch::store_global(to + n * 8, arch::Words2{{arch::float_bits(out[m][n][2 * half]),
                                                         arch::float_bits(out[m][n][2 * half + 1])}});
      } else if (pair == 0) {
        arch::store_global(static_cast<float*>(p.lse) + number, lse);
      }
    }
  if (plan.splits > 1) return;

  // Through shared memory, so that rows leave 16 bytes at a time.
  const arch::SharedAddress staged = arch::shared_address(shared.q);
  stage<OutTiles, TileOut>(staged, out, 1.0f);
  arch::sync_warp();
  constexpr int kCopies = Kernel::kWarpRows * TileOut::kChunks / arch::kWarpSize;
#pragma unroll 1
  for (int i = 0; i < kCopies; ++i) {
    const int index = i * arch::kWarpSize + arch::lane_index();
    const int row = OutTiles::first_row() + index / TileOut::kChunks, chunk = index % TileOut::kChunks;
    if (rows.first + row >= rows.count || chunk * 8 >= p.dim_v) continue;
    T* const to = row_of<T>(p.out, place.batch, place.q_begin + rows.query(row), rows.head(row));
    arch::store_global(to + chunk * 8, arch::load_shared<arch::Words4>(staged + TileOut::offset(row, chunk)));
  }
}

}  // namespace cuda_ext::sm80
