// Backward of one panel of queries and one block of keys on the CPU: buffers, the gradient of the softmax and that of
// a bias. attention_backward_cpu.h visits panels and blocks.
#pragma once

#include "attention/attention_logits_cpu.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

constexpr int64_t kBackwardKeys = 256;  // this many keys share one packing of a panel
constexpr int64_t kKeyPairPitch = kBackwardKeys / 2 + kTileWords;

// The buffers of one thread. _of_logits: for K Q^T and V dO^T, in elements of kDepth values. With tiles, rows and
// columns are padded to whole ones.
template <class Storage, bool tiles, class T = Compute<Storage>>
struct BackwardScratch {
  T *k, *grad_k, *grad_v;        // (kBackwardKeys, pitch or pitch_v); k in elements of kDepth keys
  T* k_t;                        // with tiles instead of k: (dim, kKeyPairPitch) of pairs of keys
  T *k_of_logits, *v_of_logits;  // (kBackwardKeys, pitch of packed_dim); k_of_logits is k if the layout is the same
  T *q, *grad_out;               // (kPanelQueries, pitch or pitch_v), in elements of kDepth queries
  T *q_t, *grad_out_t;           // (packed_dim of dim or dim_v, width)
  T* grad_q_t;                   // with tiles: (dim, width), what one block of keys adds
  T *weights, *grad_logits, *slopes;  // (kBackwardKeys, width); slopes: 1 - tanh^2 of a softcap
  T* mask;                            // (kBackwardKeys, width), dropout
  Scratch scratch;

  explicit BackwardScratch(const AttentionParams& p)
      : scratch(allocate<T>({{&k, tiles ? 0 : kBackwardKeys * row_pitch<T>(p.dim)},
                             {&k_t, tiles ? whole_tiles(p.dim) * kKeyPairPitch : 0},
                             {&k_of_logits, kSharesK ? 0 : kBackwardKeys * row_pitch<T>(packed_dim<Storage>(p.dim))},
                             {&v_of_logits, kBackwardKeys * row_pitch<T>(packed_dim<Storage>(p.dim_v))},
                             {&grad_k, kBackwardKeys * row_pitch<T>(p.dim)},
                             {&grad_v, kBackwardKeys * row_pitch<T>(p.dim_v)},
                             {&q, kPanelQueries<T> * row_pitch<T>(p.dim)},
                             {&grad_out, kPanelQueries<T> * row_pitch<T>(p.dim_v)},
                             {&q_t, kPanelQueries<T> * packed(p.dim)},
                             {&grad_out_t, kPanelQueries<T> * packed(p.dim_v)},
                             {&grad_q_t, tiles ? kPanelQueries<T> * whole_tiles(p.dim) : 0},
                             {&weights, kBackwardKeys * kPanelQueries<T>},
                             {&grad_logits, kBackwardKeys * kPanelQueries<T>},
                             {&slopes, p.softcap > 0 ? kBackwardKeys * kPanelQueries<T> : 0},
                             {&mask, p.dropout_p > 0 ? kBackwardKeys * kPanelQueries<T> : 0}})) {
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

  // x: the queries or their dO, as `by_dim` (packed_dim, width), and as `by_query` in elements of kDepth queries.
  static void pack_queries(Rows<const Storage> x, int64_t queries, int64_t dim, int64_t width, T* by_dim, T* by_query) {
    pack_transposed(x, queries, dim, by_dim, width);
    pack_along_rows(x, queries, dim, by_query);
    if constexpr (tiles) {
      std::fill(by_dim + packed_dim<Storage>(dim) * width, by_dim + packed(dim) * width, T(0));
      const int64_t pitch = row_pitch<T>(dim);
      std::fill(by_query + (queries + 1) / 2 * pitch, by_query + width / 2 * pitch, T(0));
    }
  }

 private:
  static constexpr bool kSharesK = kDepth<Storage> == 1;
  static int64_t packed(int64_t dim) {
    return tiles ? whole_tiles(packed_dim<Storage>(dim)) : packed_dim<Storage>(dim);
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

// Turns the logits (in scratch.weights) and dP (in scratch.grad_logits) of a block into P and dS, and adds to the
// gradient of the bias.
template <int Vectors, class Buffers, class T>
void softmax_gradient(const HeadContext<T>& head, const Buffers& scratch, const T* lse, const T* delta, int64_t i_begin,
                      int64_t i_end, int64_t j_begin, int64_t keys, const BiasGradient<T>& grad_bias) {
  constexpr int lanes = kLanes<T>;
  constexpr int64_t width = Vectors * lanes;
  const AttentionParams& p = head.p;
  T* const weights = scratch.weights;
  T* const grad_logits = scratch.grad_logits;

  if (head.softcap > 0) {
    apply_softcap<Vectors>(weights, keys, head.softcap);
    for (int64_t i = 0; i < keys * width; i += lanes) {
      const Vec<T> t = load(weights + i) / head.softcap;
      store(scratch.slopes + i, T(1) - t * t);
    }
  }
  head.template apply_bias_and_mask<Vectors>(weights, i_begin, i_end, j_begin, keys);
  if (p.dropout_p > 0) {
    std::fill_n(scratch.mask, keys * width, T(1));
    apply_dropout<Vectors>(p, head.first_row + i_begin, j_begin, keys, scratch.mask);
  }

  Vec<T> row_lse[Vectors], row_delta[Vectors];
  for (int x = 0; x < Vectors; ++x) {
    // Lanes past the last query, and rows that see no key, get weights of 0.
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
      const int64_t at = j * width + x * lanes;
      const Vec<T> weight = exp_below_88(load(weights + at) - row_lse[x]);
      Vec<T> grad_weight = load(grad_logits + at);
      Vec<T> kept_weight = weight;
      if (p.dropout_p > 0) {
        const Vec<T> mask = load(scratch.mask + at);
        grad_weight *= mask;
        kept_weight *= mask;
      }
      Vec<T> grad_logit = weight * (grad_weight - row_delta[x]) * scale;
      if (by_slopes) grad_logit *= load(scratch.slopes + at);
      store(weights + at, kept_weight);
      store(grad_logits + at, grad_logit);
    }
  }
  if (!in_two_steps) return;
  grad_bias.add(grad_logits, width, i_begin, i_end - i_begin, j_begin, keys);
  for (int64_t at = 0; at < keys * width; at += lanes) {
    Vec<T> grad_logit = load(grad_logits + at) * T(p.scale);
    if (head.softcap > 0) grad_logit *= load(scratch.slopes + at);
    store(grad_logits + at, grad_logit);
  }
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
