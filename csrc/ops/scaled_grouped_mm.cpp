// scaled_grouped_mm: products of operands in FP8, with scales, of groups of rows or of terms.
#include "ops/torch_headers.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "ops/gemm_autograd.h"
#include "ops/grouped_mm.h"
#include "ops/scaled_mm.h"

namespace cuda_ext {
namespace {

constexpr const char* kOp = "scaled_grouped_mm";

// Groups of rows

// What is the same for all groups: their scales of columns.
struct GroupScales {
  Tensor scales;  // (groups, ...)

  GroupScales(const Tensor& given, int64_t scaling, int64_t groups) {
    check_given(kOp, "scale_b", given);
    CUDA_EXT_CHECK(scaling != kBlockWise1x128, kOp,
                   "expected scaling TensorWise, RowWise or BlockWise128x128 for scale_b, got BlockWise1x128");
    const bool is_one = scaling == kTensorWise && given.numel() == 1;
    scales = is_one ? given.reshape({1}).expand({groups}) : given;
    CUDA_EXT_CHECK(scales.dim() > 0 && scales.size(0) == groups, kOp, "expected scale_b of shape (", groups,
                   ", ...), those of each group, got ", shape_string(given));
  }
  ScaleLines of_group(int64_t group, int64_t scaling, const Tensor& b) const {
    return check_scales(kOp, "scale_b", scales.select(0, group), scaling, b.select(0, group), true);
  }
};

// (groups n, k), as kernels read the matrices b (groups, k, n) of all groups.
Tensor lines_of_groups(const Tensor& b) {
  return with_aligned_lines(b.transpose(1, 2).reshape({b.size(0) * b.size(2), b.size(1)}));
}

// On CUDA devices without a kernel, as composed_scaled_mm.
Tensor composed_grouped(const Tensor& a, const Tensor& b, const ScaleLines& scale_a, const GroupScales& scale_b,
                        int64_t scaling_b, const Tensor& ends, const OptionalTensor& bias, at::ScalarType type) {
  const int64_t m = a.size(0), n = b.size(2), k = a.size(1), groups = b.size(0);
  const Tensor exact_a = a.to(at::kBFloat16), exact_b = b.to(at::kBFloat16);
  const Tensor rows = at::arange(m, ends.options());
  const Tensor group_of_row = at::searchsorted(ends, rows, /*out_int32=*/false, /*right=*/true).clamp_max_(groups - 1);
  std::vector<ScaleLines> of_groups;
  for (int64_t group = 0; group < groups; ++group) of_groups.push_back(scale_b.of_group(group, scaling_b, b));
  const bool has_blocks = scale_a.has_blocks || of_groups[0].has_blocks;
  const int64_t block = has_blocks ? kScaleBlock : std::max<int64_t>(k, 1);
  Tensor sum;
  for (int64_t first = 0; first < k || !sum.defined(); first += block) {
    const int64_t size = std::min(block, k - first);
    const Tensor product =
        call_grouped_mm(exact_a.narrow(1, first, size), exact_b.narrow(1, first, size), ends, {}, at::kFloat);
    if (size > 0) {
      std::vector<Tensor> columns;
      for (const ScaleLines& lines : of_groups)
        columns.push_back(lines.of_block(first / kScaleBlock, n).t().expand({1, n}));
      product.mul_(scale_a.of_block(first / kScaleBlock, m)).mul_(at::cat(columns).index_select(0, group_of_row));
    }
    sum = sum.defined() ? sum.add_(product) : product;
  }
  if (is_given(bias)) sum.add_(bias->to(at::kFloat).index_select(0, group_of_row));
  // Rows of no group are 0, whatever their scales are.
  return at::where(rows.lt(ends.narrow(0, groups - 1, 1)).unsqueeze(1), sum, sum.new_zeros({})).to(type);
}

// The product of each group, one after the other. `params`: those of all rows.
void multiply_groups_on_cpu(const ScaledGemmParams& params, const Tensor& b, const GroupScales& of_groups,
                            int64_t scaling_b, const Tensor& ends, const OptionalTensor& bias, const Tensor& out) {
  check_group_ends(kOp, ends, params.m);
  int64_t begin = 0;
  for (int64_t group = 0; group < b.size(0); ++group) {
    const int64_t end = ends.const_data_ptr<int32_t>()[group];
    ScaledGemmParams of_group = params;
    of_group.m = end - begin;
    of_group.a.data = static_cast<const uint8_t*>(params.a.data) + begin * params.a.row_stride;
    of_group.scale_a.data += begin * params.scale_a.line_stride;
    of_group.b = matrix(b.select(0, group));
    of_group.scale_b = of_groups.of_group(group, scaling_b, b).params();
    if (is_given(bias)) of_group.bias = matrix(bias->select(0, group));
    of_group.out = output(out.narrow(0, begin, end - begin));
    if (of_group.m > 0) launch_scaled_gemm(of_group);
    begin = end;
  }
  out.narrow(0, begin, params.m - begin).zero_();
}

// (T, N)
Tensor multiply_rows(const Tensor& a, const Tensor& b, const Tensor& scale_a, int64_t scaling_a, const Tensor& scale_b,
                     int64_t scaling_b, const Tensor& ends, const OptionalTensor& bias, at::ScalarType type,
                     bool use_fast_accum) {
  const int64_t groups = b.size(0), m = a.size(0), n = b.size(2);
  CUDA_EXT_CHECK(ends.size(0) == groups, kOp, "expected offs of shape (", groups, ",) and dtype int32 or int64, got ",
                 shape_string(ends));
  if (is_given(bias)) {
    check_same_device(kOp, "bias", *bias, "mat_a", a);
    CUDA_EXT_CHECK(bias->dim() == 2 && bias->size(0) == groups && bias->size(1) == n &&
                       is_floating(bias->scalar_type()) && bias->scalar_type() != at::kDouble,
                   kOp, "expected bias of shape (", groups, ", ", n, ") and dtype float32, float16 or bfloat16, got ",
                   shape_string(*bias), " of ", dtype_name(bias->scalar_type()));
  }
  CUDA_EXT_CHECK(
      scaling_a != kBlockWise128x128, kOp,
      "expected scaling TensorWise, RowWise or BlockWise1x128 for scale_a, got BlockWise128x128, whose blocks ",
      "of rows would belong to several groups");
  const ScaleLines lines_a = check_scales(kOp, "scale_a", scale_a, scaling_a, a, false);
  const GroupScales of_groups(scale_b, scaling_b, groups);
  const CudaKernels* const kernels = cuda_kernels(kOp, a.device());
  Tensor out = empty_beside(a, {m, n}, type);
  if (out.numel() == 0) return out;
  if (groups == 0) return out.zero_();
  const ScaleLines lines_b = of_groups.of_group(0, scaling_b, b);
  ScaledGemmParams params;
  params.m = m;
  params.n = n;
  params.k = a.size(1);
  params.a = matrix(a);
  params.scale_a = lines_a.params();
  params.fast_accum = use_fast_accum;
  params.out = output(out);
  if (kernels == nullptr) {
    multiply_groups_on_cpu(params, b, of_groups, scaling_b, ends, bias, out);
    return out;
  }
  params.groups = {Groups::Cut::kRows, ends.const_data_ptr<int32_t>(), groups};
  params.b = transposed(matrix(b.select(0, 0).t()));
  params.scale_b = lines_b.params();
  params.scale_b_group_stride = groups == 1 ? 0 : of_groups.scales.stride(0);
  if (is_given(bias)) {
    params.bias = matrix(*bias);
    params.bias_group_stride = bias->stride(0);
  }
  if (!has_kernel(*kernels, params)) return composed_grouped(a, b, lines_a, of_groups, scaling_b, ends, bias, type);
  const Tensor lines_of_a = with_aligned_lines(a), lines_of_b = lines_of_groups(b);
  params.a = matrix(lines_of_a);
  params.b = transposed(matrix(lines_of_b));
  launch_scaled(kOp, *kernels, params, a.device());
  return out;
}

// Groups of terms

// What is multiplied, checked.
struct Terms {
  const Tensor &a, &b;  // (M, T), (T, N)
  ScaleLines scale_a, scale_b;
  Tensor ends;  // (groups,)

  Sizes sizes() const { return {ends.size(0), a.size(0), b.size(1)}; }
  ScaledGemmParams params() const {
    ScaledGemmParams params;
    params.m = a.size(0);
    params.n = b.size(1);
    params.k = a.size(1);
    params.a = matrix(a);
    params.b = matrix(b);
    params.scale_a = scale_a.params();
    params.scale_b = scale_b.params();
    return params;
  }
};

// On a CPU; kernels round other ends up.
void check_ends_of_terms(const Tensor& ends, int64_t terms) {
  check_group_ends(kOp, ends, terms);
  const int32_t* const data = ends.const_data_ptr<int32_t>();
  for (int64_t group = 0; group < ends.numel(); ++group)
    CUDA_EXT_CHECK(data[group] % kScaleBlock == 0 || data[group] == terms, kOp,
                   "expected offs of groups of terms to be multiples of ", kScaleBlock, ", or ", terms, ", got ",
                   data[group], " at index ", group, "; pad each group with zeros");
}

// The sum of each group, one after the other. `params`: those of all terms.
void sum_groups_on_cpu(const ScaledGemmParams& params, const Terms& terms, const Tensor& out) {
  check_ends_of_terms(terms.ends, params.k);
  int64_t begin = 0;
  for (int64_t group = 0; group < terms.ends.numel(); ++group) {
    const int64_t end = terms.ends.const_data_ptr<int32_t>()[group];
    ScaledGemmParams of_group = params;
    of_group.k = end - begin;
    of_group.a.data = static_cast<const uint8_t*>(params.a.data) + begin * params.a.column_stride;
    of_group.b.data = static_cast<const uint8_t*>(params.b.data) + begin * params.b.row_stride;
    for (Scales* scales : {&of_group.scale_a, &of_group.scale_b})
      scales->data += begin / kScaleBlock * scales->block_stride;
    const Tensor of_out = out.select(0, group);
    of_group.out = output(of_out);
    if (params.c.data != nullptr) of_group.c = matrix(of_out);
    launch_scaled_gemm(of_group);
    begin = end;
  }
}

// (lines, k) in float32: an operand times its scales.
Tensor scaled_lines(const Tensor& lines, const ScaleLines& scales) {
  Tensor of_elements = scales.scales;
  if (scales.line_shift > 0)
    of_elements = of_elements.repeat_interleave(int64_t(1) << scales.line_shift, 0).narrow(0, 0, lines.size(0));
  if (scales.has_blocks)
    of_elements = of_elements.narrow(1, 0, blocks_of(lines.size(1))).repeat_interleave(kScaleBlock, 1);
  return lines.to(at::kFloat).mul_(scales.has_blocks ? of_elements.narrow(1, 0, lines.size(1)) : of_elements);
}

// On CUDA devices without a kernel: float32, in which operands times their scales are rounded.
Tensor composed_terms(const Terms& terms, at::ScalarType type) {
  const Tensor blocks = terms.ends.add(kScaleBlock - 1).floor_divide(kScaleBlock);
  const Tensor ends = blocks.mul(kScaleBlock).clamp_max(terms.a.size(1)).to(at::kInt);
  return call_grouped_mm(scaled_lines(terms.a, terms.scale_a), scaled_lines(terms.b.t(), terms.scale_b).t(), ends, {},
                         type);
}

// out (groups, M, N) = the sums + beta * out
void sum_terms_into(const Tensor& out, const Terms& terms, double beta) {
  const CudaKernels* const kernels = cuda_kernels(kOp, terms.a.device());
  if (out.numel() == 0) return;
  ScaledGemmParams params = terms.params();
  params.out = output(out);
  params.beta = beta;
  if (beta != 0) params.c = matrix(out.select(0, 0));
  if (kernels == nullptr) return sum_groups_on_cpu(params, terms, out);
  params.groups = {Groups::Cut::kTerms, terms.ends.const_data_ptr<int32_t>(), terms.ends.size(0)};
  if (has_kernel(*kernels, params)) {
    const Tensor lines_of_a = with_aligned_lines(terms.a), lines_of_b = with_aligned_lines(terms.b.t());
    params.a = matrix(lines_of_a);
    params.b = transposed(matrix(lines_of_b));
    return launch_scaled(kOp, *kernels, params, out.device());
  }
  if (beta == 0) {
    out.copy_(composed_terms(terms, out.scalar_type()));
    return;
  }
  const Tensor sums = empty_beside(terms.a, terms.sizes(), at::kFloat);  // TMA cannot add them to this output
  sum_terms_into(sums, terms, 0);
  out.copy_(sums.add_(out, beta));
}

// Both kinds of groups

// Returns the ends as kernels read them.
Tensor check_operands(const Tensor& a, const Tensor& b, const Tensor& offs) {
  check_fp8(kOp, "mat_a", a);
  check_given(kOp, "mat_b", b);
  const bool of_terms = b.dim() == 2;
  CUDA_EXT_CHECK((of_terms || b.dim() == 3) && is_fp8(b.scalar_type()) && b.size(-2) == a.size(1), kOp,
                 "expected mat_b of shape ", of_terms ? "(" : "(groups, ", a.size(1), ", N) and of FP8 to match mat_a ",
                 shape_string(a), ", got ", shape_string(b), " of ", dtype_name(b.scalar_type()));
  check_same_device(kOp, "mat_b", b, "mat_a", a);
  check_given(kOp, "offs", offs);
  check_same_device(kOp, "offs", offs, "mat_a", a);
  CUDA_EXT_CHECK(offs.dim() == 1 && (offs.scalar_type() == at::kInt || offs.scalar_type() == at::kLong), kOp,
                 "expected offs of shape (", of_terms ? "groups" : std::to_string(b.size(0)),
                 ",) and dtype int32 or int64, got ", shape_string(offs), " of ", dtype_name(offs.scalar_type()));
  return to_int32(offs);
}

Terms check_terms(const Tensor& a, const Tensor& b, const Tensor& scale_a, int64_t scaling_a, const Tensor& scale_b,
                  int64_t scaling_b, const Tensor& ends) {
  return {a, b, check_scales(kOp, "scale_a", scale_a, scaling_a, a, false),
          check_scales(kOp, "scale_b", scale_b, scaling_b, b, true), ends};
}

Tensor scaled_grouped_mm(const Tensor& a, const Tensor& b, const Tensor& scale_a, int64_t scaling_a,
                         const Tensor& scale_b, int64_t scaling_b, const Tensor& offs, const OptionalTensor& bias,
                         at::ScalarType type, bool use_fast_accum) {
  const Tensor ends = check_operands(a, b, offs);
  const c10::DeviceGuard guard(a.device());  // whose kernels are chosen
  CUDA_EXT_CHECK(type == at::kFloat || type == at::kHalf || type == at::kBFloat16, kOp,
                 "expected output_dtype float32, float16 or bfloat16, got ", dtype_name(type));
  if (b.dim() == 3)
    return multiply_rows(a, b, scale_a, scaling_a, scale_b, scaling_b, ends, bias, type, use_fast_accum);
  CUDA_EXT_CHECK(!is_given(bias), kOp, "expected no bias where the groups cut the terms of a sum");
  const Terms terms = check_terms(a, b, scale_a, scaling_a, scale_b, scaling_b, ends);
  const Tensor out = empty_beside(a, terms.sizes(), type);
  sum_terms_into(out, terms, 0);
  return out;
}

// The gradient of the matrices of all groups, into its slot (ops/gradient_slots.h): slot = alpha * sums + beta * slot.
void scaled_grouped_mm_slot(const Tensor& a, const Tensor& b, const Tensor& scale_a, int64_t scaling_a,
                            const Tensor& scale_b, int64_t scaling_b, const Tensor& offs, const Tensor& slot,
                            double alpha, double beta) {
  const Tensor ends = check_operands(a, b, offs);
  const c10::DeviceGuard guard(a.device());
  CUDA_EXT_CHECK(b.dim() == 2, kOp, "expected mat_b of shape (", a.size(1), ", N) to write to weight_slot, got ",
                 shape_string(b));
  Terms terms = check_terms(a, b, scale_a, scaling_a, scale_b, scaling_b, ends);
  check_given(kOp, "weight_slot", slot);
  check_same_device(kOp, "weight_slot", slot, "mat_a", a);
  CUDA_EXT_CHECK(is_floating(slot.scalar_type()) && slot.scalar_type() != at::kDouble &&
                     slot.sizes() == at::IntArrayRef(terms.sizes()) && slot.is_contiguous(),
                 kOp, "expected weight_slot contiguous, of shape ", shape_string(terms.sizes()),
                 " and dtype float32, float16 or bfloat16, got shape ", shape_string(slot), " with strides ",
                 shape_string(slot.strides()), " of ", dtype_name(slot.scalar_type()));
  if (alpha != 1) terms.scale_b.scales = terms.scale_b.scales * alpha;
  sum_terms_into(slot, terms, beta);
}

Tensor scaled_grouped_mm_autograd(const Tensor& a, const Tensor& b, const Tensor& scale_a, int64_t scaling_a,
                                  const Tensor& scale_b, int64_t scaling_b, const Tensor& offs,
                                  const OptionalTensor& bias, at::ScalarType type, bool use_fast_accum) {
  CUDA_EXT_CHECK(!any_requires_grad(a, b, scale_a, scale_b, bias) && !any_has_tangent(a, b, scale_a, scale_b, bias),
                 kOp, "expected no tensor that requires grad: products of FP8 have no derivative; call this op ",
                 "under torch.no_grad()");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  static const auto op = find_op<decltype(scaled_grouped_mm)>(CUDA_EXT_OP("scaled_grouped_mm"));
  return op.call(a, b, scale_a, scaling_a, scale_b, scaling_b, offs, bias, type, use_fast_accum);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::flexible_layout};
  m.def(
      "scaled_grouped_mm(Tensor mat_a, Tensor mat_b, Tensor scale_a, int scaling_a, Tensor scale_b, int scaling_b, "
      "Tensor offs, Tensor? bias=None, *, ScalarType output_dtype, bool use_fast_accum=False) -> Tensor",
      tags);
  m.def(
      "scaled_grouped_mm.slot(Tensor mat_a, Tensor mat_b, Tensor scale_a, int scaling_a, Tensor scale_b, "
      "int scaling_b, Tensor offs, *, Tensor(a!) weight_slot, float slot_alpha, float slot_beta) -> ()",
      tags);
  register_layout_errors(m, {"scaled_grouped_mm", "scaled_grouped_mm.slot"});
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CPU, m) {
  m.impl("scaled_grouped_mm", scaled_grouped_mm);
  m.impl("scaled_grouped_mm.slot", scaled_grouped_mm_slot);
}
TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CUDA, m) {
  m.impl("scaled_grouped_mm", scaled_grouped_mm);
  m.impl("scaled_grouped_mm.slot", scaled_grouped_mm_slot);
}
TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, Autograd, m) {
  m.impl("scaled_grouped_mm", scaled_grouped_mm_autograd);
  m.impl("scaled_grouped_mm.slot", torch::CppFunction::makeFallthrough());  // called in backward
}

}  // namespace cuda_ext
