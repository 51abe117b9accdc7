// Tensor maps, workspace, and the choice of the instantiation.
#include "gemm/gemm_sm90.h"
#include "gemm/gemm_sm90_launch.cuh"
#include "gemm/split_k.cuh"
#include "rt/tensor_map.cuh"

namespace cuda_ext {

namespace sm90 {

static constexpr rt::Element element_of(Dtype dtype) {
  return dtype == Dtype::kFloat16    ? rt::Element::kFloat16
         : dtype == Dtype::kBFloat16 ? rt::Element::kBFloat16
                                     : rt::Element::kFloat32;
}

// Assigns the arrays of `plan` in the workspace at `data`, which may be null to find the size.
static WorkspaceCursor assign_workspace(const GemmParams& params, void* data, GemmPlan& plan) {
  const GemmConfig& config = kConfigs[plan.config];
  WorkspaceCursor cursor(data);
  if (plan.splits > 1) {
    cursor.allocate(plan.arrivals, int64_t(plan.tiles()) * kConsumers);
    cursor.allocate(plan.partials, int64_t(plan.splits) * plan.tiles() * config.block_m * config.block_n);
  }
  if (params.bias_grad.data != nullptr)
    cursor.allocate(plan.bias_sums, ceil_div(params.m, kRowBlock) * (params.gated ? 2 : 1) * params.n);
  return cursor;
}

static arch::TensorMap operand_map(const GemmParams& params, const Side& side, const OperandLoads& loads) {
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
static arch::TensorMap output_map(const GemmParams& params, const GemmPlan& plan, const Output& out, int halves) {
  const int64_t size = size_of(out.dtype), row = halves * params.n * size;
  return rt::make_tensor_map("gemm_sm90", {.data = out.data,
                                           .element = element_of(out.dtype),
                                           .rank = 4,
                                           .sizes = {params.n, halves, params.m, plan.batches},
                                           .strides = {params.n * size, row, params.m * row},
                                           .box = {kSlabColumns, 1, kSlabRows, 1},
                                           .swizzle_bytes = kSlabColumns * int(size)});
}

static TensorMaps make_maps(const GemmParams& params, const GemmPlan& plan) {
  const bool swapped = kConfigs[plan.config].swapped;
  const Side a = side_a(params), b = side_b(params);
  TensorMaps maps{operand_map(params, swapped ? b : a, plan.a), operand_map(params, swapped ? a : b, plan.b), {}, {}};
  if (plan.tma_store) maps.out = output_map(params, plan, params.out, 1);
  if (plan.tma_store && params.preact_out.data != nullptr)
    maps.preact = output_map(params, plan, params.preact_out, params.gated ? 2 : 1);
  return maps;
}

extern template struct Layout<half_t, Major::kK, Major::kK>;
extern template struct Layout<half_t, Major::kK, Major::kMn>;
extern template struct Layout<half_t, Major::kMn, Major::kK>;
extern template struct Layout<half_t, Major::kMn, Major::kMn>;
extern template struct Layout<bfloat16_t, Major::kK, Major::kK>;
extern template struct Layout<bfloat16_t, Major::kK, Major::kMn>;
extern template struct Layout<bfloat16_t, Major::kMn, Major::kK>;
extern template struct Layout<bfloat16_t, Major::kMn, Major::kMn>;
extern template struct Layout<float, Major::kK, Major::kK>;

template <class T>
void launch_layout(const GemmParams& params, const GemmPlan& plan, const TensorMaps& maps, rt::Stream stream) {
  const bool swapped = kConfigs[plan.config].swapped;
  const bool a_k_major = swapped ? is_k_major_b(params) : is_k_major_a(params);
  const bool b_k_major = swapped ? is_k_major_a(params) : is_k_major_b(params);
  if constexpr (sizeof(T) == 2) {
    if (!a_k_major && !b_k_major) return Layout<T, Major::kMn, Major::kMn>::launch(params, plan, maps, stream);
    if (!a_k_major) return Layout<T, Major::kMn, Major::kK>::launch(params, plan, maps, stream);
    if (!b_k_major) return Layout<T, Major::kK, Major::kMn>::launch(params, plan, maps, stream);
  }
  return Layout<T, Major::kK, Major::kK>::launch(params, plan, maps, stream);
}

}  // namespace sm90

size_t gemm_sm90_workspace(const GemmParams& params, sm90::GemmPlan plan) {
  return sm90::assign_workspace(params, nullptr, plan).used();
}

void launch_gemm_sm90(const GemmParams& params, sm90::GemmPlan plan, Workspace workspace, void* stream) {
  sm90::assign_workspace(params, workspace.data, plan).expect_fits("gemm_sm90", workspace);
  const sm90::TensorMaps maps = sm90::make_maps(params, plan);  // first, because it can fail
  if (plan.splits > 1) launch_clear_arrivals(plan.arrivals, plan.tiles() * sm90::kConsumers, stream);
  switch (params.a.dtype) {
    case Dtype::kFloat16: sm90::launch_layout<half_t>(params, plan, maps, stream); break;
    case Dtype::kBFloat16: sm90::launch_layout<bfloat16_t>(params, plan, maps, stream); break;
    default: sm90::launch_layout<float>(params, plan, maps, stream);
  }
  if (plan.bias_sums != nullptr)
    epilogue::launch_add_block_sums(plan.bias_sums, ceil_div(params.m, sm90::kRowBlock),
                                    (params.gated ? 2 : 1) * params.n, params.bias_grad, stream);
}

}  // namespace cuda_ext
