// The three tensors of a block mask (AttentionOptions): checks, parameters of a kernel, and the booleans they mean.
#pragma once

#include "attention/attention.h"
#include "ops/attention_checks.h"

namespace cuda_ext {

// On the CPU also that what the lists name exists.
void check_block_mask(const char* op, const Tensor& query, const AttentionShape& shape, const AttentionOptions& o);

// Tensors that a BlockMask points into.
struct BlockMaskOperands {
  Tensor keys, queries, tiles;
};
BlockMask block_mask_of(const AttentionOptions& o, BlockMaskOperands& operands);

// attn_mask and the block mask as one boolean tensor, whose last two dims have at least the sizes of the sequences, or
// 1; absent if there is neither.
OptionalTensor dense_mask(const AttentionOptions& o);

}  // namespace cuda_ext
