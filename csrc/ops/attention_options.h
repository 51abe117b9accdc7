// The arguments of an attention op other than query, key and value: the one place of csrc/ops that lists them. The
// macros are their schema, the parameters of a kernel and the names of those, in the same order.
#pragma once

#include "ops/op.h"

namespace cuda_ext {

using OptionalInt = std::optional<int64_t>;
// Of a length, which torch.compile and torch.export leave symbolic.
using OptionalSymInt = std::optional<c10::SymInt>;
using OptionalDouble = std::optional<double>;
using OptionalBool = std::optional<bool>;

// What decides the logits; attention over a cache has no other scalars.
#define ATTENTION_LOGIT_SCHEMA \
  "bool causal=False, float? scale=None, int? window_left=None, int? window_right=None, float softcap=0.0"
#define ATTENTION_LOGIT_SCALARS \
  bool causal, OptionalDouble scale, OptionalInt window_left, OptionalInt window_right, double softcap
#define ATTENTION_LOGIT_NAMES causal, scale, window_left, window_right, softcap

// The scalars that end the schema of every other op.
#define ATTENTION_SCALAR_SCHEMA \
  ATTENTION_LOGIT_SCHEMA ", float dropout_p=0.0, bool? deterministic=None, bool bias_is_relative=False"
#define ATTENTION_SCALARS ATTENTION_LOGIT_SCALARS, double dropout_p, OptionalBool deterministic, bool bias_is_relative
#define ATTENTION_SCALAR_NAMES ATTENTION_LOGIT_NAMES, dropout_p, deterministic, bias_is_relative

// Positional, as rules of vmap need tensors.
#define ATTENTION_TENSOR_SCHEMA                                                                     \
  "Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? attn_bias=None, Tensor? attn_mask=None, " \
  "Tensor? block_keys=None, Tensor? block_queries=None, Tensor? block_tiles=None"
#define ATTENTION_TENSORS                                                                                \
  const OptionalTensor &alibi_slopes, const OptionalTensor &sinks, const OptionalTensor &bias,           \
      const OptionalTensor &mask, const OptionalTensor &block_keys, const OptionalTensor &block_queries, \
      const OptionalTensor &block_tiles
#define ATTENTION_TENSOR_NAMES alibi_slopes, sinks, bias, mask, block_keys, block_queries, block_tiles

// All options of sequences of equal length.
#define DENSE_SCHEMA ATTENTION_TENSOR_SCHEMA ", *, " ATTENTION_SCALAR_SCHEMA
#define DENSE_OPTIONS ATTENTION_TENSORS, ATTENTION_SCALARS
#define DENSE_NAMES ATTENTION_TENSOR_NAMES, ATTENTION_SCALAR_NAMES

// All options of the form that has sequences of different lengths. `Cumulative` is the type of cu_seqlens: Tensor, or
// OptionalTensor where the op serves both forms.
#define VARLEN_SCHEMA \
  ATTENTION_TENSOR_SCHEMA ", *, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, " ATTENTION_SCALAR_SCHEMA
#define OPTIONAL_VARLEN_SCHEMA "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, " VARLEN_SCHEMA
#define VARLEN_OPTIONS(Cumulative)                                                                                \
  const Cumulative &cu_seqlens_q, const Cumulative &cu_seqlens_k, ATTENTION_TENSORS, OptionalSymInt max_seqlen_q, \
      OptionalSymInt max_seqlen_k, ATTENTION_SCALARS
#define VARLEN_NAMES \
  cu_seqlens_q, cu_seqlens_k, ATTENTION_TENSOR_NAMES, max_seqlen_q, max_seqlen_k, ATTENTION_SCALAR_NAMES

// What flash_attention_forward and flash_attention_backward have besides, for calls that are parts of a larger one:
// the place among its elements, whose random numbers their dropout has (DropoutPlace), and the dtype of out, or of the
// gradients of query, key and value.
using OptionalDtype = std::optional<at::ScalarType>;
#define PART_SCHEMA(dtype) ", int[]? dropout_place=None, ScalarType? " dtype "=None"
#define PART_OPTIONS at::OptionalIntArrayRef dropout_place, OptionalDtype result_dtype
#define PART_NAMES dropout_place, result_dtype

struct AttentionOptions {
  OptionalTensor cu_seqlens_q, cu_seqlens_k;  // absent for sequences of equal length
  // A relative bias broadcasts to (batch, heads, 1, 2 most + 1): element most + n is added where a key is n before the
  // diagonal of its query.
  OptionalTensor alibi_slopes, sinks, bias, mask;
  // A BlockMask (attention.h), int32: block_keys (batch or 1, heads or 1, query blocks, 2 + 2 width), block_queries the
  // same of key blocks, block_tiles (2, tiles, 128, 4).
  OptionalTensor block_keys, block_queries, block_tiles;
  OptionalSymInt max_seqlen_q{}, max_seqlen_k{};
  bool causal = false;
  OptionalDouble scale{};
  OptionalInt window_left{}, window_right{};
  double softcap = 0.0, dropout_p = 0.0;
  OptionalBool deterministic{};
  bool bias_is_relative = false;
  // Of the arguments of a call; autograd does not save them.
  at::OptionalIntArrayRef dropout_place{};
  OptionalDtype result_dtype{};

  bool is_varlen() const { return is_given(cu_seqlens_q); }

  // Calls visit(name, value) for everything but the tensors; `Self` is AttentionOptions, const or not.
  template <class Self, class Visit>
  static void visit_scalars(Self& self, const Visit& visit) {
    visit("max_seqlen_q", self.max_seqlen_q);
    visit("max_seqlen_k", self.max_seqlen_k);
    visit("causal", self.causal);
    visit("scale", self.scale);
    visit("window_left", self.window_left);
    visit("window_right", self.window_right);
    visit("softcap", self.softcap);
    visit("dropout_p", self.dropout_p);
    visit("deterministic", self.deterministic);
    visit("bias_is_relative", self.bias_is_relative);
  }

  // Call a public op, flash_attention_forward or flash_attention_backward, after the leading arguments.
  template <class Op, class... Leading>
  auto call_dense(const Op& op, const Leading&... leading) const {
    return op.call(leading..., DENSE_NAMES);
  }
  template <class Op, class... Leading>
  auto call_forward(const Op& op, const Leading&... leading) const {
    return op.call(leading..., VARLEN_NAMES, PART_NAMES, /*rng_state=*/{});
  }
  template <class Op, class... Leading>
  auto call_backward(const Op& op, const Leading&... leading) const {
    return op.call(leading..., VARLEN_NAMES, PART_NAMES);
  }
};

inline AttentionOptions dense_options(DENSE_OPTIONS) {
  return {{}, {}, ATTENTION_TENSOR_NAMES, {}, {}, ATTENTION_SCALAR_NAMES};
}

}  // namespace cuda_ext
