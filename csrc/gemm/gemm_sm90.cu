// Workspace, and the choice of the instantiation.
#include "gemm/gemm_sm90_launch.cuh"

namespace cuda_ext {

namespace sm90 {

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
void launch_layout(const GemmParams& params, const GemmPlan& plan, rt::Stream stream) {
  const bool swapped = kConfigs[plan.config].swapped;
  const bool a_k_major = swapped ? is_k_major_b(params) : is_k_major_a(params);
  const bool b_k_major = swapped ? is_k_major_a(params) : is_k_major_b(params);
  if constexpr (sizeof(T) == 2) {
    if (!a_k_major && !b_k_major) return Layout<T, Major::kMn, Major::kMn>::launch(params, plan, stream);
    if (!a_k_major) return Layout<T, Major::kMn, Major::kK>::launch(params, plan, stream);
    if (!b_k_major) return Layout<T, Major::kK, Major::kMn>::launch(params, plan, stream);
  }
  return Layout<T, Major::kK, Major::kK>::launch(params, plan, stream);
}

}  // namespace sm90

size_t gemm_sm90_workspace(const GemmParams& params, sm90::GemmPlan plan) {
  return sm90::assign_workspace(params, nullptr, plan).used();
}

void launch_gemm_sm90(const GemmParams& params, sm90::GemmPlan plan, Workspace workspace, void* stream) {
  sm90::assign_workspace(params, workspace.data, plan).expect_fits("gemm_sm90", workspace);
  if (plan.splits > 1) launch_clear_arrivals(plan.arrivals, plan.tiles() * sm90::kConsumers, stream);
  switch (params.a.dtype) {
    case Dtype::kFloat16: sm90::launch_layout<half_t>(params, plan, stream); break;
    case Dtype::kBFloat16: sm90::launch_layout<bfloat16_t>(params, plan, stream); break;
    default: sm90::launch_layout<float>(params, plan, stream);
  }
  if (plan.bias_sums != nullptr)
    epilogue::launch_add_block_sums(plan.bias_sums, ceil_div(params.m, sm90::kRowBlock),
                                    (params.gated ? 2 : 1) * params.n, params.bias_grad, stream);
}

}  // namespace cuda_ext
