// The logits of a panel of queries, (keys, Vectors * lanes): softcap, bias, mask, ALiBi, causal, window and dropout.
#pragma once

#include "attention/cpu/panels.h"
#include "base/philox.h"
#include "cpu/math.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

template <class T>
void scale_all(T* values, int64_t count, T factor) {
  for (int64_t i = 0; i < count; i += kLanes<T>) store(values + i, load(values + i) * factor);
}

// logits (keys, Vectors * lanes) -> cap * tanh(logits).
template <int Vectors, class T>
void apply_softcap(T* logits, int64_t keys, T cap) {
  for (int64_t i = 0; i < keys * Vectors * kLanes<T>; i += kLanes<T>) store(logits + i, cap * tanh(load(logits + i)));
}

// `count` elements of a bias, `stride` apart; the other lanes are zero.
template <class T, class Element>
CUDA_EXT_INLINE Vec<T> load_bias(const Element* bias, int64_t stride, int64_t count) {
  constexpr int lanes = kLanes<T>;
  if constexpr (!std::is_same_v<Element, uint8_t>) {
    if (stride == 1) return load_partial(bias, count);
  } else if (stride == 1 && count == lanes) {
    typedef uint8_t Bytes __attribute__((vector_size(lanes)));
    Bytes bytes;
    std::memcpy(&bytes, bias, lanes);
    return __builtin_convertvector(bytes, Vec<T>);
  }
  T values[lanes] = {};
  for (int64_t n = 0; n < count; ++n) {
    if constexpr (std::is_same_v<Element, uint8_t>) {
      values[n] = T(bias[n * stride]);
    } else {
      values[n] = to_compute(bias[n * stride]);
    }
  }
  return load(values);
}

// Adds bias values to a vector of logits; a mask (of bytes) hides the logits where it is 0.
template <class T, class Element>
CUDA_EXT_INLINE void apply_bias_values(const Element*, T* logits, Vec<T> values) {
  if constexpr (std::is_same_v<Element, uint8_t>) {
    store(logits, values != 0 ? load(logits) : splat(-std::numeric_limits<T>::infinity()));
  } else {
    store(logits, load(logits) + values);
  }
}

// add_bias for bfloat16 with contiguous keys: rows are transposed as pairs of keys, in half the steps.
inline void add_bias_two_keys(const bfloat16_t* bias, int64_t i_stride, int64_t queries, int64_t keys, float* logits,
                              int64_t width) {
  constexpr int64_t lanes = kLanes<float>, kKeysAhead = 4 * lanes;
  const auto load_two_keys = [&](int64_t i, int64_t pair, int64_t count) {
    const bfloat16_t* const row = bias + i * i_stride + 2 * pair;
    __builtin_prefetch(row + kKeysAhead);
    return load_along_k<2>(row, keys - 2 * pair, count);
  };
  for (int64_t pair = 0; 2 * pair < keys; pair += lanes)
    for (int64_t i = 0; i < queries; i += lanes) {
      Vec<float> square[lanes];
      const int64_t rows = std::min(lanes, queries - i), count = std::min(lanes, (keys + 1) / 2 - pair);
      if (rows == lanes) {
#pragma GCC unroll 16
        for (int64_t r = 0; r < lanes; ++r) square[r] = load_two_keys(i + r, pair, count);
      } else {
        for (int64_t r = 0; r < lanes; ++r) square[r] = r < rows ? load_two_keys(i + r, pair, count) : Vec<float>{};
      }
      transpose<float>(square);
      const auto add = [&](int64_t j, Words bias) {
        float* const to = logits + j * width + i;
        store(to, load(to) + (Vec<float>)bias);
      };
      const auto add_two_keys = [&](int64_t c) {
        const int64_t j = 2 * (pair + c);
        add(j, (Words)square[c] << 16);
        if (j + 1 < keys) add(j + 1, (Words)square[c] & 0xffff0000);
      };
      if (count == lanes) {
#pragma GCC unroll 16
        for (int64_t c = 0; c < lanes; ++c) add_two_keys(c);
      } else {
        for (int64_t c = 0; c < count; ++c) add_two_keys(c);
      }
    }
}

// Applies a bias (queries, keys) to the transposed logits (keys, width), whose first `queries` lanes are in use. Rows
// of the bias are read one vector of keys at a time if keys are contiguous.
template <class T, class Element>
void add_bias(const Element* bias, int64_t i_stride, int64_t j_stride, int64_t queries, int64_t keys, T* logits,
              int64_t width) {
  constexpr int lanes = kLanes<T>;
  if (i_stride == 0) {
    for (int64_t j = 0; j < keys; ++j) {
      const Vec<T> values = splat(load_bias<T>(bias + j * j_stride, 1, 1)[0]);
      for (int64_t i = 0; i < width; i += lanes) apply_bias_values(bias, logits + j * width + i, values);
    }
    return;
  }
  if (i_stride == 1 && j_stride != 1) {  // queries are adjacent, as in a relative bias
    for (int64_t j = 0; j < keys; ++j)
      for_vectors<T>(queries, [&](int64_t i, int64_t count) {
        apply_bias_values(bias, logits + j * width + i, load_bias<T>(bias + j * j_stride + i, 1, count));
      });
    return;
  }
  if constexpr (std::is_same_v<Element, bfloat16_t>)
    if (j_stride == 1) return add_bias_two_keys(bias, i_stride, queries, keys, logits, width);
  for (int64_t i = 0; i < queries; i += lanes) {
    for_vectors<T>(keys, [&](int64_t j, int64_t count) {
      Vec<T> square[lanes];
      for (int r = 0; r < lanes; ++r)
        square[r] =
            i + r < queries ? load_bias<T>(bias + (i + r) * i_stride + j * j_stride, j_stride, count) : Vec<T>{};
      transpose<T>(square);
      for (int64_t c = 0; c < count; ++c) apply_bias_values(bias, logits + (j + c) * width + i, square[c]);
    });
  }
}

// The offset of the first key of query i of a head. diagonal: Sk - Sq.
inline int64_t bias_offset(const BiasStrides& strides, int64_t b, int64_t h, int64_t i, int64_t diagonal) {
  return b * strides[0] + h * strides[1] + i * strides[2] + diagonal * strides[4];
}

// Calls f(pointer, strides) for the bias, with its own element type, and for the mask, if the call has them. The
// pointers are to the first key of query i of a head.
template <class T, class F>
CUDA_EXT_INLINE void for_bias_and_mask(const AttentionParams& p, int64_t b, int64_t h, int64_t i, int64_t diagonal,
                                       F&& f) {
  const auto row = [&](const BiasStrides& strides) { return bias_offset(strides, b, h, i, diagonal); };
  if (p.bias_kind == BiasKind::kAccumulation) f(static_cast<const T*>(p.bias) + row(p.bias_strides), p.bias_strides);
  if (p.bias_kind == BiasKind::kStorage) {
    dispatch(p.dtype, [&](auto storage) {
      using Storage = decltype(storage);
      if constexpr (std::is_same_v<Compute<Storage>, T>)
        f(static_cast<const Storage*>(p.bias) + row(p.bias_strides), p.bias_strides);
    });
  }
  if (p.mask != nullptr) f(p.mask + row(p.mask_strides), p.mask_strides);
}

// Calls f(mask, strides, first, count) for those of keys [j_begin, j_begin + keys) that a tree mask is about: `count`
// from `first` on. mask: the element of query i and the first of them. oldest: the first key of the tree, Sk - Sq.
template <class F>
CUDA_EXT_INLINE void for_tree_mask(const KeyCache& cache, int64_t b, int64_t i, int64_t oldest, int64_t j_begin,
                                   int64_t keys, F&& f) {
  if (cache.tree_mask == nullptr) return;
  const int64_t first = std::max<int64_t>(0, oldest - j_begin);
  const int64_t (&strides)[3] = cache.tree_strides;
  if (first < keys)
    f(cache.tree_mask + b * strides[0] + i * strides[1] + (j_begin + first - oldest) * strides[2], strides, first,
      keys - first);
}

// ALiBi, causal and window, for keys [j_begin, j_begin + keys) and the panel of queries that starts at i_begin.
// noinline, because most blocks need neither.
template <int Vectors, class T>
__attribute__((noinline)) void apply_alibi_and_window(const Visibility& visible, T slope, int64_t diagonal,
                                                      int64_t i_begin, int64_t j_begin, int64_t keys, T* logits) {
  constexpr int lanes = kLanes<T>;
  Vec<T> lane_index;
  for (int i = 0; i < lanes; ++i) lane_index[i] = T(i);
  const Vec<T> hidden = splat(-std::numeric_limits<T>::infinity());
  for (int64_t j = 0; j < keys; ++j) {
    for (int v = 0; v < Vectors; ++v, logits += lanes) {
      // j - i of lane 0; that of lane l is l less. Exact in T wherever it affects the result.
      const int64_t distance = j_begin + j - i_begin - v * lanes;
      Vec<T> x = load(logits);
      if (slope != 0) {
        const Vec<T> from_diagonal = T(distance - diagonal) - lane_index;
        x -= slope * (from_diagonal < 0 ? -from_diagonal : from_diagonal);
      }
      const Vec<T> most = splat(T(std::clamp<int64_t>(distance - visible.low, -1, lanes)));
      const Vec<T> least = splat(T(std::clamp<int64_t>(distance - visible.high, -1, lanes)));
      store(logits, lane_index <= most ? (lane_index >= least ? x : hidden) : hidden);
    }
  }
}

// Multiplies values (keys, Vectors * lanes) by the dropout mask: 0, or 1 / (1 - p) where the element is kept. j_begin
// must be a multiple of 4, because four keys of one query share a counter. first_number: of the first row.
template <int Vectors, class T>
void apply_dropout(const AttentionParams& p, int64_t first_number, int64_t j_begin, int64_t keys, T* values) {
  constexpr int width = Vectors * kLanes<T>;
  const uint32_t threshold = uint32_t(p.dropout_p * 4294967296.0);
  const T keep_scale = T(1 / (1 - p.dropout_p));
  const DropoutCounters& counters = p.dropout_counters;
  for (int64_t j = 0; j < keys; j += 4) {
    uint64_t counter[width];
    uint32_t words[4][width];
    for (int i = 0; i < width; ++i)
      counter[i] = uint64_t((first_number + i) * counters.of_row + counters.first + (j_begin + j) / 4);
    philox<width>(p.rng.seed, p.rng.offset, counter, words);
    for (int64_t r = 0; r < std::min<int64_t>(4, keys - j); ++r) {
      T* row = values + (j + r) * width;
      for (int i = 0; i < width; ++i) row[i] = words[r][i] >= threshold ? row[i] * keep_scale : T(0);
    }
  }
}

// Of query @ key^T: the scale, divided by the softcap if there is one.
inline double factor_of_logits(const AttentionParams& p) { return p.softcap > 0 ? p.scale / p.softcap : p.scale; }

// The parameters of one head of one sequence.
template <class T>
struct HeadContext {
  const AttentionParams& p;
  Visibility visible;
  T logit_factor;  // factor_of_logits
  T softcap;
  T slope;
  int64_t diagonal;      // Sk - Sq
  int64_t first_row;     // of the head's sequence within lse
  int64_t first_number;  // the same for dropout
  int64_t batch, index;

  HeadContext(const AttentionParams& params, const Sequence& s, int64_t b, int64_t h)
      : p(params),
        visible(params, s),
        logit_factor(T(factor_of_logits(params))),
        softcap(T(params.softcap)),
        slope(params.alibi_slopes == nullptr
                  ? T(0)
                  : static_cast<const T*>(params.alibi_slopes)[b * params.alibi_batch_stride + h]),
        diagonal(s.k_len - s.q_len),
        first_row(cpu::CUDA_EXT_ISA::first_row(params, s, b, h)),
        first_number(first_dropout_row(params, s, b, h)),
        batch(b),
        index(h) {}

  // Applies bias, masks, ALiBi, causal and window to logits (keys, Vectors * lanes). What hides comes after the bias,
  // so that it overrides any bias.
  template <int Vectors>
  void apply_bias_and_mask(T* logits, int64_t i_begin, int64_t i_end, int64_t j_begin, int64_t keys) const {
    for_bias_and_mask<T>(p, batch, index, i_begin, diagonal, [&](const auto* data, const BiasStrides& strides) {
      add_bias(data + j_begin * strides[3], strides[2], strides[3], i_end - i_begin, keys, logits, Vectors * kLanes<T>);
    });
    for_tree_mask(p.cache, batch, i_begin, diagonal, j_begin, keys,
                  [&](const uint8_t* mask, const int64_t (&strides)[3], int64_t first, int64_t count) {
                    add_bias(mask, strides[1], strides[2], i_end - i_begin, count, logits + first * Vectors * kLanes<T>,
                             Vectors * kLanes<T>);
                  });
    if (slope != 0 || !visible.all_visible(i_begin, i_end, j_begin, j_begin + keys))
      apply_alibi_and_window<Vectors>(visible, slope, diagonal, i_begin, j_begin, keys, logits);
  }
};

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
