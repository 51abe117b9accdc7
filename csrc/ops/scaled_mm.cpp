// scaled_mm: products of operands in FP8 with scales, and quantize_fp8, which makes such operands.
#include "ops/torch_headers.h"

#include <ATen/ops/constant_pad_nd.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "gemm/quantize.h"
#include "ops/gemm_autograd.h"
#include "ops/gemm_composed.h"
#include "ops/scaled_mm.h"
#include "ops/tuning.h"

namespace cuda_ext {

bool is_fp8(at::ScalarType type) { return type == at::kFloat8_e4m3fn || type == at::kFloat8_e5m2; }

bool has_aligned_lines(const Tensor& matrix) {
  const bool aligned = matrix.size(0) == 1 || (matrix.stride(0) > 0 && matrix.stride(0) % kAlignment == 0);
  return aligned && (matrix.size(1) == 1 || matrix.stride(1) == 1) &&
         reinterpret_cast<uintptr_t>(matrix.const_data_ptr()) % kAlignment == 0;
}

void check_fp8(const char* op, const char* argument, const Tensor& tensor) {
  check_given(op, argument, tensor);
  CUDA_EXT_CHECK(tensor.dim() == 2 && is_fp8(tensor.scalar_type()), op, "expected ", argument,
                 " of two dims and dtype float8_e4m3fn or float8_e5m2, got ", shape_string(tensor), " of ",
                 dtype_name(tensor.scalar_type()), "; convert it with cuda_ext.fp8.quantize");
}

ScaleLines check_scales(const char* op, const char* argument, const Tensor& scales, int64_t scaling,
                        const Tensor& operand, bool is_b) {
  check_given(op, argument, scales);
  check_same_device(op, argument, scales, "mat_a", operand);
  CUDA_EXT_CHECK(scales.scalar_type() == at::kFloat, op, "expected ", argument, " of dtype float32, got ",
                 dtype_name(scales.scalar_type()), "; convert it with .float()");
  const int64_t lines = operand.size(is_b ? 1 : 0), k = operand.size(is_b ? 0 : 1);
  const auto check = [&](bool fits, const char* name, const Sizes& expected) {
    CUDA_EXT_CHECK(fits, op, "expected ", argument, " of shape ", shape_string(expected), " for ",
                   is_b ? "mat_b " : "mat_a ", shape_string(operand), " with scaling ", name, ", got ",
                   shape_string(scales));
  };
  switch (scaling) {
    case kTensorWise:
      CUDA_EXT_CHECK(scales.numel() == 1, op, "expected ", argument, " of one element for scaling TensorWise, got ",
                     shape_string(scales));
      return {scales.reshape({1, 1}), 0, false};
    case kRowWise:
      check(scales.numel() == lines, "RowWise", is_b ? Sizes{1, lines} : Sizes{lines, 1});
      return {scales.reshape({lines, 1}), 0, false};
    case kBlockWise1x128: {
      const Sizes expected{lines, blocks_of(k)};
      check(scales.sizes() == at::IntArrayRef(expected), "BlockWise1x128", expected);
      return {scales, 0, true};
    }
    case kBlockWise128x128: {
      constexpr int kShift = 7;
      static_assert(kScaleBlock == 1 << kShift);
      const Sizes expected{blocks_of(k), blocks_of(lines)}, padded{(blocks_of(k) + 3) / 4 * 4, blocks_of(lines)};
      check(scales.sizes() == at::IntArrayRef(expected) || scales.sizes() == at::IntArrayRef(padded),
            "BlockWise128x128", expected);
      return {scales.t(), kShift, true};
    }
    default:
      CUDA_EXT_CHECK(false, op, "expected scaling TensorWise, RowWise, BlockWise1x128 or BlockWise128x128 for ",
                     argument, ", got number ", scaling, " of torch.nn.functional.ScalingType");
  }
}

Tensor empty_lines(const Tensor& beside, int64_t lines, int64_t elements, at::ScalarType type) {
  const int64_t pitch = (elements + kAlignment - 1) / kAlignment * kAlignment;
  return empty_beside(beside, {lines, pitch}, type).narrow(1, 0, elements);
}

Tensor with_aligned_lines(const Tensor& matrix) {
  if (has_aligned_lines(matrix)) return matrix;
  Tensor lines = empty_lines(matrix, matrix.size(0), matrix.size(1), matrix.scalar_type());
  lines.copy_(matrix);
  return lines;
}

bool has_kernel(const CudaKernels& kernels, const ScaledGemmParams& params) {
  return kernels.choose_scaled_gemm(params, {}).kernel != ScaledGemmChoice::Kernel::kNone;
}

void launch_scaled(const char* op, const CudaKernels& kernels, const ScaledGemmParams& params, at::Device device) {
  LaunchScope scope(device);
  const auto launch = [&](const ScaledGemmParams& launched, const Restriction& only) {
    kernels.scaled_gemm(launched, kernels.choose_scaled_gemm(launched, only), scope.allocator(), scope.stream());
  };
  launch_for(op, [&] { launch(params, tuned_plan(kernels, params, device, launch)); });
}

namespace {

constexpr const char* kOp = "scaled_mm";
constexpr const char* kQuantize = "quantize_fp8";

// On CUDA devices without a kernel: exact products in bfloat16 with float32 output, and their scales. In float32.
Tensor composed_scaled_mm(const Tensor& a, const Tensor& b, const ScaleLines& scale_a, const ScaleLines& scale_b,
                          const OptionalTensor& bias, const OptionalTensor& c, double beta) {
  const int64_t m = a.size(0), n = b.size(1), k = a.size(1);
  const Tensor exact_a = a.to(at::kBFloat16), exact_b = b.to(at::kBFloat16);
  const bool has_blocks = scale_a.has_blocks || scale_b.has_blocks;
  const int64_t block = has_blocks ? kScaleBlock : std::max<int64_t>(k, 1);
  Tensor sum;
  for (int64_t first = 0; first < k || !sum.defined(); first += block) {
    const int64_t size = std::min(block, k - first);
    const Tensor product =
        call_gemm(exact_a.narrow(1, first, size), exact_b.narrow(0, first, size), {}, {}, {}, 1.0, 1.0, at::kFloat);
    if (size > 0)  // else there may be no scales
      product.mul_(scale_a.of_block(first / kScaleBlock, m)).mul_(scale_b.of_block(first / kScaleBlock, n).t());
    sum = sum.defined() ? sum.add_(product) : product;
  }
  if (is_given(bias)) sum.add_(*bias);
  if (is_given(c) && beta != 0) sum.add_(c->to(at::kFloat), beta);
  return sum;
}

// What scaled_mm multiplies, checked.
struct ScaledOperands {
  const Tensor &a, &b;
  ScaleLines scale_a, scale_b;

  static ScaledOperands check(const Tensor& a, const Tensor& b, const Tensor& scale_a, int64_t scaling_a,
                              const Tensor& scale_b, int64_t scaling_b) {
    check_fp8(kOp, "mat_a", a);
    check_fp8(kOp, "mat_b", b);
    check_same_device(kOp, "mat_b", b, "mat_a", a);
    CUDA_EXT_CHECK(a.size(1) == b.size(0), kOp, "expected mat_b of shape (", a.size(1), ", N) to match mat_a ",
                   shape_string(a), ", got ", shape_string(b));
    return {a, b, check_scales(kOp, "scale_a", scale_a, scaling_a, a, false),
            check_scales(kOp, "scale_b", scale_b, scaling_b, b, true)};
  }
};

// out (M, N) = the product + bias + beta * c, which may be out.
void multiply_into(const Tensor& out, const ScaledOperands& operands, const OptionalTensor& bias,
                   const OptionalTensor& c, double beta, bool use_fast_accum) {
  const auto& [a, b, scale_a, scale_b] = operands;
  const CudaKernels* const kernels = cuda_kernels(kOp, a.device());
  if (out.numel() == 0) return;
  ScaledGemmParams params;
  params.m = out.size(0);
  params.n = out.size(1);
  params.k = a.size(1);
  params.a = matrix(a);
  params.b = matrix(b);
  params.scale_a = scale_a.params();
  params.scale_b = scale_b.params();
  if (is_given(bias)) params.bias = matrix(*bias);
  if (is_given(c) && beta != 0) params.c = matrix(*c);
  params.beta = beta;
  params.fast_accum = use_fast_accum;
  params.batch_invariant = is_batch_invariant();
  params.out = output(out);
  if (kernels == nullptr) return launch_scaled_gemm(params);
  if (!has_kernel(*kernels, params)) {
    out.copy_(composed_scaled_mm(a, b, scale_a, scale_b, bias, c, beta));
    return;
  }
  const Tensor lines_of_a = with_aligned_lines(a), lines_of_b = with_aligned_lines(b.t());
  params.a = matrix(lines_of_a);
  params.b = transposed(matrix(lines_of_b));
  launch_scaled(kOp, *kernels, params, a.device());
}

Tensor scaled_mm(const Tensor& a, const Tensor& b, const Tensor& scale_a, int64_t scaling_a, const Tensor& scale_b,
                 int64_t scaling_b, const OptionalTensor& bias, const OptionalTensor& c, double beta,
                 at::ScalarType type, bool use_fast_accum) {
  const ScaledOperands operands = ScaledOperands::check(a, b, scale_a, scaling_a, scale_b, scaling_b);
  CUDA_EXT_CHECK(type == at::kFloat || type == at::kHalf || type == at::kBFloat16, kOp,
                 "expected output_dtype float32, float16 or bfloat16, got ", dtype_name(type));
  const int64_t m = a.size(0), n = b.size(1);
  if (is_given(bias)) {
    check_same_device(kOp, "bias", *bias, "mat_a", a);
    CUDA_EXT_CHECK(bias->dim() == 1 && bias->size(0) == n && is_floating(bias->scalar_type()) &&
                       bias->scalar_type() != at::kDouble,
                   kOp, "expected bias of shape (", n, ",) and dtype float32, float16 or bfloat16, got ",
                   shape_string(*bias), " of ", dtype_name(bias->scalar_type()));
  }
  OptionalTensor addend;
  if (is_given(c)) {
    check_same_device(kOp, "input", *c, "mat_a", a);
    CUDA_EXT_CHECK(is_floating(c->scalar_type()) && c->scalar_type() != at::kDouble, kOp,
                   "expected input of dtype float32, float16 or bfloat16, got ", dtype_name(c->scalar_type()));
    addend = c->expand({m, n});
  }
  const c10::DeviceGuard guard(a.device());  // whose kernels are chosen
  const Tensor out = empty_beside(a, {m, n}, type);
  multiply_into(out, operands, bias, addend, beta, use_fast_accum);
  return out;
}

// The gradient of a weight, into its slot (ops/gradient_slots.h): slot = alpha * product + beta * slot.
void scaled_mm_slot(const Tensor& a, const Tensor& b, const Tensor& scale_a, int64_t scaling_a, const Tensor& scale_b,
                    int64_t scaling_b, const Tensor& slot, double alpha, double beta) {
  ScaledOperands operands = ScaledOperands::check(a, b, scale_a, scaling_a, scale_b, scaling_b);
  check_given(kOp, "weight_slot", slot);
  check_same_device(kOp, "weight_slot", slot, "mat_a", a);
  CUDA_EXT_CHECK(is_floating(slot.scalar_type()) && slot.scalar_type() != at::kDouble &&
                     slot.sizes() == at::IntArrayRef({a.size(0), b.size(1)}) && slot.is_contiguous(),
                 kOp, "expected weight_slot contiguous, of shape ", shape_string(Sizes{a.size(0), b.size(1)}),
                 " and dtype float32, float16 or bfloat16, got shape ", shape_string(slot), " with strides ",
                 shape_string(slot.strides()), " of ", dtype_name(slot.scalar_type()));
  if (alpha != 1) operands.scale_b.scales = operands.scale_b.scales * alpha;
  const c10::DeviceGuard guard(a.device());
  multiply_into(slot, operands, {}, slot, beta, /*use_fast_accum=*/false);
}

// FP8 numbers have no derivative.
Tensor scaled_mm_autograd(const Tensor& a, const Tensor& b, const Tensor& scale_a, int64_t scaling_a,
                          const Tensor& scale_b, int64_t scaling_b, const OptionalTensor& bias, const OptionalTensor& c,
                          double beta, at::ScalarType type, bool use_fast_accum) {
  CUDA_EXT_CHECK(
      !any_requires_grad(a, b, scale_a, scale_b, bias, c) && !any_has_tangent(a, b, scale_a, scale_b, bias, c), kOp,
      "expected no tensor that requires grad: products of FP8 have no derivative; call ",
      "cuda_ext.fp8.linear, which has, or this op under torch.no_grad()");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  static const auto op = find_op<decltype(scaled_mm)>(CUDA_EXT_OP("scaled_mm"));
  return op.call(a, b, scale_a, scaling_a, scale_b, scaling_b, bias, c, beta, type, use_fast_accum);
}

using Numbers = c10::Dict<std::string, int64_t>;

// What the kernel on wgmma would do, or why it cannot run, for the paper model.
std::tuple<std::string, Numbers> scaled_mm_plan(int64_t m, int64_t n, int64_t k, int64_t compute_capability,
                                                int64_t num_sms, int64_t groups, bool use_fast_accum, bool of_terms) {
  ScaledGemmParams params;
  params.m = m;
  params.n = n;
  params.k = k;
  params.a.dtype = params.b.dtype = Dtype::kFloat8E4M3;
  params.out.dtype = Dtype::kBFloat16;
  if (groups > 0) params.groups = {of_terms ? Groups::Cut::kTerms : Groups::Cut::kRows, nullptr, groups};
  params.fast_accum = use_fast_accum;
  params.batch_invariant = is_batch_invariant();
  const rt::Device device{int(compute_capability), int(num_sms), rt::shared_bytes_of_sm(90)};
  const sm90::ScaledChoice choice = groups > 0 && !of_terms ? sm90::choose_scaled_groups_plan(params, device)
                                                            : sm90::choose_scaled_plan(params, device);
  const sm90::ScaledPlan& plan = choice.plan;
  Numbers numbers;
  numbers.insert("config", plan.config);
  numbers.insert("block_m", sm90::kScaledConfigs[plan.config].block_m);
  numbers.insert("stages", sm90::kScaledConfigs[plan.config].stages);
  numbers.insert("block_n", sm90::kScaledConfigs[plan.config].block_n);
  numbers.insert("cluster", plan.cluster);
  numbers.insert("clusters", plan.clusters);
  numbers.insert("row_tiles", plan.row_tiles);
  numbers.insert("column_groups", plan.column_groups);
  numbers.insert("raster", plan.raster);
  numbers.insert("splits", plan.splits);
  numbers.insert("k_tiles", plan.split_k_tiles);
  numbers.insert("tma_store", plan.tma_store);
  return {choice.refusal, numbers};
}

// A matrix in FP8 and its scales, allocated.
struct Quantized {
  Tensor data, scales;
  QuantizedMatrix matrix;

  Quantized(const Tensor& beside, int64_t lines, int64_t elements, at::ScalarType type, ScaleShape shape) {
    data = empty_lines(beside, lines, elements, type);
    matrix.data = data.mutable_data_ptr();
    matrix.line_stride = data.stride(0);
    // As scaled_mm takes them: those of squares are (blocks of elements, blocks of lines).
    const int64_t element_blocks = blocks_of(elements);
    switch (shape) {
      case ScaleShape::kAll: scales = empty_beside(beside, {1, 1}, at::kFloat); break;
      case ScaleShape::kLine: scales = empty_beside(beside, {lines, 1}, at::kFloat); break;
      case ScaleShape::kLineBlock: scales = empty_beside(beside, {element_blocks, lines}, at::kFloat).t(); break;
      case ScaleShape::kSquareBlock:
        scales = empty_beside(beside, {blocks_of(lines), element_blocks}, at::kFloat).t();
        break;
    }
    const bool is_square = shape == ScaleShape::kSquareBlock;
    matrix.scales = scales.data_ptr<float>();
    matrix.scale_line_stride = scales.stride(is_square ? 1 : 0);
    matrix.scale_block_stride = scales.stride(is_square ? 0 : 1);
  }
};

ScaleShape check_quantize(const Tensor& input, at::ScalarType type, int64_t scaling) {
  check_floating(kQuantize, "input", input);
  CUDA_EXT_CHECK(input.dim() == 2 && input.scalar_type() != at::kDouble, kQuantize,
                 "expected input of two dims and dtype float32, float16 or bfloat16, got ", shape_string(input), " of ",
                 dtype_name(input.scalar_type()));
  CUDA_EXT_CHECK(is_fp8(type), kQuantize, "expected dtype float8_e4m3fn or float8_e5m2, got ", dtype_name(type));
  switch (scaling) {
    case kTensorWise: return ScaleShape::kAll;
    case kRowWise: return ScaleShape::kLine;
    case kBlockWise1x128: return ScaleShape::kLineBlock;
    case kBlockWise128x128: return ScaleShape::kSquareBlock;
    default:
      CUDA_EXT_CHECK(false, kQuantize,
                     "expected scaling TensorWise, RowWise, BlockWise1x128 or BlockWise128x128, got number ", scaling,
                     " of torch.nn.functional.ScalingType");
  }
}

// A matrix of `parts` side by side as CUDA kernels quantise it, copied if it is not: rows and parts that begin at
// multiples of 16 bytes, and zeros up to the next one after their end.
Tensor with_whole_vectors(const Tensor& matrix, int64_t parts) {
  const int64_t size = matrix.element_size(), vector = kAlignment / size, columns = matrix.size(1) / parts;
  const bool are_aligned = reinterpret_cast<uintptr_t>(matrix.const_data_ptr()) % kAlignment == 0 &&
                           (matrix.size(0) == 1 || matrix.stride(0) % vector == 0);
  if (are_aligned && columns % vector == 0) return matrix;
  const int64_t missing = (columns + vector - 1) / vector * vector - columns;
  return at::constant_pad_nd(matrix.view({matrix.size(0), parts, columns}), {0, missing}).flatten(1);
}

// What a call converts to FP8, and how.
struct Quantizing {
  at::ScalarType type;
  ScaleShape shape;
  bool power_of_two;
  bool stochastic = false;
  Activation activation = Activation::kNone;
  bool gated = false;

  int64_t columns(const Tensor& input) const { return input.size(1) / (gated ? 2 : 1); }
};

// Fills what is given: the input or its function, and the transpose.
void quantize(const Tensor& given, const Quantizing& how, Quantized* along_rows, Quantized* along_columns) {
  if (given.numel() == 0) {
    for (Quantized* out : {along_rows, along_columns})
      if (out != nullptr) out->scales.fill_(1);
    return;
  }
  const CudaKernels* const kernels = cuda_kernels(kQuantize, given.device());
  // Kernels read rows: a matrix that is contiguous along its columns is read as its transpose, unless it has two parts.
  const bool has_rows = given.size(1) == 1 || given.stride(1) == 1;
  const bool has_columns = !has_rows && !how.gated && (given.size(0) == 1 || given.stride(0) == 1);
  const Tensor rows = has_columns ? given.t() : has_rows ? given : given.contiguous();
  const Tensor input = kernels == nullptr ? rows : with_whole_vectors(rows, how.gated ? 2 : 1);
  QuantizeParams params;
  params.rows = rows.size(0);
  params.columns = how.columns(rows);
  params.shape = how.shape;
  params.power_of_two = how.power_of_two;
  params.stochastic = how.stochastic;
  if (how.stochastic) params.rng = draw_rng(given.device());
  params.input = matrix(input);
  params.function = {how.activation, how.gated, how.columns(input)};
  params.dtype = to_dtype(how.type);
  if (along_rows != nullptr) params.along_rows = along_rows->matrix;
  if (along_columns != nullptr) params.along_columns = along_columns->matrix;
  params.along_columns.rng_offset = 1;  // of the transpose, however it is in memory: numbers do not depend on strides
  if (has_columns) std::swap(params.along_rows, params.along_columns);
  if (kernels == nullptr) return launch_quantize(params);
  LaunchScope scope(input.device());
  launch_for(kQuantize, [&] { kernels->quantize(params, scope.allocator(), scope.stream()); });
}

using QuantizedOne = std::tuple<Tensor, Tensor>;
using QuantizedBoth = std::tuple<Tensor, Tensor, Tensor, Tensor>;

QuantizedOne quantize_one(const Tensor& input, const Quantizing& how) {
  Quantized out(input, input.size(0), how.columns(input), how.type, how.shape);
  quantize(input, how, &out, nullptr);
  return {out.data, out.scales};
}

QuantizedBoth quantize_both(const Tensor& input, const Quantizing& how) {
  Quantized out(input, input.size(0), how.columns(input), how.type, how.shape);
  Quantized transposed(input, how.columns(input), input.size(0), how.type, how.shape);
  quantize(input, how, &out, &transposed);
  return {out.data, out.scales, transposed.data, transposed.scales};
}

template <auto function, bool stochastic>
auto quantize_fp8(const Tensor& input, at::ScalarType type, int64_t scaling, bool power_of_two) {
  return function(input, {type, check_quantize(input, type, scaling), power_of_two, stochastic});
}

template <auto function>
auto quantize_fp8_activation(const Tensor& input, at::ScalarType type, int64_t scaling, bool power_of_two,
                             ActivationName activation, bool gated) {
  const ScaleShape shape = check_quantize(input, type, scaling);
  CUDA_EXT_CHECK(!gated || input.size(1) % 2 == 0, kQuantize, "expected gated input of shape (R, 2C), the gate first, ",
                 "got ", shape_string(input));
  return function(input, {type, shape, power_of_two, false, parse_activation(kQuantize, activation), gated});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::flexible_layout};
  m.def(
      "scaled_mm(Tensor mat_a, Tensor mat_b, Tensor scale_a, int scaling_a, Tensor scale_b, int scaling_b, "
      "Tensor? bias=None, Tensor? input=None, float beta=1.0, *, ScalarType output_dtype, "
      "bool use_fast_accum=False) -> Tensor",
      tags);
  m.def(
      "scaled_mm.slot(Tensor mat_a, Tensor mat_b, Tensor scale_a, int scaling_a, Tensor scale_b, int scaling_b, "
      "*, Tensor(a!) weight_slot, float slot_alpha, float slot_beta) -> ()",
      tags);
#define QUANTIZE_ARGUMENTS "(Tensor input, ScalarType dtype, int scaling, bool power_of_two=False"
#define ACTIVATION_ARGUMENTS QUANTIZE_ARGUMENTS ", *, str? activation, bool gated=False"
  m.def("quantize_fp8" QUANTIZE_ARGUMENTS ") -> (Tensor, Tensor)", tags);
  m.def("quantize_fp8_both" QUANTIZE_ARGUMENTS ") -> (Tensor, Tensor, Tensor, Tensor)", tags);
  m.def("quantize_fp8.activation" ACTIVATION_ARGUMENTS ") -> (Tensor, Tensor)", tags);
  m.def("quantize_fp8_both.activation" ACTIVATION_ARGUMENTS ") -> (Tensor, Tensor, Tensor, Tensor)", tags);
  // Overloads, because compilers may call an op twice, or once for two calls, unless it always draws random numbers.
  const std::vector<at::Tag> random = {at::Tag::pt2_compliant_tag, at::Tag::flexible_layout,
                                       at::Tag::nondeterministic_seeded};
  m.def("quantize_fp8.stochastic" QUANTIZE_ARGUMENTS ") -> (Tensor, Tensor)", random);
  m.def("quantize_fp8_both.stochastic" QUANTIZE_ARGUMENTS ") -> (Tensor, Tensor, Tensor, Tensor)", random);
#undef ACTIVATION_ARGUMENTS
#undef QUANTIZE_ARGUMENTS
  m.def(
      "_scaled_mm_plan(int m, int n, int k, int compute_capability, int num_sms, int groups=0, "
      "bool use_fast_accum=False, bool of_terms=False) -> (str, Dict(str, int))",
      scaled_mm_plan, tags);
  register_layout_errors(m, {"scaled_mm", "scaled_mm.slot"});
  register_layout_errors(m, {"quantize_fp8", "quantize_fp8.activation", "quantize_fp8.stochastic"});
  register_layout_errors(m, {"quantize_fp8_both", "quantize_fp8_both.activation", "quantize_fp8_both.stochastic"});
}

namespace {

void implement_quantize(torch::Library& m) {
  m.impl("quantize_fp8", quantize_fp8<quantize_one, false>);
  m.impl("quantize_fp8.stochastic", quantize_fp8<quantize_one, true>);
  m.impl("quantize_fp8.activation", quantize_fp8_activation<quantize_one>);
  m.impl("quantize_fp8_both", quantize_fp8<quantize_both, false>);
  m.impl("quantize_fp8_both.stochastic", quantize_fp8<quantize_both, true>);
  m.impl("quantize_fp8_both.activation", quantize_fp8_activation<quantize_both>);
}

}  // namespace

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CPU, m) {
  m.impl("scaled_mm", scaled_mm);
  m.impl("scaled_mm.slot", scaled_mm_slot);
  implement_quantize(m);
}
TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CUDA, m) {
  m.impl("scaled_mm", scaled_mm);
  m.impl("scaled_mm.slot", scaled_mm_slot);
  implement_quantize(m);
}
TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, Autograd, m) {
  m.impl("scaled_mm", scaled_mm_autograd);
  m.impl("scaled_mm.slot", torch::CppFunction::makeFallthrough());  // called in backward
  // What is quantised has no gradient.
  for (const std::string name : {"quantize_fp8", "quantize_fp8_both"})
    for (const char* const overload : {"", ".activation", ".stochastic"})
      m.impl((name + overload).c_str(), torch::CppFunction::makeFallthrough());
}

}  // namespace cuda_ext
