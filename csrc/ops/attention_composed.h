// Attention and its gradients composed of differentiable ops, through the full matrix of scores. They serve second
// derivatives, forward mode and torch.func (ops/autograd.h), and take memory that grows with Sq * Sk.
#pragma once

#include <tuple>

#include "ops/attention_options.h"

namespace cuda_ext {

// Without rng_state, dropout is drawn by torch.nn.functional.dropout, whose rules for vmap then hold.
std::tuple<Tensor, Tensor> composed_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                              const AttentionOptions& options);

// The gradients of query, key, value, sinks and bias; the last two are undefined where the op was given none. rng_state
// is what forward drew for its dropout.
struct AttentionGradients {
  Tensor query, key, value, sinks, bias;
};
AttentionGradients composed_attention_backward(const Tensor& grad_out, const Tensor& grad_lse, const Tensor& query,
                                               const Tensor& key, const Tensor& value, const Tensor& rng_state,
                                               const AttentionOptions& options);

}  // namespace cuda_ext
