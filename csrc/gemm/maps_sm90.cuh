// The tensor maps of gemm_sm90.cuh: kernel parameters, made for each launch.
#pragma once

#include "gemm/tma_operands_sm90.h"
#include "rt/tensor_map.cuh"

namespace cuda_ext::sm90 {

// A warp stores its 16 rows by TMA, 32 columns at a time: a slab.
constexpr int kSlabRows = 16;
constexpr int kSlabColumns = 32;

// Of a and b; of the outputs (columns, gate or up, rows, batches), if they are stored by TMA.
struct TensorMaps {
  arch::TensorMap a, b, out, preact;
};

constexpr rt::Element element_of(Dtype dtype) {
  return dtype == Dtype::kFloat16    ? rt::Element::kFloat16
         : dtype == Dtype::kBFloat16 ? rt::Element::kBFloat16
                                     : rt::Element::kFloat32;
}

inline arch::TensorMap operand_map(const GemmParams& params, const Side& side, const OperandLoads& loads) {
  const int64_t size = size_of(side.operand->dtype);
  const int run = int(kLineBytes / size);  // elements of a line
  rt::TensorLayout layout{.data = side.operand->data, .element = element_of(side.operand->dtype), .swizzle_bytes = 128};
  layout.sizes = {side.k_major ? params.k : side.lines, side.k_major ? side.lines : params.k};
  layout.box = {run, side.k_major ? loads.piece_lines : run};
  // The stride of a dim of size 1 is not used; the tensor may have any.
  layout.strides = {layout.sizes[1] == 1 ? ceil_div(layout.sizes[0] * size, 16) * 16 : side.line_stride * size};
  if (loads.batched) {
    layout.rank = 5;
    for (int d = 2; d < 5; ++d) {
      layout.sizes[d] = layout.box[d] = 1;
      layout.strides[d - 1] = 16;
    }
    const auto assign = [&](int dims, const int64_t* sizes, const int64_t* strides, const int8_t* slots) {
      for (int d = 0; d < dims; ++d) {
        if (slots[d] < 0) continue;
        layout.sizes[2 + slots[d]] = sizes[d];
        layout.strides[1 + slots[d]] = strides[d] * size;
      }
    };
    assign(params.batch_dims, params.batch_sizes, side.operand->batch_strides, loads.batch_slots);
    assign(params.reduced_dims, params.reduced_sizes, side.reduced_strides, loads.reduced_slots);
  }
  return rt::make_tensor_map("gemm_sm90", layout);
}

// Gate and up are two matrices, so that a box at the end of the one does not reach into the other.
inline arch::TensorMap output_map(const GemmParams& params, const GemmPlan& plan, const Output& out, int halves) {
  const int64_t size = size_of(out.dtype), row = halves * params.n * size;
  return rt::make_tensor_map("gemm_sm90", {.data = out.data,
                                           .element = element_of(out.dtype),
                                           .rank = 4,
                                           .sizes = {params.n, halves, params.m, plan.batches},
                                           .strides = {params.n * size, row, params.m * row},
                                           .box = {kSlabColumns, 1, kSlabRows, 1},
                                           .swizzle_bytes = kSlabColumns * int(size)});
}

inline TensorMaps make_maps(const GemmParams& params, const GemmPlan& plan) {
  const bool swapped = kConfigs[plan.config].swapped;
  const Side a = side_a(params), b = side_b(params);
  TensorMaps maps{};
  if (plan.a.pieces > 0) maps.a = operand_map(params, swapped ? b : a, plan.a);
  if (plan.b.pieces > 0) maps.b = operand_map(params, swapped ? a : b, plan.b);
  // An operand whose rows are gathered has no map; kernels prefetch one all the same.
  if (plan.a.pieces == 0) maps.a = maps.b;
  if (plan.b.pieces == 0) maps.b = maps.a;
  if (plan.tma_store) maps.out = output_map(params, plan, params.out, 1);
  if (plan.tma_store && params.preact_out.data != nullptr)
    maps.preact = output_map(params, plan, params.preact_out, params.gated ? 2 : 1);
  return maps;
}

}  // namespace cuda_ext::sm90
