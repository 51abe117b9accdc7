// Attention backward on the CPU. A task visits the keys of one key head, kBackwardKeys at a time. For each block of
// keys it goes through the query heads of the group and their panels that can see the block, recomputes S^T, P^T and
// dP^T = V dO^T, and then forms
//   dS^T = P^T (dP^T - delta)    dV += P^T dO      dK += dS^T Q      dQ += dS K
// If there are fewer key heads than threads, the key blocks of a head are divided among several tasks ("splits"), each
// with its own dQ. These are added in task order, without atomics, so that repeated runs give the same bits.
// A bias that is broadcast over batch or heads receives its gradient from several heads. One task processes all of
// them, or some ("a share") into its own copy of the gradient if threads would be idle otherwise.
#pragma once

#include "attention/cpu/block_mask.h"
#include "attention/cpu/few_queries.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

constexpr int64_t kBackwardKeys = 256;  // this many keys share one packing of a panel
constexpr int64_t kKeyPairPitch = kBackwardKeys / 2 + kTileWords;
constexpr int64_t kMaskedBlocks = kBackwardKeys / kMaskBlock;  // key blocks of a block mask in one packing

// The keys of a packing that a panel sees. With a block mask, the tiles of these key blocks; null: all see all.
struct SeenKeys {
  int64_t begin, count;
  const int32_t* tiles[kMaskedBlocks] = {};
  // With a block mask, whether their keys and values are finite: if not, what hidden ones contribute is left out, not
  // multiplied by 0.
  bool finite = true;
};

// Keys [begin, begin + count), which are packed together.
template <class Storage>
struct KeyBlock {
  int64_t begin, count;
  Rows<const Storage> keys;
  bool finite[kMaskedBlocks];  // keys and values of these blocks; only with a block mask
};

// The buffers of one thread. _of_logits: for K Q^T and V dO^T, in elements of kDepth values. With tiles, rows and
// columns are padded to whole ones.
template <class Storage, bool tiles, class T = Compute<Storage>>
struct BackwardScratch {
  T *k, *grad_k, *grad_v;           // (kBackwardKeys, pitch or pitch_v); k in elements of kDepth keys
  T* k_t;                           // with tiles instead of k: (dim, kKeyPairPitch) of pairs of keys
  T *k_of_logits, *v_of_logits;     // (kBackwardKeys, pitch of panel_dim); k_of_logits is k if the layout is the same
  T *q, *grad_out;                  // (kPanelQueries, pitch or pitch_v), in elements of kDepth queries
  T *q_t, *grad_out_t;              // (panel_dim of dim or dim_v, width)
  T* grad_q_t;                      // with tiles: (dim, width), what one block of keys adds
  T *probs, *grad_logits, *slopes;  // (kBackwardKeys, width); slopes: 1 - tanh^2 of a softcap
  T* mask;                          // (kBackwardKeys, width), dropout
  T *scaled_rows, *products;        // what products_of_few_queries needs
  Scratch scratch;

  explicit BackwardScratch(const AttentionParams& p)
      : scratch(allocate<T>({{&k, tiles ? 0 : kBackwardKeys * row_pitch<T>(p.dim)},
                             {&k_t, tiles ? whole_tiles(p.dim) * kKeyPairPitch : 0},
                             {&k_of_logits, kSharesK ? 0 : kBackwardKeys * row_pitch<T>(panel_dim<Storage>(p.dim))},
                             {&v_of_logits, kBackwardKeys * row_pitch<T>(panel_dim<Storage>(p.dim_v))},
                             {&grad_k, kBackwardKeys * row_pitch<T>(p.dim)},
                             {&grad_v, kBackwardKeys * row_pitch<T>(p.dim_v)},
                             {&q, kPanelQueries<T> * row_pitch<T>(p.dim)},
                             {&grad_out, kPanelQueries<T> * row_pitch<T>(p.dim_v)},
                             {&q_t, kPanelQueries<T> * operand_dim(p.dim)},
                             {&grad_out_t, kPanelQueries<T> * operand_dim(p.dim_v)},
                             {&grad_q_t, tiles ? kPanelQueries<T> * whole_tiles(p.dim) : 0},
                             {&probs, kBackwardKeys * kPanelQueries<T>},
                             {&grad_logits, kBackwardKeys * kPanelQueries<T>},
                             {&slopes, p.softcap > 0 ? kBackwardKeys * kPanelQueries<T> : 0},
                             {&mask, p.dropout_p > 0 ? kBackwardKeys * kPanelQueries<T> : 0},
                             {&scaled_rows, kMostFewQueries * padded<T>(std::max(p.dim, p.dim_v))},
                             {&products, 4 * kLogitsPitch<T>}})) {
    if (kSharesK) k_of_logits = k;
    if (tiles) std::fill_n(k_t, whole_tiles(p.dim) * kKeyPairPitch, T(0));  // the rows past the last stay zeros
  }

  void pack_keys(Rows<const Storage> keys, Rows<const Storage> values, int64_t count, int64_t dim,
                 int64_t dim_v) const {
    if constexpr (tiles)
      pack_transposed_pairs(keys, count, dim, k_t, kKeyPairPitch);
    else
      pack_along_rows(keys, count, dim, k);
    if (!kSharesK) pack_rows<kDepth<Storage>>(keys, count, dim, k_of_logits);
    pack_rows<kDepth<Storage>>(values, count, dim_v, v_of_logits);
  }

  // x: the queries or their dO, as `by_dim` (panel_dim, width), and as `by_query` in elements of kDepth queries.
  static void pack_queries(Rows<const Storage> x, int64_t queries, int64_t dim, int64_t width, T* by_dim, T* by_query) {
    pack_transposed(x, queries, dim, by_dim, width);
    pack_along_rows(x, queries, dim, by_query);
    if constexpr (tiles) {
      std::fill(by_dim + panel_dim<Storage>(dim) * width, by_dim + operand_dim(dim) * width, T(0));
      const int64_t pitch = row_pitch<T>(dim);
      std::fill(by_query + (queries + 1) / 2 * pitch, by_query + width / 2 * pitch, T(0));
    }
  }

 private:
  static constexpr bool kSharesK = kDepth<Storage> == 1;
  static int64_t operand_dim(int64_t dim) {
    return tiles ? whole_tiles(panel_dim<Storage>(dim)) : panel_dim<Storage>(dim);
  }
};

// The gradient of a bias, at one head.
template <class T>
struct BiasGradient {
  T* data;  // null when not wanted
  int64_t i_stride, j_stride;

  // += the transpose of grad_logits (keys, width), summed over the dims along which the bias is broadcast.
  void add(const T* grad_logits, int64_t width, int64_t i_begin, int64_t queries, int64_t j_begin, int64_t keys) const {
    constexpr int lanes = kLanes<T>;
    T* const sums = data + i_begin * i_stride + j_begin * j_stride;
    if (i_stride == 1 && j_stride == -1) {  // a relative bias
      for (int64_t j = 0; j < keys; ++j)
        for_vectors<T>(queries, [&](int64_t i, int64_t count) {
          T* const to = sums + i - j;
          store_partial(to, load_partial(to, count) + load_partial(grad_logits + j * width + i, count), count);
        });
      return;
    }
    if (i_stride == 0) {
      Vec<T> sum{};
      for (int64_t j = 0; j < keys; ++j) {
        for_vectors<T>(queries,
                       [&](int64_t i, int64_t count) { sum += load_partial(grad_logits + j * width + i, count); });
        if (j_stride == 0 && j + 1 < keys) continue;
        sums[j * j_stride] += horizontal_sum<T>(sum);
        sum = Vec<T>{};
      }
      return;
    }
    for (int64_t i = 0; i < queries; i += lanes) {
      const int64_t rows = std::min<int64_t>(lanes, queries - i);
      if (j_stride == 0) {
        Vec<T> sum{};
        for (int64_t j = 0; j < keys; ++j) sum += load(grad_logits + j * width + i);
        for (int64_t r = 0; r < rows; ++r) sums[(i + r) * i_stride] += sum[r];
        continue;
      }
      for_vectors<T>(keys, [&](int64_t j, int64_t count) {
        Vec<T> square[lanes];
        for (int64_t c = 0; c < lanes; ++c) square[c] = c < count ? load(grad_logits + (j + c) * width + i) : Vec<T>{};
        transpose<T>(square);
        for (int64_t r = 0; r < rows; ++r) {
          T* const row = sums + (i + r) * i_stride + j;
          store_partial(row, load_partial(row, count) + square[r], count);
        }
      });
    }
  }
};

// dP, and the slopes of a softcap (or null), become 0 where the logits are hidden.
template <class T>
void clear_hidden(const T* logits, int64_t count, T* grad_probs, T* slopes) {
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    const auto hidden = load(logits + i) == -std::numeric_limits<T>::infinity();
    store(grad_probs + i, hidden ? Vec<T>{} : load(grad_probs + i));
    if (slopes != nullptr) store(slopes + i, hidden ? Vec<T>{} : load(slopes + i));
  }
}

// The logits (in scratch.probs) and dP (in scratch.grad_logits) of a block become P and dS, which is added to the
// gradient of the bias.
template <int Vectors, class Buffers, class T>
void softmax_gradient(const HeadContext<T>& head, const Buffers& scratch, const T* lse, const T* delta, int64_t i_begin,
                      int64_t i_end, int64_t j_begin, const SeenKeys& seen, const BiasGradient<T>& grad_bias) {
  constexpr int lanes = kLanes<T>;
  constexpr int64_t width = Vectors * lanes;
  const AttentionParams& p = head.p;
  const int64_t keys = seen.count;
  T* const probs = scratch.probs;
  T* const grad_logits = scratch.grad_logits;

  if (head.softcap > 0) {
    apply_softcap<Vectors>(probs, keys, head.softcap);
    for (int64_t i = 0; i < keys * width; i += lanes) {
      const Vec<T> t = load(probs + i) / head.softcap;
      store(scratch.slopes + i, T(1) - t * t);
    }
  }
  head.template apply_bias_and_mask<Vectors>(probs, i_begin, i_end, j_begin, keys);
  for (int64_t n = 0; n < kMaskedBlocks; ++n) {
    const int64_t first = std::max(seen.begin, n * kMaskBlock);
    const int64_t count = std::min(seen.begin + keys, (n + 1) * kMaskBlock) - first;
    if (seen.tiles[n] != nullptr && count > 0)
      apply_tile<Vectors>(seen.tiles[n] + first % kMaskBlock * kTileRowWords, i_begin % kMaskBlock, count,
                          probs + (first - seen.begin) * width);
  }
  if (!seen.finite) clear_hidden(probs, keys * width, grad_logits, head.softcap > 0 ? scratch.slopes : nullptr);
  if (p.dropout_p > 0) {
    std::fill_n(scratch.mask, keys * width, T(1));
    apply_dropout<Vectors>(p, head.first_number + i_begin, j_begin, keys, scratch.mask);
  }

  Vec<T> row_lse[Vectors], row_delta[Vectors];
  for (int x = 0; x < Vectors; ++x) {
    // Lanes past the last query, and rows that see no key, get probs of 0.
    T lse_or_inf[lanes], delta_or_zero[lanes];
    for (int l = 0; l < lanes; ++l) {
      const int64_t i = i_begin + x * lanes + l;
      const bool empty = i >= i_end || lse[i] == -std::numeric_limits<T>::infinity();
      lse_or_inf[l] = empty ? std::numeric_limits<T>::infinity() : lse[i];
      delta_or_zero[l] = empty ? T(0) : delta[i];
    }
    row_lse[x] = load(lse_or_inf);
    row_delta[x] = load(delta_or_zero);
  }
  // The bias is added after scale and softcap, so its gradient is taken before their derivatives are multiplied in.
  const bool in_two_steps = grad_bias.data != nullptr;
  const T scale = in_two_steps ? T(1) : T(p.scale);
  const bool by_slopes = head.softcap > 0 && !in_two_steps;
  for (int64_t j = 0; j < keys; ++j) {
    for (int x = 0; x < Vectors; ++x) {
      const int64_t offset = j * width + x * lanes;
      const Vec<T> prob = exp_below_88(load(probs + offset) - row_lse[x]);
      Vec<T> grad_prob = load(grad_logits + offset);
      Vec<T> kept_prob = prob;
      if (p.dropout_p > 0) {
        const Vec<T> mask = load(scratch.mask + offset);
        grad_prob *= mask;
        kept_prob *= mask;
      }
      Vec<T> grad_logit = prob * (grad_prob - row_delta[x]) * scale;
      if (by_slopes) grad_logit *= load(scratch.slopes + offset);
      store(probs + offset, kept_prob);
      store(grad_logits + offset, grad_logit);
    }
  }
  if (!in_two_steps) return;
  grad_bias.add(grad_logits, width, i_begin, i_end - i_begin, j_begin, keys);
  for (int64_t offset = 0; offset < keys * width; offset += lanes) {
    Vec<T> grad_logit = load(grad_logits + offset) * T(p.scale);
    if (head.softcap > 0) grad_logit *= load(scratch.slopes + offset);
    store(grad_logits + offset, grad_logit);
  }
}

// delta = rowsum(dO o O) - dlse, which the softmax gradient subtracts from every dP of a row. Also the gradient of the
// sinks, -sum over rows of exp(sink - lse) delta, because a sink has a logit but no value.
template <class Storage>
void row_deltas(const AttentionBackwardParams& p, Compute<Storage>* delta) {
  using T = Compute<Storage>;
  // One task adds up the gradient of a sink. Without sinks, sequences are tasks, too.
  const bool over_batch = p.grad_sinks != nullptr;
  run_workers(over_batch ? p.heads : p.heads * p.batch, [&](TaskQueue& queue) {
    for (int64_t task; queue.next(task);) {
      const int64_t h = task % p.heads;
      const int64_t first = over_batch ? 0 : task / p.heads, last = over_batch ? p.batch : first + 1;
      double sink_gradient = 0;
      for (int64_t b = first; b < last; ++b) {
        const Sequence s(p, b);
        const auto out = rows_of<const Storage>(p.out, b, s.q_begin, h),
                   grad_out = rows_of<const Storage>(p.grad_out, b, s.q_begin, h);
        const int64_t row = first_row(p, s, b, h);
        const T* lse = static_cast<const T*>(p.lse) + row;
        for (int64_t i = 0; i < s.q_len; ++i) {
          Vec<T> sum{};
          for_vectors<T>(p.dim_v, [&](int64_t d, int64_t count) {
            sum = multiply_add(sum, load_partial(out[i] + d, count), load_partial(grad_out[i] + d, count));
          });
          T value = horizontal_sum<T>(sum);
          if (p.grad_lse != nullptr) value -= static_cast<const T*>(p.grad_lse)[row + i];
          delta[row + i] = value;
          if (p.grad_sinks != nullptr && lse[i] != -std::numeric_limits<T>::infinity())
            sink_gradient -= std::exp(static_cast<const T*>(p.sinks)[h] - lse[i]) * value;
        }
      }
      if (p.grad_sinks != nullptr) static_cast<T*>(p.grad_sinks)[h] = T(sink_gradient);
    }
  });
}

// The key heads of all sequences of a call, in groups of equal size, such that those of different groups add to
// different elements of the bias's gradient. Without a broadcast bias each is its own group.
struct HeadGroups {
  int64_t groups, members;

  explicit HeadGroups(const AttentionBackwardParams& p) {
    const bool over_batch = p.grad_bias != nullptr && p.grad_bias_strides[0] == 0;
    const bool over_heads = p.grad_bias != nullptr && p.grad_bias_strides[1] == 0;
    const int64_t member_batch = over_batch ? p.batch : 1;
    member_heads_ = over_heads ? p.heads_kv : 1;
    group_heads_ = p.heads_kv / member_heads_;
    members = member_batch * member_heads_;
    groups = members == 0 ? 0 : p.batch * p.heads_kv / members;
  }
  int64_t batch_of(int64_t group, int64_t member) const { return group / group_heads_ + member / member_heads_; }
  int64_t head_of(int64_t group, int64_t member) const { return group % group_heads_ + member % member_heads_; }

 private:
  int64_t group_heads_, member_heads_;  // heads among the groups, and among the members of one
};

// One call of backward: how its work is divided among tasks, and the buffers that they share.
template <class Storage, bool tiles>
class BackwardPass {
  using T = Compute<Storage>;
  using Buffers = BackwardScratch<Storage, tiles>;

 public:
  explicit BackwardPass(const AttentionBackwardParams& p)
      : p_(p), heads_(p), delta_scratch_(allocate<T>({{&delta_, total_rows(p)}})) {
    int64_t longest_k = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
      longest_q_ = std::max(longest_q_, Sequence(p, b).q_len);
      longest_k = std::max(longest_k, Sequence(p, b).k_len);
    }
    few_queries_ = kDepth<Storage> == 1 && are_few_queries<Storage>(p, longest_q_);
    // A task processes a share of a group's members and a split of their keys. Each share beyond the first needs a copy
    // of the bias's gradient, each split beyond the first a dQ. So there are only as many as the threads need, and the
    // one that takes less memory is increased first.
    const int64_t key_blocks = std::max<int64_t>(1, (longest_k + kBackwardKeys - 1) / kBackwardKeys);
    const auto enough_for_threads = [](int64_t tasks, int64_t most) {
      return std::clamp<int64_t>((num_threads() + tasks - 1) / std::max<int64_t>(1, tasks), 1,
                                 std::max<int64_t>(1, most));
    };
    const bool bias_is_larger = p.grad_bias_elements > total_rows(p) * pitch_;
    shares_ = bias_is_larger ? 1 : enough_for_threads(heads_.groups, heads_.members);
    splits_ = enough_for_threads(heads_.groups * shares_, key_blocks);
    if (bias_is_larger) shares_ = enough_for_threads(heads_.groups * splits_, heads_.members);
    in_place_ = splits_ == 1 && (std::is_same_v<Storage, T> || p.float32_grads) && p.dim % kLanes<T> == 0;
    // Shares add to the same elements; so do splits, if the bias is broadcast over keys or relative (and then small).
    splits_share_bias_ = p.grad_bias != nullptr && p.grad_bias_strides[3] <= 0;
    bias_parts_ = p.grad_bias == nullptr ? 1 : shares_ * (splits_share_bias_ ? splits_ : 1);
  }

  void run() {
    row_deltas<Storage>(p_, delta_);
    const Scratch split_scratch = allocate<T>({{&split_grad_q_, splits_ > 1 ? splits_ * total_rows(p_) * pitch_ : 0}});
    const Scratch bias_scratch = allocate<T>({{&other_bias_parts_, (bias_parts_ - 1) * p_.grad_bias_elements}});
    parallel_for((bias_parts_ - 1) * p_.grad_bias_elements, kGrain, [&](int64_t begin, int64_t end) {
      std::fill(other_bias_parts_ + begin, other_bias_parts_ + end, T(0));
    });

    run_workers(heads_.groups * shares_ * splits_, [&](TaskQueue& queue) {
      const Buffers scratch(p_);
      const AmxTiles amx(tiles);
      T* head_grad_q;
      const int64_t group = p_.heads / p_.heads_kv;
      const Scratch head_scratch =
          allocate<T>({{&head_grad_q, splits_ == 1 && !in_place_ ? group * longest_q_ * pitch_ : 0}});
      for (int64_t task; queue.next(task);) {
        const int64_t split = task % splits_, share = task / splits_ % shares_, index = task / splits_ / shares_;
        T* const grad_bias = bias_part(splits_share_bias_ ? share * splits_ + split : share);
        const int64_t end = (share + 1) * heads_.members / shares_;
        for (int64_t member = share * heads_.members / shares_; member < end; ++member)
          run_key_head(
              {scratch, head_grad_q, heads_.batch_of(index, member), heads_.head_of(index, member), split, grad_bias});
      }
    });
    if (splits_ > 1) add_splits();
    if (bias_parts_ > 1) add_bias_parts();
  }

 private:
  static constexpr int64_t kGrain = 16384;  // elements of the bias's gradient that are worth a thread

  // One key head of one sequence, in one split of its keys.
  struct KeyHead {
    const Buffers& scratch;
    T* head_grad_q;  // of this thread
    int64_t b, kv_head, split;
    T* grad_bias;
  };

  T* bias_part(int64_t n) const {
    return n == 0 ? static_cast<T*>(p_.grad_bias) : other_bias_parts_ + (n - 1) * p_.grad_bias_elements;
  }

  // Where dQ of query head h is summed: in the result, if there is one split and type and row length permit; else in
  // scratch.
  Rows<T> grad_q_of(const KeyHead& key_head, const Sequence& s, int64_t h) const {
    if (in_place_) return rows_of<T>(p_.grad_query, key_head.b, s.q_begin, h);
    if (splits_ == 1) return {key_head.head_grad_q + h % (p_.heads / p_.heads_kv) * s.q_len * pitch_, pitch_};
    return {split_grad_q_ + (key_head.split * total_rows(p_) + first_row(p_, s, key_head.b, h)) * pitch_, pitch_};
  }

  // Stores n rows of a gradient, (n, row_pitch(dim)) of sums.
  void store_gradient(const T* sums, int64_t n, int64_t dim, const HeadsView& to, int64_t b, int64_t begin,
                      int64_t head) const {
    with_result_rows<Storage>(p_.float32_grads, to, b, begin, head,
                              [&](auto rows) { unpack_rows(sums, n, dim, rows); });
  }

  void run_key_head(const KeyHead& key_head) const {
    const Sequence s(p_, key_head.b);
    const auto k = rows_of<const Storage>(p_.key, key_head.b, s.k_begin, key_head.kv_head),
               v = rows_of<const Storage>(p_.value, key_head.b, s.k_begin, key_head.kv_head);
    const Buffers& scratch = key_head.scratch;
    const int64_t group = p_.heads / p_.heads_kv, h_begin = key_head.kv_head * group, h_end = h_begin + group;
    for (int64_t h = h_begin; h < h_end; ++h)
      for (int64_t i = 0; i < s.q_len; ++i) std::fill_n(grad_q_of(key_head, s, h)[i], padded<T>(p_.dim), T(0));

    static_assert(kMaskBlock % kPanelQueries<T> == 0);
    for (int64_t j = key_head.split * kBackwardKeys; j < s.k_len; j += splits_ * kBackwardKeys) {
      const int64_t keys = std::min(kBackwardKeys, s.k_len - j);
      scratch.pack_keys(k.from(j), v.from(j), keys, p_.dim, p_.dim_v);
      std::fill_n(scratch.grad_k, keys * pitch_, T(0));
      std::fill_n(scratch.grad_v, keys * pitch_v_, T(0));
      const KeyBlock<Storage> block = key_block(j, keys, k.from(j), v.from(j));
      for (int64_t h = h_begin; h < h_end; ++h) visit_queries(key_head, s, h, block);
      store_gradient(scratch.grad_k, keys, p_.dim, p_.grad_key, key_head.b, s.k_begin + j, key_head.kv_head);
      store_gradient(scratch.grad_v, keys, p_.dim_v, p_.grad_value, key_head.b, s.k_begin + j, key_head.kv_head);
    }
    if (splits_ == 1 && !in_place_) {
      for (int64_t h = h_begin; h < h_end; ++h)
        store_gradient(grad_q_of(key_head, s, h).data, s.q_len, p_.dim, p_.grad_query, key_head.b, s.q_begin, h);
    }
  }

  KeyBlock<Storage> key_block(int64_t begin, int64_t count, Rows<const Storage> k, Rows<const Storage> v) const {
    KeyBlock<Storage> block{begin, count, k, {}};
    for (int64_t n = 0; p_.block_mask && n < kMaskedBlocks; ++n) {
      const int64_t first = n * kMaskBlock, keys = std::clamp<int64_t>(count - first, 0, kMaskBlock);
      block.finite[n] = !any_not_finite(k.from(first), keys, p_.dim) && !any_not_finite(v.from(first), keys, p_.dim_v);
    }
    return block;
  }

  // K Q^T or V dO^T, times factor: out (seen keys, width); a: the rows of all packed keys.
  static void product_of_logits(const SeenKeys& seen, int64_t dim, const T* a, const T* b, int64_t width, T* out,
                                T factor) {
    const int64_t steps = panel_dim<Storage>(dim), keys = seen.count;
    a += seen.begin * row_pitch<T>(steps);
    if constexpr (tiles) {
      amx_product<false>(keys, width, steps, a, row_pitch<T>(steps), b, width, out, width);
      if (factor != 1) scale_all(out, keys * width, factor);
    } else {
      using Element = Packed<kDepth<Storage>, T>;
      block_product<false>(keys, width / kLanes<T>, steps, reinterpret_cast<const Element*>(a), row_pitch<T>(steps), 1,
                           reinterpret_cast<const Element*>(b), width, out, width, factor);
    }
  }

  // Adds what queries of head h and a block of keys, which are packed in scratch, contribute to all gradients.
  void visit_queries(const KeyHead& key_head, const Sequence& s, int64_t h, const KeyBlock<Storage>& block) const {
    constexpr int lanes = kLanes<T>;
    const int64_t j = block.begin, keys = block.count;
    const Buffers& scratch = key_head.scratch;
    const HeadContext<T> head(p_, s, key_head.b, h);
    const auto q = rows_of<const Storage>(p_.query, key_head.b, s.q_begin, h),
               grad_out = rows_of<const Storage>(p_.grad_out, key_head.b, s.q_begin, h);
    const auto grad_q = grad_q_of(key_head, s, h);
    const BiasGradient<T> grad_bias{key_head.grad_bias == nullptr
                                        ? nullptr
                                        : key_head.grad_bias + p_.grad_bias_origin +
                                              bias_offset(p_.grad_bias_strides, key_head.b, h, 0, s.k_len - s.q_len),
                                    p_.grad_bias_strides[2], p_.grad_bias_strides[3]};
    const T* lse = static_cast<const T*>(p_.lse) + head.first_row;
    ListedBlocks listed[kMaskedBlocks];
    const BlockMask& mask = p_.block_mask;
    for (int64_t n = 0; mask && n < kMaskedBlocks; ++n) {
      if (n * kMaskBlock < keys)
        listed[n].read(mask.queries_of_keys, key_head.b, h, j / kMaskBlock + n, mask.query_blocks);
      else
        listed[n].clear(mask.query_blocks);
    }
    // Queries that see any key of the block, from the start of a panel.
    const int64_t i_first =
        std::clamp<int64_t>(j - head.visible.high, 0, s.q_len) / kPanelQueries<T> * kPanelQueries<T>;
    const int64_t i_last = std::clamp<int64_t>(j + keys - head.visible.low, 0, s.q_len);
    for (int64_t i = i_first; i < i_last; i += kPanelQueries<T>) {
      const int64_t i_end = std::min(s.q_len, i + kPanelQueries<T>), queries = i_end - i;
      const SeenKeys seen = mask ? seen_keys(listed, block, i, queries) : SeenKeys{0, keys};
      if (seen.count == 0) continue;
      const int64_t width = tiles ? 2 * whole_tiles((queries + 1) / 2) : padded<T>(queries);
      scratch.pack_queries(q.from(i), queries, p_.dim, width, scratch.q_t, scratch.q);
      scratch.pack_queries(grad_out.from(i), queries, p_.dim_v, width, scratch.grad_out_t, scratch.grad_out);

      if (few_queries_) {
        // Not with a block mask: all keys.
        products_of_few_queries(q.from(i), queries, p_.dim, head.logit_factor, scratch.k_of_logits, keys, width,
                                scratch.scaled_rows, scratch.products, scratch.probs);
        products_of_few_queries(grad_out.from(i), queries, p_.dim_v, T(1), scratch.v_of_logits, keys, width,
                                scratch.scaled_rows, scratch.products, scratch.grad_logits);
      } else {
        product_of_logits(seen, p_.dim, scratch.k_of_logits, scratch.q_t, width, scratch.probs, head.logit_factor);
        product_of_logits(seen, p_.dim_v, scratch.v_of_logits, scratch.grad_out_t, width, scratch.grad_logits, T(1));
      }
      with_vectors(width / lanes, [&](auto count) {
        softmax_gradient<decltype(count)::value>(head, scratch, lse, delta_ + head.first_row, i, i_end, j + seen.begin,
                                                 seen, grad_bias);
      });
      if (!seen.finite) add_keys_seen(block.keys.from(seen.begin), seen.count, queries, width, scratch, grad_q.from(i));
      add_products_of_probs(seen, queries, width, scratch, grad_q[i], grad_q.stride);
    }
  }

  // Those of a block of keys from the first to the last that a panel sees.
  SeenKeys seen_keys(const ListedBlocks (&listed)[kMaskedBlocks], const KeyBlock<Storage>& block, int64_t i,
                     int64_t queries) const {
    // Of whole tiles, which add to all of their rows of dK and dV.
    constexpr int64_t kMultiple = 2 * kTileWords;
    SeenKeys seen{0, 0};
    for (int64_t n = 0; n < kMaskedBlocks; ++n) {
      const int32_t tile = listed[n].tile(i / kMaskBlock);
      if (tile == kNoBlock) continue;
      KeyRange range{0, kMaskBlock};
      if (tile != kFullBlock) {
        seen.tiles[n] = p_.block_mask.tiles_t + tile * kMaskBlock * kTileRowWords;
        range = keys_seen(seen.tiles[n], bits_of_panel(i % kMaskBlock, queries));
      }
      const int64_t begin = n * kMaskBlock + range.begin / kMultiple * kMultiple;
      const int64_t whole_end = (range.end + kMultiple - 1) / kMultiple * kMultiple;
      const int64_t end = std::min(block.count, n * kMaskBlock + whole_end);
      if (begin >= end) continue;
      if (seen.count == 0) seen.begin = begin;
      seen.finite &= block.finite[n];
      seen.count = end - seen.begin;
    }
    return seen;
  }

  // dQ += dS K without the terms whose dS is 0.
  void add_keys_seen(Rows<const Storage> k, int64_t keys, int64_t queries, int64_t width, const Buffers& scratch,
                     Rows<T> grad_q) const {
    for (int64_t j = 0; j < keys; ++j)
      for (int64_t i = 0; i < queries; ++i)
        if (const T grad_logit = scratch.grad_logits[j * width + i]; grad_logit != 0)
          for (int64_t d = 0; d < p_.dim; ++d) grad_q[i][d] += grad_logit * to_compute(k[j][d]);
  }

  // dV += P^T dO, dK += dS^T Q and, if the keys are finite, dQ += dS K, from scratch.probs and scratch.grad_logits,
  // which it overwrites.
  void add_products_of_probs(const SeenKeys& seen, int64_t queries, int64_t width, const Buffers& scratch, T* grad_q,
                             int64_t grad_q_stride) const {
    constexpr int depth = kDepth<Storage>;
    const int64_t keys = seen.count;
    T* const probs = scratch.probs;
    T* const grad_logits = scratch.grad_logits;
    if constexpr (depth == 2) round_to_pairs_of_queries(probs, keys * width, probs);
    add_product_over_queries(keys, p_.dim_v, queries, probs, width, scratch.grad_out,
                             scratch.grad_v + seen.begin * pitch_v_);
    const T* by_query = grad_logits;
    if constexpr (depth == 2) {
      round_to_pairs_of_queries(grad_logits, keys * width, probs);
      by_query = probs;
      round_to_pairs_of_keys(grad_logits, keys, width);
    }
    add_product_over_queries(keys, p_.dim, queries, by_query, width, scratch.q, scratch.grad_k + seen.begin * pitch_);
    if (!seen.finite) return;
    const int64_t key_steps = (keys + depth - 1) / depth;
    if constexpr (tiles) {
      // Transposed, because grad_logits has the layout of a second operand.
      const int64_t whole = whole_tiles(key_steps);
      std::fill(grad_logits + key_steps * width, grad_logits + whole * width, T(0));
      amx_product<false>(p_.dim, width, whole, scratch.k_t + seen.begin / depth, kKeyPairPitch, grad_logits, width,
                         scratch.grad_q_t, width);
      add_transposed(scratch.grad_q_t, width, queries, p_.dim, grad_q, grad_q_stride);
    } else {
      using Element = Packed<depth, T>;
      block_product<true>(
          queries, padded<T>(p_.dim) / kLanes<T>, key_steps, reinterpret_cast<const Element*>(grad_logits), 1, width,
          reinterpret_cast<const Element*>(scratch.k + seen.begin / depth * pitch_), pitch_, grad_q, grad_q_stride);
    }
  }

  // sum (keys, dim) += a (keys, width) @ b (queries, dim), of elements of kDepth queries.
  static void add_product_over_queries(int64_t keys, int64_t dim, int64_t queries, const T* a, int64_t width,
                                       const T* b, T* sum) {
    constexpr int depth = kDepth<Storage>;
    const int64_t pitch = row_pitch<T>(dim);
    if constexpr (tiles) {
      amx_product<true>(keys, dim, width / depth, a, width / depth, b, pitch, sum, pitch);
    } else {
      using Element = Packed<depth, T>;
      block_product<true>(keys, padded<T>(dim) / kLanes<T>, (queries + depth - 1) / depth,
                          reinterpret_cast<const Element*>(a), width / depth, 1, reinterpret_cast<const Element*>(b),
                          pitch, sum, pitch);
    }
  }

  // dQ = the sum of the splits' dQ, in their order.
  void add_splits() const {
    run_workers(p_.batch * p_.heads, [&](TaskQueue& queue) {
      for (int64_t task; queue.next(task);) {
        const int64_t b = task / p_.heads, h = task % p_.heads;
        const Sequence s(p_, b);
        T* sum = split_grad_q_ + first_row(p_, s, b, h) * pitch_;
        for (int64_t split = 1; split < splits_; ++split) {
          const T* part = sum + split * total_rows(p_) * pitch_;
          for (int64_t i = 0; i < s.q_len * pitch_; i += kLanes<T>) store(sum + i, load(sum + i) + load(part + i));
        }
        store_gradient(sum, s.q_len, p_.dim, p_.grad_query, b, s.q_begin, h);
      }
    });
  }

  void add_bias_parts() const {
    parallel_for(p_.grad_bias_elements, kGrain, [&](int64_t begin, int64_t end) {
      T* const sum = bias_part(0);
      for (int64_t n = 1; n < bias_parts_; ++n) {
        const T* part = bias_part(n);
        for (int64_t e = begin; e < end; ++e) sum[e] += part[e];
      }
    });
  }

  const AttentionBackwardParams& p_;
  const int64_t pitch_ = row_pitch<T>(p_.dim), pitch_v_ = row_pitch<T>(p_.dim_v);
  const HeadGroups heads_;
  int64_t longest_q_ = 0;
  bool few_queries_;  // as in few_queries.h: forward computed the logits there
  int64_t shares_, splits_;
  bool in_place_;           // dQ is summed in the result
  bool splits_share_bias_;  // all splits add to the same elements of the bias's gradient
  int64_t bias_parts_;      // copies of the bias's gradient, the result included
  T* delta_;
  const Scratch delta_scratch_;
  T* split_grad_q_ = nullptr;      // (splits, rows, pitch) if there are several splits
  T* other_bias_parts_ = nullptr;  // all but the first, which is the result
};

template <class Storage>
void run_backward(const AttentionBackwardParams& p) {
  with_tiles<Storage>([&](auto tiles) { BackwardPass<Storage, decltype(tiles)::value>(p).run(); });
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
