// Two kernels that use every kind of synchronisation before sm_90, and common bugs in them: `bug` selects one, 0 is the
// correct kernel. The emulator must detect each bug.
//
// pipeline: 2 warps; out (32, 8) = a (32, K) @ b (K, 8), bfloat16. cp.async loads K tiles of 16 into a ring of stages;
// warp w multiplies rows 16w to 16w + 15; the lanes of a warp exchange results through shared memory, and warp 1 adds
// the sums of warp 0's columns to its own.
// last_block: 4 blocks; each stores a partial sum, and the last to arrive adds them.
#include "arch/async_copy.cuh"
#include "arch/mma.cuh"
#include "arch/warp.cuh"
#include "conformance.h"

namespace cuda_ext::conformance {

using namespace arch;

enum Bug {
  kNone,
  kWaitsOneGroupLess,
  kNoWaitInTheLoop,
  kNoBarrierBeforeReading,
  kOverwritesTheStageInUse,
  kNoCommit,
  kNoEmptyGroupsAtTheEnd,
  kReadsTheNextStage,
  kCopiesTooFewBytes,
  kNoWarpBarrier,
  kArrivesButDoesNotWait,
  kBarrierOfOneWarp,
  kBarrierNobodyElseComesTo,
  kDivergedShuffle,
  kMaskWithoutThisLane,
  kMisalignedMatrix,
  kReadsPastSharedMemory,
  kWritesPastSharedMemory,
  kReadsWhatNobodyWrote,
  kBarrierInABranch,
  kNumPipelineBugs,
  kRelaxedArrival = kNumPipelineBugs,
  kNoBlockBarrierBeforeArrival,
  kPlainCounter,
  kReadOnlyLoadOfPartials,
  kNumBugs
};

constexpr int kTiles = 8, kStages = 3, kThreads = 64;
constexpr size_t kABytes = 32 * kTiles * 16 * 2, kBBytes = kTiles * 16 * 8 * 2;

struct PipelineStorage {
  alignas(16) uint16_t a[kStages][32][16];
  alignas(16) uint16_t b[kStages][16][8];
  alignas(16) float d[2][16][8];
  float column_sums[8];
};

template <int bug>
GLOBAL(kThreads, 1)
pipeline(const uint32_t* in, uint32_t* out) {
  SHARED_STORAGE(PipelineStorage, shared);
  const int t = thread_index(), warp = t / 32, lane = lane_index();
  const auto* a = reinterpret_cast<const uint16_t*>(in);  // (32, kTiles * 16)
  const auto* b = a + kABytes / 2;                        // (kTiles * 16, 8)
  constexpr int a_bytes = bug == kCopiesTooFewBytes ? 8 : 16;

  const auto load = [&](int tile) {
    if (tile < kTiles) {
      const int stage = tile % kStages, row = t / 2, half = t % 2;
      cp_async<16>(shared_address(&shared.a[stage][row][8 * half]), a + row * kTiles * 16 + tile * 16 + 8 * half,
                   a_bytes);
      if (t < 16) cp_async<16>(shared_address(shared.b[stage][t]), b + (tile * 16 + t) * 8);
    }
    if (bug == kNoEmptyGroupsAtTheEnd && tile >= kTiles) return;
    if (bug != kNoCommit) cp_async_commit();
  };

  for (int tile = 0; tile < kStages - 1; ++tile) load(tile);
  float d[4] = {};
  for (int tile = 0; tile < kTiles; ++tile) {
    if (bug == kWaitsOneGroupLess)
      cp_async_wait<kStages - 1>();
    else if (bug != kNoWaitInTheLoop)
      cp_async_wait<kStages - 2>();
    if (bug == kOverwritesTheStageInUse) load(tile + kStages - 1);
    if (bug == kBarrierInABranch) {
      if (warp == 0 || tile % 2 == 0) sync_threads();
    } else if (bug != kNoBarrierBeforeReading) {
      sync_threads();
    }
    if (bug != kOverwritesTheStageInUse) load(tile + kStages - 1);

    const int stage = (tile + (bug == kReadsTheNextStage)) % kStages;
    uint32_t a_fragment[4], b_fragment[2];
    const SharedAddress skew = bug == kMisalignedMatrix ? 4 : bug == kReadsPastSharedMemory ? sizeof shared : 0;
    ldmatrix<4>(a_fragment, shared_address(&shared.a[stage][16 * warp + lane % 16][lane / 16 * 8]) + skew);
    ldmatrix<2, true>(b_fragment, shared_address(shared.b[stage][lane % 16]));
    mma_m16n8k16<bfloat16_t>(d, a_fragment, b_fragment);
  }

  const int g = lane / 4, column = lane % 4 * 2;
  if (bug == kWritesPastSharedMemory) reinterpret_cast<float*>(&shared + 1)[lane] = d[0];
  if (bug != kReadsWhatNobodyWrote || warp == 0) {
    shared.d[warp][g][column] = d[0];
    shared.d[warp][g][column + 1] = d[1];
    shared.d[warp][g + 8][column] = d[2];
    shared.d[warp][g + 8][column + 1] = d[3];
  }
  if (bug == kMaskWithoutThisLane)
    sync_warp(0x7fffffff);
  else if (bug != kNoWarpBarrier)
    sync_warp();
  // Lane l now holds column l % 8 of rows l / 8 + 4i.
  float row[4], sum = 0;
  for (int i = 0; i < 4; ++i) {
    row[i] = load_shared<float>(shared_address(&shared.d[warp][lane / 8 + 4 * i][lane % 8]));
    sum += row[i];
  }
  if (bug == kDivergedShuffle && lane % 8 == 0) return;
  sum += shuffle_xor(sum, 8);
  sum += shuffle_xor(sum, 16);
  constexpr int barrier_threads = bug == kBarrierOfOneWarp ? 32 : kThreads;
  if (warp == 0) {
    if (lane < 8) store_shared(shared_address(&shared.column_sums[lane]), sum);
    named_barrier_arrive(bug == kBarrierNobodyElseComesTo ? 2 : 1, barrier_threads);
  } else {
    if (bug == kArrivesButDoesNotWait)
      named_barrier_arrive(1, barrier_threads);
    else
      named_barrier_sync(1, barrier_threads);
    const float other = load_shared<float>(shared_address(&shared.column_sums[lane % 8]));
    for (int i = 0; i < 4; ++i) row[i] += other;
  }
  for (int i = 0; i < 4; ++i)
    store_global(out + (16 * warp + lane / 8 + 4 * i) * 8 + lane % 8, __builtin_bit_cast(uint32_t, row[i]));
}

// out: 64 sums, then the partial sums (4, 64), then the counter.
template <int bug>
GLOBAL(kThreads, 1)
last_block(const uint32_t* in, uint32_t* out, uint32_t* partial, uint32_t* counter) {
  struct Storage {
    uint32_t arrived;
  };
  SHARED_STORAGE(Storage, shared);
  const int t = thread_index(), block = block_x(), blocks = grid_x();
  store_global(partial + block * kThreads + t, in[block * kThreads + t] * uint32_t(t + 1));
  if (bug != kNoBlockBarrierBeforeArrival) sync_threads();
  if (t == 0) {
    uint32_t arrived;
    if (bug == kRelaxedArrival) {
      arrived = atomic_add(counter, 1u);
    } else if (bug == kPlainCounter) {
      arrived = load_global_streaming<uint32_t>(counter);
      store_global(counter, arrived + 1);
    } else {
      arrived = atomic_add_acq_rel(counter, 1);
    }
    store_shared(shared_address(&shared.arrived), arrived);
  }
  sync_threads();
  if (load_shared<uint32_t>(shared_address(&shared.arrived)) != uint32_t(blocks - 1)) return;
  uint32_t sum = 0;
  for (int b = 0; b < blocks; ++b) {
    const uint32_t* const from = partial + b * kThreads + t;
    sum += bug == kReadOnlyLoadOfPartials ? load_global<uint32_t>(from) : load_global_streaming<uint32_t>(from);
  }
  store_global(out + t, sum);
}

template <int bug>
void run_pipeline(const uint32_t* in, uint32_t* out) {
  rt::launch<pipeline<bug>>("pipeline", {.threads = kThreads, .shared_bytes = sizeof(PipelineStorage)}, in, out);
}
template <int bug>
void run_last_block(const uint32_t* in, uint32_t* out) {
  uint32_t* const counter = out + 5 * kThreads;
  *counter = 0;
  rt::launch<last_block<bug>>("last_block", {.grid = {4}, .threads = kThreads, .shared_bytes = 4}, in, out,
                              out + kThreads, counter);
}

constexpr size_t kPipelineIn = kABytes + kBBytes, kPipelineOut = 32 * 8 * 4;
constexpr size_t kLastBlockIn = 4 * kThreads * 4, kLastBlockOut = (5 * kThreads + 1) * 4;

#define PIPELINE(bug) {#bug, kPipelineIn, kPipelineOut, run_pipeline<bug>}
#define LAST_BLOCK(bug) {#bug, kLastBlockIn, kLastBlockOut, run_last_block<bug>}
static const Case planted[] = {{"pipeline", kPipelineIn, kPipelineOut, run_pipeline<kNone>},
                               {"last_block", kLastBlockIn, kLastBlockOut, run_last_block<kNone>},
                               PIPELINE(kWaitsOneGroupLess),
                               PIPELINE(kNoWaitInTheLoop),
                               PIPELINE(kNoBarrierBeforeReading),
                               PIPELINE(kOverwritesTheStageInUse),
                               PIPELINE(kNoCommit),
                               PIPELINE(kNoEmptyGroupsAtTheEnd),
                               PIPELINE(kReadsTheNextStage),
                               PIPELINE(kCopiesTooFewBytes),
                               PIPELINE(kNoWarpBarrier),
                               PIPELINE(kArrivesButDoesNotWait),
                               PIPELINE(kBarrierOfOneWarp),
                               PIPELINE(kBarrierNobodyElseComesTo),
                               PIPELINE(kDivergedShuffle),
                               PIPELINE(kMaskWithoutThisLane),
                               PIPELINE(kMisalignedMatrix),
                               PIPELINE(kReadsPastSharedMemory),
                               PIPELINE(kWritesPastSharedMemory),
                               PIPELINE(kReadsWhatNobodyWrote),
                               PIPELINE(kBarrierInABranch),
                               LAST_BLOCK(kRelaxedArrival),
                               LAST_BLOCK(kNoBlockBarrierBeforeArrival),
                               LAST_BLOCK(kPlainCounter),
                               LAST_BLOCK(kReadOnlyLoadOfPartials)};
static const bool registered = [] {
  for (const Case& c : planted) cases().push_back(c);
  return true;
}();

}  // namespace cuda_ext::conformance
