// The passes between the products of a mixture of experts, for cuda_ext/_experts.py: no user calls them.
//
// combine_experts adds the results of each token's experts, and experts_gate_backward is the gradient through the gate
// and the weights. The definitions are in gemm/expert_passes.h. They are not differentiable: what needs derivatives is
// composed of PyTorch's operations. gather_fp8 is index_select for FP8, which PyTorch does not have on every device.
#include "ops/torch_headers.h"

#include "gemm/expert_passes.h"
#include "ops/gemm_autograd.h"
#include "ops/gemm_composed.h"
#include "ops/scaled_mm.h"

namespace cuda_ext {
namespace {

constexpr const char* kCombine = "combine_experts";
constexpr const char* kGateBackward = "experts_gate_backward";

// Rows contiguous, copied if they are not.
Tensor with_contiguous_rows(const Tensor& matrix) {
  return matrix.size(1) <= 1 || matrix.stride(1) == 1 ? matrix : matrix.contiguous();
}

void check_matrix(const char* op, const char* argument, const Tensor& tensor) {
  check_floating(op, argument, tensor);
  CUDA_EXT_CHECK(tensor.dim() == 2, op, "expected ", argument, " of two dims, got ", shape_string(tensor));
}

Tensor checked_indices(const char* op, const char* argument, const Tensor& indices, int64_t dims,
                       const Tensor& beside) {
  check_given(op, argument, indices);
  check_same_device(op, argument, indices, "the matrix", beside);
  CUDA_EXT_CHECK(indices.dim() == dims && indices.scalar_type() == at::kLong, op, "expected ", argument, " of ", dims,
                 dims == 1 ? " dim" : " dims", " and dtype int64, got ", shape_string(indices), " of ",
                 dtype_name(indices.scalar_type()));
  return indices.contiguous();
}

// On the CPU, where it costs little.
void check_range(const char* op, const char* argument, const Tensor& indices, int64_t size) {
  const int64_t* const index = indices.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < indices.numel(); ++i)
    CUDA_EXT_CHECK(index[i] >= 0 && index[i] < size, op, "expected ", argument, " from 0 to ", size - 1, ", got ",
                   index[i]);
}

Tensor weights_for(const char* op, const Tensor& weights, const Tensor& beside) {
  check_floating(op, "weights", weights);
  check_same_device(op, "weights", weights, "the matrix", beside);
  return weights.to(accumulation_type(beside.scalar_type())).contiguous();
}

Tensor combine_in_float64(const Tensor& results, const Tensor& rows, const Tensor& weights) {
  Tensor sum;
  for (int64_t i = 0; i < rows.size(1); ++i) {
    const Tensor of_tokens = results.index_select(0, rows.select(1, i));
    const Tensor term = weights.defined() ? of_tokens * weights.narrow(1, i, 1) : of_tokens;
    sum = sum.defined() ? sum + term : term;
  }
  return sum;
}

// results (rows, N), rows (tokens, k), weights (tokens, k) or 1: (tokens, N)
Tensor combine_experts(const Tensor& results, const Tensor& given_rows, const OptionalTensor& given_weights) {
  check_matrix(kCombine, "results", results);
  const Tensor rows = checked_indices(kCombine, "rows", given_rows, 2, results);
  Tensor weights;
  if (is_given(given_weights)) {
    CUDA_EXT_CHECK(given_weights->sizes() == rows.sizes(), kCombine, "expected weights of shape ", shape_string(rows),
                   " to match rows, got ", shape_string(*given_weights));
    weights = weights_for(kCombine, *given_weights, results);
  }
  const CudaKernels* const kernels = cuda_kernels(kCombine, results.device());
  const c10::DeviceGuard guard(results.device());
  const int64_t tokens = rows.size(0), n = results.size(1);
  Tensor out = empty_beside(results, {tokens, n}, results.scalar_type());
  if (out.numel() == 0) return out;
  if (rows.size(1) == 0) return out.zero_();
  if (kernels != nullptr && results.scalar_type() == at::kDouble) return combine_in_float64(results, rows, weights);
  const Tensor read = with_contiguous_rows(results);
  CombineParams params;
  params.tokens = tokens;
  params.n = n;
  params.top_k = rows.size(1);
  params.results = matrix(read);
  params.rows = rows.const_data_ptr<int64_t>();
  params.weights = weights.defined() ? weights.const_data_ptr() : nullptr;
  params.out = output(out);
  if (kernels == nullptr) {
    check_range(kCombine, "rows", rows, results.size(0));
    launch_combine(params);
    return out;
  }
  const LaunchScope scope(results.device());
  launch_for(kCombine, [&] { kernels->combine_experts(params, scope.stream()); });
  return out;
}

using Gradients = std::tuple<Tensor, Tensor, Tensor>;

Gradients gate_backward_in_float64(const Tensor& grad, const Tensor& product, const Tensor& weights,
                                   const Tensor& pairs, Activation activation, bool gated, Gradients& out) {
  const Tensor of_rows = weights.index_select(0, pairs).unsqueeze(1), hidden = hidden_of(product, activation, gated);
  auto& [grad_product, weighted_hidden, grad_weights] = out;
  if (grad_product.numel() > 0) grad_product = hidden_backward(grad * of_rows, product, activation, gated);
  if (weighted_hidden.numel() > 0) weighted_hidden = hidden * of_rows;
  if (grad_weights.numel() > 0) grad_weights.view({-1}).index_copy_(0, pairs, (grad * hidden).sum(1));
  return out;
}

// grad_hidden (rows, N), product (rows, N) or, gated, (rows, 2N), weights (tokens, k), pairs (rows,) = (tokens * k,):
// grad_product as product, weighted_hidden (rows, N), grad_weights (tokens, k); empty what output_mask does not select.
Gradients experts_gate_backward(const Tensor& grad_hidden, const Tensor& product, const Tensor& given_weights,
                                const Tensor& given_pairs, ActivationName activation, bool gated,
                                std::array<bool, 3> output_mask) {
  constexpr const char* op = kGateBackward;
  check_matrix(op, "product", product);
  check_matrix(op, "grad_hidden", grad_hidden);
  check_same_device(op, "product", product, "grad_hidden", grad_hidden);
  const int64_t rows = grad_hidden.size(0), n = grad_hidden.size(1), width = gated ? 2 * n : n;
  CUDA_EXT_CHECK(product.size(0) == rows && product.size(1) == width, op, "expected product of shape ",
                 shape_string(Sizes{rows, width}), " for grad_hidden ", shape_string(grad_hidden), ", got ",
                 shape_string(product));
  const Tensor weights = weights_for(op, given_weights, product);
  CUDA_EXT_CHECK(weights.numel() == rows, op, "expected weights of ", rows, " elements, one for each row, got ",
                 shape_string(weights));
  const Tensor pairs = checked_indices(op, "pairs", given_pairs, 1, product);
  CUDA_EXT_CHECK(pairs.size(0) == rows, op, "expected pairs of shape (", rows, ",), got ", shape_string(pairs));
  const auto type = product.scalar_type();
  const CudaKernels* const kernels = cuda_kernels(op, product.device());
  const c10::DeviceGuard guard(product.device());
  GateGradParams params;
  params.activation = parse_activation(op, activation);
  Gradients out{output_mask[0] ? empty_beside(product, {rows, width}, type) : absent(product, type),
                output_mask[1] ? empty_beside(product, {rows, n}, type) : absent(product, type),
                output_mask[2] ? empty_beside(product, weights.sizes(), weights.scalar_type())
                               : absent(product, weights.scalar_type())};
  if (rows == 0) return out;
  if (n == 0) {
    std::get<2>(out).zero_();
    return out;
  }
  const Tensor grad = with_contiguous_rows(grad_hidden.to(type)), z = with_contiguous_rows(product);
  if (kernels != nullptr && type == at::kDouble)
    return gate_backward_in_float64(grad, z, weights.view({-1}), pairs, params.activation, gated, out);
  params.rows = rows;
  params.n = n;
  params.gated = gated;
  params.grad_hidden = matrix(grad);
  params.product = matrix(z);
  params.pairs = pairs.const_data_ptr<int64_t>();
  params.weights = weights.const_data_ptr();
  params.grad_product = output(std::get<0>(out));
  params.weighted_hidden = output(std::get<1>(out));
  params.grad_weights = output(std::get<2>(out)).data;
  if (kernels == nullptr) {
    check_range(op, "pairs", pairs, rows);
    launch_gate_grad(params);
    return out;
  }
  const LaunchScope scope(product.device());
  launch_for(op, [&] { kernels->experts_gate_backward(params, scope.stream()); });
  return out;
}

// rows (T, K), index (rows,): (rows, K)
Tensor gather_fp8(const Tensor& rows, const Tensor& index) {
  constexpr const char* op = "gather_fp8";
  check_given(op, "rows", rows);
  CUDA_EXT_CHECK(rows.dim() == 2 && is_fp8(rows.scalar_type()), op,
                 "expected rows of two dims and dtype float8_e4m3fn or float8_e5m2, got ", shape_string(rows), " of ",
                 dtype_name(rows.scalar_type()));
  check_same_device(op, "index", index, "rows", rows);
  CUDA_EXT_CHECK(index.dim() == 1 && (index.scalar_type() == at::kInt || index.scalar_type() == at::kLong), op,
                 "expected index of 1 dim and dtype int32 or int64, got ", shape_string(index), " of ",
                 dtype_name(index.scalar_type()));
  return rows.view(at::kByte).index_select(0, index).view(rows.scalar_type());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::flexible_layout};
  m.def("combine_experts(Tensor results, Tensor rows, Tensor? weights=None) -> Tensor", tags);
  m.def(
      "experts_gate_backward(Tensor grad_hidden, Tensor product, Tensor weights, Tensor pairs, *, str? activation, "
      "bool gated, bool[3] output_mask) -> (Tensor grad_product, Tensor weighted_hidden, Tensor grad_weights)",
      tags);
  m.def("gather_fp8(Tensor rows, Tensor index) -> Tensor", tags);
  register_layout_errors(m, {"combine_experts", "experts_gate_backward", "gather_fp8"});
}

namespace {

void register_kernels(torch::Library& m) {
  m.impl("combine_experts", combine_experts);
  m.impl("experts_gate_backward", experts_gate_backward);
  m.impl("gather_fp8", gather_fp8);
}

}  // namespace

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CUDA, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, Autograd, m) {
  for (const char* name : {"combine_experts", "experts_gate_backward", "gather_fp8"})
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
}

}  // namespace cuda_ext
