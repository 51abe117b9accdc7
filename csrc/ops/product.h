// Shared by the GEMM ops: checks, and the description of products of tensors as GemmParams.
#pragma once

#include <c10/util/SmallVector.h>

#include <string_view>

#include "ops/backend.h"
#include "gemm/gemm.h"

namespace cuda_ext {

using ActivationName = std::optional<std::string_view>;
using OptionalType = std::optional<at::ScalarType>;

#define NAME(enumerator, name, formula) name,
inline constexpr std::string_view kActivationNames[] = {CUDA_EXT_ACTIVATIONS(NAME)};
#undef NAME

Activation parse_activation(const char* op, const ActivationName& name);
inline ActivationName name_of(Activation activation) {
  return activation == Activation::kNone ? std::nullopt : ActivationName(kActivationNames[size_t(activation)]);
}

// The dtype of a product's output, checked.
at::ScalarType output_type(const char* op, const OptionalType& wanted, at::ScalarType input);

// Backward of relu can use the output instead of the pre-activation, unless a residual was added to the output.
inline bool needs_preact(Activation activation, bool gated, bool has_residual) {
  return gated || !(activation == Activation::kNone || (activation == Activation::kRelu && !has_residual));
}

// A new tensor on the device of `other`.
inline Tensor empty_beside(const Tensor& other, at::IntArrayRef sizes, at::ScalarType type) {
  return empty_on(other.device(), sizes, type);
}
// The empty tensor that an op returns for an output that was not requested.
inline Tensor absent(const Tensor& other, at::ScalarType type) { return empty_beside(other, {0}, type); }

using Sizes = c10::SmallVector<int64_t, 6>;
// `sizes` with its last `dropped` entries replaced by `more`.
inline Sizes replace_last(at::IntArrayRef sizes, size_t dropped, std::initializer_list<int64_t> more) {
  Sizes result(sizes.begin(), sizes.end() - dropped);
  result.append(more.begin(), more.end());
  return result;
}

inline Output output(const Tensor& tensor) {
  return {tensor.numel() == 0 ? nullptr : tensor.data_ptr(), to_dtype(tensor.scalar_type())};
}

// The last two dims of a tensor, or a vector as one row. set_batch adds the batch dims.
inline Operand matrix(const Tensor& tensor) {
  Operand operand;
  operand.data = tensor.numel() == 0 ? nullptr : tensor.const_data_ptr();
  operand.dtype = to_dtype(tensor.scalar_type());
  const int64_t dims = tensor.dim();
  if (dims >= 2 && tensor.size(dims - 2) != 1) operand.row_stride = tensor.stride(dims - 2);
  if (dims >= 1 && tensor.size(dims - 1) != 1) operand.column_stride = tensor.stride(dims - 1);
  return operand;
}
inline Operand transposed(Operand operand) {
  std::swap(operand.row_stride, operand.column_stride);
  return operand;
}

// Stride of a tensor along dim `d` of a shape of `dims` dims that it broadcasts to.
inline int64_t broadcast_stride(const Tensor& tensor, int64_t d, int64_t dims) {
  const int64_t own = d - (dims - tensor.dim());
  return own < 0 || tensor.size(own) == 1 ? 0 : tensor.stride(own);
}

// A batch dim of a product.
struct BatchDim {
  int64_t size;
  bool reduced;               // summed over
  int64_t a, b, c, residual;  // strides
};
using BatchDims = c10::SmallVector<BatchDim, 6>;

// Checks of linear and mlp: weight (N, K) for input (..., K), or (2N, K) when gated; bias (N,) or (2N,).
void check_projection(const char* op, const char* input_name, const Tensor& input, const char* weight_name,
                      const Tensor& weight, const char* bias_name, const OptionalTensor& bias, bool gated);
void check_bias(const char* op, const char* argument, const Tensor& bias, const Tensor& input, at::ScalarType out_type,
                int64_t n);
// Checks c or residual: dtype of the inputs or of the output, and a shape that broadcasts to the output.
void check_addend(const char* op, const char* argument, const Tensor& addend, const Tensor& input,
                  at::ScalarType out_type, at::IntArrayRef out);
// Checks that grad_out has shape `out`.
void check_gradient(const char* op, const Tensor& grad_out, at::IntArrayRef out);

// Writes batch dims, outermost first, into params. A dim is merged into m if b does not depend on it and the other
// strides continue those of the rows; a reduced dim is merged into k if the strides continue; other dims are merged
// with each other where strides allow.
void set_batch(const char* op, GemmParams& params, const BatchDims& dims);

// Whether the bits of an output row must not depend on the other rows (set by the op _set_batch_invariant).
bool is_batch_invariant();

// The left operand of a product, copied if the kernels cannot read it (with_unit_stride). Batch-invariant products also
// copy one that is not contiguous or not aligned: which kernel can read it would depend on strides, and those of a
// single row are unknown.
Tensor left_operand(const Tensor& tensor);

// How products of float32 operands are computed: torch.set_float32_matmul_precision.
Float32Product float32_product();

// Runs the kernel for the device of the output `out`.
void run_gemm(const char* op, const Tensor& out, const GemmParams& params);

// A call of gemm, checked: everything but its outputs.
struct GemmCall {
  Tensor a, b;  // as the kernels read them; params points into them
  Sizes sizes;  // of the output
  at::ScalarType type;
  GemmParams params;
};
GemmCall describe_gemm(const char* op, const Tensor& a, const Tensor& b, const OptionalTensor& c,
                       const OptionalTensor& bias, const ActivationName& activation, double alpha, double beta,
                       OptionalType out_dtype);

// epilogue(input (..., K) @ weight^T), weight (N, K) or, gated, (2N, K): (..., N), and the pre-activation if asked for.
struct Projection {
  Tensor out;
  Tensor preact;
};
Projection project(const char* op, const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                   const OptionalTensor& residual, Activation activation, bool gated, bool save_preact);

// grad (..., N) @ weight (N, K): (..., K).
Tensor input_gradient(const char* op, const Tensor& grad, const Tensor& weight, at::ScalarType type);

// The destination of a weight's gradient instead of a new tensor: slot = alpha * gradient + beta * slot. With beta = 0
// the slot is not read.
struct WeightSlot {
  const char* argument;
  const OptionalTensor& slot;
  double alpha;
  double beta;
};
// Checks that the slot is (N, K), contiguous, and float64 if and only if the weight is.
void check_slot(const char* op, const WeightSlot& slot, const Tensor& weight);

// grad (..., N)^T @ input (..., K), summed over all leading dims: (N, K). Returns an empty tensor if it goes to a slot.
Tensor weight_gradient(const char* op, const Tensor& grad, const Tensor& input, at::ScalarType type,
                       const WeightSlot* into = nullptr);

// The gradient at the pre-activation from that at the output, and the sum of its rows if bias_wanted. Without an
// activation grad_preact is grad itself, and only the sum is computed.
struct ActivationGradient {
  Tensor grad_preact;  // (..., N) or, gated, (..., 2N), in the dtype of grad
  Tensor bias;
};
ActivationGradient activation_gradient(const char* op, const Tensor& grad, const Tensor& preact, Activation activation,
                                       bool gated, bool bias_wanted, at::ScalarType bias_type);

// Only that sum.
Tensor bias_gradient(const char* op, const Tensor& grad, bool wanted, at::ScalarType type);
// The dtype of the gradient of bias, if it is wanted.
inline OptionalType bias_type(bool wanted, const OptionalTensor& bias, const Tensor& input) {
  return wanted ? OptionalType((is_given(bias) ? *bias : input).scalar_type()) : std::nullopt;
}

// (..., n) as (rows, n).
Tensor flatten_rows(const Tensor& tensor);

}  // namespace cuda_ext
