#include "ops/torch_headers.h"

#include "ops/attention_params.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/diff.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "attention/attention_cuda.h"
#include "ops/attention_composed.h"
#include "ops/product.h"

namespace cuda_ext {

HeadsView view_of(const Tensor& tensor) {
  const int64_t rank = tensor.dim();
  return {tensor.data_ptr(), rank == 4 ? tensor.stride(0) : 0, tensor.stride(rank - 3), tensor.stride(rank - 2)};
}

Tensor with_dense_rows(const Tensor& tensor, bool aligned) {
  const bool dense = tensor.stride(-1) == 1 || tensor.size(-1) <= 1;
  if (dense && (!aligned || attention_cuda_reads(view_of(tensor)))) return tensor;
  return dense && tensor.is_contiguous() ? tensor.clone() : tensor.contiguous();
}

int64_t set_bias_strides(const Tensor& bias, bool is_relative, BiasStrides& strides) {
  const int64_t missing = 4 - bias.dim();
  for (int64_t d = 0; d < 4; ++d)
    strides[d] = d < missing || bias.size(d - missing) == 1 ? 0 : bias.stride(d - missing);
  strides[4] = 0;
  if (!is_relative) return 0;
  strides[2] += 1;  // to the stride of rows, if each query has one
  strides[3] = -1;
  strides[4] = 1;
  return bias.size(-1) / 2;
}

namespace {

// A bias or mask whose keys are adjacent, or all the same. Some models compute a position bias with its heads
// innermost: then every head would read the whole of it. Dimensions along which it is expanded are not copied.
Tensor with_adjacent_keys(Tensor bias) {
  if (bias.dim() == 0 || bias.size(-1) <= 1 || bias.stride(-1) <= 1) return bias;
  for (int64_t d = 0; d < bias.dim(); ++d)
    if (bias.stride(d) == 0 && bias.size(d) > 1) bias = bias.narrow(d, 0, 1);
  return bias.contiguous();
}

// A relative bias as one of (batch, heads, queries, keys).
Tensor dense_bias(const Tensor& bias, const AttentionShape& shape, const AttentionOptions& o) {
  const auto options = bias.options().dtype(at::kLong);
  const Tensor diagonal = o.is_varlen()
                              ? (o.cu_seqlens_k->diff() - o.cu_seqlens_q->diff()).view({-1, 1, 1}).to(at::kLong)
                              : at::full({1, 1, 1}, shape.longest_k - shape.longest_q, options);
  const Tensor distance =
      at::arange(shape.longest_q, options).unsqueeze(1) + diagonal - at::arange(shape.longest_k, options);
  return bias_at_distances(bias, distance);
}

void set_bias_and_mask(AttentionParams& p, AttentionOperands& operands, const AttentionShape& shape,
                       at::ScalarType type, const AttentionOptions& o, bool on_cuda) {
  if (is_given(o.bias)) operands.bias = with_adjacent_keys(*o.bias);
  if (o.bias_is_relative && operands.bias.stride(-1) == 0) operands.bias = operands.bias.contiguous();
  const bool is_relative = o.bias_is_relative && !(is_given(o.mask) && on_cuda);
  if (o.bias_is_relative && !is_relative) operands.bias = dense_bias(operands.bias, shape, o);
  if (is_given(o.mask) && on_cuda) {
    operands.bias = is_given(o.bias) ? operands.bias.detach().masked_fill(o.mask->logical_not(),
                                                                          -std::numeric_limits<double>::infinity())
                                     : with_adjacent_keys(*o.mask);
  } else if (is_given(o.mask)) {
    operands.mask = with_adjacent_keys(*o.mask);
    p.mask = static_cast<const uint8_t*>(operands.mask.const_data_ptr());
    set_bias_strides(operands.mask, /*is_relative=*/false, p.mask_strides);
  }
  if (operands.bias.defined()) {
    const auto bias_type = operands.bias.scalar_type();
    p.bias_kind = bias_type == at::kBool                 ? BiasKind::kBoolean
                  : bias_type == accumulation_type(type) ? BiasKind::kAccumulation
                                                         : BiasKind::kStorage;
    const int64_t origin = set_bias_strides(operands.bias, is_relative, p.bias_strides);
    p.bias = static_cast<const char*>(operands.bias.const_data_ptr()) + origin * operands.bias.element_size();
  }
}

}  // namespace

namespace {
std::atomic<bool> wgmma_enabled = true;
}  // namespace

bool set_attention_wgmma(bool enabled) { return wgmma_enabled.exchange(enabled); }

namespace {

double scale_of(const AttentionOptions& o, const AttentionShape& shape) {
  return o.scale.value_or(1.0 / std::sqrt(double(std::max<int64_t>(1, shape.dim))));
}

}  // namespace

DropoutCounters dropout_counters(const AttentionOptions& o, int64_t heads, int64_t rows, int64_t longest_k) {
  const DropoutPlace place = dropout_place_of(o, heads, rows, longest_k);
  const int64_t of_row = (place.keys + 3) / 4;
  return {.heads = place.heads,
          .rows = place.rows,
          .of_row = of_row,
          .first = (place.first_head * place.rows + place.first_row) * of_row + place.first_key / 4};
}

bool has_attention_kernel(const CudaKernels& cuda, const Tensor& query, int64_t dim, int64_t dim_v, bool backward) {
  const LaunchScope scope(query.device());
  return attention_cuda_runs(to_dtype(query.scalar_type()), dim, dim_v, backward, cuda.attention_device().shared_bytes);
}

Tensor padded(const Tensor& tensor) {
  return at::constant_pad_nd(tensor, {0, padded_dim(tensor.size(-1)) - tensor.size(-1)});
}
Tensor unpadded(const Tensor& tensor, int64_t dim) { return tensor.narrow(-1, 0, dim).contiguous(); }
AttentionOptions padded_options(const AttentionOptions& o, const AttentionShape& shape) {
  AttentionOptions options = o;
  options.scale = scale_of(o, shape);
  return options;
}

void fill_params(AttentionParams& p, AttentionOperands& operands, const AttentionShape& shape, const Tensor& query,
                 const Tensor& key, const Tensor& value, const AttentionOptions& o, bool on_cuda) {
  operands.query = with_dense_rows(query, on_cuda);
  operands.key = with_dense_rows(key, on_cuda);
  operands.value = with_dense_rows(value, on_cuda);
  p.query = view_of(operands.query);
  p.key = view_of(operands.key);
  p.value = view_of(operands.value);
  p.total_q = query.size(0);
  p.total_k = key.size(0);
  fill_params(p, operands, shape, query.scalar_type(), o, on_cuda);
}

void fill_params(AttentionParams& p, AttentionOperands& operands, const AttentionShape& shape, at::ScalarType type,
                 const AttentionOptions& o, bool on_cuda) {
  const auto accumulation = accumulation_type(type);
  p.dtype = to_dtype(type);
  p.batch = shape.batch;
  p.heads = shape.heads;
  p.heads_kv = shape.heads_kv;
  p.dim = shape.dim;
  p.dim_v = shape.dim_v;
  p.seqlen_q = shape.seqlen_q;
  p.seqlen_k = shape.seqlen_k;
  if (o.is_varlen()) {
    operands.cu_seqlens_q = o.cu_seqlens_q->contiguous();
    operands.cu_seqlens_k = o.cu_seqlens_k->contiguous();
    p.cu_seqlens_q = operands.cu_seqlens_q.const_data_ptr<int32_t>();
    p.cu_seqlens_k = operands.cu_seqlens_k.const_data_ptr<int32_t>();
  } else {
    p.total_q = p.total_k = 0;
  }
  p.window_left = o.window_left.value_or(AttentionParams::kUnbounded);
  p.window_right = o.causal ? 0 : o.window_right.value_or(AttentionParams::kUnbounded);
  p.scale = scale_of(o, shape);
  p.softcap = o.softcap;
  if (is_given(o.alibi_slopes)) {
    operands.alibi_slopes = o.alibi_slopes->to(accumulation).contiguous();
    p.alibi_slopes = operands.alibi_slopes.const_data_ptr();
    p.alibi_batch_stride = o.alibi_slopes->dim() == 2 ? shape.heads : 0;
  }
  if (is_given(o.sinks)) {
    operands.sinks = o.sinks->to(accumulation).contiguous();
    p.sinks = operands.sinks.const_data_ptr();
  }
  set_bias_and_mask(p, operands, shape, type, o, on_cuda);
  p.block_mask = block_mask_of(o, operands.block_mask);
  p.dropout_p = o.dropout_p;
  p.uses_wgmma = wgmma_enabled;
  p.in_tf32 = on_cuda && float32_product() == Float32Product::kTf32;
  p.dropout_counters = dropout_counters(o, shape.heads, o.is_varlen() ? p.total_q : shape.seqlen_q, shape.longest_k);
}

}  // namespace cuda_ext
