// Block indices, and order between blocks.
#include "arch/math.cuh"
#include "arch/memory.cuh"
#include "arch/thread.cuh"
#include "conformance.h"

namespace cuda_ext::conformance {

using namespace arch;

constexpr int kBlocks = 5;
// More blocks than the emulator runs concurrently by default, so that the last must wait for the first.
constexpr int kTurns = 8;

GLOBAL(32, 1) indices_kernel(uint32_t* out) {
  const int block = (block_z() * grid_y() + block_y()) * grid_x() + block_x();
  out[block * 32 + thread_index()] = uint32_t(((grid_z() * 8 + grid_y()) * 8 + grid_x()) << 16 | block_z() << 12 |
                                              block_y() << 8 | block_x() << 4 | (block_size() == 32));
}
static const Register indices_case({"grid_indices", 4, 12 * 128, [](const uint32_t*, uint32_t* out) {
                                      rt::launch<indices_kernel>("grid_indices", {.grid = {2, 3, 2}, .threads = 32},
                                                                 out);
                                    }});

// Blocks take turns, from the last to the first; each adds its row to the sums so far. out[0] is the turn, out[32..63]
// the sums; `out` is initialised to 0xff.
template <bool system>
GLOBAL(32, 1)
turns_kernel(const uint32_t* in, uint32_t* out) {
  constexpr uint64_t kTimeout = 10'000'000'000;
  const int lane = thread_index();
  const int turn = kTurns - 1 - block_x();
  uint32_t* const sums = out + 32;
  if (lane == 0) {
    const uint32_t mine = turn == 0 ? ~0u : uint32_t(turn);
    system ? wait_reached_system(out, mine, kTimeout) : wait_equal(out, mine);
  }
  arch::sync_threads();
  const uint32_t before = turn == 0 ? 0 : sums[lane];
  sums[lane] = 3 * before + in[block_x() * 32 + lane];
  arch::sync_threads();
  if (lane == 0) system ? store_release_system(out, uint32_t(turn + 1)) : store_release(out, uint32_t(turn + 1));
}
template <bool system>
void take_turns(const uint32_t* in, uint32_t* out) {
  rt::launch<turns_kernel<system>>("blocks_in_turn", {.grid = {kTurns}, .threads = 32, .waits = rt::Waits::kForAny}, in,
                                   out);
}
static const Register turns_case({"blocks_in_turn", kTurns * 128, 256, take_turns<false>});
static const Register turns_system_case({"blocks_in_turn_system", kTurns * 128, 256, take_turns<true>});

// Fences and relaxed atomics: the last block to arrive sums the rows of all. out[0] counts, starting at 0xffffffff.
GLOBAL(32, 1) fences_kernel(const uint32_t* in, uint32_t* out) {
  const int lane = thread_index();
  uint32_t* const rows = out + 64;
  rows[block_x() * 32 + lane] = in[block_x() * 32 + lane] ^ 0x55u;
  fence_device();
  arch::sync_threads();
  if (lane != 0) return;
  const uint32_t earlier = atomic_add(out, 1u) + 1;
  if (earlier != kBlocks - 1) return;
  fence_device();
  uint32_t sum = 0;
  for (int i = 0; i < kBlocks * 32; ++i) sum += rows[i];
  out[1] = sum;
}
static const Register fences_case({"fences", kBlocks * 128, 4 * (64 + kBlocks * 32),
                                   [](const uint32_t* in, uint32_t* out) {
                                     rt::launch<fences_kernel>("fences", {.grid = {kBlocks}, .threads = 32}, in, out);
                                   }});

// The same with an acq_rel arrival instead of fences.
GLOBAL(32, 1) last_block_kernel(const uint32_t* in, uint32_t* out) {
  const int lane = thread_index();
  uint32_t* const rows = out + 64;
  store_global(rows + block_x() * 32 + lane, in[block_x() * 32 + lane] ^ 0xaau);
  arch::sync_threads();
  if (lane != 0 || atomic_add_acq_rel(out, 1u) + 1 != kBlocks - 1) return;
  uint32_t sum = 0;
  for (int i = 0; i < kBlocks * 32; ++i) sum += load_global_streaming<uint32_t>(rows + i);
  out[1] = sum;
}
static const Register last_block_case({"last_block", kBlocks * 128, 4 * (64 + kBlocks * 32),
                                       [](const uint32_t* in, uint32_t* out) {
                                         rt::launch<last_block_kernel>("last_block", {.grid = {kBlocks}, .threads = 32},
                                                                       in, out);
                                       }});

CONFORMANCE(unpack, 64, 0, 256, 4 * 256) {
  const int t = thread_index();
  out[t] = float_bits(unpack_low<half_t>(in[t]));
  out[64 + t] = float_bits(unpack_high<half_t>(in[t]));
  out[128 + t] = float_bits(unpack_low<bfloat16_t>(in[t]));
  out[192 + t] = float_bits(unpack_high<bfloat16_t>(in[t]));
}

}  // namespace cuda_ext::conformance
