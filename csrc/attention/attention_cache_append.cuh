// The kernel that appends keys and values to a cache, and rotates new keys and queries.
#pragma once

#include "arch/math.cuh"
#include "arch/memory.cuh"
#include "attention/attention_cache.h"
#include "attention/rows.cuh"

namespace cuda_ext::attention {

// Eight elements of a row in float32.
struct Eight {
  float of[8];
};
template <class T>
DEVICE Eight load_eight(const T* from) {
  const auto words = arch::load_global<arch::Words4>(from);
  Eight x;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x.of[2 * i] = arch::unpack_low<T>(words.data[i]);
    x.of[2 * i + 1] = arch::unpack_high<T>(words.data[i]);
  }
  return x;
}

// Elements [first, first + 8) of a row at `position`, rotated.
template <class T>
DEVICE Eight rotated_eight(const CacheAppendParams& p, const T* row, int first, int64_t position) {
  Eight x = load_eight(row + first);
  const int half = int(p.rotary_dim) / 2;
  if (first >= int(p.rotary_dim) || position < 0 || position >= p.positions) return x;
  const T* const cos = static_cast<const T*>(p.rotary_cos) + position * half;
  const T* const sin = static_cast<const T*>(p.rotary_sin) + position * half;
  if (p.interleaved) {
    const auto c = arch::load_global<arch::Words2>(cos + first / 2),
               s = arch::load_global<arch::Words2>(sin + first / 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float by_cos = i % 2 == 0 ? arch::unpack_low<T>(c.data[i / 2]) : arch::unpack_high<T>(c.data[i / 2]);
      const float by_sin = i % 2 == 0 ? arch::unpack_low<T>(s.data[i / 2]) : arch::unpack_high<T>(s.data[i / 2]);
      const float even = x.of[2 * i], odd = x.of[2 * i + 1];
      x.of[2 * i] = even * by_cos - odd * by_sin;
      x.of[2 * i + 1] = even * by_sin + odd * by_cos;
    }
    return x;
  }
  // The other half of the pairs is half of rotary_dim away, a multiple of 8.
  const bool is_first = first < half;
  const int angle = is_first ? first : first - half;
  const Eight other = load_eight(row + (is_first ? first + half : angle)), c = load_eight(cos + angle),
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
  const int batch = int(line / heads / in_sequence), first = arch::lane_index() * 8;
  if (first >= (of_value ? p.dim_v : p.dim)) return;

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
  if (of_value || p.rotary_cos == nullptr) {
    arch::store_global(to + first, arch::load_global<arch::Words4>(from + first));
    return;
  }
  const Eight x = rotated_eight(p, from, first, p.position(first_position, i, of_query));
  arch::store_global(to + first, arch::Words4{{arch::pack<T>(x.of[0], x.of[1]), arch::pack<T>(x.of[2], x.of[3]),
                                               arch::pack<T>(x.of[4], x.of[5]), arch::pack<T>(x.of[6], x.of[7])}});
}

}  // namespace cuda_ext::attention
