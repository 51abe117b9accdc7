// Chooses how a scaled product runs on mma.sync (sm_89 and later). No header of CUDA is needed.
#pragma once

#include "gemm/plan_sm80.h"
#include "gemm/scaled_gemm.h"

namespace cuda_ext::sm80 {

// Why the kernel cannot run for the product on a device of the compute capability; empty if it can.
inline std::string scaled_refusal(const ScaledGemmParams& params, int compute_capability) {
  if (compute_capability < 89 || compute_capability / 10 == 9)
    return "the device has no mma.sync of FP8; it is sm_" + std::to_string(compute_capability);
  if (params.groups.cut == Groups::Cut::kTerms) return "it has no groups of terms";
  if (params.k == 0) return "k is 0";
  const bool grouped = params.groups.cut == Groups::Cut::kRows;
  if (grouped && params.b.dtype != Dtype::kFloat8E4M3) return "mat_b is not of float8_e4m3fn";
  const int64_t sizes[] = {params.m, grouped ? params.groups.count * params.n : params.n, params.k};
  for (const int64_t size : sizes)
    if (size >= int64_t(1) << 31) return "a size is 2^31 or more";
  return "";
}

// The plan of the GEMM for sm_80 with the tiles of FP8. Operands must be as the kernel reads them.
inline GemmPlan choose_scaled_plan(const ScaledGemmParams& params, const rt::Device& device) {
  constexpr const GemmConfig(&kShapes)[kMaxShapes] = kTiles[int(Arithmetic::kFloat8)];
  const Rates rates = rates_of(device);
  const Restriction only{.config = has_float8_tile(kShapes[0], device.compute_capability) ? -1 : 1};
  GemmParams product = without_scales(params);
  product.batch_invariant = true;  // k is not split
  const bool grouped = params.groups.cut == Groups::Cut::kRows;
  GemmPlan plan = grouped ? choose_grouped_plan(product, Arithmetic::kFloat8, rates, only)
                          : choose_plan(product, Arithmetic::kFloat8, rates, only);
  const GemmConfig& tile = kShapes[plan.shape];
  // Both are read along k, also if k is 1. The stride of a single line is not used; the tensor may have any.
  const auto strides = [&](const Operand& operand, const int64_t* reduced, int64_t lines, int64_t stride, int extent) {
    return byte_strides(product, operand, reduced, true, lines == 1 ? ceil_div(params.k, 16) * 16 : stride, 0, extent,
                        tile);
  };
  plan.a = strides(params.a, product.reduced_strides_a, params.m, params.a.row_stride, tile.block_m);
  plan.b = strides(params.b, product.reduced_strides_b, grouped ? params.groups.count * params.n : params.n,
                   params.b.column_stride, tile.block_n);
  return plan;
}

}  // namespace cuda_ext::sm80
