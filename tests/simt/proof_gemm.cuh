// Proof of the sm_90a instructions: a warp-specialised GEMM, and the same with A multicast in clusters of two.
//
// Problem   d (M, N) = a (M, K) @ b (N, K)^T; float16 or bfloat16, d float32; rows contiguous, K a multiple of 8.
// Tile      128 x kBlockN of d per block, 64 of K at a time; elements outside the tensors are zeros and are not stored.
// Cluster   kCluster neighbouring blocks along N: each loads its share of A's rows for all, and its own B.
// Roles     warpgroup 0: its first thread issues the copies. Warpgroups 1, 2: rows 0..63 and 64..127 of the tile.
// Barriers  full[stage]: 1 arrival, by the producer, with the bytes of A and B; all blocks of the cluster copy them.
//           empty[stage]: 2 kCluster arrivals (one thread of each consumer warpgroup in the cluster).
// Shared    a (kStages, 128, 64), b (kStages, kBlockN, 64): K-major, 128-byte swizzle; the barriers.
// Registers 168 at the start; the producer goes down to 40, the consumers up to 232 (kBlockN / 2 accumulators).
//
// kBug plants a bug, for test_planted_sm90.py; 0 is the correct kernel.
#pragma once

#include "arch/cluster.cuh"
#include "arch/tma.cuh"
#include "arch/warp.cuh"
#include "arch/wgmma.cuh"
#include "rt/launch.cuh"
#include "rt/tensor_map.cuh"

namespace cuda_ext::conformance {

using namespace arch;

enum GemmBug {
  kNoGemmBug,
  kAnnouncesNothing,
  kAnnouncesTooFewBytes,
  kAnnouncesTooManyBytes,
  kWrongFullParity,
  kWrongEmptyParity,
  kParityNeverFlips,
  kNoFullWait,
  kNoEmptyWait,
  kReadsTheNextStageOfTheRing,
  kReleasesBeforeTheWait,
  kNoWgmmaWait,
  kNoWgmmaFence,
  kNoWgmmaCommit,
  kTouchesAccumulatorsInFlight,
  kWrongKStep,
  kMisalignedAtom,
  kWrongStride,
  kWrongSwizzle,
  kNoBarrierInitFence,
  kNoBlockSyncAfterInit,
  kTooManyArrivals,
  kTooFewArrivals,
  kWarpLeavesItsWarpgroup,
  kRegistersDoNotFit,
  kOverwritesABarrier,
  kBlockSyncInPlaceOfClusterSync,
  kNoClusterSyncBeforeExit,
  kReleasesItsOwnBlockOnly,
  kMulticastToItselfOnly,
  kWaitsAtBlockScope,
  kNumGemmBugs
};

template <class T_, int block_n, int cluster = 1, int bug = kNoGemmBug>
struct GemmConfig {
  using T = T_;
  static constexpr int kBlockM = 128, kBlockN = block_n, kBlockK = 64, kStages = 4, kCluster = cluster, kBug = bug;
  static constexpr int kThreads = 384;
  static constexpr int kLoadRows = kBlockM / kCluster;  // rows of A loaded by one block
  static constexpr uint32_t kLoadBytes = kLoadRows * kBlockK * 2;
  static constexpr uint32_t kStageBytes = (kBlockM + kBlockN) * kBlockK * 2;

  struct Storage {
    alignas(1024) T a[kStages][kBlockM][kBlockK];
    alignas(1024) T b[kStages][kBlockN][kBlockK];
    Barrier full[kStages], empty[kStages];
  };
};

struct GemmParams {
  TensorMap a;  // box (kBlockK, kLoadRows)
  TensorMap b;  // box (kBlockK, kBlockN)
  float* d;
  int m, n, k;
};

// A stage of the ring and the parity of its phase.
template <int stages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  DEVICE void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <class Config>
DEVICE void produce(const GemmParams& p, typename Config::Storage& shared, int tile_m, int tile_n) {
  constexpr int bug = Config::kBug;
  const int rank = cluster_rank();
  RingPosition<Config::kStages> at;
  for (int k = 0; k < p.k; k += Config::kBlockK, at.advance()) {
    const uint32_t parity = bug == kWrongEmptyParity ? at.parity : at.parity ^ 1;
    if constexpr (bug != kNoEmptyWait) {
      if constexpr (Config::kCluster > 1 && bug != kWaitsAtBlockScope)
        barrier_wait_cluster(shared.empty[at.stage], parity);
      else
        barrier_wait(shared.empty[at.stage], parity);
    }
    Barrier& full = shared.full[at.stage];
    if constexpr (bug == kAnnouncesNothing)
      barrier_arrive(full);
    else
      barrier_arrive_expect(full, Config::kStageBytes - (bug == kAnnouncesTooFewBytes ? Config::kLoadBytes : 0) +
                                      (bug == kAnnouncesTooManyBytes ? 16 : 0));
    const SharedAddress a = shared_address(shared.a[at.stage][rank * Config::kLoadRows]);
    const int row = tile_m * Config::kBlockM + rank * Config::kLoadRows;
    if constexpr (Config::kCluster > 1) {
      constexpr int all = (1 << Config::kCluster) - 1;
      tma_load_multicast(a, p.a, full, {k, row}, uint16_t(bug == kMulticastToItselfOnly ? 1 << rank : all));
    } else {
      tma_load(a, p.a, full, {k, row});
    }
    tma_load(shared_address(shared.b[at.stage]), p.b, full, {k, tile_n * Config::kBlockN});
  }
}

// Tells every block that writes this stage that it may be overwritten.
template <class Config>
DEVICE void release(typename Config::Storage& shared, int stage) {
  const int t = thread_index() % 128;
  if constexpr (Config::kCluster == 1) {
    if (t == 0) barrier_arrive(shared.empty[stage]);
  } else if constexpr (Config::kBug == kReleasesItsOwnBlockOnly) {
    if (t == 0) barrier_arrive(shared.empty[stage]);
  } else {
    if (t < Config::kCluster) barrier_arrive_remote(mapa(shared_address(&shared.empty[stage]), t));
  }
}

template <class Config>
DEVICE void consume(const GemmParams& p, typename Config::Storage& shared, int tile_m, int tile_n) {
  using T = typename Config::T;
  constexpr int bug = Config::kBug, kAtom = 1024;
  const int half = thread_index() / 128 - 1;
  if (bug == kWarpLeavesItsWarpgroup && thread_index() == 128 + 32) return;
  float d[Config::kBlockN / 2];
#pragma unroll
  for (float& sum : d) sum = 0;
  RingPosition<Config::kStages> at;
  int before = -1;  // the stage that products in flight may still read
  int k = 0;
  do {  // do-while, because ptxas serialises the products of a loop with zero iterations
    if constexpr (bug != kNoFullWait)
      barrier_wait(shared.full[at.stage], bug == kWrongFullParity    ? at.parity ^ 1
                                          : bug == kParityNeverFlips ? 0
                                                                     : at.parity);
    const int stage = bug == kReadsTheNextStageOfTheRing ? (at.stage + 1) % Config::kStages : at.stage;
    const SharedAddress a = shared_address(shared.a[stage][64 * half]);
    const SharedAddress b = shared_address(shared.b[stage]) + (bug == kMisalignedAtom ? 256 : 0);
    if constexpr (bug != kNoWgmmaFence) wgmma_fence(d);
#pragma unroll
    for (int step = 0; step < Config::kBlockK / 16; ++step) {
      constexpr auto swizzle = bug == kWrongSwizzle ? Swizzle::k64 : Swizzle::k128;
      const uint32_t along_k = uint32_t(step) * (bug == kWrongKStep ? 16 : 32);
      wgmma_m64k16<T, Major::kK, Major::kK>(
          d, make_descriptor(a + along_k, 0, kAtom, swizzle),
          make_descriptor(b + along_k, 0, bug == kWrongStride ? 2 * kAtom : kAtom, swizzle), 1);
    }
    if constexpr (bug != kNoWgmmaCommit) wgmma_commit();
    if constexpr (bug == kTouchesAccumulatorsInFlight)
      for (float& sum : d) sum += 1;
    if constexpr (bug == kReleasesBeforeTheWait) {
      release<Config>(shared, at.stage);
    } else {
      wgmma_wait<1>();
      if (before >= 0) release<Config>(shared, before);
    }
    before = at.stage;
    at.advance();
    k += Config::kBlockK;
  } while (k < p.k);
  if constexpr (bug != kNoWgmmaWait) wgmma_wait<0>(d);

  const int row = tile_m * Config::kBlockM + thread_index() % 128 / 32 * 16 + half * 64 + lane_index() / 4;
  const int column = tile_n * Config::kBlockN + 2 * (lane_index() % 4);
#pragma unroll
  for (int i = 0; i < Config::kBlockN / 2; ++i) {
    const int r = row + i / 2 % 2 * 8, c = column + i / 4 * 8 + i % 2;
    if (r < p.m && c < p.n) store_global(p.d + int64_t(r) * p.n + c, d[i]);
  }
}

template <class Config>
GLOBAL(Config::kThreads, 1)
proof_gemm(GRID_CONSTANT GemmParams p) {
  constexpr int bug = Config::kBug;
  SHARED_STORAGE(typename Config::Storage, shared);
  if (thread_index() == 0) {
    tma_prefetch(p.a);
    tma_prefetch(p.b);
    constexpr int releases = 2 * Config::kCluster + (bug == kTooManyArrivals) - (bug == kTooFewArrivals);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      barrier_init(shared.full[stage], 1);
      barrier_init(shared.empty[stage], releases);
    }
    if constexpr (bug != kNoBarrierInitFence) fence_barrier_init();
  }
  if constexpr (Config::kCluster > 1 && bug != kBlockSyncInPlaceOfClusterSync) {
    cluster_arrive_relaxed();
    cluster_wait();
  }
  if constexpr ((Config::kCluster == 1 || bug == kBlockSyncInPlaceOfClusterSync) && bug != kNoBlockSyncAfterInit)
    sync_threads();

  if (thread_index() < 128) {
    decrease_registers<40>();
    if (thread_index() == 0) produce<Config>(p, shared, block_y(), block_x());
    if constexpr (bug == kOverwritesABarrier)
      if (thread_index() == 1) store_shared(shared_address(&shared.full[Config::kStages - 1]), uint32_t(1));
  } else {
    increase_registers<bug == kRegistersDoNotFit ? 240 : 232>();
    consume<Config>(p, shared, block_y(), block_x());
  }
  // Other blocks may still arrive at this block's barriers.
  if constexpr (Config::kCluster > 1 && bug != kNoClusterSyncBeforeExit) {
    cluster_arrive();
    cluster_wait();
  }
}

inline TensorMap matrix_map(const void* data, bool float16, int rows, int columns, int box_rows) {
  return rt::make_tensor_map("proof_gemm", {.data = data,
                                            .element = float16 ? rt::Element::kFloat16 : rt::Element::kBFloat16,
                                            .rank = 2,
                                            .sizes = {columns, rows},
                                            .strides = {int64_t(columns) * 2},
                                            .box = {64, box_rows},
                                            .swizzle_bytes = 128});
}

template <class Config>
void launch_proof_gemm(const void* a, const void* b, float* d, int m, int n, int k) {
  const bool float16 = DtypeOf<typename Config::T>::value == Dtype::kFloat16;
  const auto tiles = [](int size, int tile) { return (size + tile - 1) / tile; };
  const int columns = tiles(tiles(n, Config::kBlockN), Config::kCluster) * Config::kCluster;
  rt::launch<proof_gemm<Config>>("proof_gemm",
                                 {.grid = {columns, tiles(m, Config::kBlockM)},
                                  .threads = Config::kThreads,
                                  .cluster = {Config::kCluster},
                                  .shared_bytes = sizeof(typename Config::Storage)},
                                 GemmParams{matrix_map(a, float16, m, k, Config::kLoadRows),
                                            matrix_map(b, float16, n, k, Config::kBlockN), d, m, n, k});
}

}  // namespace cuda_ext::conformance
