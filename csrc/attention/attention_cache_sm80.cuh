// Attention over a cache of keys and values, forward, for float16, bfloat16 and float32, on mma.sync (sm_80 and later):
// decoding, speculative decoding and prefill in chunks (Dao et al., "Flash-Decoding", 2023; pages: Kwon et al., arXiv
// 2309.06180).
//
// Problem        CachedAttentionParams: as attention_fwd_sm80.cuh, but the keys of a sequence are in a cache, in rows
//                or in pages of any size, and only the device knows how many there are.
// Tile           block_m rows, (queries x heads of a group), so that keys are read once for all heads of a group; it
//                loops over tiles of block_n keys, from the first to the last of a part of the keys. Sizes:
//                kCacheTiles.
// Blocks         are persistent; which items they take: plan_cache.cuh.
// Warps          own 16 rows each. With few rows, several warps own the same rows, each with its part of the keys of
//                every tile, and add up their results at the end.
// Step           K and V of the next tile are copied while this tile is multiplied; one barrier. The addresses of the
//                tile after that are looked up at the same time: one entry of the block table per row. Rows that are
//                not aligned to 16 bytes are copied in chunks of 4 or 2 (copy_chunk.cuh).
// Shared memory  queries (block_m, dim); two stages of keys (block_n, dim) and of values (block_n, dim_v), swizzled
//                (OperandTile); two stages of CacheRow; the ForwardTask; maxima and sums of rows (key_warps, block_m).
//                At the end float32 outputs (key_warps, block_m, dim_v + 8) in the place of the operands.
// Registers      per thread: block_n / key_warps / 2 logits, dim_v / 2 outputs.
// Tree mask      hides keys among the newest Sq: tiles that reach these read a byte of it for each logit.
// Results        go to the output or, if the keys are split, to the workspace, for attention_cache_combine.
#pragma once

#include <cstddef>

#include "attention/attention_combine.cuh"
#include "attention/plan_cache.cuh"
#include "attention/tiles_sm80.h"
#include "attention/fwd_rows.cuh"
#include "tile/copy_chunk.cuh"
#include "tile/products.cuh"

namespace cuda_ext::attention::sm80 {

// One instantiation of the kernel.
template <class T, CacheConfig config>
struct CacheForward {
  using Element = T;
  static constexpr int kThreads = config.threads();
  static constexpr int kMinBlocks = config.min_blocks;
  static constexpr bool kIsNeeded = is_needed<T>(config, arch::kComputeCapability);
  static constexpr int kBlockM = config.block_m, kBlockN = config.block_n;
  static constexpr int kRowWarps = kBlockM / 16, kKeyWarps = config.key_warps;
  static constexpr int kWarpKeys = kBlockN / kKeyWarps;
  static constexpr int kDimV = config.dim_v;

  // Logits: each warp has consecutive keys. Out: warps that share rows have all columns each.
  using LogitTiles = WarpTiles<kBlockM, kBlockN, kRowWarps, kKeyWarps, kWarpKeys>;
  using OutTiles = WarpTiles<kBlockM, kDimV, kRowWarps, 1>;
  DEVICE static int key_warp() { return arch::opaque_thread_index() / arch::kWarpSize / kRowWarps; }

  using TileQ = OperandTile<T, Side::kA, true, kBlockM, config.dim>;
  using TileK = OperandTile<T, Side::kB, true, kBlockN, config.dim>;
  using TileV = OperandTile<T, Side::kB, false, kDimV, kBlockN, OrderOfK::kPairs>;
  using WarpV = OperandTile<T, Side::kB, false, kDimV, kWarpKeys, OrderOfK::kPairs>;  // a warp's lines of TileV

  struct Stage {
    alignas(128) unsigned char k[TileK::kBytes];
    alignas(128) unsigned char v[TileV::kBytes];
  };
  // Maxima, in powers of two, and sums of probs that each warp has of its rows, for all keys or its part of them.
  struct Sums {
    float max[kKeyWarps][kBlockM], sum[kKeyWarps][kBlockM];

    DEVICE float max_of(int row) const {
      float most = -INFINITY;
#pragma unroll
      for (int warp = 0; warp < kKeyWarps; ++warp) most = fmaxf(most, read(max[warp][row]));
      return most;
    }
    // What a warp's sums count, relative to the maximum of the row.
    DEVICE float weight(int warp, int row, float row_max) const {
      const float own = read(max[warp][row]);
      return own == -INFINITY ? 0.0f : arch::fast_exp2(own - row_max);
    }
    DEVICE float sum_of(int row, float row_max) const {
      float total = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kKeyWarps; ++warp) total += weight(warp, row, row_max) * read(sum[warp][row]);
      return total;
    }
    DEVICE static float read(const float& shared) { return arch::load_shared<float>(arch::shared_address(&shared)); }
  };
  struct Storage {
    alignas(128) unsigned char q[TileQ::kBytes];
    Stage stages[2];
    CacheRow rows[2][kBlockN];
    Sums sums;
    ForwardTask task;
  };
  // float32 (kKeyWarps, kBlockM, kPitch), in the place of queries, keys and values. The pitch spreads rows over banks.
  static constexpr int kPitch = kDimV + 8;
  static_assert(kKeyWarps * kBlockM * kPitch * sizeof(float) <= offsetof(Storage, rows));
  DEVICE static arch::SharedAddress part_of_output(const Storage& shared, int warp, int row, int column) {
    return arch::shared_address(&shared) + ((warp * kBlockM + row) * kPitch + column) * int(sizeof(float));
  }
  static_assert(kBlockN <= kThreads);
};

template <class Kernel>
DEVICE ForwardTask task_of_item(const CachedAttentionParams& p, const CachePlan& plan, const CacheItem& item) {
  const Sequence s = cached_sequence(p, item.batch);
  const Visibility visible(p, s);
  const TileRows rows{item.row_tile * Kernel::kBlockM, s.q_len * plan.group, plan.group, item.head_kv * plan.group};
  const Span seen = seen_tiles<Kernel::kBlockN>(visible, rows.query(0), rows.last_query(Kernel::kBlockM));
  const int tiles_of_split = (seen.end - seen.begin + item.splits - 1) / item.splits;
  const int begin = seen.begin + item.split * tiles_of_split;
  const int end = begin + tiles_of_split < seen.end ? begin + tiles_of_split : seen.end;
  return {rows, {item.batch, 0, s.k_begin, item.head_kv}, {visible, begin}, {end, item.split}};
}

// Looks up where the keys of a tile are.
template <class Kernel>
DEVICE void find_rows(const CachedAttentionParams& p, typename Kernel::Storage& shared, int tile) {
  const int thread = arch::opaque_thread_index();
  if (thread >= Kernel::kBlockN) return;
  Sequence s(p, 0);
  s.k_begin = load_struct(shared.task.position).k_begin;
  s.k_len = load_struct(shared.task.keys).visible.k_len;
  const int batch = load_struct(shared.task.position).batch;
  store_struct(shared.rows[tile % 2][thread], row_of_key(p.cache, s, batch, tile * Kernel::kBlockN + thread));
}

// Starts copying lines of a tile of keys or values; those from `count` on, and elements past the width, are filled with
// zeros.
template <class Kernel, class Tile, int alignment>
DEVICE void copy_cached(arch::SharedAddress to, const HeadsView& view, int head, const CacheRow* rows, int count,
                        int width) {
  using T = typename Kernel::Element;
  constexpr int kCopies = Tile::kLines * Tile::kChunks / Kernel::kThreads;
  static_assert(kCopies * Kernel::kThreads == Tile::kLines * Tile::kChunks && Kernel::kThreads % Tile::kChunks == 0);
  constexpr int kLinesPerPass = Kernel::kThreads / Tile::kChunks;
  const int thread = arch::opaque_thread_index();
  const int chunk = thread % Tile::kChunks, first = thread / Tile::kChunks;
  const int elements = width - chunk * Tile::kElements;
  const int bytes = (elements < 0 ? 0 : elements < Tile::kElements ? elements : Tile::kElements) * int(sizeof(T));
#pragma unroll(alignment == 16 ? 8 : 1)
  for (int i = 0; i < kCopies; ++i) {
    const int line = first + i * kLinesPerPass;
    const CacheRow from = load_struct(rows[line]);
    const T* const source = row_of<const T>(view, from.page, from.row, head) + chunk * Tile::kElements;
    copy_chunk<alignment>(to + Tile::offset(line, chunk), reinterpret_cast<const char*>(source),
                          line < count ? bytes : 0);
  }
}
template <class Kernel, class Tile>
DEVICE void copy_cached(arch::SharedAddress to, const HeadsView& view, int head, const CacheRow* rows, int count,
                        int64_t width, int alignment) {
  if (alignment == 16)
    copy_cached<Kernel, Tile, 16>(to, view, head, rows, count, int(width));
  else if (sizeof(typename Kernel::Element) == 4 || alignment == 4)
    copy_cached<Kernel, Tile, 4>(to, view, head, rows, count, int(width));
  else
    copy_cached<Kernel, Tile, 2>(to, view, head, rows, count, int(width));
}

// Starts copying tile `tile` of keys and values.
template <class Kernel>
DEVICE void copy_tile(const CachedAttentionParams& p, typename Kernel::Storage& shared, int tile) {
  const int head = load_struct(shared.task.position).head_kv;
  const int left = load_struct(shared.task.keys).visible.k_len - tile * Kernel::kBlockN;
  typename Kernel::Stage& stage = shared.stages[tile % 2];
  const CacheRow* const rows = shared.rows[tile % 2];
  copy_cached<Kernel, typename Kernel::TileK>(arch::shared_address(stage.k), p.key, head, rows, left, p.key_width,
                                              p.key_alignment);
  copy_cached<Kernel, typename Kernel::TileV>(arch::shared_address(stage.v), p.value, head, rows, left, p.value_width,
                                              p.value_alignment);
}

// Hides the logits that a tree mask hides, for keys from `first_key` on.
template <class Tiles, class RowAt>
DEVICE void apply_tree_mask(typename Tiles::Accumulators& s, const KeyCache& cache, const TileRows& rows, int batch,
                            int k_len, const RowAt& row_at, int first_key) {
  const int queries = rows.count / rows.pack_gqa;
  const int column = first_key + Tiles::column(arch::opaque_thread_index()) - (k_len - queries);  // within the tree
#pragma unroll
  for (int m = 0; m < Tiles::kRowTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_at(m, half);
      if (rows.first + row >= rows.count) continue;
      const uint8_t* const mask =
          cache.tree_mask + batch * cache.tree_strides[0] + rows.query(row) * cache.tree_strides[1];
#pragma unroll
      for (int n = 0; n < Tiles::kColumnTiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = column + Tiles::column_step(n) + e;
          if (key >= 0 && key < queries && arch::load_global<uint8_t>(mask + key * cache.tree_strides[2]) == 0)
            s[m][n][2 * half + e] = -INFINITY;
        }
    }
}

// Puts what the warps have of their rows into shared memory: sums, and the shares of the output.
template <class Kernel>
DEVICE void stage_parts(typename Kernel::Storage& shared, const OnlineSoftmax<1>& softmax, const RowSums<1>& sums,
                        const typename Kernel::OutTiles::Accumulators& out) {
  using OutTiles = typename Kernel::OutTiles;
  const int warp = Kernel::key_warp();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = sums.row(0, half);
    if (arch::lane_index() % 4 != 0) continue;
    const int row = OutTiles::row(0, half);
    arch::store_shared(arch::shared_address(&shared.sums.max[warp][row]), softmax.max[0][half]);
    arch::store_shared(arch::shared_address(&shared.sums.sum[warp][row]), sum);
  }
  arch::sync_threads();  // maxima and sums are written, all operands have been read
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = OutTiles::row(0, half);
    const float max = shared.sums.max_of(row), sum = shared.sums.sum_of(row, max);
    const float weight = sum == 0.0f ? 0.0f : shared.sums.weight(warp, row, max) / sum;
    const arch::SharedAddress to = Kernel::part_of_output(shared, warp, row, OutTiles::column());
#pragma unroll
    for (int n = 0; n < OutTiles::kColumnTiles; ++n)
      arch::store_shared(to + OutTiles::column_step(n) * int(sizeof(float)),
                         arch::Words2{{arch::float_bits(out[0][n][2 * half] * weight),
                                       arch::float_bits(out[0][n][2 * half + 1] * weight)}});
  }
  arch::sync_threads();  // all parts are written
}

// Adds up the parts of an item, and stores output and lse, in the workspace if the keys are split.
template <class Kernel>
DEVICE void store_rows(const CachedAttentionParams& p, const CachePlan& plan, typename Kernel::Storage& shared,
                       int splits) {
  using T = typename Kernel::Element;
  constexpr int kThreads = Kernel::kThreads, kBlockM = Kernel::kBlockM, kFours = Kernel::kDimV / 4;
  const TileRows rows = load_struct(shared.task.rows);
  const TilePosition position = load_struct(shared.task.position);
  const int64_t split_rows = load_struct(shared.task.end).split * p.batch * p.heads * p.seqlen_q;
  const int thread = arch::opaque_thread_index();
  for (int row = thread; row < kBlockM && rows.first + row < rows.count; row += kThreads) {
    const float max = shared.sums.max_of(row), sum = shared.sums.sum_of(row, max);
    const float lse = natural_log(max, sum);
    const int64_t index = first_lse_row(p, 0, position.batch, rows.head(row)) + rows.query(row);
    arch::store_global((splits > 1 ? plan.partial_lse + split_rows : static_cast<float*>(p.lse)) + index, lse);
  }
#pragma unroll 1
  for (int i = thread; i < kBlockM * kFours; i += kThreads) {
    const int row = i / kFours, column = i % kFours * 4;
    if (rows.first + row >= rows.count || column >= p.dim_v) continue;
    float x[4] = {};
#pragma unroll
    for (int warp = 0; warp < Kernel::kKeyWarps; ++warp) {
      const auto part = arch::load_shared<arch::Words4>(Kernel::part_of_output(shared, warp, row, column));
#pragma unroll
      for (int q = 0; q < 4; ++q) x[q] += arch::bits_float(part.data[q]);
    }
    if (splits > 1) {
      const int64_t index = first_lse_row(p, 0, position.batch, rows.head(row)) + rows.query(row);
      arch::store_global(plan.partial_out + (split_rows + index) * p.dim_v + column,
                         arch::Words4{{arch::float_bits(x[0]), arch::float_bits(x[1]), arch::float_bits(x[2]),
                                       arch::float_bits(x[3])}});
    } else {
      T* const to = row_of<T>(p.out, position.batch, rows.query(row), rows.head(row));
      arch::store_global(to + column, arch::words_of<T>(x));
    }
  }
}

// The steps of an item, whose task is in shared memory.
template <class Kernel>
DEVICE void attend_cached(const CachedAttentionParams& p, const CachePlan& plan, typename Kernel::Storage& shared,
                          int splits) {
  using T = typename Kernel::Element;
  using Storage = typename Kernel::Storage;
  using LogitTiles = typename Kernel::LogitTiles;
  using OutTiles = typename Kernel::OutTiles;
  using TileQ = typename Kernel::TileQ;
  using TileK = typename Kernel::TileK;
  using WarpV = typename Kernel::WarpV;
  constexpr int kBlockN = Kernel::kBlockN;
  const arch::SharedAddress base = arch::shared_address(&shared);
  const auto row_at = [](int m, int half) { return LogitTiles::row(m, half, arch::opaque_thread_index()); };

  typename OutTiles::Accumulators out = {};
  OnlineSoftmax<1> softmax;
  RowSums<1> sums;
  const int begin = load_struct(shared.task.keys).begin, end = load_struct(shared.task.end).step;
  {
    const TileRows rows = load_struct(shared.task.rows);
    const TilePosition position = load_struct(shared.task.position);
    begin_rows(p, rows, load_struct(shared.task.end).split == 0 && Kernel::key_warp() == 0, row_at, softmax, sums);
    if (begin < end) {
      find_rows<Kernel>(p, shared, begin);
      if (begin + 1 < end) find_rows<Kernel>(p, shared, begin + 1);
      copy_lines<TileQ, Kernel::kThreads>(
          arch::shared_address(shared.q), rows.count - rows.first, int(p.dim),
          [&](int i) { return row_of<const T>(p.query, position.batch, rows.query(i), rows.head(i)); });
      arch::sync_threads();  // the rows of both tiles are known
      copy_tile<Kernel>(p, shared, begin);
    }
    arch::cp_async_commit();
  }

#pragma unroll 1
  for (int tile = begin; tile < end; ++tile) {
    arch::cp_async_wait<0>();
    arch::sync_threads();  // the tile has arrived, the one before has been read, the rows of the next are known
    // The next tile arrives while this one is multiplied.
    if (tile + 1 < end) copy_tile<Kernel>(p, shared, tile + 1);
    arch::cp_async_commit();
    const int stage = offsetof(Storage, stages) + tile % 2 * int(sizeof(typename Kernel::Stage));

    // S = Q K^T, each warp for its part of the keys.
    typename LogitTiles::Accumulators logits = {};
    multiply<TileK>(rows_of<LogitTiles, TileQ>(base, offsetof(Storage, q)),
                    columns_of<LogitTiles, TileK>(base + stage, offsetof(typename Kernel::Stage, k)), logits,
                    p.in_tf32);
    const TileRows rows = load_struct(shared.task.rows);
    const Visibility visible = load_struct(shared.task.keys).visible;
    const int first_key = tile * kBlockN;
    if (plan.modifies_logits)
      modify_logits<T, LogitTiles>(logits, p, plan, rows, load_struct(shared.task.position).batch, visible.k_len,
                                   row_at, first_key);
    // Hide the keys that a row does not see.
    if (!visible.all_visible(rows.query(0), rows.last_query(Kernel::kBlockM), first_key, first_key + kBlockN)) {
      const int origin = first_key + LogitTiles::column(arch::opaque_thread_index());
      apply_mask<LogitTiles>(logits,
                             [&](int m, int half) { return visible.keys(rows.query(row_at(m, half))).from(origin); });
    }
    if (p.cache.tree_mask != nullptr && first_key + kBlockN > visible.k_len - int(p.seqlen_q))
      apply_tree_mask<LogitTiles>(logits, p.cache, rows, load_struct(shared.task.position).batch, visible.k_len, row_at,
                                  first_key);
    // S becomes P; each warp has a maximum of its own.
    softmax.update(logits, out, sums, plan.factor);
    const int own_lines = Kernel::key_warp() * Kernel::kWarpKeys * WarpV::kLineBytes;
    // O += P V, with P from registers.
    multiply<WarpV>(operand_of<T>(logits),
                    columns_of<OutTiles, WarpV>(base + stage + own_lines, offsetof(typename Kernel::Stage, v)), out,
                    p.in_tf32);
    // Tile tile + 1 is being copied from the rows in the other stage; these were for this tile.
    if (tile + 2 < end) find_rows<Kernel>(p, shared, tile + 2);
  }
  // Add up the outputs of the warps that share rows.
  stage_parts<Kernel>(shared, softmax, sums, out);
  store_rows<Kernel>(p, plan, shared, splits);
}

// Grid: at most as many blocks as run at once.
template <class Kernel>
GLOBAL(Kernel::kThreads, Kernel::kMinBlocks)
attention_cache_sm80(GRID_CONSTANT CachedAttentionParams p, GRID_CONSTANT CachePlan plan) {
  if constexpr (!Kernel::kIsNeeded) return;
  SHARED_STORAGE(typename Kernel::Storage, shared);
  CacheItems<Kernel::kBlockN> items(p, plan);
#pragma unroll 1
  for (int index = arch::block_x();; index += arch::grid_x()) {
    CacheItem item;
    if (!items.find(index, item)) return;
    arch::sync_threads();  // the previous item's task and parts have been read
    if (arch::thread_index() == 0) task_of_item<Kernel>(p, plan, item).store(shared.task);
    arch::sync_threads();  // the task is written
    attend_cached<Kernel>(p, plan, shared, item.splits);
  }
}

// Combines the splits of all rows of sequences whose keys are split. One warp per row; no shared memory and no
// barriers.
template <class T, int block_n, int threads>
GLOBAL(threads, 1)
attention_cache_combine(GRID_CONSTANT CachedAttentionParams p, GRID_CONSTANT CachePlan plan) {
  const int64_t rows = p.batch * p.heads * p.seqlen_q;
  const int64_t row = int64_t(arch::block_x()) * (threads / arch::kWarpSize) + arch::thread_index() / arch::kWarpSize;
  if (row >= rows) return;
  const int64_t head = row / p.seqlen_q;
  const int batch = int(head / p.heads);
  const int splits = splits_of<block_n>(p, plan, cached_sequence(p, batch));
  if (splits == 1) return;
  combine_row<T>(plan, splits, rows, row, static_cast<float*>(p.lse) + row,
                 row_of<T>(p.out, batch, row % p.seqlen_q, int(head % p.heads)), int(p.dim_v));
}

}  // namespace cuda_ext::attention::sm80
