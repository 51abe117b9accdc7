// What the forward kernels of all architectures do with the rows of a tile, before and after the products. Tiles: the
// WarpTiles of a product, with whole rows in a warp. row_at(m, half): this thread's row in the tile.
#pragma once

#include "attention/plan_fwd.cuh"
#include "attention/bias.cuh"
#include "attention/block_lists.cuh"
#include "attention/mask.cuh"
#include "attention/rows.cuh"
#include "tile/shared_struct.cuh"
#include "attention/softmax.cuh"

namespace cuda_ext::attention {

// The rows of a tile: query and head of each.
struct alignas(16) TileRows {
  int first;  // the tile's first row, among the sequence's (queries x pack_gqa)
  int count;  // all rows of the sequence
  int pack_gqa;
  int first_head;

  DEVICE int query(int row) const { return pack_gqa == 1 ? first + row : (first + row) / pack_gqa; }
  DEVICE int head(int row) const { return pack_gqa == 1 ? first_head : first_head + (first + row) % pack_gqa; }
  DEVICE int last_query(int rows) const { return (first + rows < count ? first + rows - 1 : count - 1) / pack_gqa; }
};

// The tiles of keys that any row of a tile sees.
template <class Kernel>
DEVICE Span key_tiles(const Visibility& visible, const TileRows& rows) {
  constexpr int kBlockN = Kernel::kBlockN;
  return {visible.key_begin(rows.query(0)) / kBlockN,
          (visible.key_end(rows.last_query(Kernel::kBlockM)) + kBlockN - 1) / kBlockN};
}

// Where a tile's rows and keys are.
struct alignas(16) TilePosition {
  int batch, q_begin, k_begin, head_kv;
};

// The work of a block: a tile of rows and, if the keys are split, a part of its keys. Kernels have it in shared memory,
// in structs that a thread loads with one instruction.
struct ForwardTask {
  // Steps are tiles of keys or, with a block mask, those of the list of the tile's queries.
  struct alignas(16) Keys {
    Visibility visible;
    int begin;  // the first step
  };
  struct alignas(8) End {
    int step;  // after the last; at most `begin`: there are no keys
    int split;
  };
  struct alignas(16) List {
    const int32_t* keys = nullptr;  // null: none
    Span seen;                      // tiles that any row sees, but for the block mask
  };
  TileRows rows;
  TilePosition position;
  Keys keys;
  End end;
  Span unmasked;  // keys that all rows see; here, because finding it takes a division, which no step should
  // Of kernels with options.
  List list;
  Part part;

  template <class Kernel>
  DEVICE static ForwardTask find(const AttentionParams& p, const ForwardPlan& plan, int tile, int split) {
    TileIndex index = plan.schedule.find(tile);
    int splits = plan.splits;
    Part part{split};
    bool has_part = true;
    if constexpr (Kernel::kWithOptions)
      if (p.block_mask.query_blocks > 0) {
        const ListPart own = list_part<Kernel>(p, plan.schedule, plan.long_lists, index);
        index.tile = own.tile;
        if (plan.splits == 1) {
          part = own.part;
          splits = own.parts;
          has_part = part.index < splits;
        }
      }
    const Sequence sequence(p, index.batch);
    const TileRows rows{index.tile * Kernel::kBlockM, has_part ? sequence.q_len * plan.pack_gqa : 0, plan.pack_gqa,
                        index.head * plan.pack_gqa};
    const Visibility visible(p, sequence);
    const Span seen = key_tiles<Kernel>(visible, rows);
    const List list = find_list<Kernel>(p, rows, index.batch, seen);
    const Span all = steps_of<Kernel>(list);
    const int split_steps = (all.end - all.begin + splits - 1) / splits;
    const int begin = all.begin + part.index * split_steps;
    const Span steps = trim<Kernel>(list, {begin, begin + split_steps < all.end ? begin + split_steps : all.end});
    const int head_kv = rows.first_head / int(p.heads / p.heads_kv);
    const Span unmasked = visible.keys_of_all(rows.query(0), rows.last_query(Kernel::kBlockM));
    return {rows,
            {index.batch, sequence.q_begin, sequence.k_begin, head_kv},
            {visible, steps.begin},
            {steps.end, part.index},
            unmasked,
            list,
            part};
  }

  // With a block mask, tiles with the longest lists come first.
  template <class Kernel>
  DEVICE static ListPart list_part(const AttentionParams& p, const Schedule& schedule, const LongLists& long_lists,
                                   const TileIndex& index) {
    return ListPart::find(p.block_mask.keys_of_queries, long_lists, index.batch, index.head, schedule.heads,
                          schedule.tiles - 1 - index.tile, Kernel::kBlockM);
  }
  // The list of a tile's queries.
  template <class Kernel>
  DEVICE static List find_list(const AttentionParams& p, const TileRows& rows, int batch, const Span& seen) {
    const bool has_list = Kernel::kWithOptions && p.block_mask.query_blocks > 0 && rows.first < rows.count;
    return {has_list ? list_at(p.block_mask.keys_of_queries, batch, rows.first_head, rows.first / kMaskBlock) : nullptr,
            seen};
  }
  template <class Kernel>
  DEVICE static Span steps_of(const List& list) {
    if constexpr (Kernel::kWithOptions)
      if (list.keys != nullptr) return {0, ListedTiles<Kernel::kBlockN>{list.keys}.steps()};
    return list.seen;
  }
  // Without the first and last steps whose tiles no row sees.
  template <class Kernel>
  DEVICE static Span trim(const List& list, Span steps) {
    if constexpr (Kernel::kWithOptions)
      if (list.keys != nullptr) {
        const ListedTiles<Kernel::kBlockN> listed{list.keys};
#pragma unroll 1
        while (steps.begin < steps.end && !list.seen.has(listed.tile(steps.begin))) ++steps.begin;
#pragma unroll 1
        while (steps.begin < steps.end && !list.seen.has(listed.tile(steps.end - 1))) --steps.end;
      }
    return steps;
  }

  // Whether the tile lies beyond its sequence, or there is no such part of it.
  DEVICE bool has_no_rows() const { return rows.first >= rows.count; }

  template <bool with_list = false>
  DEVICE void store(ForwardTask& shared) const {
    store_struct(shared.rows, rows);
    store_struct(shared.position, position);
    store_struct(shared.keys, keys);
    store_struct(shared.end, end);
    store_struct(shared.unmasked, unmasked);
    if constexpr (with_list) {
      store_struct(shared.list, list);
      store_struct(shared.part, part);
    }
  }
};

// The tile of keys of a step.
template <class Kernel>
DEVICE int tile_of(const ForwardTask& task, int step) {
  if constexpr (Kernel::kWithOptions) {
    const int32_t* const list = load_struct(task.list).keys;
    if (list != nullptr) return ListedTiles<Kernel::kBlockN>{list}.tile(step);
  }
  return step;
}

// The step after one that is not the last: `direction` is -1 or 1. Tiles that no row sees are left out.
template <class Kernel>
DEVICE int next_step(const ForwardTask& task, int step, int direction) {
  step += direction;
  if constexpr (Kernel::kWithOptions) {
    const ForwardTask::List list = load_struct(task.list);
    if (list.keys != nullptr) {
      const ListedTiles<Kernel::kBlockN> listed{list.keys};
      const Span steps{load_struct(task.keys).begin, load_struct(task.end).step};
#pragma unroll 1
      while (steps.has(step) && !list.seen.has(listed.tile(step))) step += direction;
    }
  }
  return step;
}

// A thread's bits of a step, where rows of `Tiles` are queries; all, if there is no block mask.
template <class Kernel, class Tiles>
DEVICE RowBits<Tiles> row_bits(const AttentionParams& p, const ForwardTask& task, int step, int thread) {
  using Listed = ListedTiles<Kernel::kBlockN>;
  const int32_t* const list = load_struct(task.list).keys;
  return {p.block_mask.tiles, list != nullptr ? Listed{list}.bits(step) : kFullBlock,
          load_struct(task.rows).first % int(kMaskBlock), Listed::first_row(step), thread};
}

// Hides the logits that a block mask hides.
template <class Kernel, class Tiles>
DEVICE void apply_block_mask(typename Tiles::Accumulators& s, const AttentionParams& p, const ForwardTask& task,
                             int step, int thread) {
  apply_bits<Tiles>(s, row_bits<Kernel, Tiles>(p, task, step, thread));
}

// Products of queries and keys become logits with options, for keys from `first_key` on.
template <class T, class Tiles, class RowAt>
DEVICE void modify_logits(typename Tiles::Accumulators& s, const AttentionParams& p, const ForwardPlan& plan,
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
      const int diagonal = k_len - rows.count / rows.pack_gqa;
      const bool has_bias = p.bias_kind != BiasKind::kNone && rows.first + row < rows.count;
      const int64_t bias = bias_offset(p.bias_strides, batch, head, query, diagonal);
#pragma unroll
      for (int n = 0; n < Tiles::kColumnTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = column + Tiles::column_step(n) + e;
          float& x = s[m][n][2 * half + e];
          x = plan.logits.logit(x) - slope * fabsf(float(query + diagonal - key));
        }
        if (!has_bias) continue;
        const int key = column + Tiles::column_step(n);
        float &first = s[m][n][2 * half], &second = s[m][n][2 * half + 1];
        if (plan.bias_two_keys && key + 1 < k_len) {
          add_bias_two_keys<T>(p, bias + key, first, second);
        } else {
          if (key < k_len) first += bias_at<T>(p, bias + key * p.bias_strides[3]);
          if (key + 1 < k_len) second += bias_at<T>(p, bias + (key + 1) * p.bias_strides[3]);
        }
      }
    }
}

// The state of softmax before the first key. A sink is a key before all others that has no value; the first split
// counts it, in one of the four lanes of a row.
template <int row_tiles, class RowAt>
DEVICE void begin_rows(const AttentionParams& p, const TileRows& rows, bool is_first_split, const RowAt& row_at,
                       OnlineSoftmax<row_tiles>& softmax, RowSums<row_tiles>& sums) {
#pragma unroll
  for (int m = 0; m < row_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = rows.head(row_at(m, half));
      const bool has_sink = p.sinks != nullptr && is_first_split;
      constexpr float kLog2e = 1.4426950408889634f;
      softmax.max[m][half] =
          has_sink ? arch::load_global<float>(static_cast<const float*>(p.sinks) + head) * kLog2e : -INFINITY;
      sums.of[m][half] = has_sink && arch::lane_index() % 4 == 0 ? 1.0f : 0.0f;
    }
}

// Whether finish_rows stores the output, which else is rounded and staged: parts of it and float32 of 16-bit operands.
template <class Kernel>
DEVICE bool stores_float32(const AttentionParams& p, const ForwardPlan& plan, const ForwardTask& task) {
  return (sizeof(typename Kernel::Element) == 2 && p.float32_out) || is_part<Kernel>(plan, task);
}

// The index of a tile's row among those of parts of divided lists.
template <class Kernel>
DEVICE int64_t row_of_slot(const ForwardPlan& plan, int split, int slot, int row) {
  return (int64_t(split) * plan.long_lists.slots + slot) * Kernel::kBlockM + row;
}

// Stores the output as float32. Where rows are is loaded again, because there are no registers to keep it.
template <class Kernel, class RowAt>
DEVICE void store_float32(const AttentionParams& p, const ForwardPlan& plan, const ForwardTask& task, int split,
                          int64_t split_rows, const RowAt& row_at, const typename Kernel::OutTiles::Accumulators& out) {
  using Tiles = typename Kernel::OutTiles;
  const int slot = slot_of<Kernel>(task);
#pragma unroll
  for (int m = 0; m < Tiles::kRowTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const TileRows rows = load_struct(task.rows);
      const TilePosition position = load_struct(task.position);
      const int row = row_at(m, half);
      if (rows.first + row >= rows.count) continue;
      float* to = slot < 0 ? row_of<float>(plan.float32_out, position.batch, position.q_begin + rows.query(row),
                                           rows.head(row)) +
                                 split_rows * p.dim_v
                           : plan.partial_out + row_of_slot<Kernel>(plan, split, slot, row) * p.dim_v;
      to += arch::lane_index() % 4 * 2;  // this thread's columns of each 8
#pragma unroll
      for (int n = 0; n < Tiles::kColumnTiles; ++n)
        if (n * 8 < p.dim_v)
          arch::store_global(to + n * 8, arch::Words2{{arch::float_bits(out[m][n][2 * half]),
                                                       arch::float_bits(out[m][n][2 * half + 1])}});
    }
}

// Divides the output by the sums of probs and stores the log-sum-exp of each row; if stores_float32, also the output:
// if the block has a part of the keys, for attention_combine.
template <class Kernel, class RowAt>
DEVICE void finish_rows(const AttentionParams& p, const ForwardPlan& plan, const ForwardTask& task,
                        const TileRows& rows, const TilePosition& position, int split, const RowAt& row_at,
                        const OnlineSoftmax<Kernel::OutTiles::kRowTiles>& softmax,
                        const RowSums<Kernel::OutTiles::kRowTiles>& sums,
                        typename Kernel::OutTiles::Accumulators& out) {
  using Tiles = typename Kernel::OutTiles;
  const int64_t split_rows = split * (p.cu_seqlens_q != nullptr ? p.heads * p.total_q : p.batch * p.heads * p.seqlen_q);
  const int slot = slot_of<Kernel>(task);
#pragma unroll
  for (int m = 0; m < Tiles::kRowTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_at(m, half), query = rows.query(row);
      const float sum = sums.row(m, half);
      const float lse = softmax.log_sum_exp(m, half, sum);
      const float inverse = lse == -INFINITY ? 0.0f : (Kernel::kWithOptions ? plan.kept_scale : 1.0f) / sum;
#pragma unroll
      for (int n = 0; n < Tiles::kColumnTiles; ++n) {
        out[m][n][2 * half] *= inverse;
        out[m][n][2 * half + 1] *= inverse;
      }
      if (rows.first + row >= rows.count) continue;
      const int64_t lse_index = first_lse_row(p, position.q_begin, position.batch, rows.head(row)) + query;
      if (arch::lane_index() % 4 == 0)
        arch::store_global(slot < 0 ? plan.lse + split_rows + lse_index
                                    : plan.partial_lse + row_of_slot<Kernel>(plan, split, slot, row),
                           lse);
    }
  if (stores_float32<Kernel>(p, plan, task)) store_float32<Kernel>(p, plan, task, split, split_rows, row_at, out);
}

}  // namespace cuda_ext::attention
