// Attention and its gradients composed of differentiable ops, through the full matrix of scores. They serve second
// derivatives, forward mode and torch.func (ops/autograd.h), and use memory proportional to Sq * Sk.
#pragma once

#include <tuple>

#include "ops/attention_options.h"

namespace cuda_ext {

// Without rng_state, torch.nn.functional.dropout draws the dropout, with its rules for vmap.
std::tuple<Tensor, Tensor> composed_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                              const AttentionOptions& options);

// The gradients of query, key, value, sinks and bias; the last two are undefined if the op was called without them.
// rng_state: as returned by forward.
struct AttentionGradients {
  Tensor query, key, value, sinks, bias;
};
AttentionGradients composed_attention_backward(const Tensor& grad_out, const Tensor& grad_lse, const Tensor& query,
                                               const Tensor& key, const Tensor& value, const Tensor& rng_state,
                                               const AttentionOptions& options);

}  // namespace cuda_ext
