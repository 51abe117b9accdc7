// torch.nn.functional.scaled_dot_product_attention (SDPA) on flash_attention, for cuda_ext.integrations.sdpa.
//
// The kernel below replaces aten::scaled_dot_product_attention itself, not the fused ops among which PyTorch's
// implementation chooses (_scaled_dot_product_flash_attention and others, which register_flash_attention_impl is meant
// for). Those get only what the choice lets through: on the CPU no dropout, no gradient of a mask and only masks of
// rank 2 and 4; and their backward cannot be differentiated. SDPA is composed of other ops, so a kernel for its
// autograd and backend keys serves eager mode, calls from C++ and TorchScript, and tracers below the dispatcher:
// torch.compile and AOTInductor record flash_attention. torch.vmap decomposes SDPA before it gets here.
//
// A call that flash_attention cannot serve exactly goes to PyTorch's implementation with unchanged arguments. That
// includes every wrong call, so errors are PyTorch's own.
#include "ops/torch_headers.h"

#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <c10/core/SymBool.h>

#include <array>
#include <atomic>
#include <cmath>
#include <mutex>

#include "ops/attention_autograd.h"
#include "ops/attention_params.h"
#include "ops/autograd.h"
#include "ops/backend.h"

namespace cuda_ext {
namespace {

// What became of a call.
enum Outcome : size_t {
  kServed,
  kNotFirstChoice,
  kRank,
  kTensors,
  kSubclass,
  kSizes,
  kHeadDim,
  kMask,
  kMaskWithCausal,
  kNumber,
  kSymbolicCausal,
  kOutcomes
};
constexpr std::array<const char*, kOutcomes> kTexts = {
    "served",
    "flash attention is disabled, or is not the first of the enabled backends",
    "query, key and value do not all have the same number of dimensions, at least 3",
    "no kernel for the dtype, device or layout of query, key and value",
    "a tensor subclass that may not know this op, or a DTensor sharded along the sequence",
    "batch or head sizes that would have to be broadcast, or do not match",
    "no kernel for the head dim",
    "no kernel for the shape, dtype or device of attn_mask",
    "attn_mask together with is_causal",
    "scale is not finite, or dropout_p is not in [0, 1)",
    "is_causal with lengths that are unknown while tracing, and may be more queries than keys",
};

std::array<std::atomic<int64_t>, kOutcomes> counts{};

Outcome count(Outcome outcome) {
  counts[outcome].fetch_add(1, std::memory_order_relaxed);
  return outcome;
}

bool equal(const c10::SymInt& a, const c10::SymInt& b) { return TORCH_GUARD_OR_FALSE(a.sym_eq(b)); }
bool is_one(const c10::SymInt& size) { return equal(size, 1); }

// Whether flash attention comes before all other enabled backends; torch.nn.attention.sdpa_kernel changes that.
bool is_first_choice() {
  at::Context& context = at::globalContext();
  if (!context.userEnabledFlashSDP()) return false;
  for (const at::SDPBackend backend : context.sDPPriorityOrder()) {
    switch (backend) {
      case at::SDPBackend::flash_attention: return true;
      case at::SDPBackend::math:
        if (context.userEnabledMathSDP()) return false;
        break;
      case at::SDPBackend::efficient_attention:
        if (context.userEnabledMemEfficientSDP()) return false;
        break;
      case at::SDPBackend::cudnn_attention:
        if (context.userEnabledCuDNNSDP()) return false;
        break;
      default: break;
    }
  }
  return true;
}

// Whether a Python subclass of Tensor with a dispatch of its own is one that can run this package's ops; Python knows
// (cuda_ext/integrations/sdpa.py).
bool is_known_type(const Tensor& tensor) {
  using c10::DispatchKey;
  if (!tensor.key_set().has(DispatchKey::Python)) return true;
  static const auto op = find_op<bool(const Tensor&)>(CUDA_EXT_OP("_sdpa_knows_type"));
  const c10::impl::ExcludeDispatchKeyGuard only_backend(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView |
      c10::DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PythonDispatcher,
                           DispatchKey::PreDispatch, DispatchKey::Functionalize,
                           DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::FuncTorchDynamicLayerBackMode}));
  return op.call(tensor);
}

bool broadcasts_to(const c10::SymInt& size, const c10::SymInt& full) { return is_one(size) || equal(size, full); }

// Whether flash_attention accepts the mask after `four_dims`. PyTorch's implementation needs at least two dimensions.
bool serves_mask(const Tensor& mask, const Tensor& query, const Tensor& key) {
  const at::ScalarType type = mask.scalar_type(), own = query.scalar_type();
  if (type != at::kBool && type != own && type != accumulation_type(own)) return false;
  if (mask.device() != query.device() || mask.layout() != at::kStrided || mask.is_nested()) return false;
  const int64_t rank = query.dim(), mask_rank = mask.dim();
  if (mask_rank < 2 || mask_rank > rank) return false;
  if (!broadcasts_to(mask.sym_size(-1), key.sym_size(-2))) return false;
  for (int64_t d = 2; d <= mask_rank; ++d)
    if (!broadcasts_to(mask.sym_size(-d), query.sym_size(-d))) return false;
  return true;
}

Outcome tensors_outcome(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask) {
  const int64_t rank = query.dim();
  for (const Tensor* tensor : {&query, &key, &value}) {
    if (tensor->is_nested()) return kTensors;
    if (tensor->dim() != rank || rank < 3) return kRank;
    if (tensor->layout() != at::kStrided || tensor->scalar_type() != query.scalar_type() ||
        tensor->device() != query.device())
      return kTensors;
  }
  for (const Tensor* tensor : {&query, &key, &value, &value_or_empty(mask)})
    if (tensor->defined() && !is_known_type(*tensor)) return kSubclass;
  const at::ScalarType type = query.scalar_type();
  const Kernels kernels = kernels_on(query.device());
  if (!is_floating(type) || kernels == Kernels::kNone) return kTensors;
  if (kernels == Kernels::kCpu) return TORCH_GUARD_OR_FALSE(query.sym_size(-1).sym_gt(0)) ? kServed : kHeadDim;
  if (type == at::kDouble) return kTensors;
  const std::optional<int64_t> dim = query.sym_size(-1).maybe_as_int(), dim_v = value.sym_size(-1).maybe_as_int();
  const CudaKernels& cuda = *cuda_kernels("scaled_dot_product_attention", query.device());
  return dim.value_or(0) > 0 && dim_v.value_or(0) > 0 &&
                 has_attention_kernel(cuda, query, *dim, *dim_v, /*backward=*/true)
             ? kServed
             : kHeadDim;
}

bool serves_sizes(const Tensor& query, const Tensor& key, const Tensor& value, bool enable_gqa) {
  if (!equal(query.sym_size(-1), key.sym_size(-1)) || !equal(key.sym_size(-2), value.sym_size(-2))) return false;
  for (int64_t d = 0; d < query.dim() - 3; ++d)
    if (!equal(query.sym_size(d), key.sym_size(d)) || !equal(key.sym_size(d), value.sym_size(d))) return false;
  const c10::SymInt heads = query.sym_size(-3), heads_kv = key.sym_size(-3);
  if (!equal(heads_kv, value.sym_size(-3))) return false;
  if (equal(heads, heads_kv)) return true;
  return enable_gqa && TORCH_GUARD_OR_FALSE(heads_kv.sym_gt(0)) && equal(heads % heads_kv, 0);
}

Outcome outcome_of(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
                   double dropout_p, bool is_causal, OptionalDouble scale, bool enable_gqa) {
  if (!is_first_choice()) return kNotFirstChoice;
  const Outcome outcome = tensors_outcome(query, key, value, mask);
  if (outcome != kServed) return outcome;
  if (!serves_sizes(query, key, value, enable_gqa)) return kSizes;
  if (is_given(mask) && is_causal) return kMaskWithCausal;
  if (is_given(mask) && !serves_mask(*mask, query, key)) return kMask;
  if ((scale.has_value() && !std::isfinite(*scale)) || !(dropout_p >= 0 && dropout_p < 1)) return kNumber;
  if (is_causal) {
    const c10::SymInt queries = query.sym_size(-2), keys = key.sym_size(-2);
    const bool constant = queries.maybe_as_int().has_value() && keys.maybe_as_int().has_value();
    if (!constant && !TORCH_GUARD_OR_FALSE(queries.sym_le(keys))) return kSymbolicCausal;
  }
  return kServed;
}

// (..., H, S, D) as (B, H, S, D).
Tensor four_dims(const Tensor& tensor) {
  const int64_t rank = tensor.dim();
  return rank == 4 ? tensor : rank == 3 ? tensor.unsqueeze(0) : tensor.flatten(0, rank - 4);
}

// A mask that broadcasts to the (..., H, Sq, Sk) of a query of any rank, so that it broadcasts to (B, H, Sq, Sk).
Tensor mask_of_four_dims(const Tensor& mask, const Tensor& query) {
  if (mask.dim() <= 3 || query.dim() == 4) return mask;
  auto sizes = mask.sym_sizes().vec();
  for (int64_t d = 4; d <= mask.dim(); ++d) sizes[size_t(mask.dim() - d)] = query.sym_size(-d);
  for (int64_t d = mask.dim() + 1; d <= query.dim(); ++d) sizes.insert(sizes.begin(), query.sym_size(-d));
  return four_dims(mask.expand_symint(sizes));
}

// Whether the rows of a (..., H, S, D) tensor are nearer to each other than its heads.
bool is_heads_first(const Tensor& tensor) {
  return TORCH_GUARD_OR_FALSE(tensor.sym_stride(-3).sym_gt(tensor.sym_stride(-2)));
}

// (..., H, S, D) as (B * H, S, 1, D).
Tensor heads_as_batch(const Tensor& tensor) {
  const auto sizes = tensor.sym_sizes();
  c10::SymInt batch = 1;
  for (const c10::SymInt& size : sizes.slice(0, sizes.size() - 2)) batch *= size;
  return tensor.reshape_symint({batch, tensor.sym_size(-2), 1, tensor.sym_size(-1)});
}

bool is_same_for_all_heads(const Tensor& mask) {
  for (int64_t d = 3; d <= mask.dim(); ++d)
    if (!is_one(mask.sym_size(-d))) return false;
  return true;
}

// The arguments for which flash_attention, which aligns `causal` to the bottom right, does what is_causal, which SDPA
// aligns to the top left, means.
struct Aligned {
  Tensor key, value;
  bool causal;
  OptionalInt window_right;
};

// `dim`: that of the sequence.
Aligned aligned(const Tensor& query, const Tensor& key, const Tensor& value, int64_t dim, bool is_causal) {
  const c10::SymInt queries = query.sym_size(dim), keys = key.sym_size(dim);
  if (!is_causal || equal(queries, keys)) return {key, value, is_causal, std::nullopt};
  if (TORCH_GUARD_OR_FALSE(queries.sym_lt(keys)))  // no query sees the keys after the last query
    return {key.narrow_symint(dim, 0, queries), value.narrow_symint(dim, 0, queries), true, std::nullopt};
  return {key, value, false, (queries - keys).expect_int()};
}

OptionalTensor mask_if(const OptionalTensor& attn_mask, bool boolean) {
  return is_given(attn_mask) && (attn_mask->scalar_type() == at::kBool) == boolean ? attn_mask : std::nullopt;
}

AttentionOptions options_of(const Aligned& aligned, const OptionalTensor& attn_mask, double dropout_p,
                            OptionalDouble scale) {
  AttentionOptions o;
  o.bias = mask_if(attn_mask, false);
  o.mask = mask_if(attn_mask, true);
  o.causal = aligned.causal;
  o.window_right = aligned.window_right;
  o.scale = scale;
  o.dropout_p = dropout_p;
  return o;
}

// flash_attention on (B, S, H, D), without its lse.
Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& attn_mask,
                 double dropout_p, bool is_causal, OptionalDouble scale) {
  static const auto op = find_op<decltype(flash_attention)>(CUDA_EXT_OP("flash_attention"));
  const Aligned a = aligned(query, key, value, 1, is_causal);
  return std::get<0>(options_of(a, attn_mask, dropout_p, scale).call_dense(op, query, a.key, a.value));
}

// The same on (B, H, S, D) if the only derivative that the call needs is backward; otherwise None.
OptionalTensor attention_for_backward(const Tensor& query, const Tensor& key, const Tensor& value,
                                      const OptionalTensor& attn_mask, double dropout_p, bool is_causal,
                                      OptionalDouble scale, bool heads_first) {
  const Aligned a = aligned(query, key, value, 2, is_causal);
  return heads_first_attention(query, a.key, a.value, options_of(a, attn_mask, dropout_p, scale),
                               heads_first ? HeadsFirstOutput::kDenseTransposed : HeadsFirstOutput::kTransposed);
}

// The output has its dimensions in memory in the order of query, as that of PyTorch's kernels: models call view() on
// it.
Tensor served(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& attn_mask,
              double dropout_p, bool is_causal, OptionalDouble scale) {
  const OptionalTensor mask = is_given(attn_mask) ? OptionalTensor(mask_of_four_dims(*attn_mask, query)) : std::nullopt;
  const bool heads_first = is_heads_first(query);
  const auto with_batch_dims = [&](const Tensor& out) {
    if (query.dim() == 4) return out;
    if (query.dim() == 3) return out.squeeze(0);
    const auto sizes = query.sym_sizes();
    return out.unflatten_symint(0, sizes.slice(0, sizes.size() - 3));
  };
  if (const OptionalTensor out = attention_for_backward(four_dims(query), four_dims(key), four_dims(value), mask,
                                                        dropout_p, is_causal, scale, heads_first))
    return with_batch_dims(*out);
  // Dropout numbers depend on batch * heads + head, so they are those of the calls above: a reentrant checkpoint
  // computes forward without derivatives, and again with them.
  if (heads_first && is_heads_first(key) && is_heads_first(value) && equal(query.sym_size(-3), key.sym_size(-3)) &&
      (!mask.has_value() || is_same_for_all_heads(*mask))) {
    // The output of flash_attention then has the wanted order, without a copy.
    const Tensor out =
        attention(heads_as_batch(query), heads_as_batch(key), heads_as_batch(value), mask, dropout_p, is_causal, scale);
    auto sizes = query.sym_sizes().vec();
    sizes.back() = value.sym_size(-1);
    return out.view_symint(sizes);
  }
  const auto rows_first = [](const Tensor& t) { return four_dims(t).transpose(1, 2); };
  Tensor out = attention(rows_first(query), rows_first(key), rows_first(value), mask, dropout_p, is_causal, scale);
  out = out.transpose(1, 2);
  if (heads_first) out = out.contiguous();
  return with_batch_dims(out);
}

Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const OptionalTensor& attn_mask, double dropout_p, bool is_causal,
                                    OptionalDouble scale, bool enable_gqa) {
  if (count(outcome_of(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)) == kServed) {
    // Without derivatives, the views below skip autograd, which would take as long as a small call.
    std::optional<at::AutoDispatchBelowADInplaceOrView> below_autograd;
    if (!any_requires_grad(query, key, value, attn_mask) && !any_has_tangent(query, key, value, attn_mask))
      below_autograd.emplace();
    return served(query, key, value, attn_mask, dropout_p, is_causal, scale);
  }
  return at::native::scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale,
                                                  enable_gqa);
}

// The registrations of the kernels, while they are active. Removing one restores PyTorch's kernel and all that depends
// on the dispatch table: torch.export does not decompose an op that has a kernel for a backend.
//
// PyTorch does not synchronise calls with changes of a dispatch table. These kernels have no state (TORCH_FN), so a
// call in another thread runs the old kernel or the new one.
void set_active(bool active) {
  static std::mutex mutex;
  static std::vector<torch::Library> libraries;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!active) return libraries.clear();
  if (!libraries.empty()) return;
  using c10::DispatchKey;
  for (const DispatchKey key : {DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA, DispatchKey::CPU,
                                DispatchKey::CUDA}) {  // the last two in inference mode
    libraries.emplace_back(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    libraries.back().impl("scaled_dot_product_attention", TORCH_FN(scaled_dot_product_attention));
  }
}

c10::Dict<std::string, int64_t> calls(bool reset) {
  c10::Dict<std::string, int64_t> result;
  for (size_t outcome = 0; outcome < kOutcomes; ++outcome) {
    const int64_t count = reset ? counts[outcome].exchange(0) : counts[outcome].load();
    if (count != 0 || outcome == kServed) result.insert(kTexts[outcome], count);
  }
  return result;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  m.def("_sdpa_switch(bool on) -> ()", set_active);
  m.def("_sdpa_calls(bool reset) -> Dict(str, int)", calls);
  // Whether a call would be served; counts it.
  m.def(
      "_sdpa_serves(Tensor query, Tensor key, Tensor value, float dropout_p, bool is_causal, float? scale, bool "
      "enable_gqa) -> bool",
      [](const Tensor& query, const Tensor& key, const Tensor& value, double dropout_p, bool is_causal,
         OptionalDouble scale, bool enable_gqa) {
        return count(outcome_of(query, key, value, {}, dropout_p, is_causal, scale, enable_gqa)) == kServed;
      });
  m.def("_sdpa_knows_type(Tensor tensor) -> bool");
}

}  // namespace cuda_ext
