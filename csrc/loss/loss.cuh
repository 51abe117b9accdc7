// Passes over tiles of logits (loss.h).
//
// Problem        Statistics of each row of x (rows, columns): maximum, sum of exponentials, moment, dot, logit of the
//                target; and the gradient at x from the log-sum-exp of the row.
// Tile           Statistics: a block has one row and passes over it twice, the second time from L2. Gradient: a block
//                has kThreads * kVector columns of a row.
// Accesses       kVector elements per thread at once, if rows are aligned so; else element by element.
// Sums           Each thread adds its columns, a warp its threads by shuffles, the block its warps in their order.
// Barriers       Two of all threads in each sum of the block.
// Shared memory  kSums floats of each warp.
#pragma once

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

DEVICE float exp_below(float x) { return arch::fast_exp2(x * 1.44269504f); }

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

// The column of the tile that is the row's target; none if negative or past the last.
DEVICE int64_t target_in(const LogitTile& tile, int64_t row) {
  return tile.target[row] == tile.ignore_index ? -1 : tile.target[row] - tile.first_column;
}

// Grid: (rows).
template <int threads>
GLOBAL(threads, 2)
logit_statistics(GRID_CONSTANT LogitStatisticsParams p) {
  SHARED_STORAGE(Storage, shared);
  const LogitTile& tile = p.tile;
  const int64_t row = arch::block_x();
  float* const logits = entry<float>(p.logits, row * tile.columns);
  const float softcap = float(tile.softcap), inverse = softcap > 0.0f ? 1.0f / softcap : 0.0f;
  const bool has_moment = p.statistics.moment != nullptr;

  float largest = -INFINITY;
  for (int64_t j = arch::thread_index() * kVector; j < tile.columns; j += threads * kVector) {
    const int count = count_from(j, tile.columns);
    float z[kVector];
    epilogue::read_vector(logits + j, 1, count, z);
    if (softcap > 0.0f) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) z[i] = softcap * arch::tanh(z[i] * inverse);
      epilogue::write_vector(logits + j, count, z);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (i < count) largest = fmaxf(largest, z[i]);
  }
  const float before = *entry<float>(p.statistics.max, row);
  largest = block_max(fmaxf(largest, before), shared);
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
  const float rescale = before == largest ? 1.0f : exp_below(before - largest);
  float* const sum = entry<float>(p.statistics.sum, row);
  *entry<float>(p.statistics.max, row) = largest;
  if (has_moment) {
    float* const moment = entry<float>(p.statistics.moment, row);
    *moment = *sum == 0.0f ? sums[1] : (*moment + (before - largest) * *sum) * rescale + sums[1];
  }
  *sum = *sum * rescale + sums[0];
  if (p.statistics.dot != nullptr) *entry<float>(p.statistics.dot, row) += sums[2];
  if (p.statistics.picked != nullptr) {
    const int64_t target = target_in(tile, row);
    if (target >= 0 && target < tile.columns) *entry<float>(p.statistics.picked, row) = logits[target];
  }
}

DEVICE float value_at(const void* values, int64_t row) { return values == nullptr ? 0.0f : *entry<float>(values, row); }

// Grid: (column tiles x rows).
template <int threads>
GLOBAL(threads, 2)
logit_grad(GRID_CONSTANT LogitGradParams p, int column_tiles) {
  const LogitTile& tile = p.tile;
  const int64_t row = arch::block_x() / column_tiles;
  const int64_t j = (int64_t(arch::block_x() % column_tiles) * threads + arch::thread_index()) * kVector;
  if (j >= tile.columns) return;
  const float lse = value_at(p.lse, row), lse_low = value_at(p.lse_low, row), entropy = value_at(p.entropy, row),
              by_lse = value_at(p.by_lse, row), by_entropy = value_at(p.by_entropy, row),
              by_dot = value_at(p.by_dot, row);
  const int64_t target = p.by_picked == nullptr || tile.target[row] < 0 ? -1 : tile.target[row] - tile.first_column - j;
  const float softcap = float(tile.softcap), inverse = softcap > 0.0f ? 1.0f / softcap : 0.0f;
  float x[kVector];
  epilogue::read_vector(entry<const float>(p.logits, row * tile.columns + j), 1, count_from(j, tile.columns), x);
  with_coefficients(p.by_dot == nullptr ? Operand{} : tile.coefficients, row, j, tile.columns,
                    [&](const float (&coefficients)[kVector]) {
#pragma unroll
                      for (int i = 0; i < kVector; ++i) {
                        const float z = softcap > 0.0f && !p.capped ? softcap * arch::tanh(x[i] * inverse) : x[i];
                        const float log_prob = (z - lse) - lse_low, prob = exp_below(log_prob);
                        float grad = prob * by_lse + by_dot * coefficients[i];
                        if (p.by_entropy != nullptr && prob > 0.0f) grad += prob * (by_entropy * (log_prob + entropy));
                        if (target == i) grad += value_at(p.by_picked, row);
                        if (softcap > 0.0f) grad *= 1.0f - z * inverse * (z * inverse);
                        x[i] = grad * float(p.scale);
                      }
                    });
  epilogue::with_storage(p.grad.dtype, [&](auto tag) {
    using T = decltype(tag);
    epilogue::write_vector(static_cast<T*>(p.grad.data) + row * tile.columns + j, count_from(j, tile.columns), x);
  });
}

}  // namespace cuda_ext::loss
