// Passes over tiles of logits (loss.h), and what they share with the epilogues of logits.cuh.
//
// Problem        Statistics of each row of x (rows, columns): maximum, sum of exponentials, moment, dot, logit of the
//                target; the gradient at x from the log-sum-exp of the row; and the total of statistics of parts of
//                rows. Also: which targets are wrong.
// Tile           Statistics: a block has one row and passes over it twice. Gradient: a block has kThreads * kVector
//                columns of a row. Total: a block has 32 rows, a warp every kWarps-th part.
// Accesses       kVector elements per thread at once, if rows are aligned so; else element by element. Parts: a warp
//                reads 32 adjacent rows.
// Sums           Each thread adds its columns, a warp its threads by shuffles, the block its warps in their order.
// Barriers       Statistics: of all threads, two for the maximum and one for the sums. Gradient: none. Total: one.
// Shared memory  Statistics: kSums floats of each warp. Total: four floats of each row and warp.
#pragma once

#include <cstdio>

#include "arch/warp.cuh"
#include "gemm/activation.cuh"
#include "loss/loss.h"

namespace cuda_ext::loss {

constexpr int kThreads = 256;
constexpr int kVector = epilogue::kVector;
constexpr int kWarps = kThreads / arch::kWarpSize;
constexpr int kSums = 3;  // sum, moment, dot

struct Storage {
  float of_warp[kSums][kWarps];
};

// The columns of a row from j on that a vector has.
DEVICE int count_from(int64_t j, int64_t columns) { return columns - j < kVector ? int(columns - j) : kVector; }

// Calls f(coefficients) for kVector of them; 0 past the last, and if there are none.
template <class F>
DEVICE void with_coefficients(const Operand& operand, int64_t row, int64_t j, int64_t columns, const F& f) {
  float x[kVector] = {};
  if (operand.data != nullptr)
    epilogue::with_storage(operand.dtype, [&](auto tag) {
      using T = decltype(tag);
      const T* const from = static_cast<const T*>(operand.data) + row * operand.row_stride + j;
      epilogue::read_vector(from, 1, count_from(j, columns), x);
    });
  f(x);
}

// z = softcap tanh(x / softcap)
DEVICE float capped(float x, const LogitTile& tile) {
  const float softcap = float(tile.softcap);
  return softcap > 0.0f ? softcap * arch::tanh(x * (1.0f / softcap)) : x;
}

DEVICE float exp_below(float x) { return arch::fast_exp2(x * 1.44269504f); }

// Statistics of a part of a row: the maximum, and sums relative to it.
struct RunningSums {
  float max = -INFINITY, sum = 0.0f, moment = 0.0f;

  DEVICE void add(const RunningSums& part) {
    if (part.sum == 0.0f) return;  // of -inf alone, whose differences are NaN
    const float largest = fmaxf(max, part.max);
    const float mine = max == largest ? 1.0f : exp_below(max - largest);
    const float theirs = part.max == largest ? 1.0f : exp_below(part.max - largest);
    const float shifted = sum == 0.0f ? 0.0f : (moment + (max - largest) * sum) * mine;
    moment = shifted + (part.moment + (part.max - largest) * part.sum) * theirs;
    sum = sum * mine + part.sum * theirs;
    max = largest;
  }
};

// All threads get the maximum over the block.
DEVICE float block_max(float value, Storage& shared) {
#pragma unroll
  for (int lanes = 1; lanes < arch::kWarpSize; lanes *= 2) value = fmaxf(value, arch::shuffle_xor(value, lanes));
  float* const of_warp = shared.of_warp[0];
  if (arch::lane_index() == 0)
    arch::store_shared(arch::shared_address(of_warp + arch::thread_index() / arch::kWarpSize), value);
  arch::sync_threads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) value = fmaxf(value, arch::load_shared<float>(arch::shared_address(of_warp + w)));
  arch::sync_threads();
  return value;
}

// Thread 0 gets the sums over the block.
DEVICE void block_sums(float (&values)[kSums], Storage& shared) {
#pragma unroll
  for (int n = 0; n < kSums; ++n) {
#pragma unroll
    for (int lanes = 1; lanes < arch::kWarpSize; lanes *= 2) values[n] += arch::shuffle_xor(values[n], lanes);
    if (arch::lane_index() == 0)
      arch::store_shared(arch::shared_address(&shared.of_warp[n][arch::thread_index() / arch::kWarpSize]), values[n]);
  }
  arch::sync_threads();
  if (arch::thread_index() != 0) return;
#pragma unroll
  for (int n = 0; n < kSums; ++n) {
    values[n] = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) values[n] += arch::load_shared<float>(arch::shared_address(&shared.of_warp[n][w]));
  }
}

template <class T>
DEVICE T* entry(const void* values, int64_t row) {
  return static_cast<T*>(const_cast<void*>(values)) + row;
}

DEVICE float value_at(const void* values, int64_t row) { return values == nullptr ? 0.0f : *entry<float>(values, row); }

DEVICE void add_to_row(const RowStatistics& statistics, int64_t row, const RunningSums& part, float dot) {
  float* const max = entry<float>(statistics.max, row);
  float* const sum = entry<float>(statistics.sum, row);
  RunningSums total{*max, *sum, value_at(statistics.moment, row)};
  total.add(part);
  *max = total.max;
  *sum = total.sum;
  if (statistics.moment != nullptr) *entry<float>(statistics.moment, row) = total.moment;
  if (statistics.dot != nullptr) *entry<float>(statistics.dot, row) += dot;
}

// The column of the tile, of `columns`, that is the row's target, or -1.
DEVICE int target_column(const LogitTile& tile, int64_t row, int64_t columns) {
  const int64_t target = tile.target[row], column = target - tile.first_column;
  return target == tile.ignore_index || column < 0 || column >= columns ? -1 : int(column);
}

// Prints a line for each of them that is wrong; its loss is NaN. Grid: (rows / threads).
template <int threads>
GLOBAL(threads, 2)
report_wrong_targets(GRID_CONSTANT LossTargets p) {
  const int64_t row = int64_t(arch::block_x()) * threads + arch::thread_index();
  if (row < p.rows && p.is_wrong(row))
    printf("cuda_ext: linear_cross_entropy: expected targets in [0, %lld) or ignore_index %lld, got %lld at row %lld\n",
           (long long)p.classes, (long long)p.ignore_index, (long long)p.target[row], (long long)row);
}

// Grid: (rows).
template <int threads>
GLOBAL(threads, 2)
logit_statistics(GRID_CONSTANT LogitStatisticsParams p) {
  SHARED_STORAGE(Storage, shared);
  const LogitTile& tile = p.tile;
  const int64_t row = arch::block_x();
  float* const logits = entry<float>(p.logits, row * tile.columns);
  const bool has_moment = p.statistics.moment != nullptr;

  float largest = -INFINITY;
  for (int64_t j = arch::thread_index() * kVector; j < tile.columns; j += threads * kVector) {
    const int count = count_from(j, tile.columns);
    float z[kVector];
    epilogue::read_vector(logits + j, 1, count, z);
    if (tile.softcap > 0) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) z[i] = capped(z[i], tile);
      epilogue::write_vector(logits + j, count, z);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (i < count) largest = fmaxf(largest, z[i]);
  }
  largest = block_max(largest, shared);
  // A row of -inf alone: the differences must not be NaN.
  const float shift = largest == -INFINITY ? 0.0f : largest;

  float sums[kSums] = {};
  for (int64_t j = arch::thread_index() * kVector; j < tile.columns; j += threads * kVector) {
    const int count = count_from(j, tile.columns);
    float z[kVector];
    epilogue::read_vector(logits + j, 1, count, z);
    with_coefficients(tile.coefficients, row, j, tile.columns, [&](const float (&coefficients)[kVector]) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (i >= count) continue;
        const float below = z[i] - shift, prob = exp_below(below);
        sums[0] += prob;
        if (has_moment && prob > 0.0f) sums[1] += prob * below;
        if (p.statistics.dot != nullptr) sums[2] += coefficients[i] * z[i];
      }
    });
  }
  block_sums(sums, shared);
  if (arch::thread_index() != 0) return;
  add_to_row(p.statistics, row, {largest, sums[0], sums[1]}, sums[2]);
  if (p.statistics.picked != nullptr) {
    const int target = target_column(tile, row, tile.columns);
    if (target >= 0) *entry<float>(p.statistics.picked, row) = logits[target];
  }
}

// The gradient at the products of a row (LogitGradParams).
struct GradientOfRow {
  float lse, lse_low, entropy, by_lse, by_entropy, by_dot;
  int row, target;  // column of the tile, or -1

  DEVICE GradientOfRow(const LogitGradParams& p, int row_, int64_t columns)
      : lse(value_at(p.lse, row_)),
        lse_low(value_at(p.lse_low, row_)),
        entropy(value_at(p.entropy, row_)),
        by_lse(value_at(p.by_lse, row_)),
        by_entropy(value_at(p.by_entropy, row_)),
        by_dot(value_at(p.by_dot, row_)),
        row(row_),
        target(p.by_picked == nullptr ? -1 : target_column(p.tile, row_, columns)) {}

  DEVICE float log_prob(float z) const { return (z - lse) - lse_low; }
  DEVICE float prob(float z) const { return exp_below(log_prob(z)); }

  DEVICE float operator()(const LogitGradParams& p, float z, float coefficient, bool is_target) const {
    const float log = log_prob(z), own = exp_below(log);
    float grad = own * by_lse + by_dot * coefficient;
    grad += own > 0.0f ? own * (by_entropy * (log + entropy)) : 0.0f;
    if (is_target) grad += value_at(p.by_picked, row);
    const float t = p.tile.softcap > 0 ? z * (1.0f / float(p.tile.softcap)) : 0.0f;
    return grad * (1.0f - t * t) * float(p.scale);
  }
};

// Grid: (column tiles x rows).
template <int threads>
GLOBAL(threads, 2)
logit_grad(GRID_CONSTANT LogitGradParams p, int column_tiles) {
  const LogitTile& tile = p.tile;
  const int64_t row = arch::block_x() / column_tiles;
  const int64_t j = (int64_t(arch::block_x() % column_tiles) * threads + arch::thread_index()) * kVector;
  if (j >= tile.columns) return;
  const GradientOfRow gradient(p, int(row), tile.columns);
  float x[kVector];
  epilogue::read_vector(entry<const float>(p.logits, row * tile.columns + j), 1, count_from(j, tile.columns), x);
  with_coefficients(p.by_dot == nullptr ? Operand{} : tile.coefficients, row, j, tile.columns,
                    [&](const float (&coefficients)[kVector]) {
#pragma unroll
                      for (int i = 0; i < kVector; ++i) {
                        x[i] = gradient(p, p.capped ? x[i] : capped(x[i], tile), coefficients[i],
                                        gradient.target == j + i);
                      }
                    });
  if (p.unrounded != nullptr)
    epilogue::write_vector(entry<float>(p.unrounded, row * tile.columns + j), count_from(j, tile.columns), x);
  epilogue::with_storage(p.grad.dtype, [&](auto tag) {
    using T = decltype(tag);
    epilogue::write_vector(static_cast<T*>(p.grad.data) + row * tile.columns + j, count_from(j, tile.columns), x);
  });
}

// The shared memory of total_statistics.
struct Totals {
  float max[kWarps][arch::kWarpSize], sum[kWarps][arch::kWarpSize];
  float moment[kWarps][arch::kWarpSize], dot[kWarps][arch::kWarpSize];
};

// Grid: (32 rows).
template <int threads>
GLOBAL(threads, 2)
total_statistics(GRID_CONSTANT LogitTotalParams p) {
  SHARED_STORAGE(Totals, shared);
  const int warp = arch::thread_index() / arch::kWarpSize, lane = arch::lane_index();
  const int64_t row = int64_t(arch::block_x()) * arch::kWarpSize + lane;
  const LogitParts& parts = p.parts;
  RunningSums mine;
  float dot = 0.0f;
  // Every kWarps-th part of this row.
  for (int64_t part = warp; part < parts.count && row < p.rows; part += kWarps) {
    const int64_t at = part * p.rows + row;
    mine.add({value_at(parts.max, at), value_at(parts.sum, at), value_at(parts.moment, at)});
    dot += value_at(parts.dot, at);
  }
  arch::store_shared(arch::shared_address(&shared.max[warp][lane]), mine.max);
  arch::store_shared(arch::shared_address(&shared.sum[warp][lane]), mine.sum);
  arch::store_shared(arch::shared_address(&shared.moment[warp][lane]), mine.moment);
  arch::store_shared(arch::shared_address(&shared.dot[warp][lane]), dot);
  arch::sync_threads();
  if (warp > 0 || row >= p.rows) return;
  // The first warp adds those of the others.
  for (int w = 1; w < kWarps; ++w) {
    const auto get = [&](const float* from) { return arch::load_shared<float>(arch::shared_address(from)); };
    mine.add({get(&shared.max[w][lane]), get(&shared.sum[w][lane]), get(&shared.moment[w][lane])});
    dot += get(&shared.dot[w][lane]);
  }
  add_to_row(p.statistics, row, mine, dot);
}

}  // namespace cuda_ext::loss
