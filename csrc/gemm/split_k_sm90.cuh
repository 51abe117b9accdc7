// Sums of a tile that go from block to block: where several blocks divide its k.
#pragma once

#include "gemm/tiles_sm90.h"
#include "tile/warpgroups_sm90.cuh"

namespace cuda_ext::sm90 {

using namespace tile;

// Sums of a tile in memory: (parts, kRowBlocks, kVectors, kWarpgroup) vectors of 4. The first one of this thread:
template <class Gemm>
DEVICE int first_vector() {
  return Gemm::part() * (Gemm::kRowBlocks * kRowBlock * Gemm::kBlockN) + ConsumerThreads::index() * 4;
}
// Calls f(offset from there, vector) for this thread's vectors of `sums`.
template <class Gemm, class F>
DEVICE void for_vectors(typename Gemm::Accumulators& sums, const F& f) {
  constexpr int kVectors = Gemm::kRegisters / 4;
#pragma unroll
  for (int i = 0; i < Gemm::kRowBlocks; ++i)
#pragma unroll
    for (int v = 0; v < kVectors; ++v) f((i * kVectors + v) * (kWarpgroup * 4), &sums[i][4 * v]);
}
DEVICE arch::Words4 words_of(const float* x) {
  return {{arch::float_bits(x[0]), arch::float_bits(x[1]), arch::float_bits(x[2]), arch::float_bits(x[3])}};
}
DEVICE void add_words(float* x, const arch::Words4& words) {
#pragma unroll
  for (int q = 0; q < 4; ++q) x[q] += arch::bits_float(words.data[q]);
}

// Stores this consumer's sums in the workspace of a plan, as part `split` of tile `tile` of the output. Returns true in
// the last block of the tile to arrive; its `sums` are then the total over all blocks, added in the order of k.
// `arrived`: of each consumer, in shared memory.
template <class Gemm, class Plan>
DEVICE bool add_splits(const Plan& plan, int tile, int split, uint32_t (&arrived)[kConsumers],
                       typename Gemm::Accumulators& sums) {
  constexpr int64_t kTile = Gemm::kBlockM * Gemm::kBlockN;
  const int64_t split_floats = plan.tiles() * kTile;
  float* const first = plan.partials + tile * kTile + first_vector<Gemm>();  // (splits, tiles, kTile)
  float* const mine = first + split * split_floats;
  for_vectors<Gemm>(sums, [&](int offset, const float* x) { arch::store_global(mine + offset, words_of(x)); });
  uint32_t& own_arrived = arrived[ConsumerThreads::consumer()];
  ConsumerThreads::sync();  // the arrival releases what the whole warpgroup has written
  if (ConsumerThreads::index() == 0)
    own_arrived = arch::atomic_add_acq_rel(plan.arrivals + tile * kConsumers + Gemm::part(), 1u);
  ConsumerThreads::sync();
  if (own_arrived + 1 < uint32_t(plan.splits)) return false;
#pragma unroll
  for (auto& row : sums)
#pragma unroll
    for (float& x : row) x = 0.0f;
  const float* partial = first;
#pragma unroll 1
  for (int other = 0; other < plan.splits; ++other, partial += split_floats)
    for_vectors<Gemm>(
        sums, [&](int offset, float* x) { add_words(x, arch::load_global_streaming<arch::Words4>(partial + offset)); });
  return true;
}

}  // namespace cuda_ext::sm90
