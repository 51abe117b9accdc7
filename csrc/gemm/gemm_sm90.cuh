// GEMM with fused epilogues for Hopper (sm_90a): TMA, wgmma and warp specialisation, for float16, bfloat16 and tf32.
//
// Problem        GemmParams in gemm.h.
// Tile           (block_m, block_n) of a product a @ b, in k tiles of 128 bytes. Sizes: kConfigs in tiles_sm90.h. If
//                the config is swapped, the product is out^T = b^T a^T: its a is the problem's b, and the tile is
//                transposed when it is staged. If the product is gated, half of the tile's lines of the problem's b are
//                gate columns and half are the corresponding up columns.
// Blocks         are persistent: cluster c computes work items c, c + clusters, ... A work item is a tile for each
//                block of a row of the cluster, adjacent along m, or if k is split through memory a part of its k.
// Warpgroups     0: its first warp is the producer, which loads. 1, 2: consumers, which multiply and store
//                (warpgroup_m, block_n). Cooperative: they are the two halves of each tile. Ping-pong: they take
//                items alternately, and one multiplies while the other stores.
// Cluster        (k_blocks, cluster) blocks. Those of a row have tiles with the same columns, and each loads its part
//                of b's tile for all of them. Those of a column have the same tile, and a part of its k tiles each; the
//                first adds the sums of the others, in the order of k, to its own and stores the tile. If k_blocks is
//                more than 1, each cluster has one work item, so that nothing overwrites sums.
// Barriers       full[stage]: 1 arrival, of the producer, and the bytes of both operands. If rows of one are gathered,
//                the bytes of the other, and 64 arrivals more (gather_sm90.cuh).
//                empty[stage]: 1 arrival per consumer that reads the stage, from each block of the row.
//                sent[consumer]: 1 arrival per block that sends sums, of this consumer.
//                Named barriers 1, 2: the 128 threads of a consumer, around what they share in shared memory.
//                Named barrier 3: cooperative groups of terms: both consumers have cleared those of the next group.
//                Named barriers 3, 4: ping-pong, a consumer's turn: its 128 threads wait, and the 128 of the other
//                arrive when they have issued their last product.
// Shared memory  (stages, tile of a + tile of b), 10 to 48 KB each; per consumer 4 to 17 KB to stage the output, a bias
//                of block_n floats and a split-k arrival; sums of a tile from each block that sends them; barriers.
//                At most 227 KB.
// Registers      168 at launch, then 24 for the producer's warpgroup and 240 for consumers (40 and 232 if it finds
//                groups), of which 128 are accumulators (192 if block_n is 192, 8 or 32 if swapped).
// Operands       are read in place by TMA, whichever of their dims has stride 1, with zeros outside of the matrix.
//                Tensor maps are kernel parameters.
// Products       A stage is one group of wgmma. While it is in flight, the consumer waits for the stage before,
//                releases it, and waits for the next to arrive. The first product of an item overwrites the
//                accumulators.
// Epilogue       Scale, bias, activation, pre-activation and gate, or a sum in place in float32: from registers to
//                shared memory and by TMA to the outputs, while the warps go on. Others go through shared memory as
//                floats, 32 columns at a time, to the epilogue that sm_80 uses (epilogue.cuh).
// Split k        Within a cluster (see there), or through memory as in gemm_sm80.cuh: the last block of a tile to
//                arrive adds the sums in the order of k. Each consumer adds its own part of the tile.
//
// Grouped        products have other work items, which find their group on the device (groups_sm90.cuh). If rows of an
//                operand are gathered, warps 1 and 2 of warpgroup 0 load it (gather_sm90.cuh).
#pragma once

#include "arch/cluster.cuh"
#include "arch/tma.cuh"
#include "arch/wgmma.cuh"
#include "gemm/epilogue_sm90.cuh"
#include "gemm/split_k_sm90.cuh"

namespace cuda_ext::sm90 {

constexpr int kTurnBarriers = 1 + kConsumers;  // the first of the named barriers 3 and 4

// The coordinates of the batch and product in the outer dimensions of the tensor maps of a and b. In shared memory,
// because the producer has no registers for them.
struct OuterCoordinates {
  int a[3], b[3];

  // At this index of the dims, of which `slots` say which coordinate they are. Called by a warp.
  DEVICE void set(int index, int dims, const int64_t (&sizes)[kMaxBatchDims], const int8_t (&slots_a)[kMaxBatchDims],
                  const int8_t (&slots_b)[kMaxBatchDims]) {
    const int dim = arch::opaque_thread_index();
    arch::sync_warp();  // the coordinates before have been read
    if (dim < dims) {
#pragma unroll 1
      for (int d = 0; d < dim; ++d) index /= int(sizes[d]);
      const int coordinate = index % int(sizes[dim]);
      if (slots_a[dim] >= 0) arch::store_shared(arch::shared_address(a + slots_a[dim]), coordinate);
      if (slots_b[dim] >= 0) arch::store_shared(arch::shared_address(b + slots_b[dim]), coordinate);
    }
    arch::sync_warp();
  }
};

// One instantiation of the kernel: its constants and types.
template <class T, Major a_major, Major b_major, GemmConfig config>
struct Gemm {
  using Element = T;
  using Position = epilogue::TilePosition;  // of a tile in the output
  static constexpr Groups::Cut kCut = Groups::Cut::kNone;
  static constexpr int kThreads = kWarpgroup * (1 + kConsumers);
  static constexpr bool kPingPong = config.ping_pong;
  static constexpr bool kSwapped = config.swapped;
  static constexpr bool kTmaOnly = config.tma_only;     // every epilogue stores by TMA
  static constexpr bool kTmaGateUp = !config.tma_only;  // those of gate and up can
  static constexpr int kStages = config.stages;
  static constexpr int kBlockM = config.block_m;
  static constexpr int kBlockN = config.block_n;
  static constexpr int kBlockK = kLineBytes / sizeof(T);
  static constexpr int kWarpgroupM = config.warpgroup_m();
  static constexpr int kRowBlocks = kWarpgroupM / kRowBlock;
  static constexpr int kRowStep = kRowBlock;  // from a row block of a consumer to its next one
  static constexpr int kSteps = 4;            // wgmma along a k tile: 32 bytes each
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;  // 3 * 168, as at launch
  static constexpr Major kAMajor = a_major, kBMajor = b_major;

  static constexpr int kMaxKBlocks = config.k_blocks;
  static constexpr int kRegisters = kBlockN / 2;  // accumulators of a row block per thread
  using Accumulators = float[kRowBlocks][kRegisters];

  // This block's place in the cluster. Most configs have no registers to compute what is always 0 for them.
  DEVICE static int row_rank(const GemmPlan& plan) {
    return kMaxKBlocks == 1 ? arch::cluster_rank() : plan.row_rank(arch::cluster_rank());
  }
  DEVICE static int k_rank(const GemmPlan& plan) { return kMaxKBlocks == 1 ? 0 : plan.k_rank(arch::cluster_rank()); }
  // The first block of its row.
  DEVICE static int first_of_row(const GemmPlan& plan) {
    if constexpr (kMaxKBlocks == 1) return 0;
    const int rank = arch::cluster_rank();
    return rank - plan.row_rank(rank);
  }
  // A bit for each block of the row, or 0 if it has one.
  DEVICE static uint16_t row_mask(const GemmPlan& plan) {
    const int first = kMaxKBlocks == 1 ? 0 : arch::cluster_rank() & ~1;
    return plan.cluster > 1 ? uint16_t(0b11 << first) : uint16_t(0);
  }
  // The work items of all clusters.
  DEVICE static int items(const GemmParams&, const GemmPlan& plan) { return plan.items; }
  DEVICE static WorkItem work_item(const GemmParams&, const GemmPlan& plan, int item) {
    return {plan, item, arch::cluster_rank(), kMaxKBlocks > 1};
  }
  DEVICE static int first_line_a(const GemmPlan& plan, const WorkItem& work) {
    return work.row_tile * plan.a.tile_lines;
  }
  DEVICE static int first_term(const WorkItem&) { return 0; }
  DEVICE static int64_t bias_offset(const GemmParams&, const WorkItem&) { return 0; }

  // This consumer's part of the tile, and its first row there.
  DEVICE static int part() { return kPingPong ? 0 : ConsumerThreads::consumer(); }
  DEVICE static int first_row() { return part() * kWarpgroupM; }
  // That part in the output.
  DEVICE static Position position(const GemmParams& params, const WorkItem& work) {
    const int parts = has_gate_up(params) ? 2 : 1, columns = Rows::kColumns / parts;
    const int64_t row = int64_t(work.row_tile) * kBlockM + first_row(), column = int64_t(work.column_tile) * kBlockN;
    if constexpr (kSwapped) return {work.batch, column, row / parts, columns};
    return {work.batch, row, column / parts, columns};
  }

  using Rows = StagedRows<kSwapped, kBlockN>;
  static constexpr int kStagingBytes = kSwapped ? Rows::kBytes : 4 * kSlabsBytes;
  static_assert(Rows::kBytes <= kStagingBytes);

  struct Stage {
    unsigned char a[kBlockM * kLineBytes];
    unsigned char b[kBlockN * kLineBytes];
  };
  struct Storage {
    alignas(1024) Stage stages[kStages];
    alignas(1024) unsigned char staging[kConsumers][kStagingBytes];
    float bias[kConsumers][kBlockN];
    alignas(16) float sums[kMaxKBlocks > 1 ? (kMaxKBlocks - 1) * kBlockM * kBlockN : 4];  // of other blocks
    Barrier full[kStages], empty[kStages], sent[kConsumers];
    OuterCoordinates outer;
    uint32_t arrived[kConsumers];  // split k: the number of blocks of this part that arrived before this one
  };
  static_assert(sizeof(Stage) % 1024 == 0 && sizeof(Storage) <= 227 * 1024);
  // Of a stage, what TMA loads, and the threads that load the rest.
  static constexpr int kTmaBytes = sizeof(Stage), kGathersWith = 0;

  // sums (kRowBlocks, 64, block_n) = or += the products of a k tile, from descriptors of its operands.
  DEVICE static void multiply(Accumulators& sums, uint64_t a, uint64_t b, int overwrite) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) {
        const uint64_t step_a = arch::advance_descriptor(a, i * kRowBlock * kLineBytes + step * kStepBytesA);
        const uint64_t step_b = arch::advance_descriptor(b, step * kStepBytesB);
        const int scale_d = step > 0 ? 1 : 1 - overwrite;
        if constexpr (sizeof(T) == 2)
          arch::wgmma_m64k16<T, a_major, b_major>(sums[i], step_a, step_b, scale_d);
        else
          arch::wgmma_m64k8_tf32(sums[i], step_a, step_b, scale_d);
      }
  }

  // Atoms are 8 lines of 128 bytes. Along k a step is 32 bytes of a line, or 16 lines.
  static constexpr int kAtomBytes = 8 * kLineBytes;
  static constexpr int kStepBytesA = kAMajor == Major::kK ? 32 : 16 * kLineBytes;
  static constexpr int kStepBytesB = kBMajor == Major::kK ? 32 : 16 * kLineBytes;
  DEVICE static uint64_t descriptor(const unsigned char* tile, Major major) {
    const uint32_t next_piece = major == Major::kK ? 0 : kBlockK * kLineBytes;  // 64 lines further along m or n
    return arch::make_descriptor(arch::shared_address(tile), next_piece, kAtomBytes, arch::Swizzle::k128);
  }
};

// Starts the copy of a box to the blocks of the cluster in `blocks`, or if that is 0 to this one.
DEVICE void load_box(SharedAddress to, const arch::TensorMap& map, Barrier& full, bool batched, int x, int y,
                     const int (&outer)[3], uint16_t blocks) {
  if (batched) {
    const auto get = [&](int i) { return arch::load_shared<int>(arch::shared_address(outer + i)); };
    const int coords[5] = {x, y, get(0), get(1), get(2)};
    if (blocks != 0)
      arch::tma_load_multicast(to, map, full, coords, blocks);
    else
      arch::tma_load(to, map, full, coords);
  } else {
    const int coords[2] = {x, y};
    if (blocks != 0)
      arch::tma_load_multicast(to, map, full, coords, blocks);
    else
      arch::tma_load(to, map, full, coords);
  }
}

// The first line of a piece, relative to that of the tile.
DEVICE int line_of_piece(const OperandLoads& loads, int piece) {
  const int run = piece >> loads.run_shift;
  return (run >> 1) * loads.run_lines + (piece - (run << loads.run_shift)) * loads.piece_lines +
         (run & 1) * int(loads.upper);
}

// The producer, a warp: fills the ring with the operands of all work items. A tile has a few pieces: several of an
// operand that is not contiguous along k, or has gate and up; those of b are divided among the blocks of a row, which
// load them for all. Each piece has a lane, because the producer must not take longer for a k tile than the tensor
// cores; so its loop has no division either.
template <class Gemm>
DEVICE void produce(const GemmParams& params, const GemmPlan& plan, const TensorMaps& maps,
                    typename Gemm::Storage& shared) {
  if ((plan.a.batched || plan.b.batched) && arch::opaque_thread_index() < 3) {
    arch::store_shared(arch::shared_address(shared.outer.a + arch::opaque_thread_index()), 0);
    arch::store_shared(arch::shared_address(shared.outer.b + arch::opaque_thread_index()), 0);
  }
  Ring<Gemm::kStages> ring;
  const int items = Gemm::items(params, plan);
#pragma unroll 1
  for (int item = arch::block_x() / plan.cluster_blocks(); item < items; item += plan.clusters) {
    const auto work = Gemm::work_item(params, plan, item);
    // After the position of the item, which needs most registers.
    const int lane = arch::opaque_thread_index();
    const bool of_a = lane < plan.a.pieces;
    const int piece = of_a ? lane : Gemm::row_rank(plan) + (lane - plan.a.pieces) * plan.cluster;
    const bool of_b = !of_a && piece < plan.b.pieces;
    const int line = of_a ? Gemm::first_line_a(plan, work) + line_of_piece(plan.a, piece)
                          : work.column_tile * plan.b.tile_lines + line_of_piece(plan.b, piece);
    const int offset = of_a ? piece * plan.a.piece_lines * kLineBytes
                            : (Gemm::kBlockM + piece * plan.b.piece_lines) * kLineBytes;  // in a stage
    if (Gemm::kCut != Groups::Cut::kTerms && params.batch_dims > 0)  // whose operands have no batches
      shared.outer.set(work.batch, params.batch_dims, params.batch_sizes, plan.a.batch_slots, plan.b.batch_slots);
#pragma unroll 1
    for (int index = work.first_k_tile; index < work.first_k_tile + work.k_tiles; ++index, ring.advance()) {
      int k = index;
      // The coordinates of the product, among those that are summed.
      if (params.reduced_dims > 0) {
        const int product = index / plan.k_tiles;
        k -= product * plan.k_tiles;
        shared.outer.set(product, params.reduced_dims, params.reduced_sizes, plan.a.reduced_slots,
                         plan.b.reduced_slots);
      }
      k = k * Gemm::kBlockK + Gemm::first_term(work);
      // Wait until all consumers have released the stage.
      arch::barrier_wait_relaxed(shared.empty[ring.stage], ring.parity ^ 1);
      arch::sync_warp();  // a lane that came later might find the stage released once more, and wait for ever
      Barrier& full = shared.full[ring.stage];
      if (lane == 0) arch::barrier_arrive_expect(full, Gemm::kTmaBytes);
      const SharedAddress to = arch::shared_address(&shared.stages[ring.stage]) + offset;
      constexpr bool kAlongKA = Gemm::kAMajor == Major::kK, kAlongKB = Gemm::kBMajor == Major::kK;
      // Load this lane's piece.
      if (of_a) load_box(to, maps.a, full, plan.a.batched, kAlongKA ? k : line, kAlongKA ? line : k, shared.outer.a, 0);
      if (of_b)
        load_box(to, maps.b, full, plan.b.batched, kAlongKB ? k : line, kAlongKB ? line : k, shared.outer.b,
                 Gemm::row_mask(plan));
    }
  }
}

// Clears the terms from `first` on, those of the next group, of a stage that has a line for each. Called by all
// consumers of the stage.
template <class Gemm>
DEVICE void clear_terms(typename Gemm::Stage& stage, int first) {
  constexpr int kRunBytes = Gemm::kBlockK * kLineBytes, kRuns = sizeof(typename Gemm::Stage) / kRunBytes;
  constexpr int kThreads = Gemm::kPingPong ? kWarpgroup : kConsumers * kWarpgroup;
  const int thread = Gemm::kPingPong ? ConsumerThreads::index() : arch::thread_index() - kWarpgroup;
  const SharedAddress begin = arch::shared_address(&stage);
#pragma unroll 1
  for (int at = first * kLineBytes + thread * 16; at < kRunBytes; at += kThreads * 16)
#pragma unroll
    for (int run = 0; run < kRuns; ++run) arch::store_shared(begin + run * kRunBytes + at, arch::Words4{});
  arch::fence_async_shared();
  if constexpr (Gemm::kPingPong)
    ConsumerThreads::sync();
  else
    arch::named_barrier_sync(kTurnBarriers, kThreads);
}

// sums = the products of a work item. `ring` advances by its k tiles. Calls `issued` when its last product is issued.
template <class Gemm, class Item, class F>
DEVICE void multiply_item(const GemmPlan& plan, typename Gemm::Storage& shared, const Item& work,
                          Ring<Gemm::kStages>& ring, typename Gemm::Accumulators& sums, const F& issued) {
  const uint64_t a = Gemm::descriptor(shared.stages[0].a + Gemm::first_row() * kLineBytes, Gemm::kAMajor);
  const uint64_t b = Gemm::descriptor(shared.stages[0].b, Gemm::kBMajor);
  // Allows every block that writes this stage to overwrite it.
  const int thread = ConsumerThreads::index();
  const auto release = [&](int stage) {
    if (thread < plan.cluster)
      arch::barrier_arrive_remote_relaxed(
          arch::mapa(arch::shared_address(&shared.empty[stage]), Gemm::first_of_row(plan) + thread));
  };
  int before = -1;  // the stage that products in flight may still read
  int left = work.k_tiles;
  do {  // there is at least one; ptxas serialises the products of a loop that could have none
    // Wait for the stage.
    arch::barrier_wait(shared.full[ring.stage], ring.parity);
    // Clear what the last k tile has of the next group.
    if constexpr (Gemm::kCut == Groups::Cut::kTerms)
      if (left == 1 && work.last_terms < Gemm::kBlockK) clear_terms<Gemm>(shared.stages[ring.stage], work.last_terms);
    const int offset = ring.stage * int(sizeof(typename Gemm::Stage));
    // Issue the products of the k tile.
    arch::wgmma_fence(sums);
    Gemm::multiply(sums, arch::advance_descriptor(a, offset), arch::advance_descriptor(b, offset), before < 0);
    arch::wgmma_commit();
    // Wait for the products before, and release their stage to the producer.
    arch::wgmma_wait<1>();
    if (before >= 0) release(before);
    before = ring.stage;
    ring.advance();
  } while (--left > 0);
  issued();
  // Wait for all products, and release the last stage.
  arch::wgmma_wait<0>(sums);
  release(before);
}

// Sends this consumer's sums to the first of the blocks that divide k. Returns true there; `sums` are then the total.
template <class Gemm>
DEVICE bool add_in_cluster(const GemmPlan& plan, typename Gemm::Storage& shared, typename Gemm::Accumulators& sums) {
  constexpr int kTile = Gemm::kBlockM * Gemm::kBlockN;
  const int sender = Gemm::k_rank(plan) - 1, first = Gemm::row_rank(plan);
  Barrier& sent = shared.sent[ConsumerThreads::consumer()];
  if (sender >= 0) {
    const SharedAddress to =
        arch::mapa(arch::shared_address(shared.sums + sender * kTile + first_vector<Gemm>()), first);
    for_vectors<Gemm>(sums,
                      [&](int offset, const float* x) { arch::store_shared_cluster(to + offset * 4, words_of(x)); });
    ConsumerThreads::sync();  // the arrival releases what the whole warpgroup has written
    if (ConsumerThreads::index() == 0) arch::barrier_arrive_remote(arch::mapa(arch::shared_address(&sent), first));
    return false;
  }
  arch::barrier_wait_cluster(sent, 0);
  SharedAddress from = arch::shared_address(shared.sums + first_vector<Gemm>());
#pragma unroll 1
  for (int other = 1; other < plan.k_blocks; ++other, from += kTile * sizeof(float))
    for_vectors<Gemm>(sums,
                      [&](int offset, float* x) { add_words(x, arch::load_shared<arch::Words4>(from + offset * 4)); });
  return true;
}

// A consumer: multiplies its part of the work items, and calls store(position, sums) for each.
template <class Gemm, class Store>
DEVICE void consume(const GemmParams& params, const GemmPlan& plan, typename Gemm::Storage& shared,
                    const Store& store) {
  Ring<Gemm::kStages> ring;
  int turn = 0;
  const int items = Gemm::items(params, plan);
  for (int item = arch::block_x() / plan.cluster_blocks(); item < items; item += plan.clusters, turn ^= 1) {
    const auto next = Gemm::work_item(params, plan, item);
    if (Gemm::kPingPong && turn != ConsumerThreads::consumer()) {
      // The other consumer's item.
      ring.skip(next.k_tiles);
      continue;
    }
    if (plan.tma_store) stage_bias<Gemm>(params, next.column_tile, Gemm::bias_offset(params, next), shared);
    // The first item needs no turn, and the last one hands none over, so that each arrival is awaited.
    const bool is_first = item < plan.clusters, is_last = item + plan.clusters >= items;
    if (Gemm::kPingPong && !is_first)
      arch::named_barrier_sync(kTurnBarriers + ConsumerThreads::consumer(), kConsumers * kWarpgroup);
    typename Gemm::Accumulators sums;
    multiply_item<Gemm>(plan, shared, next, ring, sums, [&] {
      // The other consumer multiplies while this one stores.
      if (Gemm::kPingPong && !is_last)
        arch::named_barrier_arrive(kTurnBarriers + 1 - ConsumerThreads::consumer(), kConsumers * kWarpgroup);
    });
    // The position is computed again, because the products leave no registers to keep it.
    const auto work = Gemm::work_item(params, plan, arch::opaque(item));
    if constexpr (Gemm::kCut == Groups::Cut::kNone) {
      bool has_total = true;  // else another block adds the sums of the tile
      // One `if` with two branches: after two, ptxas serialises the products (C7514).
      if (Gemm::kMaxKBlocks > 1 && plan.k_blocks > 1)
        has_total = add_in_cluster<Gemm>(plan, shared, sums);
      else if (plan.splits > 1)
        has_total = add_splits<Gemm>(plan, work.tile(plan), work.split, shared.arrived, sums);
      if (!has_total) continue;
    }
    store(Gemm::position(params, work), sums);
  }
  if (plan.tma_store && arch::lane_index() == 0) arch::bulk_wait_read<0>();
}

// The epilogue of a product.
template <class Gemm>
DEVICE void store_output(const GemmParams& params, const GemmPlan& plan, const TensorMaps& maps,
                         const typename Gemm::Position& tile, typename Gemm::Storage& shared,
                         const typename Gemm::Accumulators& sums) {
  if constexpr (!Gemm::kTmaOnly)
    if (!plan.tma_store) return store_rows<Gemm>(params, plan, tile, shared, sums);
  if constexpr (!Gemm::kSwapped) {
    using T = typename Gemm::Element;
    if (has_gate_up(params)) {
      if constexpr (Gemm::kTmaGateUp) store_by_tma<Gemm, T, true>(params, plan, maps, tile, shared, sums);
    } else if (sizeof(T) == 4 || params.out.dtype == Dtype::kFloat32) {
      store_by_tma<Gemm, float, false>(params, plan, maps, tile, shared, sums);
    } else {
      store_by_tma<Gemm, T, false>(params, plan, maps, tile, shared, sums);
    }
  }
}

// All that a block does; its consumers call store(position, sums) for each of their tiles.
template <class Gemm, class Store>
DEVICE void run_block(const GemmParams& params, const GemmPlan& plan, const TensorMaps& maps,
                      typename Gemm::Storage& shared, const Store& store) {
  if (arch::thread_index() < Gemm::kStages) {
    const int stage = arch::thread_index();
    arch::barrier_init(shared.full[stage], 1 + Gemm::kGathersWith);
    arch::barrier_init(shared.empty[stage], (Gemm::kPingPong ? 1 : kConsumers) * plan.cluster);
    if (plan.k_blocks > 1 && stage < kConsumers) arch::barrier_init(shared.sent[stage], plan.k_blocks - 1);
    arch::fence_barrier_init();
  } else if (arch::thread_index() == arch::kWarpSize) {
    arch::tma_prefetch(maps.a);
    arch::tma_prefetch(maps.b);
    if (plan.tma_store) arch::tma_prefetch(maps.out);
    if (plan.tma_store && params.preact_out.data != nullptr) arch::tma_prefetch(maps.preact);
  }
  if (plan.cluster_blocks() > 1) {
    arch::cluster_arrive_relaxed();
    arch::cluster_wait();
  } else {
    arch::sync_threads();
  }
  arch::grid_dependency_wait();  // until here, nothing depends on the kernel before this one

  if (arch::thread_index() < kWarpgroup) {
    arch::decrease_registers<Gemm::kProducerRegisters>();
    if (arch::thread_index() < arch::kWarpSize) {
      produce<Gemm>(params, plan, maps, shared);
      arch::grid_launch_dependents();
    } else if constexpr (Gemm::kGathersWith > 0) {
      if (arch::thread_index() < arch::kWarpSize + Gemm::kGathersWith) Gemm::gather(params, plan, shared);
    }
  } else {
    arch::increase_registers<Gemm::kConsumerRegisters>();
    consume<Gemm>(params, plan, shared, store);
  }
  // Other blocks may still write to this block's shared memory and arrive at its barriers.
  if (plan.cluster_blocks() > 1) {
    arch::cluster_arrive();
    arch::cluster_wait();
  }
}

// Grid: (plan.clusters * plan.cluster_blocks(),).
template <class Gemm>
GLOBAL(Gemm::kThreads, 1)
gemm_sm90(GRID_CONSTANT GemmParams params, GRID_CONSTANT GemmPlan plan, GRID_CONSTANT TensorMaps maps) {
  SHARED_STORAGE(typename Gemm::Storage, shared);
  run_block<Gemm>(params, plan, maps, shared,
                  [&](const typename Gemm::Position& tile, const typename Gemm::Accumulators& sums) {
                    store_output<Gemm>(params, plan, maps, tile, shared, sums);
                  });
}

}  // namespace cuda_ext::sm90
