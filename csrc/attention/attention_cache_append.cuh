// The kernel that appends keys and values to a cache, and rotates new keys and queries.
#pragma once

#include "arch/math.cuh"
#include "arch/memory.cuh"
#include "attention/attention_cache.h"
#include "attention/rows.cuh"

namespace cuda_ext::attention {

// Eight elements of a row in float32, which are 16 or 32 bytes in memory.
struct Eight {
  float of[8];
};
template <class T>
struct Chunks {
  arch::Words4 of[sizeof(T) / 2];
};
template <class T>
DEVICE Chunks<T> load_chunks(const T* from) {
  Chunks<T> chunks;
#pragma unroll
  for (int i = 0; i < int(sizeof(T)) / 2; ++i)
    chunks.of[i] = arch::load_global<arch::Words4>(from + i * (16 / sizeof(T)));
  return chunks;
}
template <class T>
DEVICE void store_chunks(T* to, const Chunks<T>& chunks) {
#pragma unroll
  for (int i = 0; i < int(sizeof(T)) / 2; ++i) arch::store_global(to + i * (16 / sizeof(T)), chunks.of[i]);
}
template <class T>
DEVICE Eight load_eight(const T* from, bool is_aligned = true) {
  Eight x;
  if (is_aligned) {
    arch::unpack<T>(__builtin_bit_cast(arch::Words<2 * sizeof(T)>, load_chunks(from)), x.of);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) x.of[i] = arch::to_float(arch::load_global<T>(from + i));
  }
  return x;
}
template <class T>
DEVICE void store_eight(T* to, const Eight& x, bool is_aligned) {
  if (is_aligned) {
    store_chunks(to, __builtin_bit_cast(Chunks<T>, arch::words_of<T>(x.of)));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) arch::store_global(to + i, arch::from_float<T>(x.of[i]));
  }
}

// Elements [first, first + 8) of a row at `position`, which are among the rotary_dim first, rotated.
template <class T>
DEVICE Eight rotated_eight(const CacheAppendParams& p, const T* row, int first, int64_t position) {
  Eight x = load_eight(row + first, p.is_aligned);
  const int half = int(p.rotary_dim) / 2;
  if (position < 0 || position >= p.positions) return x;
  const T* const cos = static_cast<const T*>(p.rotary_cos) + position * half;
  const T* const sin = static_cast<const T*>(p.rotary_sin) + position * half;
  if (p.interleaved) {
    float c[4], s[4];
    arch::unpack<T>(arch::load_global<arch::Words<sizeof(T)>>(cos + first / 2), c);
    arch::unpack<T>(arch::load_global<arch::Words<sizeof(T)>>(sin + first / 2), s);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float even = x.of[2 * i], odd = x.of[2 * i + 1];
      x.of[2 * i] = even * c[i] - odd * s[i];
      x.of[2 * i + 1] = even * s[i] + odd * c[i];
    }
    return x;
  }
  // The other half of the pairs is half of rotary_dim away, a multiple of 8.
  const bool is_first = first < half;
  const int angle = is_first ? first : first - half;
  const Eight other = load_eight(row + (is_first ? first + half : angle), p.is_aligned), c = load_eight(cos + angle),
              s = load_eight(sin + angle);
#pragma unroll
  for (int i = 0; i < 8; ++i) x.of[i] = x.of[i] * c.of[i] + (is_first ? -other.of[i] : other.of[i]) * s.of[i];
  return x;
}

// One warp per row of a head: the queries, if they are rotated, then the new keys, then the new values. No shared
// memory and no barriers.
template <class T, int threads>
GLOBAL(threads, 1)
attention_cache_append(GRID_CONSTANT CacheAppendParams p) {
  constexpr int kWarps = threads / arch::kWarpSize;
  const int64_t queries = p.rotated_query.data != nullptr ? p.batch * p.seqlen_q * p.heads : 0;
  const int64_t rows = p.batch * p.count * p.heads_kv;
  int64_t line = int64_t(arch::block_x()) * kWarps + arch::thread_index() / arch::kWarpSize;
  if (line >= queries + 2 * rows) return;
  const bool of_query = line < queries, of_value = line >= queries + rows;
  line -= of_query ? 0 : of_value ? queries + rows : queries;
  const int heads = int(of_query ? p.heads : p.heads_kv), head = int(line % heads);
  const int64_t in_sequence = of_query ? p.seqlen_q : p.count;
  const int64_t i = line / heads % in_sequence;
  const int batch = int(line / heads / in_sequence), width = int(of_value ? p.dim_v : p.dim);

  const int64_t length = p.cache.lengths != nullptr ? arch::load_global<int32_t>(p.cache.lengths + batch) : 0;
  const int64_t first_position =
      p.first_positions != nullptr ? arch::load_global<int32_t>(p.first_positions + batch) : length;
  const HeadsView& source = of_query ? p.query : of_value ? p.value : p.key;
  const T* const from = row_of<const T>(source, batch, i, head);

  T* to;
  if (of_query) {
    to = row_of<T>(p.rotated_query, batch, i, head);
  } else {
    const int64_t row = length + i;
    if (length < 0 || row >= p.cache.capacity) return;  // the cache is full
    const HeadsView& cache = of_value ? p.value_cache : p.key_cache;
    if (p.cache.block_table == nullptr) {
      to = row_of<T>(cache, p.cache.rows != nullptr ? arch::load_global<int32_t>(p.cache.rows + batch) : batch, row,
                     head);
    } else {
      const int64_t page =
          arch::load_global<int32_t>(p.cache.block_table + batch * p.cache.table_stride + row / p.cache.page_size);
      if (page < 0 || page >= p.cache.pages) return;
      to = row_of<T>(cache, int(page), row % p.cache.page_size, head);
    }
  }
  const int rotated = of_value || p.rotary_cos == nullptr ? 0 : int(p.rotary_dim);  // a multiple of 16
  const int64_t position = p.position(first_position, i, of_query);
#pragma unroll 1
  for (int first = arch::lane_index() * 8; first < width; first += arch::kWarpSize * 8) {
    if (first < rotated)
      store_eight(to + first, rotated_eight(p, from, first, position), p.is_aligned);
    else if (p.is_aligned)
      store_chunks(to + first, load_chunks(from + first));
    else
      for (int e = first; e < first + 8 && e < width; ++e) arch::store_global(to + e, arch::load_global<T>(from + e));
  }
}

}  // namespace cuda_ext::attention
