// Keys and values in a cache on the CPU: where their rows are, and the append of new ones.
#pragma once

#include "attention/attention_cache.h"
#include "attention/cpu/logits.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

// The sequences among which the work of a launch is planned. The bits of one in a cache must not depend on the others,
// so it is planned as if it were alone.
inline int64_t planned_batch(const AttentionParams& p) { return p.cache.capacity > 0 ? 1 : p.batch; }

// Row `row` of a sequence in a cache.
template <class Storage>
Storage* cached_row(const KeyCache& cache, const HeadsView& view, int64_t b, int64_t row, int64_t head) {
  if (cache.block_table != nullptr)
    return rows_of<Storage>(view, cache.block_table[b * cache.table_stride + row / cache.page_size],
                            row % cache.page_size, head)
        .data;
  return rows_of<Storage>(view, cache.rows != nullptr ? cache.rows[b] : b, row, head).data;
}

// Calls f(j, rows, count, after) for [j_begin, j_end) of the keys or values of a sequence, in pieces of equidistant
// rows: all of them or, if they are in pages, those of a page. `after` are the rows to prefetch next.
template <class Storage, class F>
CUDA_EXT_INLINE void for_pieces(const AttentionParams& p, const HeadsView& view, const Sequence& s, int64_t b,
                                int64_t head, int64_t j_begin, int64_t j_end, F&& f) {
  const KeyCache& cache = p.cache;
  const int64_t keys = j_end - j_begin;
  if (cache.block_table == nullptr) {
    const Rows<const Storage> rows =
        cache.capacity == 0 ? rows_of<const Storage>(view, b, s.k_begin + j_begin, head)
                            : Rows<const Storage>{cached_row<const Storage>(cache, view, b, s.k_begin + j_begin, head),
                                                  view.seq_stride};
    return f(j_begin, rows, keys, rows.from(keys));
  }
  const auto rows_at = [&](int64_t j) {
    return Rows<const Storage>{cached_row<const Storage>(cache, view, b, s.k_begin + j, head), view.seq_stride};
  };
  for (int64_t j = j_begin, count; j < j_end; j += count) {
    count = std::min(j_end - j, cache.page_size - (s.k_begin + j) % cache.page_size);
    f(j, rows_at(j), count, rows_at(std::min(j + count, s.k_len - 1)));
  }
}

// Pointers to keys or values [j_begin, j_begin + keys).
template <class Storage>
void find_rows(const AttentionParams& p, const HeadsView& view, const Sequence& s, int64_t b, int64_t head,
               int64_t j_begin, int64_t keys, const Storage** rows) {
  for_pieces<Storage>(p, view, s, b, head, j_begin, j_begin + keys,
                      [&](int64_t j, Rows<const Storage> piece, int64_t count, Rows<const Storage>) {
                        for (int64_t i = 0; i < count; ++i) rows[j - j_begin + i] = piece[i];
                      });
}

// A row of x, of which the first rotary_dim elements are rotated by the angles of a position.
template <class Storage, class T = Compute<Storage>>
void rotate_row(const CacheAppendParams& p, const Storage* x, int64_t dim, int64_t position, Storage* to) {
  std::copy(x, x + dim, to);
  if (position < 0 || position >= p.positions) return;
  const int64_t half = p.rotary_dim / 2;
  const Storage* const cos = static_cast<const Storage*>(p.rotary_cos) + position * half;
  const Storage* const sin = static_cast<const Storage*>(p.rotary_sin) + position * half;
  const int64_t step = p.interleaved ? 2 : 1, apart = p.interleaved ? 1 : half;
  for (int64_t i = 0; i < half; ++i) {
    const T first = to_compute(x[i * step]), second = to_compute(x[i * step + apart]);
    const T c = to_compute(cos[i]), s = to_compute(sin[i]);
    to[i * step] = from_compute<Storage>(first * c - second * s);
    to[i * step + apart] = from_compute<Storage>(first * s + second * c);
  }
}

template <class Storage>
void append(const CacheAppendParams& p) {
  const KeyCache& cache = p.cache;
  const auto each_row = [&](int64_t rows, int64_t heads, auto&& f) {
    constexpr int64_t kGrain = 16;
    parallel_for(p.batch * rows * heads, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const int64_t b = n / heads / rows, length = cache.lengths != nullptr ? cache.lengths[b] : 0;
        f(b, n / heads % rows, n % heads, length, p.first_positions != nullptr ? p.first_positions[b] : length);
      }
    });
  };
  if (p.rotated_query.data != nullptr)
    each_row(p.seqlen_q, p.heads, [&](int64_t b, int64_t i, int64_t head, int64_t, int64_t first) {
      rotate_row<Storage>(p, rows_of<const Storage>(p.query, b, i, head).data, p.dim, p.position(first, i, true),
                          rows_of<Storage>(p.rotated_query, b, i, head).data);
    });
  each_row(p.count, p.heads_kv, [&](int64_t b, int64_t i, int64_t head, int64_t length, int64_t first) {
    const int64_t row = length + i;
    if (row >= cache.capacity) return;
    Storage* const key = cached_row<Storage>(cache, p.key_cache, b, row, head);
    const Storage* const new_key = rows_of<const Storage>(p.key, b, i, head).data;
    if (p.rotary_cos != nullptr)
      rotate_row<Storage>(p, new_key, p.dim, p.position(first, i, false), key);
    else
      std::copy(new_key, new_key + p.dim, key);
    const Storage* const value = rows_of<const Storage>(p.value, b, i, head).data;
    std::copy(value, value + p.dim_v, cached_row<Storage>(cache, p.value_cache, b, row, head));
  });
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
