#include "ops/torch_headers.h"

#include "ops/attention_checks.h"
#include "ops/block_mask.h"

#include <ATen/ops/diff.h>
#include <ATen/ops/max.h>

#include <cmath>
#include <limits>

namespace cuda_ext {
namespace {

void check_cu_seqlens(const char* op, const char* name, const Tensor& cu_seqlens, const char* rows_name, int64_t rows,
                      const Tensor& query) {
  CUDA_EXT_CHECK(cu_seqlens.dim() == 1 && cu_seqlens.size(0) >= 1 && cu_seqlens.scalar_type() == at::kInt, op,
                 "expected ", name, " of shape (batch + 1,) and dtype int32, got ", shape_string(cu_seqlens),
                 " and dtype ", dtype_name(cu_seqlens.scalar_type()));
  check_same_device(op, name, cu_seqlens, "query", query);
  // On a GPU the values stay unread: reading them would stall the stream.
  if (!cu_seqlens.is_cpu()) return;
  const Tensor contiguous = cu_seqlens.contiguous();
  const int32_t* offsets = contiguous.const_data_ptr<int32_t>();
  const int64_t batch = cu_seqlens.size(0) - 1;
  CUDA_EXT_CHECK(offsets[0] == 0, op, "expected ", name, " to start at 0, got ", offsets[0]);
  for (int64_t b = 0; b < batch; ++b)
    CUDA_EXT_CHECK(offsets[b] <= offsets[b + 1], op, "expected ", name, " to be non-decreasing, got ", offsets[b],
                   " before ", offsets[b + 1], " at index ", b + 1);
  CUDA_EXT_CHECK(offsets[batch] <= rows, op, "expected ", name, " to end at ", rows, " at most, the rows of ",
                 rows_name, ", got ", offsets[batch]);
}

void check_side(const char* op, const char* name, OptionalInt side) {
  CUDA_EXT_CHECK(!side.has_value() || *side >= 0, op, "expected ", name, " to be >= 0 or None (unbounded), got ",
                 *side);
}

// A relative bias has an element for every distance of a query and a key.
void check_relative_bias(const char* op, const Tensor& bias, const AttentionShape& shape) {
  const int64_t distances = 2 * std::max<int64_t>({1, shape.seqlen_q, shape.seqlen_k}) - 1;
  const std::array<int64_t, 3> full{1, shape.heads, shape.batch};  // from dim -2 on
  bool fits = bias.dim() >= 1 && bias.dim() <= 4 && bias.size(-1) % 2 == 1 && bias.size(-1) >= distances;
  for (int64_t d = 2; fits && d <= bias.dim(); ++d) fits = bias.size(-d) == 1 || bias.size(-d) == full[size_t(d - 2)];
  CUDA_EXT_CHECK(fits, op, "expected relative_bias of a shape that broadcasts to (batch, heads, 1, distances) = (",
                 shape.batch, ", ", shape.heads, ", 1, ", distances, ") with an odd number of distances, or more, got ",
                 shape_string(bias));
}

// Whether `tensor` broadcasts to (batch, heads, longest_q, longest_k).
void check_broadcasts(const char* op, const char* name, const Tensor& tensor, const Tensor& query,
                      const AttentionShape& shape, bool varlen) {
  const std::array<int64_t, 4> full{shape.batch, shape.heads, shape.longest_q, shape.longest_k};
  bool broadcasts = tensor.dim() <= 4;
  for (int64_t d = 1; broadcasts && d <= tensor.dim(); ++d)
    broadcasts = tensor.size(-d) == 1 || tensor.size(-d) == full[size_t(4 - d)];
  CUDA_EXT_CHECK(broadcasts, op, "expected ", name, " of a shape that broadcasts to (batch, heads, ",
                 varlen ? "max_seqlen_q, max_seqlen_k" : "seqlen_q, seqlen_k", ") = ", shape_string(full), ", got ",
                 shape_string(tensor), "; give it these sizes or 1, aligned to the right");
  check_same_device(op, name, tensor, "query", query);
}

void check_bias_and_mask(const char* op, const Tensor& query, const AttentionShape& shape, const AttentionOptions& o) {
  if (is_given(o.bias)) {
    const char* name = o.bias_is_relative ? "relative_bias" : "attn_bias";
    if (o.bias_is_relative) {
      check_relative_bias(op, *o.bias, shape);
      check_same_device(op, name, *o.bias, "query", query);
    } else {
      check_broadcasts(op, name, *o.bias, query, shape, o.is_varlen());
    }
    const auto type = o.bias->scalar_type(), own = query.scalar_type(), accumulation = accumulation_type(own);
    CUDA_EXT_CHECK(type == own || type == accumulation, op, "expected ", name, " of dtype ",
                   own == accumulation ? "" : dtype_name(own) + " or ", dtype_name(accumulation),
                   " to match query, got ", dtype_name(type),
                   type == at::kBool ? "; give a boolean mask as attn_mask=" : "; convert it with .to()");
  }
  CUDA_EXT_CHECK(is_given(o.bias) || !o.bias_is_relative, op,
                 "expected attn_bias with bias_is_relative=True, got None; leave it False");
  if (is_given(o.mask)) {
    check_broadcasts(op, "attn_mask", *o.mask, query, shape, o.is_varlen());
    CUDA_EXT_CHECK(o.mask->scalar_type() == at::kBool, op, "expected attn_mask of dtype bool, got ",
                   dtype_name(o.mask->scalar_type()), "; give numbers that are added to the logits as attn_bias=");
  }
}

// Ranks, dtypes, devices and heads: everything that does not depend on the sequences.
void check_tensors(AttentionShape& shape, const char* op, const Tensor& query, const Tensor& key, const Tensor& value,
                   bool varlen) {
  const int64_t rank = varlen ? 3 : 4;
  const char* layout = varlen ? "(total, heads, dim)" : "(batch, seq, heads, dim)";
  const auto check_rank = [&](const char* name, const Tensor& tensor) {
    check_given(op, name, tensor);
    CUDA_EXT_CHECK(tensor.dim() == rank, op, "expected ", name, " of shape ", layout, ", got ", shape_string(tensor));
  };
  check_rank("query", query);
  check_rank("key", key);
  check_rank("value", value);
  check_floating(op, "query", query);
  check_same_dtype(op, "key", key, "query", query);
  check_same_dtype(op, "value", value, "query", query);
  check_same_device(op, "key", key, "query", query);
  check_same_device(op, "value", value, "query", query);

  shape.heads = query.size(-2);
  shape.heads_kv = key.size(-2);
  shape.dim = query.size(-1);
  shape.dim_v = value.size(-1);
  CUDA_EXT_CHECK(key.size(-1) == shape.dim, op, "expected key of head dim ", shape.dim, " to match query ",
                 shape_string(query), ", got ", shape_string(key));
  if (value.sizes().slice(0, rank - 1) != key.sizes().slice(0, rank - 1)) {
    std::string sizes;
    for (const int64_t size : key.sizes().slice(0, rank - 1)) sizes += std::to_string(size) + ", ";
    CUDA_EXT_CHECK(false, op, "expected value of shape (", sizes, "dim_v) to match key ", shape_string(key), ", got ",
                   shape_string(value));
  }
  CUDA_EXT_CHECK(shape.heads_kv > 0 ? shape.heads % shape.heads_kv == 0 : shape.heads == 0, op,
                 "expected the heads of query to be a multiple of the heads of key, got ", shape.heads, " and ",
                 shape.heads_kv);
}

void check_dropout_place(const char* op, const AttentionShape& shape, int64_t rows, const AttentionOptions& o) {
  CUDA_EXT_CHECK(o.dropout_place->size() == 6, op,
                 "expected dropout_place of 6 numbers, (heads, first_head, rows, first_row, keys, first_key), got ",
                 o.dropout_place->size());
  const DropoutPlace place = dropout_place_of(o, shape.heads, rows, shape.longest_k);
  const auto check_fits = [&](const char* what, int64_t all, int64_t first, int64_t own) {
    CUDA_EXT_CHECK(first >= 0 && first <= all - own, op, "expected dropout_place where the ", own, " ", what,
                   " of the call are among those of the larger one, got ", all, " with the first at ", first);
  };
  check_fits("heads", place.heads, place.first_head, shape.heads);
  check_fits(o.is_varlen() ? "packed rows" : "rows", place.rows, place.first_row, rows);
  check_fits("keys", place.keys, place.first_key, shape.longest_k);
  CUDA_EXT_CHECK(place.first_key % 4 == 0, op,
                 "expected dropout_place with a first_key that is a multiple of 4, because four keys share a counter, "
                 "got ",
                 place.first_key, "; divide the keys at a multiple of 4");
}

void check_varlen(AttentionShape& shape, const char* op, const Tensor& query, const Tensor& key,
                  const AttentionOptions& o) {
  CUDA_EXT_CHECK(is_given(o.cu_seqlens_k), op, "expected cu_seqlens_k with cu_seqlens_q, got None");
  check_cu_seqlens(op, "cu_seqlens_q", *o.cu_seqlens_q, "query", query.size(0), query);
  check_cu_seqlens(op, "cu_seqlens_k", *o.cu_seqlens_k, "key", key.size(0), query);
  CUDA_EXT_CHECK(o.cu_seqlens_q->size(0) == o.cu_seqlens_k->size(0), op, "expected cu_seqlens_k of shape ",
                 shape_string(*o.cu_seqlens_q), " to match cu_seqlens_q, got ", shape_string(*o.cu_seqlens_k));
  shape.batch = o.cu_seqlens_q->size(0) - 1;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const auto longest = [&](const char* name, const Tensor& cu_seqlens, const OptionalSymInt& limit) {
    const bool given = limit.has_value();
    const int64_t most = given ? limit->guard_int(__FILE__, __LINE__) : kMost;
    int64_t length = 0;
    if (cu_seqlens.is_cpu()) {
      const Tensor contiguous = cu_seqlens.contiguous();
      const int32_t* offsets = contiguous.const_data_ptr<int32_t>();
      for (int64_t b = 0; b < shape.batch; ++b) length = std::max<int64_t>(length, offsets[b + 1] - offsets[b]);
    } else if (!given && shape.batch > 0) {
      length = cu_seqlens.diff().max().item<int>();  // waits for the stream
    }
    CUDA_EXT_CHECK(length <= most, op, "expected ", name, " of at least ", length, ", the longest sequence, got ",
                   most);
    CUDA_EXT_CHECK(most <= kMost, op, "expected ", name, " of at most ", kMost,
                   ", all that int32 cu_seqlens can hold, got ", most);
    return given ? most : length;
  };
  shape.longest_q = longest("max_seqlen_q", *o.cu_seqlens_q, o.max_seqlen_q);
  shape.longest_k = longest("max_seqlen_k", *o.cu_seqlens_k, o.max_seqlen_k);
  // No sequence is longer than all rows, so launches need not cover more.
  shape.seqlen_q = std::min(shape.longest_q, query.size(0));
  shape.seqlen_k = std::min(shape.longest_k, key.size(0));
}

}  // namespace

DropoutPlace dropout_place_of(const AttentionOptions& o, int64_t heads, int64_t rows, int64_t longest_k) {
  if (!o.dropout_place.has_value()) return {heads, 0, rows, 0, longest_k, 0};
  const at::IntArrayRef place = *o.dropout_place;
  return {place[0], place[1], place[2], place[3], place[4], place[5]};
}

void check_attention_options(const AttentionShape& shape, const char* op, const Tensor& query,
                             const AttentionOptions& o) {
  check_side(op, "window left", o.window_left);
  check_side(op, "window right", o.window_right);
  CUDA_EXT_CHECK(!o.scale.has_value() || std::isfinite(*o.scale), op, "expected a finite scale, got ", *o.scale);
  CUDA_EXT_CHECK(std::isfinite(o.softcap) && o.softcap >= 0, op, "expected a finite softcap >= 0 (0 for none), got ",
                 o.softcap);
  CUDA_EXT_CHECK(o.dropout_p >= 0 && o.dropout_p < 1, op, "expected dropout_p in [0, 1), got ", o.dropout_p);
  if (is_given(o.alibi_slopes)) {
    const bool per_head = o.alibi_slopes->sizes() == at::IntArrayRef{shape.heads};
    const bool per_batch = o.alibi_slopes->sizes() == at::IntArrayRef{shape.batch, shape.heads};
    CUDA_EXT_CHECK(per_head || per_batch, op, "expected alibi_slopes of shape (", shape.heads, ",) or (", shape.batch,
                   ", ", shape.heads, "), got ", shape_string(*o.alibi_slopes));
    check_floating(op, "alibi_slopes", *o.alibi_slopes);
    check_same_device(op, "alibi_slopes", *o.alibi_slopes, "query", query);
  }
  if (is_given(o.sinks)) {
    CUDA_EXT_CHECK(o.sinks->sizes() == at::IntArrayRef{shape.heads}, op, "expected sinks of shape (", shape.heads,
                   ",), got ", shape_string(*o.sinks));
    check_floating(op, "sinks", *o.sinks);
    check_same_device(op, "sinks", *o.sinks, "query", query);
  }
  check_bias_and_mask(op, query, shape, o);
  check_block_mask(op, query, shape, o);
}

at::ScalarType check_result_dtype(const char* op, const char* name, const Tensor& query, const AttentionOptions& o) {
  const auto own = query.scalar_type(), accumulation = accumulation_type(own), type = o.result_dtype.value_or(own);
  CUDA_EXT_CHECK(type == own || type == accumulation, op, "expected ", name, " to be None, ", dtype_name(own),
                 own == accumulation ? "" : " or " + dtype_name(accumulation), ", got ", dtype_name(type),
                 "; convert the result with .to()");
  return type;
}

AttentionShape check_attention(const char* op, const Tensor& query, const Tensor& key, const Tensor& value,
                               const AttentionOptions& o) {
  AttentionShape shape{};
  check_tensors(shape, op, query, key, value, o.is_varlen());
  if (o.is_varlen()) {
    check_varlen(shape, op, query, key, o);
  } else {
    shape.batch = query.size(0);
    shape.seqlen_q = shape.longest_q = query.size(1);
    shape.seqlen_k = shape.longest_k = key.size(1);
    CUDA_EXT_CHECK(key.size(0) == shape.batch, op, "expected key of batch ", shape.batch, " to match query ",
                   shape_string(query), ", got ", shape_string(key));
  }
  check_attention_options(shape, op, query, o);
  if (o.dropout_place.has_value()) check_dropout_place(op, shape, o.is_varlen() ? query.size(0) : shape.seqlen_q, o);
  return shape;
}

}  // namespace cuda_ext
