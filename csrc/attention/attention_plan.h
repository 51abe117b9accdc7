// What a launch of attention would run: for cuda_ext.attention_plan.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/attention.h"

namespace cuda_ext {

struct AttentionPlan {
  int dim = 0, dim_v = 0;        // head dims of the tile, to which those of the problem are padded; 0: nothing runs
  int block_m = 0, block_n = 0;  // queries and keys of a tile
  bool with_options = false;     // the kernel for has_options
  int pack_gqa = 1;              // heads whose queries share a tile
  int splits = 1;                // blocks that share the work of a tile
  int most_parts = 1;            // blocks that share a list of a block mask that is much longer than others
  int64_t tiles = 0;
  int64_t blocks = 0;  // of the main kernel; fewer than tiles: each computes several
  int threads = 0;     // of a block
  size_t workspace = 0;
};

namespace attention {

// Whether the logits are more than scale * products, or the scale is not positive.
inline bool modifies_logits(const AttentionParams& p) {
  // With smaller scales, sinks divided by the scale would not be finite.
  constexpr double kSmallestScale = 1e-20;
  return p.softcap > 0 || p.alibi_slopes != nullptr || p.bias_kind != BiasKind::kNone || p.scale < kSmallestScale;
}

// Whether a problem needs the kernel with options.
inline bool has_options(const AttentionParams& p) { return modifies_logits(p) || p.dropout_p > 0 || p.block_mask; }

}  // namespace attention
}  // namespace cuda_ext
