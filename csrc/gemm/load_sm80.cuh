// Copies of operand tiles from global to shared memory.
#pragma once

#include "gemm/plan_sm80.h"
#include "tile/copy_chunk.cuh"
#include "tile/operand_tile.cuh"

namespace cuda_ext::sm80 {

using namespace tile;

// Copies an operand, one k tile after the other. A thread copies the same chunk of every kLinesPerPass-th line.
template <class Tile, int threads>
class TileCopy {
  static constexpr int kBytesOfElement = sizeof(typename Tile::Element);
  static constexpr int kLinesPerPass = threads / Tile::kChunks;
  static constexpr int kPasses = Tile::kLines / kLinesPerPass;
  static_assert(kLinesPerPass * kPasses == Tile::kLines);
  static_assert(kLinesPerPass % (!Tile::kKMajor && kBytesOfElement == 4 ? 4 : 8) == 0,
                "all passes must permute chunks alike");
  static_assert(!Tile::kKMajor || kPasses % 2 == 0, "a pass must lie in one half of the tile");

 public:
  // The tile at [first, first + kExtent) of an operand of `size` along the extent. With gate and up the operand has 2
  // size, and the second half of the tile begins at first + size.
  DEVICE TileCopy(const void* data, const ByteStrides& strides, int64_t first, int64_t size, bool gate_up)
      : strides_(strides) {
    const int line = arch::thread_index() / Tile::kChunks, chunk = arch::thread_index() % Tile::kChunks;
    const int half = gate_up ? Tile::kExtent / 2 : Tile::kExtent;
    const int inside = size - first < half ? int(size - first) : half;  // of each half
    inside_ = inside == half;
    offset_ = Tile::offset(line, chunk);
    source_ = static_cast<const char*>(data);
    if constexpr (Tile::kKMajor) {
      source_ += (first + line) * strides.line + chunk * 16;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int index = line + pass * kLinesPerPass;
        if ((index < half ? index : index - half) < inside) valid_ |= 1 << pass;
      }
    } else {
      const int index = chunk * Tile::kElements;
      const bool upper = index >= half;
      source_ += line * strides.line + (first + index + (upper ? size - half : 0)) * kBytesOfElement;
      valid_ = bytes_of((upper ? inside + half : inside) - index);
    }
  }

  DEVICE void advance(int64_t bytes) { source_ += bytes; }

  // Whether all chunks of a k tile of full depth are inside the matrix and 16-byte aligned; the same in all threads.
  DEVICE bool is_whole() const { return strides_.vector_bytes == 16 && inside_; }
  // `copy` for such a k tile, without branches.
  DEVICE void copy_whole(arch::SharedAddress tile) {
    copy_by<16, true>(tile, Tile::kDepth);
    source_ += strides_.k_tile;
  }

  // Starts copying a k tile, of whose depth `left` is inside the matrix, and advances to the next. `aligned`:
  // vector_bytes is known to be 16.
  template <bool aligned = false>
  DEVICE void copy(arch::SharedAddress tile, int left) {
    if (aligned || strides_.vector_bytes == 16)
      copy_by<16>(tile, left);
    else if (kBytesOfElement == 4 || strides_.vector_bytes == 4)
      copy_by<4>(tile, left);
    else
      copy_by<2>(tile, left);
    source_ += strides_.k_tile;
  }

 private:
  DEVICE static int bytes_of(int elements) {
    return (elements < 0 ? 0 : elements < Tile::kElements ? elements : Tile::kElements) * kBytesOfElement;
  }

  // The k index of the chunk's first element (kKMajor), or of the first line. Recomputed to save a register.
  DEVICE static int begin() {
    const int thread = arch::opaque_thread_index();
    return Tile::kKMajor ? thread % Tile::kChunks * Tile::kElements : thread / Tile::kChunks;
  }

  template <int vector_bytes, bool all_inside = false>
  DEVICE void copy_by(arch::SharedAddress tile, int left) const {
    const int tail = Tile::kKMajor ? bytes_of(left - begin()) : 0;
    const char* from = source_;
    tile += offset_;
#pragma unroll(vector_bytes == 16 ? kPasses : 1)  // otherwise registers matter more than speed
    for (int pass = 0; pass < kPasses; ++pass) {
      int bytes;
      if constexpr (all_inside)
        bytes = 16;
      else if constexpr (Tile::kKMajor)
        bytes = valid_ >> pass & 1 ? tail : 0;
      else
        bytes = begin() + pass * kLinesPerPass < left ? valid_ : 0;
      copy_chunk<vector_bytes>(tile + pass * kLinesPerPass * Tile::kLineBytes, from, bytes);
      from += strides_.pass;
      if (Tile::kKMajor && pass + 1 == kPasses / 2) from += strides_.upper;
    }
  }

  const ByteStrides& strides_;
  const char* source_;  // this thread's first chunk of the next k tile
  bool inside_;         // the whole extent is inside the matrix; the same in all threads
  int offset_;          // of this thread's first chunk, in a tile in shared memory
  // kKMajor: a bit for each pass whose line is inside the matrix. Otherwise: bytes of the chunk inside the matrix.
  int valid_ = 0;
};

}  // namespace cuda_ext::sm80
