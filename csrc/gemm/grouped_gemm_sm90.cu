// Tensor maps, the rows after the last group, and the choice of the instantiation.
#include "gemm/grouped_gemm_sm90.h"

#include "gemm/gemm_passes.h"
#include "gemm/maps_sm90.cuh"

namespace cuda_ext {

namespace {

template <class T>
void launch_layout(const GemmParams& params, const sm90::GemmPlan& plan, const sm90::TensorMaps& maps, void* stream) {
  if (params.groups.cut == Groups::Cut::kTerms)
    return sm90::GroupedGemmSm90<T, false, false>::launch(params, plan, maps, stream);
  if (is_k_major_b(params)) return sm90::GroupedGemmSm90<T, true, true>::launch(params, plan, maps, stream);
  sm90::GroupedGemmSm90<T, true, false>::launch(params, plan, maps, stream);
}

}  // namespace

void launch_grouped_gemm_sm90(const GemmParams& params, const sm90::GemmPlan& plan, void* stream) {
  const sm90::TensorMaps maps = sm90::make_maps(params, plan);  // before anything is launched, because it can fail
  if (params.groups.cut == Groups::Cut::kRows) {
    const int64_t row_bytes = params.n * size_of(params.out.dtype);
    launch_clear_rest(params.groups, params.m, row_bytes, params.out.data, stream);
    if (params.preact_out.data != nullptr)
      launch_clear_rest(params.groups, params.m, row_bytes * (params.gated ? 2 : 1), params.preact_out.data, stream);
  }
  if (params.a.dtype == Dtype::kFloat16) return launch_layout<half_t>(params, plan, maps, stream);
  launch_layout<bfloat16_t>(params, plan, maps, stream);
}

}  // namespace cuda_ext
