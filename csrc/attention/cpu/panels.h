// What attention's forward and backward share on the CPU: sequences, rows and panels. Masks, bias and dropout
// are in logits.h.
//
// Each vector lane holds a query. A panel is up to kPanelQueries queries of one head, stored transposed: q_t (dim,
// width). S^T = K Q^T then multiplies broadcast keys by whole vectors of queries, each softmax row stays in one lane,
// so that no horizontal operation is needed, and neither head dimension needs padding.
//
// Where the CPU multiplies pairs of bfloat16, K Q^T and V dO^T do so, in half the steps: their operands are bfloat16,
// and products and sums are as exact as float32 ones. So do the other products of backward, for which the probs and
// their gradient are rounded to bfloat16, as the CUDA kernels do; the gradients are then exact to 2.4e-3 instead of
// 1.7e-3, and half of what rounding every intermediate costs. The output keeps probs in float32, except with
// AMX, which multiplies tiles of bfloat16 only: its distance to float64 is then 2.5e-3 instead of 1.8e-3.
#pragma once

#include "attention/attention.h"
#include "cpu/amx.h"
#include "cpu/microkernel.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

// The `depth` (cpu/bfloat16_pair.h) of the operands of K Q^T and V dO^T, and of backward's other products.
#if defined(CUDA_EXT_BFLOAT16_PAIRS)
template <class Storage>
constexpr int kDepth = std::is_same_v<Storage, bfloat16_t> ? 2 : 1;
#else
template <class Storage>
constexpr int kDepth = 1;
#endif
// The number of elements that `dim` values of a panel take.
template <class Storage>
constexpr int64_t panel_dim(int64_t dim) {
  return (dim + kDepth<Storage> - 1) / kDepth<Storage>;
}

// Probs are exp(logit - maximum of the row). That maximum may lag behind the true one by this much, to save
// rescaling.
constexpr int kMaxLag = 8;

template <class T>
constexpr int64_t kPanelQueries = kTileVectors * kLanes<T>;

template <class T>
constexpr int64_t padded(int64_t n) {
  return (n + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

// Distance between the rows of a panel: one vector more than the padded row, so that the rows of a tile do not compete
// for the few cache sets that a power of two would map them to.
template <class T>
constexpr int64_t row_pitch(int64_t n) {
  return padded<T>(n) + kLanes<T>;
}

// An array to allocate, and where to store its address.
template <class T>
struct ScratchArray {
  T** address;
  int64_t count;
};

// Allocates several arrays in one piece of scratch, each aligned to a cache line.
template <class T>
Scratch allocate(std::initializer_list<ScratchArray<T>> arrays) {
  constexpr int64_t line = 64 / sizeof(T);
  const auto whole_lines = [](int64_t count) { return (count + line - 1) / line * line; };
  int64_t total = 0;
  for (const auto& array : arrays) total += whole_lines(array.count);
  Scratch scratch(total * int64_t(sizeof(T)));
  T* next = scratch.as<T>();
  for (const auto& array : arrays) {
    *array.address = next;
    next += whole_lines(array.count);
  }
  return scratch;
}

// Calls f(std::integral_constant<int, vectors>), for vectors in [1, kTileVectors].
template <class F>
CUDA_EXT_INLINE void with_vectors(int64_t vectors, F&& f) {
  if constexpr (kTileVectors == 4) {
    if (vectors == 4) return f(std::integral_constant<int, 4>{});
    if (vectors == 3) return f(std::integral_constant<int, 3>{});
  }
  if (vectors == 2) return f(std::integral_constant<int, 2>{});
  f(std::integral_constant<int, 1>{});
}

// First rows and lengths of sequence b.
struct Sequence {
  int64_t q_begin, q_len;  // rows of query, out, lse
  int64_t k_begin, k_len;

  Sequence(const AttentionParams& p, int64_t b) {
    const bool varlen = p.cu_seqlens_q != nullptr;
    q_begin = varlen ? p.cu_seqlens_q[b] : 0;
    q_len = varlen ? p.cu_seqlens_q[b + 1] - q_begin : p.seqlen_q;
    k_begin = varlen ? p.cu_seqlens_k[b] : 0;
    k_len = varlen ? p.cu_seqlens_k[b + 1] - k_begin : p.seqlen_k;
    if (const KeyCache& cache = p.cache; cache.capacity > 0) {
      k_begin = cache.left_padding != nullptr ? cache.left_padding[b] : 0;
      const int64_t end = cache.lengths != nullptr ? cache.lengths[b] + cache.appended : cache.capacity;
      k_len = std::min(end, cache.capacity) - k_begin;
    }
  }
};

// Index of a sequence's first row within lse.
inline int64_t first_row(const AttentionParams& p, const Sequence& s, int64_t b, int64_t h) {
  return p.cu_seqlens_q != nullptr ? h * p.total_q + s.q_begin : (b * p.heads + h) * p.seqlen_q;
}
// The same for dropout.
inline int64_t first_dropout_row(const AttentionParams& p, const Sequence& s, int64_t b, int64_t h) {
  const DropoutCounters& of = p.dropout_counters;
  return p.cu_seqlens_q != nullptr ? h * of.rows + s.q_begin : (b * of.heads + h) * of.rows;
}
inline int64_t total_rows(const AttentionParams& p) {
  return p.cu_seqlens_q != nullptr ? p.heads * p.total_q : p.batch * p.heads * p.seqlen_q;
}

template <class Storage>
struct Rows {
  Storage* data;
  int64_t stride;
  Storage* operator[](int64_t i) const { return data + i * stride; }
  Rows from(int64_t i) const { return {data + i * stride, stride}; }
};
template <class Storage>
Rows<Storage> rows_of(const HeadsView& view, int64_t b, int64_t begin, int64_t head) {
  return {static_cast<Storage*>(view.data) + b * view.batch_stride + begin * view.seq_stride + head * view.head_stride,
          view.seq_stride};
}

// Calls f(rows) with those of a result, which is float32 whatever the dtype if `is_float32`.
template <class Storage, class F>
void with_result_rows(bool is_float32, const HeadsView& view, int64_t b, int64_t begin, int64_t head, const F& f) {
  if (is_float32)
    f(rows_of<Compute<Storage>>(view, b, begin, head));
  else
    f(rows_of<Storage>(view, b, begin, head));
}

// Query i sees key j iff low <= j - i <= high.
struct Visibility {
  int64_t low, high;
  int64_t k_len;

  Visibility(const AttentionParams& p, const Sequence& s) : k_len(s.k_len) {
    // Far more than any length, but small enough that the sums below cannot overflow.
    constexpr int64_t kFar = int64_t(1) << 60;
    const auto side = [](int64_t window) { return window < 0 || window > kFar ? kFar : window; };
    const int64_t diagonal = s.k_len - s.q_len;
    low = diagonal - side(p.window_left);
    high = diagonal + side(p.window_right);
  }
  // Keys that any query in [i_begin, i_end) sees: [begin, end).
  int64_t key_begin(int64_t i_begin) const { return std::clamp<int64_t>(i_begin + low, 0, k_len); }
  int64_t key_end(int64_t i_end) const { return std::clamp<int64_t>(i_end + high, 0, k_len); }
  bool all_visible(int64_t i_begin, int64_t i_end, int64_t j_begin, int64_t j_end) const {
    return j_begin - (i_end - 1) >= low && j_end - 1 - i_begin <= high;
  }
};

// Rows of one head are too far apart for the hardware prefetcher, so they are prefetched this many rows ahead.
constexpr int64_t kRowsAhead = 8;
template <class Storage>
CUDA_EXT_INLINE void prefetch_row(const Storage* row, int64_t dim) {
  constexpr int64_t kLine = 64 / sizeof(Storage);
  for (int64_t d = 0; d < dim; d += kLine) __builtin_prefetch(row + d);
}

// Prefetches kRowsAhead rows after the i-th of n, which `after` follow.
template <class Storage>
CUDA_EXT_INLINE void prefetch_ahead(Rows<const Storage> rows, int64_t i, int64_t n, Rows<const Storage> after,
                                    int64_t dim) {
  const int64_t ahead = i + kRowsAhead;
  prefetch_row(ahead < n ? rows[ahead] : after[ahead - n], dim);
}

// Whether any of (n, dim) values is infinite or NaN: 0 times such a value is NaN.
template <class Storage, class T = Compute<Storage>>
bool any_not_finite(Rows<const Storage> rows, int64_t n, int64_t dim) {
  Vec<T> zero{};
  for (int64_t i = 0; i < n; ++i)
    for_vectors<T>(dim, [&](int64_t d, int64_t count) { zero += load_partial(rows[i] + d, count) * T(0); });
  return horizontal_sum<T>(zero) != 0;
}

// (n, dim) rows of storage -> rows of elements of `depth` values, row_pitch apart, padded with zeros to a whole vector.
template <int depth, class Storage, class T = Compute<Storage>>
void pack_rows(Rows<const Storage> rows, int64_t n, int64_t dim, T* panel, Rows<const Storage> after) {
  const int64_t elements = (dim + depth - 1) / depth, pitch = row_pitch<T>(elements);
  for (int64_t i = 0; i < n; ++i) {
    prefetch_ahead(rows, i, n, after, dim);
    for_vectors<T>(elements, [&](int64_t d, int64_t count) {
      store(panel + i * pitch + d, load_along_k<depth>(rows[i] + depth * d, dim - depth * d, count));
    });
  }
}

template <int depth, class Storage, class T = Compute<Storage>>
void pack_rows(Rows<const Storage> rows, int64_t n, int64_t dim, T* panel) {
  pack_rows<depth>(rows, n, dim, panel, rows.from(n));
}

// (n, dim) rows of storage -> (n / depth, row_pitch) of elements of `depth` rows, for products that sum over rows.
template <class Storage, class T = Compute<Storage>>
void pack_along_rows(Rows<const Storage> rows, int64_t n, int64_t dim, T* panel) {
  if constexpr (kDepth<Storage> == 1) {
    pack_rows<1>(rows, n, dim, panel);
  } else {
    const int64_t pitch = row_pitch<T>(dim);
    for (int64_t i = 0; i < n; i += 2) {
      prefetch_row(rows[i + kRowsAhead], dim);
      prefetch_row(rows[i + 1 + kRowsAhead], dim);
      for_vectors<T>(dim, [&](int64_t d, int64_t count) {
        const Vec<T> low = load_partial(rows[i] + d, count);
        const Vec<T> high = i + 1 < n ? load_partial(rows[i + 1] + d, count) : Vec<T>{};
        store(panel + i / 2 * pitch + d, (Vec<T>)((Words)low >> 16 | (Words)high));
      });
    }
  }
}

#if defined(CUDA_EXT_BFLOAT16_PAIRS)

// The lanes of both, rounded to bfloat16, as pairs of a lane of each.
CUDA_EXT_INLINE Vec<float> round_to_pairs(Vec<float> first, Vec<float> second) {
#if defined(CUDA_EXT_BFLOAT16_PAIRS_MODEL)
  return (Vec<float>)(bfloat16_words(first) | bfloat16_words(second) << 16);
#elif defined(CUDA_EXT_NEON)
  const auto bits = [](Vec<float> v) { return (uint16x4_t)vcvt_bf16_f32((float32x4_t)v); };
  const uint16x4x2_t pairs = vzip_u16(bits(first), bits(second));
  return (Vec<float>)vcombine_u16(pairs.val[0], pairs.val[1]);
#else
  alignas(64) static constexpr auto kOrder = [] {
    std::array<uint16_t, 32> order{};
    for (int n = 0; n < 32; ++n) order[n] = uint16_t(n / 2 + n % 2 * 16);
    return order;
  }();
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  return (Vec<float>)_mm512_permutexvar_epi16(_mm512_load_si512(kOrder.data()), both);
#endif
}

// Two vectors of consecutive floats, rounded to bfloat16, as pairs of neighbours.
CUDA_EXT_INLINE void store_as_pairs(float* pairs, Vec<float> low, Vec<float> high) {
#if defined(CUDA_EXT_BFLOAT16_PAIRS_MODEL)
  store(reinterpret_cast<bfloat16_t*>(pairs), low);
  store(reinterpret_cast<bfloat16_t*>(pairs) + kLanes<float>, high);
#elif defined(CUDA_EXT_NEON)
  store(pairs, (Vec<float>)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)low), (float32x4_t)high));
#else
  store(pairs, (Vec<float>)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#endif
}

// (keys, width) of float32 -> (keys, width / 2) of pairs of queries; `pairs` may be `values`. Of an odd number of
// vectors, the last is read and written together with what follows.
inline void round_to_pairs_of_queries(const float* values, int64_t count, float* pairs) {
  constexpr int64_t lanes = kLanes<float>;
  for (int64_t i = 0; i < count; i += 2 * lanes)
    store_as_pairs(pairs + i / 2, load(values + i), load(values + i + lanes));
}

// (keys, width) of float32 -> (keys / 2, width) of pairs of keys, in place.
inline void round_to_pairs_of_keys(float* values, int64_t keys, int64_t width) {
  for (int64_t j = 0; j < keys; j += 2)
    for (int64_t i = 0; i < width; i += kLanes<float>) {
      const float* const from = values + j * width + i;
      store(values + j / 2 * width + i, round_to_pairs(load(from), j + 1 < keys ? load(from + width) : Vec<float>{}));
    }
}

// (n, dim) rows of bfloat16 -> their transpose, (dim, pitch) of pairs of rows; with zeros up to a multiple of 32 rows.
template <class Rows>
void pack_transposed_pairs(const Rows& rows, int64_t n, int64_t dim, float* panel, int64_t pitch) {
  constexpr int lanes = kLanes<float>;
  for (int64_t j = 0; j < 2 * whole_tiles((n + 1) / 2); j += 2 * lanes) {
    for (int64_t i = j; i < j + 2 * lanes; ++i)
      if (i + 2 * lanes < n) prefetch_row(rows[i + 2 * lanes], dim);
    for_vectors<float>(dim, [&](int64_t d, int64_t count) {
      const auto row = [&](int64_t i) {
        return i < n ? (Words)load_partial(static_cast<const bfloat16_t*>(rows[i]) + d, count) : Words{};
      };
      Vec<float> square[lanes];
      for (int r = 0; r < lanes; ++r) square[r] = (Vec<float>)(row(j + 2 * r) >> 16 | row(j + 2 * r + 1));
      transpose<float>(square);
      for (int64_t c = 0; c < count; ++c) store(panel + (d + c) * pitch + j / 2, square[c]);
    });
  }
}

#endif

// (n, dim) rows of storage -> their transpose, (panel_dim, width) of T; lanes from n on are zeros. width: whole
// vectors.
template <class Storage, class T = Compute<Storage>>
void pack_transposed(Rows<const Storage> rows, int64_t n, int64_t dim, T* panel, int64_t width) {
  constexpr int lanes = kLanes<T>, depth = kDepth<Storage>;
  for (int64_t i = 0; i < width; i += lanes) {
    for_vectors<T>(panel_dim<Storage>(dim), [&](int64_t d, int64_t count) {
      Vec<T> square[lanes];
      for (int r = 0; r < lanes; ++r)
        square[r] = i + r < n ? load_along_k<depth>(rows[i + r] + depth * d, dim - depth * d, count) : Vec<T>{};
      transpose<T>(square);
      for (int64_t r = 0; r < count; ++r) store(panel + (d + r) * width + i, square[r]);
    });
  }
}

// (dim, width) of T, each lane scaled -> transpose, (n, dim) rows of storage.
template <class Storage, class T = Compute<Storage>>
void unpack_transposed(const T* panel, int64_t width, const T* lane_scale, int64_t n, int64_t dim, Rows<Storage> rows) {
  constexpr int lanes = kLanes<T>;
  for (int64_t i = 0; i < n; i += lanes) {
    const Vec<T> scale = load(lane_scale + i);
    for_vectors<T>(dim, [&](int64_t d, int64_t count) {
      Vec<T> square[lanes];
      for (int r = 0; r < lanes; ++r) square[r] = r < count ? load(panel + (d + r) * width + i) * scale : Vec<T>{};
      transpose<T>(square);
      for (int64_t r = 0; r < std::min<int64_t>(lanes, n - i); ++r) store_partial(rows[i + r] + d, square[r], count);
    });
  }
}

// rows (n, dim) += the transpose of values (dim, width). dim: of rows that are padded to a whole vector.
template <class T>
void add_transposed(const T* values, int64_t width, int64_t n, int64_t dim, T* rows, int64_t stride) {
  constexpr int lanes = kLanes<T>;
  for (int64_t i = 0; i < n; i += lanes)
    for (int64_t d = 0; d < dim; d += lanes) {
      Vec<T> square[lanes];
#pragma GCC unroll 16
      for (int r = 0; r < lanes; ++r) square[r] = load(values + (d + r) * width + i);
      transpose<T>(square);
      const int64_t count = std::min<int64_t>(lanes, n - i);
      for (int64_t r = 0; r < count; ++r) {
        T* const row = rows + (i + r) * stride + d;
        store(row, load(row) + square[r]);
      }
    }
}

// The inverse of pack_rows<1>.
template <class Storage, class T = Compute<Storage>>
void unpack_rows(const T* panel, int64_t n, int64_t dim, Rows<Storage> rows) {
  const int64_t pitch = row_pitch<T>(dim);
  for (int64_t i = 0; i < n; ++i)
    for_vectors<T>(dim,
                   [&](int64_t d, int64_t count) { store_partial(rows[i] + d, load(panel + i * pitch + d), count); });
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
