// GEMM with fused epilogues for sm_80 and later, for float16, bfloat16 and float32.
//
// Problem        GemmParams in gemm.h: out = activation(alpha sum_r a_r b_r + beta c + bias) + residual, or its
//                gradient.
// Tile           A block computes (block_m, block_n) of the output and loops over k, and over the reduced products,
//                block_k at a time. If the product is gated, the left half of the tile are gate columns and the right
//                half the corresponding up columns, so that it covers block_n / 2 columns of the output. Sizes: kTiles
//                in tiles_sm80.h. Which tile is the Position's to say; groups_sm80.cuh has another, for grouped
//                products.
// Warps          (warps_m, warps_n) of them share the tile; all have the same role, and all threads take part in
//                copies.
// Pipeline       A ring of `stages` tiles of each operand, filled by cp.async. Each thread waits for its own copies
//                with cp.async.wait_group before the barrier of a k tile.
// Barriers       sync_threads, all threads. One before the loop and one per k tile: the next tile has arrived, and the
//                previous one has been read. Two around the split-k arrival. Before and after staging each pass of the
//                result. One before column sums reuse that memory, and one before they are added.
// Shared memory  (stages, A tile + B tile); after the loop reused for (64, block_n + 8) floats of the result at a time.
// Registers      Per warp, (block_m / warps_m, block_n / warps_n) accumulators in float32 and two sets of operand
//                fragments: one is loaded, and rounded if it is tf32, while the other is multiplied.
// Operands       are read in place from any address, whichever of their dims has stride 1: 16 bytes at a time if base
//                and strides permit, else 4, else 2. Elements outside the matrix are replaced by zeros.
// Loops          k tiles that are complete, inside the matrix and readable 16 bytes at a time are processed by a loop
//                without branches; the last of each product, and all tiles of other operands, by a loop that decides
//                how to copy. The first fragments of a tile are loaded before its iteration begins; copies and loads
//                for later tiles are interleaved with its products.
// Split k        If the output has too few tiles, its k tiles are divided among several blocks. Each stores its sums in
//                the workspace. The last one to arrive, whichever it is, adds them in the order of k and runs the
//                epilogue.
// Float32        Three tf32 products per product of float32 lose the last bits, and an infinity may be the product's or
//                an overflow of the method. If k is short, or the sums of a thread are not all finite, the thread
//                computes its sums in float32 arithmetic instead, directly from global memory.
#pragma once

#include <cstddef>

#include "gemm/epilogue.cuh"
#include "gemm/float32_sm80.cuh"
#include "gemm/load_sm80.cuh"
#include "gemm/plan_sm80.h"

namespace cuda_ext::sm80 {

// Consecutive blocks should share operands in L2: they go through the tiles of a product column by column within bands
// of kBand rows.
DEVICE epilogue::TilePosition find_tile(int row_tiles, int column_tiles, int tile, int block_m, int columns) {
  constexpr int kBand = 8;
  const int tiles = row_tiles * column_tiles, band_tiles = kBand * column_tiles;
  const int t = tile % tiles, band = t / band_tiles, in_band = t % band_tiles;
  const int left = row_tiles - band * kBand, rows = left < kBand ? left : kBand;
  return {tile / tiles, int64_t(band * kBand + in_band % rows) * block_m, int64_t(in_band / rows) * columns, columns};
}

// One instantiation of the kernel: its constants, and the operations on fragments.
template <class T, Arithmetic arithmetic, bool a_k_major, bool b_k_major, GemmConfig config>
struct Gemm {
  using Element = T;
  static constexpr Arithmetic kArithmetic = arithmetic;
  static constexpr int kThreads = config.threads();
  static constexpr int kMinBlocks = config.min_blocks;
  static constexpr int kStages = config.stages;
  static constexpr int kBlockM = config.block_m;
  static constexpr int kBlockN = config.block_n;
  static constexpr int kBlockK = config.block_k;
  static constexpr int kWarpsM = config.warps_m;
  static constexpr int kWarpM = kBlockM / kWarpsM;
  static constexpr int kWarpN = kBlockN / config.warps_n;
  static constexpr int kRows = kWarpM / 16;    // fragments of A per warp
  static constexpr int kColumns = kWarpN / 8;  // fragments of B per warp

  using TileA = OperandTile<T, Side::kA, a_k_major, kBlockM, kBlockK>;
  using TileB = OperandTile<T, Side::kB, b_k_major, kBlockN, kBlockK>;
  using CopyA = TileCopy<TileA, kThreads>;
  using CopyB = TileCopy<TileB, kThreads>;
  static constexpr int kSteps = kBlockK / TileA::kStep;
  static_assert(kWarpN % 16 == 0 && kSteps % 2 == 0);

  // The result is staged in shared memory in passes of 64 rows, kPassRows of each row of warps. Rows are padded by 8
  // floats to avoid bank conflicts: a warp stores two floats of each of 8 rows at once.
  static constexpr int kStagedRows = 64;
  static constexpr int kPassRows = kStagedRows / kWarpsM;
  static constexpr int kPasses = kBlockM / kStagedRows;
  static constexpr int kResultStride = kBlockN + 8;
  static_assert(kPassRows % 16 == 0 && kPasses <= 2);
  using Epilogue =
      epilogue::TileEpilogue<epilogue::BlockThreads<kThreads>, kResultStride, kStagedRows, kWarpM, kPassRows>;
  static_assert(kStagedRows % (Epilogue::kRowsAtOnce * kThreads / (kBlockN / 2 / epilogue::kVector)) == 0);

  struct Stage {
    alignas(128) unsigned char a[TileA::kBytes];
    alignas(128) unsigned char b[TileB::kBytes];
  };
  struct Storage {
    union {
      Stage stages[kStages];
      alignas(16) float result[kStagedRows * kResultStride];  // (kStagedRows, kResultStride), kBlockN columns in use
    };
    uint32_t arrived;  // split k: the number of blocks of this tile that arrived before this one
  };

  using Accumulators = float[kRows][kColumns][4];

  using Position = epilogue::TilePosition;
  DEVICE static Position find_position(const GemmParams& params, const GemmPlan& plan, int block) {
    return find_tile(plan.row_tiles, plan.column_tiles, block, kBlockM, has_gate_up(params) ? kBlockN / 2 : kBlockN);
  }
  // The k tiles of the block, among those of all reduced products, and of each of these.
  DEVICE static int first_k_tile(const GemmPlan& plan) { return arch::block_y() * plan.split_k_tiles; }
  DEVICE static int k_tiles_of_block(const GemmPlan& plan, const Position&) {
    const int left = plan.all_k_tiles - first_k_tile(plan);
    return left < plan.split_k_tiles ? left : plan.split_k_tiles;
  }
  DEVICE static int k_tiles(const GemmPlan& plan, const Position&) { return plan.k_tiles; }
  DEVICE static int k_tail(const GemmPlan& plan, const Position&) { return plan.k_tail; }  // the depth of the last
  DEVICE static int first_term(const Position&) { return 0; }
  // The tiles of a and b, one k tile after the other.
  template <class Tile>
  DEVICE static CopyA copy_of_a(const GemmParams& params, const GemmPlan& plan, const Tile& position) {
    return {params.a.data, plan.a, position.row, position.row_end(params), false};
  }
  template <class Tile>
  DEVICE static CopyB copy_of_b(const GemmParams& params, const GemmPlan& plan, const Tile& position) {
    return {params.b.data, plan.b, position.column, params.n, has_gate_up(params)};
  }

  DEVICE static int warp_row() { return arch::thread_index() / arch::kWarpSize % kWarpsM; }
  DEVICE static int warp_column() { return arch::thread_index() / arch::kWarpSize / kWarpsM; }

  struct Fragments {
    uint32_t a[kRows][4];
    uint32_t b[kColumns / 2][4];
    // With three tf32 products: the low parts of a and of b's first column, whose high parts replace them in a and b.
    uint32_t low_a[kRows][4], low_b[2];

    DEVICE void load(arch::SharedAddress lane_a, arch::SharedAddress lane_b, int step) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) TileA::load_fragment(a[i], lane_a, i, step);
#pragma unroll
      for (int j = 0; j < kColumns / 2; ++j) TileB::load_fragment(b[j], lane_b, j, step);
    }

    // Converts the loaded fragments, so that `multiply` can start at once.
    DEVICE void prepare() {
      if (!arch::has_sm80_mma()) return;  // float32 operands are multiplied in float32 arithmetic
      if constexpr (arithmetic == Arithmetic::kThreeTf32) {
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
          for (int q = 0; q < 4; ++q) split_tf32(a[i][q], a[i][q], low_a[i][q]);
#pragma unroll
        for (int q = 0; q < 2; ++q) split_tf32(b[0][q], b[0][q], low_b[q]);
      }
      if constexpr (arithmetic == Arithmetic::kTf32) {
#pragma unroll
        for (auto& fragment : a)
#pragma unroll
          for (uint32_t& x : fragment) x = round_to_tf32(x);
#pragma unroll
        for (auto& fragment : b)
#pragma unroll
          for (uint32_t& x : fragment) x = round_to_tf32(x);
      }
    }

    DEVICE void multiply(Accumulators& sums) const {
      if (arithmetic == Arithmetic::kThreeTf32 && arch::has_sm80_mma())
        multiply_three_tf32(sums);
      else
        multiply_once(sums);
    }

   private:
    DEVICE void multiply_once(Accumulators& sums) const {
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          const uint32_t b_fragment[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
          if constexpr (arithmetic == Arithmetic::k16Bit)
            arch::mma_m16n8k16<T>(sums[i][j], a[i], b_fragment);
          else
            arch::mma_m16n8k8_tf32(sums[i][j], a[i], b_fragment);
        }
    }

    // (high + low)_a (high + low)_b without the product of the lows, which is below float32's precision. Tensor cores
    // truncate when they add to an accumulator (Ootomo and Yokota, Recovering single precision accuracy from Tensor
    // Cores, arXiv 2203.03341). So each accumulator starts at zero, the small terms come first, and the long sums are
    // ordinary float32 additions, which round to nearest.
    DEVICE void multiply_three_tf32(Accumulators& sums) const {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        uint32_t b_high[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
        uint32_t b_low[2] = {low_b[0], low_b[1]};
        if (j > 0)  // overlaps the products of the previous column; column 0 was split by `prepare`
#pragma unroll
          for (int q = 0; q < 2; ++q) split_tf32(b_high[q], b_high[q], b_low[q]);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          float products[4] = {};
          arch::mma_m16n8k8_tf32(products, low_a[i], b_high);
          arch::mma_m16n8k8_tf32(products, a[i], b_low);
#pragma unroll
          for (float& x : products) x *= 1 / kLowScale;
          arch::mma_m16n8k8_tf32(products, a[i], b_high);
#pragma unroll
          for (int q = 0; q < 4; ++q) sums[i][j][q] += products[q];
        }
      }
    }
  };

  DEVICE static bool are_finite(const Accumulators& sums) {
    float zeros[4] = {};
#pragma unroll
    for (auto& row : sums)
#pragma unroll
      for (auto& fragment : row)
#pragma unroll
        for (int q = 0; q < 4; ++q) zeros[q] += 0.0f * fragment[q];
    return zeros[0] + zeros[1] + zeros[2] + zeros[3] == 0.0f;
  }

  // Stores the part of a warp's sums that belongs to pass `pass` in shared memory. `pass` must be a compile-time
  // constant.
  DEVICE static void stage_result(float* result, const Accumulators& sums, int pass) {
    const int row = warp_row() * kPassRows + arch::lane_index() / 4;
    const int column = warp_column() * kWarpN + arch::lane_index() % 4 * 2;
    const arch::SharedAddress to = arch::shared_address(result + row * kResultStride + column);
#pragma unroll
    for (int i = 0; i < kPassRows / 16; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* const pair = sums[pass % kPasses * (kPassRows / 16) + i][j] + 2 * half;
          arch::store_shared(to + 4 * ((i * 16 + half * 8) * kResultStride + j * 8),
                             arch::Words2{{arch::float_bits(pair[0]), arch::float_bits(pair[1])}});
        }
  }

  // A block's sums in the workspace, in the order of the registers: (kRows, kColumns, kThreads) vectors of 4.
  DEVICE static void store_partial(float* partial, const Accumulators& sums) {
    partial += arch::opaque_thread_index() * 4;  // recomputed to save a register in the loop over k
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const float (&d)[4] = sums[i][j];
        arch::store_global(partial + (i * kColumns + j) * kThreads * 4,
                           arch::Words4{{arch::float_bits(d[0]), arch::float_bits(d[1]), arch::float_bits(d[2]),
                                         arch::float_bits(d[3])}});
      }
  }
  DEVICE static void add_partial(const float* partial, Accumulators& sums) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const auto words = arch::load_global_streaming<arch::Words4>(
            partial + ((i * kColumns + j) * kThreads + arch::thread_index()) * 4);
#pragma unroll
        for (int q = 0; q < 4; ++q) sums[i][j][q] += arch::bits_float(words.data[q]);
      }
  }
};

// sums = the products of this block's k tiles: the kernel's main loop. One function, because its parts share the state
// of the pipeline, and the compiler's allocation of registers depends on their order.
template <class Gemm>
DEVICE void multiply_tiles(const GemmParams& params, const GemmPlan& plan, const typename Gemm::Position& position,
                           typename Gemm::Storage& shared, typename Gemm::Accumulators& sums) {
  const int first = Gemm::first_k_tile(plan);
  int left = Gemm::k_tiles_of_block(plan, position);  // to multiply
  if (left <= 0) return;
  const auto k_tiles = [&] { return Gemm::k_tiles(plan, position); };  // of a product

  auto copy_a = Gemm::copy_of_a(params, plan, position);
  auto copy_b = Gemm::copy_of_b(params, plan, position);
  const auto advance_elements = [&](int64_t a, int64_t b) {
    copy_a.advance(a * int64_t(sizeof(typename Gemm::Element)));
    copy_b.advance(b * int64_t(sizeof(typename Gemm::Element)));
  };
  using epilogue::offset_of;
  advance_elements(offset_of(position.batch, params.batch_dims, params.batch_sizes, params.a.batch_strides),
                   offset_of(position.batch, params.batch_dims, params.batch_sizes, params.b.batch_strides));
  int product = first / k_tiles();  // to copy from next
  const int k_tile = first % k_tiles();
  int product_left = k_tiles() - k_tile;  // its k tiles that are still to be copied
  advance_elements(offset_of(product, params.reduced_dims, params.reduced_sizes, params.reduced_strides_a),
                   offset_of(product, params.reduced_dims, params.reduced_sizes, params.reduced_strides_b));
  copy_a.advance(k_tile * plan.a.k_tile + Gemm::first_term(position) * (plan.a.k_tile / Gemm::kBlockK));
  copy_b.advance(k_tile * plan.b.k_tile + Gemm::first_term(position) * (plan.b.k_tile / Gemm::kBlockK));
  // Advances to the first k tile of the next product; the multi-index increments like an odometer.
  const auto next_product = [&] {
    copy_a.advance(-k_tiles() * plan.a.k_tile);
    copy_b.advance(-k_tiles() * plan.b.k_tile);
    product_left = k_tiles();
    int index = ++product;
#pragma unroll 1
    for (int d = 0; d < params.reduced_dims; ++d) {
      const int size = int(params.reduced_sizes[d]);
      const bool carries = index % size == 0;
      const int change = carries ? 1 - size : 1;
      advance_elements(change * params.reduced_strides_a[d], change * params.reduced_strides_b[d]);
      if (!carries) break;
      index /= size;
    }
  };

  // A stage is identified by its offset in bytes.
  using arch::SharedAddress;
  using Stage = typename Gemm::Stage;
  constexpr SharedAddress kStageBytes = sizeof(Stage), kLastStage = (Gemm::kStages - 1) * kStageBytes;
  const SharedAddress stages = arch::shared_address(shared.stages);
  const auto copy_next = [&](SharedAddress stage) {
    const bool last = product_left == 1;
    const int depth = last ? Gemm::k_tail(plan, position) : Gemm::kBlockK;
    copy_a.copy(stages + stage + offsetof(Stage, a), depth);
    copy_b.copy(stages + stage + offsetof(Stage, b), depth);
    --product_left;
    if (last && params.reduced_dims > 0) next_product();
  };

  const SharedAddress lane_a = stages + offsetof(Stage, a) + Gemm::TileA::lane_offset(Gemm::warp_row() * Gemm::kWarpM);
  const SharedAddress lane_b =
      stages + offsetof(Stage, b) + Gemm::TileB::lane_offset(Gemm::warp_column() * Gemm::kWarpN);
  typename Gemm::Fragments fragments[2];
  const auto load = [&](int set, SharedAddress stage, int step) {
    fragments[set].load(lane_a + stage, lane_b + stage, step);
  };

  constexpr int kAhead = Gemm::kStages - 1;
  constexpr int kCopyStep = Gemm::kSteps > 2 ? 1 : 0;  // if possible not step 0, so that its products start at once
  // Fill the ring, but for one stage.
#pragma unroll 1
  for (int tile = 0; tile < kAhead; ++tile) {
    if (tile < left) copy_next(tile * kStageBytes);
    arch::cp_async_commit();
  }
  // Wait for the first stage.
  arch::cp_async_wait<kAhead - 1>();
  arch::sync_threads();
  load(0, 0, 0);
  fragments[0].prepare();
  SharedAddress stage = 0, free_stage = kLastStage;  // the one that is multiplied, and the one before it
  // Multiplies a k tile, and meanwhile calls `copy` to start filling the free stage.
  const auto multiply_tile = [&](bool is_last, const auto& copy) {
#pragma unroll
    for (int step = 0; step < Gemm::kSteps; ++step) {
      if (step + 1 < Gemm::kSteps) {
        // Load the next fragments while these are multiplied.
        load((step + 1) % 2, stage, step + 1);
      } else {
        // Wait for the next stage. The barrier also says that all warps have read this one.
        arch::cp_async_wait<kAhead - 1>();
        arch::sync_threads();
        free_stage = stage;
        if (!is_last) stage = stage == kLastStage ? 0 : stage + kStageBytes;
        load(0, stage, 0);  // unused after the last tile; a branch would cost registers
      }
      if (step == kCopyStep) {
        // Start to fill the free stage.
        copy(free_stage);
        arch::cp_async_commit();  // possibly empty, so that wait_group counts groups correctly
      }
      // Convert the next fragments under these products.
      fragments[step % 2].multiply(sums);
      fragments[(step + 1) % 2].prepare();
    }
  };
  const bool all_whole = copy_a.is_whole() && copy_b.is_whole();
#pragma unroll 1
  for (; left > 0; --left) {
    // The inner loop has no branches, so that the compiler can interleave copies and loads with products.
    int whole = all_whole ? (left - kAhead < product_left ? left - kAhead : product_left - 1) : 0;
    if (whole > 0) {
      left -= whole;
      product_left -= whole;
    }
#pragma unroll 1
    for (; whole > 0; --whole) {
      multiply_tile(false, [&](SharedAddress to) {
        copy_a.copy_whole(stages + to + offsetof(Stage, a));
        copy_b.copy_whole(stages + to + offsetof(Stage, b));
      });
    }
    // The last k tile of a product, or any that is not whole.
    multiply_tile(left == 1, [&](SharedAddress to) {
      if (left > kAhead) copy_next(to);
    });
  }
}

// Stores this block's sums in the workspace. Returns true in the last block of the tile to arrive; its `sums` are then
// the total over all blocks.
template <class Gemm>
DEVICE bool add_splits(const GemmPlan& plan, uint32_t& arrived, typename Gemm::Accumulators& sums) {
  constexpr int64_t kSize = Gemm::kBlockM * Gemm::kBlockN;
  float* const partial = plan.partials + arch::block_x() * kSize;
  Gemm::store_partial(partial + arch::block_y() * plan.tiles * kSize, sums);
  arch::sync_threads();  // the arrival releases what the whole block has written
  if (arch::thread_index() == 0) arrived = arch::atomic_add_acq_rel(plan.arrivals + arch::block_x(), 1u);
  arch::sync_threads();
  if (arrived + 1 < uint32_t(plan.splits)) return false;
#pragma unroll
  for (auto& row : sums)
#pragma unroll
    for (auto& fragment : row)
#pragma unroll
      for (float& x : fragment) x = 0.0f;
  for (int split = 0; split < plan.splits; ++split) Gemm::add_partial(partial + split * plan.tiles * kSize, sums);
  return true;
}

// sums = the products of this block's k tiles, of the tile at `position`.
template <class Gemm, class FindPosition>
DEVICE void multiply_block(const GemmParams& params, const GemmPlan& plan, typename Gemm::Position& position,
                           const FindPosition& find_position, typename Gemm::Storage& shared,
                           typename Gemm::Accumulators& sums) {
  if constexpr (Gemm::kArithmetic == Arithmetic::kThreeTf32) {
    if (!plan.in_float32) multiply_tiles<Gemm>(params, plan, position, shared, sums);
    position = find_position(arch::opaque_block_x());  // again, because the products leave no registers to keep it
    // An infinity or NaN may be the method's, not the product's.
    if (plan.in_float32 || (arch::has_sm80_mma() && !Gemm::are_finite(sums)))
      multiply_in_float32<Gemm>(params, plan, position, sums);
  } else {
    multiply_tiles<Gemm>(params, plan, position, shared, sums);
  }
}

// Stages the sums in shared memory and runs the epilogue on them, a part of the rows at a time. Then calls
// finish(epilogue).
template <class Gemm, class Finish>
DEVICE void run_epilogue(const GemmParams& params, const typename Gemm::Position& position, float* result,
                         const typename Gemm::Accumulators& sums, const Finish& finish) {
  arch::sync_threads();  // all warps have read the last stage
  Gemm::stage_result(result, sums, 0);
  arch::sync_threads();
  typename Gemm::Epilogue tile_epilogue(params, position);
#pragma unroll 1  // the code is long
  for (int pass = 0;; ++pass) {
    tile_epilogue.run(result, pass);
    if (pass + 1 == Gemm::kPasses) break;
    arch::sync_threads();
    Gemm::stage_result(result, sums, 1);
    arch::sync_threads();
  }
  finish(tile_epilogue);
}

// Grid: (tiles, splits).
template <class Gemm>
GLOBAL(Gemm::kThreads, Gemm::kMinBlocks)
gemm_sm80(GRID_CONSTANT GemmParams params, GRID_CONSTANT GemmPlan plan) {
  SHARED_STORAGE(typename Gemm::Storage, shared);
  const auto find_position = [&](int block) { return Gemm::find_position(params, plan, block); };
  typename Gemm::Position position = find_position(arch::block_x());
  if (position.is_empty()) return;
  typename Gemm::Accumulators sums = {};
  multiply_block<Gemm>(params, plan, position, find_position, shared, sums);
  // The last block of a tile to arrive has the sums of all; the others are done.
  if (plan.splits > 1 && !add_splits<Gemm>(plan, shared.arrived, sums)) return;

  run_epilogue<Gemm>(params, position, shared.result, sums, [&](const typename Gemm::Epilogue& tile_epilogue) {
    if (plan.bias_sums == nullptr) return;
    arch::sync_threads();
    tile_epilogue.store_sums(shared.result,
                             plan.bias_sums + position.row / Gemm::kBlockM * (params.gated ? 2 : 1) * params.n);
  });
}

}  // namespace cuda_ext::sm80
