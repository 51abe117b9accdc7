// flash_attention and flash_attention_varlen: schema, checks, autograd, autocast, dispatch. Two public ops share one
// forward and one backward op, in which cu_seqlens are given for packed sequences and absent for (batch, seq, ...).
#include "attention/attention.h"
#include "ops/attention_composed.h"

#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>
#include <ATen/ops/diff.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <cmath>
#include <limits>
#include <tuple>

#include "ops/autograd.h"
#include "ops/device.h"

namespace cuda_ext {
namespace {

using at::IntArrayRef;
// vmap rules ask that tensors be positional.
#define ATTENTION_OPTION_SCHEMA(tensors, more)                                                               \
  "Tensor? alibi_slopes=None, Tensor? sinks=None, " tensors "*, " more                                       \
  "bool causal=False, int? window_left=None, int? window_right=None, float? scale=None, float softcap=0.0, " \
  "float dropout_p=0.0, bool? deterministic=None"
#define ATTENTION_BIAS_SCHEMA "Tensor? bias=None, "
#define ATTENTION_LENGTHS_SCHEMA "int? max_seqlen_q=None, int? max_seqlen_k=None, "
#define ATTENTION_PACKING_SCHEMA "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "

using Options = AttentionOptions;

struct Shape {
  int64_t batch, seqlen_q, seqlen_k, heads, heads_kv, dim, dim_v;
  int64_t dropout_keys;  // what the numbers of a row of weights are laid out for
};

void check_cu_seqlens(const char* op, const char* name, const Tensor& cu_seqlens, const char* rows_name, int64_t rows,
                      const Tensor& query) {
  CUDA_EXT_CHECK(cu_seqlens.dim() == 1 && cu_seqlens.size(0) >= 1 && cu_seqlens.scalar_type() == at::kInt, op,
                 "expected ", name, " of shape (batch + 1,) and dtype int32, got ", shape_string(cu_seqlens),
                 " and dtype ", cu_seqlens.scalar_type());
  check_same_device(op, name, cu_seqlens, "query", query);
  // On a GPU the values stay unread: reading them would stall the stream.
  if (!cu_seqlens.is_cpu()) return;
  const Tensor contiguous = cu_seqlens.contiguous();
  const int32_t* at = contiguous.const_data_ptr<int32_t>();
  const int64_t batch = cu_seqlens.size(0) - 1;
  CUDA_EXT_CHECK(at[0] == 0, op, "expected ", name, " to start at 0, got ", at[0]);
  for (int64_t b = 0; b < batch; ++b)
    CUDA_EXT_CHECK(at[b] <= at[b + 1], op, "expected ", name, " to be non-decreasing, got ", at[b], " before ",
                   at[b + 1], " at index ", b + 1);
  CUDA_EXT_CHECK(at[batch] == rows, op, "expected ", name, " to end at ", rows, ", the rows of ", rows_name, ", got ",
                 at[batch]);
}

void check_side(const char* op, const char* name, OptionalInt side) {
  CUDA_EXT_CHECK(!side.has_value() || *side >= 0, op, "expected ", name, " to be >= 0 or None (unbounded), got ",
                 *side);
}

void check_bias(const char* op, const Tensor& bias, const Tensor& query, const Shape& shape) {
  const std::array<int64_t, 4> full{shape.batch, shape.heads, shape.seqlen_q, shape.seqlen_k};
  bool broadcasts = bias.dim() <= 4;
  for (int64_t d = 1; broadcasts && d <= bias.dim(); ++d)
    broadcasts = bias.size(-d) == 1 || bias.size(-d) == full[size_t(4 - d)];
  CUDA_EXT_CHECK(broadcasts, op, "expected bias of a shape that broadcasts to (batch, heads, seqlen_q, seqlen_k) = ",
                 shape_string(full), ", got ", shape_string(bias), "; give it these sizes or 1, aligned to the right");
  const auto type = bias.scalar_type(), accumulation = accumulation_type(query.scalar_type());
  CUDA_EXT_CHECK(type == at::kBool || type == query.scalar_type() || type == accumulation, op,
                 "expected bias of dtype Bool",
                 query.scalar_type() == accumulation ? "" : c10::str(", ", query.scalar_type()), " or ", accumulation,
                 " to match query, got ", type, "; convert it with .to()");
  check_same_device(op, "bias", bias, "query", query);
}

Shape check(const char* op, const Tensor& query, const Tensor& key, const Tensor& value, const Options& o) {
  const bool packed = o.packed();
  const int64_t rank = packed ? 3 : 4;
  const char* layout = packed ? "(total, heads, dim)" : "(batch, seq, heads, dim)";
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

  Shape shape{};
  shape.heads = query.size(-2);
  shape.heads_kv = key.size(-2);
  shape.dim = query.size(-1);
  shape.dim_v = value.size(-1);
  CUDA_EXT_CHECK(key.size(-1) == shape.dim, op, "expected key of head dim ", shape.dim, " to match query ",
                 shape_string(query), ", got ", shape_string(key));
  CUDA_EXT_CHECK(value.sizes().slice(0, rank - 1) == key.sizes().slice(0, rank - 1), op, "expected value of shape ",
                 shape_string(key.sizes().slice(0, rank - 1)), " + (dim_v,) to match key ", shape_string(key), ", got ",
                 shape_string(value));
  CUDA_EXT_CHECK(shape.heads_kv > 0 ? shape.heads % shape.heads_kv == 0 : shape.heads == 0, op,
                 "expected the heads of query to be a multiple of the heads of key, got ", shape.heads, " and ",
                 shape.heads_kv);
  if (packed) {
    CUDA_EXT_CHECK(is_given(o.cu_seqlens_k), op, "expected cu_seqlens_k beside cu_seqlens_q, got None");
    check_cu_seqlens(op, "cu_seqlens_q", *o.cu_seqlens_q, "query", query.size(0), query);
    check_cu_seqlens(op, "cu_seqlens_k", *o.cu_seqlens_k, "key", key.size(0), query);
    CUDA_EXT_CHECK(o.cu_seqlens_q->size(0) == o.cu_seqlens_k->size(0), op, "expected cu_seqlens_k of shape ",
                   shape_string(*o.cu_seqlens_q), " to match cu_seqlens_q, got ", shape_string(*o.cu_seqlens_k));
    shape.batch = o.cu_seqlens_q->size(0) - 1;
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    const auto longest = [&](const char* name, const Tensor& cu_seqlens, OptionalInt given) {
      int64_t length = 0;
      if (cu_seqlens.is_cpu()) {
        const Tensor contiguous = cu_seqlens.contiguous();
        const int32_t* at = contiguous.const_data_ptr<int32_t>();
        for (int64_t b = 0; b < shape.batch; ++b) length = std::max<int64_t>(length, at[b + 1] - at[b]);
      } else if (!given.has_value() && shape.batch > 0) {
        length = cu_seqlens.diff().max().item<int>();  // waits for the stream
      }
      CUDA_EXT_CHECK(!given.has_value() || *given >= length, op, "expected ", name, " of at least ", length,
                     ", the longest sequence, got ", *given);
      CUDA_EXT_CHECK(!given.has_value() || *given <= kMost, op, "expected ", name, " of at most ", kMost,
                     ", all that int32 cu_seqlens can hold, got ", *given);
      return given.value_or(length);
    };
    // No sequence has more rows than there are: launches need not go by more.
    shape.seqlen_q = std::min(longest("max_seqlen_q", *o.cu_seqlens_q, o.max_seqlen_q), query.size(0));
    shape.dropout_keys = longest("max_seqlen_k", *o.cu_seqlens_k, o.max_seqlen_k);
    shape.seqlen_k = std::min(shape.dropout_keys, key.size(0));
  } else {
    shape.batch = query.size(0);
    shape.seqlen_q = query.size(1);
    shape.seqlen_k = shape.dropout_keys = key.size(1);
    CUDA_EXT_CHECK(key.size(0) == shape.batch, op, "expected key of batch ", shape.batch, " to match query ",
                   shape_string(query), ", got ", shape_string(key));
  }

  check_side(op, "window left", o.window_left);
  check_side(op, "window right", o.window_right);
  CUDA_EXT_CHECK(!o.causal || o.window_right.value_or(0) == 0, op,
                 "expected window right to be 0 or None with causal=True, which hides every key to the right, got ",
                 *o.window_right);
  CUDA_EXT_CHECK(!o.scale.has_value() || std::isfinite(*o.scale), op, "expected a finite scale, got ", *o.scale);
  CUDA_EXT_CHECK(std::isfinite(o.softcap) && o.softcap >= 0, op, "expected a finite softcap >= 0 (0 for none), got ",
                 o.softcap);
  CUDA_EXT_CHECK(o.dropout_p >= 0 && o.dropout_p < 1, op, "expected dropout_p in [0, 1), got ", o.dropout_p);
  if (is_given(o.alibi_slopes)) {
    const bool per_head = o.alibi_slopes->sizes() == IntArrayRef{shape.heads};
    const bool per_batch = o.alibi_slopes->sizes() == IntArrayRef{shape.batch, shape.heads};
    CUDA_EXT_CHECK(per_head || per_batch, op, "expected alibi_slopes of shape (", shape.heads, ",) or (", shape.batch,
                   ", ", shape.heads, "), got ", shape_string(*o.alibi_slopes));
    check_floating(op, "alibi_slopes", *o.alibi_slopes);
    check_same_device(op, "alibi_slopes", *o.alibi_slopes, "query", query);
  }
  if (is_given(o.sinks)) {
    CUDA_EXT_CHECK(o.sinks->sizes() == IntArrayRef{shape.heads}, op, "expected sinks of shape (", shape.heads,
                   ",), got ", shape_string(*o.sinks));
    check_floating(op, "sinks", *o.sinks);
    check_same_device(op, "sinks", *o.sinks, "query", query);
  }
  if (is_given(o.bias)) {
    CUDA_EXT_CHECK(!packed, op, "expected no bias beside cu_seqlens_q; call the op once for each sequence");
    check_bias(op, *o.bias, query, shape);
  }
  return shape;
}

HeadsView view_of(const Tensor& tensor) {
  const int64_t rank = tensor.dim();
  return {tensor.data_ptr(), rank == 4 ? tensor.stride(0) : 0, tensor.stride(rank - 3), tensor.stride(rank - 2)};
}

// The kernels walk rows: the last dimension has to be dense, the others may have any stride. CUDA kernels read 16
// bytes at a time (`aligned`), and so they have to begin at multiples of that.
Tensor with_dense_rows(const Tensor& tensor, bool aligned) {
  const bool dense = tensor.stride(-1) == 1 || tensor.size(-1) <= 1;
  if (dense && (!aligned || attention_sm80_reads(view_of(tensor)))) return tensor;
  return dense && tensor.is_contiguous() ? tensor.clone() : tensor.contiguous();
}

// Over the four dims that `tensor` broadcasts to; 0 where it is broadcast.
void broadcast_strides(const Tensor& tensor, int64_t (&strides)[4]) {
  const int64_t missing = 4 - tensor.dim();
  for (int64_t d = 0; d < 4; ++d)
    strides[d] = d < missing || tensor.size(d - missing) == 1 ? 0 : tensor.stride(d - missing);
}

// Tensors that a Params points into, so that they live until the launch.
struct Operands {
  Tensor query, key, value, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k;
};

void fill(AttentionParams& p, Operands& operands, const Shape& shape, const Tensor& query, const Tensor& key,
          const Tensor& value, const Options& o, bool on_cuda) {
  const auto accumulation = accumulation_type(query.scalar_type());
  operands.query = with_dense_rows(query, on_cuda);
  operands.key = with_dense_rows(key, on_cuda);
  operands.value = with_dense_rows(value, on_cuda);
  p.query = view_of(operands.query);
  p.key = view_of(operands.key);
  p.value = view_of(operands.value);
  p.dtype = to_dtype(query.scalar_type());
  p.batch = shape.batch;
  p.heads = shape.heads;
  p.heads_kv = shape.heads_kv;
  p.dim = shape.dim;
  p.dim_v = shape.dim_v;
  p.seqlen_q = shape.seqlen_q;
  p.seqlen_k = shape.seqlen_k;
  if (o.packed()) {
    operands.cu_seqlens_q = o.cu_seqlens_q->contiguous();
    operands.cu_seqlens_k = o.cu_seqlens_k->contiguous();
    p.cu_seqlens_q = operands.cu_seqlens_q.const_data_ptr<int32_t>();
    p.cu_seqlens_k = operands.cu_seqlens_k.const_data_ptr<int32_t>();
    p.total_q = query.size(0);
  }
  p.window_left = o.window_left.value_or(AttentionParams::kUnbounded);
  p.window_right = o.causal ? 0 : o.window_right.value_or(AttentionParams::kUnbounded);
  p.scale = o.scale.value_or(1.0 / std::sqrt(double(std::max<int64_t>(1, shape.dim))));
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
  if (is_given(o.bias)) {
    p.bias_kind = o.bias->scalar_type() == at::kBool             ? BiasKind::kBoolean
                  : o.bias->scalar_type() == query.scalar_type() ? BiasKind::kStorage
                                                                 : BiasKind::kAccumulation;
    p.bias = o.bias->const_data_ptr();
    broadcast_strides(*o.bias, p.bias_strides);
  }
  p.dropout_p = o.dropout_p;
  p.dropout_pitch = (shape.dropout_keys + 3) / 4 * 4;
}

Tensor empty_lse(const Tensor& query, const Shape& shape, bool packed) {
  const auto type = accumulation_type(query.scalar_type());
  return packed ? empty_on(query.device(), {shape.heads, query.size(0)}, type)
                : empty_on(query.device(), {shape.batch, shape.heads, shape.seqlen_q}, type);
}

// Draws the random numbers of a call, and returns what its backward needs to have them again: (seed, offset), on
// `device`; empty without dropout.
Tensor draw_rng_state(AttentionParams& p, at::Device device, bool on_cuda) {
  if (p.dropout_p == 0) {
    // One for all calls: it has no elements that they could share.
    static const Tensor none = [] {
      const c10::InferenceMode ordinary(false);
      return empty_on(at::kCPU, {0}, at::kLong);
    }();
    return none;
  }
  p.rng = draw_rng(device);
  Tensor state = empty_on(device, {2}, at::kLong);
  auto* const values = static_cast<uint64_t*>(state.mutable_data_ptr());
  if (on_cuda) {
    p.rng_state = values;
  } else {
    values[0] = p.rng.seed;
    values[1] = p.rng.offset;
  }
  return state;
}

void set_rng(AttentionParams& p, const char* op, const Tensor& rng_state, const Tensor& query, bool on_cuda) {
  CUDA_EXT_CHECK(rng_state.defined(), op, "expected rng_state with dropout, as the forward returned it, got None");
  CUDA_EXT_CHECK(rng_state.numel() == 2 && rng_state.scalar_type() == at::kLong, op,
                 "expected rng_state of shape (2,) and dtype int64, as the forward returned it, got ",
                 shape_string(rng_state), " and dtype ", rng_state.scalar_type());
  check_same_device(op, "rng_state", rng_state, "query", query);
  const auto* const values = static_cast<const uint64_t*>(rng_state.const_data_ptr());
  if (on_cuda) {
    p.rng = {values, values + 1, 0, 0};
  } else {
    p.rng = {nullptr, nullptr, values[0], values[1]};
  }
}

// What the CUDA kernels can do of what the CPU's can.
void check_cuda(const char* op, const Shape& shape, const Tensor& query) {
  CUDA_EXT_CHECK(query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16, op,
                 "expected float16 or bfloat16 on a CUDA device, got ", query.scalar_type(),
                 "; cast, or run it under torch.autocast");
  const auto check_dim = [&](const char* name, int64_t dim, const char* if_odd, const char* if_large) {
    const bool large = dim > sm80::kMaxHeadDim;
    CUDA_EXT_CHECK(!large && dim % 8 == 0, op, "expected a ", name, " that is a multiple of 8 up to ",
                   sm80::kMaxHeadDim, " on a CUDA device, got ", dim, "; ", large ? if_large : if_odd);
  };
  check_dim("head dim of query and key", shape.dim, "pad both with zeros and give the scale of the dim before that",
            "take torch.nn.functional.scaled_dot_product_attention, or the CPU");
  check_dim("head dim of value", shape.dim_v, "pad it with zeros and cut the output",
            "split value along its last dimension, and concatenate the outputs of the parts");
}

std::tuple<Tensor, Tensor, Tensor> forward(const char* op, const Tensor& query, const Tensor& key, const Tensor& value,
                                           const Options& o) {
  const Shape shape = check(op, query, key, value, o);
  const CudaKernels* cuda = cuda_kernels(op, query.device(), query.scalar_type());
  if (cuda != nullptr) check_cuda(op, shape, query);
  AttentionParams p;
  Operands operands;
  fill(p, operands, shape, query, key, value, o, cuda != nullptr);
  c10::SmallVector<int64_t, 4> out_sizes(query.sizes());
  out_sizes.back() = shape.dim_v;
  Tensor out = empty_on(query.device(), out_sizes, query.scalar_type());
  Tensor lse = empty_lse(query, shape, o.packed());
  Tensor rng_state = draw_rng_state(p, query.device(), cuda != nullptr);
  p.out = view_of(out);
  p.lse = lse.mutable_data_ptr();
  if (cuda != nullptr) {
    LaunchScope scope(query.device());
    cuda->attention_forward(p, scope.workspace(cuda->attention_forward_workspace(p)), scope.stream());
  } else {
    attention_forward(p);
  }
  return {std::move(out), std::move(lse), std::move(rng_state)};
}

std::tuple<Tensor, Tensor, Tensor> flash_attention_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& cu_seqlens_q,
    const OptionalTensor& cu_seqlens_k, const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
    const OptionalTensor& bias, OptionalInt max_seqlen_q, OptionalInt max_seqlen_k, ATTENTION_SCALARS) {
  const Options o{cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks,
                  bias,         max_seqlen_q, max_seqlen_k, ATTENTION_SCALAR_NAMES};
  // The op that the caller knows.
  return forward(o.packed() ? "flash_attention_varlen" : "flash_attention", query, key, value, o);
}

std::tuple<Tensor, Tensor> flash_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                           const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                                           const OptionalTensor& bias, ATTENTION_SCALARS) {
  auto [out, lse, rng_state] = forward("flash_attention", query, key, value,
                                       {{}, {}, alibi_slopes, sinks, bias, {}, {}, ATTENTION_SCALAR_NAMES});
  return {std::move(out), std::move(lse)};
}

std::tuple<Tensor, Tensor> flash_attention_varlen(const Tensor& query, const Tensor& key, const Tensor& value,
                                                  const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                                  const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                                                  OptionalInt max_seqlen_q, OptionalInt max_seqlen_k,
                                                  ATTENTION_SCALARS) {
  auto [out, lse, rng_state] = forward(
      "flash_attention_varlen", query, key, value,
      {cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, {}, max_seqlen_q, max_seqlen_k, ATTENTION_SCALAR_NAMES});
  return {std::move(out), std::move(lse)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flash_attention_backward(
    const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& lse, const OptionalTensor& rng_state, bool needs_grad_bias,
    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k, const OptionalTensor& alibi_slopes,
    const OptionalTensor& sinks, const OptionalTensor& bias, OptionalInt max_seqlen_q, OptionalInt max_seqlen_k,
    ATTENTION_SCALARS) {
  constexpr const char* op = "flash_attention_backward";
  const Options o{cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks,
                  bias,         max_seqlen_q, max_seqlen_k, ATTENTION_SCALAR_NAMES};
  const Shape shape = check(op, query, key, value, o);
  const auto check_like = [&](const char* name, const Tensor& tensor, const char* other_name, const Tensor& other) {
    CUDA_EXT_CHECK(tensor.sizes() == other.sizes(), op, "expected ", name, " of shape ", shape_string(other),
                   " to match ", other_name, ", got ", shape_string(tensor));
    check_same_dtype(op, name, tensor, other_name, other);
    check_same_device(op, name, tensor, other_name, other);
  };
  check_same_dtype(op, "out", out, "query", query);
  check_like("grad_out", grad_out, "out", out);
  if (is_given(grad_lse)) check_like("grad_lse", *grad_lse, "lse", lse);
  CUDA_EXT_CHECK(!needs_grad_bias || (is_given(bias) && bias->is_floating_point()), op,
                 "expected an additive bias with needs_grad_bias=True, got ", is_given(bias) ? "a boolean one" : "None",
                 "; leave it False");

  const CudaKernels* cuda = cuda_kernels(op, query.device(), query.scalar_type());
  if (cuda != nullptr) check_cuda(op, shape, query);
  AttentionBackwardParams p;
  Operands operands;
  fill(p, operands, shape, query, key, value, o, cuda != nullptr);
  p.deterministic = o.deterministic.value_or(at::globalContext().deterministicAlgorithms());
  if (dropout_p > 0) set_rng(p, op, value_or_empty(rng_state), query, cuda != nullptr);
  const Tensor dense_out = with_dense_rows(out, cuda != nullptr),
               dense_grad_out = with_dense_rows(grad_out, cuda != nullptr);
  const Tensor dense_lse = lse.contiguous();
  const Tensor dense_grad_lse = is_given(grad_lse) ? grad_lse->contiguous() : Tensor();
  const auto empty_like = [](const Tensor& t) { return empty_on(t.device(), t.sizes(), t.scalar_type()); };
  Tensor grad_query = empty_like(query), grad_key = empty_like(key), grad_value = empty_like(value);
  Tensor grad_sinks = empty_on(lse.device(), {is_given(sinks) ? shape.heads : 0}, lse.scalar_type());
  // Atomics add what a broadcast bias has in common in no fixed order; with an element for each they have no choice.
  const bool deterministic_sum = cuda != nullptr && p.deterministic;
  Tensor grad_bias = !needs_grad_bias ? empty_on(lse.device(), {0}, lse.scalar_type())
                     : deterministic_sum
                         ? at::zeros({shape.batch, shape.heads, shape.seqlen_q, shape.seqlen_k}, lse.options())
                         : at::zeros(bias->sizes(), lse.options());
  p.out = view_of(dense_out);
  p.grad_out = view_of(dense_grad_out);
  p.grad_query = view_of(grad_query);
  p.grad_key = view_of(grad_key);
  p.grad_value = view_of(grad_value);
  p.lse = dense_lse.data_ptr();
  p.grad_lse = dense_grad_lse.defined() ? dense_grad_lse.const_data_ptr() : nullptr;
  p.grad_sinks = is_given(sinks) ? grad_sinks.mutable_data_ptr() : nullptr;
  if (needs_grad_bias) {
    p.grad_bias = grad_bias.mutable_data_ptr();
    p.grad_bias_elements = grad_bias.numel();
    broadcast_strides(grad_bias, p.grad_bias_strides);
  }
  if (cuda != nullptr) {
    LaunchScope scope(query.device());
    cuda->attention_backward(p, scope.workspace(cuda->attention_backward_workspace(p)), scope.stream());
  } else {
    attention_backward(p);
  }
  if (is_given(sinks)) grad_sinks = grad_sinks.to(sinks->scalar_type());
  if (needs_grad_bias) grad_bias = at::sum_to(std::move(grad_bias), bias->sizes()).to(bias->scalar_type());
  return {std::move(grad_query), std::move(grad_key), std::move(grad_value), std::move(grad_sinks),
          std::move(grad_bias)};
}

}  // namespace

// The autograd node, outside of the anonymous namespace because its name shows in profiles and as grad_fn. Its edges
// lead to query, key, value, sinks and bias.
struct FlashAttentionBackward : torch::autograd::Function<FlashAttentionBackward> {
  static constexpr const char* kNodeName = CUDA_EXT_OP("FlashAttentionBackward");

  static void save_options(AutogradContext* ctx, const Options& o) {
    save_option(ctx, "max_seqlen_q", o.max_seqlen_q);
    save_option(ctx, "max_seqlen_k", o.max_seqlen_k);
    save_option(ctx, "causal", o.causal);
    save_option(ctx, "window_left", o.window_left);
    save_option(ctx, "window_right", o.window_right);
    save_option(ctx, "scale", o.scale);
    save_option(ctx, "softcap", o.softcap);
    save_option(ctx, "dropout_p", o.dropout_p);
    save_option(ctx, "deterministic", o.deterministic);
  }

  // out, lse and rng_state are undefined where backward has to be composed. Without optional tensors none are saved: on
  // small inputs each costs as much as a small op.
  static variable_list saved(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
                             const Tensor& lse, const Tensor& rng_state, const Options& o) {
    if (o.dropout_p == 0 && !o.packed() && !is_given(o.alibi_slopes) && !is_given(o.sinks) && !is_given(o.bias))
      return {query, key, value, out, lse};
    return {query,
            key,
            value,
            out,
            lse,
            rng_state,
            value_or_empty(o.cu_seqlens_q),
            value_or_empty(o.cu_seqlens_k),
            value_or_empty(o.alibi_slopes),
            value_or_empty(o.sinks),
            value_or_empty(o.bias)};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor &grad_given = grads[0], &grad_lse = grads[1];
    if (!grad_given.defined() && !grad_lse.defined()) return variable_list(5);
    auto saved = ctx->get_saved_variables();
    saved.resize(11);
    const Tensor &query = saved[0], &key = saved[1], &value = saved[2], &out = saved[3], &lse = saved[4];
    const Options o{optional(saved[6]),
                    optional(saved[7]),
                    optional(saved[8]),
                    optional(saved[9]),
                    optional(saved[10]),
                    saved_option<OptionalInt>(ctx, "max_seqlen_q"),
                    saved_option<OptionalInt>(ctx, "max_seqlen_k"),
                    saved_option<bool>(ctx, "causal"),
                    saved_option<OptionalInt>(ctx, "window_left"),
                    saved_option<OptionalInt>(ctx, "window_right"),
                    saved_option<OptionalDouble>(ctx, "scale"),
                    saved_option<double>(ctx, "softcap"),
                    saved_option<double>(ctx, "dropout_p"),
                    saved_option<OptionalBool>(ctx, "deterministic")};
    const Tensor grad_out = grad_given.defined() ? grad_given : zeros_like_out(query, value);
    const bool wants_sinks = is_given(o.sinks) && ctx->needs_input_grad(3);
    const bool wants_bias = is_given(o.bias) && ctx->needs_input_grad(4);
    if (!out.defined() || needs_composed_backward(grad_out) || (grad_lse.defined() && tangent_of(grad_lse).defined())) {
      AttentionGradients g = composed_attention_backward(grad_out, grad_lse, query, key, value, saved[5], o);
      return {g.query, g.key, g.value, wants_sinks ? g.sinks : Tensor(), wants_bias ? g.bias : Tensor()};
    }
    static const auto op = find_op<decltype(flash_attention_backward)>(CUDA_EXT_OP("flash_attention_backward"));
    auto [grad_query, grad_key, grad_value, grad_sinks, grad_bias] =
        o.call(op, grad_out, optional(grad_lse), query, key, value, out, lse, optional(saved[5]), wants_bias);
    return {grad_query, grad_key, grad_value, wants_sinks ? grad_sinks : Tensor(), wants_bias ? grad_bias : Tensor()};
  }

 private:
  static Tensor zeros_like_out(const Tensor& query, const Tensor& value) {
    auto sizes = query.sym_sizes().vec();
    sizes.back() = value.sym_size(-1);
    return at::zeros_symint(sizes, query.options());
  }
};

namespace {

// What the two public ops do at the Autograd key; `call_public` calls the op itself.
template <class CallPublic>
std::tuple<Tensor, Tensor> with_derivatives(const char* op, const Tensor& query, const Tensor& key, const Tensor& value,
                                            const Options& o, const CallPublic& call_public) {
  const Derivatives wanted = derivatives_of(query, key, value, o.alibi_slopes, o.sinks, o.bias);
  if (!wanted.reverse && !wanted.forward) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_public();
  }
  CUDA_EXT_CHECK(!any_requires_grad(o.alibi_slopes) && !any_has_tangent(o.alibi_slopes), op,
                 "expected alibi_slopes that need no gradient, got requires_grad=True; detach() them");
  // Numbers that lie below the transform cannot be drawn again by a composed derivative.
  if ((wanted.composed || wanted.forward) && o.dropout_p > 0) return composed_attention(query, key, value, o);

  Tensor out, lse, rng_state;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (wanted.reverse && !wanted.composed) {
      static const auto forward_op = find_op<decltype(flash_attention_forward)>(CUDA_EXT_OP("flash_attention_forward"));
      std::tie(out, lse, rng_state) = o.call(forward_op, query, key, value);
    } else {
      std::tie(out, lse) = call_public();
    }
  }
  if (wanted.reverse) {
    const auto node = make_node<FlashAttentionBackward>(query, key, value, o.sinks, o.bias);
    FlashAttentionBackward::save_options(&node->ctx_, o);
    const Tensor none;
    const bool fused = !wanted.composed;
    torch::autograd::set_history(out, node);
    torch::autograd::set_history(lse, node);
    save_variables(
        node, FlashAttentionBackward::saved(query, key, value, fused ? out : none, fused ? lse : none, rng_state, o));
  }
  if (wanted.forward) {
    const auto [composed_out, composed_lse] = composed_attention(query, key, value, o);
    set_tangent(out, tangent_of(composed_out));
    set_tangent(lse, tangent_of(composed_lse));
  }
  return {out, lse};
}

std::tuple<Tensor, Tensor> flash_attention_autograd(const Tensor& query, const Tensor& key, const Tensor& value,
                                                    const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                                                    const OptionalTensor& bias, ATTENTION_SCALARS) {
  static const auto op = find_op<decltype(flash_attention)>(CUDA_EXT_OP("flash_attention"));
  return with_derivatives(
      "flash_attention", query, key, value, {{}, {}, alibi_slopes, sinks, bias, {}, {}, ATTENTION_SCALAR_NAMES},
      [&] { return op.call(query, key, value, alibi_slopes, sinks, bias, ATTENTION_SCALAR_NAMES); });
}

std::tuple<Tensor, Tensor> flash_attention_varlen_autograd(const Tensor& query, const Tensor& key, const Tensor& value,
                                                           const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                                           const OptionalTensor& alibi_slopes,
                                                           const OptionalTensor& sinks, OptionalInt max_seqlen_q,
                                                           OptionalInt max_seqlen_k, ATTENTION_SCALARS) {
  static const auto op = find_op<decltype(flash_attention_varlen)>(CUDA_EXT_OP("flash_attention_varlen"));
  return with_derivatives(
      "flash_attention_varlen", query, key, value,
      {cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, {}, max_seqlen_q, max_seqlen_k, ATTENTION_SCALAR_NAMES}, [&] {
        return op.call(query, key, value, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, max_seqlen_q, max_seqlen_k,
                       ATTENTION_SCALAR_NAMES);
      });
}

template <c10::DeviceType device>
std::tuple<Tensor, Tensor> flash_attention_autocast(const Tensor& query, const Tensor& key, const Tensor& value,
                                                    const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                                                    const OptionalTensor& bias, ATTENTION_SCALARS) {
  static const auto op = find_op<decltype(flash_attention)>(CUDA_EXT_OP("flash_attention"));
  const Autocast cast(device);
  return op.call(cast(query), cast(key), cast(value), alibi_slopes, sinks, bias, ATTENTION_SCALAR_NAMES);
}

template <c10::DeviceType device>
std::tuple<Tensor, Tensor> flash_attention_varlen_autocast(const Tensor& query, const Tensor& key, const Tensor& value,
                                                           const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                                           const OptionalTensor& alibi_slopes,
                                                           const OptionalTensor& sinks, OptionalInt max_seqlen_q,
                                                           OptionalInt max_seqlen_k, ATTENTION_SCALARS) {
  static const auto op = find_op<decltype(flash_attention_varlen)>(CUDA_EXT_OP("flash_attention_varlen"));
  const Autocast cast(device);
  return op.call(cast(query), cast(key), cast(value), cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, max_seqlen_q,
                 max_seqlen_k, ATTENTION_SCALAR_NAMES);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  // Dropout makes these ops draw random numbers; any strides are read in place.
  const std::vector<at::Tag> random = {at::Tag::pt2_compliant_tag, at::Tag::flexible_layout,
                                       at::Tag::nondeterministic_seeded};
  m.def("flash_attention(Tensor query, Tensor key, Tensor value, " ATTENTION_OPTION_SCHEMA(
            ATTENTION_BIAS_SCHEMA, "") ") -> (Tensor out, Tensor lse)",
        random);
  m.def(
      "flash_attention_varlen(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor "
      "cu_seqlens_k, " ATTENTION_OPTION_SCHEMA("", ATTENTION_LENGTHS_SCHEMA) ") -> (Tensor out, Tensor lse)",
      random);
  m.def("flash_attention_forward(Tensor query, Tensor key, Tensor value, " ATTENTION_PACKING_SCHEMA
            ATTENTION_OPTION_SCHEMA(ATTENTION_BIAS_SCHEMA,
                                    ATTENTION_LENGTHS_SCHEMA) ") -> (Tensor out, Tensor lse, Tensor rng_state)",
        random);
  m.def(
      "flash_attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
      "Tensor out, Tensor lse, Tensor? rng_state, bool needs_grad_bias=False, " ATTENTION_PACKING_SCHEMA ATTENTION_OPTION_SCHEMA(
          ATTENTION_BIAS_SCHEMA, ATTENTION_LENGTHS_SCHEMA) ") -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_sinks, Tensor grad_bias)",
      {at::Tag::pt2_compliant_tag, at::Tag::flexible_layout});
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CPU, m) {
  m.impl("flash_attention", flash_attention);
  m.impl("flash_attention_varlen", flash_attention_varlen);
  m.impl("flash_attention_forward", flash_attention_forward);
  m.impl("flash_attention_backward", flash_attention_backward);
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CUDA, m) {
  m.impl("flash_attention", flash_attention);
  m.impl("flash_attention_varlen", flash_attention_varlen);
  m.impl("flash_attention_forward", flash_attention_forward);
  m.impl("flash_attention_backward", flash_attention_backward);
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, Autograd, m) {
  m.impl("flash_attention", flash_attention_autograd);
  m.impl("flash_attention_varlen", flash_attention_varlen_autograd);
  m.impl("flash_attention_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("flash_attention_backward", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, AutocastCPU, m) {
  m.impl("flash_attention", flash_attention_autocast<c10::DeviceType::CPU>);
  m.impl("flash_attention_varlen", flash_attention_varlen_autocast<c10::DeviceType::CPU>);
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, AutocastCUDA, m) {
  m.impl("flash_attention", flash_attention_autocast<c10::DeviceType::CUDA>);
  m.impl("flash_attention_varlen", flash_attention_varlen_autocast<c10::DeviceType::CUDA>);
}

}  // namespace cuda_ext
