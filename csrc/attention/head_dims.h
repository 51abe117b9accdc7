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
// Of float32, whose tiles take twice the memory. Backward's does not fit above 128.
constexpr HeadDims kFloat32HeadDims[] = {{64, 64}, {128, 128}, {256, 256}};
constexpr HeadDims kFloat32BackwardHeadDims[] = {{64, 64}, {128, 128}};
constexpr HeadDims kNoHeadDims[] = {{0, 0}};
constexpr int kMaxHeadDim = 256;

// Whether tiles must fit in 64 KiB, all that a block has on sm_75.
constexpr bool is_small(int64_t sm_bytes) { return sm_bytes <= 64 << 10; }
// The largest head dims that have kernels, on SMs of so much shared memory: backward keeps keys, values, queries and
// output gradients there, and float32 takes twice as much.
constexpr HeadDims most_head_dims(bool is_float32, bool backward, int64_t sm_bytes) {
  if (is_float32) return is_small(sm_bytes) ? HeadDims{64, 64} : backward ? HeadDims{128, 128} : HeadDims{256, 256};
  return backward && is_small(sm_bytes) ? HeadDims{192, 128} : HeadDims{256, 256};
}
constexpr bool has_kernel(bool is_float32, bool backward, int64_t sm_bytes, int64_t dim, int64_t dim_v) {
  const HeadDims most = most_head_dims(is_float32, backward, sm_bytes);
  return dim <= most.dim && dim_v <= most.dim_v;
}

// The row for head dim `dim` of a table of tiles.
template <class Row, int rows>
constexpr const Row& tile_of(const Row (&table)[rows], int dim) {
  for (const Row& row : table)
    if (row.dim == dim) return row;
  throw std::logic_error("no tile for this head dim");
}

}  // namespace cuda_ext::attention
