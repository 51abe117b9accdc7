// The arguments of an attention op other than query, key and value.
#pragma once

#include "ops/op.h"

namespace cuda_ext {

using OptionalInt = std::optional<int64_t>;
// Of a length, which torch.compile and torch.export leave symbolic.
using OptionalSymInt = std::optional<c10::SymInt>;
using OptionalDouble = std::optional<double>;
using OptionalBool = std::optional<bool>;

// The scalar options that end every schema, in order.
#define ATTENTION_SCALARS                                                                               \
  bool causal, OptionalInt window_left, OptionalInt window_right, OptionalDouble scale, double softcap, \
      double dropout_p, OptionalBool deterministic
#define ATTENTION_SCALAR_NAMES causal, window_left, window_right, scale, softcap, dropout_p, deterministic

struct AttentionOptions {
  OptionalTensor cu_seqlens_q, cu_seqlens_k;  // packed sequences; absent in the dense form
  OptionalTensor alibi_slopes, sinks, bias, mask;
  OptionalSymInt max_seqlen_q, max_seqlen_k;
  bool causal;
  OptionalInt window_left, window_right;
  OptionalDouble scale;
  double softcap, dropout_p;
  OptionalBool deterministic;

  bool packed() const { return is_given(cu_seqlens_q); }

  // Calls an op whose schema ends in all of these, after the leading arguments.
  template <class Op, class... Leading>
  auto call(const Op& op, const Leading&... leading) const {
    return op.call(leading..., cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, bias, mask, max_seqlen_q, max_seqlen_k,
                   ATTENTION_SCALAR_NAMES);
  }
};

}  // namespace cuda_ext
