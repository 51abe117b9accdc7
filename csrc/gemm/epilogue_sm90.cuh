// The epilogues of gemm_sm90.cuh: from the accumulators of a warpgroup to the output.
//
// A thread has rows g and g + 8 of its warp's 16, and columns 8j + 2t, 8j + 2t + 1 for each j, where g = lane / 4 and
// t = lane % 4: accumulators 4j to 4j + 3 (arch/wgmma.cuh). Loops over parts of the columns are not unrolled, because
// their bodies are long; `select` copies the accumulators of a part to registers that can be named.
#pragma once

#include "arch/mma.cuh"
#include "arch/tma.cuh"
#include "arch/warp.cuh"
#include "arch/wgmma.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/plan_sm90.h"

namespace cuda_ext::sm90 {

using arch::Barrier;
using arch::Major;
using arch::SharedAddress;

constexpr int kWarpgroup = 128;  // threads

// The threads of a consumer.
struct ConsumerThreads {
  static constexpr int kThreads = kWarpgroup;
  // Opaque, because accumulators leave no registers for what could be computed before the products.
  DEVICE static int consumer() { return arch::opaque_thread_index() / kWarpgroup - 1; }
  DEVICE static int index() { return arch::opaque_thread_index() % kWarpgroup; }
  DEVICE static void sync() { arch::named_barrier_sync(1 + consumer(), kThreads); }
};
// How rows of the output are staged as floats: 64 rows and 32 columns at a time, of pairs 16 and 16; of a swapped tile
// all of its rows and the 64 columns of the consumer. The padding avoids bank conflicts when fragments are stored.
template <bool swapped, int block_n>
struct StagedRows {
  static constexpr int kRows = swapped ? block_n : kRowBlock;
  static constexpr int kColumns = swapped ? kRowBlock : 32;
  static constexpr int kStride = kColumns + (swapped ? 4 : 8);
  static constexpr int kBytes = kRows * kStride * int(sizeof(float));
  using Epilogue = epilogue::TileEpilogue<ConsumerThreads, kStride, kRows, kRows, kRows, 1>;
};

// For TMA, each warp stages slabs of its 16 rows and kLineBytes, swizzled, in two buffers.
constexpr int kSlabRows = 16;
constexpr int kSlabBytes = kSlabRows * kLineBytes;
constexpr int kSlabs = 2;
constexpr int kSlabsBytes = 4 * kSlabs * kSlabBytes;  // of the 4 warps

// v = part `part` of the accumulators, in groups of `count`.
template <int count, int rows, int registers>
DEVICE void select(const float (&sums)[rows][registers], int part, float (&v)[count]) {
#pragma unroll
  for (int i = 0; i < rows; ++i)
#pragma unroll
    for (int j = 0; j < registers / count; ++j)
      if (part == i * (registers / count) + j)
#pragma unroll
        for (int r = 0; r < count; ++r) v[r] = sums[i][j * count + r];
}
// The same for pairs: the first half of v is gate, the second half up.
template <int count, int rows, int registers>
DEVICE void select_pairs(const float (&sums)[rows][registers], int part, float (&v)[count]) {
  constexpr int kHalf = registers / 2, kCount = count / 2;
#pragma unroll
  for (int i = 0; i < rows; ++i)
#pragma unroll
    for (int j = 0; j < kHalf / kCount; ++j)
      if (part == i * (kHalf / kCount) + j)
#pragma unroll
        for (int r = 0; r < kCount; ++r) {
          v[r] = sums[i][j * kCount + r];
          v[kCount + r] = sums[i][kHalf + j * kCount + r];
        }
}

// Calls f(r, row, column) for each register r of a fragment of 64 rows; row and column are those of the warpgroup.
template <int count, class F>
DEVICE void for_fragment(const F& f) {
  const int thread = ConsumerThreads::index(), lane = thread % arch::kWarpSize;
  const int row = thread / arch::kWarpSize * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int r = 0; r < count; ++r) f(r, row + r / 2 % 2 * 8, column + r / 4 * 8 + r % 2);
}

// Writes a fragment of 16 rows to a slab, from 16-byte chunk `first` of its lines on.
template <class Out, int count>
DEVICE void write_fragments(SharedAddress slab, int first, const float (&v)[count]) {
  const int lane = ConsumerThreads::index() % arch::kWarpSize;
  if constexpr (sizeof(Out) == 2) {
    // Lanes 8q to 8q + 7 have the rows of quadrant q: rows first, like the registers of a fragment.
    const SharedAddress line = slab + lane % 16 * kLineBytes;
    const int chunk = (first + lane / 16) ^ lane % 8;
#pragma unroll
    for (int j = 0; j < count / 8; ++j) {
      uint32_t m[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) m[q] = arch::pack<Out>(v[8 * j + 2 * q], v[8 * j + 2 * q + 1]);
      arch::stmatrix<4>(line + (chunk ^ 2 * j) * 16, m);
    }
  } else {
    const SharedAddress line = slab + lane / 4 * kLineBytes + lane % 2 * 8;
    const int chunk = (first + lane % 4 / 2) ^ lane / 4;
#pragma unroll
    for (int j = 0; j < count / 4; ++j)
#pragma unroll
      for (int below = 0; below < 2; ++below)
        arch::store_shared(
            line + below * 8 * kLineBytes + (chunk ^ 2 * j) * 16,
            arch::Words2{{arch::float_bits(v[4 * j + 2 * below]), arch::float_bits(v[4 * j + 2 * below + 1])}});
  }
}

// The part of the output that this consumer computes. `first_row`: its first row in the tile.
template <class Gemm>
DEVICE epilogue::TilePosition position_of(const GemmParams& params, int batch, int row_tile, int column_tile,
                                          int first_row) {
  const int of_pair = has_pairs(params) ? 2 : 1;
  if constexpr (Gemm::kSwapped)
    return {batch, int64_t(column_tile) * Gemm::kBlockN, (int64_t(row_tile) * Gemm::kBlockM + first_row) / of_pair,
            Gemm::Rows::kColumns / of_pair};
  else
    return {batch, int64_t(row_tile) * Gemm::kBlockM + first_row, int64_t(column_tile) * (Gemm::kBlockN / of_pair),
            Gemm::Rows::kColumns / of_pair};
}

// Copies the bias of a tile to shared memory, before the products, for store_by_tma.
template <class Gemm>
DEVICE void stage_bias(const GemmParams& params, int column_tile, typename Gemm::Storage& shared) {
  if (params.bias.data == nullptr) return;
  ConsumerThreads::sync();  // the bias of the tile before has been read
  epilogue::with_storage(params.bias.dtype, [&](auto tag) {
    using T = decltype(tag);
#pragma unroll
    for (int i = ConsumerThreads::index(); i < Gemm::kBlockN; i += kWarpgroup) {
      const int64_t column = int64_t(column_tile) * Gemm::kBlockN + i;
      const float x = column < params.n ? arch::to_float(arch::load_global<T>(static_cast<const T*>(params.bias.data) +
                                                                              column * params.bias.column_stride))
                                        : 0.0f;
      arch::store_shared(arch::shared_address(&shared.bias[ConsumerThreads::consumer()][i]), x);
    }
  });
  ConsumerThreads::sync();
}

// out = activation(alpha sums + bias), by TMA. The stores are in flight when this returns.
template <class Gemm, class Out>
DEVICE void store_by_tma(const GemmParams& params, const arch::TensorMap& out, const epilogue::TilePosition& tile,
                         typename Gemm::Storage& shared, const typename Gemm::Accumulators& sums) {
  constexpr int kColumns = 32, kCount = kColumns / 2;  // of a part; more do not fit in registers
  constexpr int kParts = Gemm::kBlockN / kColumns, kPartsOfSlab = kLineBytes / (kColumns * int(sizeof(Out)));
  const int thread = ConsumerThreads::index(), lane = thread % arch::kWarpSize, warp = thread / arch::kWarpSize;
  const int consumer = ConsumerThreads::consumer();
  const float alpha = float(params.alpha);
#pragma unroll 1
  for (int part = 0; part < Gemm::kRowBlocks * kParts; ++part) {
    const int64_t row = tile.row + part / kParts * kRowBlock + warp * kSlabRows;
    const int column = part % kParts * kColumns;  // of the tile
    const int slab_column = column / (kColumns * kPartsOfSlab) * (kColumns * kPartsOfSlab);
    const int of_slab = part % kPartsOfSlab;
    if (row >= params.m || tile.column + slab_column >= params.n) {
      // An empty group in place of the store: the groups belong to the buffers in turn.
      if (of_slab == 0 && lane == 0) arch::bulk_commit();
      continue;
    }
    float v[kCount];
    select(sums, part, v);
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      float bias[2] = {};
      if (params.bias.data != nullptr) {
        const auto words = arch::load_shared<arch::Words2>(
            arch::shared_address(&shared.bias[consumer][column + j * 8 + lane % 4 * 2]));
        bias[0] = arch::bits_float(words.data[0]);
        bias[1] = arch::bits_float(words.data[1]);
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) v[4 * j + r] = alpha * v[4 * j + r] + bias[r % 2];
    }
    epilogue::with_activation(params.activation, [&](auto f) {
#pragma unroll
      for (float& x : v) x = f.value(x);
    });
    const SharedAddress slab =
        arch::shared_address(shared.staging[consumer]) + (warp * kSlabs + part / kPartsOfSlab % kSlabs) * kSlabBytes;
    if (of_slab == 0) {
      if (lane == 0) arch::bulk_wait_read<kSlabs - 1>();  // the store from this buffer has read it
      arch::sync_warp();
    }
    write_fragments<Out>(slab, of_slab * (kColumns * int(sizeof(Out)) / 16), v);
    if (of_slab + 1 < kPartsOfSlab) continue;
    arch::fence_async_shared();
    arch::sync_warp();
    if (lane == 0) {
      arch::tma_store(out, slab, {int(tile.column) + slab_column, int(row), tile.batch});
      arch::bulk_commit();
    }
  }
}

// Any epilogue: stages rows of floats, and lets each thread process whole vectors of them.
template <class Gemm>
DEVICE void store_rows(const GemmParams& params, const GemmPlan& plan, const epilogue::TilePosition& tile,
                       typename Gemm::Storage& shared, const typename Gemm::Accumulators& sums) {
  using Rows = typename Gemm::Rows;
  constexpr int kCount = Gemm::kSwapped ? Gemm::kRegisters : Rows::kColumns / 2;
  constexpr int kParts = Gemm::kRegisters / kCount;
  float* const staged = reinterpret_cast<float*>(shared.staging[ConsumerThreads::consumer()]);
#pragma unroll 1
  for (int part = 0; part < Gemm::kRowBlocks * kParts; ++part) {
    epilogue::TilePosition at = tile;
    at.row += part / kParts * kRowBlock;
    at.column += part % kParts * tile.columns;
    if (at.row >= params.m || at.column >= params.n) continue;
    float v[kCount];
    if (!Gemm::kSwapped && has_pairs(params))
      select_pairs(sums, part, v);
    else
      select(sums, part, v);
    ConsumerThreads::sync();  // the part before has been read
    if constexpr (Gemm::kSwapped) {
      for_fragment<kCount>([&](int r, int row, int column) {
        arch::store_shared(arch::shared_address(staged + column * Rows::kStride + row), v[r]);
      });
    } else {
      for_fragment<kCount>([&](int r, int row, int column) {
        if (r % 2 == 0)
          arch::store_shared(arch::shared_address(staged + row * Rows::kStride + column),
                             arch::Words2{{arch::float_bits(v[r]), arch::float_bits(v[r + 1])}});
      });
    }
    ConsumerThreads::sync();
    typename Rows::Epilogue rows(params, at);
    rows.run(staged, 0);
    if (plan.bias_sums == nullptr) continue;
    ConsumerThreads::sync();
    rows.store_sums(staged, plan.bias_sums + at.row / kRowBlock * (params.gated ? 2 : 1) * params.n);
  }
}

}  // namespace cuda_ext::sm90
