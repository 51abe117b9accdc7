// Grouped products as parameters of the kernels.
#pragma once

#include "ops/product.h"

namespace cuda_ext {

// A call of grouped_mm, and the tensors to which its parameters refer. The output is not in them.
struct GroupedCall {
  GemmParams params;
  Tensor a, b, ends, indices;
  Sizes sizes;  // of the output
  at::ScalarType type;
};

// out = activation(z); gated, of the halves of z's columns: activation(gate) * up.
struct GroupedEpilogue {
  Activation activation = Activation::kNone;
  bool gated = false;
};

// Checks the arguments. for_gpu: operands are copied if CUDA kernels cannot read them, or gather their rows; else
// `offs` and `indices` are checked, too.
GroupedCall describe_grouped(const char* op, const Tensor& a, const Tensor& b, const Tensor& offs,
                             const OptionalTensor& bias, const OptionalTensor& indices, const GroupedEpilogue& epilogue,
                             OptionalType out_dtype, bool for_gpu);

// Contiguous, in int32, as kernels read ends and indices; of int64 those out of range stay so.
Tensor to_int32(const Tensor& numbers);

// Checks ends of groups, in the memory of the host, of a dim of this size.
void check_group_ends(const char* op, const Tensor& ends, int64_t size);

Tensor call_grouped_mm(const Tensor& a, const Tensor& b, const Tensor& offs, const OptionalTensor& bias = {},
                       OptionalType out_dtype = {}, const OptionalTensor& indices = {});

}  // namespace cuda_ext
