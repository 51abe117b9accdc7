// The layouts in registers of what attention_bwd_sm90 computes, which are also those of float32 sums in the workspace.
#pragma once

#include "attention/tiles_sm90.h"
#include "tile/results.cuh"

namespace cuda_ext::attention::sm90 {

using namespace tile;

template <BackwardConfig config, bool separate = config.separate>
struct BackwardResults {
  static constexpr int kBlockM = config.block_m;
  static constexpr int kConsumers = config.block_n / 64;
  // A consumer has 64 keys, and 64 rows or, if there are no more rows, 64 columns of dQ.
  static constexpr bool kSharesRows = config.block_m == 64;
  using GradK = WarpTiles<config.block_n, config.dim, 4 * kConsumers, 1>;
  using GradV = WarpTiles<config.block_n, config.dim_v, 4 * kConsumers, 1>;
  using GradQ = WarpTiles<config.block_m, config.sums_dim(), config.block_m / 16, kSharesRows ? kConsumers : 1, 64>;
  static_assert(GradQ::kThreads == 128 * kConsumers && GradQ::kColumnTiles == 8);
};

// Head dims above 128: dQ has a separate kernel. One consumer has dK, another dV. Twice as many threads
// add up their parts in the workspace, whose order is the same: each has every other 8 columns.
template <BackwardConfig config>
struct BackwardResults<config, true> {
  static constexpr int kBlockM = config.block_m;
  using GradK = WarpTiles<config.block_n, config.dim, 4, 2, 8>;
  using GradV = WarpTiles<config.block_n, config.dim_v, 4, 2, 8>;
};

}  // namespace cuda_ext::attention::sm90
