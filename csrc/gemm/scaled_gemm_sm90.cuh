// Scaled products of FP8 for Hopper (sm_90a): TMA, wgmma and promotion to float32.
//
// Problem        ScaledGemmParams in scaled_gemm.h; a and b contiguous along k. The epilogue gets bias, c and out as
//                GemmParams.
// Tile           (block_m, block_n), in k tiles of 128: a line of 128 bytes, and one block of scales.
// Blocks         are persistent: cluster c computes work items c, c + clusters, ... An item is a tile for each block of
//                the cluster, adjacent along n, and its k tiles: all, a part of them if k is split, or those of a group
//                of terms, at least one.
// Warpgroups     0: warp 0 is the producer, warp 1 reads scales and hands on the items. 1, 2: consumers, which take the
//                tile's blocks of 64 rows by turns. Blocks without rows, after the end of the matrix or group, are
//                neither loaded nor multiplied.
// Cluster        1 or 2 blocks, which have the same rows of a: they load its row blocks by turns, each for both.
// Barriers       full[stage]: 2 arrivals, of the producer and of the scales' warp, and the bytes of both operands.
//                empty[stage]: 1 arrival per consumer warp of each block of the cluster.
//                Named barriers 1, 2: the 128 threads of a consumer, around what they share in shared memory.
// Shared memory  per stage (block_m + block_n) lines of 128 bytes, as many scales, and the item; per consumer 16 KB to
//                stage the output, a bias of block_n floats and a split-k arrival; barriers. 186 to 227 KB.
// Registers      168 at launch, then 40 for warpgroup 0 and 232 for consumers: 64 of a k tile's product, and 128 or 64
//                of sums, or 32 and 32; without promotion 128 of sums.
// Promotion      The tensor cores add products of FP8 with about 14 bits (simt/float8_sum.h). So a wgmma sums 128 terms
//                at most; then the product, times the scales of its row, column and block, is added to float32
//                registers. Meanwhile the other consumer multiplies. If all columns of a tile have one scale, it is
//                multiplied with that of the row first; scales of columns that are the same for all k come at the end.
//                Without promotion (fast_accum) the sums stay in the tensor cores, and all scales come at the end.
// Split k        through memory as in gemm_sm90.cuh, for products of few tiles. What comes at the end is done once, by
//                the block that has the total.
#pragma once

#include "arch/cluster.cuh"
#include "gemm/epilogue_sm90.cuh"
#include "gemm/scaled_tiles_sm90.h"
#include "gemm/split_k_sm90.cuh"

namespace cuda_ext::sm90 {

// The tile of this block in a work item, and its part of k.
struct ScaledItem {
  static constexpr int group = 0;

  int row, column;  // the first
  int row_end;      // of the matrix
  int split;

  DEVICE arch::Words4 words() const { return {{uint32_t(row), uint32_t(column), uint32_t(row_end), uint32_t(split)}}; }
  DEVICE static ScaledItem of(const arch::Words4& words) {
    return {int(words.data[0]), int(words.data[1]), int(words.data[2]), int(words.data[3])};
  }
  DEVICE int end_of_rows(const ScaledGemmParams&) const { return row_end; }
  DEVICE int line_of_b(const ScaledGemmParams&) const { return column; }
  DEVICE int first_k_tile(const ScaledPlan& plan) const { return split * plan.split_k_tiles; }
  DEVICE int k_tiles(const ScaledPlan& plan) const {
    const int left = plan.k_tiles - first_k_tile(plan);
    return left < plan.split_k_tiles ? left : plan.split_k_tiles;
  }
};

// One instantiation of the kernel: its constants, and what the epilogue needs to know (epilogue_sm90.cuh).
template <class A, class B, ScaledConfig config, bool columns_vary>
struct ScaledGemm {
  using OperandA = A;
  using OperandB = B;
  static constexpr int kThreads = kWarpgroup * (1 + kConsumers);
  using Item = ScaledItem;
  using Position = epilogue::TilePosition;
  static constexpr Groups::Cut kCut = Groups::Cut::kNone;
  DEVICE static int items(const ScaledGemmParams&, const ScaledPlan& plan) { return plan.splits * plan.items(); }
  // Called by all lanes of a warp.
  DEVICE static ScaledItem item(const ScaledGemmParams& params, const ScaledPlan& plan, int index) {
    const int items = plan.items();
    const RowAndColumn place = place_in_bands(index % items, plan.row_tiles, plan.column_groups, plan.raster);
    return {place.row * kBlockM, first_column(plan, place.column), int(params.m), index / items};
  }
  DEVICE static int first_column(const ScaledPlan& plan, int column_group) {
    return (column_group * plan.cluster + (plan.cluster > 1 ? arch::cluster_rank() : 0)) * kBlockN;
  }
  // The part of a consumer in the output.
  DEVICE static epilogue::TilePosition position(const ScaledItem& item) {
    return {0, item.row + first_row(), item.column, Rows::kColumns};
  }
  // The tile of an item among those of the output.
  DEVICE static int tile(const ScaledPlan& plan, const ScaledItem& item) {
    return item.column / kBlockN * plan.row_tiles + item.row / kBlockM;
  }
  static constexpr bool kColumnsVary = columns_vary;  // as in ScaledPlan
  static constexpr bool kSwapped = false;
  static constexpr int kBlockM = config.block_m, kBlockN = config.block_n;
  static constexpr bool kPromotes = config.promotes;
  static constexpr int kTileRowBlocks = kBlockM / kRowBlock, kRowBlocks = kTileRowBlocks / kConsumers;
  static constexpr int kRowStep = kConsumers * kRowBlock;  // from a row block of a consumer to its next one
  static constexpr int kRegisters = kBlockN / 2;           // of the accumulators of a row block per thread
  static constexpr int kStages = config.stages;
  static constexpr int kSteps = 4;  // wgmma along a k tile: 32 elements each
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  using Accumulators = float[kRowBlocks][kRegisters];
  using Rows = StagedRows<kSwapped, kBlockN>;

  struct Stage {
    unsigned char a[kBlockM * kLineBytes];
    unsigned char b[kBlockN * kLineBytes];
  };
  struct StageScales {
    float a[kPromotes ? kBlockM : 1];
    float b[kPromotes ? kBlockN : 1];
  };
  struct Storage {
    alignas(1024) Stage stages[kStages];
    alignas(1024) unsigned char staging[kConsumers][4 * kSlabsBytes];
    float bias[kConsumers][kBlockN];
    StageScales scales[kStages];
    arch::Words4 items[kStages];  // of each stage
    Barrier full[kStages], empty[kStages];
    uint32_t arrived[kConsumers];  // split k: the number of blocks of this part that arrived before this one
  };
  static_assert(sizeof(Stage) % 1024 == 0 && sizeof(Storage) <= 227 * 1024 && Rows::kBytes <= 4 * kSlabsBytes);

  // This consumer's part of the tile, and its first row there.
  DEVICE static int part() { return ConsumerThreads::consumer(); }
  DEVICE static int first_row() { return part() * kRowBlock; }
};

// The scales of the columns of the matrix b of a group.
DEVICE Scales scales_of_columns(const ScaledGemmParams& params, int group) {
  Scales scales = params.scale_b;
  scales.data += group * params.scale_b_group_stride;
  return scales;
}

// The row blocks of a tile that have rows.
template <class Gemm>
DEVICE int row_blocks(const ScaledGemmParams& params, const typename Gemm::Item& item) {
  const int blocks = (item.end_of_rows(params) - item.row + kRowBlock - 1) / kRowBlock;
  return blocks < Gemm::kTileRowBlocks ? blocks : Gemm::kTileRowBlocks;
}

// Calls f(item, k tile, stage of the ring) for all k tiles of this block, in order.
template <class Gemm, class F>
DEVICE void for_k_tiles(const ScaledGemmParams& params, const ScaledPlan& plan, const F& f) {
  Ring<Gemm::kStages> ring;
  const int items = Gemm::items(params, plan);
#pragma unroll 1
  for (int index = arch::block_x() / plan.cluster; index < items; index += plan.clusters) {
    const typename Gemm::Item item = Gemm::item(params, plan, index);
    const int first = item.first_k_tile(plan), end = first + item.k_tiles(plan);
#pragma unroll 1
    for (int k_tile = first; k_tile < end; ++k_tile, ring.advance()) f(item, k_tile, ring);
  }
}

// The producer: one thread fills the ring with the operands. Its warp finds groups, if there are any.
template <class Gemm>
DEVICE void load_operands(const ScaledGemmParams& params, const ScaledPlan& plan, const TensorMaps& maps,
                          typename Gemm::Storage& shared) {
  const int rank = plan.cluster > 1 ? arch::cluster_rank() : 0;
  for_k_tiles<Gemm>(params, plan, [&](const auto& item, int k_tile, const Ring<Gemm::kStages>& ring) {
    if (Gemm::kCut == Groups::Cut::kRows && !ConsumerThreads::is_first_lane()) return;
    // Wait until the consumers of all blocks that this one writes to, and that write to this one, have released it.
    arch::barrier_wait_relaxed(shared.empty[ring.stage], ring.parity ^ 1);
    // Load this block's row blocks of a, for all blocks, and its own b.
    Barrier& full = shared.full[ring.stage];
    typename Gemm::Stage& stage = shared.stages[ring.stage];
    const int blocks = row_blocks<Gemm>(params, item), k = k_tile * kLineBytes;
    arch::barrier_arrive_expect(full, sizeof stage.b + blocks * kRowBlock * kLineBytes);
#pragma unroll 1
    for (int i = rank; i < blocks; i += plan.cluster) {
      const int at_a[2] = {k, item.row + i * kRowBlock};
      const SharedAddress to_a = arch::shared_address(stage.a) + i * kRowBlock * kLineBytes;
      if (plan.cluster > 1)
        arch::tma_load_multicast(to_a, maps.a, full, at_a, uint16_t(0b11));
      else
        arch::tma_load(to_a, maps.a, full, at_a);
    }
    const int at_b[2] = {k, item.line_of_b(params)};
    arch::tma_load(arch::shared_address(stage.b), maps.b, full, at_b);
  });
}

// Copies the scales of `lines` lines from `first` on, of one block of k. Lines after the last, whose products are not
// stored, get those of the last. A group without terms has block -1, of zeros, whose scales are 0.
template <int lines>
DEVICE void copy_scales(const Scales& scales, int64_t first, int64_t all, int block, float* to) {
#pragma unroll
  for (int i = arch::opaque_thread_index() % arch::kWarpSize; i < lines; i += arch::kWarpSize) {
    const int64_t line = first + i < all ? first + i : all - 1;
    const float scale = block < 0 ? 0.0f : arch::load_global<float>(scales.at(line, block));
    arch::store_shared(arch::shared_address(to + i), scale);
  }
}

// The scales' warp, which also tells the consumers which item a stage belongs to.
template <class Gemm>
DEVICE void load_scales(const ScaledGemmParams& params, const ScaledPlan& plan, typename Gemm::Storage& shared) {
  for_k_tiles<Gemm>(params, plan, [&](const auto& item, int k_tile, const Ring<Gemm::kStages>& ring) {
    // Wait until all consumers have released the stage.
    arch::barrier_wait(shared.empty[ring.stage], ring.parity ^ 1);
    // Copy the scales of its rows, and of its columns or the one of all of them.
    if constexpr (Gemm::kPromotes) {
      typename Gemm::StageScales& scales = shared.scales[ring.stage];
      copy_scales<Gemm::kBlockM>(params.scale_a, item.row, params.m, k_tile, scales.a);
      const Scales of_columns = scales_of_columns(params, item.group);
      if constexpr (Gemm::kColumnsVary)
        copy_scales<Gemm::kBlockN>(of_columns, item.column, params.n, k_tile, scales.b);
      else if (ConsumerThreads::is_first_lane())
        arch::store_shared(arch::shared_address(scales.b),
                           of_columns.has_blocks && item.column < params.n
                               ? arch::load_global<float>(of_columns.at(item.column, k_tile))
                               : 1.0f);
    }
    // Hand them to the consumers.
    arch::sync_warp();
    if (ConsumerThreads::is_first_lane()) {
      arch::store_shared(arch::shared_address(&shared.items[ring.stage]), item.words());
      arch::barrier_arrive(shared.full[ring.stage]);
    }
  });
}

// Allows every block that writes a stage to overwrite it: by each warp, when wgmma has read the stage.
template <class Gemm>
DEVICE void release(const ScaledPlan& plan, typename Gemm::Storage& shared, int stage) {
  arch::sync_warp();
  if (!ConsumerThreads::is_first_lane()) return;
  arch::barrier_arrive(shared.empty[stage]);
  if (plan.cluster > 1)  // relaxed, because the other block writes only a, which nothing but wgmma has read
    arch::barrier_arrive_remote_relaxed(
        arch::mapa(arch::shared_address(&shared.empty[stage]), arch::cluster_rank() ^ 1));
}

// Descriptors of this consumer's first row block, and of b, in the first stage.
template <class Gemm>
struct OperandDescriptors {
  uint64_t a, b;

  DEVICE explicit OperandDescriptors(const typename Gemm::Storage& shared)
      : a(of(shared.stages[0].a + Gemm::first_row() * kLineBytes)), b(of(shared.stages[0].b)) {}
  DEVICE static uint64_t of(const unsigned char* tile) {
    return arch::make_descriptor(arch::shared_address(tile), 0, 8 * kLineBytes, arch::Swizzle::k128);
  }

  // Issues sums = or += the product of a row block and the k tile of a stage, as one group.
  DEVICE void multiply(float (&sums)[Gemm::kRegisters], int stage, int row_block, bool overwrite) const {
    const int offset = stage * int(sizeof(typename Gemm::Stage));
    const uint64_t tile_a = arch::advance_descriptor(a, offset + row_block * Gemm::kRowStep * kLineBytes);
    const uint64_t tile_b = arch::advance_descriptor(b, offset);
    arch::wgmma_fence(sums);
#pragma unroll
    for (int step = 0; step < Gemm::kSteps; ++step)
      arch::wgmma_m64k32<typename Gemm::OperandA, typename Gemm::OperandB>(
          sums, arch::advance_descriptor(tile_a, step * 32), arch::advance_descriptor(tile_b, step * 32),
          step > 0 || !overwrite ? 1 : 0);
    arch::wgmma_commit();
  }
};

// sums += product times the scales of its rows, which have those of the columns in them.
template <int count>
DEVICE void promote(const float (&product)[count], float first, float second, float (&sums)[count]) {
#pragma unroll
  for (int r = 0; r < count; ++r) sums[r] += product[r] * (r / 2 % 2 == 0 ? first : second);
}

// The same with a scale for each column, from that of the thread's first column on.
template <int count>
DEVICE void promote_columns(const float (&product)[count], float first, float second, const float* of_columns,
                            float (&sums)[count]) {
#pragma unroll
  for (int j = 0; j < count / 4; ++j) {
    const auto words = arch::load_shared<arch::Words2>(arch::shared_address(of_columns + 8 * j));
#pragma unroll
    for (int r = 0; r < 4; ++r)
      sums[4 * j + r] += product[4 * j + r] * (r < 2 ? first : second) * arch::bits_float(words.data[r % 2]);
  }
}

// sums = the products of a work item, of the first `row_blocks` row blocks of this consumer. `ring` advances by its k
// tiles.
template <class Gemm>
DEVICE void multiply_scaled(const ScaledPlan& plan, int k_tiles, int row_blocks, typename Gemm::Storage& shared,
                            Ring<Gemm::kStages>& ring, typename Gemm::Accumulators& sums) {
  const OperandDescriptors<Gemm> operands(shared);
  const int thread = ConsumerThreads::index(), lane = thread % arch::kWarpSize;
  const int row = Gemm::first_row() + thread / arch::kWarpSize * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (auto& of_row_block : sums)
#pragma unroll
    for (float& sum : of_row_block) sum = 0.0f;
  int left = k_tiles;
  do {  // there is at least one; ptxas serialises the products of a loop that could have none
    // Wait for the stage.
    arch::barrier_wait(shared.full[ring.stage], ring.parity);
    const typename Gemm::StageScales& scales = shared.scales[ring.stage];
#pragma unroll
    for (int i = 0; i < Gemm::kRowBlocks; ++i) {
      if (i > 0 && i >= row_blocks) continue;
      // Multiply a row block, while the other consumer adds.
      float product[Gemm::kRegisters];
      operands.multiply(product, ring.stage, i, true);
      arch::wgmma_wait<0>(product);
      // Add it to the sums, while the other consumer multiplies.
      const SharedAddress of_rows = arch::shared_address(scales.a + i * Gemm::kRowStep + row);
      const float first = arch::load_shared<float>(of_rows);
      const float second = arch::load_shared<float>(of_rows + 8 * sizeof(float));
      if constexpr (Gemm::kColumnsVary) {
        promote_columns(product, first, second, scales.b + column, sums[i]);
      } else {
        const float of_columns = arch::load_shared<float>(arch::shared_address(scales.b));
        promote(product, first * of_columns, second * of_columns, sums[i]);
      }
    }
    release<Gemm>(plan, shared, ring.stage);
    ring.advance();
  } while (--left > 0);
}

// The same, but the tensor cores add.
template <class Gemm>
DEVICE void multiply_fast(const ScaledPlan& plan, int k_tiles, typename Gemm::Storage& shared,
                          Ring<Gemm::kStages>& ring, typename Gemm::Accumulators& sums) {
  static_assert(Gemm::kRowBlocks == 1);
  const OperandDescriptors<Gemm> operands(shared);
  int before = -1;  // the stage that products in flight may still read
  int left = k_tiles;
  do {
    // Wait for the stage, and issue its products.
    arch::barrier_wait(shared.full[ring.stage], ring.parity);
    operands.multiply(sums[0], ring.stage, 0, before < 0);
    // Wait for the products before, and release their stage.
    arch::wgmma_wait<1>();
    if (before >= 0) release<Gemm>(plan, shared, before);
    before = ring.stage;
    ring.advance();
  } while (--left > 0);
  arch::wgmma_wait<0>(sums);
  release<Gemm>(plan, shared, before);
}

// Of an item without rows for this consumer.
template <class Gemm>
DEVICE void release_all(const ScaledPlan& plan, int k_tiles, typename Gemm::Storage& shared,
                        Ring<Gemm::kStages>& ring) {
#pragma unroll 1
  for (int k_tile = 0; k_tile < k_tiles; ++k_tile, ring.advance()) {
    arch::barrier_wait(shared.full[ring.stage], ring.parity);
    release<Gemm>(plan, shared, ring.stage);
  }
}

// sums times the scales of their columns, which are the same for all blocks of k. `column`: the first of the tile.
template <class Gemm>
DEVICE void scale_columns(const Scales& scales, int64_t column, int64_t columns, typename Gemm::Accumulators& sums) {
  constexpr int kLanes = arch::kWarpSize;
  const int lane = ConsumerThreads::index() % kLanes;
  float of_lanes[Gemm::kBlockN / kLanes];  // every 32nd column
#pragma unroll
  for (int i = 0; i < Gemm::kBlockN / kLanes; ++i) {
    const int64_t own = column + i * kLanes + lane;
    of_lanes[i] = arch::load_global<float>(scales.at(own < columns ? own : columns - 1, 0));
  }
#pragma unroll
  for (int j = 0; j < Gemm::kRegisters / 4; ++j)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float scale = arch::shuffle(of_lanes[8 * j / kLanes], 8 * j % kLanes + lane % 4 * 2 + r);
#pragma unroll
      for (int i = 0; i < Gemm::kRowBlocks; ++i) {
        sums[i][4 * j + r] *= scale;
        sums[i][4 * j + r + 2] *= scale;
      }
    }
}

// sums times the scales of their rows, which are the same for all blocks of k. `row`: the first of this consumer.
template <class Gemm>
DEVICE void scale_rows(const Scales& scales, int64_t row, int64_t rows, typename Gemm::Accumulators& sums) {
  const int thread = ConsumerThreads::index();
  row += thread / arch::kWarpSize * 16 + thread % arch::kWarpSize / 4;
#pragma unroll
  for (int i = 0; i < Gemm::kRowBlocks; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t own = row + i * Gemm::kRowStep + half * 8;
      const float scale = arch::load_global<float>(scales.at(own < rows ? own : rows - 1, 0));
#pragma unroll
      for (int r = half * 2; r < Gemm::kRegisters; r += r % 2 == 0 ? 1 : 3) sums[i][r] *= scale;
    }
}

// A consumer: multiplies and stores its part of the work items.
template <class Gemm>
DEVICE void consume_scaled(const ScaledGemmParams& params, const GemmParams& epilogue, const ScaledPlan& plan,
                           const TensorMaps& maps, typename Gemm::Storage& shared) {
  GemmPlan of_epilogue;  // without what only other kernels do
  of_epilogue.tma_add = plan.tma_add;
  Ring<Gemm::kStages> ring;
  const int first = arch::block_x() / plan.cluster, items = Gemm::items(params, plan);
  int left = items > first ? (items - first + plan.clusters - 1) / plan.clusters : 0;
#pragma unroll 1
  for (; left > 0; --left) {
    // The item of the next stage.
    arch::barrier_wait(shared.full[ring.stage], ring.parity);
    using Item = typename Gemm::Item;
    const Item item = Item::of(arch::load_shared<arch::Words4>(arch::shared_address(&shared.items[ring.stage])));
    // Consumers take row blocks by turns, so that both have some of a tile that is not full.
    const int own_blocks = (row_blocks<Gemm>(params, item) + 1 - ConsumerThreads::consumer()) / kConsumers;
    if (own_blocks == 0) {
      release_all<Gemm>(plan, item.k_tiles(plan), shared, ring);
      continue;
    }
    if (plan.tma_store)
      stage_bias<Gemm>(epilogue, item.column / Gemm::kBlockN, item.group * params.bias_group_stride, shared);
    typename Gemm::Accumulators sums;
    if constexpr (Gemm::kPromotes)
      multiply_scaled<Gemm>(plan, item.k_tiles(plan), own_blocks, shared, ring, sums);
    else
      multiply_fast<Gemm>(plan, item.k_tiles(plan), shared, ring, sums);
    if constexpr (Gemm::kCut == Groups::Cut::kNone)
      if (plan.splits > 1 && !add_splits<Gemm>(plan, Gemm::tile(plan, item), item.split, shared.arrived, sums))
        continue;  // another block adds the sums of the tile
    if constexpr (!Gemm::kPromotes) scale_rows<Gemm>(params.scale_a, item.row + Gemm::first_row(), params.m, sums);
    if (!Gemm::kColumnsVary && !params.scale_b.has_blocks)
      scale_columns<Gemm>(scales_of_columns(params, item.group), item.column, params.n, sums);
    const typename Gemm::Position tile = Gemm::position(item);
    if constexpr (Gemm::kCut == Groups::Cut::kNone)
      if (!plan.tma_store) {
        store_rows<Gemm>(epilogue, of_epilogue, tile, shared, sums);
        continue;
      }
    if (epilogue.out.dtype == Dtype::kFloat32)
      store_by_tma<Gemm, float, false>(epilogue, of_epilogue, maps, tile, shared, sums);
    else if (epilogue.out.dtype == Dtype::kFloat16)
      store_by_tma<Gemm, half_t, false>(epilogue, of_epilogue, maps, tile, shared, sums);
    else
      store_by_tma<Gemm, bfloat16_t, false>(epilogue, of_epilogue, maps, tile, shared, sums);
  }
  if (plan.tma_store && arch::lane_index() == 0) arch::bulk_wait_read<0>();
}

// Grid: (plan.clusters * plan.cluster,).
template <class Gemm>
GLOBAL(Gemm::kThreads, 1)
scaled_gemm_sm90(GRID_CONSTANT ScaledGemmParams params, GRID_CONSTANT GemmParams epilogue,
                 GRID_CONSTANT ScaledPlan plan, GRID_CONSTANT TensorMaps maps) {
  SHARED_STORAGE(typename Gemm::Storage, shared);
  if (arch::thread_index() < Gemm::kStages) {
    const int stage = arch::thread_index();
    arch::barrier_init(shared.full[stage], 2);
    arch::barrier_init(shared.empty[stage], kConsumers * kWarpgroup / arch::kWarpSize * plan.cluster);
    arch::fence_barrier_init();
  } else if (arch::thread_index() == arch::kWarpSize) {
    arch::tma_prefetch(maps.a);
    arch::tma_prefetch(maps.b);
    if (plan.tma_store) arch::tma_prefetch(maps.out);
  }
  if (plan.cluster > 1) {
    arch::cluster_arrive_relaxed();
    arch::cluster_wait();
  } else {
    arch::sync_threads();
  }
  arch::grid_dependency_wait();  // until here, nothing depends on the kernel before this one

  if (arch::thread_index() < kWarpgroup) {
    arch::decrease_registers<Gemm::kProducerRegisters>();
    const int warp = arch::thread_index() / arch::kWarpSize;
    if (Gemm::kCut == Groups::Cut::kRows ? warp == 0 : arch::thread_index() == 0)
      load_operands<Gemm>(params, plan, maps, shared);
    if (warp == 1) load_scales<Gemm>(params, plan, shared);
    if (warp == 0) arch::grid_launch_dependents();
  } else {
    arch::increase_registers<Gemm::kConsumerRegisters>();
    consume_scaled<Gemm>(params, epilogue, plan, maps, shared);
  }
  // Another block may still write to this block's shared memory and arrive at its barriers.
  if (plan.cluster > 1) {
    arch::cluster_arrive();
    arch::cluster_wait();
  }
}

}  // namespace cuda_ext::sm90
