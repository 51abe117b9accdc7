// What the backward kernels of all architectures share: the work of a block, and the computation of P and dS from
// scores and dP. Scores are transposed, (keys, queries).
//
// A kernel has kBlockM (queries), kBlockN (keys), Scores (the WarpTiles of a tile of scores), and thread(): the index
// of this thread among those that have them.
#pragma once

#include "attention/plan_bwd.cuh"
#include "attention/bias.cuh"
#include "attention/block_lists.cuh"
#include "attention/mask.cuh"
#include "attention/rows.cuh"
#include "tile/results.cuh"
#include "tile/shared_struct.cuh"
#include "tile/products.cuh"

namespace cuda_ext::attention {

// A tile of queries of one head.
struct QueryTile {
  int head, index;
  bool operator==(const QueryTile&) const = default;
};

// A step of a block: its tile of queries or, with a block mask, a step of the list that the block's keys have in this
// head.
struct QueryStep {
  int head, index;
  bool operator==(const QueryStep&) const = default;
};

// The work of a block. It is in shared memory, in structs that a thread loads with one instruction.
struct BackwardTask {
  struct alignas(16) Queries {
    int batch, begin, count;  // the sequence, and its rows of the tensor
    int first_padded;         // its first row in the padded layout of the workspace
  };
  struct alignas(16) Keys {
    Visibility visible;
    int first;  // the block's first key
  };
  struct alignas(16) Head {
    int head_kv, k_begin;
  };
  // The block's steps: those of each head, one head after the other, up to `last`. `tiles` of queries see any of its
  // keys, but for a block mask.
  struct alignas(16) Steps {
    Span tiles;
    QueryStep last;
  };
  // The lists that the block's keys have in all heads.
  struct alignas(8) Lists {
    const int32_t* of_first_head = nullptr;  // null: there is no block mask
    DEVICE const int32_t* of(const AttentionParams& p, int head) const {
      return of_first_head + head * p.block_mask.queries_of_keys.head_stride;
    }
  };
  Queries queries;
  Keys keys;
  Head head;
  Steps steps;
  // Of kernels with options.
  Lists lists;
  Part part;

  template <class Kernel>
  DEVICE void store(BackwardTask& shared) const {
    store_struct(shared.queries, queries);
    store_struct(shared.keys, keys);
    store_struct(shared.head, head);
    store_struct(shared.steps, steps);
    if constexpr (Kernel::kWithOptions) {
      store_struct(shared.lists, lists);
      store_struct(shared.part, part);
    }
  }
};

// The tile of queries of a step.
template <class Kernel>
DEVICE QueryTile tile_of(const AttentionParams& p, const BackwardTask& task, const QueryStep& step) {
  if constexpr (Kernel::kWithOptions) {
    const BackwardTask::Lists lists = load_struct(task.lists);
    if (lists.of_first_head != nullptr)
      return {step.head, ListedTiles<Kernel::kBlockM>{lists.of(p, step.head)}.tile(step.index)};
  }
  return {step.head, step.index};
}

// The step after `step`, if that is not the last. Tiles of queries that see none of the keys are left out. Producers
// have few registers, so everything is read where it is used.
template <class Kernel>
DEVICE QueryStep next_step(const AttentionParams& p, const BackwardTask& task, QueryStep step) {
  if constexpr (Kernel::kWithOptions) {
    const auto listed = [&] { return ListedTiles<Kernel::kBlockM>{load_struct(task.lists).of(p, step.head)}; };
    if (load_struct(task.lists).of_first_head != nullptr) {
#pragma unroll 1
      while (step != load_struct(task.steps).last) {
        if (++step.index >= listed().steps())
          step = {step.head + 1, -1};
        else if (load_struct(task.steps).tiles.has(listed().tile(step.index)))
          break;
      }
      return step;
    }
  }
  const BackwardTask::Steps steps = load_struct(task.steps);
  return step.index + 1 < steps.tiles.end ? QueryStep{step.head, step.index + 1}
                                          : QueryStep{step.head + 1, steps.tiles.begin};
}

// The tiles of queries that see any key of the tile that begins at `first_key`.
template <class Kernel>
DEVICE Span query_tiles(const Visibility& visible, int q_len, int first_key) {
  constexpr int kBlockM = Kernel::kBlockM;
  const int past_key = first_key + Kernel::kBlockN < visible.k_len ? first_key + Kernel::kBlockN : visible.k_len;
  const int past_query = visible.query_end(past_key - 1) < q_len ? visible.query_end(past_key - 1) : q_len;
  const int begin = visible.query_begin(first_key) / kBlockM, end = (past_query + kBlockM - 1) / kBlockM;
  return {begin, end > begin ? end : begin};
}

// The task of this block, its first step, and whether it has keys and steps.
struct BackwardWork {
  BackwardTask task;
  QueryStep first;
  bool has_keys, has_steps;
};

// The first and the last step of a part [begin, end) of the steps of a group's lists, without tiles of queries that see
// none of the keys. Returns whether there are any.
template <class Kernel>
DEVICE bool find_listed_steps(const AttentionParams& p, const BackwardTask::Lists& lists, const Span& tiles,
                              int first_head, int split, int splits, QueryStep& first, QueryStep& last) {
  const auto listed = [&](int head) { return ListedTiles<Kernel::kBlockM>{lists.of(p, head)}; };
  const int group = int(p.heads / p.heads_kv);
  int all = 0;
#pragma unroll 1
  for (int head = first_head; head < first_head + group; ++head) all += listed(head).steps();
  const int part = (all + splits - 1) / splits;
  int begin = split * part, end = begin + part < all ? begin + part : all;
  const auto step_at = [&](int index) {
    int head = first_head;
    for (int steps = listed(head).steps(); index >= steps; steps = listed(head).steps()) {
      index -= steps;
      ++head;
    }
    return QueryStep{head, index};
  };
  const auto is_seen = [&](const QueryStep& step) { return tiles.has(listed(step.head).tile(step.index)); };
#pragma unroll 1
  for (; begin < end; ++begin)
    if (first = step_at(begin); is_seen(first)) break;
#pragma unroll 1
  for (; begin < end; --end)
    if (last = step_at(end - 1); is_seen(last)) break;
  return begin < end;
}

template <class Kernel>
DEVICE BackwardWork find_work(const AttentionParams& p, const BackwardPlan& plan) {
  int splits = plan.splits;
  Part part{int(arch::block_x() % plan.splits)};
  bool has_part = true;
  const TileIndex block = plan.schedule.find(arch::block_x() / plan.splits);
  const Sequence sequence(p, block.batch);
  // The first keys come first: with a causal mask they have the most work. With a block mask the longest lists do, if
  // no block waits for those of earlier keys.
  int tile = plan.schedule.tiles - 1 - block.tile;
  if constexpr (Kernel::kWithOptions)
    if (p.block_mask.key_blocks > 0 && plan.dq_semaphore == nullptr) {
      const ListPart own = ListPart::find(p.block_mask.queries_of_keys, plan.long_lists, block.batch, block.head,
                                          int(p.heads_kv), tile, Kernel::kBlockN);
      tile = own.tile;
      if (plan.splits == 1) {
        part = own.part;
        splits = own.parts;
        has_part = part.index < splits;
      }
    }
  const int first_key = tile * Kernel::kBlockN;
  const Visibility visible(p, sequence);
  const Span seen = query_tiles<Kernel>(visible, sequence.q_len, first_key);
  const bool has_keys = first_key < sequence.k_len && has_part;
  const int tiles = seen.end - seen.begin, group = int(p.heads / p.heads_kv);
  const int split_steps = (tiles * group + splits - 1) / splits;
  const int begin = part.index * split_steps;
  const int end = begin + split_steps < tiles * group ? begin + split_steps : tiles * group;
  QueryStep first{}, last{};
  bool has_steps = end > begin;
  if (has_steps) {
    const auto step_at = [&](int step) {
      return QueryStep{block.head * group + step / tiles, seen.begin + step % tiles};
    };
    first = step_at(begin);
    last = step_at(end - 1);
  }
  BackwardTask::Lists lists;
  if constexpr (Kernel::kWithOptions)
    if (p.block_mask.key_blocks > 0 && has_keys) {
      lists = {list_at(p.block_mask.queries_of_keys, block.batch, 0, first_key / kMaskBlock)};
      has_steps = find_listed_steps<Kernel>(p, lists, seen, block.head * group, part.index, splits, first, last);
    }
  return {{{block.batch, sequence.q_begin, sequence.q_len,
            first_tile<Kernel::kBlockM>(p, plan, block.batch) * Kernel::kBlockM},
           {visible, first_key},
           {block.head, sequence.k_begin},
           {seen, last},
           lists,
           part},
          first,
          has_keys,
          has_steps};
}

// Where in the workspace a block that has a part of its loop puts a gradient of its keys, one of `parts`.
// Tiles: the WarpTiles of the gradient.
template <class Kernel, class Tiles>
DEVICE float* part_of(const AttentionBackwardParams& p, const BackwardPlan& plan, const BackwardTask& task,
                      float* parts) {
  constexpr int kElements = Tiles::kRows * Tiles::kColumns;
  if constexpr (Kernel::kWithOptions)
    if (const Part part = load_struct(task.part); part.slot >= 0)
      return parts + (int64_t(part.index) * plan.long_lists.slots + part.slot) * kElements;
  const int64_t part = arch::block_x() % plan.splits;
  const int64_t head_batch = load_struct(task.queries).batch * p.heads_kv + load_struct(task.head).head_kv;
  const int64_t tile = load_struct(task.keys).first / Tiles::kRows;
  return parts + ((part * plan.schedule.head_batches + head_batch) * plan.schedule.tiles + tile) * kElements;
}

// Writes a gradient of the block's keys in `to` as float32, if that is what it must be.
// Tiles: the WarpTiles of the gradient.
template <class Kernel, class Tiles>
DEVICE bool write_float32_grad(const AttentionBackwardParams& p, const BackwardTask& task, const HeadsView& to,
                               int64_t width, const typename Tiles::Accumulators& gradient, float factor) {
  if (sizeof(typename Kernel::Element) != 2 || !p.float32_grads) return false;
  const BackwardTask::Keys keys = load_struct(task.keys);
  const BackwardTask::Head head = load_struct(task.head);
  write_float32<Tiles>(gradient, factor,
                       row_of<float>(to, load_struct(task.queries).batch, head.k_begin + keys.first, head.head_kv),
                       to.seq_stride, keys.visible.k_len - keys.first, int(width), Kernel::thread());
  return true;
}

// The first row of a tile of queries in the padded layout of the workspace.
template <class Kernel>
DEVICE int padded_row(const BackwardPlan& plan, const BackwardTask::Queries& queries, const QueryTile& tile) {
  return tile.head * plan.head_rows + queries.first_padded + tile.index * Kernel::kBlockM;
}

// How many blocks add to the sum of dQ of a tile of queries before the block of these keys. Both kinds of lists of a
// block mask must agree.
template <class Kernel>
DEVICE uint32_t earlier_blocks(const AttentionParams& p, const BackwardTask& task, const QueryTile& tile) {
  const BackwardTask::Keys keys = load_struct(task.keys);
  const int first_query = tile.index * Kernel::kBlockM;
  const Span before{keys.visible.key_begin(first_query) / Kernel::kBlockN, keys.first / Kernel::kBlockN};
  if constexpr (Kernel::kWithOptions)
    if (p.block_mask.query_blocks > 0)
      return ListedTiles<Kernel::kBlockN>{
          list_at(p.block_mask.keys_of_queries, load_struct(task.queries).batch, tile.head, first_query / kMaskBlock)}
          .count(before);
  return before.end - before.begin;
}

// A thread's bits of a step, where rows of the scores are keys.
template <class Kernel>
DEVICE RowBits<typename Kernel::Scores> row_bits(const AttentionParams& p, const BackwardTask& task,
                                                 const QueryStep& step) {
  using Listed = ListedTiles<Kernel::kBlockM>;
  const BackwardTask::Lists lists = load_struct(task.lists);
  return {p.block_mask.tiles_t,
          lists.of_first_head != nullptr ? Listed{lists.of(p, step.head)}.bits(step.index) : kFullBlock,
          load_struct(task.keys).first % int(kMaskBlock), Listed::first_row(step.index), Kernel::thread()};
}

// The other inputs of a step of the kernel with options.
struct OptionsStep {
  int64_t first_number;  // of the head's first row, for dropout
  float slope = 0.0f;
  int q_len;
  int64_t bias, grad_bias;  // offsets of the head's first elements

  DEVICE OptionsStep(const AttentionBackwardParams& p, const BackwardTask::Queries& queries, const Visibility& visible,
                     int head)
      : first_number(first_dropout_row(p, queries.begin, queries.batch, head)),
        q_len(queries.count),
        bias(bias_offset(p.bias_strides, queries.batch, head, 0, visible.k_len - q_len)),
        grad_bias(bias_offset(p.grad_bias_strides, queries.batch, head, 0, visible.k_len - q_len) +
                  p.grad_bias_origin) {
    if (p.alibi_slopes != nullptr)
      slope = arch::load_global<float>(static_cast<const float*>(p.alibi_slopes) +
                                       queries.batch * p.alibi_batch_stride + head);
  }
};

// The values of a thread's two columns.
DEVICE arch::Words2 load_columns(const float* columns) {
  return arch::load_shared<arch::Words2>(arch::shared_address(columns));
}

// Whether a kernel does more to logits and probs than to scale and to hide them.
template <class Kernel>
DEVICE bool modifies(const BackwardPlan& plan) {
  if constexpr (Kernel::kWithOptions) return plan.modifies;
  return false;
}

// Initialises accumulators with one value per column. Starting scores at -lse and dP at -delta makes P = 2^(factor
// scores) and dS = P dP.
template <class Kernel>
DEVICE void start_columns(typename Kernel::Scores::Accumulators& x, const float* columns) {
  using Tiles = typename Kernel::Scores;
  const int thread = Kernel::thread();
#pragma unroll
  for (int n = 0; n < Tiles::kColumnTiles; ++n) {
    const auto pair = load_columns(columns + Tiles::column(thread) + Tiles::column_step(n));
#pragma unroll
    for (int m = 0; m < Tiles::kRowTiles; ++m)
#pragma unroll
      for (int q = 0; q < 4; ++q) x[m][n][q] = arch::bits_float(pair.data[q % 2]);
  }
}

// Scores that a mask hides become -inf. first_key, first_query: of the tile.
template <class Kernel>
DEVICE void hide_scores(typename Kernel::Scores::Accumulators& s, const Visibility& visible, int first_key,
                        int first_query) {
  using Scores = typename Kernel::Scores;
  const int thread = Kernel::thread();
  apply_mask<Scores>(s, [&](int m, int half) {
    return visible.queries(first_key + Scores::row(m, half, thread)).from(first_query + Scores::column(thread));
  });
}

// Scores - lse become P.
template <class Kernel>
DEVICE void make_probs(typename Kernel::Scores::Accumulators& s, const BackwardPlan& plan, const Visibility& visible,
                       int first_key, int first_query, bool is_masked) {
  using Scores = typename Kernel::Scores;
  if (is_masked) hide_scores<Kernel>(s, visible, first_key, first_query);
#pragma unroll
  for (int m = 0; m < Scores::kRowTiles; ++m)
#pragma unroll
    for (int n = 0; n < Scores::kColumnTiles; ++n)
#pragma unroll
      for (int q = 0; q < 4; ++q) s[m][n][q] = arch::fast_exp2(s[m][n][q] * plan.factor);
}

// -lse in powers of two, rounded, and what rounding drops of it.
struct MinusLse {
  float high, low;
  DEVICE explicit MinusLse(float minus_lse) {
    constexpr double kLog2e = 1.4426950408889634;
    constexpr float kHigh = float(kLog2e), kLow = float(kLog2e - kHigh);
    high = minus_lse * kHigh;
    low = high == -INFINITY ? 0.0f : arch::fma(minus_lse, kLow, arch::fma(minus_lse, kHigh, -high));
  }
};

// The same of float32 scores, without lse subtracted. An error of what is subtracted is one of all probs of a row. Sums
// that start at -lse, as those of 16 bits do, are rounded at its size; the difference is rounded at its own.
template <class Kernel>
DEVICE void make_float32_probs(typename Kernel::Scores::Accumulators& s, const float* minus_lse,
                               const BackwardPlan& plan, const Visibility& visible, int first_key, int first_query,
                               bool is_masked) {
  using Scores = typename Kernel::Scores;
  const int thread = Kernel::thread();
  if (is_masked) hide_scores<Kernel>(s, visible, first_key, first_query);
#pragma unroll
  for (int n = 0; n < Scores::kColumnTiles; ++n) {
    const int column = Scores::column(thread) + Scores::column_step(n);
    const auto pair = load_columns(minus_lse + column);
    const MinusLse lse[2] = {MinusLse(arch::bits_float(pair.data[0])), MinusLse(arch::bits_float(pair.data[1]))};
#pragma unroll
    for (int m = 0; m < Scores::kRowTiles; ++m)
#pragma unroll
      for (int q = 0; q < 4; ++q)
        s[m][n][q] = arch::fast_exp2(arch::fma(s[m][n][q], plan.factor, lse[q % 2].high) + lse[q % 2].low);
  }
}

// dP - delta becomes dS.
template <int row_tiles, int column_tiles>
DEVICE void multiply_probs(float (&grad)[row_tiles][column_tiles][4],
                           const float (&probs)[row_tiles][column_tiles][4]) {
#pragma unroll
  for (int m = 0; m < row_tiles; ++m)
#pragma unroll
    for (int n = 0; n < column_tiles; ++n)
#pragma unroll
      for (int q = 0; q < 4; ++q) grad[m][n][q] *= probs[m][n][q];
}

// The score of a pair that a block mask hides, in a kernel that modifies logits. No product of queries and keys has
// this value.
constexpr float kHiddenScore = -3.4028234e38f;

// Hides the scores of a step that a block mask hides.
template <class Kernel>
DEVICE void apply_block_mask(typename Kernel::Scores::Accumulators& s, const AttentionParams& p,
                             const BackwardPlan& plan, const BackwardTask& task, const QueryStep& step) {
  if constexpr (Kernel::kWithOptions)
    apply_bits<typename Kernel::Scores>(s, row_bits<Kernel>(p, task, step), plan.modifies ? kHiddenScore : -INFINITY);
}

// The same of scores and dP without lse and delta subtracted.
template <class Kernel>
DEVICE void make_probs(typename Kernel::Scores::Accumulators& s, const float* minus_lse, const BackwardPlan& plan,
                       const Visibility& visible, int first_key, int first_query, bool is_masked) {
  using Scores = typename Kernel::Scores;
  const int thread = Kernel::thread();
  if (is_masked) hide_scores<Kernel>(s, visible, first_key, first_query);
#pragma unroll
  for (int n = 0; n < Scores::kColumnTiles; ++n) {
    const auto pair = load_columns(minus_lse + Scores::column(thread) + Scores::column_step(n));
    const float lse[2] = {arch::bits_float(pair.data[0]) * plan.factor, arch::bits_float(pair.data[1]) * plan.factor};
#pragma unroll
    for (int m = 0; m < Scores::kRowTiles; ++m)
#pragma unroll
      for (int q = 0; q < 4; ++q) s[m][n][q] = arch::fast_exp2(arch::fma(s[m][n][q], plan.factor, lse[q % 2]));
  }
}
template <class Kernel>
DEVICE void multiply_probs(typename Kernel::Scores::Accumulators& grad,
                           const typename Kernel::Scores::Accumulators& probs, const float* minus_delta) {
  using Scores = typename Kernel::Scores;
  const int thread = Kernel::thread();
#pragma unroll
  for (int n = 0; n < Scores::kColumnTiles; ++n) {
    const auto pair = load_columns(minus_delta + Scores::column(thread) + Scores::column_step(n));
#pragma unroll
    for (int m = 0; m < Scores::kRowTiles; ++m)
#pragma unroll
      for (int q = 0; q < 4; ++q) grad[m][n][q] = (grad[m][n][q] + arch::bits_float(pair.data[q % 2])) * probs[m][n][q];
  }
}

// An element of P of the kernel with options, before dropout, and the derivative of its logit.
struct OptionsProb {
  float prob, slope_of_cap;
  bool exists;  // query and key are of the sequence
};

// From a score without lse subtracted.
template <class T>
DEVICE OptionsProb prob_with_options(const AttentionBackwardParams& p, const BackwardPlan& plan,
                                     const Visibility& visible, const OptionsStep& options, float score,
                                     float minus_lse, int key, int query, bool is_masked) {
  float slope_of_cap;
  float logit = plan.logits.logit(score, slope_of_cap);
  logit -= options.slope * fabsf(float(query + (visible.k_len - options.q_len) - key));
  const bool exists = query < options.q_len && key < visible.k_len;
  if (p.bias_kind != BiasKind::kNone && exists)
    logit += bias_at<T>(p, options.bias + query * p.bias_strides[2] + key * p.bias_strides[3]);
  if (score == kHiddenScore || (is_masked && !visible.queries(key).has(query))) logit = -INFINITY;
  constexpr float kLog2e = 1.4426950408889634f;
  return {arch::fast_exp2((logit + minus_lse) * kLog2e), slope_of_cap, exists};
}

// Adds the gradient of a logit to that of the bias.
DEVICE void add_grad_bias(const AttentionBackwardParams& p, const OptionsStep& options, int key, int query, float x) {
  arch::reduce_add(static_cast<float*>(p.grad_bias) + options.grad_bias + query * p.grad_bias_strides[2] +
                       key * p.grad_bias_strides[3],
                   x);
}

// P and dS of the kernel with options, from scores and dP without lse and delta subtracted. Elements of P that dropout
// drops are 0; the others are not yet divided by 1 - dropout_p.
template <class Kernel>
DEVICE void softmax_gradient_with_options(typename Kernel::Scores::Accumulators& s,
                                          typename Kernel::Scores::Accumulators& grad, const AttentionBackwardParams& p,
                                          const BackwardPlan& plan, const Visibility& visible,
                                          const OptionsStep& options, const float* minus_lse, const float* minus_delta,
                                          int first_key, int first_query, bool is_masked) {
  using T = typename Kernel::Element;
  using Scores = typename Kernel::Scores;
  const int thread = Kernel::thread();
#pragma unroll
  for (int n = 0; n < Scores::kColumnTiles; ++n) {
    const int column = Scores::column(thread) + Scores::column_step(n);
    const auto row_lse = load_columns(minus_lse + column);
    const auto row_delta = load_columns(minus_delta + column);
#pragma unroll
    for (int m = 0; m < Scores::kRowTiles; ++m) {
      uint32_t random[4] = {};
      if (plan.dropout.drop_below > 0)
        plan.dropout.words_of_columns(options.first_number + first_query + column,
                                      first_key + Scores::row(m, 0, thread), random);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int key = first_key + Scores::row(m, q / 2, thread), query = first_query + column + q % 2;
        const OptionsProb of = prob_with_options<T>(p, plan, visible, options, s[m][n][q],
                                                    arch::bits_float(row_lse.data[q % 2]), key, query, is_masked);
        const bool kept = random[q] >= plan.dropout.drop_below;
        float& x = grad[m][n][q];
        x = of.prob * ((kept ? x * plan.kept_scale : 0.0f) + arch::bits_float(row_delta.data[q % 2]));
        if (p.grad_bias != nullptr && of.exists) add_grad_bias(p, options, key, query, x);
        x *= of.slope_of_cap;
        s[m][n][q] = kept ? of.prob : 0.0f;
      }
    }
  }
}

}  // namespace cuda_ext::attention
