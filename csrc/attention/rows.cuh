// Rows of the operands in global memory, and their copies to shared memory.
#pragma once

#include "arch/async_copy.cuh"
#include "attention/mask.cuh"
#include "tile/operand_tile.cuh"

namespace cuda_ext::sm80 {

// Index of a row within lse, which is also its number for dropout: of a head's first, and of any.
DEVICE int64_t first_lse_row(const AttentionParams& p, int q_begin, int batch, int head) {
  return p.cu_seqlens_q != nullptr ? head * p.total_q + q_begin : (batch * p.heads + head) * p.seqlen_q;
}
DEVICE int64_t lse_row(const AttentionParams& p, const Sequence& s, int batch, int head, int query) {
  return first_lse_row(p, s.q_begin, batch, head) + query;
}

template <class T>
DEVICE T* row_of(const HeadsView& view, int batch, int64_t row, int head) {
  return static_cast<T*>(view.data) + batch * view.batch_stride + row * view.seq_stride + head * view.head_stride;
}

// Starts copying a tile whose line i is at row(i), `width` elements long. Lines from `count` on, and what is beyond the
// width, become zeros. Unrolled, the addresses of all lines take registers.
template <class Tile, int threads, bool unrolled, class Row>
DEVICE void copy_lines(arch::SharedAddress tile, int count, int width, const Row& row,
                       int thread = arch::thread_index()) {
  constexpr int kCopies = Tile::kLines * Tile::kChunks / threads;
  static_assert(kCopies * threads == Tile::kLines * Tile::kChunks);
#pragma unroll(unrolled ? kCopies : 1)
  for (int i = 0; i < kCopies; ++i) {
    const int index = i * threads + thread;
    const int line = index / Tile::kChunks, chunk = index % Tile::kChunks;
    const bool inside = line < count && chunk * Tile::kElements < width;
    // Where nothing is read the address does not matter.
    arch::cp_async<16>(tile + Tile::offset(line, chunk), row(line) + chunk * Tile::kElements, inside ? 16 : 0);
  }
}

// Copies of the same operand's tiles, from the last to the first. A thread has the same chunk of every so many lines;
// the steps from one to the next reach the kernel as constants, which take no registers. Not even what comes of the
// thread's index has to be kept, if the index is opaque.
template <class Tile, int threads, bool unrolled = true>
class TileCopies {
  static constexpr bool kOneChunk = threads % Tile::kChunks == 0;
  static constexpr int kLinesPerPass = kOneChunk ? threads / Tile::kChunks : 1;

 public:
  // Bytes from a thread's line to its next, and from a tile to the next.
  static void set_steps(int64_t stride, int64_t& pass, int64_t& tile) {
    constexpr int64_t kBytes = sizeof(typename Tile::Element);
    pass = kLinesPerPass * stride * kBytes;
    tile = Tile::kLines * stride * kBytes;
  }

  // Of lines `stride` elements apart; `tile` is copied first.
  DEVICE TileCopies(const typename Tile::Element* lines, int64_t stride, int tile, int thread = arch::thread_index())
      : thread_(thread) {
    const int64_t line = int64_t(tile) * Tile::kLines + (kOneChunk ? thread / Tile::kChunks : 0);
    source_ = reinterpret_cast<const char*>(lines + line * stride) + (kOneChunk ? thread % Tile::kChunks * 16 : 0);
  }

  // `count` lines, or all if that is more, of `width` elements.
  DEVICE void copy_next(arch::SharedAddress tile, int count, int width, const int64_t& pass, const int64_t& tile_step) {
    if constexpr (kOneChunk) {
      const int chunk = thread_ % Tile::kChunks;
      const int left = chunk * Tile::kElements < width ? count : 0;
      const char* source = source_;
#pragma unroll
      for (int i = 0; i < Tile::kLines / kLinesPerPass; ++i) {
        const int line = thread_ / Tile::kChunks + i * kLinesPerPass;
        arch::cp_async<16>(tile + Tile::offset(line, chunk), source, line < left ? 16 : 0);
        source += pass;
      }
    } else {
      copy_lines<Tile, threads, unrolled>(
          tile, count, width,
          [&](int i) { return reinterpret_cast<const typename Tile::Element*>(source_ + i * pass); }, thread_);
    }
    source_ -= tile_step;
  }

 private:
  int thread_;
  const char* source_;  // this thread's first chunk of the next tile
};

}  // namespace cuda_ext::sm80
