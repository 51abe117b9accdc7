// What the warp-specialised kernels for sm_90a share: consumers, the position in a ring of stages, and tiles in the
// 128-byte swizzle of TMA and wgmma.
#pragma once

#include "arch/mma.cuh"
#include "arch/tma.cuh"
#include "arch/wgmma.cuh"

namespace cuda_ext::tile {

using arch::Barrier;
using arch::Major;
using arch::SharedAddress;

constexpr int kWarpgroup = 128;     // threads
constexpr int kWarpgroupRows = 64;  // of a wgmma
constexpr int kPieceBytes = 128;    // of a line: what one box of TMA has of it

// The threads of a consumer: warpgroup 0 is the producer.
struct ConsumerThreads {
  static constexpr int kThreads = kWarpgroup;
  // Opaque, because accumulators leave no registers for what could be computed before the products.
  DEVICE static int consumer() { return arch::opaque_thread_index() / kWarpgroup - 1; }
  DEVICE static int index() { return arch::opaque_thread_index() % kWarpgroup; }
  DEVICE static bool is_first_lane() { return arch::opaque_thread_index() % arch::kWarpSize == 0; }
  DEVICE static void sync(Site site = {}) { arch::named_barrier_sync(1 + consumer(), kThreads, site); }
  // One arrival for all of them.
  DEVICE static void arrive(Barrier& barrier, Site site = {}) {
    if (index() == 0) arch::barrier_arrive(barrier, site);
  }
};

// A stage of a ring and the parity of its phase.
template <int stages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  DEVICE void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  DEVICE void skip(int count) {
    stage += count;
    parity ^= uint32_t(stage / stages) & 1;
    stage %= stages;
  }
};

// A tile of (lines, columns) 16-bit elements, in pieces of 64 columns: (pieces, lines, 64), swizzled. If the columns do
// not fill the last piece, the tile has more of them in memory.
template <int lines, int columns>
struct PiecesTile {
  static constexpr int kElements = kPieceBytes / 2;  // of a line of a piece
  static constexpr int kColumns = columns;
  static constexpr int kPieces = (columns + kElements - 1) / kElements;
  static constexpr int kPieceSize = lines * kPieceBytes;
  static constexpr int kBytes = kPieces * kPieceSize;
  static_assert(lines % 8 == 0);

  // The tile as an operand of wgmma whose k runs along the columns (kK) or along the lines (kMn).
  DEVICE static uint64_t descriptor(SharedAddress tile, Major major) {
    return arch::make_descriptor(tile, major == Major::kK ? 0 : kPieceSize, 8 * kPieceBytes, arch::Swizzle::k128);
  }
  // Bytes from the first to the `step`-th 16 indices of k.
  HOST_DEVICE static constexpr int step_bytes(int step, Major major) {
    return major == Major::kK ? step / 4 * kPieceSize + step % 4 * 32 : step * 16 * kPieceBytes;
  }
  // The address of 8 columns of a line.
  DEVICE static SharedAddress chunk(SharedAddress tile, int line, int chunk) {
    return tile + chunk / 8 * kPieceSize + line * kPieceBytes + ((chunk ^ line) % 8) * 16;
  }
};

}  // namespace cuda_ext::tile
