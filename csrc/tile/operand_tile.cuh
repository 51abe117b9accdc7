// Tiles of 16-byte chunks in shared memory, and loads of mma.sync fragments from them.
#pragma once

#include "arch/mma.cuh"

namespace cuda_ext::tile {

enum class Side { kA, kB };

// The address at which a lane begins to read a tile, as a part that depends on the lane and a constant offset (a
// multiple of 128). Tiles of the same shape share the register of the former; the latter becomes part of the
// instructions.
struct LaneAddress {
  arch::SharedAddress lane;
  int offset;
  DEVICE arch::SharedAddress operator^(int bits) const { return (lane ^ bits) + offset; }
};

// In which order the indices along k of a tile become those of an mma; both operands need the same. It matters only for
// four-byte elements, whose lanes read k = t and t + 4 (arch/mma.cuh).
enum class OrderOfK {
  kPlain,
  kPairs,  // indices 2t and 2t + 1: those of a lane in the result of another mma
};

// A tile of an operand in shared memory: (kLines, kChunks) chunks of 16 bytes. Lines run along the contiguous dim,
// which is k if `k_major`. The chunks of a line are permuted, so that neither copies nor fragment loads have bank
// conflicts. With kPairs the permutation does not depend on which dim is contiguous.
template <class T, Side side, bool k_major, int extent, int depth, OrderOfK order = OrderOfK::kPlain>
struct OperandTile {
  using Element = T;
  static constexpr bool kKMajor = k_major;
  static constexpr int kExtent = extent;
  static constexpr int kDepth = depth;
  static constexpr int kElements = 16 / sizeof(T);  // of a chunk
  static constexpr int kLines = k_major ? extent : depth;
  static constexpr int kChunks = (k_major ? depth : extent) / kElements;  // of a line
  static constexpr int kLineBytes = kChunks * 16;
  static constexpr int kBytes = kLines * kLineBytes;
  static constexpr int kStep = 32 / sizeof(T);  // depth of an mma
  // Chunks of a group, within which they are permuted.
  static constexpr int kGroup = kChunks % 8 == 0 ? 8 : 4;
  static constexpr int kGroupBytes = kGroup * 16;
  static_assert(kChunks % kGroup == 0);
  // Whether a lane's two indices along k are adjacent, in a line or in two.
  static constexpr bool kPairs = sizeof(T) == 4 && order == OrderOfK::kPairs;
  static constexpr bool kPairsInLine = kPairs && k_major, kPairsOfLines = kPairs && !k_major;
  static_assert(!kPairsInLine || side == Side::kA, "no kernel needs it");

  DEVICE static int offset(int line, int chunk) {
    if constexpr (kGroup == 4)  // lines begin in either half of the banks, and ldmatrix reads one chunk of each of 8
      chunk ^= line >> 1 & 3;
    else if constexpr (!k_major && sizeof(T) == 4 && !kPairsOfLines)  // plain loads of 2 chunks of each of 4 lines
      chunk ^= (line & 3) << 1;
    else  // one chunk of each of 8 lines, or with kPairsOfLines 2 of every other one
      chunk ^= line & 7;
    return line * kLineBytes + chunk * 16;
  }

  // A fragment is 16 indices of the extent by 32 bytes along k, loaded as 4 quadrants of 8 x 16 bytes. Quadrants of A
  // (one fragment of mma) are ordered along the extent first, those of B (two fragments of mma) along k first, so that
  // each mma fragment is in consecutive registers.

  // The offset at which this lane begins to read the fragments of a warp whose part of the extent begins at `first`.
  DEVICE static int lane_offset(int first, int lane = arch::lane_index()) {
    // Lanes 8q to 8q + 7 provide the row addresses of quadrant q to ldmatrix.
    const int along_extent = side == Side::kA ? lane / 8 % 2 : lane / 16;
    const int along_k = side == Side::kA ? lane / 16 : lane / 8 % 2;
    if constexpr (kPairsInLine)
      return offset(first + lane / 4, lane % 4 / 2) + lane % 2 * 8;
    else if constexpr (k_major)
      return offset(first + lane % 8 + along_extent * 8, along_k);
    else if constexpr (sizeof(T) == 2)
      return offset(lane % 8 + along_k * 8, first / kElements + along_extent);
    else
      return offset(lane % 4 * (kPairsOfLines ? 2 : 1), first / kElements + lane / 16) + lane / 4 % 4 * 4;
  }

  // The address 2 `steps` chunks after `address`, where a group begins. The permutation is an exclusive or.
  // Within a group, to whose size lines are aligned, so is a step to another chunk, with a constant.
  template <class Address>
  DEVICE static auto along_line(Address address, int steps) {
    return (address ^ steps % (kGroup / 2) * 32) + steps / (kGroup / 2) * kGroupBytes;
  }

  // Loads fragment `i` of the warp in step `step`, from `address` = tile + lane_offset (possibly a LaneAddress).
  template <class Address>
  DEVICE static void load_fragment(uint32_t (&m)[4], Address address, int i, int step) {
    if constexpr (kPairsInLine) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto pair = arch::load_shared<arch::Words2>(along_line(address, step) + (i * 16 + half * 8) * kLineBytes);
        m[half] = pair.data[0];
        m[2 + half] = pair.data[1];
      }
    } else if constexpr (k_major) {
      arch::ldmatrix<4>(m, along_line(address, step) + i * 16 * kLineBytes);
    } else if constexpr (sizeof(T) == 2) {
      arch::ldmatrix<4, true>(m, along_line(address, i) + step * kStep * kLineBytes);
    } else {  // ldmatrix transposes 16-bit elements only
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int along_extent = side == Side::kA ? q % 2 : q / 2, along_k = side == Side::kA ? q / 2 : q % 2;
        // The next line is permuted like this one, but for the last bit.
        const int permuted = kPairsOfLines && kGroup == 8 ? along_k * 16 : 0;
        m[q] = arch::load_shared<uint32_t>((address ^ (i % 2 * 64 + along_extent * 32 + permuted)) + i / 2 * 128 +
                                           (step * kStep + along_k * (kPairsOfLines ? 1 : 4)) * kLineBytes);
      }
    }
  }
};

}  // namespace cuda_ext::tile
