// Tensor maps, workspace, and the choice of the instantiation.
#include "gemm/scaled_gemm_sm90.h"

#include "gemm/gemm_passes.h"
#include "gemm/maps_sm90.cuh"

namespace cuda_ext {

namespace sm90 {
namespace {

// The stride of a single line is not used; the tensor may have any.
arch::TensorMap scaled_operand_map(const Operand& operand, int64_t k, int64_t lines, int64_t line_stride, int box) {
  return rt::make_tensor_map("scaled_gemm_sm90", {.data = operand.data,
                                                  .element = rt::Element::kUint8,
                                                  .sizes = {k, lines},
                                                  .strides = {lines == 1 ? ceil_div(k, 16) * 16 : line_stride},
                                                  .box = {kLineBytes, box},
                                                  .swizzle_bytes = kLineBytes});
}

template <class A>
void launch_types(const ScaledGemmParams& params, const GemmParams& epilogue, const ScaledPlan& plan,
                  const TensorMaps& maps, void* stream) {
  if (params.groups.cut == Groups::Cut::kRows) return ScaledGroupsSm90<A>::launch(params, epilogue, plan, maps, stream);
  if (params.b.dtype == Dtype::kFloat8E4M3)
    return ScaledGemmSm90<A, float8_e4m3_t>::launch(params, epilogue, plan, maps, stream);
  ScaledGemmSm90<A, float8_e5m2_t>::launch(params, epilogue, plan, maps, stream);
}

}  // namespace
}  // namespace sm90

void launch_scaled_gemm_sm90(const ScaledGemmParams& params, sm90::ScaledPlan plan, const AllocateWorkspace& allocate,
                             void* stream) {
  provide_workspace("scaled_gemm_sm90", allocate, [&](void* data) { return sm90::assign_workspace(data, plan); });
  const GemmParams epilogue = without_scales(params);
  sm90::TensorMaps maps;
  maps.a = sm90::scaled_operand_map(params.a, params.k, params.m, params.a.row_stride, sm90::kRowBlock);
  const bool grouped = params.groups.cut == Groups::Cut::kRows, of_terms = params.groups.cut == Groups::Cut::kTerms;
  const int64_t lines_of_b = grouped ? params.groups.count * params.n : params.n;
  maps.b = sm90::scaled_operand_map(params.b, params.k, lines_of_b, params.b.column_stride,
                                    sm90::kScaledConfigs[plan.config].block_n);
  sm90::GemmPlan of_output;
  of_output.batches = of_terms ? int(params.groups.count) : 1;
  if (plan.tma_store) maps.out = sm90::output_map(epilogue, of_output, epilogue.out, 1);
  if (plan.splits > 1) launch_clear_words(plan.arrivals, plan.tiles() * sm90::kConsumers, stream);
  if (grouped)
    launch_clear_rest(params.groups, params.m, params.n * size_of(params.out.dtype), params.out.data, stream);
  if (of_terms) return sm90::ScaledTermsSm90<float8_e4m3_t>::launch(params, epilogue, plan, maps, stream);
  if (params.a.dtype == Dtype::kFloat8E4M3)
    return sm90::launch_types<float8_e4m3_t>(params, epilogue, plan, maps, stream);
  sm90::launch_types<float8_e5m2_t>(params, epilogue, plan, maps, stream);
}

}  // namespace cuda_ext
