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
#include <limits>
#include <stdexcept>
#include <string>

#include "attention/attention_fwd_sm80.h"
#include "attention/bias.cuh"
#include "attention/dropout.cuh"
#include "attention/mask.cuh"
#include "attention/rows.cuh"
#include "attention/scheduler.cuh"
#include "attention/softmax.cuh"
#include "attention/task.cuh"
#include "rt/device.h"
#include "tile/results.cuh"

namespace cuda_ext::sm80 {

// What the host decides; the same for all blocks.
struct ForwardPlan {
  Schedule schedule;
  int block_n;     // keys
  int pack = 1;    // heads of a tile
  int splits = 1;  // of the keys
  float factor;    // of what softmax is taken of, to powers of two
  // General:
  float scale;    // of the products
  float softcap;  // 0: none
  float inverse_softcap;
  float kept_scale = 1.0f;  // of weights that dropout keeps
  Dropout dropout;
  int64_t key_pass = 0, value_pass = 0;  // bytes to a thread's next line
  // In the workspace; null if there is but one split.
  float* partial_out = nullptr;  // (splits, rows of lse, dim_v)
  float* partial_lse = nullptr;  // (splits, rows of lse)
};

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
      const int column = first_key + Tiles::column(arch::opaque_thread_index());
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
  const auto row_at = [](int m, int half) { return LogitTiles::row(m, half, arch::opaque_thread_index()); };

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
      const int origin = first_key + LogitTiles::column(arch::opaque_thread_index());
      hide<LogitTiles>(logits, [&](int m, int half) { return visible.keys(rows.query(row_at(m, half))).from(origin); });
    }
    if constexpr (Kernel::kSumsWait) sums = load_part(shared.sums[arch::opaque_thread_index()]);
    softmax.take(logits, out, sums, plan.factor);
    if constexpr (Kernel::kSumsWait) store_part(shared.sums[arch::opaque_thread_index()], sums);
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
  if constexpr (Kernel::kSumsWait) sums = load_part(shared.sums[arch::opaque_thread_index()]);
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

// Weighs what the splits of a row left by 2^(their log-sum-exp). A warp has a row.
template <class T, int threads>
GLOBAL(threads, 1)
attention_combine(GRID_CONSTANT AttentionParams p, GRID_CONSTANT ForwardPlan plan) {
  constexpr float kLog2e = 1.4426950408889634f;
  const bool packed = p.cu_seqlens_q != nullptr;
  const int64_t queries = packed ? p.total_q : p.seqlen_q;  // of a head
  const int64_t rows = (packed ? 1 : p.batch) * p.heads * queries;
  const int64_t row = int64_t(arch::block_x()) * (threads / arch::kWarpSize) + arch::thread_index() / arch::kWarpSize;
  if (row >= rows) return;
  const auto lse_of = [&](int split) { return arch::load_global<float>(plan.partial_lse + split * rows + row); };
  float max = -INFINITY;
  for (int split = 0; split < plan.splits; ++split) max = fmaxf(max, lse_of(split));
  float sum = 0.0f;
  if (max != -INFINITY)
    for (int split = 0; split < plan.splits; ++split) sum += arch::fast_exp2((lse_of(split) - max) * kLog2e);
  if (arch::lane_index() == 0)
    arch::store_global(static_cast<float*>(p.lse) + row,
                       max == -INFINITY ? -INFINITY : max + arch::fast_log2(sum) / kLog2e);

  const int64_t head = row / queries, query = row % queries;
  T* const to = row_of<T>(p.out, packed ? 0 : int(head / p.heads), query, int(head % p.heads));
  for (int d = arch::lane_index() * 2; d < p.dim_v; d += 2 * arch::kWarpSize) {
    float pair[2] = {};
    for (int split = 0; split < plan.splits; ++split) {
      const float lse = lse_of(split);
      if (lse == -INFINITY) continue;
      const float weight = arch::fast_exp2((lse - max) * kLog2e) / sum;
      const auto words = arch::load_global<arch::Words2>(plan.partial_out + (split * rows + row) * p.dim_v + d);
      pair[0] = arch::fma(weight, arch::bits_float(words.data[0]), pair[0]);
      pair[1] = arch::fma(weight, arch::bits_float(words.data[1]), pair[1]);
    }
    arch::store_global(to + d, arch::pack<T>(pair[0], pair[1]));
  }
}

inline int64_t lse_rows(const AttentionParams& p) {
  return p.heads * (p.cu_seqlens_q != nullptr ? p.total_q : p.batch * p.seqlen_q);
}

inline ForwardPlan plan_forward(const AttentionParams& p, const AttentionConfig& config, const rt::Device& device) {
  constexpr double kLog2e = 1.4426950408889634;
  const auto tiles_of = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
  const int64_t group = p.heads / p.heads_kv;
  const int64_t tiles = tiles_of(p.seqlen_q, config.block_m),
                packed_tiles = tiles_of(p.seqlen_q * group, config.block_m);
  ForwardPlan plan;
  plan.pack = int(packed_tiles * p.heads_kv < tiles * p.heads ? group : 1);
  plan.schedule.tiles = int(plan.pack > 1 ? packed_tiles : tiles);
  plan.schedule.heads = int(p.heads / plan.pack);
  const int64_t pairs = plan.schedule.heads * p.batch;
  if (pairs * plan.schedule.tiles > std::numeric_limits<int>::max())
    throw std::invalid_argument("attention_fwd_sm80: expected at most 2^31 tiles of queries, got " +
                                std::to_string(pairs * plan.schedule.tiles) + "; divide the batch");
  plan.schedule.pairs = int(pairs);
  plan.schedule.section = section_of(p.seqlen_k * (p.dim + p.dim_v) * 2 * p.heads_kv / plan.schedule.heads, pairs);
  // A section's blocks are counted in ints too.
  const bool general = needs_general_kernel(p);
  plan.block_n = config.keys(general, device.shared_bytes);
  plan.splits = choose_splits(pairs * plan.schedule.tiles, int64_t(device.num_sms) * config.min_blocks,
                              tiles_of(p.seqlen_k, plan.block_n));
  plan.scale = float(p.scale);
  plan.factor = float(general ? kLog2e : p.scale * kLog2e);
  plan.softcap = float(p.softcap);
  plan.inverse_softcap = p.softcap > 0 ? float(1 / p.softcap) : 0.0f;
  plan.kept_scale = float(1 / (1 - p.dropout_p));
  plan.dropout = dropout_of(p);
  return plan;
}

// Divides the workspace.
inline WorkspaceCursor place(const AttentionParams& p, void* data, ForwardPlan& plan) {
  WorkspaceCursor cursor(data);
  if (plan.splits > 1) {
    cursor.take(plan.partial_out, plan.splits * lse_rows(p) * p.dim_v);
    cursor.take(plan.partial_lse, plan.splits * lse_rows(p));
  }
  return cursor;
}

inline bool is_empty(const AttentionParams& p) { return lse_rows(p) == 0 || p.seqlen_q == 0; }

template <class T, int tile>
size_t AttentionForwardSm80<T, tile>::workspace(const AttentionParams& params) {
  if (is_empty(params)) return 0;
  ForwardPlan plan = plan_forward(params, kForwardTiles[tile], rt::describe_device("attention_fwd_sm80"));
  return place(params, nullptr, plan).used();
}

// Calls f(Forward<..>{}) for what the parameters ask for.
template <class T, int tile, class F>
auto with_forward(const AttentionParams& p, const ForwardPlan& plan, const F& f) {
  constexpr const AttentionConfig& config = kForwardTiles[tile];
  if (needs_general_kernel(p)) return f(Forward<T, config, config.block_n.general, true>{});
  if (plan.block_n == config.block_n.fast) return f(Forward<T, config, config.block_n.fast, false>{});
  return f(Forward<T, config, config.block_n.small, false>{});
}

template <class T, int tile>
void AttentionForwardSm80<T, tile>::launch(const AttentionParams& params, Workspace workspace, void* stream) {
  if (is_empty(params)) return;
  ForwardPlan plan = plan_forward(params, kForwardTiles[tile], rt::describe_device("attention_fwd_sm80"));
  place(params, workspace.data, plan).expect_room("attention_fwd_sm80", workspace);
  with_forward<T, tile>(params, plan, [&]<class Kernel>(Kernel) {
    plan.key_pass = LinesCopy<typename Kernel::TileK, Kernel::kThreads>::pass(params.key.seq_stride);
    plan.value_pass = LinesCopy<typename Kernel::TileV, Kernel::kThreads>::pass(params.value.seq_stride);
    rt::launch<attention_fwd_sm80<Kernel>>("attention_fwd_sm80",
                                           {.grid = {plan.schedule.pairs * plan.schedule.tiles, plan.splits},
                                            .threads = Kernel::kThreads,
                                            .shared_bytes = sizeof(typename Kernel::Storage),
                                            .stream = stream},
                                           params, plan);
  });
  if (plan.splits > 1) {
    constexpr int kThreads = 128;
    const int64_t blocks = (lse_rows(params) + kThreads / 32 - 1) / (kThreads / 32);
    rt::launch<attention_combine<T, kThreads>>(
        "attention_combine", {.grid = {int(blocks)}, .threads = kThreads, .stream = stream}, params, plan);
  }
}

}  // namespace cuda_ext::sm80
