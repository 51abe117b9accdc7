// The small kernels around a product: one before it if blocks divide k, one after it if there are column sums.
#pragma once

#include "gemm/gemm.h"

namespace cuda_ext {

// Resets the counters by which the last block of a tile to arrive recognises itself. On `stream`, an rt::Stream.
void launch_clear_arrivals(uint32_t* arrivals, int count, void* stream);

// out (width,) = the column sums of block_sums (blocks, width).
void launch_add_block_sums(const float* block_sums, int64_t blocks, int64_t width, const Output& out, void* stream);

}  // namespace cuda_ext
