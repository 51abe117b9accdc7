// Attention over a cache of keys and values: flash_attention_with_kvcache appends to the cache and attends to it,
// flash_attention_cached only attends to it. Forward only.
#include "ops/torch_headers.h"

#include "attention/attention_cache.h"

#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "attention/attention_cuda.h"
#include "ops/attention_composed.h"
#include "ops/attention_params.h"
#include "ops/backend.h"

namespace cuda_ext {
namespace {

#define CACHE_TENSORS_SCHEMA \
  "Tensor? cache_batch_idx=None, Tensor? cache_leftpad=None, Tensor? block_table=None, Tensor? tree_mask=None, "
#define CACHE_OPTIONS_SCHEMA ATTENTION_LOGIT_SCHEMA ", int num_splits=0) -> (Tensor out, Tensor lse)"

// The arguments that say where the keys of each sequence are, and which of the newest each query sees.
struct CacheArguments {
  const Tensor &keys, &values;
  OptionalTensor seqlens, batch_idx, leftpad, block_table, tree_mask;
};

// The new keys and values.
struct AppendArguments {
  const Tensor &keys, &values;
  OptionalTensor rotary_cos, rotary_sin, rotary_positions;
  bool interleaved;
};

// Contiguous copies of the index tensors, which live as long as the launch.
struct IndexTensors {
  Tensor seqlens, batch_idx, leftpad, block_table, positions, cos, sin;
};

// A cache is used in place: a copy would not be updated.
void check_in_place(const char* op, const char* name, const Tensor& cache) {
  const bool dense = cache.stride(-1) == 1 || cache.size(-1) <= 1;
  CUDA_EXT_CHECK(dense, op, "expected ", name,
                 " with a dense last dimension, because it is used in place, got strides ",
                 shape_string(cache.strides()));
}

const int32_t* check_indices(const char* op, const char* name, const OptionalTensor& given, at::IntArrayRef sizes,
                             const Tensor& query, Tensor& dense) {
  if (!is_given(given)) return nullptr;
  CUDA_EXT_CHECK(given->scalar_type() == at::kInt, op, "expected ", name, " of dtype int32, got ",
                 dtype_name(given->scalar_type()), "; convert it with .int()");
  CUDA_EXT_CHECK(given->sizes() == sizes, op, "expected ", name, " of shape ", shape_string(sizes), ", got ",
                 shape_string(*given));
  check_same_device(op, name, *given, "query", query);
  dense = given->contiguous();
  return dense.const_data_ptr<int32_t>();
}

AttentionShape check_shapes(const char* op, const Tensor& query, const CacheArguments& cache) {
  const auto check_rank = [&](const char* name, const Tensor& tensor, const char* layout) {
    check_given(op, name, tensor);
    CUDA_EXT_CHECK(tensor.dim() == 4, op, "expected ", name, " of shape ", layout, ", got ", shape_string(tensor));
  };
  const bool paged = is_given(cache.block_table);
  const char* layout = paged ? "(pages, page_size, heads, dim)" : "(batch, seq, heads, dim)";
  check_rank("query", query, "(batch, seq, heads, dim)");
  check_rank("key_cache", cache.keys, layout);
  check_rank("value_cache", cache.values, layout);
  check_floating(op, "query", query);
  check_same_dtype(op, "key_cache", cache.keys, "query", query);
  check_same_dtype(op, "value_cache", cache.values, "query", query);
  check_same_device(op, "key_cache", cache.keys, "query", query);
  check_same_device(op, "value_cache", cache.values, "query", query);

  AttentionShape shape{};
  shape.batch = query.size(0);
  shape.seqlen_q = shape.longest_q = query.size(1);
  shape.heads = query.size(2);
  shape.heads_kv = cache.keys.size(2);
  shape.dim = query.size(3);
  shape.dim_v = cache.values.size(3);
  CUDA_EXT_CHECK(cache.keys.size(3) == shape.dim, op, "expected key_cache of head dim ", shape.dim, " to match query ",
                 shape_string(query), ", got ", shape_string(cache.keys));
  CUDA_EXT_CHECK(cache.values.sizes().slice(0, 3) == cache.keys.sizes().slice(0, 3), op,
                 "expected value_cache of the shape of key_cache ", shape_string(cache.keys),
                 " but for the last dimension, got ", shape_string(cache.values));
  CUDA_EXT_CHECK(shape.heads_kv > 0 ? shape.heads % shape.heads_kv == 0 : shape.heads == 0, op,
                 "expected the heads of query to be a multiple of the heads of key_cache, got ", shape.heads, " and ",
                 shape.heads_kv);
  if (paged) {
    CUDA_EXT_CHECK(cache.block_table->dim() == 2, op,
                   "expected block_table of shape (batch, pages of a sequence), got ",
                   shape_string(*cache.block_table));
    CUDA_EXT_CHECK(!is_given(cache.batch_idx), op,
                   "expected either block_table or cache_batch_idx, got both; reorder the rows of block_table");
    shape.seqlen_k = cache.block_table->size(1) * cache.keys.size(1);
  } else {
    CUDA_EXT_CHECK(is_given(cache.batch_idx) || cache.keys.size(0) == shape.batch, op, "expected key_cache of batch ",
                   shape.batch, " to match query ", shape_string(query), ", got ", shape_string(cache.keys),
                   "; give cache_batch_idx to use some of its rows");
    shape.seqlen_k = cache.keys.size(1);
  }
  shape.longest_k = shape.seqlen_k;
  CUDA_EXT_CHECK(shape.seqlen_k <= std::numeric_limits<int32_t>::max() / 4, op,
                 "expected a cache of fewer than 2^29 rows per sequence, got ", shape.seqlen_k);
  return shape;
}

// The values that a CPU can read. `appended`: rows that will be added.
void check_values(const char* op, const AttentionShape& shape, const KeyCache& cache, int64_t cache_rows,
                  int64_t appended) {
  for (int64_t b = 0; b < shape.batch; ++b) {
    const int64_t length = cache.lengths != nullptr ? cache.lengths[b] : cache.capacity;
    CUDA_EXT_CHECK(length >= 0 && length <= shape.seqlen_k, op, "expected cache_seqlens between 0 and ", shape.seqlen_k,
                   ", the rows of the cache, got ", length, " at index ", b);
    CUDA_EXT_CHECK(length + appended <= shape.seqlen_k, op, "the cache is full: expected room for ", appended,
                   " new rows after ", length, " of sequence ", b, ", got ", shape.seqlen_k, " rows in all");
    if (cache.left_padding != nullptr)
      CUDA_EXT_CHECK(cache.left_padding[b] >= 0 && cache.left_padding[b] <= length, op,
                     "expected cache_leftpad between 0 and cache_seqlens, ", length, ", got ", cache.left_padding[b],
                     " at index ", b);
    if (cache.rows != nullptr)
      CUDA_EXT_CHECK(cache.rows[b] >= 0 && cache.rows[b] < cache_rows, op, "expected cache_batch_idx between 0 and ",
                     cache_rows - 1, ", got ", cache.rows[b], " at index ", b);
    if (cache.block_table == nullptr || cache.page_size == 0) continue;
    const int64_t first = cache.left_padding != nullptr ? cache.left_padding[b] / cache.page_size : 0;
    const int64_t end = (length + appended + cache.page_size - 1) / cache.page_size;
    for (int64_t n = first; n < end; ++n) {
      const int64_t page = cache.block_table[b * cache.table_stride + n];
      CUDA_EXT_CHECK(page >= 0 && page < cache.pages, op, "expected block_table between 0 and ", cache.pages - 1,
                     " where the sequence has keys, got ", page, " at index (", b, ", ", n, ")");
    }
  }
}

KeyCache key_cache_of(const char* op, const Tensor& query, const AttentionShape& shape, const CacheArguments& a,
                      IndexTensors& indices) {
  KeyCache cache;
  cache.capacity = shape.seqlen_k;
  cache.lengths = check_indices(op, "cache_seqlens", a.seqlens, {shape.batch}, query, indices.seqlens);
  cache.left_padding = check_indices(op, "cache_leftpad", a.leftpad, {shape.batch}, query, indices.leftpad);
  cache.rows = check_indices(op, "cache_batch_idx", a.batch_idx, {shape.batch}, query, indices.batch_idx);
  if (is_given(a.block_table)) {
    const int64_t width = a.block_table->size(1);
    cache.block_table =
        check_indices(op, "block_table", a.block_table, {shape.batch, width}, query, indices.block_table);
    cache.table_stride = width;
    cache.page_size = a.keys.size(1);
    cache.pages = a.keys.size(0);
  }
  return cache;
}

// The mask of the newest keys, (batch, queries, queries), which is read with any strides.
Tensor check_tree_mask(const char* op, const Tensor& query, const AttentionShape& shape, const OptionalTensor& given,
                       const AttentionOptions& o) {
  if (!is_given(given)) return {};
  const int64_t batch = shape.batch, count = shape.seqlen_q;
  CUDA_EXT_CHECK(given->scalar_type() == at::kBool, op, "expected tree_mask of dtype bool, got ",
                 dtype_name(given->scalar_type()), "; convert it with .bool()");
  const bool fits =
      given->sizes() == at::IntArrayRef{count, count} || given->sizes() == at::IntArrayRef{batch, count, count};
  CUDA_EXT_CHECK(fits, op, "expected tree_mask of shape (", count, ", ", count, ") or (", batch, ", ", count, ", ",
                 count, "), queries and their own keys, got ", shape_string(*given));
  check_same_device(op, "tree_mask", *given, "query", query);
  CUDA_EXT_CHECK(!o.causal, op, "expected causal=False with tree_mask, got True; tree_mask says which keys are hidden");
  return given->expand({batch, count, count});
}

// Checks the new keys and the rotation.
CacheAppendParams append_params(const char* op, const Tensor& query, const AttentionShape& shape,
                                const CacheArguments& cache, const AppendArguments& a, bool queries_advance,
                                IndexTensors& indices) {
  CacheAppendParams p;
  const auto check_new = [&](const char* name, const Tensor& tensor, int64_t dim) {
    check_given(op, name, tensor);
    CUDA_EXT_CHECK(tensor.dim() == 4 && tensor.size(0) == shape.batch && tensor.size(2) == shape.heads_kv &&
                       tensor.size(3) == dim && tensor.size(1) == a.keys.size(1),
                   op, "expected ", name, " of shape (", shape.batch, ", new rows, ", shape.heads_kv, ", ", dim,
                   ") to match query and the cache, got ", shape_string(tensor));
    check_same_dtype(op, name, tensor, "query", query);
    check_same_device(op, name, tensor, "query", query);
  };
  CUDA_EXT_CHECK(a.keys.defined() && a.keys.dim() == 4, op,
                 "expected key of shape (batch, new rows, heads, dim), with value, got ",
                 a.keys.defined() ? shape_string(a.keys) : "None");
  check_new("key", a.keys, shape.dim);
  check_new("value", a.values, shape.dim_v);
  CUDA_EXT_CHECK(is_given(cache.seqlens), op,
                 "expected cache_seqlens with key, because new rows follow them, got None");
  p.dtype = to_dtype(query.scalar_type());
  p.batch = shape.batch;
  p.heads = shape.heads;
  p.heads_kv = shape.heads_kv;
  p.dim = shape.dim;
  p.dim_v = shape.dim_v;
  p.seqlen_q = shape.seqlen_q;
  p.count = a.keys.size(1);
  p.interleaved = a.interleaved;
  p.queries_advance = queries_advance;
  CUDA_EXT_CHECK(is_given(a.rotary_cos) == is_given(a.rotary_sin), op,
                 "expected both rotary_cos and rotary_sin or neither");
  if (!is_given(a.rotary_cos)) {
    CUDA_EXT_CHECK(!is_given(a.rotary_positions), op,
                   "expected rotary_cos and rotary_sin with rotary_positions, got None");
    return p;
  }
  const Tensor& cos = *a.rotary_cos;
  CUDA_EXT_CHECK(cos.dim() == 2 && cos.size(1) > 0 && 2 * cos.size(1) <= shape.dim && 2 * cos.size(1) % 16 == 0, op,
                 "expected rotary_cos of shape (positions, rotary_dim / 2), with rotary_dim a multiple of 16 up to the "
                 "head dim ",
                 shape.dim, ", got ", shape_string(cos));
  CUDA_EXT_CHECK(a.rotary_sin->sizes() == cos.sizes(), op, "expected rotary_sin of shape ", shape_string(cos),
                 " to match rotary_cos, got ", shape_string(*a.rotary_sin));
  check_same_dtype(op, "rotary_cos", cos, "query", query);
  check_same_dtype(op, "rotary_sin", *a.rotary_sin, "query", query);
  check_same_device(op, "rotary_cos", cos, "query", query);
  check_same_device(op, "rotary_sin", *a.rotary_sin, "query", query);
  CUDA_EXT_CHECK(is_given(a.rotary_positions) || cos.size(0) >= shape.seqlen_k, op, "expected rotary_cos of at least ",
                 shape.seqlen_k, " positions, the rows of the cache, got ", cos.size(0));
  p.first_positions =
      check_indices(op, "rotary_positions", a.rotary_positions, {shape.batch}, query, indices.positions);
  indices.cos = cos.contiguous();
  indices.sin = a.rotary_sin->contiguous();
  p.rotary_cos = indices.cos.const_data_ptr();
  p.rotary_sin = indices.sin.const_data_ptr();
  p.positions = cos.size(0);
  p.rotary_dim = 2 * cos.size(1);
  return p;
}

// Appends the new rows. Returns the queries, rotated if there is a rotation.
Tensor append_rows(const char* op, const Tensor& query, const CacheArguments& a, const AppendArguments& append,
                   CacheAppendParams& p, const CudaKernels* cuda, const LaunchScope& scope) {
  const bool on_cuda = cuda != nullptr;
  CUDA_EXT_CHECK(!on_cuda || p.dtype != Dtype::kFloat64, op,
                 "expected key of at most 32 bits on a CUDA device, got float64; convert it and the cache with .to()");
  const Tensor dense_query = with_dense_rows(query, on_cuda);
  const Tensor keys = with_dense_rows(append.keys, on_cuda), values = with_dense_rows(append.values, on_cuda);
  p.key = view_of(keys);
  p.value = view_of(values);
  p.key_cache = view_of(a.keys);
  p.value_cache = view_of(a.values);
  Tensor rotated;
  if (p.rotary_cos != nullptr) {
    rotated = empty_on(query.device(), query.sizes(), query.scalar_type());
    p.query = view_of(dense_query);
    p.rotated_query = view_of(rotated);
  }
  p.is_aligned = p.dim % 8 == 0 && p.dim_v % 8 == 0;
  for (const HeadsView& view : {p.query, p.rotated_query, p.key, p.value, p.key_cache, p.value_cache})
    p.is_aligned = p.is_aligned && attention_cuda_reads(view);
  if (on_cuda)
    launch_for(op, [&] { cuda->cache_append(p, scope.stream()); });
  else
    cache_append(p);
  return rotated.defined() ? rotated : query;
}

std::vector<int64_t> values_of(const OptionalTensor& tensor) {
  const Tensor values = is_given(tensor) ? tensor->cpu().contiguous() : Tensor();
  const int32_t* const data = values.defined() ? values.const_data_ptr<int32_t>() : nullptr;
  return data != nullptr ? std::vector<int64_t>(data, data + values.numel()) : std::vector<int64_t>();
}

// Rows [begin, end) of sequence `batch` of a cache: (1, rows, heads, dim).
Tensor cached_rows(const CacheArguments& a, const Tensor& cache, int64_t batch, int64_t row, int64_t begin,
                   int64_t end) {
  if (!is_given(a.block_table)) return cache.narrow(0, row, 1).narrow(1, begin, end - begin);
  const int64_t page_size = cache.size(1), first = page_size == 0 ? 0 : begin / page_size;
  const int64_t pages = page_size == 0 ? 0 : (end + page_size - 1) / page_size - first;
  const Tensor table = a.block_table->select(0, batch).narrow(0, first, pages).clamp(0, cache.size(0) - 1);
  return cache.index_select(0, table).flatten(0, 1).narrow(0, begin - first * page_size, end - begin).unsqueeze(0);
}

// A tree mask (queries, queries) with the keys before those of the tree, of `keys` in all: (1, 1, queries, keys).
Tensor mask_of_tree(const Tensor& tree_mask, int64_t keys) {
  const int64_t count = tree_mask.size(0), newest = std::min(count, keys);
  const Tensor earlier = tree_mask.new_ones({count, keys - newest});
  return at::cat({earlier, tree_mask.narrow(1, count - newest, newest)}, 1).unsqueeze(0).unsqueeze(0);
}

// On a CUDA device that has no kernel for the dtype or head dims: one sequence at a time, whose length the host reads.
std::tuple<Tensor, Tensor> composed_cached(const char* op, const Tensor& query, const CacheArguments& a,
                                           const Tensor& tree_mask, const AttentionShape& shape, int64_t appended,
                                           const AttentionOptions& o) {
  CUDA_EXT_CHECK(!is_capturing(query.device()), op,
                 "expected at most 32 bits and head dims up to 256 in a captured graph, got ",
                 dtype_name(query.scalar_type()), " and ", shape.dim, " and ", shape.dim_v,
                 ": others are composed of ops that read lengths on the host");
  const Composing composing(query.device());
  const std::vector<int64_t> lengths = values_of(a.seqlens), rows = values_of(a.batch_idx),
                             begins = values_of(a.leftpad);
  std::vector<Tensor> outs{
      empty_on(query.device(), {0, shape.seqlen_q, shape.heads, shape.dim_v}, query.scalar_type())};
  std::vector<Tensor> lses{
      empty_on(query.device(), {0, shape.heads, shape.seqlen_q}, accumulation_type(query.scalar_type()))};
  for (int64_t b = 0; b < shape.batch; ++b) {
    const int64_t given = lengths.empty() ? shape.seqlen_k : lengths[size_t(b)] + appended;
    const int64_t end = std::clamp<int64_t>(given, 0, shape.seqlen_k);
    const int64_t begin = begins.empty() ? 0 : std::clamp<int64_t>(begins[size_t(b)], 0, end);
    const int64_t row = rows.empty() ? b : rows[size_t(b)];
    AttentionOptions own = o;
    if (is_given(o.alibi_slopes) && o.alibi_slopes->dim() == 2) own.alibi_slopes = o.alibi_slopes->select(0, b);
    if (tree_mask.defined()) own.mask = mask_of_tree(tree_mask.select(0, b), end - begin);
    auto [out, lse] = composed_attention(query.narrow(0, b, 1), cached_rows(a, a.keys, b, row, begin, end),
                                         cached_rows(a, a.values, b, row, begin, end), own);
    outs.push_back(std::move(out));
    lses.push_back(std::move(lse));
  }
  return {at::cat(outs).contiguous(), at::cat(lses).contiguous()};
}

// The alignment of the rows of a cache, of those that CUDA kernels know.
int alignment_of(const HeadsView& view, int64_t element_bytes) {
  const int64_t strides = (view.batch_stride | view.seq_stride | view.head_stride) * element_bytes;
  const int64_t all = int64_t(reinterpret_cast<uintptr_t>(view.data)) | strides;
  return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 2;
}

std::tuple<Tensor, Tensor> attend(const char* op, const Tensor& query, const CacheArguments& a,
                                  const AppendArguments* append, const AttentionOptions& o, int64_t num_splits) {
  const AttentionShape shape = check_shapes(op, query, a);
  check_attention_options(shape, op, query, o);
  CUDA_EXT_CHECK(num_splits >= 0, op, "expected num_splits >= 0 (0 chooses by the length), got ", num_splits);
  const CudaKernels* cuda = cuda_kernels(op, query.device());
  const bool on_cuda = cuda != nullptr;
  check_in_place(op, "key_cache", a.keys);
  check_in_place(op, "value_cache", a.values);

  IndexTensors indices;
  KeyCache cache = key_cache_of(op, query, shape, a, indices);
  const Tensor tree_mask = check_tree_mask(op, query, shape, a.tree_mask, o);
  if (tree_mask.defined()) {
    cache.tree_mask = static_cast<const uint8_t*>(tree_mask.const_data_ptr());
    std::copy_n(tree_mask.strides().begin(), 3, cache.tree_strides);
  }
  CacheAppendParams new_rows;
  if (append != nullptr) {
    const bool advance = o.causal || tree_mask.defined() || o.window_left.has_value() || o.window_right.has_value();
    new_rows = append_params(op, query, shape, a, *append, advance, indices);
  }
  if (!on_cuda && query.is_cpu()) check_values(op, shape, cache, a.keys.size(0), new_rows.count);

  LaunchScope scope(query.device());
  Tensor queries = query;
  if (append != nullptr && shape.batch * shape.heads_kv > 0) {
    new_rows.cache = cache;
    queries = append_rows(op, query, a, *append, new_rows, cuda, scope);
    cache.appended = new_rows.count;
  }
  if (on_cuda && !has_attention_kernel(*cuda, query, shape.dim, shape.dim_v, /*backward=*/false))
    return composed_cached(op, queries, a, tree_mask, shape, cache.appended, o);

  AttentionShape computed = shape;
  const bool pads = on_cuda && is_padded(shape);
  if (pads) {
    computed.dim = padded_dim(shape.dim);
    computed.dim_v = padded_dim(shape.dim_v);
    queries = padded(queries);
  }
  const Tensor out =
      empty_on(query.device(), {shape.batch, shape.seqlen_q, shape.heads, computed.dim_v}, query.scalar_type());
  Tensor lse =
      empty_on(query.device(), {shape.batch, shape.heads, shape.seqlen_q}, accumulation_type(query.scalar_type()));
  CachedAttentionParams p;
  AttentionOperands operands;
  operands.query = with_dense_rows(queries, on_cuda);
  fill_params(p, operands, computed, query.scalar_type(), pads ? padded_options(o, shape) : o, on_cuda);
  p.query = view_of(operands.query);
  p.key = view_of(a.keys);
  p.value = view_of(a.values);
  p.key_width = shape.dim;
  p.value_width = shape.dim_v;
  p.key_alignment = alignment_of(p.key, size_of(p.dtype));
  p.value_alignment = alignment_of(p.value, size_of(p.dtype));
  p.num_splits = num_splits;
  p.out = view_of(out);
  p.lse = lse.mutable_data_ptr();
  p.cache = cache;
  if (lse.numel() > 0) {  // launchers plan for at least one row
    if (on_cuda)
      launch_for(op, [&] { cuda->attention_cache(p, scope.allocator(), scope.stream()); });
    else
      attention_forward(p);
  }
  return {pads ? unpadded(out, shape.dim_v) : out, std::move(lse)};
}

AttentionOptions options_of(const OptionalTensor& alibi_slopes, const OptionalTensor& sinks, ATTENTION_LOGIT_SCALARS) {
  return {{}, {}, alibi_slopes, sinks, {}, {}, {}, {}, {}, {}, {}, ATTENTION_LOGIT_NAMES};
}

std::tuple<Tensor, Tensor> flash_attention_cached(const Tensor& query, const Tensor& key_cache,
                                                  const Tensor& value_cache, const OptionalTensor& cache_seqlens,
                                                  const OptionalTensor& cache_batch_idx,
                                                  const OptionalTensor& cache_leftpad,
                                                  const OptionalTensor& block_table, const OptionalTensor& tree_mask,
                                                  const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                                                  ATTENTION_LOGIT_SCALARS, int64_t num_splits) {
  return attend("flash_attention_with_kvcache", query,
                {key_cache, value_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, tree_mask},
                nullptr, options_of(alibi_slopes, sinks, ATTENTION_LOGIT_NAMES), num_splits);
}

std::tuple<Tensor, Tensor> flash_attention_with_kvcache(
    const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& key, const Tensor& value,
    const OptionalTensor& cache_seqlens, const OptionalTensor& cache_batch_idx, const OptionalTensor& cache_leftpad,
    const OptionalTensor& block_table, const OptionalTensor& tree_mask, const OptionalTensor& rotary_cos,
    const OptionalTensor& rotary_sin, const OptionalTensor& rotary_positions, const OptionalTensor& alibi_slopes,
    const OptionalTensor& sinks, bool rotary_interleaved, ATTENTION_LOGIT_SCALARS, int64_t num_splits) {
  const AppendArguments append{key, value, rotary_cos, rotary_sin, rotary_positions, rotary_interleaved};
  return attend("flash_attention_with_kvcache", query,
                {key_cache, value_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, tree_mask},
                &append, options_of(alibi_slopes, sinks, ATTENTION_LOGIT_NAMES), num_splits);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::flexible_layout};
  m.def(
      "flash_attention_cached(Tensor query, Tensor key_cache, Tensor value_cache, Tensor? "
      "cache_seqlens=None, " CACHE_TENSORS_SCHEMA
      "Tensor? alibi_slopes=None, Tensor? sinks=None, *, " CACHE_OPTIONS_SCHEMA,
      tags);
  m.def(
      "flash_attention_with_kvcache(Tensor query, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor key, "
      "Tensor value, Tensor? cache_seqlens=None, " CACHE_TENSORS_SCHEMA
      "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? rotary_positions=None, Tensor? alibi_slopes=None, "
      "Tensor? sinks=None, *, bool rotary_interleaved=True, " CACHE_OPTIONS_SCHEMA,
      tags);
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CPU, m) {
  m.impl("flash_attention_cached", flash_attention_cached);
  m.impl("flash_attention_with_kvcache", flash_attention_with_kvcache);
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CUDA, m) {
  m.impl("flash_attention_cached", flash_attention_cached);
  m.impl("flash_attention_with_kvcache", flash_attention_with_kvcache);
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, Autograd, m) {
  m.impl("flash_attention_cached", torch::autograd::autogradNotImplementedFallback());
  m.impl("flash_attention_with_kvcache", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace cuda_ext
