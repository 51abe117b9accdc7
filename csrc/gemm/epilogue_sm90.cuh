// The epilogues of gemm_sm90.cuh: from the accumulators of a warpgroup to the output.
//
// A thread has rows g and g + 8 of its warp's 16, and columns 8j + 2t, 8j + 2t + 1 for each j, where g = lane / 4 and
// t = lane % 4: accumulators 4j to 4j + 3 (arch/wgmma.cuh). Loops over parts of the columns are not unrolled, because
// their bodies are long; `select` copies the accumulators of a part to registers that can be named.
#pragma once

#include "arch/warp.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/maps_sm90.cuh"
#include "tile/warpgroups_sm90.cuh"

namespace cuda_ext::sm90 {

using namespace tile;

// What a block computes for work item `item` of its cluster.
struct WorkItem {
  int split;
  int batch;
  int row_tile;
  int column_tile;
  int first_k_tile;
  int k_tiles;

  // `divides_k`: the blocks of a cluster may divide k.
  DEVICE WorkItem(const GemmPlan& plan, int item, int rank, bool divides_k) {
    const ItemPlace place = place_of_item(plan, item);
    batch = place.batch;
    split = place.split;
    row_tile = place.row_group * plan.cluster + (divides_k ? plan.row_rank(rank) : rank);
    column_tile = place.column_tile;
    first_k_tile = (divides_k ? split * plan.k_blocks + plan.k_rank(rank) : split) * plan.split_k_tiles;
    const int k_left = plan.all_k_tiles - first_k_tile;
    k_tiles = k_left < plan.split_k_tiles ? k_left : plan.split_k_tiles;
  }

  // Its index among the tiles of the output.
  DEVICE int tile(const GemmPlan& plan) const {
    return (batch * plan.column_tiles + column_tile) * plan.row_groups * plan.cluster + row_tile;
  }
};

// A tile of a group of rows.
struct GroupPosition : epilogue::TilePosition {
  int end;  // of the group's rows

  DEVICE int64_t row_end(const GemmParams&) const { return end; }
  DEVICE int out_batch() const { return 0; }
};

// How rows of the output are staged as floats: 64 rows and 32 columns at a time, of gate and up 16 each; of a swapped
// tile all of its rows and the 64 columns of the consumer. The padding avoids bank conflicts when fragments are stored.
template <bool swapped, int block_n>
struct StagedRows {
  static constexpr int kRows = swapped ? block_n : kRowBlock;
  static constexpr int kColumns = swapped ? kRowBlock : 32;
  static constexpr int kStride = kColumns + (swapped ? 4 : 8);
  static constexpr int kBytes = kRows * kStride * int(sizeof(float));
  using Epilogue = epilogue::TileEpilogue<ConsumerThreads, kStride, kRows, kRows, kRows, 1>;
};

// Buffers of a warp for slabs (maps_sm90.cuh), as many as fit.
constexpr int kSlabsBytes = 4096;

// v = part `part` of the accumulators, in groups of `count`. The first is assigned without a condition: if v were
// undefined for other parts, ptxas would keep the v of the part before for them.
template <int count, int rows, int registers>
DEVICE void select(const float (&sums)[rows][registers], int part, float (&v)[count]) {
#pragma unroll
  for (int i = 0; i < rows; ++i)
#pragma unroll
    for (int j = 0; j < registers / count; ++j)
      if (i + j == 0 || part == i * (registers / count) + j)
#pragma unroll
        for (int r = 0; r < count; ++r) v[r] = sums[i][j * count + r];
}
// The same for gate and up.
template <int count, int rows, int registers>
DEVICE void select_gate_up(const float (&sums)[rows][registers], int part, float (&gate)[count], float (&up)[count]) {
  constexpr int kHalf = registers / 2;
#pragma unroll
  for (int i = 0; i < rows; ++i)
#pragma unroll
    for (int j = 0; j < kHalf / count; ++j)
      if (i + j == 0 || part == i * (kHalf / count) + j)
#pragma unroll
        for (int r = 0; r < count; ++r) {
          gate[r] = sums[i][j * count + r];
          up[r] = sums[i][kHalf + j * count + r];
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

// Writes a warp's fragment, 16 columns from `column` of a slab on, in the swizzle of its line length.
template <class Out>
DEVICE void write_slab(SharedAddress slab, int column, const float (&v)[8]) {
  constexpr int kLine = kSlabColumns * sizeof(Out);
  const int lane = ConsumerThreads::index() % arch::kWarpSize;
  if constexpr (sizeof(Out) == 2) {
    // Lanes 8q to 8q + 7 have the rows of quadrant q: rows first, like the registers of a fragment.
    const int chunk = (column / 8 + lane / 16) ^ lane / 2 % 4;
    uint32_t m[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) m[q] = arch::pack<Out>(v[2 * q], v[2 * q + 1]);
    arch::stmatrix<4>(slab + lane % 16 * kLine + chunk * 16, m);
  } else {
    // Rows 2i and 2i + 1 use the same two chunks, so odd rows begin with the second column: 8 rows fill all banks.
    const int odd = lane / 4 % 2;
    const SharedAddress line = slab + lane / 4 * kLine + lane % 2 * 8;
    const int chunk = (column / 4 + lane % 4 / 2) ^ lane / 4;
#pragma unroll
    for (int r = 0; r < 8; r += 2) {
      const SharedAddress to = line + r / 2 % 2 * 8 * kLine + (chunk ^ r / 4 * 2) * 16;
      // Values, not references to an element that `odd` chooses: for those v would have to be on the stack.
      const float left = v[r], right = v[r + 1];
      const float first = odd ? +right : +left, second = odd ? +left : +right;
      arch::store_shared(to + odd * 4, first);
      arch::store_shared(to + (4 - odd * 4), second);
    }
  }
}

// Copies the bias of a tile to shared memory, before the products, for store_by_tma. `offset`: of its first element.
template <class Gemm>
DEVICE void stage_bias(const GemmParams& params, int column_tile, int64_t offset, typename Gemm::Storage& shared) {
  if (params.bias.data == nullptr) return;
  const int width = has_gate_up(params) ? Gemm::kBlockN / 2 : Gemm::kBlockN;
  ConsumerThreads::sync();  // the bias of the tile before has been read
  epilogue::with_storage(params.bias.dtype, [&](auto tag) {
    using T = decltype(tag);
    for (int i = ConsumerThreads::index(); i < Gemm::kBlockN; i += kWarpgroup) {
      const int64_t column = int64_t(column_tile) * width + i % width, bias_column = column + i / width * params.n;
      const T* const bias = static_cast<const T*>(params.bias.data) + offset + bias_column * params.bias.column_stride;
      const float x = column < params.n ? arch::to_float(arch::load_global<T>(bias)) : 0.0f;
      arch::store_shared(arch::shared_address(&shared.bias[ConsumerThreads::consumer()][i]), x);
    }
  });
  ConsumerThreads::sync();
}

// v = alpha v + bias, where `bias` belongs to the first column of the fragment.
template <int count>
DEVICE void scale_and_add_bias(const GemmParams& params, const float* bias, float (&v)[count]) {
  const float alpha = float(params.alpha);
#pragma unroll
  for (float& x : v) x *= alpha;
  if (params.bias.data == nullptr) return;
  bias += ConsumerThreads::index() % 4 * 2;
#pragma unroll
  for (int j = 0; j < count / 4; ++j) {
    const auto words = arch::load_shared<arch::Words2>(arch::shared_address(bias + j * 8));
#pragma unroll
    for (int r = 0; r < 4; ++r) v[4 * j + r] += arch::bits_float(words.data[r % 2]);
  }
}

// Starts the stores of the slabs of out, preact's gate and preact's up, as one group.
template <int slab_bytes, bool gate_up>
DEVICE void send_slabs(const GemmParams& params, const GemmPlan& plan, const TensorMaps& maps, SharedAddress slabs,
                       const int (&coords)[4]) {
  if (plan.tma_add)
    arch::tma_store<true>(maps.out, slabs, coords);
  else
    arch::tma_store(maps.out, slabs, coords);
  if (params.preact_out.data != nullptr) {
    arch::tma_store(maps.preact, slabs + slab_bytes, coords);
    if constexpr (gate_up) arch::tma_store(maps.preact, slabs + 2 * slab_bytes, {coords[0], 1, coords[2], coords[3]});
  }
  arch::bulk_commit();
}

// Stores the first `rows` rows and `columns` columns of a warp's slab, which write_slab has written, to rows of `width`
// elements from `to` on.
template <class Out>
DEVICE void store_rows_of_slab(SharedAddress slab, int rows, int64_t columns, Out* to, int64_t width) {
  constexpr int kLine = kSlabColumns * sizeof(Out), kChunks = kLine / 16, kElements = 16 / sizeof(Out);
  const int lane = ConsumerThreads::index() % arch::kWarpSize;
#pragma unroll
  for (int i = 0; i < kSlabRows * kChunks / arch::kWarpSize; ++i) {
    const int index = i * arch::kWarpSize + lane, line = index / kChunks, chunk = index % kChunks;
    const int swizzled = chunk ^ (sizeof(Out) == 2 ? line / 2 % 4 : line % 8);
    const auto words = arch::load_shared<arch::Words4>(slab + line * kLine + swizzled * 16);
    if (line < rows && chunk * kElements < columns) arch::store_global(to + line * width + chunk * kElements, words);
  }
}

// Starts the stores of a warp's slabs as one group, for await_buffers. Of a slab that ends in another group of rows
// only the first `rows` are stored.
template <class Gemm, class Out, bool gate_up>
DEVICE void store_slabs(const GemmParams& params, const GemmPlan& plan, const TensorMaps& maps,
                        const typename Gemm::Position& tile, SharedAddress slabs, int rows, int row, int column) {
  constexpr int kSlabBytes = kSlabRows * kSlabColumns * sizeof(Out);
  if (Gemm::kCut == Groups::Cut::kRows && rows < kSlabRows) {
    const int outputs = params.preact_out.data == nullptr ? 1 : gate_up ? 3 : 2;
#pragma unroll 1  // of out, preact's gate and preact's up, as in send_slabs
    for (int i = 0; i < outputs; ++i) {
      const int64_t width = i > 0 && gate_up ? 2 * params.n : params.n, first = column + (i == 2 ? params.n : 0);
      Out* const to = static_cast<Out*>(i == 0 ? params.out.data : params.preact_out.data) + row * width + first;
      store_rows_of_slab(slabs + i * kSlabBytes, rows, params.n - column, to, width);
    }
    if (ConsumerThreads::is_first_lane()) arch::bulk_commit();
  } else if (ConsumerThreads::is_first_lane()) {
    send_slabs<kSlabBytes, gate_up>(params, plan, maps, slabs, {column, 0, row, tile.out_batch()});
  }
}

// Waits until the stores of the oldest of `sets` sets of buffers have read them.
DEVICE void await_buffers(int sets) {
  if (ConsumerThreads::is_first_lane()) {
    if (sets == 1)
      arch::bulk_wait_read<0>();
    else if (sets == 2)
      arch::bulk_wait_read<1>();
    else
      arch::bulk_wait_read<3>();
  }
  arch::sync_warp();
}

// out = activation(alpha sums + bias), or += alpha sums; and preact_out: by TMA. The stores are in flight when this
// returns.
template <class Gemm, class Out, bool gate_up>
DEVICE void store_by_tma(const GemmParams& params, const GemmPlan& plan, const TensorMaps& maps,
                         const typename Gemm::Position& tile, typename Gemm::Storage& shared,
                         const typename Gemm::Accumulators& sums) {
  constexpr int kCount = 8, kColumns = 2 * kCount;  // at once: more do not fit in registers next to the accumulators
  constexpr int kSlabs = Gemm::kBlockN / kSlabColumns / (gate_up ? 2 : 1);
  constexpr int kSlabBytes = kSlabRows * kSlabColumns * sizeof(Out), kBuffers = kSlabsBytes / kSlabBytes;
  const bool with_preact = params.preact_out.data != nullptr;
  // Addresses are computed where they are used: there are no registers to keep them.
  const auto slabs_of = [&](int set, int sets) {  // out, preact: gate, up
    return arch::shared_address(shared.staging[ConsumerThreads::consumer()]) +
           ConsumerThreads::index() / arch::kWarpSize * kSlabsBytes + set * (kBuffers / sets) * kSlabBytes;
  };
  const auto bias_of = [&](int column) { return shared.bias[ConsumerThreads::consumer()] + column; };
  int set = 0;
  if (ConsumerThreads::is_first_lane())
    arch::bulk_wait_read<0>();  // the stores of the tile before have read the buffers
  // Calls fill(first column) between waiting for the buffers of slab i and sending them, unless it is outside of the
  // output. A set of buffers has a slab of each output; all sets but one may be in flight.
  const auto with_slab = [&](int i, int sets, const auto& fill) {
    const int first = i % kSlabs * kSlabColumns;  // of the tile
    const int row =
        int(tile.row) + i / kSlabs * Gemm::kRowStep + ConsumerThreads::index() / arch::kWarpSize * kSlabRows;
    const int rows = int(tile.row_end(params)) - row;
    if (rows <= 0 || tile.column + first >= params.n) return;
    await_buffers(sets);
    fill(first);
    arch::fence_async_shared();
    arch::sync_warp();
    store_slabs<Gemm, Out, gate_up>(params, plan, maps, tile, slabs_of(set, sets), rows, row, int(tile.column) + first);
    set = set + 1 < sets ? set + 1 : 0;
  };
  // Products alone, of which there are most: their body is short enough to be unrolled, a third of the instructions. In
  // float32 it needs registers that 192 accumulators do not leave.
  if constexpr (!gate_up && (sizeof(Out) == 2 || Gemm::kRowBlocks * Gemm::kRegisters <= 128))
    if (params.bias.data == nullptr && params.activation == Activation::kNone && !with_preact) {
      const float alpha = float(params.alpha);
#pragma unroll
      for (int i = 0; i < Gemm::kRowBlocks * kSlabs; ++i)
        with_slab(i, kBuffers, [&](int) {
#pragma unroll
          for (int column = 0; column < kSlabColumns; column += kColumns) {
            float v[kCount];
#pragma unroll
            for (int r = 0; r < kCount; ++r)
              v[r] = alpha * sums[i / kSlabs][(i % kSlabs * kSlabColumns + column) / kColumns * kCount + r];
            write_slab<Out>(slabs_of(set, kBuffers), column, v);
          }
        });
      return;
    }
  const int sets = kBuffers / (with_preact ? gate_up ? 3 : 2 : 1);
#pragma unroll 1
  for (int i = 0; i < Gemm::kRowBlocks * kSlabs; ++i)
    with_slab(i, sets, [&](int first) {
#pragma unroll 1
      for (int column = 0; column < kSlabColumns; column += kColumns) {
        const int part = (i * kSlabColumns + column) / kColumns;
        float v[kCount], up[kCount];
        if constexpr (gate_up) {
          select_gate_up(sums, part, v, up);
          scale_and_add_bias(params, bias_of(Gemm::kBlockN / 2 + first + column), up);
          if (with_preact) write_slab<Out>(slabs_of(set, sets) + 2 * kSlabBytes, column, up);
        } else {
          select(sums, part, v);
        }
        scale_and_add_bias(params, bias_of(first + column), v);
        if (with_preact) write_slab<Out>(slabs_of(set, sets) + kSlabBytes, column, v);
        epilogue::with_activation(params.activation, [&](auto f) {
#pragma unroll
          for (float& x : v) x = f.value(x);
        });
        if constexpr (gate_up)
#pragma unroll
          for (int r = 0; r < kCount; ++r) v[r] *= up[r];
        write_slab<Out>(slabs_of(set, sets), column, v);
      }
    });
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
    epilogue::TilePosition position = tile;
    position.row += part / kParts * Gemm::kRowStep;
    position.column += part % kParts * position.columns;
    if (position.row >= params.m || position.column >= params.n) continue;
    float v[kCount];
    if (!Gemm::kSwapped && has_gate_up(params)) {
      float gate[kCount / 2], up[kCount / 2];
      select_gate_up(sums, part, gate, up);
#pragma unroll
      for (int r = 0; r < kCount; ++r) v[r] = r < kCount / 2 ? gate[r] : up[r - kCount / 2];
    } else {
      select(sums, part, v);
    }
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
    typename Rows::Epilogue rows(params, position);
    rows.run(staged, 0);
    if (plan.bias_sums == nullptr) continue;
    ConsumerThreads::sync();
    rows.store_sums(staged, plan.bias_sums + position.row / kRowBlock * (params.gated ? 2 : 1) * params.n);
  }
}

}  // namespace cuda_ext::sm90
