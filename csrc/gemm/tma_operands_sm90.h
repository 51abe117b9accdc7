// The operands of a GEMM on wgmma: how TMA reads them, or why it cannot. No header of CUDA is needed.
#pragma once

#include <string>

#include "base/device.h"
#include "gemm/tiles_sm90.h"

namespace cuda_ext::sm90 {

// A product as the kernel sees it: out = a @ b, or its transpose.
struct Side {
  const char* name;
  const Operand* operand;
  const int64_t* reduced_strides;
  bool k_major;
  int64_t lines;        // along the contiguous dim of the other layout: rows of a, columns of b
  int64_t line_stride;  // elements
};
inline Side side_a(const GemmParams& params) {
  const bool k_major = is_k_major_a(params);
  return {"a",     &params.a, params.reduced_strides_a,
          k_major, params.m,  k_major ? params.a.row_stride : params.a.column_stride};
}
inline Side side_b(const GemmParams& params) {
  const bool k_major = is_k_major_b(params);
  return {"b",
          &params.b,
          params.reduced_strides_b,
          k_major,
          has_gate_up(params) ? 2 * params.n : params.n,
          k_major ? params.b.column_stride : params.b.row_stride};
}

// Why TMA cannot read an operand; empty if it can. Fills the slots of `loads`.
inline std::string tma_refusal(const GemmParams& params, const Side& side, OperandLoads& loads) {
  const int64_t size = size_of(side.operand->dtype);
  const auto refuse = [&](const std::string& what) { return std::string(side.name) + " " + what; };
  if (reinterpret_cast<uintptr_t>(side.operand->data) % 16 != 0)
    return refuse("does not begin at a multiple of 16 bytes");
  // The stride of a single line has no meaning if it is less than the line; then that of lines without gaps decides, so
  // that the choice does not depend on the number of lines.
  const int64_t inner = side.k_major ? params.k : side.lines, outer = side.k_major ? side.lines : params.k;
  const int64_t stride = outer == 1 && inner > side.line_stride ? inner : side.line_stride;
  if (stride <= 0) return refuse("has rows or columns with a stride of 0");
  if (stride * size % 16 != 0) return refuse("has a stride that is no multiple of 16 bytes");
  int slots = 0;
  const auto assign = [&](int dims, const int64_t* sizes, const int64_t* strides, int8_t* of_dim) {
    for (int d = 0; d < dims; ++d) of_dim[d] = sizes[d] > 1 && strides[d] != 0 ? int8_t(slots++) : int8_t(-1);
    for (int d = 0; d < dims; ++d)
      if (of_dim[d] >= 0 && (strides[d] < 0 || strides[d] * size % 16 != 0)) return false;
    return true;
  };
  if (!assign(params.batch_dims, params.batch_sizes, side.operand->batch_strides, loads.batch_slots) ||
      !assign(params.reduced_dims, params.reduced_sizes, side.reduced_strides, loads.reduced_slots))
    return refuse("has a batch stride that is no multiple of 16 bytes");
  if (slots > 3) return refuse("has more than 3 batch dims");
  loads.batched = slots > 0;
  return "";
}

// Whether the second half of b's columns, where they are adjacent, begins at no multiple of 16 bytes, the unit of TMA's
// first coordinate.
inline bool upper_is_misaligned(const GemmParams& params) {
  return has_gate_up(params) && params.n * int64_t(size_of(params.b.dtype)) % 16 != 0;
}

// Why the kernel cannot run a problem; empty if it can.
inline std::string refusal_of(const GemmParams& params, bool tf32, const rt::Device& device, OperandLoads& a,
                              OperandLoads& b) {
  if (device.compute_capability != 90)
    return "the device has no wgmma; it is sm_" + std::to_string(device.compute_capability);
  if (params.a.dtype == Dtype::kFloat32 && !tf32) return "float32 takes three products of tf32";
  if (params.k == 0) return "k is 0";
  const Side sides[] = {side_a(params), side_b(params)};
  OperandLoads* const loads[] = {&a, &b};
  for (int i = 0; i < 2; ++i) {
    if (tf32 && !sides[i].k_major)
      return std::string(sides[i].name) + " is not contiguous along k, as wgmma needs it for tf32";
    if (sides[i].lines >= int64_t(1) << 31 || params.k >= int64_t(1) << 31) return "a size is 2^31 or more";
    if (std::string refusal = tma_refusal(params, sides[i], *loads[i]); !refusal.empty()) return refusal;
  }
  if (!sides[1].k_major && upper_is_misaligned(params))
    return "the second half of b's columns does not begin at a multiple of 16 bytes";
  return "";
}

}  // namespace cuda_ext::sm90
