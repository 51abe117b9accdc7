// flash_attention and flash_attention_varlen: schema, autocast, dispatch. The public ops share one forward and one
// backward op, in which cu_seqlens are given for packed sequences and absent for (batch, seq, ...).
#include "ops/torch_headers.h"

#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <limits>
#include <tuple>

#include "ops/attention_autograd.h"
#include "ops/attention_composed.h"
#include "ops/attention_params.h"
#include "ops/backend.h"
#include "ops/philox.h"

namespace cuda_ext {
namespace {

using Options = AttentionOptions;

Tensor empty_lse(const Tensor& query, const AttentionShape& shape, bool varlen) {
  const auto type = accumulation_type(query.scalar_type());
  return varlen ? empty_on(query.device(), {shape.heads, query.size(0)}, type)
                : empty_on(query.device(), {shape.batch, shape.heads, shape.seqlen_q}, type);
}

// The random numbers of rng_state, (2,): of a kernel that runs on a GPU, or of one that reads them now.
RngSource rng_of(const char* op, const OptionalTensor& given, const Tensor& query, bool on_cuda) {
  CUDA_EXT_CHECK(is_given(given), op, "expected rng_state with dropout, as the forward returned it, got None");
  const Tensor& rng_state = *given;
  CUDA_EXT_CHECK(rng_state.numel() == 2 && rng_state.scalar_type() == at::kLong, op,
                 "expected rng_state of shape (2,) and dtype int64, as the forward returned it, got ",
                 shape_string(rng_state), " and dtype ", dtype_name(rng_state.scalar_type()));
  check_same_device(op, "rng_state", rng_state, "query", query);
  const auto* const values = static_cast<const uint64_t*>(rng_state.const_data_ptr());
  if (on_cuda) return {values, values + 1, 0, 0};
  return {nullptr, nullptr, values[0], values[1]};
}

// Reserves the random numbers of a call, or takes those of `given`. Returns (seed, offset) on the device of query, from
// which backward recomputes them; empty without dropout. by_kernel: the kernel of forward will write them.
Tensor draw_rng_state(AttentionParams& p, const char* op, const OptionalTensor& given, const Tensor& query,
                      bool by_kernel) {
  if (p.dropout_p == 0) {
    // All calls share one tensor, which has no elements.
    static const Tensor none = [] {
      const c10::InferenceMode ordinary(false);
      return empty_on(at::kCPU, {0}, at::kLong);
    }();
    return none;
  }
  p.rng = is_given(given) ? rng_of(op, given, query, by_kernel || query.is_cuda()) : draw_rng(query.device());
  Tensor state = empty_on(query.device(), {2}, at::kLong);
  if (by_kernel)
    p.rng_state = static_cast<uint64_t*>(state.mutable_data_ptr());
  else
    store_rng(p.rng, state);
  return state;
}

// Fills the indices of dimension `dim` from `first` on.
void fill_from(const Tensor& tensor, int64_t dim, int64_t first, double value) {
  if (const int64_t count = tensor.size(dim) - first; count > 0) tensor.narrow(dim, first, count).fill_(value);
}

// Forward on a CUDA device that has no kernel for the dtype or head dims.
std::tuple<Tensor, Tensor, Tensor> composed_forward(const char* op, const Tensor& query, const Tensor& key,
                                                    const Tensor& value, const OptionalTensor& given_rng_state,
                                                    const Options& o) {
  const Composing composing(query.device());
  AttentionParams p;
  p.dropout_p = o.dropout_p;
  Tensor rng_state = draw_rng_state(p, op, given_rng_state, query, /*by_kernel=*/false);
  auto [out, lse] = composed_attention(query, key, value, o, rng_state);
  return {out.contiguous(), lse.contiguous(), std::move(rng_state)};
}

std::tuple<Tensor, Tensor, Tensor> forward(const char* op, const Tensor& query, const Tensor& key, const Tensor& value,
                                           const Options& o, const OptionalTensor& given_rng_state = {}) {
  const AttentionShape shape = check_attention(op, query, key, value, o);
  const auto out_type = check_result_dtype(op, "out_dtype", query, o);
  const CudaKernels* cuda = cuda_kernels(op, query.device());
  if (cuda != nullptr) {
    if (!has_attention_kernel(*cuda, query, shape.dim, shape.dim_v, /*backward=*/false))
      return composed_forward(op, query, key, value, given_rng_state, o);
    if (is_padded(shape)) {
      auto [out, lse, rng_state] =
          forward(op, padded(query), padded(key), padded(value), padded_options(o, shape), given_rng_state);
      return {unpadded(out, shape.dim_v), std::move(lse), std::move(rng_state)};
    }
  }
  AttentionParams p;
  AttentionOperands operands;
  fill_params(p, operands, shape, query, key, value, o, cuda != nullptr);
  c10::SmallVector<int64_t, 4> out_sizes(query.sizes());
  out_sizes.back() = shape.dim_v;
  Tensor out = empty_on(query.device(), out_sizes, out_type);
  Tensor lse = empty_lse(query, shape, o.is_varlen());
  Tensor rng_state = draw_rng_state(p, op, given_rng_state, query, cuda != nullptr);
  p.out = view_of(out);
  p.float32_out = out_type != query.scalar_type();
  p.lse = lse.mutable_data_ptr();
  if (cuda != nullptr) {
    LaunchScope scope(query.device());
    launch_for(op, [&] { cuda->attention_forward(p, scope.allocator(), scope.stream()); });
  } else {
    attention_forward(p);
    if (o.is_varlen()) {
      fill_from(out, 0, p.cu_seqlens_q[p.batch], 0);
      fill_from(lse, 1, p.cu_seqlens_q[p.batch], -std::numeric_limits<double>::infinity());
    }
  }
  return {std::move(out), std::move(lse), std::move(rng_state)};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> flash_attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                                           VARLEN_OPTIONS(OptionalTensor), PART_OPTIONS,
                                                           const OptionalTensor& rng_state) {
  const Options o{VARLEN_NAMES, PART_NAMES};
  // The op that the user called; errors name it.
  return forward(o.is_varlen() ? "flash_attention_varlen" : "flash_attention", query, key, value, o, rng_state);
}

std::tuple<Tensor, Tensor> flash_attention(const Tensor& query, const Tensor& key, const Tensor& value, DENSE_OPTIONS) {
  auto [out, lse, rng_state] = forward("flash_attention", query, key, value, dense_options(DENSE_NAMES));
  return {std::move(out), std::move(lse)};
}

std::tuple<Tensor, Tensor> flash_attention_varlen(const Tensor& query, const Tensor& key, const Tensor& value,
                                                  VARLEN_OPTIONS(Tensor)) {
  auto [out, lse, rng_state] = forward("flash_attention_varlen", query, key, value, {VARLEN_NAMES});
  return {std::move(out), std::move(lse)};
}

namespace {

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// Backward on a CUDA device that has no kernel for the dtype or head dims.
Gradients composed_backward(const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query,
                            const Tensor& key, const Tensor& value, const Tensor& out, const Tensor& lse,
                            const OptionalTensor& rng_state, bool needs_grad_bias, const Options& o) {
  const Composing composing(query.device());
  AttentionGradients g = composed_attention_backward(grad_out, value_or_empty(grad_lse), query, key, value,
                                                     value_or_empty(rng_state), o, out, lse);
  const Tensor none = empty_on(query.device(), {0}, accumulation_type(query.scalar_type()));
  return {g.query.contiguous(), g.key.contiguous(), g.value.contiguous(), g.sinks.defined() ? g.sinks : none,
          needs_grad_bias ? g.bias.contiguous() : none};
}

void check_gradients(const char* op, const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query,
                     const Tensor& out, const Tensor& lse) {
  const auto check_like = [&](const char* name, const Tensor& tensor, const char* other_name, const Tensor& other) {
    CUDA_EXT_CHECK(tensor.sizes() == other.sizes(), op, "expected ", name, " of shape ", shape_string(other),
                   " to match ", other_name, ", got ", shape_string(tensor));
    check_same_dtype(op, name, tensor, other_name, other);
    check_same_device(op, name, tensor, other_name, other);
  };
  check_same_dtype(op, "out", out, "query", query);
  check_like("grad_out", grad_out, "out", out);
  if (is_given(grad_lse)) check_like("grad_lse", *grad_lse, "lse", lse);
}

Gradients backward(const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
                   const Tensor& value, const Tensor& out, const Tensor& lse, const OptionalTensor& rng_state,
                   bool needs_grad_bias, const Options& o) {
  constexpr const char* op = "flash_attention_backward";
  const AttentionShape shape = check_attention(op, query, key, value, o);
  const auto grad_type = check_result_dtype(op, "grad_dtype", query, o);
  const CudaKernels* cuda = cuda_kernels(op, query.device());
  check_gradients(op, grad_out, grad_lse, query, out, lse);
  CUDA_EXT_CHECK(!needs_grad_bias || is_given(o.bias), op,
                 "expected attn_bias with needs_grad_bias=True, got None; leave it False");

  if (cuda != nullptr) {
    if (!has_attention_kernel(*cuda, query, shape.dim, shape.dim_v, /*backward=*/true))
      return composed_backward(grad_out, grad_lse, query, key, value, out, lse, rng_state, needs_grad_bias, o);
    if (is_padded(shape)) {
      auto [grad_query, grad_key, grad_value, grad_sinks, grad_bias] =
          backward(padded(grad_out), grad_lse, padded(query), padded(key), padded(value), padded(out), lse, rng_state,
                   needs_grad_bias, padded_options(o, shape));
      return {unpadded(grad_query, shape.dim), unpadded(grad_key, shape.dim), unpadded(grad_value, shape.dim_v),
              std::move(grad_sinks), std::move(grad_bias)};
    }
  }
  AttentionBackwardParams p;
  AttentionOperands operands;
  fill_params(p, operands, shape, query, key, value, o, cuda != nullptr);
  p.deterministic = o.deterministic.value_or(at::globalContext().deterministicAlgorithms());
  if (o.dropout_p > 0) p.rng = rng_of(op, rng_state, query, cuda != nullptr);
  const Tensor dense_out = with_dense_rows(out, cuda != nullptr),
               dense_grad_out = with_dense_rows(grad_out, cuda != nullptr);
  const Tensor dense_lse = lse.contiguous();
  const Tensor dense_grad_lse = is_given(grad_lse) ? grad_lse->contiguous() : Tensor();
  // Without query heads no kernel runs, and the gradients of keys and values are 0.
  const auto empty_like = [&](const Tensor& t) {
    return shape.heads == 0 ? at::zeros(t.sizes(), t.options().dtype(grad_type))
                            : empty_on(t.device(), t.sizes(), grad_type);
  };
  Tensor grad_query = empty_like(query), grad_key = empty_like(key), grad_value = empty_like(value);
  Tensor grad_sinks = empty_on(lse.device(), {is_given(o.sinks) ? shape.heads : 0}, lse.scalar_type());
  // Atomics add to a broadcast element in no fixed order. With one element per addend the result is deterministic.
  const bool deterministic_sum = cuda != nullptr && p.deterministic;
  const int64_t columns = o.bias_is_relative ? o.bias->size(-1) : shape.longest_k;
  Tensor grad_bias = !needs_grad_bias ? empty_on(lse.device(), {0}, lse.scalar_type())
                     : deterministic_sum
                         ? at::zeros({shape.batch, shape.heads, shape.longest_q, columns}, lse.options())
                         : at::zeros(o.bias->sizes(), lse.options());
  p.out = view_of(dense_out);
  p.grad_out = view_of(dense_grad_out);
  p.grad_query = view_of(grad_query);
  p.grad_key = view_of(grad_key);
  p.grad_value = view_of(grad_value);
  p.float32_grads = grad_type != query.scalar_type();
  p.lse = dense_lse.data_ptr();
  p.grad_lse = dense_grad_lse.defined() ? dense_grad_lse.const_data_ptr() : nullptr;
  p.grad_sinks = is_given(o.sinks) ? grad_sinks.mutable_data_ptr() : nullptr;
  if (needs_grad_bias) {
    p.grad_bias = grad_bias.mutable_data_ptr();
    p.grad_bias_elements = grad_bias.numel();
    p.grad_bias_origin = set_bias_strides(grad_bias, o.bias_is_relative, p.grad_bias_strides);
  }
  if (cuda != nullptr) {
    LaunchScope scope(query.device());
    launch_for(op, [&] { cuda->attention_backward(p, scope.allocator(), scope.stream()); });
  } else {
    attention_backward(p);
    if (o.is_varlen()) {
      fill_from(grad_query, 0, p.cu_seqlens_q[p.batch], 0);
      for (const Tensor& gradient : {grad_key, grad_value}) fill_from(gradient, 0, p.cu_seqlens_k[p.batch], 0);
    }
  }
  if (is_given(o.sinks)) grad_sinks = grad_sinks.to(o.sinks->scalar_type());
  if (needs_grad_bias) grad_bias = at::sum_to(std::move(grad_bias), o.bias->sizes()).to(o.bias->scalar_type());
  return {std::move(grad_query), std::move(grad_key), std::move(grad_value), std::move(grad_sinks),
          std::move(grad_bias)};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flash_attention_backward(
    const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& lse, const OptionalTensor& rng_state, bool needs_grad_bias,
    VARLEN_OPTIONS(OptionalTensor), PART_OPTIONS) {
  return backward(grad_out, grad_lse, query, key, value, out, lse, rng_state, needs_grad_bias,
                  {VARLEN_NAMES, PART_NAMES});
}

// The random numbers that flash_attention with dropout would have now, for calls of its parts.
Tensor draw_attention_rng(at::Device device) {
  Tensor state = empty_on(device, {2}, at::kLong);
  const c10::DeviceGuard guard(state.device());
  store_rng(draw_rng(state.device()), state);
  return state;
}

namespace {

template <c10::DeviceType device>
std::tuple<Tensor, Tensor> flash_attention_autocast(const Tensor& query, const Tensor& key, const Tensor& value,
                                                    DENSE_OPTIONS) {
  static const auto op = find_op<decltype(flash_attention)>(CUDA_EXT_OP("flash_attention"));
  const Autocast cast(device);
  return op.call(cast(query), cast(key), cast(value), DENSE_NAMES);
}

template <c10::DeviceType device>
std::tuple<Tensor, Tensor> flash_attention_varlen_autocast(const Tensor& query, const Tensor& key, const Tensor& value,
                                                           VARLEN_OPTIONS(Tensor)) {
  static const auto op = find_op<decltype(flash_attention_varlen)>(CUDA_EXT_OP("flash_attention_varlen"));
  const Autocast cast(device);
  return op.call(cast(query), cast(key), cast(value), VARLEN_NAMES);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  // Dropout makes these ops draw random numbers; any strides are read in place.
  const std::vector<at::Tag> random = {at::Tag::pt2_compliant_tag, at::Tag::flexible_layout,
                                       at::Tag::nondeterministic_seeded};
  m.def("flash_attention(Tensor query, Tensor key, Tensor value, " DENSE_SCHEMA ") -> (Tensor out, Tensor lse)",
        random);
  m.def(
      "flash_attention_varlen(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor "
      "cu_seqlens_k, " VARLEN_SCHEMA ") -> (Tensor out, Tensor lse)",
      random);
  m.def("flash_attention_forward(Tensor query, Tensor key, Tensor value, " OPTIONAL_VARLEN_SCHEMA PART_SCHEMA(
            "out_dtype") ", Tensor? rng_state=None) -> (Tensor out, Tensor lse, Tensor rng_state)",
        random);
  m.def(
      "flash_attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
      "Tensor out, Tensor lse, Tensor? rng_state, bool needs_grad_bias=False, "
      OPTIONAL_VARLEN_SCHEMA PART_SCHEMA("grad_dtype") ") -> (Tensor grad_query, "
      "Tensor grad_key, Tensor grad_value, Tensor grad_sinks, Tensor grad_bias)",
      {at::Tag::pt2_compliant_tag, at::Tag::flexible_layout});
  m.def("draw_attention_rng(Device device) -> Tensor", {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("draw_attention_rng", draw_attention_rng);
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

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, AutocastCPU, m) {
  m.impl("flash_attention", flash_attention_autocast<c10::DeviceType::CPU>);
  m.impl("flash_attention_varlen", flash_attention_varlen_autocast<c10::DeviceType::CPU>);
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, AutocastCUDA, m) {
  m.impl("flash_attention", flash_attention_autocast<c10::DeviceType::CUDA>);
  m.impl("flash_attention_varlen", flash_attention_varlen_autocast<c10::DeviceType::CUDA>);
}

}  // namespace cuda_ext
