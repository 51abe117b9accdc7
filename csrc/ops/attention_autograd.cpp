// The derivatives of flash_attention and flash_attention_varlen: autograd node and kernels for the Autograd key.
#include "ops/torch_headers.h"

#include "ops/attention_autograd.h"

#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>

#include "ops/attention_composed.h"
#include "ops/autograd.h"

namespace cuda_ext {

using Options = AttentionOptions;

namespace {

// Whether the dispatcher would do nothing with a view of the tensor but make it: no tracer, transform, mode or subclass
// would see it.
bool is_plain(const Tensor& tensor) {
  const auto invisible = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;
  const auto keys = tensor.key_set() - invisible;
  return (keys == c10::DispatchKeySet(c10::DispatchKey::CPU) || keys == c10::DispatchKeySet(c10::DispatchKey::CUDA)) &&
         (c10::impl::tls_local_dispatch_key_set().included_ - c10::default_included_set - invisible).empty();
}

// Between (B, H, S, D) and (B, S, H, D), for calls below autograd; three such views take as long as a third of a small
// attention if the dispatcher makes them.
Tensor transposed_heads(const Tensor& tensor) {
  if (!is_plain(tensor) || tensor.dim() != 4) return tensor.transpose(1, 2);
  const auto size = tensor.sizes(), stride = tensor.strides();
  return at::native::as_strided_tensorimpl(tensor, {size[0], size[2], size[1], size[3]},
                                           {stride[0], stride[2], stride[1], stride[3]}, std::nullopt);
}

}  // namespace

// The autograd node; not in the anonymous namespace because profiles and grad_fn show its name. Its inputs are query,
// key, value, sinks and bias.
struct FlashAttentionBackward : torch::autograd::Function<FlashAttentionBackward> {
  static constexpr const char* kNodeName = CUDA_EXT_OP("FlashAttentionBackward");

  static void save_options(AutogradContext* ctx, const Options& o, bool heads_first, bool out_heads_first) {
    save_option(ctx, "heads_first", heads_first);
    save_option(ctx, "out_heads_first", out_heads_first);
    Options::visit_scalars(o, [ctx](const char* name, const auto& value) { save_option(ctx, name, value); });
  }

  // query, key, value and their gradients are (B, H, S, D) if `heads_first`; out and its gradient if `out_heads_first`.
  // out, lse and rng_state are undefined if backward must be composed. Absent optional tensors are not saved, because
  // on small inputs saving one costs as much as a small op.
  static variable_list saved(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
                             const Tensor& lse, const Tensor& rng_state, const Options& o) {
    if (o.dropout_p == 0 && !o.is_varlen() && !is_given(o.alibi_slopes) && !is_given(o.sinks) && !is_given(o.bias) &&
        !is_given(o.mask) && !is_given(o.block_keys))
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
            value_or_empty(o.bias),
            value_or_empty(o.mask),
            value_or_empty(o.block_keys),
            value_or_empty(o.block_queries),
            value_or_empty(o.block_tiles)};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor &grad_given = grads[0], &grad_lse = grads[1];
    if (!grad_given.defined() && !grad_lse.defined()) return variable_list(5);
    auto saved = ctx->get_saved_variables();
    saved.resize(15);
    const Tensor& lse = saved[4];
    const bool fused = saved[3].defined() && !needs_composed_backward(grad_given.defined() ? grad_given : grad_lse) &&
                       !(grad_lse.defined() && tangent_of(grad_lse).defined());
    const auto transposed_if = [fused](bool heads_first, const Tensor& t) {  // between (B, H, S, D) and (B, S, H, D)
      if (!heads_first || !t.defined()) return t;
      if (!fused) return t.transpose(1, 2);
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      return transposed_heads(t);
    };
    const bool heads_first = saved_option<bool>(ctx, "heads_first");
    const bool out_heads_first = saved_option<bool>(ctx, "out_heads_first");
    const auto transposed = [&](const Tensor& t) { return transposed_if(heads_first, t); };
    const auto transposed_out = [&](const Tensor& t) { return transposed_if(out_heads_first, t); };
    const Tensor query = transposed(saved[0]), key = transposed(saved[1]), value = transposed(saved[2]);
    Options o{optional(saved[6]),  optional(saved[7]),  optional(saved[8]),  optional(saved[9]), optional(saved[10]),
              optional(saved[11]), optional(saved[12]), optional(saved[13]), optional(saved[14])};
    Options::visit_scalars(o, [ctx](const char* name, auto& value) { value = saved_option(ctx, name, value); });
    const Tensor grad_out = grad_given.defined() ? transposed_out(grad_given) : zeros_like_out(query, value);
    const bool wants_sinks = is_given(o.sinks) && ctx->needs_input_grad(3);
    const bool wants_bias = is_given(o.bias) && ctx->needs_input_grad(4);
    if (!fused) {
      AttentionGradients g = composed_attention_backward(grad_out, grad_lse, query, key, value, saved[5], o);
      return {transposed(g.query), transposed(g.key), transposed(g.value), wants_sinks ? g.sinks : Tensor(),
              wants_bias ? g.bias : Tensor()};
    }
    static const auto op = find_op<decltype(flash_attention_backward)>(CUDA_EXT_OP("flash_attention_backward"));
    auto [grad_query, grad_key, grad_value, grad_sinks, grad_bias] =
        o.call_backward(op, grad_out, optional(grad_lse), query, key, value, transposed_out(saved[3]), lse,
                        optional(saved[5]), wants_bias);
    return {transposed(grad_query), transposed(grad_key), transposed(grad_value), wants_sinks ? grad_sinks : Tensor(),
            wants_bias ? grad_bias : Tensor()};
  }

 private:
  static Tensor zeros_like_out(const Tensor& query, const Tensor& value) {
    auto sizes = query.sym_sizes().vec();
    sizes.back() = value.sym_size(-1);
    return at::zeros_symint(sizes, query.options());
  }
};

namespace {

// The Autograd kernel of both public ops; `call_public` calls the op itself.
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
  // A composed derivative cannot recompute random numbers that were drawn below the transform.
  if ((wanted.composed || wanted.forward) && o.dropout_p > 0) return composed_attention(query, key, value, o);

  Tensor out, lse, rng_state;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (wanted.reverse && !wanted.composed) {
      static const auto forward_op = find_op<decltype(flash_attention_forward)>(CUDA_EXT_OP("flash_attention_forward"));
      std::tie(out, lse, rng_state) = o.call_forward(forward_op, query, key, value);
    } else {
      std::tie(out, lse) = call_public();
    }
  }
  if (wanted.reverse) {
    const auto node = make_node<FlashAttentionBackward>(query, key, value, o.sinks, o.bias);
    FlashAttentionBackward::save_options(&node->ctx_, o, /*heads_first=*/false, /*out_heads_first=*/false);
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
                                                    DENSE_OPTIONS) {
  static const auto op = find_op<decltype(flash_attention)>(CUDA_EXT_OP("flash_attention"));
  return with_derivatives("flash_attention", query, key, value, dense_options(DENSE_NAMES),
                          [&] { return op.call(query, key, value, DENSE_NAMES); });
}

std::tuple<Tensor, Tensor> flash_attention_varlen_autograd(const Tensor& query, const Tensor& key, const Tensor& value,
                                                           VARLEN_OPTIONS(Tensor)) {
  static const auto op = find_op<decltype(flash_attention_varlen)>(CUDA_EXT_OP("flash_attention_varlen"));
  return with_derivatives("flash_attention_varlen", query, key, value, {VARLEN_NAMES},
                          [&] { return op.call(query, key, value, VARLEN_NAMES); });
}

}  // namespace

OptionalTensor heads_first_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Options& o,
                                     HeadsFirstOutput output) {
  const Derivatives wanted = derivatives_of(query, key, value, o.sinks, o.bias);
  if (!wanted.reverse || wanted.composed || wanted.forward) return std::nullopt;
  Tensor out, lse, rng_state;
  const bool out_heads_first = output != HeadsFirstOutput::kRowsFirst;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    static const auto op = find_op<decltype(flash_attention_forward)>(CUDA_EXT_OP("flash_attention_forward"));
    std::tie(out, lse, rng_state) =
        o.call_forward(op, transposed_heads(query), transposed_heads(key), transposed_heads(value));
    if (out_heads_first) out = transposed_heads(out);
    if (output == HeadsFirstOutput::kDenseTransposed) out = out.contiguous();
  }
  const auto node = make_node<FlashAttentionBackward>(query, key, value, o.sinks, o.bias);
  FlashAttentionBackward::save_options(&node->ctx_, o, /*heads_first=*/true, out_heads_first);
  torch::autograd::set_history(out, node);
  torch::autograd::set_history(lse, node);
  save_variables(node, FlashAttentionBackward::saved(query, key, value, out, lse, rng_state, o));
  return out;
}

namespace {

// flash_attention of (B, H, S, D) tensors as one call; it is composed of other ops for everything but backward.
Tensor flash_attention_heads_first(const Tensor& query, const Tensor& key, const Tensor& value, ATTENTION_SCALARS,
                                   const OptionalTensor& sinks, const OptionalTensor& bias,
                                   const OptionalTensor& mask) {
  const Options o = dense_options(/*alibi_slopes=*/{}, sinks, bias, mask, {}, {}, {}, ATTENTION_SCALAR_NAMES);
  if (OptionalTensor out = heads_first_attention(query, key, value, o, HeadsFirstOutput::kRowsFirst))
    return *std::move(out);
  static const auto op = find_op<decltype(flash_attention)>(CUDA_EXT_OP("flash_attention"));
  const auto call = [&](const Tensor& q, const Tensor& k, const Tensor& v) {
    return std::get<0>(o.call_dense(op, q, k, v));
  };
  if (any_requires_grad(query, key, value, sinks, bias) || any_has_tangent(query, key, value, sinks, bias))
    return call(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2));
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call(transposed_heads(query), transposed_heads(key), transposed_heads(value));
}

template <c10::DeviceType device>
Tensor flash_attention_heads_first_autocast(const Tensor& query, const Tensor& key, const Tensor& value,
                                            ATTENTION_SCALARS, const OptionalTensor& sinks, const OptionalTensor& bias,
                                            const OptionalTensor& mask) {
  const Autocast cast(device);
  return flash_attention_heads_first(cast(query), cast(key), cast(value), ATTENTION_SCALAR_NAMES, sinks, bias, mask);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  // For cuda_ext.integrations.transformers: (B, H, S, D) tensors, output (B, Sq, H, Dv). The arguments of small calls
  // come first, because positional ones cost less.
  m.def("_flash_attention_heads_first(Tensor query, Tensor key, Tensor value, " ATTENTION_SCALAR_SCHEMA
        ", Tensor? sinks=None, Tensor? attn_bias=None, Tensor? attn_mask=None) -> Tensor",
        {at::Tag::pt2_compliant_tag, at::Tag::flexible_layout, at::Tag::nondeterministic_seeded});
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CompositeImplicitAutograd, m) {
  m.impl("_flash_attention_heads_first", flash_attention_heads_first);
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, FuncTorchBatchedDecomposition, m) {
  m.impl("_flash_attention_heads_first", flash_attention_heads_first);
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, AutocastCPU, m) {
  m.impl("_flash_attention_heads_first", flash_attention_heads_first_autocast<c10::DeviceType::CPU>);
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, AutocastCUDA, m) {
  m.impl("_flash_attention_heads_first", flash_attention_heads_first_autocast<c10::DeviceType::CUDA>);
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, Autograd, m) {
  m.impl("flash_attention", flash_attention_autograd);
  m.impl("flash_attention_varlen", flash_attention_varlen_autograd);
  m.impl("flash_attention_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("flash_attention_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace cuda_ext
