// The rows of varlen tensors after the last sequence, which no other kernel of attention writes.
//
// Problem        Varlen tensors may have more rows than cu_seqlens counts: a captured graph has fixed shapes. Such rows
//                of outputs and gradients are 0, of lse -inf. How many there are is known on the device only; usually
//                there are none.
// Grid           blocks x tensors. A block has every grid_x-th of the rows. No shared memory and no barriers.
#pragma once

#include <cmath>

#include "arch/memory.cuh"
#include "attention/rows.cuh"

namespace cuda_ext::attention {

// A tensor (rows, heads, width) of two-byte elements whose rows from *first on are to be filled.
struct Tail {
  HeadsView to;
  const int32_t* first = nullptr;
  int64_t rows = 0;
  int heads = 0, width = 0;
  float* lse = nullptr;  // (heads, rows); null: none
};

struct Tails {
  static constexpr int kMost = 3;
  Tail of[kMost];
};

template <int threads>
GLOBAL(threads, 1)
attention_tail(GRID_CONSTANT Tails tails) {
  const Tail& tail = tails.of[arch::block_y()];
  const int first = arch::load_global<int32_t>(tail.first), chunks = tail.width / 8;
  for (int64_t row = first + arch::block_x(); row < tail.rows; row += arch::grid_x()) {
    for (int i = arch::thread_index(); i < tail.heads * chunks; i += threads)
      arch::store_global(row_of<half_t>(tail.to, 0, row, i / chunks) + i % chunks * 8, arch::Words4{});
    for (int head = arch::thread_index(); tail.lse != nullptr && head < tail.heads; head += threads)
      arch::store_global(tail.lse + head * tail.rows + row, -INFINITY);
  }
}

}  // namespace cuda_ext::attention
