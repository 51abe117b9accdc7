// The copy of an operand that TMA cannot read, and its launcher.
#pragma once

#include "gemm/config_sm90.h"

namespace cuda_ext::sm90 {

// A copy of an operand: `lines` lines of `length` adjacent elements, for each of the batches.
struct OperandCopy {
  static constexpr int kMaxDims = 3;  // the outer dims of a tensor map

  const void* from = nullptr;
  void* to = nullptr;
  int element_bytes = 0;
  int64_t lines = 0, length = 0;
  int64_t from_line = 0, from_element = 0;  // strides in elements
  int64_t to_line = 0;
  int dims = 0;
  int64_t sizes[kMaxDims] = {}, from_strides[kMaxDims] = {};  // of batches, the innermost first

  HOST_DEVICE int64_t batches() const {
    int64_t count = 1;
    for (int d = 0; d < dims; ++d) count *= sizes[d];
    return count;
  }
  HOST_DEVICE int64_t bytes() const { return batches() * lines * to_line * element_bytes; }
};

// Makes the copy on `stream`, an rt::Stream. What is behind the elements of a line is not written.
void launch_copy_operand(const OperandCopy& copy, void* stream);

}  // namespace cuda_ext::sm90
