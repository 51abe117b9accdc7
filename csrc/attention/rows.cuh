// Rows of the operands in global memory, and copies of them to shared memory.
#pragma once

#include "arch/async_copy.cuh"
#include "attention/mask.cuh"
#include "tile/operand_tile.cuh"

namespace cuda_ext::attention {

using namespace tile;

// The index in lse of a head's first row, and of any row.
DEVICE int64_t first_lse_row(const AttentionParams& p, int q_begin, int batch, int head) {
  return p.cu_seqlens_q != nullptr ? head * p.total_q + q_begin : (batch * p.heads + head) * p.seqlen_q;
}
DEVICE int64_t lse_row(const AttentionParams& p, const Sequence& s, int batch, int head, int query) {
  return first_lse_row(p, s.q_begin, batch, head) + query;
}

// The number of a head's first row for dropout. With a branch, because sums of products by `heads` and `rows` of zero
// for what is absent take more registers.
DEVICE int64_t first_dropout_row(const AttentionParams& p, int q_begin, int batch, int head) {
  const DropoutCounters& of = p.dropout_counters;
  return p.cu_seqlens_q != nullptr ? head * of.rows + q_begin : (batch * of.heads + head) * of.rows;
}

template <class T>
DEVICE T* row_of(const HeadsView& view, int batch, int64_t row, int head) {
  return static_cast<T*>(view.data) + batch * view.batch_stride + row * view.seq_stride + head * view.head_stride;
}

// Starts copying a tile; row(i) points to line i, of `width` elements. Lines from `count` on and elements past the
// width are filled with zeros.
template <class Tile, int threads, class Row>
DEVICE void copy_lines(arch::SharedAddress tile, int count, int width, const Row& row) {
  constexpr int kCopies = Tile::kLines * Tile::kChunks / threads;
  static_assert(kCopies * threads == Tile::kLines * Tile::kChunks);
  const int thread = arch::opaque_thread_index();
#pragma unroll 1
  for (int i = 0; i < kCopies; ++i) {
    const int index = i * threads + thread;
    const int line = index / Tile::kChunks, chunk = index % Tile::kChunks;
    const bool inside = line < count && chunk * Tile::kElements < width;
    // If nothing is read, the address is not used.
    arch::cp_async<16>(tile + Tile::offset(line, chunk), row(line) + chunk * Tile::kElements, inside ? 16 : 0);
  }
}

// The same for equidistant lines, with cheaper addresses: a thread copies the same chunks of every kLinesPerPass-th
// line.
template <class Tile, int threads>
struct LinesCopy {
  // Chunks of a line that threads copy side by side.
  static constexpr int kWidth = threads % Tile::kChunks == 0 ? Tile::kChunks : Tile::kGroup;
  static constexpr int kLinesPerPass = threads / kWidth;
  static_assert(Tile::kLines % kLinesPerPass == 0 && Tile::kChunks % kWidth == 0);

  // Bytes between the lines that a thread copies, for lines `stride` elements apart. Kernels receive it as a parameter,
  // i.e. a constant that takes no registers.
  static int64_t pass(int64_t stride) { return kLinesPerPass * stride * int64_t(sizeof(typename Tile::Element)); }

  // Copies the lines that begin at `lines`, at most `count`.
  DEVICE static void start(arch::SharedAddress tile, const typename Tile::Element* lines, int64_t stride,
                           const int64_t& pass, int count, int width) {
    const int thread = arch::opaque_thread_index();
    const int chunk = thread % kWidth, first = thread / kWidth;
#pragma unroll
    for (int part = 0; part < Tile::kChunks; part += kWidth) {
      const int left = (part + chunk) * Tile::kElements < width ? count : 0;
      const char* source = reinterpret_cast<const char*>(lines + first * stride) + (part + chunk) * 16;
#pragma unroll
      for (int line = 0; line < Tile::kLines; line += kLinesPerPass) {
        arch::cp_async<16>(tile + Tile::offset(first + line, part + chunk), source, first + line < left ? 16 : 0);
        source += pass;
      }
    }
  }
};

}  // namespace cuda_ext::attention
