// The second kernel of attention forward, if the keys of a tile are divided among several blocks.
#pragma once

#include <cmath>

#include "arch/math.cuh"
#include "arch/warp.cuh"
#include "attention/block_lists.cuh"
#include "attention/plan_fwd.cuh"
#include "attention/rows.cuh"

namespace cuda_ext::attention {

// out = the outputs of a row's splits, at most kMaxSplits, weighted by exp(their log-sum-exp - that of the row), which
// is stored in lse. By one warp, whose lanes have the weights of every 32nd split.
template <class T>
DEVICE void combine_row(const ForwardPlan& plan, int splits, int64_t rows, int64_t row, float* lse, T* out, int dim_v) {
  constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
  constexpr int kOfLane = kMaxSplits / arch::kWarpSize;
  float weights[kOfLane];  // logarithms, at first
  float max = -INFINITY;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const int split = i * arch::kWarpSize + arch::lane_index();
    weights[i] = split < splits ? arch::load_global<float>(plan.partial_lse + split * rows + row) : -INFINITY;
    max = fmaxf(max, weights[i]);
  }
  max = arch::max_over_lanes(max);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    weights[i] = weights[i] == -INFINITY ? 0.0f : arch::fast_exp2((weights[i] - max) * kLog2e);
    sum += weights[i];
  }
  sum = arch::sum_over_lanes(sum);
  if (arch::lane_index() == 0)
    arch::store_global(lse, sum == 0.0f ? -INFINITY : arch::fma(arch::fast_log2(sum), kLn2, max));
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  for (int first = 0; first < dim_v; first += 2 * arch::kWarpSize) {  // all lanes take part in the shuffles
    const int d = first + arch::lane_index() * 2;
    float pair[2] = {};
#pragma unroll
    for (int i = 0; i < kOfLane; ++i)
      for (int lane = 0; lane < arch::kWarpSize && i * arch::kWarpSize + lane < splits; ++lane) {
        const float weight = arch::shuffle(weights[i], lane) * inverse;
        if (weight == 0.0f || d >= dim_v) continue;
        const int64_t part = (i * arch::kWarpSize + lane) * rows + row;
        const auto words = arch::load_global<arch::Words2>(plan.partial_out + part * dim_v + d);
        pair[0] = arch::fma(weight, arch::bits_float(words.data[0]), pair[0]);
        pair[1] = arch::fma(weight, arch::bits_float(words.data[1]), pair[1]);
      }
    if (d < dim_v) arch::store_global(out + d, arch::pair_of<T>(pair[0], pair[1]));
  }
}

// Combines the splits of all rows. One warp per row; no shared memory and no barriers.
template <class T, int threads>
GLOBAL(threads, 1)
attention_combine(GRID_CONSTANT AttentionParams p, GRID_CONSTANT ForwardPlan plan) {
  const bool varlen = p.cu_seqlens_q != nullptr;
  const int64_t queries = varlen ? p.total_q : p.seqlen_q;  // of a head
  const int64_t rows = (varlen ? 1 : p.batch) * p.heads * queries;
  const int64_t row = int64_t(arch::block_x()) * (threads / arch::kWarpSize) + arch::thread_index() / arch::kWarpSize;
  if (row >= rows) return;
  const int64_t head = row / queries, query = row % queries;
  combine_row<T>(plan, plan.splits, rows, row, static_cast<float*>(p.lse) + row,
                 row_of<T>(p.out, varlen ? 0 : int(head / p.heads), query, int(head % p.heads)), int(p.dim_v));
}

// Combines the parts of the rows whose lists are divided (LongLists). One warp for each row of a slot; no shared memory
// and no barriers.
template <class T, int threads>
GLOBAL(threads, 1)
attention_combine_lists(GRID_CONSTANT AttentionParams p, GRID_CONSTANT ForwardPlan plan) {
  const LongLists& long_lists = plan.long_lists;
  const int64_t rows = int64_t(long_lists.slots) * long_lists.rows;
  const int64_t row = int64_t(arch::block_x()) * (threads / arch::kWarpSize) + arch::thread_index() / arch::kWarpSize;
  if (row >= rows) return;
  const int slot = int(row / long_lists.rows), head_batch = slot / long_lists.tiles, n = slot % long_lists.tiles;
  const int batch = head_batch / int(p.heads), head = head_batch % int(p.heads);
  const BlockLists& lists = p.block_mask.keys_of_queries;
  const int parts = divided_among(lists, batch, head, long_lists, n);
  const int query = longest_tile(lists, batch, head, n, long_lists.rows) * long_lists.rows + int(row % long_lists.rows);
  const Sequence sequence(p, batch);
  if (parts == 1 || query >= sequence.q_len) return;
  combine_row<T>(plan, parts, rows, row, static_cast<float*>(p.lse) + lse_row(p, sequence, batch, head, query),
                 row_of<T>(p.out, batch, sequence.q_begin + query, head), int(p.dim_v));
}

}  // namespace cuda_ext::attention
