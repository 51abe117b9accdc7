// Launches the kernel of gemm_sm90.cuh: tensor maps, workspace, and the instantiation for dtype, layout and config.
#pragma once

#include "gemm/gemm_sm90.cuh"
#include "gemm/gemm_sm90.h"
#include "gemm/split_k.cuh"
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

inline arch::TensorMap output_map(const GemmParams& params, const GemmPlan& plan) {
  const int64_t size = size_of(params.out.dtype);
  return rt::make_tensor_map("gemm_sm90", {.data = params.out.data,
                                           .element = element_of(params.out.dtype),
                                           .rank = 3,
                                           .sizes = {params.n, params.m, plan.batches},
                                           .strides = {params.n * size, params.m * params.n * size},
                                           .box = {int(kLineBytes / size), kSlabRows, 1},
                                           .swizzle_bytes = 128});
}

template <class T, Major a_major, Major b_major, int config>
void launch_config(const GemmParams& params, const GemmPlan& plan, rt::Stream stream) {
  using Kernel = Gemm<T, a_major, b_major, kConfigs[config]>;
  const Side a = side_a(params), b = side_b(params);
  TensorMaps maps{
      operand_map(params, Kernel::kSwapped ? b : a, plan.a), operand_map(params, Kernel::kSwapped ? a : b, plan.b), {}};
  if (plan.tma_store) maps.out = output_map(params, plan);
  rt::launch<gemm_sm90<Kernel>>("gemm_sm90",
                                {.grid = {plan.clusters * plan.cluster},
                                 .threads = Kernel::kThreads,
                                 .cluster = {plan.cluster},
                                 .shared_bytes = sizeof(typename Kernel::Storage),
                                 .programmatic = true,
                                 .stream = stream},
                                params, plan, maps);
}

// One instantiation per file, named after the majors of the kernel's a and b.
template <class T, Major a_major, Major b_major>
struct Layout {
  static void launch(const GemmParams& params, const GemmPlan& plan, rt::Stream stream) {
    static_assert(kNumConfigs == 5);
    switch (plan.config) {
      case 0: return launch_config<T, a_major, b_major, 0>(params, plan, stream);
      case 1: return launch_config<T, a_major, b_major, 1>(params, plan, stream);
      case 2: return launch_config<T, a_major, b_major, 2>(params, plan, stream);
      case 3: return launch_config<T, a_major, b_major, 3>(params, plan, stream);
      default: return launch_config<T, a_major, b_major, 4>(params, plan, stream);
    }
  }
};

}  // namespace cuda_ext::sm90
