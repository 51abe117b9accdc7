// Products of tiles by mma.sync, and the layout of the result in registers.
#pragma once

#include "arch/math.cuh"
#include "tile/operand_tile.cuh"
#include "tile/tf32.cuh"

namespace cuda_ext::tile {

// The distribution of a (rows, columns) result over a grid of warps: each warp has consecutive rows, but every
// warps_n-th group of `group` columns; groups of 16 work for any number of columns. Groups of 8: not for mma.
template <int rows, int columns, int warps_m, int warps_n, int group = 16>
struct WarpTiles {
  static constexpr int kRows = rows, kColumns = columns;
  static constexpr int kWarpsM = warps_m, kWarpsN = warps_n;
  static constexpr int kRowTiles = rows / 16 / warps_m;
  static constexpr int kColumnTiles = columns / 8 / warps_n;
  static constexpr int kThreads = 32 * warps_m * warps_n;
  static_assert(rows % (16 * warps_m) == 0 && columns % (group * warps_n) == 0 && group % 8 == 0);
  static_assert(kRowTiles == 1 || kRowTiles == 2 || kRowTiles == 4, "as OperandTile::load_fragment requires");

  using Accumulators = float[kRowTiles][kColumnTiles][4];

  // Element q of a thread's tile (m, n) is at row(m, q / 2) and column() + column_step(n) + q % 2.
  DEVICE static int first_row(int thread = arch::thread_index()) {
    return thread / arch::kWarpSize % warps_m * kRowTiles * 16;
  }
  DEVICE static int first_column(int thread = arch::thread_index()) {
    return thread / arch::kWarpSize / warps_m % warps_n * group;
  }
  DEVICE static int row(int m, int half, int thread = arch::thread_index()) {
    return first_row(thread) + m * 16 + half * 8 + thread % arch::kWarpSize / 4;
  }
  DEVICE static int column(int thread = arch::thread_index()) { return first_column(thread) + thread % 4 * 2; }
  HOST_DEVICE static constexpr int column_step(int n) { return n * 8 / group * group * warps_n + n * 8 % group; }
};

// The same for float32 operands, as tf32: each rounded or, unless `in_tf32`, in three products of what rounding keeps
// and what it drops. Tensor cores round sums towards zero, so every few steps are added in float32 arithmetic, and the
// products of what rounding drops, 2^-11 as large as the others, come first: after those, each would round a large sum.
// The fourth product, of what both drop, is 2^-22 as large: below the rounding of long sums, but not of one or two
// terms (head dim 1, a query that sees two keys). So the first step has it, but not where registers would spill.
template <class TileB, int b_stride, class Address, int row_tiles, int column_tiles, class OperandA>
DEVICE void multiply_float32(const OperandA& load_a, Address b, float (&result)[row_tiles][column_tiles][4],
                             bool in_tf32) {
  constexpr int kSteps = TileB::kDepth / TileB::kStep, kTogether = kSteps % 4 == 0 ? 4 : kSteps % 2 == 0 ? 2 : 1;
  constexpr bool kHasFourth = TileB::kDepth <= 128 && row_tiles * column_tiles < 32;
#pragma unroll
  for (int first = 0; first < kSteps; first += kTogether) {
    Tf32Fragment<4> rows[kTogether][row_tiles];
#pragma unroll
    for (int step = 0; step < kTogether; ++step)
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) {
        uint32_t words[4];
        load_a(words, m, first + step);
        rows[step][m] = Tf32Fragment<4>(words);
      }
#pragma unroll
    for (int n = 0; n < column_tiles; n += 2) {
      Tf32Fragment<2> columns[kTogether][2];
#pragma unroll
      for (int step = 0; step < kTogether; ++step) {
        uint32_t words[4];
        TileB::load_fragment(words, b, n / 2 * b_stride, first + step);
        columns[step][0] = Tf32Fragment<2>(words);
        columns[step][1] = Tf32Fragment<2>(words + 2);
      }
      float sums[row_tiles][2][4] = {};
      const auto for_each_tile = [&](auto&& multiply_one) {
#pragma unroll
        for (int step = 0; step < kTogether; ++step)
#pragma unroll
          for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int m = 0; m < row_tiles; ++m) multiply_one(sums[m][j], rows[step][m], columns[step][j]);
      };
      if (!in_tf32 && arch::has_sm80_mma()) {
        if (first == 0 && kHasFourth)
#pragma unroll
          for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int m = 0; m < row_tiles; ++m)
              arch::mma_m16n8k8_tf32(sums[m][j], rows[0][m].dropped, columns[0][j].dropped);
        for_each_tile([](float (&sum)[4], const Tf32Fragment<4>& row, const Tf32Fragment<2>& column) {
          arch::mma_m16n8k8_tf32(sum, row.dropped, column.kept);
          arch::mma_m16n8k8_tf32(sum, row.kept, column.dropped);
        });
      }
      for_each_tile([](float (&sum)[4], const Tf32Fragment<4>& row, const Tf32Fragment<2>& column) {
        arch::mma_m16n8k8_tf32(sum, row.kept, column.kept);
      });
#pragma unroll
      for (int m = 0; m < row_tiles; ++m)
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int q = 0; q < 4; ++q) result[m][n + j][q] += sums[m][j][q];
    }
  }
}

// result += A B. load_a(fragment, m, step) loads this warp's fragment m of A in a step. The warp multiplies every
// `b_stride`-th fragment of B; this lane begins to read them at `b`. in_tf32: how float32 operands are multiplied.
template <class TileB, int b_stride = 1, class Address, int row_tiles, int column_tiles, class OperandA>
DEVICE void multiply(const OperandA& load_a, Address b, float (&result)[row_tiles][column_tiles][4],
                     bool in_tf32 = false) {
  using T = typename TileB::Element;
  if constexpr (sizeof(T) == 4) {
    multiply_float32<TileB, b_stride>(load_a, b, result, in_tf32);
  } else {
#pragma unroll
    for (int step = 0; step < TileB::kDepth / TileB::kStep; ++step) {
      uint32_t a[row_tiles][4];
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) load_a(a[m], m, step);
#pragma unroll
      for (int n = 0; n < column_tiles; n += 2) {
        uint32_t words[4];
        TileB::load_fragment(words, b, n / 2 * b_stride, step);
        const uint32_t first[2] = {words[0], words[1]}, second[2] = {words[2], words[3]};
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
          arch::mma_m16n8k16<T>(result[m][n], a[m], first);
          arch::mma_m16n8k16<T>(result[m][n + 1], a[m], second);
        }
      }
    }
  }
}

// Loads fragments of A from a tile in shared memory, which this lane begins to read at `a`.
template <class TileA, class Address = LaneAddress>
struct SharedOperand {
  Address a;
  DEVICE void operator()(uint32_t (&fragment)[4], int m, int step) const { TileA::load_fragment(fragment, a, m, step); }
};

// The addresses at which this lane begins to read the rows of A, or the columns of B, that `Tiles` assigns to its warp,
// in a tile `offset` bytes after `base`. Recomputed from the thread index at each use, to save registers in long loops.
template <class Tiles, class Tile>
DEVICE SharedOperand<Tile> rows_of(arch::SharedAddress base, int offset) {
  const int thread = arch::opaque_thread_index();
  return {{base + Tile::lane_offset(Tiles::first_row(thread), thread % arch::kWarpSize), offset}};
}
template <class Tiles, class Tile>
DEVICE LaneAddress columns_of(arch::SharedAddress base, int offset) {
  const int thread = arch::opaque_thread_index();
  return {base + Tile::lane_offset(Tiles::first_column(thread), thread % arch::kWarpSize), offset};
}

// Converts the result of a product to fragments of A; both have the same layout in registers.
template <class T, int row_tiles, int column_tiles>
struct ResultOperand {
  const float (&result)[row_tiles][column_tiles][4];
  DEVICE void operator()(uint32_t (&fragment)[4], int m, int step) const {
    if constexpr (sizeof(T) == 4) {  // a lane's columns 2t and 2t + 1 as k = t and t + 4: OrderOfK::kPairs
#pragma unroll
      for (int q = 0; q < 4; ++q) fragment[q] = arch::float_bits(result[m][step][q % 2 * 2 + q / 2]);
    } else {
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const float* const pair = result[m][2 * step + q / 2] + q % 2 * 2;
        fragment[q] = arch::pack<T>(pair[0], pair[1]);
      }
    }
  }
};
template <class T, int row_tiles, int column_tiles>
DEVICE ResultOperand<T, row_tiles, column_tiles> operand_of(const float (&result)[row_tiles][column_tiles][4]) {
  return {result};
}

}  // namespace cuda_ext::tile
