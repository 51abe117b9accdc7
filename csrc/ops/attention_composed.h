// Attention and its gradients composed of differentiable ops. They serve second derivatives, forward mode and
// torch.func (ops/autograd.h), and CUDA devices where there is no kernel. Logits are computed for some rows at a time,
// so memory grows with Sq + Sk; autograd saves those of all rows.
#pragma once

#include <tuple>

#include "ops/attention_options.h"

namespace cuda_ext {

// rng_state: the random numbers of dropout. Without, torch.nn.functional.dropout draws them, with its rules for vmap.
std::tuple<Tensor, Tensor> composed_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                              const AttentionOptions& options, const Tensor& rng_state = {});

// The values of a relative bias at `distance`, (rows, keys) or (batch, rows, keys), of int64: (.., heads, rows, keys).
// Distances beyond the bias get its ends.
Tensor bias_at_distances(const Tensor& bias, const Tensor& distance);

// While it exists, ops compose attention on `device`: products in the dtype of their operands, whatever autocast wants.
class Composing {
 public:
  explicit Composing(at::Device device) : device_(device), no_autocast_(c10::autocast_dispatch_keyset) {}

 private:
  c10::DeviceGuard device_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_;
};

// The gradients of query, key, value, sinks and bias; the last two are undefined if the op was called without them.
struct AttentionGradients {
  Tensor query, key, value, sinks, bias;
};
// out and lse: as backward got them, which for a part of a larger call are those of the whole. Undefined: those of this
// call, through which derivatives of the gradients pass.
AttentionGradients composed_attention_backward(const Tensor& grad_out, const Tensor& grad_lse, const Tensor& query,
                                               const Tensor& key, const Tensor& value, const Tensor& rng_state,
                                               const AttentionOptions& options, const Tensor& out = {},
                                               const Tensor& lse = {});

}  // namespace cuda_ext
