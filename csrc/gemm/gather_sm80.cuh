// Copies of operand tiles as those of load_sm80.cuh, whose lines are rows of the operand at indices in memory. Lines
// outside of the group, or whose index is not that of a row, are 0.
#pragma once

#include "gemm/groups.cuh"
#include "gemm/load_sm80.cuh"

namespace cuda_ext::sm80 {

// What both copies have in common: the rows of a thread's lines, of which each pass has one.
template <class Tile, int threads>
class GatheredCopy {
 protected:
  static constexpr int kLinesPerPass = threads / Tile::kChunks;
  static constexpr int kPasses = Tile::kLines / kLinesPerPass;
  static_assert(kLinesPerPass * kPasses == Tile::kLines && kLinesPerPass % 8 == 0, "all passes must permute alike");

  DEVICE explicit GatheredCopy(const ByteStrides& strides)
      : strides_(strides), offset_(Tile::offset(line(), chunk())) {}

  // Recomputed to save registers.
  DEVICE static int line() { return arch::opaque_thread_index() / Tile::kChunks; }
  DEVICE static int chunk() { return arch::opaque_thread_index() % Tile::kChunks; }
  DEVICE static int bytes_of(int64_t elements) {
    const int64_t inside = elements < 0 ? 0 : elements < Tile::kElements ? elements : Tile::kElements;
    return int(inside * int64_t(sizeof(typename Tile::Element)));
  }

  // Sets the rows of the lines from `first` on.
  DEVICE void find_rows(const Groups& groups, int first, int end) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
      rows_[pass] = gathered_row(groups, first + line() + pass * kLinesPerPass, end);
  }

  // Copies `bytes` of this thread's chunk of each line, from `source` in the first row.
  DEVICE void copy_chunks(arch::SharedAddress tile, const char* source, int bytes, bool aligned) const {
    if (aligned || strides_.vector_bytes == 16)
      copy_by<16>(tile, source, bytes);
    else if (strides_.vector_bytes == 4)
      copy_by<4>(tile, source, bytes);
    else
      copy_by<2>(tile, source, bytes);
  }

  const ByteStrides& strides_;
  int offset_;  // of this thread's first chunk, in a tile in shared memory

 private:
  template <int vector_bytes>
  DEVICE void copy_by(arch::SharedAddress tile, const char* source, int bytes) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
      copy_chunk<vector_bytes>(tile + offset_ + pass * kLinesPerPass * Tile::kLineBytes,
                               source + rows_[pass] * strides_.line, rows_[pass] < 0 ? 0 : bytes);
  }

  int rows_[kPasses];
};

// Lines are rows of the product: the same in all k tiles.
template <class Tile, int threads>
class GatheredRowsCopy : GatheredCopy<Tile, threads> {
  using Base = GatheredCopy<Tile, threads>;
  static_assert(Tile::kKMajor);

 public:
  // Rows from `first` on, those of a group before `end`.
  DEVICE GatheredRowsCopy(const GemmParams& params, const ByteStrides& strides, int first, int end)
      : Base(strides), source_(static_cast<const char*>(params.a.data) + Base::chunk() * 16) {
    Base::find_rows(params.groups, first, end);
  }

  DEVICE void advance(int64_t bytes) { source_ += bytes; }
  DEVICE bool is_whole() const { return Base::strides_.vector_bytes == 16; }
  DEVICE void copy_whole(arch::SharedAddress tile) {
    Base::copy_chunks(tile, source_, 16, true);
    source_ += Base::strides_.k_tile;
  }
  DEVICE void copy(arch::SharedAddress tile, int left) {
    Base::copy_chunks(tile, source_, Base::bytes_of(left - Base::chunk() * Tile::kElements), false);
    source_ += Base::strides_.k_tile;
  }

 private:
  const char* source_;  // this thread's chunk of row 0, in the next k tile
};

// Lines are terms. The rows of the next k tile are found while one is copied.
template <class Tile, int threads>
class GatheredTermsCopy : GatheredCopy<Tile, threads> {
  using Base = GatheredCopy<Tile, threads>;
  static_assert(!Tile::kKMajor);

 public:
  // Columns from `first` on, and the terms of a group.
  DEVICE GatheredTermsCopy(const GemmParams& params, const ByteStrides& strides, int64_t first, int begin, int end)
      : Base(strides),
        groups_(params.groups),
        source_(static_cast<const char*>(params.b.data) +
                (first + Base::chunk() * Tile::kElements) * int64_t(sizeof(typename Tile::Element))),
        bytes_(Base::bytes_of(params.n - first - Base::chunk() * Tile::kElements)),
        inside_(params.n - first >= Tile::kExtent),
        next_(begin),
        end_(end) {
    Base::find_rows(groups_, next_, end_);
  }

  DEVICE void advance(int64_t) {}  // it begins with the group
  DEVICE bool is_whole() const { return Base::strides_.vector_bytes == 16 && inside_; }
  DEVICE void copy_whole(arch::SharedAddress tile) {
    Base::copy_chunks(tile, source_, 16, true);
    find_next();
  }
  DEVICE void copy(arch::SharedAddress tile, int) {
    Base::copy_chunks(tile, source_, bytes_, false);
    find_next();
  }

 private:
  DEVICE void find_next() {
    next_ += Tile::kDepth;
    Base::find_rows(groups_, next_, end_);
  }

  const Groups& groups_;
  const char* source_;  // this thread's chunk of row 0
  int bytes_;           // of it inside the matrix
  bool inside_;         // the whole extent is inside the matrix; the same in all threads
  int next_, end_;      // terms: of the next k tile, and of the group
};

}  // namespace cuda_ext::sm80
