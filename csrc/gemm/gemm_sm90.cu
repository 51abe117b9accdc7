// Tensor maps, workspace, and the choice of the instantiation.
#include "gemm/gemm_sm90.h"

#include "gemm/column_sums.cuh"
#include "gemm/copies_sm90.h"
#include "gemm/maps_sm90.cuh"
#include "gemm/split_k.h"

namespace cuda_ext {

namespace sm90 {
namespace {

template <class T>
void launch_layout(const GemmParams& params, const GemmPlan& plan, const TensorMaps& maps, void* stream) {
  const bool swapped = kConfigs[plan.config].swapped;
  const bool a_k_major = swapped ? is_k_major_b(params) : is_k_major_a(params);
  const bool b_k_major = swapped ? is_k_major_a(params) : is_k_major_b(params);
  if constexpr (sizeof(T) == 2) {
    if (!a_k_major && !b_k_major) return GemmSm90<T, false, false>::launch(params, plan, maps, stream);
    if (!a_k_major) return GemmSm90<T, false, true>::launch(params, plan, maps, stream);
    if (!b_k_major) return GemmSm90<T, true, false>::launch(params, plan, maps, stream);
  }
  return GemmSm90<T, true, true>::launch(params, plan, maps, stream);
}

}  // namespace
}  // namespace sm90

bool has_gemm_sm90() { return true; }

size_t gemm_sm90_workspace(const GemmParams& params, sm90::GemmPlan plan) {
  return sm90::workspace_bytes(params, plan);
}

void launch_gemm_sm90(const GemmParams& given, sm90::GemmPlan plan, Workspace workspace, void* stream) {
  WorkspaceCursor cursor = sm90::assign_workspace(given, workspace.data, plan);
  const sm90::CopiedProduct product = sm90::with_copies(given, plan.copies, cursor);
  cursor.expect_fits("gemm_sm90", workspace);
  const GemmParams& params = product.params;
  const sm90::TensorMaps maps = sm90::make_maps(params, plan);  // before anything is launched, because it can fail
  for (int i = 0; i < product.count; ++i) sm90::launch_copy_operand(product.list[i], stream);
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
