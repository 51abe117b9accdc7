// Attention forward on the CPU for sequences of a few queries, as in text generation: panels of queries would leave
// most lanes empty, and packing keys and values would cost more than the products.
//
// Each vector lane holds a key. A tile is up to kTileRows rows (queries of any head) of one sequence, from all query
// heads that share a key head, so that keys and values are read once for all of them, and without a copy unless
// converting them once for all rows is cheaper. If key heads are adjacent in memory, a tile has several and reads a few
// keys of each alternately, so that memory is read in order.
//   logits (rows, keys) = q k^T     dot products, one vector of them at a time
//   probs = exp(logits - max)     along each row
//   out (rows, dim_v) += probs v
// If there are fewer tiles than threads, the keys of a tile are split among several tasks, whose sums are added in
// order.
#pragma once

#include "attention/cpu/cache.h"
#if defined(CUDA_EXT_HAS_AMX_TILES)
#include "attention/cpu/few_queries_amx.h"
#endif

namespace cuda_ext::cpu::CUDA_EXT_ISA {

constexpr int64_t kTileRows = 64;
constexpr int64_t kMostFewQueries = 16;   // of a sequence, without AMX
constexpr int64_t kRowKeys = 128;         // keys of a step: their logits stay in cache until they are probs
constexpr int64_t kAdjacentBytes = 4096;  // of the key heads of a tile: longer contiguous reads are no faster
constexpr int64_t kLeastSplitKeys = 512;  // the fewest keys that are worth a separate task
template <class T>
constexpr int64_t kInterleavedKeys = std::max(8, kLanes<T>);  // of a head, before those of the next head are read

// Distance between the rows of logits: pages may end within a vector, of which then the whole is written.
template <class T>
constexpr int64_t kLogitsPitch = kRowKeys + kLanes<T>;

// logits (Count, keys), rows kLogitsPitch apart = q (Count, dim) k^T. dim: whole vectors; rows of q are dim apart.
// Writes whole vectors of logits.
template <int Count, class T, class Element>
void dot_products(int64_t keys, int64_t dim, const T* q, Rows<const Element> k, T* logits) {
  constexpr int lanes = kLanes<T>, kAtOnce = lanes / Count;
  for (int64_t j = 0; j < keys; j += kAtOnce) {
    const Element* key[kAtOnce];
    for (int n = 0; n < kAtOnce; ++n) key[n] = k[std::min(j + n, keys - 1)];
    Vec<T> sum[lanes] = {};  // (Count, kAtOnce)
#pragma GCC unroll 1
    for (int64_t d = 0; d < dim; d += lanes) {
      Vec<T> of_query[Count];
#pragma GCC unroll 4
      for (int r = 0; r < Count; ++r) of_query[r] = load(q + r * dim + d);
#pragma GCC unroll 16
      for (int n = 0; n < kAtOnce; ++n) {
        const Vec<T> of_key = load(key[n] + d);
#pragma GCC unroll 4
        for (int r = 0; r < Count; ++r) {
          Vec<T>& to = sum[r * kAtOnce + n];
          to = multiply_add(to, of_query[r], of_key);
        }
      }
    }
    T products[lanes];
    store(products, horizontal_sums<T>(sum));
    for (int r = 0; r < Count; ++r)
      std::memcpy(logits + r * kLogitsPitch<T> + j, products + r * kAtOnce, kAtOnce * sizeof(T));
  }
}

// scaled (count, padded dim) = the rows of x, times factor.
template <class Storage, class T = Compute<Storage>>
void scale_rows(Rows<const Storage> x, int64_t count, int64_t dim, T factor, T* scaled) {
  for (int64_t r = 0; r < count; ++r)
    for_vectors<T>(dim, [&](int64_t d, int64_t columns) {
      store(scaled + r * padded<T>(dim) + d, load_partial(x[r] + d, columns) * factor);
    });
}

// Columns [begin, begin + Vectors * lanes) of out (Count, pitch) += probs (Count, keys), rows kLogitsPitch apart, @
// v.
template <int Count, int Vectors, class T, class Element>
CUDA_EXT_INLINE void add_values(int64_t keys, const T* probs, Rows<const Element> v, int64_t begin, T* out,
                                int64_t pitch) {
  constexpr int lanes = kLanes<T>;
  Vec<T> sum[Count][Vectors] = {};
#pragma GCC unroll 1
  for (int64_t j = 0; j < keys; ++j) {
    const Element* values = v[j] + begin;
    Vec<T> value[Vectors];
#pragma GCC unroll 16
    for (int x = 0; x < Vectors; ++x) value[x] = load(values + x * lanes);
#pragma GCC unroll 4
    for (int r = 0; r < Count; ++r) {
      const Vec<T> prob = splat(probs[r * kLogitsPitch<T> + j]);
#pragma GCC unroll 16
      for (int x = 0; x < Vectors; ++x) sum[r][x] = multiply_add(sum[r][x], prob, value[x]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Count; ++r) {
#pragma GCC unroll 16
    for (int x = 0; x < Vectors; ++x) {
      T* const to = out + r * pitch + begin + x * lanes;
      store(to, load(to) + sum[r][x]);
    }
  }
}

// The same for columns [begin, dim), whole vectors, as many at once as the registers can sum.
template <int Count, int Vectors, class T, class Element>
void add_all_values(int64_t begin, int64_t dim, int64_t keys, const T* probs, Rows<const Element> v, T* out) {
  for (; begin + Vectors * kLanes<T> <= dim; begin += Vectors * kLanes<T>)
    add_values<Count, Vectors>(keys, probs, v, begin, out, dim);
  if constexpr (Vectors > 1)
    if (begin < dim) add_all_values<Count, Vectors / 2>(begin, dim, keys, probs, v, out);
}

// Calls f(std::integral_constant<int, Count>, first) for consecutive groups of 4, 2 and 1 rows, until all are covered.
template <class T, class F>
CUDA_EXT_INLINE void for_row_groups(int64_t rows, F&& f) {
  int64_t r = 0;
  if constexpr (kLanes<T> >= 4)
    for (; r + 4 <= rows; r += 4) f(std::integral_constant<int, 4>{}, r);
  for (; r + 2 <= rows; r += 2) f(std::integral_constant<int, 2>{}, r);
  if (r < rows) f(std::integral_constant<int, 1>{}, r);
}

// A tile's softmax over the keys visited so far.
template <class T>
struct RowSums {
  T max[kTileRows];
  T sum[kTileRows];
  T* out;  // (rows, padded dim_v)
};

// The rows of one task, from adjacent key heads.
template <class T>
struct RowTile {
  const AttentionParams& p;
  Sequence s;
  Visibility visible;
  int64_t batch;
  int64_t kv_head, kv_heads;  // the first, and how many
  int64_t begin, end;         // of (heads of the group) x (queries), of each key head

  RowTile(const AttentionParams& params, int64_t b, int64_t head, int64_t heads, int64_t chunk, int64_t chunks)
      : p(params), s(params, b), visible(params, s), batch(b), kv_head(head), kv_heads(heads) {
    const int64_t rows = p.heads / p.heads_kv * s.q_len;
    begin = chunk * rows / chunks;
    end = (chunk + 1) * rows / chunks;
  }
  int64_t head_rows() const { return end - begin; }
  int64_t rows() const { return kv_heads * head_rows(); }
  int64_t query(int64_t r) const { return (begin + r % head_rows()) % s.q_len; }
  int64_t head(int64_t r) const {
    return (kv_head + r / head_rows()) * (p.heads / p.heads_kv) + (begin + r % head_rows()) / s.q_len;
  }
  // Keys that any query of the sequence sees.
  int64_t keys_begin() const { return visible.key_begin(0); }
  int64_t keys_end() const { return visible.key_end(s.q_len); }

  // Applies all options but dropout to row r of the logits of keys [j_begin, j_begin + keys), and
  // hides the padding of the last vector.
  void modify_logits(T* logits, int64_t r, int64_t j_begin, int64_t keys) const {
    constexpr int lanes = kLanes<T>;
    const int64_t i = query(r), h = head(r), width = padded<T>(keys);
    if (p.softcap > 0) apply_softcap<1>(logits, width / lanes, T(p.softcap));
    if (p.alibi_slopes != nullptr) {
      const T slope = static_cast<const T*>(p.alibi_slopes)[batch * p.alibi_batch_stride + h];
      for (int64_t j = 0; j < keys; ++j) logits[j] -= slope * T(std::abs(j_begin + j - i - (s.k_len - s.q_len)));
    }
    for_bias_and_mask<T>(p, batch, h, i, s.k_len - s.q_len, [&](const auto* data, const BiasStrides& strides) {
      for_vectors<T>(keys, [&](int64_t j, int64_t count) {
        apply_bias_values(data, logits + j, load_bias<T>(data + (j_begin + j) * strides[3], strides[3], count));
      });
    });
    for_tree_mask(p.cache, batch, i, s.k_len - s.q_len, j_begin, keys,
                  [&](const uint8_t* mask, const int64_t (&strides)[3], int64_t first, int64_t count) {
                    for_vectors<T>(count, [&](int64_t j, int64_t columns) {
                      apply_bias_values(mask, logits + first + j,
                                        load_bias<T>(mask + j * strides[2], strides[2], columns));
                    });
                  });
    const auto inside = [&](int64_t j) { return std::clamp<int64_t>(j - j_begin, 0, keys); };
    const T hidden = -std::numeric_limits<T>::infinity();
    std::fill(logits, logits + inside(visible.key_begin(i)), hidden);
    std::fill(logits + inside(visible.key_end(i + 1)), logits + width, hidden);
  }
};

// Updates one row's softmax and output with its logits (keys, padded with -inf), which become probs.
template <class T>
void update_row(T* logits, int64_t keys, T& row_max, T& row_sum, T* out, int64_t out_width) {
  constexpr int lanes = kLanes<T>;
  Vec<T> most = splat(row_max);
  for (int64_t j = 0; j < keys; j += lanes) most = max<T>(load(logits + j), most);
  T largest = most[0];
  for (int l = 1; l < lanes; ++l) largest = std::max(largest, most[l]);
  // As in attend(): row_max may lag behind.
  if (largest > row_max + kMaxLag) {
    const T rescale = std::exp(row_max - largest);
    row_max = largest;
    row_sum *= rescale;
    for (int64_t d = 0; d < out_width; d += lanes) store(out + d, load(out + d) * rescale);
  }
  const T shift = row_max == -std::numeric_limits<T>::infinity() ? T(0) : row_max;
  Vec<T> sum{};
  for (int64_t j = 0; j < keys; j += lanes) {
    const Vec<T> prob = exp_below_88(load(logits + j) - shift);
    sum += prob;
    store(logits + j, prob);
  }
  row_sum += horizontal_sum<T>(sum);
}

// The buffers of one thread.
template <class T>
struct RowScratch {
  T *q, *logits;  // (rows, padded dim), (rows, kLogitsPitch)
  T* panel;       // (kInterleavedKeys, pitch or pitch_v), keys or values that cannot be read in place
  T *step, *out;  // (rows, padded dim_v): the sums of kRowKeys keys, and of all
  Scratch scratch;

  RowScratch(const AttentionParams& p, int64_t rows)
      : scratch(allocate<T>({{&q, rows * padded<T>(p.dim)},
                             {&logits, rows * kLogitsPitch<T>},
                             {&panel, kInterleavedKeys<T> * row_pitch<T>(std::max(p.dim, p.dim_v))},
                             {&step, rows * padded<T>(p.dim_v)},
                             {&out, rows * padded<T>(p.dim_v)}})) {}
};

// Calls f(rows) with `count` rows from which whole vectors can be loaded: in place, if dim is a multiple of a vector
// and the elements need no conversion (or only for a few rows of the tile); else packed.
template <class T, class Storage, class F>
CUDA_EXT_INLINE void with_whole_vectors(Rows<const Storage> rows, int64_t count, Rows<const Storage> after, int64_t dim,
                                        int64_t tile_rows, T* panel, F&& f) {
  constexpr int64_t kConvertedRows = 4;
  if (dim % kLanes<T> == 0 && (std::is_same_v<T, Storage> || tile_rows <= kConvertedRows)) {
    for (int64_t i = 0; i < count; ++i) prefetch_ahead(rows, i, count, after, dim);
    return f(rows);
  }
  pack_rows<1>(rows, count, dim, panel, after);
  f(Rows<const T>{panel, row_pitch<T>(dim)});
}

// Calls f(j, count, r, rows) for all keys [j_begin, j_begin + keys), alternating between the key heads of the tile.
// `rows` are keys or values [j, j + count), relative to j_begin, of the key head to which the tile's rows from r on
// attend.
template <class Storage, class T, class F>
CUDA_EXT_INLINE void for_interleaved_keys(const RowTile<T>& tile, const HeadsView& view, int64_t dim, int64_t j_begin,
                                          int64_t keys, T* panel, F&& f) {
  const auto interleave = [&](int64_t piece, Rows<const Storage> piece_rows, int64_t piece_keys,
                              Rows<const Storage> after) {
    for (int64_t j = 0; j < piece_keys; j += kInterleavedKeys<T>) {
      const int64_t count = std::min(kInterleavedKeys<T>, piece_keys - j);
      for (int64_t h = 0; h < tile.kv_heads; ++h) {
        const auto of_head = [&](Rows<const Storage> rows) {
          return Rows<const Storage>{rows.data + h * view.head_stride, rows.stride};
        };
        const auto next = j + count < piece_keys ? piece_rows.from(j + count) : after;
        with_whole_vectors(of_head(piece_rows.from(j)), count, of_head(next), dim, tile.head_rows(), panel,
                           [&](auto whole) { f(piece - j_begin + j, count, h * tile.head_rows(), whole); });
      }
    }
  };
  for_pieces<Storage>(tile.p, view, tile.s, tile.batch, tile.kv_head, j_begin, j_begin + keys, interleave);
}

// Adds keys [j_begin, j_end) to the sums of a tile.
template <class Storage, class T = Compute<Storage>>
void attend_rows(const RowTile<T>& tile, int64_t j_begin, int64_t j_end, const RowScratch<T>& scratch,
                 RowSums<T>& sums) {
  const AttentionParams& p = tile.p;
  const int64_t dim = padded<T>(p.dim), dim_v = padded<T>(p.dim_v);
  for (int64_t j = j_begin; j < j_end; j += kRowKeys) {
    const int64_t keys = std::min(kRowKeys, j_end - j);
    for_interleaved_keys<Storage>(
        tile, p.key, p.dim, j, keys, scratch.panel, [&](int64_t key, int64_t count, int64_t first, auto k) {
          for_row_groups<T>(tile.head_rows(), [&](auto rows, int64_t r) {
            dot_products<decltype(rows)::value>(count, dim, scratch.q + (first + r) * dim, k,
                                                scratch.logits + (first + r) * kLogitsPitch<T> + key);
          });
        });
    for (int64_t r = 0; r < tile.rows(); ++r) {
      T* const logits = scratch.logits + r * kLogitsPitch<T>;
      tile.modify_logits(logits, r, j, keys);
      update_row(logits, keys, sums.max[r], sums.sum[r], sums.out + r * dim_v, dim_v);
    }
    // A separate sum for each step: rounding errors then grow with the number of steps, not of calls to add_all_values.
    std::fill_n(scratch.step, tile.rows() * dim_v, T(0));
    for_interleaved_keys<Storage>(
        tile, p.value, p.dim_v, j, keys, scratch.panel, [&](int64_t key, int64_t count, int64_t first, auto v) {
          for_row_groups<T>(tile.head_rows(), [&](auto rows, int64_t r) {
            constexpr int kCount = decltype(rows)::value, kVectors = (kVectorRegisters == 32 ? 16 : 8) / kCount;
            add_all_values<kCount, kVectors>(0, dim_v, count, scratch.logits + (first + r) * kLogitsPitch<T> + key, v,
                                             scratch.step + (first + r) * dim_v);
          });
        });
    for (int64_t i = 0; i < tile.rows() * dim_v; i += kLanes<T>)
      store(sums.out + i, load(sums.out + i) + load(scratch.step + i));
  }
}

#if defined(CUDA_EXT_HAS_AMX_TILES)

// The same with AMX. The queries of the tile are in `amx`.
inline void attend_rows_amx(const RowTile<float>& tile, int64_t j_begin, int64_t j_end, float logit_factor,
                            const RowScratch<float>& scratch, const AmxScratch& amx, RowSums<float>& sums) {
  const AttentionParams& p = tile.p;
  const int64_t rows = tile.head_rows(), whole_rows = AmxScratch::whole(rows), depth = p.dim / kAmxDepth;
  for (int64_t j = j_begin; j < j_end; j += AmxScratch::kKeys) {
    const int64_t keys = std::min(AmxScratch::kKeys, j_end - j), key_tiles = (keys + kAmxDepth - 1) / kAmxDepth;
    const AmxTiles tiles;
    for_tiles_of_keys(tile, p.key, p.dim, j, keys, amx.k, [&](int64_t key, int64_t h, const TwoTiles& k) {
      for (int64_t r = 0; r < rows; r += kAmxRows) {
        amx_scores(k.of[0], k.of[1], k.stride, amx.q + (h * whole_rows + r) * p.dim, depth, amx.scores);
        const int64_t first = h * rows + r, count = std::min(kAmxRows, rows - r);
        for (int64_t half = 0; half < 2; ++half)
          store_logits<kLogitsPitch<float>>(amx.scores + half * 256, count, logit_factor,
                                            scratch.logits + first * kLogitsPitch<float> + key + half * 16);
      }
    });
    interleave_values(tile, j, keys, amx.v);
    std::fill_n(amx.step, tile.kv_heads * whole_rows * p.dim_v, 0.0f);
    for (int64_t h = 0; h < tile.kv_heads; ++h)
      for (int64_t r = 0; r < rows; r += kAmxRows) {
        const int64_t count = std::min(kAmxRows, rows - r);
        for (int64_t i = h * rows + r; i < h * rows + r + count; ++i) {
          float* const logits = scratch.logits + i * kLogitsPitch<float>;
          tile.modify_logits(logits, i, j, keys);
          update_row(logits, keys, sums.max[i], sums.sum[i], sums.out + i * p.dim_v, p.dim_v);
        }
        round_probs<kLogitsPitch<float>>(scratch.logits + (h * rows + r) * kLogitsPitch<float>, count, keys, key_tiles,
                                         amx.probs);
        amx_add_values(amx.probs, amx.v + h * AmxScratch::kKeys * p.dim_v, key_tiles, p.dim_v,
                       amx.step + (h * whole_rows + r) * p.dim_v, p.dim_v);
      }
    for (int64_t h = 0; h < tile.kv_heads; ++h)
      for (int64_t i = 0; i < rows * p.dim_v; i += kLanes<float>) {
        float* const out = sums.out + h * rows * p.dim_v + i;
        store(out, load(out) + load(amx.step + h * whole_rows * p.dim_v + i));
      }
  }
}

#endif

// Combines the sums of a tile's splits, and stores output and lse.
template <class Storage, class T = Compute<Storage>>
void store_rows(const RowTile<T>& tile, const RowSums<T>* sums, int64_t splits) {
  constexpr T nothing = -std::numeric_limits<T>::infinity();
  const AttentionParams& p = tile.p;
  for (int64_t r = 0; r < tile.rows(); ++r) {
    T most = nothing, total = 0;
    for (int64_t n = 0; n < splits; ++n) most = std::max(most, sums[n].max[r]);
    const auto share = [&](const RowSums<T>& of) { return of.max[r] == most ? T(1) : std::exp(of.max[r] - most); };
    for (int64_t n = 0; n < splits; ++n) total += share(sums[n]) * sums[n].sum[r];
    const int64_t i = tile.query(r), h = tile.head(r);
    static_cast<T*>(p.lse)[first_row(p, tile.s, tile.batch, h) + i] = total == 0 ? nothing : most + std::log(total);
    with_result_rows<Storage>(p.float32_out, p.out, tile.batch, tile.s.q_begin + i, h, [&](auto out) {
      for_vectors<T>(p.dim_v, [&](int64_t d, int64_t count) {
        Vec<T> sum{};
        for (int64_t n = 0; n < splits; ++n)
          sum = multiply_add(sum, splat(share(sums[n])), load(sums[n].out + r * padded<T>(p.dim_v) + d));
        store_partial(out.data + d, total == 0 ? Vec<T>{} : sum / total, count);
      });
    });
  }
}

inline bool heads_are_adjacent(const AttentionParams& p) {
  return p.heads_kv > 1 && p.key.head_stride == p.dim && p.value.head_stride == p.dim_v;
}

// Whether this file's method is faster than panels for longest_q queries: if panels leave most lanes empty, and for a
// few more queries if keys would be packed from between those of other heads, or if keys have to be split among
// threads. With AMX it is for more rows, and, if keys have to be split, as long as a tile has all rows of a key head.
// It has no dropout.
template <class Storage>
bool are_few_queries(const AttentionParams& p, int64_t longest_q) {
  using T = Compute<Storage>;
  if (p.dropout_p > 0 || p.block_mask) return false;
  const int64_t head_rows = p.heads / p.heads_kv * longest_q;
#if defined(CUDA_EXT_HAS_AMX_TILES)
  constexpr int64_t kFewRows = 2 * kAmxRows;
  const bool splits_keys = planned_batch(p) * p.heads_kv < num_threads();
  if (std::is_same_v<Storage, bfloat16_t> && uses_amx(p, head_rows) &&
      head_rows <= (splits_keys ? kTileRows : kFewRows))
    return true;
#endif
  return longest_q <= kLanes<T> / 2 || head_rows <= 8 || (head_rows <= 16 && heads_are_adjacent(p)) ||
         (longest_q <= kMostFewQueries && planned_batch(p) * p.heads < num_threads());
}

// How many adjacent key heads, of head_rows rows each, share a tile: as many as leave a task for every thread. `tasks`
// is the number of tasks per key head if each has its own tile.
template <class Storage>
int64_t heads_together(const AttentionParams& p, int64_t head_rows, int64_t tasks) {
  if (!heads_are_adjacent(p)) return 1;
  const int64_t contiguous = kAdjacentBytes / (std::max(p.dim, p.dim_v) * int64_t(sizeof(Storage)));
  int64_t heads = std::min({p.heads_kv, contiguous, kTileRows / std::max<int64_t>(1, head_rows)});
  while (heads > 1 && (p.heads_kv % heads != 0 || p.heads_kv / heads * tasks < num_threads())) --heads;
  return std::max<int64_t>(1, heads);
}

// For the backward pass: K (factor Q)^T or V dO^T (keys, width), of `queries` rows x of storage and of rows row_pitch
// apart, in the order of sums of dot_products. Only then does exp(logit - lse) add up to 1 over a row that this file
// computed. scaled_x (kMostFewQueries, padded dim) and products (4, kLogitsPitch) are scratch.
template <class Storage, class T = Compute<Storage>>
void products_of_few_queries(Rows<const Storage> x, int64_t queries, int64_t dim, T factor, const T* rows, int64_t keys,
                             int64_t width, T* scaled_x, T* products, T* result) {
  scale_rows<Storage>(x, queries, dim, factor, scaled_x);
  std::fill_n(result, keys * width, T(0));
  for (int64_t j = 0; j < keys; j += kRowKeys) {
    const int64_t count = std::min(kRowKeys, keys - j);
    for_row_groups<T>(queries, [&](auto group, int64_t r) {
      constexpr int kCount = decltype(group)::value;
      const Rows<const T> step{rows + j * row_pitch<T>(dim), row_pitch<T>(dim)};
      dot_products<kCount>(count, padded<T>(dim), scaled_x + r * padded<T>(dim), step, products);
      for (int64_t n = 0; n < count; ++n)
        for (int i = 0; i < kCount; ++i) result[(j + n) * width + r + i] = products[i * kLogitsPitch<T> + n];
    });
  }
}

template <class Storage>
void forward_of_few_queries(const AttentionParams& p, int64_t longest_q) {
  using T = Compute<Storage>;
  const int64_t dim = padded<T>(p.dim), dim_v = padded<T>(p.dim_v);
  int64_t longest_k = 0;
  for (int64_t b = 0; b < p.batch; ++b) longest_k = std::max(longest_k, Sequence(p, b).k_len);
  const int64_t most_splits = std::max<int64_t>(1, longest_k / kLeastSplitKeys);
  const int64_t head_rows = p.heads / p.heads_kv * longest_q;
  const int64_t chunks = std::max<int64_t>(1, (head_rows + kTileRows - 1) / kTileRows);
  const int64_t together = heads_together<Storage>(p, head_rows, planned_batch(p) * chunks * most_splits);
  const int64_t tiles = p.batch * (p.heads_kv / together) * chunks;
  const int64_t tile_rows = std::min(head_rows, kTileRows) * together;
  const int64_t planned = std::max<int64_t>(1, planned_batch(p) * (p.heads_kv / together) * chunks);
  const int64_t splits = std::clamp<int64_t>((num_threads() + planned - 1) / planned, 1, most_splits);
  const auto tile_at = [&](int64_t n) {
    const int64_t groups = p.heads_kv / together, group = n / chunks;
    return RowTile<T>(p, group / groups, group % groups * together, together, n % chunks, chunks);
  };
  std::unique_ptr<RowSums<T>[]> parts(splits > 1 ? new RowSums<T>[tiles * splits] : nullptr);
  T* part_outs;
  const Scratch part_scratch = allocate<T>({{&part_outs, splits > 1 ? tiles * splits * tile_rows * dim_v : 0}});

  run_workers(tiles * splits, [&](TaskQueue& queue) {
    const RowScratch<T> scratch(p, tile_rows);
#if defined(CUDA_EXT_HAS_AMX_TILES)
    const bool with_amx = std::is_same_v<Storage, bfloat16_t> && uses_amx(p, head_rows);
    const AmxScratch amx(p, with_amx ? together : 0, std::min(head_rows, kTileRows));
#endif
    for (int64_t task; queue.next(task);) {
      const int64_t split = task % splits;
      const RowTile<T> tile = tile_at(task / splits);
      RowSums<T> own;
      RowSums<T>& sums = splits > 1 ? parts[task] : own;
      sums.out = splits > 1 ? part_outs + task * tile_rows * dim_v : scratch.out;
      std::fill_n(sums.out, tile.rows() * dim_v, T(0));
      for (int64_t r = 0; r < tile.rows(); ++r) {
        // A sink is a key before all others that has no value.
        const bool has_sink = p.sinks != nullptr && split == 0;
        sums.max[r] = has_sink ? static_cast<const T*>(p.sinks)[tile.head(r)] : -std::numeric_limits<T>::infinity();
        sums.sum[r] = T(has_sink ? 1 : 0);
        const auto queries = rows_of<const Storage>(p.query, tile.batch, tile.s.q_begin, tile.head(r));
        scale_rows(queries.from(tile.query(r)), 1, p.dim, T(factor_of_logits(p)), scratch.q + r * dim);
      }
      if (tile.rows() == 0) continue;
      const int64_t begin = tile.keys_begin(), keys = std::max<int64_t>(0, tile.keys_end() - begin);
      // In a cache, as many as the sequence would have alone.
      const int64_t own_splits = p.cache.capacity > 0 ? std::clamp<int64_t>(keys / kLeastSplitKeys, 1, splits) : splits;
      if (split >= own_splits) {
        // The sums stay those of no keys.
#if defined(CUDA_EXT_HAS_AMX_TILES)
      } else if (with_amx) {
        if constexpr (std::is_same_v<Storage, bfloat16_t>) {
          pack_queries(tile, amx.q);
          attend_rows_amx(tile, begin + split * keys / own_splits, begin + (split + 1) * keys / own_splits,
                          float(factor_of_logits(p)), scratch, amx, sums);
        }
#endif
      } else {
        attend_rows<Storage>(tile, begin + split * keys / own_splits, begin + (split + 1) * keys / own_splits, scratch,
                             sums);
      }
      if (splits == 1) store_rows<Storage>(tile, &sums, 1);
    }
  });
  if (splits > 1)
    parallel_for(tiles, 1, [&](int64_t first, int64_t last) {
      for (int64_t n = first; n < last; ++n) store_rows<Storage>(tile_at(n), parts.get() + n * splits, splits);
    });
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
