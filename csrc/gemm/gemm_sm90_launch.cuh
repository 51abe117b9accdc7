// Launches the kernel of gemm_sm90.cuh: tensor maps, and the instantiation for the config.
#pragma once

#include "gemm/gemm_sm90.cuh"
#include "gemm/gemm_sm90.h"
#include "rt/tensor_map.cuh"

namespace cuda_ext::sm90 {

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
  layout.strides = {layout.sizes[1] == 1 ? layout.sizes[0] * size : side.line_stride * size};
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

template <class T, Major a_major, Major b_major, int config>
void launch_config(const GemmParams& params, const GemmPlan& plan, rt::Stream stream) {
  using Kernel = Gemm<T, a_major, b_major, kConfigs[config]>;
  const Side a = side_a(params), b = side_b(params);
  TensorMaps maps{operand_map(params, Kernel::kSwapped ? b : a, plan.a),
                  operand_map(params, Kernel::kSwapped ? a : b, plan.b),
                  {},
                  {}};
  if (plan.tma_store) maps.out = output_map(params, plan, params.out, 1);
  if (plan.tma_store && params.preact_out.data != nullptr)
    maps.preact = output_map(params, plan, params.preact_out, params.gated ? 2 : 1);
  rt::launch<gemm_sm90<Kernel>>("gemm_sm90",
                                {.grid = {plan.clusters * plan.cluster},
                                 .threads = Kernel::kThreads,
                                 .cluster = {plan.cluster},
                                 .shared_bytes = sizeof(typename Kernel::Storage),
                                 .programmatic = true,
                                 .stream = stream},
                                params, plan, maps);
}

template <class T, bool a_k_major, bool b_k_major>
void GemmSm90<T, a_k_major, b_k_major>::launch(const GemmParams& params, const GemmPlan& plan, void* stream) {
  constexpr Major kMajors[] = {Major::kMn, Major::kK};
  constexpr Major kA = kMajors[a_k_major], kB = kMajors[b_k_major];
  static_assert(kNumConfigs == 4);
  switch (plan.config) {
    case 0: return launch_config<T, kA, kB, 0>(params, plan, stream);
    case 1: return launch_config<T, kA, kB, 1>(params, plan, stream);
    case 2: return launch_config<T, kA, kB, 2>(params, plan, stream);
    default: return launch_config<T, kA, kB, 3>(params, plan, stream);
  }
}

}  // namespace cuda_ext::sm90
