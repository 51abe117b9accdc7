// Checks of the arguments of the attention ops, and the sizes found while checking them.
#pragma once

#include "ops/attention_options.h"

namespace cuda_ext {

struct AttentionShape {
  int64_t batch, seqlen_q, seqlen_k, heads, heads_kv, dim, dim_v;
  // The sizes of a bias or mask; longest_k is also that of the rows whose elements dropout numbers. For packed
  // sequences: the caller's max_seqlen, which may exceed seqlen_q and seqlen_k, because those are at most the number of
  // rows.
  int64_t longest_q, longest_k;
};

// Which elements of a larger call one has, for dropout: of one with so many heads, so many rows of each (of all
// sequences, if they are packed) and so many keys in its longest sequence. Head, row and key 0 of the call are
// first_head, first_row and first_key of the larger one.
struct DropoutPlace {
  int64_t heads, first_head, rows, first_row, keys, first_key;
};

// The place that the options give, or that of a call that is no part of another. rows: of a head of the call.
DropoutPlace dropout_place_of(const AttentionOptions& options, int64_t heads, int64_t rows, int64_t longest_k);

// The dtype of the results of a call, which is that of query if the options name none. name: of the argument.
at::ScalarType check_result_dtype(const char* op, const char* name, const Tensor& query,
                                  const AttentionOptions& options);

// For every device. Packed sequences on a GPU without max_seqlen_q or max_seqlen_k wait for the stream.
AttentionShape check_attention(const char* op, const Tensor& query, const Tensor& key, const Tensor& value,
                               const AttentionOptions& options);

// The part of it that concerns `options`, but for the packing.
void check_attention_options(const AttentionShape& shape, const char* op, const Tensor& query,
                             const AttentionOptions& options);

}  // namespace cuda_ext
