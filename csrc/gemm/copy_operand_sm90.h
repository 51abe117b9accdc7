// Copies of operands that TMA cannot read where they are: with lines that begin at multiples of 16 bytes, and along k
// where wgmma needs that. No header of CUDA is needed.
#pragma once

#include "gemm/tma_operands_sm90.h"

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

// The copies that the kernel needs; none if it can run without them, or not at all.
inline Copies copies_for(const GemmParams& params, bool tf32) {
  Copies copies;
  const Side sides[] = {side_a(params), side_b(params)};
  bool* const copied[] = {&copies.a, &copies.b};
  bool* const k_major[] = {&copies.a_k_major, &copies.b_k_major};
  for (int i = 0; i < 2; ++i) {
    OperandLoads loads;
    const bool lacks_k = !sides[i].k_major && (tf32 || (i == 1 && upper_is_misaligned(params)));
    *k_major[i] = sides[i].k_major || lacks_k;
    *copied[i] = lacks_k || !tma_refusal(params, sides[i], loads).empty();
  }
  return copies;
}

// The copy of an operand, without its place; empty if it has more batch dims than a tensor map. The strides of
// `operand` and of its reduced dims become those of the copy.
inline OperandCopy copy_operand(const GemmParams& params, const Side& side, bool k_major, Operand& operand,
                                int64_t (&reduced_strides)[kMaxBatchDims]) {
  OperandCopy copy;
  const bool is_a = side.operand == &params.a;
  const int64_t k_stride = is_a ? operand.column_stride : operand.row_stride;
  const int64_t other_stride = is_a ? operand.row_stride : operand.column_stride;
  copy.from = operand.data;
  copy.element_bytes = int(size_of(operand.dtype));
  copy.lines = k_major ? side.lines : params.k;
  copy.length = k_major ? params.k : side.lines;
  copy.from_line = k_major ? other_stride : k_stride;
  copy.from_element = k_major ? k_stride : other_stride;
  const int64_t unit = 16 / copy.element_bytes;
  copy.to_line = ceil_div(copy.length, unit) * unit;
  int64_t stride = copy.lines * copy.to_line;
  const auto add = [&](int dims, const int64_t* sizes, int64_t* strides) {
    for (int d = 0; d < dims; ++d) {
      if (sizes[d] == 1 || strides[d] == 0) continue;
      if (copy.dims == OperandCopy::kMaxDims) return false;
      copy.sizes[copy.dims] = sizes[d];
      copy.from_strides[copy.dims++] = strides[d];
      strides[d] = stride;
      stride *= sizes[d];
    }
    return true;
  };
  if (!add(params.batch_dims, params.batch_sizes, operand.batch_strides) ||
      !add(params.reduced_dims, params.reduced_sizes, reduced_strides))
    return {};
  (k_major == is_a ? operand.row_stride : operand.column_stride) = copy.to_line;
  (k_major == is_a ? operand.column_stride : operand.row_stride) = 1;
  return copy;
}

// The product with its copied operands, in arrays of `cursor`. `list` has the copies to make before it; it is empty if
// one is impossible.
struct CopiedProduct {
  GemmParams params;
  OperandCopy list[2] = {};
  int count = 0;
  int64_t bytes = 0;
};
inline CopiedProduct with_copies(const GemmParams& params, const Copies& copies, WorkspaceCursor& cursor) {
  CopiedProduct product{.params = params};
  const auto add = [&](bool copied, const Side& side, bool k_major, Operand& operand, auto& reduced_strides) {
    if (!copied) return true;
    OperandCopy copy = copy_operand(params, side, k_major, operand, reduced_strides);
    if (copy.lines == 0) return false;
    unsigned char* to;
    cursor.allocate(to, copy.bytes());
    operand.data = copy.to = to;
    product.bytes += copy.bytes();
    product.list[product.count++] = copy;
    return true;
  };
  GemmParams& p = product.params;
  if (!add(copies.a, side_a(params), copies.a_k_major, p.a, p.reduced_strides_a) ||
      !add(copies.b, side_b(params), copies.b_k_major, p.b, p.reduced_strides_b))
    return {.params = params};
  return product;
}

// Bytes of workspace that a launch of this plan needs.
inline size_t workspace_bytes(const GemmParams& params, GemmPlan plan) {
  WorkspaceCursor cursor = assign_workspace(params, nullptr, plan);
  with_copies(params, plan.copies, cursor);
  return cursor.used();
}

}  // namespace cuda_ext::sm90
