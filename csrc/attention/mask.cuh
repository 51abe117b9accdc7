// The rows of a sequence, and which of its keys a query sees.
#pragma once

#include <cmath>

#include "arch/memory.cuh"
#include "attention/attention.h"

namespace cuda_ext::attention {

// More than any length or window, and small enough that sums of three fit in an int.
constexpr int kFar = 1 << 29;

struct Sequence {
  int q_begin = 0, k_begin = 0;  // first rows of the tensors
  int q_len, k_len;

  DEVICE Sequence(const AttentionParams& p, int batch) : q_len(int(p.seqlen_q)), k_len(int(p.seqlen_k)) {
    if (p.cu_seqlens_q == nullptr) return;
    q_begin = arch::load_global<int32_t>(p.cu_seqlens_q + batch);
    q_len = arch::load_global<int32_t>(p.cu_seqlens_q + batch + 1) - q_begin;
    k_begin = arch::load_global<int32_t>(p.cu_seqlens_k + batch);
    k_len = arch::load_global<int32_t>(p.cu_seqlens_k + batch + 1) - k_begin;
  }
};

// Indices [begin, end).
struct alignas(8) Span {
  int begin, end;
  DEVICE bool has(int i) const { return i >= begin && i < end; }
  DEVICE bool has_all(int first, int last) const { return first >= begin && last <= end; }  // of [first, last)
  DEVICE Span from(int origin) const { return {begin - origin, end - origin}; }
};

// Query i sees key j iff low <= j - i <= high and 0 <= j < k_len.
struct Visibility {
  int low, high, k_len;

  DEVICE Visibility(const AttentionParams& p, const Sequence& s) : k_len(s.k_len) {
    const int diagonal = s.k_len - s.q_len;
    low = p.window_left < 0 || p.window_left > kFar ? -2 * kFar : diagonal - int(p.window_left);
    high = p.window_right < 0 || p.window_right > kFar ? 2 * kFar : diagonal + int(p.window_right);
  }

  // Keys that any query in [first, last] sees: [begin, end), empty if end <= begin.
  DEVICE int key_begin(int first) const { return first + low > 0 ? first + low : 0; }
  DEVICE int key_end(int last) const { return last + high < k_len ? last + high + 1 : k_len; }

  DEVICE Span keys(int query) const { return {key_begin(query), key_end(query)}; }

  // Queries that see any key in [first, last]. The end may exceed the number of queries. Keys from k_len on are seen by
  // none.
  DEVICE int query_begin(int first) const { return first - high > 0 ? first - high : 0; }
  DEVICE int query_end(int last) const { return last - low + 1; }
  DEVICE Span queries(int key) const { return {query_begin(key), key < k_len ? query_end(key) : 0}; }

  // Keys that all queries in [first, last] see. The beginning may be negative.
  DEVICE Span keys_of_all(int first, int last) const {
    const int end = first + high + 1;
    return {last + low, end < k_len ? end : k_len};
  }
  DEVICE bool all_visible(int first, int last, int keys_begin, int keys_end) const {
    return keys_of_all(first, last).has_all(keys_begin, keys_end);
  }
};

// Sets hidden logits to -inf. s: (row_tiles, column_tiles) outputs of mma; range(m, half): the visible columns of a row
// of this thread, relative to the thread's first column.
template <class Tiles, class Range>
DEVICE void apply_mask(typename Tiles::Accumulators& s, const Range& range) {
#pragma unroll
  for (int m = 0; m < Tiles::kRowTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Span visible = range(m, half);
#pragma unroll
      for (int n = 0; n < Tiles::kColumnTiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (!visible.has(Tiles::column_step(n) + e)) s[m][n][2 * half + e] = -INFINITY;
    }
}

}  // namespace cuda_ext::attention
