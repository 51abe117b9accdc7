// Attention forward on the CPU. A task is a block of up to kBlockPanels panels of queries, of the heads that share a
// key head. It visits the keys that the block can see, kBlockKeys at a time:
//   K block -> packed float      S^T = K Q^T       (keys, queries)   microkernel
//   V block -> packed float      P^T = exp(S^T - max)                along each lane
//                                O^T += V^T P^T    (dim_v, queries)  microkernel
// In bfloat16 with AMX, both products are of tiles (cpu/amx.h); V is then packed as its transpose, and P rounded.
// Sequences of a few queries use few_queries.h instead.
#pragma once

#include "attention/cpu/block_mask.h"
#include "attention/cpu/few_queries.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

constexpr int64_t kBlockKeys = 128;  // a panel's logits fit in L1; those of K and V, next to the panels, in L2
constexpr int64_t kValuePitch = kBlockKeys / 2 + kTileWords;  // of columns of pairs of values, in words
constexpr int64_t kBlockPanels = 8;  // at most; the panels of a block share each packing of K and V

// A panel of queries, and its softmax over the keys visited so far.
template <class T>
struct Panel {
  T* q_t;    // (panel_dim, width)
  T* out_t;  // (dim_v, width); divided by row_sum at the end
  T row_max[kPanelQueries<T>];
  T row_sum[kPanelQueries<T>];
  int64_t head;
  int64_t i_begin, i_end;

  int64_t vectors() const { return padded<T>(i_end - i_begin) / kLanes<T>; }
  int64_t width() const { return padded<T>(i_end - i_begin); }
};

// Whether logits are multiplied by the scale before something is added to them, not together with the maximum.
template <class T>
bool scales_first(const HeadContext<T>& head) {
  return head.softcap > 0 || head.slope != 0 || head.p.bias_kind != BiasKind::kNone || !(head.logit_factor > 0);
}

template <int Vectors, class T>
CUDA_EXT_INLINE void rescale_output(T* out_t, int64_t dim_v, const Vec<T> (&factors)[Vectors]) {
  for (int64_t d = 0; d < dim_v; ++d)
    for (int x = 0; x < Vectors; ++x, out_t += kLanes<T>) store(out_t, load(out_t) * factors[x]);
}

// out_t (dim_v, width) += V^T P^T without the terms whose prob is 0, even if the value is infinite or NaN.
template <int Vectors, class Storage, class T>
__attribute__((noinline)) void add_values_seen(Rows<const Storage> v, int64_t keys, int64_t dim_v, const T* probs,
                                               T* out_t) {
  constexpr int64_t lanes = kLanes<T>, width = Vectors * lanes;
  for (int64_t j = 0; j < keys; ++j)
    for (int64_t d = 0; d < dim_v; ++d)
      for (int x = 0; x < Vectors; ++x) {
        const Vec<T> prob = load(probs + j * width + x * lanes);
        T* const out = out_t + d * width + x * lanes;
        store(out, prob != 0 ? load(out) + prob * to_compute(v[j][d]) : load(out));
      }
}

// Updates the panel's softmax and output with keys [j_begin, j_begin + keys), which the task has packed into k and v:
// rows of keys; rows of values or, with tiles, columns of pairs of values. bits: those of the keys in a tile of a block
// mask, or null. not_finite: the values themselves, if some are infinite or NaN, else null.
template <class Storage, int Vectors, bool tiles, class T = Compute<Storage>>
void attend(const HeadContext<T>& head, Panel<T>& panel, const T* k, const T* v, int64_t j_begin, int64_t keys,
            const int32_t* bits, Rows<const Storage> not_finite, T* logits) {
  constexpr int lanes = kLanes<T>;
  constexpr int64_t width = Vectors * lanes;
  const AttentionParams& p = head.p;

  using Element = Packed<kDepth<Storage>, T>;
  const int64_t dim = panel_dim<Storage>(p.dim);
  T factor = 1;  // of logits, still to be multiplied
  if constexpr (tiles) {
    amx_product<false>(keys, width, dim, k, row_pitch<T>(dim), panel.q_t, width, logits, width);
    factor = head.logit_factor;
    if (scales_first(head)) scale_all(logits, keys * width, std::exchange(factor, T(1)));
  } else {
    panel_product<T, Vectors, false>(keys, dim, reinterpret_cast<const Element*>(k), row_pitch<T>(dim), 1,
                                     reinterpret_cast<const Element*>(panel.q_t), width, logits, width,
                                     head.logit_factor);
  }
  if (head.softcap > 0) apply_softcap<Vectors>(logits, keys, head.softcap);
  head.template apply_bias_and_mask<Vectors>(logits, panel.i_begin, panel.i_end, j_begin, keys);
  if (bits != nullptr) apply_tile<Vectors>(bits, panel.i_begin % kMaskBlock, keys, logits);
  Vec<T> new_max[Vectors], shift[Vectors], sum[Vectors], rescale[Vectors];
  for (int x = 0; x < Vectors; ++x) new_max[x] = splat(-std::numeric_limits<T>::infinity());
  for (int64_t j = 0; j < keys; ++j)
    for (int x = 0; x < Vectors; ++x) new_max[x] = max<T>(load(logits + j * width + x * lanes), new_max[x]);
  for (int x = 0; x < Vectors; ++x) new_max[x] = max<T>(new_max[x] * factor, load(panel.row_max + x * lanes));

  // row_max changes only when the maximum of some row has grown by more than kMaxLag. Until then probs stay below
  // e^kMaxLag, which costs no precision, and the output need not be rescaled.
  bool rescaled = false;
  for (int x = 0; x < Vectors; ++x) {
    const auto grown = new_max[x] > load(panel.row_max + x * lanes) + kMaxLag;
    for (int l = 0; l < lanes; ++l) rescaled |= grown[l] != 0;
  }
  for (int x = 0; x < Vectors; ++x) {
    const Vec<T> old_max = load(panel.row_max + x * lanes);
    if (!rescaled) new_max[x] = old_max;
    // A row with no visible key so far has a maximum of -inf; a shift of 0 makes its probs 0 instead of NaN.
    shift[x] = new_max[x] == -std::numeric_limits<T>::infinity() ? Vec<T>{} : new_max[x];
    rescale[x] = exp_below_88(old_max - shift[x]);
    sum[x] = Vec<T>{};
    store(panel.row_max + x * lanes, new_max[x]);
  }
  const auto make_probs = [&](int64_t j, int x) {
    const Vec<T> prob = exp_below_88(load(logits + j * width + x * lanes) * factor - shift[x]);
    sum[x] += prob;
    return prob;
  };
  int64_t j = 0;
  if constexpr (tiles) {
    if (p.dropout_p == 0 && not_finite.data == nullptr)
      for (; j + 2 <= keys; j += 2)
        for (int x = 0; x < Vectors; ++x) {
          const Vec<T> first = make_probs(j, x), second = make_probs(j + 1, x);
          store(logits + j / 2 * width + x * lanes, round_to_pairs(first, second));
        }
  }
  for (int64_t key = j; key < keys; ++key)
    for (int x = 0; x < Vectors; ++x) store(logits + (key - j / 2) * width + x * lanes, make_probs(key, x));
  for (int x = 0; x < Vectors; ++x)
    store(panel.row_sum + x * lanes, load(panel.row_sum + x * lanes) * rescale[x] + sum[x]);
  if (p.dropout_p > 0) apply_dropout<Vectors>(p, head.first_number + panel.i_begin, j_begin, keys, logits);

  if (rescaled) rescale_output<Vectors>(panel.out_t, p.dim_v, rescale);
  if (not_finite.data != nullptr) {
    add_values_seen<Vectors>(not_finite, keys, p.dim_v, logits, panel.out_t);
  } else if constexpr (tiles) {
    round_to_pairs_of_keys(logits + j / 2 * width, keys - j, width);
    const int64_t pairs = (keys + 1) / 2, whole = whole_tiles(pairs);
    std::fill(logits + pairs * width, logits + whole * width, T(0));
    amx_product<true>(p.dim_v, width, whole, v, kValuePitch, logits, width, panel.out_t, width);
  } else {
    panel_product<T, Vectors, true>(p.dim_v, keys, v, 1, row_pitch<T>(p.dim_v), logits, width, panel.out_t, width);
  }
}

// Runs tasks one after the other; a thread allocates its buffers once for all of its tasks.
template <class Storage, bool tiles>
class ForwardWorker {
  using T = Compute<Storage>;

 public:
  ForwardWorker(const AttentionParams& p, int64_t max_panels)
      : p_(p),
        scratch_(allocate<T>({{&q_t_, max_panels * q_size_},
                              {&out_t_, max_panels * out_size_},
                              {&k_block_, kBlockKeys * row_pitch<T>(panel_dim<Storage>(p.dim))},
                              {&v_block_, v_size_},
                              {&logits_, kBlockKeys * kPanelQueries<T>}})) {
    if (tiles) std::fill_n(v_block_, v_size_, T(0));  // the columns past the last stay zeros
  }

  // Panels [first, end) of sequence b and key head kv_head. Among the heads of the group, panels of the same queries
  // have consecutive indices.
  void run(int64_t b, int64_t kv_head, int64_t first, int64_t end) {
    const Sequence s(p_, b);
    const AmxTiles amx(tiles);
    start_panels(s, b, kv_head, first, end);
    if (count_ == 0) return;
    if (p_.block_mask)
      for (int64_t n = 0; n < count_; ++n)
        listed_[n].read(p_.block_mask.keys_of_queries, b, panels_[n].head, panels_[n].i_begin / kMaskBlock,
                        p_.block_mask.key_blocks);
    visit_keys(s, b, kv_head);
    for (int64_t n = 0; n < count_; ++n) store_panel(s, b, panels_[n]);
  }

 private:
  void start_panels(const Sequence& s, int64_t b, int64_t kv_head, int64_t first, int64_t end) {
    const int64_t group = p_.heads / p_.heads_kv;
    const bool has_sink = p_.sinks != nullptr;
    count_ = 0;
    for (int64_t n = first; n < end; ++n) {
      Panel<T>& panel = panels_[count_];
      panel.i_begin = n / group * kPanelQueries<T>;
      if (panel.i_begin >= s.q_len) break;
      panel.i_end = std::min(s.q_len, panel.i_begin + kPanelQueries<T>);
      panel.head = kv_head * group + n % group;
      panel.q_t = q_t_ + count_ * q_size_;
      panel.out_t = out_t_ + count_ * out_size_;
      pack_transposed(rows_of<const Storage>(p_.query, b, s.q_begin + panel.i_begin, panel.head),
                      panel.i_end - panel.i_begin, p_.dim, panel.q_t, panel.width());
      if (tiles) std::fill(panel.q_t + panel_dim<Storage>(p_.dim) * panel.width(), panel.q_t + q_size_, T(0));
      std::fill_n(panel.out_t, p_.dim_v * panel.width(), T(0));
      // A sink is a key before all others that has no value.
      std::fill_n(panel.row_max, kPanelQueries<T>,
                  has_sink ? static_cast<const T*>(p_.sinks)[panel.head] : -std::numeric_limits<T>::infinity());
      std::fill_n(panel.row_sum, kPanelQueries<T>, T(has_sink ? 1 : 0));
      ++count_;
    }
  }

  void visit_keys(const Sequence& s, int64_t b, int64_t kv_head) {
    const int64_t pitch = row_pitch<T>(panel_dim<Storage>(p_.dim));
    // Blocks of keys start at a multiple of 4, as apply_dropout requires, or of a tile of pairs; the mask hides the
    // keys this adds.
    constexpr int64_t multiple = tiles ? 2 * kTileWords : 4;
    static_assert(kBlockKeys == kMaskBlock && kMaskBlock % kPanelQueries<T> == 0);
    const bool by_lists = bool(p_.block_mask);
    const int64_t first_multiple = by_lists ? kMaskBlock : multiple;
    const Visibility visible(p_, s);
    const int64_t keys_begin = visible.key_begin(panels_[0].i_begin) / first_multiple * first_multiple,
                  keys_end = visible.key_end(panels_[count_ - 1].i_end);
    for (int64_t j = keys_begin; j < keys_end; j += kBlockKeys) {
      if (by_lists && !is_listed(j / kMaskBlock)) continue;
      const int64_t j_end = std::min(keys_end, j + kBlockKeys);
      for_pieces<Storage>(p_, p_.key, s, b, kv_head, j, j_end, [&](int64_t key, auto k, int64_t count, auto after) {
        pack_rows<kDepth<Storage>>(k, count, p_.dim, k_block_ + (key - j) * pitch, after);
      });
      pack_values(s, b, kv_head, j, j_end);
      const auto values = rows_of<const Storage>(p_.value, b, s.k_begin, kv_head);
      const bool not_finite = by_lists && any_not_finite(values.from(j), j_end - j, p_.dim_v);
      for (int64_t n = 0; n < count_; ++n) {
        Panel<T>& panel = panels_[n];
        int64_t from = std::max(j, visible.key_begin(panel.i_begin) / multiple * multiple);
        int64_t to = std::min(j_end, visible.key_end(panel.i_end));
        const int32_t* bits = nullptr;
        if (by_lists) {
          const int32_t tile = listed_[n].tile(j / kMaskBlock);
          if (tile == kNoBlock) continue;
          if (tile != kFullBlock) {
            bits = p_.block_mask.tiles_t + tile * kMaskBlock * kTileRowWords;
            const KeyRange seen =
                keys_seen(bits, bits_of_panel(panel.i_begin % kMaskBlock, panel.i_end - panel.i_begin));
            from = std::max(from, j + seen.begin / multiple * multiple);
            to = std::min(to, j + seen.end);
            bits += (from - j) * kTileRowWords;
          }
        }
        if (from >= to) continue;
        const HeadContext<T> head(p_, s, b, panel.head);
        with_vectors(panel.vectors(), [&](auto vectors) {
          const T* const v = v_block_ + (tiles ? (from - j) / 2 : (from - j) * row_pitch<T>(p_.dim_v));
          attend<Storage, decltype(vectors)::value, tiles>(
              head, panel, k_block_ + (from - j) * pitch, v, from, to - from, bits,
              not_finite ? values.from(from) : Rows<const Storage>{}, logits_);
        });
      }
    }
  }

  // Whether any panel sees the block of keys.
  bool is_listed(int64_t block) const {
    for (int64_t n = 0; n < count_; ++n)
      if (listed_[n].has(block)) return true;
    return false;
  }

  void pack_values(const Sequence& s, int64_t b, int64_t kv_head, int64_t j, int64_t j_end) {
    if constexpr (tiles) {
      const Storage* rows[kBlockKeys];
      find_rows(p_, p_.value, s, b, kv_head, j, j_end - j, rows);
      pack_transposed_pairs(rows, j_end - j, p_.dim_v, v_block_, kValuePitch);
    } else {
      for_pieces<Storage>(p_, p_.value, s, b, kv_head, j, j_end, [&](int64_t key, auto v, int64_t count, auto after) {
        pack_rows<1>(v, count, p_.dim_v, v_block_ + (key - j) * row_pitch<T>(p_.dim_v), after);
      });
    }
  }

  void store_panel(const Sequence& s, int64_t b, Panel<T>& panel) {
    T* const lse = static_cast<T*>(p_.lse) + first_row(p_, s, b, panel.head);
    for (int64_t i = panel.i_begin; i < panel.i_end; ++i) {
      T& sum = panel.row_sum[i - panel.i_begin];
      const bool empty = sum == 0;
      lse[i] = empty ? -std::numeric_limits<T>::infinity() : panel.row_max[i - panel.i_begin] + std::log(sum);
      sum = empty ? T(0) : T(1) / sum;
    }
    with_result_rows<Storage>(p_.float32_out, p_.out, b, s.q_begin + panel.i_begin, panel.head, [&](auto out) {
      unpack_transposed(panel.out_t, panel.width(), panel.row_sum, panel.i_end - panel.i_begin, p_.dim_v, out);
    });
  }

  const AttentionParams& p_;
  // Of a panel's queries and output, and of a block's values.
  const int64_t q_size_ =
                    (tiles ? whole_tiles(panel_dim<Storage>(p_.dim)) : panel_dim<Storage>(p_.dim)) * kPanelQueries<T>,
                out_size_ = (tiles ? whole_tiles(p_.dim_v) : p_.dim_v) * kPanelQueries<T>,
                v_size_ = tiles ? whole_tiles(p_.dim_v) * kValuePitch : kBlockKeys * row_pitch<T>(p_.dim_v);
  T *q_t_, *out_t_, *k_block_, *v_block_, *logits_;
  const Scratch scratch_;
  Panel<T> panels_[kBlockPanels];
  ListedBlocks listed_[kBlockPanels];  // key blocks of the panels, if there is a block mask
  int64_t count_ = 0;                  // panels of the task
};

template <class Storage>
void forward(const AttentionParams& p) {
  using T = Compute<Storage>;
  int64_t longest_q = p.seqlen_q;
  if (p.cu_seqlens_q != nullptr) {
    longest_q = 0;
    for (int64_t b = 0; b < p.batch; ++b) longest_q = std::max(longest_q, Sequence(p, b).q_len);
  }
  if (are_few_queries<Storage>(p, longest_q)) return forward_of_few_queries<Storage>(p, longest_q);

  // Blocks are small enough that every thread gets several.
  const int64_t all_panels = p.heads / p.heads_kv * ((longest_q + kPanelQueries<T> - 1) / kPanelQueries<T>);
  const int64_t wanted_blocks = num_threads() == 1 ? 1 : 4 * num_threads();
  const int64_t panels =
      std::clamp<int64_t>(planned_batch(p) * p.heads_kv * all_panels / wanted_blocks, 1, kBlockPanels);
  const int64_t blocks = (all_panels + panels - 1) / panels;

  with_tiles<Storage>([&](auto tiles) {
    run_workers(p.batch * p.heads_kv * blocks, [&](TaskQueue& queue) {
      ForwardWorker<Storage, decltype(tiles)::value> worker(p, panels);
      for (int64_t task; queue.next(task);) {
        // With a causal mask the last blocks see the most keys, so they are started first.
        const int64_t block = blocks - 1 - task / (p.batch * p.heads_kv);
        worker.run(task % (p.batch * p.heads_kv) / p.heads_kv, task % p.heads_kv, block * panels,
                   std::min(all_panels, (block + 1) * panels));
      }
    });
  });
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
