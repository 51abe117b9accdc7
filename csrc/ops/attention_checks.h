// Checks of the arguments of the attention ops, and the sizes found while checking them.
#pragma once

#include "ops/attention_options.h"

namespace cuda_ext {

struct AttentionShape {
  int64_t batch, seqlen_q, seqlen_k, heads, heads_kv, dim, dim_v;
  // The sizes of a bias or mask, and the row length for which dropout numbers its elements. For packed sequences: the
  // caller's max_seqlen, which may exceed seqlen_q and seqlen_k, because those are at most the number of rows.
  int64_t longest_q, longest_k;
};

// For every device. Packed sequences on a GPU without max_seqlen_q or max_seqlen_k wait for the stream.
AttentionShape check_attention(const char* op, const Tensor& query, const Tensor& key, const Tensor& value,
                               const AttentionOptions& options);

// The part of it that concerns `options`, but for the packing.
void check_attention_options(const AttentionShape& shape, const char* op, const Tensor& query,
                             const AttentionOptions& options);

}  // namespace cuda_ext
