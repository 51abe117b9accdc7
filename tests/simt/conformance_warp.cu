// Threads, barriers, warps.
#include "arch/warp.cuh"
#include "conformance.h"

namespace cuda_ext::conformance {

using namespace arch;

constexpr size_t kWarpBytes = 32 * 4;

DEVICE void store_words(uint32_t* to, uint64_t value) {
  to[0] = uint32_t(value);
  to[1] = uint32_t(value >> 32);
}

CONFORMANCE(shuffle, 32, 0, 2 * kWarpBytes, kWarpBytes) {
  const int lane = lane_index();
  out[lane] = arch::shuffle(in[lane], int(in[32 + lane] % 32));
}
CONFORMANCE(shuffle_xor, 32, 0, kWarpBytes, 5 * kWarpBytes) {
  const int lane = lane_index();
  for (int i = 0; i < 5; ++i) out[i * 32 + lane] = arch::shuffle_xor(in[lane], 1 << i);
}
CONFORMANCE(shuffle_up_down, 32, 0, kWarpBytes, 4 * kWarpBytes) {
  const int lane = lane_index();
  out[lane] = shuffle_up(in[lane], 1);
  out[32 + lane] = shuffle_up(in[lane], 13);
  out[64 + lane] = shuffle_down(in[lane], 1);
  out[96 + lane] = shuffle_down(in[lane], 13);
}
// Two halves of a diverged warp with different masks.
CONFORMANCE(shuffle_diverged, 32, 0, kWarpBytes, kWarpBytes) {
  const int lane = lane_index();
  if (lane % 2 == 0)
    out[lane] = arch::shuffle(in[lane], (lane + 2) % 32, 0x55555555);
  else
    out[lane] = arch::shuffle(in[lane], (lane + 30) % 32, 0xaaaaaaaa);
}
CONFORMANCE(shuffle_words_of_64_bits, 32, 0, 2 * kWarpBytes, 4 * kWarpBytes) {
  const int lane = lane_index();
  const uint64_t value = in[2 * lane] | uint64_t(in[2 * lane + 1]) << 32;
  const uint64_t moved[] = {arch::shuffle(value, 31 - lane), arch::shuffle_xor(value, 4)};
  for (int i = 0; i < 2; ++i) store_words(out + 64 * i + 2 * lane, moved[i]);
}
CONFORMANCE(ballot, 32, 0, kWarpBytes, 3 * kWarpBytes) {
  const int lane = lane_index();
  out[lane] = arch::ballot(in[lane] % 2 != 0);
  out[32 + lane] = any(in[lane] == 0);
  out[64 + lane] = all(in[lane] != 0);
}
CONFORMANCE(elect_one, 64, 0, 4, 64 * 4) { out[thread_index()] = arch::elect_one(); }

CONFORMANCE(lane_sums, 32, 0, kWarpBytes, 3 * kWarpBytes) {
  const int lane = lane_index();
  const float value = float(in[lane] % 1024);
  out[lane] = uint32_t(sum_over_lanes(value));
  out[32 + lane] = uint32_t(sum_over_lanes<4>(value));
  out[64 + lane] = uint32_t(max_over_lanes<8>(value));
}

struct Words128 {
  uint32_t x[128];
};

// Every thread reads what another warp wrote.
CONFORMANCE(sync_threads, 128, sizeof(Words128), 512, 512) {
  SHARED_STORAGE(Words128, shared);
  const int t = thread_index();
  shared.x[t] = in[t];
  arch::sync_threads();
  out[t] = shared.x[(t + 37) % 128];
}
CONFORMANCE(sync_warp, 32, sizeof(Words128), kWarpBytes, kWarpBytes) {
  SHARED_STORAGE(Words128, shared);
  const int lane = lane_index();
  shared.x[lane] = in[lane];
  arch::sync_warp();
  out[lane] = shared.x[31 - lane];
}
// Pairs of lanes swap values; even and odd lanes synchronise separately.
CONFORMANCE(sync_part_of_a_warp, 32, sizeof(Words128), kWarpBytes, kWarpBytes) {
  SHARED_STORAGE(Words128, shared);
  const int lane = lane_index();
  if (lane % 2 == 0) {
    shared.x[lane] = in[lane];
    arch::sync_warp(0x55555555);
    out[lane] = shared.x[lane ^ 2];
  } else {
    shared.x[lane] = in[lane];
    arch::sync_warp(0xaaaaaaaa);
    out[lane] = shared.x[lane ^ 2];
  }
}
// Each half passes values to the other: it arrives at the other's barrier before it waits at its own.
CONFORMANCE(named_barriers, 128, sizeof(Words128), 512, 512) {
  SHARED_STORAGE(Words128, shared);
  const int t = thread_index();
  if (t < 64) {
    shared.x[t] = in[t];
    named_barrier_arrive(1, 128);
    named_barrier_sync(2, 128);
    out[t] = shared.x[64 + t];
  } else {
    shared.x[t] = in[t];
    named_barrier_arrive(2, 128);
    named_barrier_sync(1, 128);
    out[t] = shared.x[t - 64];
  }
}

}  // namespace cuda_ext::conformance
