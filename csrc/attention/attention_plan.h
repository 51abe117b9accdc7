// What a launch of attention would run: for cuda_ext.attention_plan.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cuda_ext {

struct AttentionPlan {
  int dim = 0, dim_v = 0;        // head dims of the tile, to which those of the problem are padded; 0: nothing runs
  int block_m = 0, block_n = 0;  // queries and keys of a tile
  bool general = false;          // the kernel with softcap, ALiBi, dropout or a bias
  int pack = 1;                  // heads whose queries share a tile
  int splits = 1;                // blocks that share the work of a tile
  int64_t tiles = 0;
  int64_t blocks = 0;  // of the main kernel; fewer than tiles: each computes several
  int threads = 0;     // of a block
  size_t workspace = 0;
};

}  // namespace cuda_ext
