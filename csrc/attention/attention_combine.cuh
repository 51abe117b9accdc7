// The second kernel of attention forward, if the keys of a tile are divided among several blocks.
#pragma once

#include <cmath>

#include "arch/math.cuh"
#include "attention/attention_fwd_plan.cuh"
#include "attention/rows.cuh"

namespace cuda_ext::sm80 {

// out = the outputs of a row's splits, weighted by exp(their log-sum-exp - that of the row), which is stored in lse.
// One warp per row; no shared memory and no barriers.
template <class T, int threads>
GLOBAL(threads, 1)
attention_combine(GRID_CONSTANT AttentionParams p, GRID_CONSTANT ForwardPlan plan) {
  constexpr float kLog2e = 1.4426950408889634f;
  const bool packed = p.cu_seqlens_q != nullptr;
  const int64_t queries = packed ? p.total_q : p.seqlen_q;  // of a head
  const int64_t rows = (packed ? 1 : p.batch) * p.heads * queries;
  const int64_t row = int64_t(arch::block_x()) * (threads / arch::kWarpSize) + arch::thread_index() / arch::kWarpSize;
  if (row >= rows) return;
  const auto lse_of = [&](int split) { return arch::load_global<float>(plan.partial_lse + split * rows + row); };
  float max = -INFINITY;
  for (int split = 0; split < plan.splits; ++split) max = fmaxf(max, lse_of(split));
  float sum = 0.0f;
  if (max != -INFINITY)
    for (int split = 0; split < plan.splits; ++split) sum += arch::fast_exp2((lse_of(split) - max) * kLog2e);
  if (arch::lane_index() == 0)
    arch::store_global(static_cast<float*>(p.lse) + row,
                       max == -INFINITY ? -INFINITY : max + arch::fast_log2(sum) / kLog2e);

  const int64_t head = row / queries, query = row % queries;
  T* const to = row_of<T>(p.out, packed ? 0 : int(head / p.heads), query, int(head % p.heads));
  for (int d = arch::lane_index() * 2; d < p.dim_v; d += 2 * arch::kWarpSize) {
    float pair[2] = {};
    for (int split = 0; split < plan.splits; ++split) {
      const float lse = lse_of(split);
      if (lse == -INFINITY) continue;
      const float weight = arch::fast_exp2((lse - max) * kLog2e) / sum;
      const auto words = arch::load_global<arch::Words2>(plan.partial_out + (split * rows + row) * p.dim_v + d);
      pair[0] = arch::fma(weight, arch::bits_float(words.data[0]), pair[0]);
      pair[1] = arch::fma(weight, arch::bits_float(words.data[1]), pair[1]);
    }
    arch::store_global(to + d, arch::pack<T>(pair[0], pair[1]));
  }
}

}  // namespace cuda_ext::sm80
