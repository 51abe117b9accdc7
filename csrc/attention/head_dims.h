// The head dims of attention's kernels on tensor cores. Others are padded with zeros to the next larger one.
#pragma once

#include <cstdint>
#include <stdexcept>

namespace cuda_ext::attention {

struct HeadDims {
  int dim;    // of query and key; the key of a kernel
  int dim_v;  // of value and output
};

// By size. A new one also has a row in each table of tiles, its instantiations, and an entry in HEAD_DIMS of
// cuda_ext/_build.py.
constexpr HeadDims kHeadDims[] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}};
constexpr HeadDims kCacheHeadDims[] = {{64, 64}, {128, 128}, {256, 256}};  // of kernels that read a cache
constexpr int kMaxHeadDim = 256;

// Whether tiles must fit in 64 KiB, all that a block has on sm_75. There the largest head dims have no backward kernel:
// keys, values, queries and output gradients alone would take that much.
constexpr bool is_small(int64_t sm_bytes) { return sm_bytes <= 64 << 10; }
constexpr HeadDims kMaxSmallBackward = {192, 128};
constexpr bool has_backward_kernel(int64_t sm_bytes, int64_t dim, int64_t dim_v) {
  return !is_small(sm_bytes) || (dim <= kMaxSmallBackward.dim && dim_v <= kMaxSmallBackward.dim_v);
}

// The row for head dim `dim` of a table of tiles.
template <class Row, int rows>
constexpr const Row& tile_of(const Row (&table)[rows], int dim) {
  for (const Row& row : table)
    if (row.dim == dim) return row;
  throw std::logic_error("no tile for this head dim");
}

}  // namespace cuda_ext::attention
