// Flash attention forward for sm_80 and later (Dao, "FlashAttention-2", arXiv 2307.08691), for float16, bfloat16 and
// float32 (in tf32, or as exact as float32: tile/products.cuh).
//
// Problem        AttentionParams in attention.h: out = softmax(logits) V and the log-sum-exp of each row of logits.
// Tile           A block has block_m rows: queries of one head or, if there are few queries, of all heads that share a
//                key head, which is then read once for all of them (pack_gqa). It loops over the keys that any of its
//                rows sees, block_n at a time, from the last to the first, so that only the first steps meet a causal
//                mask. Sizes: kForwardTiles in tiles_sm80.h.
// Warps          All have the same role: each owns 16 kRowTiles rows of the tile, and all threads take part in copies.
// Pipeline       One tile of keys and one of values, filled by cp.async: values arrive during Q K^T, the next keys
//                during softmax and P V.
// Barriers       sync_threads, all threads. One before the loop, after the task is written. Two per step, each after
//                the thread's wait for its own copies: the tile has arrived, and the one that is replaced next has been
//                read.
// Shared memory  queries (block_m, dim), keys (block_n, dim), values (block_n, dim_v), as OperandTiles; the block's
//                ForwardTask. At the end the output is staged in the queries' memory, which is not read any more after
//                the second barrier of the last step.
// Registers      Per warp, logits (16 kRowTiles, block_n) and output (16 kRowTiles, dim_v) in float32, in the layout of
//                mma results. This is also the layout of mma's first operand, so probs go from softmax to P V in
//                registers. Both take up to 192 of 255 registers, so everything else is recomputed at each use, from
//                the thread index or from the task in shared memory. In that case the sums of probs are in shared
//                memory, too.
// Softmax        Online; outputs are rescaled only when the maximum of a row has grown by more than 2^8 (softmax.cuh).
// Options        A second instantiation supports all that has_options (attention_plan.h) counts, by run-time flags.
// Block mask     Also in the second instantiation. The loop goes through the list of the tile's queries instead: steps
//                are tiles of listed blocks, read from memory where they are needed. Of a block that is seen in part, a
//                thread loads one word for each of its rows, with a bit for each of its columns.
// Splits         If the tiles would not fill the GPU, the keys of a tile are divided among several blocks. Each stores
//                its output and log-sum-exp in the workspace, and a second kernel combines them
//                (attention_combine.cuh). So are lists that are much longer than others (LongLists).
#pragma once

#include <cstddef>

#include "attention/fwd_rows.cuh"
#include "attention/tiles_sm80.h"
#include "tile/results.cuh"

namespace cuda_ext::attention::sm80 {

// One instantiation of the kernel.
template <class T, ForwardConfig config, int block_n, bool with_options>
struct Forward {
  using Element = T;
  static constexpr bool kWithOptions = with_options;
  static constexpr int kThreads = config.threads();
  static constexpr int kMinBlocks = config.min_blocks;
  static constexpr bool kIsNeeded = is_needed<T>(config, with_options, block_n, arch::kComputeCapability);
  static constexpr int kBlockM = config.block_m;
  static constexpr int kBlockN = block_n;

  using LogitTiles = WarpTiles<kBlockM, kBlockN, config.warps, 1>;
  using OutTiles = WarpTiles<kBlockM, config.dim_v, config.warps, 1>;
  static constexpr int kWarpRows = kBlockM / config.warps;
  static constexpr int kRowTiles = OutTiles::kRowTiles;
  static constexpr int kOutTiles = OutTiles::kColumnTiles;
  // Logits and output leave no registers for the sums of probs, which are in shared memory between steps.
  static constexpr bool kSumsInShared =
      4 * kRowTiles * (LogitTiles::kColumnTiles + kOutTiles) >= (with_options && sizeof(T) == 4 ? 128 : 192);

  using TileQ = OperandTile<T, Side::kA, true, kBlockM, config.dim>;
  using TileK = OperandTile<T, Side::kB, true, kBlockN, config.dim>;
  using TileV = OperandTile<T, Side::kB, false, config.dim_v, kBlockN, OrderOfK::kPairs>;
  using TileOut = OperandTile<T, Side::kA, true, kBlockM, config.dim_v>;
  static_assert(TileOut::kBytes <= TileQ::kBytes);

  struct Storage {
    alignas(128) unsigned char q[TileQ::kBytes];
    alignas(128) unsigned char k[TileK::kBytes];
    alignas(128) unsigned char v[TileV::kBytes];
    alignas(128) RowSums<kRowTiles> sums[kSumsInShared ? kThreads : 1];
    ForwardTask task;
  };
};

// Grid: (tiles of all heads and sequences, splits). One function, because all its parts share registers across the
// loop.
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
  if constexpr (!Kernel::kIsNeeded) return;
  SHARED_STORAGE(Storage, shared);

  if constexpr (Kernel::kWithOptions)
    if (p.rng_state != nullptr && arch::block_x() == 0 && arch::block_y() == 0 && arch::thread_index() == 0)
      store_rng(p.rng_state, load_rng(plan.dropout.rng));

  int begin, end;  // steps
  {
    const ForwardTask task = ForwardTask::find<Kernel>(p, plan, arch::block_x(), arch::block_y());
    if (task.has_no_rows()) return;
    begin = task.keys.begin;
    end = task.end.step;
    // One thread stores the task, from which all recompute what they need.
    if (arch::thread_index() == 0) task.store<Kernel::kWithOptions>(shared.task);
  }
  arch::sync_threads();  // the task is written

  const arch::SharedAddress base = arch::shared_address(&shared);
  const auto row_at = [](int m, int half) { return LogitTiles::row(m, half, arch::opaque_thread_index()); };
  const auto split = [&] { return Kernel::kWithOptions ? load_struct(shared.task.part).index : arch::block_y(); };

  typename OutTiles::Accumulators out = {};
  OnlineSoftmax<kRowTiles> softmax;
  RowSums<kRowTiles> sums;
  {
    const TileRows rows = load_struct(shared.task.rows);
    const TilePosition position = load_struct(shared.task.position);
    begin_rows(p, rows, split() == 0, row_at, softmax, sums);
    if constexpr (Kernel::kSumsInShared) store_struct(shared.sums[arch::thread_index()], sums);
    // The queries arrive together with the first keys.
    if (begin < end)
      copy_lines<TileQ, Kernel::kThreads>(
          arch::shared_address(shared.q), rows.count - rows.first, int(p.dim), [&](int i) {
            return row_of<const T>(p.query, position.batch, position.q_begin + rows.query(i), rows.head(i));
          });
  }

  const auto copy = [&]<class Tile>(const HeadsView& view, int offset, int tile, int64_t width, const int64_t& pass) {
    const TilePosition position = load_struct(shared.task.position);
    const int first = tile * kBlockN;
    LinesCopy<Tile, Kernel::kThreads>::start(
        base + offset, row_of<const T>(view, position.batch, position.k_begin + first, position.head_kv),
        view.seq_stride, pass, load_struct(shared.task.keys).visible.k_len - first, int(width));
    arch::cp_async_commit();
  };
  const auto copy_keys = [&](int tile) {
    copy.template operator()<TileK>(p.key, offsetof(Storage, k), tile, p.dim, plan.key_pass);
  };
  const auto copy_values = [&](int tile) {
    copy.template operator()<TileV>(p.value, offsetof(Storage, v), tile, p.dim_v, plan.value_pass);
  };
  const auto tile_at = [&](int step) { return tile_of<Kernel>(shared.task, step); };
  const auto next = [&](int step) { return next_step<Kernel>(shared.task, step, -1); };
  if (begin < end) copy_keys(tile_at(end - 1));

#pragma unroll 1
  for (int step = end - 1; step >= load_struct(shared.task.keys).begin; step = next(step)) {
    arch::cp_async_wait<0>();
    arch::sync_threads();  // the keys have arrived, and the previous values have been read
    // The values arrive during Q K^T.
    copy_values(tile_at(step));
    // S = Q K^T.
    typename LogitTiles::Accumulators logits = {};
    multiply<TileK>(rows_of<LogitTiles, TileQ>(base, offsetof(Storage, q)),
                    columns_of<LogitTiles, TileK>(base, offsetof(Storage, k)), logits, p.in_tf32);

    arch::cp_async_wait<0>();
    arch::sync_threads();  // the values have arrived, and the keys have been read
    // The next keys arrive during softmax and P V.
    if (step > load_struct(shared.task.keys).begin) copy_keys(tile_at(next(step)));
    const auto first_key = [&] { return tile_at(step) * kBlockN; };
    if constexpr (Kernel::kWithOptions) {
      if (plan.modifies_logits)
        modify_logits<T, LogitTiles>(logits, p, plan, load_struct(shared.task.rows),
                                     load_struct(shared.task.position).batch,
                                     load_struct(shared.task.keys).visible.k_len, row_at, first_key());
      apply_block_mask<Kernel, LogitTiles>(logits, p, shared.task, step, arch::opaque_thread_index());
    }
    // Hide the keys that a row does not see; most tiles have none.
    if (const int first = first_key(); !load_struct(shared.task.unmasked).has_all(first, first + kBlockN)) {
      const TileRows rows = load_struct(shared.task.rows);
      const Visibility visible = load_struct(shared.task.keys).visible;
      // The key of this thread's first column.
      const int origin = first + LogitTiles::column(arch::opaque_thread_index());
      apply_mask<LogitTiles>(logits,
                             [&](int m, int half) { return visible.keys(rows.query(row_at(m, half))).from(origin); });
    }
    if constexpr (Kernel::kSumsInShared) sums = load_struct(shared.sums[arch::opaque_thread_index()]);
    // S becomes P; the output is rescaled if a maximum has grown.
    softmax.update(logits, out, sums, plan.factor);
    if constexpr (Kernel::kSumsInShared) store_struct(shared.sums[arch::opaque_thread_index()], sums);
    if constexpr (Kernel::kWithOptions)
      // After the sums, which count dropped probs, too.
      if (plan.dropout.drop_below > 0) {
        const TileRows rows = load_struct(shared.task.rows);
        const TilePosition position = load_struct(shared.task.position);
        plan.dropout.drop(
            logits,
            [&](int m, int half) {
              const int row = row_at(m, half);
              return first_dropout_row(p, position.q_begin, position.batch, rows.head(row)) + rows.query(row);
            },
            first_key());
      }
    // O += P V, with P from registers.
    multiply<TileV>(operand_of<T>(logits), columns_of<OutTiles, TileV>(base, offsetof(Storage, v)), out, p.in_tf32);
  }

  const TileRows rows = load_struct(shared.task.rows);
  const TilePosition position = load_struct(shared.task.position);
  if constexpr (Kernel::kSumsInShared) sums = load_struct(shared.sums[arch::opaque_thread_index()]);
  // Divide by the sums, and store lse.
  finish_rows<Kernel>(p, plan, shared.task, rows, position, split(), row_at, softmax, sums, out);
  if (stores_float32<Kernel>(p, plan, shared.task)) return;

  // Staged in shared memory, so that rows are stored 16 bytes at a time.
  const arch::SharedAddress staged = arch::shared_address(shared.q);
  stage<OutTiles, TileOut>(staged, out, 1.0f);
  arch::sync_warp();
  constexpr int kCopies = Kernel::kWarpRows * TileOut::kChunks / arch::kWarpSize;
#pragma unroll 1
  for (int i = 0; i < kCopies; ++i) {
    const int index = i * arch::kWarpSize + arch::lane_index();
    const int row = OutTiles::first_row() + index / TileOut::kChunks, chunk = index % TileOut::kChunks;
    if (rows.first + row >= rows.count || chunk * TileOut::kElements >= p.dim_v) continue;
    T* const to = row_of<T>(p.out, position.batch, position.q_begin + rows.query(row), rows.head(row));
    arch::store_global(to + chunk * TileOut::kElements,
                       arch::load_shared<arch::Words4>(staged + TileOut::offset(row, chunk)));
  }
}

}  // namespace cuda_ext::attention::sm80
