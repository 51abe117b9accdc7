// Proof of the sm_90a instructions: products whose operand A comes from registers, as attention needs them.
//
// Problem   o (M, 128) = max(q (M, 128) @ k (N, 128)^T, 0) @ v (N, 128); bfloat16, o float32.
// Tile      128 rows per block, 64 keys at a time; keys past the end are zeros.
// Roles     warps 0..3 and 4..7: rows 0..63 and 64..127. Warp 8: its first thread issues the copies.
// Order     S = Q K^T of the next tile overlaps O += P V; its scores are clamped while O may still be in flight.
// Barriers  full_k, full_v [2]: 1 arrival, by the producer, with the bytes of a tile. empty_k, empty_v [2]: 2 arrivals,
//           one thread of each warpgroup. Named barriers 1, 2: the 128 threads of a warpgroup.
// Shared    q (2 halves of rows, 2 halves of D, 64, 64), k, v (2 stages, 2 halves of D, 64, 64): 128-byte swizzle;
//           Q and K are K-major, V is MN-major. o (2, 4 quarters of D, 64, 32): 128-byte swizzle.
//
// kBug plants a bug, for test_planted_sm90.py; 0 is the correct kernel.
#pragma once

#include "arch/math.cuh"
#include "arch/tma.cuh"
#include "arch/warp.cuh"
#include "arch/wgmma.cuh"
#include "rt/launch.cuh"
#include "rt/tensor_map.cuh"

namespace cuda_ext::conformance {

using namespace arch;

enum AttentionBug {
  kNoAttentionBug,
  kNoProxyFenceAfterQ,
  kNoBarrierAfterQ,
  kOverwritesAInFlight,
  kReadsScoresTooEarly,
  kRescalesSumsInFlight,
  kReleasesValuesTooEarly,
  kSwapsDescriptorSteps,
  kNoProxyFenceBeforeStore,
  kNoBarrierBeforeStore,
  kNoStoreWait,
  kNoStoreCommit,
  kWaitsForOneGroupLess,
  kNumAttentionBugs
};

constexpr int kHeadDim = 128, kBlockKeys = 64, kQueries = 128, kStages2 = 2;
constexpr uint32_t kTileBytes = kBlockKeys * kHeadDim * 2;

struct AttentionStorage {
  alignas(1024) bfloat16_t q[2][2][64][64];
  alignas(1024) bfloat16_t k[kStages2][2][kBlockKeys][64];
  alignas(1024) bfloat16_t v[kStages2][2][kBlockKeys][64];
  alignas(1024) float o[2][4][64][32];
  Barrier full_k[kStages2], full_v[kStages2], empty_k[kStages2], empty_v[kStages2];
};

struct AttentionParams {
  const bfloat16_t* q;
  TensorMap k, v;  // box (64, 64)
  TensorMap o;     // box (32, 64)
  int queries, keys;
};

DEVICE void load_tile(SharedAddress to, const TensorMap& map, Barrier& full, int row) {
  barrier_arrive_expect(full, kTileBytes);
  tma_load(to, map, full, {0, row});
  tma_load(to + kTileBytes / 2, map, full, {64, row});
}

DEVICE void produce_keys_and_values(const AttentionParams& p, AttentionStorage& shared) {
  for (int tile = 0; tile * kBlockKeys < p.keys; ++tile) {
    const int stage = tile % kStages2;
    const uint32_t parity = tile / kStages2 % 2 ^ 1;
    barrier_wait(shared.empty_k[stage], parity);
    load_tile(shared_address(shared.k[stage]), p.k, shared.full_k[stage], tile * kBlockKeys);
    barrier_wait(shared.empty_v[stage], parity);
    load_tile(shared_address(shared.v[stage]), p.v, shared.full_v[stage], tile * kBlockKeys);
  }
}

// This warpgroup's rows of Q, 8 elements at a time.
DEVICE void load_queries(const AttentionParams& p, SharedAddress to, int first_row) {
  for (int i = thread_index() % 128; i < 64 * kHeadDim / 8; i += 128) {
    const int row = i / 16, column = i % 16 * 8;
    Words4 eight{};
    if (first_row + row < p.queries) eight = load_global<Words4>(p.q + int64_t(first_row + row) * kHeadDim + column);
    const SharedAddress at = to + uint32_t(column / 64 * 64 * 128 + row * 128 + column % 64 * 2);
    store_shared(at ^ (at >> 7 & 7) << 4, eight);
  }
}

// S = Q K^T for one tile of keys.
template <int bug>
DEVICE void multiply_queries(float (&s)[32], SharedAddress q, SharedAddress k) {
  wgmma_fence(s);
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const uint32_t along_k = uint32_t(step / 4 * 64 * 128 + step % 4 * 32);
    wgmma_m64k16<bfloat16_t, Major::kK, Major::kK>(s, make_descriptor(q + along_k, 0, 1024, Swizzle::k128),
                                                   make_descriptor(k + along_k, 0, 1024, Swizzle::k128), step > 0);
  }
  wgmma_commit();
}

// O += P V.
template <int bug>
DEVICE void multiply_values(float (&o)[64], uint32_t (&probs)[4][4], SharedAddress v, int go_on) {
  constexpr uint32_t along_d = 64 * 128, along_keys = 1024;
  wgmma_fence(o, probs);
#pragma unroll
  for (int step = 0; step < kBlockKeys / 16; ++step) {
    const SharedAddress at = v + uint32_t(step) * 2 * along_keys;
    const uint64_t b = bug == kSwapsDescriptorSteps ? make_descriptor(at, along_keys, along_d, Swizzle::k128)
                                                    : make_descriptor(at, along_d, along_keys, Swizzle::k128);
    wgmma_m64k16<bfloat16_t, Major::kMn>(o, probs[step], b, go_on | (step > 0));
  }
  wgmma_commit();
}

DEVICE void clamp(float (&s)[32]) {
#pragma unroll
  for (float& score : s) score = score > 0 ? score : 0;
}
// Rounded and paired, the accumulators of S have the layout of fragments of A.
DEVICE void make_probs(uint32_t (&probs)[4][4], const float (&s)[32]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) probs[i / 4][i % 4] = pack<bfloat16_t>(s[2 * i], s[2 * i + 1]);
}

template <int bug>
DEVICE void attend(const AttentionParams& p, AttentionStorage& shared) {
  const int half = thread_index() / 128, first_row = block_x() * kQueries + half * 64;
  const bool signals = thread_index() % 128 == 0;
  const SharedAddress q = shared_address(shared.q[half]);
  load_queries(p, q, first_row);
  if constexpr (bug != kNoProxyFenceAfterQ) fence_async_shared();
  if constexpr (bug != kNoBarrierAfterQ) named_barrier_sync(1 + half, 128);

  float s[32], o[64];
  uint32_t probs[4][4];
  const int tiles = (p.keys + kBlockKeys - 1) / kBlockKeys;
#pragma unroll
  for (float& sum : o) sum = 0;
#pragma unroll
  for (float& score : s) score = 0;
  barrier_wait(shared.full_k[0], 0);
  multiply_queries<bug>(s, q, shared_address(shared.k[0]));
  wgmma_wait<0>(s);
  if (signals) barrier_arrive(shared.empty_k[0]);
  clamp(s);
  make_probs(probs, s);
  int tile = 0;
  for (; tile + 1 < tiles; ++tile) {
    const int stage = tile % kStages2, next = (tile + 1) % kStages2;
    barrier_wait(shared.full_k[next], (tile + 1) / kStages2 % 2);
    multiply_queries<bug>(s, q, shared_address(shared.k[next]));
    barrier_wait(shared.full_v[stage], tile / kStages2 % 2);
    multiply_values<bug>(o, probs, shared_address(shared.v[stage]), 1);
    if constexpr (bug == kReleasesValuesTooEarly)
      if (signals) barrier_arrive(shared.empty_v[stage]);
    if constexpr (bug == kRescalesSumsInFlight)
      for (float& sum : o) sum *= 0.5f;
    if constexpr (bug == kReadsScoresTooEarly) clamp(s);
    if constexpr (bug == kWaitsForOneGroupLess)
      wgmma_wait<2>();
    else
      wgmma_wait<1>(s);
    if (signals) barrier_arrive(shared.empty_k[next]);
    if constexpr (bug != kReadsScoresTooEarly) clamp(s);
    if constexpr (bug == kOverwritesAInFlight) make_probs(probs, s);
    wgmma_wait<0>(o);
    if constexpr (bug != kReleasesValuesTooEarly)
      if (signals) barrier_arrive(shared.empty_v[stage]);
    make_probs(probs, s);  // after the wait: the previous product read these registers
  }
  barrier_wait(shared.full_v[tile % kStages2], tile / kStages2 % 2);
  multiply_values<bug>(o, probs, shared_address(shared.v[tile % kStages2]), 1);
  wgmma_wait<0>(o);

  // Quarter j / 16 of D has columns 32 (j / 16) to 32 (j / 16) + 31.
  const int row = thread_index() % 128 / 32 * 16 + lane_index() / 4;
#pragma unroll
  for (int i = 0; i < 64; i += 2) {
    const int r = row + i / 2 % 2 * 8, column = i / 4 * 8 + 2 * (lane_index() % 4);
    const SharedAddress at = shared_address(shared.o[half][column / 32][r]) + uint32_t(column % 32 * 4);
    store_shared(at ^ (at >> 7 & 7) << 4,
                 Words2{{__builtin_bit_cast(uint32_t, o[i]), __builtin_bit_cast(uint32_t, o[i + 1])}});
  }
  if constexpr (bug != kNoProxyFenceBeforeStore) fence_async_shared();
  if constexpr (bug != kNoBarrierBeforeStore) named_barrier_sync(1 + half, 128);
  if (!signals) return;
  for (int quarter = 0; quarter < 4; ++quarter)
    tma_store(p.o, shared_address(shared.o[half][quarter]), {32 * quarter, first_row});
  if constexpr (bug != kNoStoreCommit) bulk_commit();
  if constexpr (bug != kNoStoreWait) bulk_wait_read<0>();
}

template <int bug>
GLOBAL(288, 1)
proof_attention(GRID_CONSTANT AttentionParams p) {
  SHARED_STORAGE(AttentionStorage, shared);
  if (thread_index() == 0) {
    for (int stage = 0; stage < kStages2; ++stage) {
      barrier_init(shared.full_k[stage], 1);
      barrier_init(shared.full_v[stage], 1);
      barrier_init(shared.empty_k[stage], 2);
      barrier_init(shared.empty_v[stage], 2);
    }
    fence_barrier_init();
  }
  sync_threads();
  if (thread_index() < 256)
    attend<bug>(p, shared);
  else if (thread_index() == 256)
    produce_keys_and_values(p, shared);
}

template <int bug = kNoAttentionBug>
void launch_proof_attention(const void* q, const void* k, const void* v, float* o, int queries, int keys) {
  const auto map = [](const void* data, rt::Element element, int rows, int box_columns) {
    const int64_t row_bytes = kHeadDim * rt::bytes_of(element);
    return rt::make_tensor_map("proof_attention", {.data = data,
                                                   .element = element,
                                                   .rank = 2,
                                                   .sizes = {kHeadDim, rows},
                                                   .strides = {row_bytes},
                                                   .box = {box_columns, 64},
                                                   .swizzle_bytes = 128});
  };
  rt::launch<proof_attention<bug>>(
      "proof_attention",
      {.grid = {(queries + kQueries - 1) / kQueries}, .threads = 288, .shared_bytes = sizeof(AttentionStorage)},
      AttentionParams{static_cast<const bfloat16_t*>(q), map(k, rt::Element::kBFloat16, keys, 64),
                      map(v, rt::Element::kBFloat16, keys, 64), map(o, rt::Element::kFloat32, queries, 32), queries,
                      keys});
}

}  // namespace cuda_ext::conformance
