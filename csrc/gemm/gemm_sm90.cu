// Tensor maps, workspace, and the choice of the instantiation.
#include "gemm/gemm_sm90.h"

#include "gemm/copy_operand_sm90.h"
#include "gemm/gemm_passes.h"
#include "gemm/maps_sm90.cuh"

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

void launch_gemm_sm90(const GemmParams& given, sm90::GemmPlan plan, const AllocateWorkspace& allocate, void* stream) {
  sm90::CopiedProduct product;
  provide_workspace("gemm_sm90", allocate, [&](void* data) {
    WorkspaceCursor cursor = sm90::assign_workspace(given, data, plan);
    product = sm90::with_copies(given, plan.copies, cursor);
    return cursor;
  });
  const GemmParams& params = product.params;
  const sm90::TensorMaps maps = sm90::make_maps(params, plan);  // before anything is launched, because it can fail
  for (int i = 0; i < product.count; ++i) sm90::launch_copy_operand(product.list[i], stream);
  if (plan.splits > 1) launch_clear_words(plan.arrivals, plan.tiles() * sm90::kConsumers, stream);
  switch (params.a.dtype) {
    case Dtype::kFloat16: sm90::launch_layout<half_t>(params, plan, maps, stream); break;
    case Dtype::kBFloat16: sm90::launch_layout<bfloat16_t>(params, plan, maps, stream); break;
    default: sm90::launch_layout<float>(params, plan, maps, stream);
  }
  if (plan.bias_sums != nullptr)
    launch_add_block_sums(plan.bias_sums, ceil_div(params.m, sm90::kRowBlock), (params.gated ? 2 : 1) * params.n,
                          params.bias_grad, stream);
}

}  // namespace cuda_ext
