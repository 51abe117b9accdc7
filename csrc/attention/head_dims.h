// The head dims of attention's kernels on tensor cores. Others are padded with zeros to the next larger one.
#pragma once

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
// Of float32, whose tiles take twice the memory. Backward's does not fit above 128.
constexpr HeadDims kFloat32HeadDims[] = {{64, 64}, {128, 128}, {256, 256}};
constexpr HeadDims kFloat32BackwardHeadDims[] = {{64, 64}, {128, 128}};
constexpr HeadDims kNoHeadDims[] = {{0, 0}};
constexpr int kMaxHeadDim = 256, kMaxFloat32BackwardHeadDim = 128;

// The row for head dim `dim` of a table of tiles.
template <class Row, int rows>
constexpr const Row& tile_of(const Row (&table)[rows], int dim) {
  for (const Row& row : table)
    if (row.dim == dim) return row;
  throw std::logic_error("no tile for this head dim");
}

}  // namespace cuda_ext::attention
