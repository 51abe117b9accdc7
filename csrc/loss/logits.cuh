// The epilogues of products whose results are logits: statistics of each row of a tile, and the gradient at the product
// (loss.h). They work on the accumulators of a warp, so logits need no memory. Called by logits_sm80.cuh and
// logits_sm90.cuh.
//
// Fragment       16 rows of a warp. A thread has rows g and g + 8, and columns 8j + 2t, 8j + 2t + 1 for each j, where
//                g = lane / 4 and t = lane % 4: accumulators 4j to 4j + 3, for mma.sync and wgmma alike. So the 4 lanes
//                of a quad have a row.
// Statistics     Each lane reduces its columns of a row, then the quad by shuffles, and one lane stores the part; a
//                last small kernel adds the parts (total_statistics). The lane that has the target's logit stores it.
// Stores         of gradients, and of logits that are wanted: from the registers, two adjacent columns at once. A quad
//                fills half a sector or one, and the lines of a tile are complete in L2 before they leave it.
// Options        are tested once per fragment, and the usual ones have a loop of their own: each test inside of a loop
//                that is unrolled would cost more than the formula.
#pragma once

#include "loss/logits.h"
#include "loss/loss.cuh"

namespace cuda_ext::loss {

// x = part `part` of the accumulators, of which at(p, r) is number r of part p. So that the code that follows is there
// once for all parts; the first is copied without a condition, or ptxas would keep x for other parts.
template <int parts, int count, class At>
DEVICE void copy_part(const At& at, int part, float (&x)[count]) {
#pragma unroll
  for (int p = 0; p < parts; ++p)
    if (p == 0 || p == part)
#pragma unroll
      for (int r = 0; r < count; ++r) x[r] = at(p, r);
}

// What a thread has of a fragment.
template <int count>
struct Fragment {
  float x[count];
  int row, column;  // of x[0] in the product

  // Moves from the fragment's first row and column to the thread's.
  DEVICE void place(int first_row, int first_column) {
    row = first_row + arch::lane_index() / 4;
    column = first_column + arch::lane_index() % 4 * 2;
  }
  DEVICE static constexpr int half(int r) { return r / 2 % 2; }
  DEVICE int row_of(int half) const { return row + 8 * half; }
  DEVICE int column_of(int r) const { return column + r / 4 * 8 + r % 2; }
};

// The value of column_of(r), 0 past the last column.
template <int count>
DEVICE float at_column(const Operand& values, const Fragment<count>& fragment, int r, int64_t columns) {
  const int column = fragment.column_of(r);
  if (column >= columns) return 0.0f;
  return arch::load_global<float>(static_cast<const float*>(values.data) + column * values.column_stride);
}

// The products become logits: z = softcap tanh((alpha product + bias) / softcap), and -inf past the last column.
template <int count>
DEVICE void form_logits(const GemmParams& product, const LogitTile& tile, Fragment<count>& fragment) {
  const float alpha = float(product.alpha);
  // Scale, add the bias, cap, and hide what is past the last column.
#pragma unroll
  for (float& x : fragment.x) x *= alpha;
  if (product.bias.data != nullptr)
#pragma unroll
    for (int r = 0; r < count; ++r)
      if (fragment.half(r) == 0) {  // the bias of both rows
        const float bias = at_column(product.bias, fragment, r, product.n);
        fragment.x[r] += bias;
        fragment.x[r + 2] += bias;
      }
  if (tile.softcap > 0)
#pragma unroll
    for (float& x : fragment.x) x = capped(x, tile);
  if (fragment.column_of(count - 1) >= product.n)
#pragma unroll
    for (int r = 0; r < count; ++r)
      if (fragment.column_of(r) >= product.n) fragment.x[r] = -INFINITY;
}

// Calls f(r) for the element of the fragment that is the target of its row, if this thread has it.
template <int count, class F>
DEVICE void with_target(const Fragment<count>& fragment, const int (&target)[2], const F& f) {
  const auto is_here = [&](int half) {
    return target[half] >= fragment.column && target[half] <= fragment.column_of(count - 1);
  };
  if (!is_here(0) && !is_here(1)) return;
#pragma unroll
  for (int r = 0; r < count; ++r)
    if (fragment.column_of(r) == target[fragment.half(r)]) f(r);
}

// The reductions of a quad, in all of its lanes.
DEVICE float quad_sum(float x) {
  x += arch::shuffle_xor(x, 1);
  return x + arch::shuffle_xor(x, 2);
}
DEVICE float quad_max(float x) {
  x = fmaxf(x, arch::shuffle_xor(x, 1));
  return fmaxf(x, arch::shuffle_xor(x, 2));
}

template <class T>
DEVICE void store_pair(T* to, const float (&pair)[2]) {
  if constexpr (sizeof(T) == 2)
    arch::store_global(to, arch::pack<T>(pair[0], pair[1]));
  else
    arch::store_global(to, arch::Words2{{arch::float_bits(pair[0]), arch::float_bits(pair[1])}});
}

// Stores a fragment in `matrix`, (rows, columns) of the product.
template <int count, class T>
DEVICE void store_fragment(const GemmParams& product, const Fragment<count>& fragment, T* matrix) {
  const bool in_pairs = product.n % 2 == 0;
#pragma unroll
  for (int r = 0; r < count; r += 2) {
    const int row = fragment.row_of(fragment.half(r)), column = fragment.column_of(r);
    if (row >= product.m || column >= product.n) continue;
    T* const to = matrix + int64_t(row) * product.n + column;
    const float pair[2] = {fragment.x[r], fragment.x[r + 1]};
    if (in_pairs) {
      store_pair(to, pair);
    } else {
      arch::store_global(to, arch::from_float<T>(pair[0]));
      if (column + 1 < product.n) arch::store_global(to + 1, arch::from_float<T>(pair[1]));
    }
  }
}

// Stores the sum over the fragment's rows of each column, as a row of `sums` (LogitGradParams::column_sums).
template <int count>
DEVICE void store_column_sums(const GemmParams& product, const Fragment<count>& fragment, float* sums) {
  static_assert(kSummedRows == 16);
  const bool has[2] = {fragment.row_of(0) < product.m, fragment.row_of(1) < product.m};
  const int lane = arch::lane_index(), group = fragment.row / kSummedRows;
  float* const to = sums + int64_t(group) * product.n;
#pragma unroll
  for (int r = 0; r < count; ++r) {
    if (fragment.half(r) != 0) continue;  // added to the first half
    float sum = (has[0] ? fragment.x[r] : 0.0f) + (has[1] ? fragment.x[r + 2] : 0.0f);
    // The lanes with the same columns.
#pragma unroll
    for (int lanes = 4; lanes < arch::kWarpSize; lanes *= 2) sum += arch::shuffle_xor(sum, lanes);
    const int column = fragment.column_of(r);
    if (lane < 4 && group * kSummedRows < product.m && column < product.n) arch::store_global(to + column, sum);
  }
}

// Stores statistics of the rows of each fragment as part `part` of them.
struct StatisticsEpilogue {
  static constexpr int kColumnsSm90 = kPartColumnsSm90;  // of a fragment

  LogitPartsParams params;

  template <int count>
  DEVICE void run(const GemmParams& product, Fragment<count>& fragment, int64_t part) const {
    const LogitTile& tile = params.tile;
    const LogitParts& parts = params.parts;
    form_logits(product, tile, fragment);
    if (params.logits != nullptr) store_fragment(product, fragment, params.logits);
    // The maximum of each row over the quad.
    float max[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int r = 0; r < count; ++r) max[fragment.half(r)] = fmaxf(max[fragment.half(r)], fragment.x[r]);
    int target[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      max[half] = quad_max(max[half]);
      const bool has_target = params.picked != nullptr && fragment.row_of(half) < product.m;
      target[half] = has_target ? target_column(tile, fragment.row_of(half), product.n) : -1;
    }
    // A row of -inf alone: the differences must not be NaN.
    const float shift[2] = {max[0] == -INFINITY ? 0.0f : max[0], max[1] == -INFINITY ? 0.0f : max[1]};
    // Sums over this lane's columns, relative to the maximum.
    float sum[2] = {}, moment[2] = {}, dot[2] = {};
    with_target(fragment, target,
                [&](int r) { arch::store_global(params.picked + fragment.row_of(fragment.half(r)), fragment.x[r]); });
    if (parts.dot != nullptr)
#pragma unroll
      for (int r = 0; r < count; ++r)
        if (fragment.column_of(r) < product.n)
          dot[fragment.half(r)] += at_column(tile.coefficients, fragment, r, product.n) * fragment.x[r];
    if (parts.moment != nullptr) {
#pragma unroll
      for (int r = 0; r < count; ++r) {
        const float below = fragment.x[r] - shift[fragment.half(r)], prob = exp_below(below);
        sum[fragment.half(r)] += prob;
        moment[fragment.half(r)] += prob > 0.0f ? prob * below : 0.0f;
      }
    } else {
#pragma unroll
      for (int r = 0; r < count; ++r) sum[fragment.half(r)] += exp_below(fragment.x[r] - shift[fragment.half(r)]);
    }
    // The quad's sums, which one lane stores.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float totals[] = {quad_sum(sum[half]), quad_sum(moment[half]), quad_sum(dot[half])};
      const int row = fragment.row_of(half);
      const int64_t at = part * product.m + row;
      if (arch::lane_index() % 4 != 0 || row >= product.m) continue;
      arch::store_global(parts.max + at, max[half]);
      arch::store_global(parts.sum + at, totals[0]);
      if (parts.moment != nullptr) arch::store_global(parts.moment + at, totals[1]);
      if (parts.dot != nullptr) arch::store_global(parts.dot + at, totals[2]);
    }
  }
};

// Stores the gradient at the product of each fragment, as T.
template <class T>
struct GradientEpilogue {
  static constexpr int kColumnsSm90 = 32;  // of a fragment: its formula needs more registers beside than statistics

  LogitGradParams params;  // rows and columns are the product's; without logits

  template <int count>
  DEVICE void run(const GemmParams& product, Fragment<count>& fragment, int64_t) const {
    form_logits(product, params.tile, fragment);
    const int last = int(product.m) - 1;  // rows past it are read as the last, and not written
    const auto clamped = [&](int half) { return fragment.row_of(half) < last ? fragment.row_of(half) : last; };
    const GradientOfRow rows[2] = {{params, clamped(0), product.n}, {params, clamped(1), product.n}};
    const bool is_plain = params.by_dot == nullptr && params.by_entropy == nullptr && params.tile.softcap <= 0;
    if (is_plain) {
      const float scale = float(params.scale), by_lse[2] = {rows[0].by_lse * scale, rows[1].by_lse * scale};
#pragma unroll
      for (int r = 0; r < count; ++r)
        fragment.x[r] = rows[fragment.half(r)].prob(fragment.x[r]) * by_lse[fragment.half(r)];
      with_target(fragment, {rows[0].target, rows[1].target},
                  [&](int r) { fragment.x[r] += value_at(params.by_picked, rows[fragment.half(r)].row) * scale; });
    } else {
#pragma unroll
      for (int r = 0; r < count; ++r) {
        const GradientOfRow& row = rows[fragment.half(r)];
        const float coefficient =
            params.by_dot != nullptr ? at_column(params.tile.coefficients, fragment, r, product.n) : 0.0f;
        fragment.x[r] = row(params, fragment.x[r], coefficient, fragment.column_of(r) == row.target);
      }
    }
    store_fragment(product, fragment, static_cast<T*>(params.grad.data));
    if constexpr (sizeof(T) == 2)
      if (params.column_sums != nullptr) store_column_sums(product, fragment, params.column_sums);
  }
};

}  // namespace cuda_ext::loss
