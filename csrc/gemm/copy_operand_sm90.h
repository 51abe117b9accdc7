// The launcher of a copy that lets TMA read an operand.
#pragma once

#include "gemm/copies_sm90.h"

namespace cuda_ext::sm90 {

// Makes the copy on `stream`, an rt::Stream. What is behind the elements of a line is not written.
void launch_copy_operand(const OperandCopy& copy, void* stream);

}  // namespace cuda_ext::sm90
