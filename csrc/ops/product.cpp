#include "ops/torch_headers.h"

#include "ops/product.h"

#include <ATen/Context.h>

#include <torch/library.h>

#include <algorithm>
#include <atomic>

#include "gemm/grouped_gemm.h"
#include "ops/float64.h"
#include "ops/tuning.h"

namespace cuda_ext {

namespace {
std::atomic<bool> batch_invariant = false;
}

Activation parse_activation(const char* op, const ActivationName& name) {
  if (!name.has_value()) return Activation::kNone;
  std::string known = "None";
  for (size_t i = 1; i < std::size(kActivationNames); ++i) {
    if (*name == kActivationNames[i]) return Activation(i);
    known += i + 1 < std::size(kActivationNames) ? ", '" : " or '";
    known.append(kActivationNames[i]) += "'";
  }
  CUDA_EXT_CHECK(false, op, "expected activation to be ", known, ", got '", *name, "'");
}

bool is_batch_invariant() { return batch_invariant.load(std::memory_order_relaxed); }

Tensor left_operand(const Tensor& tensor) {
  if (!is_batch_invariant()) return with_unit_stride(tensor);
  const bool is_aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  return tensor.is_contiguous() && is_aligned ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

Float32Product float32_product() {
  const bool exact = at::globalContext().float32MatmulPrecision() == at::Float32MatmulPrecision::HIGHEST;
  return exact ? Float32Product::kThreeTf32 : Float32Product::kTf32;
}

at::ScalarType output_type(const char* op, const OptionalType& wanted, at::ScalarType input) {
  const auto type = wanted.value_or(input);
  CUDA_EXT_CHECK(is_floating(type) && (type == at::kDouble) == (input == at::kDouble), op,
                 "expected out_dtype float32, float16 or bfloat16 (float64 for float64 inputs), got ", dtype_name(type),
                 " for inputs of ", dtype_name(input));
  return type;
}

void check_addend(const char* op, const char* argument, const Tensor& addend, const Tensor& input,
                  at::ScalarType out_type, at::IntArrayRef out) {
  CUDA_EXT_CHECK(addend.scalar_type() == input.scalar_type() || addend.scalar_type() == out_type, op, "expected ",
                 argument, " of dtype ", dtype_name(input.scalar_type()), " (the inputs') or ", dtype_name(out_type),
                 " (the output's), got ", dtype_name(addend.scalar_type()), "; convert it with .to()");
  check_same_device(op, argument, addend, "the inputs", input);
  bool broadcasts = addend.dim() <= int64_t(out.size());
  for (int64_t d = 1; broadcasts && d <= addend.dim(); ++d)
    broadcasts = addend.size(-d) == 1 || addend.size(-d) == out[out.size() - d];
  CUDA_EXT_CHECK(broadcasts, op, "expected ", argument, " to broadcast to the output ", shape_string(out), ", got ",
                 shape_string(addend));
}

void check_bias(const char* op, const char* argument, const Tensor& bias, const Tensor& input, at::ScalarType out_type,
                int64_t n) {
  CUDA_EXT_CHECK(bias.dim() == 1 && bias.size(0) == n, op, "expected ", argument, " of shape (", n, ",), got ",
                 shape_string(bias));
  check_addend(op, argument, bias, input, out_type, {n});
}

void check_projection(const char* op, const char* input_name, const Tensor& input, const char* weight_name,
                      const Tensor& weight, const char* bias_name, const OptionalTensor& bias, bool gated) {
  check_floating(op, input_name, input);
  check_same_dtype(op, weight_name, weight, input_name, input);
  check_same_device(op, weight_name, weight, input_name, input);
  CUDA_EXT_CHECK(input.dim() >= 1, op, "expected ", input_name, " of shape (..., K), got a 0-dim tensor");
  CUDA_EXT_CHECK(weight.dim() == 2 && weight.size(1) == input.size(-1), op, "expected ", weight_name, " of shape (",
                 gated ? "2N, " : "N, ", input.size(-1), ") to match ", input_name, " ", shape_string(input), ", got ",
                 shape_string(weight));
  CUDA_EXT_CHECK(!gated || weight.size(0) % 2 == 0, op, "expected ", weight_name,
                 " to have an even number of rows, [gate; up], got ", shape_string(weight));
  if (is_given(bias)) check_bias(op, bias_name, *bias, input, input.scalar_type(), weight.size(0));
}

void check_gradient(const char* op, const Tensor& grad_out, at::IntArrayRef out) {
  check_floating(op, "grad_out", grad_out);
  CUDA_EXT_CHECK(grad_out.sizes() == out, op, "expected grad_out of shape ", shape_string(out), ", got ",
                 shape_string(grad_out));
}

namespace {

// Whether a dim of stride `outer` continues one of stride `inner` and `size`, so that they can be merged.
bool continues(int64_t outer, int64_t size, int64_t inner) { return size == 1 || outer == size * inner; }

void check_room(const char* op, int dims) {
  CUDA_EXT_CHECK(dims < kMaxBatchDims, op, "expected at most ", kMaxBatchDims,
                 " batch dims that cannot be merged; make the tensors contiguous with .contiguous()");
}

void add_reduced_dim(const char* op, GemmParams& p, const BatchDim& dim) {
  const int last = p.reduced_dims - 1;
  if (dim.size == 0) {
    p.k = 0;
  } else if (last < 0 && continues(dim.a, p.k, p.a.column_stride) && continues(dim.b, p.k, p.b.row_stride)) {
    if (p.k == 1) p.a.column_stride = dim.a, p.b.row_stride = dim.b;
    p.k *= dim.size;
  } else if (last >= 0 && continues(dim.a, p.reduced_sizes[last], p.reduced_strides_a[last]) &&
             continues(dim.b, p.reduced_sizes[last], p.reduced_strides_b[last])) {
    p.reduced_sizes[last] *= dim.size;
  } else {
    check_room(op, p.reduced_dims);
    p.reduced_sizes[p.reduced_dims] = dim.size;
    p.reduced_strides_a[p.reduced_dims] = dim.a;
    p.reduced_strides_b[p.reduced_dims] = dim.b;
    ++p.reduced_dims;
  }
}

void add_batch_dim(const char* op, GemmParams& p, const BatchDim& dim) {
  const int last = p.batch_dims - 1;
  const auto follows = [&](int64_t stride, const Operand& operand) {
    return continues(stride, p.batch_sizes[last], operand.batch_strides[last]);
  };
  if (last < 0 && dim.b == 0 && continues(dim.a, p.m, p.a.row_stride) && continues(dim.c, p.m, p.c.row_stride) &&
      continues(dim.residual, p.m, p.residual.row_stride)) {
    if (p.m == 1) p.a.row_stride = dim.a, p.c.row_stride = dim.c, p.residual.row_stride = dim.residual;
    p.m *= dim.size;
  } else if (last >= 0 && follows(dim.a, p.a) && follows(dim.b, p.b) && follows(dim.c, p.c) &&
             follows(dim.residual, p.residual)) {
    p.batch_sizes[last] *= dim.size;
  } else {
    check_room(op, p.batch_dims);
    p.batch_sizes[p.batch_dims] = dim.size;
    p.a.batch_strides[p.batch_dims] = dim.a;
    p.b.batch_strides[p.batch_dims] = dim.b;
    p.c.batch_strides[p.batch_dims] = dim.c;
    p.residual.batch_strides[p.batch_dims] = dim.residual;
    ++p.batch_dims;
  }
}

}  // namespace

void set_batch(const char* op, GemmParams& params, const BatchDims& dims) {
  for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim) {
    if (dim->size == 1) continue;
    if (dim->reduced)
      add_reduced_dim(op, params, *dim);
    else
      add_batch_dim(op, params, *dim);
  }
}

namespace {

// input (..., k) as the rows of params.a, `residual` (may be undefined) broadcast to (..., n).
void set_rows(const char* op, GemmParams& params, const Tensor& input, const Tensor& residual) {
  const int64_t dims = input.dim();
  params.a = matrix(input);
  params.m = dims >= 2 ? input.size(dims - 2) : 1;
  params.k = input.size(dims - 1);
  if (residual.defined()) {
    params.residual = matrix(residual);
    params.residual.row_stride = broadcast_stride(residual, dims - 2, dims);
    params.residual.column_stride = broadcast_stride(residual, dims - 1, dims);
  }
  if (dims <= 2) return;
  BatchDims batch;
  for (int64_t d = 0; d < dims - 2; ++d)
    batch.push_back(
        {input.size(d), false, input.stride(d), 0, 0, residual.defined() ? broadcast_stride(residual, d, dims) : 0});
  set_batch(op, params, batch);
}

}  // namespace

void run_gemm(const char* op, const Tensor& out, const GemmParams& params) {
  const at::Device device = out.device();
  const CudaKernels* kernels = cuda_kernels(op, device);
  if (kernels == nullptr)
    return params.groups.cut == Groups::Cut::kNone ? launch_gemm(params) : run_grouped_gemm(params);
  if (params.a.dtype == Dtype::kFloat64) return gemm_in_float64(params, device);
  const Float32Product float32 = float32_product();
  LaunchScope scope(device);
  launch_for(op, [&] {
    const auto launch = [&](const GemmParams& launched, const Restriction& only) {
      kernels->gemm(launched, scope.allocator(), scope.stream(), float32, only);
    };
    const bool is_grouped = params.groups.cut != Groups::Cut::kNone;
    launch(params, is_grouped ? Restriction{} : tuned_plan(*kernels, params, float32, device, launch));
  });
}

Projection project(const char* op, const Tensor& given_input, const Tensor& given_weight, const OptionalTensor& bias,
                   const OptionalTensor& residual, Activation activation, bool gated, bool save_preact) {
  const Tensor input = left_operand(given_input), weight = with_unit_stride(given_weight);
  const auto type = input.scalar_type();
  const int64_t width = weight.size(0);
  GemmParams params;
  params.n = gated ? width / 2 : width;
  Projection result{empty_beside(input, replace_last(input.sizes(), 1, {params.n}), type),
                    save_preact ? empty_beside(input, replace_last(input.sizes(), 1, {width}), type) : Tensor()};
  if (result.out.numel() == 0) return result;
  set_rows(op, params, input, value_or_empty(residual));
  params.b = transposed(matrix(weight));
  if (is_given(bias)) params.bias = matrix(*bias);
  params.activation = activation;
  params.gated = gated;
  params.batch_invariant = is_batch_invariant();
  params.out = output(result.out);
  if (save_preact) params.preact_out = output(result.preact);
  run_gemm(op, result.out, params);
  return result;
}

Tensor input_gradient(const char* op, const Tensor& given_grad, const Tensor& given_weight, at::ScalarType type) {
  const Tensor grad = left_operand(given_grad), weight = with_unit_stride(given_weight);
  Tensor result = empty_beside(grad, replace_last(grad.sizes(), 1, {weight.size(1)}), type);
  if (result.numel() == 0) return result;
  GemmParams params;
  params.batch_invariant = is_batch_invariant();
  params.n = weight.size(1);
  set_rows(op, params, grad, Tensor());
  params.b = matrix(weight);
  params.out = output(result);
  run_gemm(op, result, params);
  return result;
}

void check_slot(const char* op, const WeightSlot& into, const Tensor& weight) {
  if (!is_given(into.slot)) return;
  const Tensor& slot = *into.slot;
  check_same_device(op, into.argument, slot, "weight", weight);
  CUDA_EXT_CHECK(
      is_floating(slot.scalar_type()) && (slot.scalar_type() == at::kDouble) == (weight.scalar_type() == at::kDouble),
      op, "expected ", into.argument, " of dtype float32, float16 or bfloat16 (float64 for a weight of ",
      "float64), got ", dtype_name(slot.scalar_type()), " for a weight of ", dtype_name(weight.scalar_type()));
  CUDA_EXT_CHECK(slot.sizes() == weight.sizes() && slot.is_contiguous(), op, "expected ", into.argument,
                 " contiguous and of shape ", shape_string(weight), ", that of the weight, got shape ",
                 shape_string(slot), " with strides ", shape_string(slot.strides()));
}

Tensor weight_gradient(const char* op, const Tensor& given_grad, const Tensor& given_input, at::ScalarType type,
                       const WeightSlot* into) {
  const Tensor grad = with_unit_stride(given_grad), input = with_unit_stride(given_input);
  const int64_t dims = grad.dim();
  const bool has_slot = into != nullptr && is_given(into->slot);
  GemmParams params;
  params.m = grad.size(dims - 1);
  params.n = input.size(dims - 1);
  params.k = dims >= 2 ? grad.size(dims - 2) : 1;
  const Tensor result = has_slot ? *into->slot : empty_beside(grad, {params.m, params.n}, type);
  if (result.numel() > 0) {
    params.a = transposed(matrix(grad));
    params.b = matrix(input);
    if (has_slot) {
      params.alpha = into->alpha;
      params.beta = into->beta;
      if (into->beta != 0.0) params.c = matrix(result);
    }
    BatchDims batch;
    for (int64_t d = 0; d < dims - 2; ++d) batch.push_back({grad.size(d), true, grad.stride(d), input.stride(d), 0, 0});
    set_batch(op, params, batch);
    params.out = output(result);
    run_gemm(op, result, params);
  }
  return has_slot ? absent(grad, type) : result;
}

Tensor flatten_rows(const Tensor& tensor) {
  const int64_t n = tensor.size(-1);
  return tensor.reshape({n == 0 ? 0 : tensor.numel() / n, n});
}

ActivationGradient activation_gradient(const char* op, const Tensor& grad, const Tensor& preact, Activation activation,
                                       bool gated, bool bias_wanted, at::ScalarType bias_type) {
  const auto type = grad.scalar_type();
  const bool elementwise = gated || activation != Activation::kNone;
  const int64_t n = grad.size(-1), width = gated ? 2 * n : n;
  ActivationGradient result{elementwise ? empty_beside(grad, replace_last(grad.sizes(), 1, {width}), type) : grad,
                            bias_wanted ? empty_beside(grad, {width}, bias_type) : absent(grad, bias_type)};
  if (n == 0 || !(elementwise || bias_wanted)) return result;
  const Tensor rows = flatten_rows(grad);
  Tensor preact_rows;
  ActivationGradParams params;
  params.rows = rows.size(0);
  params.n = n;
  params.grad_out = matrix(rows);
  params.activation = activation;
  params.gated = gated;
  if (elementwise) {
    preact_rows = flatten_rows(preact);
    params.preact = matrix(preact_rows);
    params.grad_preact = output(result.grad_preact);
  }
  if (bias_wanted) params.bias_grad = output(result.bias);
  const CudaKernels* kernels = cuda_kernels(op, grad.device());
  if (kernels == nullptr) {
    launch_activation_grad(params);
  } else if (type == at::kDouble) {
    activation_grad_in_float64(params, grad.device());
  } else {
    LaunchScope scope(grad.device());
    kernels->activation_grad(params, scope.allocator(), scope.stream());
  }
  return result;
}

Tensor bias_gradient(const char* op, const Tensor& grad, bool wanted, at::ScalarType type) {
  return activation_gradient(op, grad, Tensor(), Activation::kNone, false, wanted, type).bias;
}

}  // namespace cuda_ext

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  // Sets whether the bits of an output row may depend on the other rows, for the whole process; returns what was set.
  m.def("_set_batch_invariant(bool enabled) -> bool",
        [](bool enabled) { return cuda_ext::batch_invariant.exchange(enabled); });
}
