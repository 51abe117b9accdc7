// Describes the tensors and options of an attention op as AttentionParams.
#pragma once

#include "attention/attention.h"
#include "ops/attention_checks.h"
#include "ops/backend.h"
#include "ops/block_mask.h"

namespace cuda_ext {

HeadsView view_of(const Tensor& tensor);

// `tensor`, or a copy of it that the kernels can read: they need the last dimension dense, the others may have any
// stride. CUDA kernels read 16 bytes at a time (`aligned`), so their rows must begin at multiples of 16 bytes.
Tensor with_dense_rows(const Tensor& tensor, bool aligned);

// Sets the strides of a bias or mask, or of the gradient of a bias. Returns the element whose indices are all 0, which
// is not the first one if the bias is relative.
int64_t set_bias_strides(const Tensor& bias, bool is_relative, BiasStrides& strides);

// Tensors that an AttentionParams points into; keeps them alive until the launch.
struct AttentionOperands {
  Tensor query, key, value, alibi_slopes, sinks, bias, mask, cu_seqlens_q, cu_seqlens_k;
  BlockMaskOperands block_mask;
};

// Whether attention may use wgmma; for tests. Returns the previous answer.
bool set_attention_wgmma(bool enabled);

// The counters of dropout. heads, rows, longest_k: of the call, whose options say where it is among a larger one.
DropoutCounters dropout_counters(const AttentionOptions& o, int64_t heads, int64_t rows, int64_t longest_k);

// Everything but the operands, the outputs and the random numbers. `type` is that of query.
void fill_params(AttentionParams& p, AttentionOperands& operands, const AttentionShape& shape, at::ScalarType type,
                 const AttentionOptions& o, bool on_cuda);
// The same with query, key and value.
void fill_params(AttentionParams& p, AttentionOperands& operands, const AttentionShape& shape, const Tensor& query,
                 const Tensor& key, const Tensor& value, const AttentionOptions& o, bool on_cuda);

// Whether the device of `query` has a kernel for its dtype and these head dims; else they are composed of other ops.
bool has_attention_kernel(const CudaKernels& cuda, const Tensor& query, int64_t dim, int64_t dim_v, bool backward);

// CUDA kernels read head dims that are multiples of 8. Others are padded with zeros, which change no product.
inline int64_t padded_dim(int64_t dim) { return (dim + 7) / 8 * 8; }
inline bool is_padded(const AttentionShape& shape) { return shape.dim % 8 != 0 || shape.dim_v % 8 != 0; }
Tensor padded(const Tensor& tensor);
Tensor unpadded(const Tensor& tensor, int64_t dim);
// The options of the padded call: the default scale is that of the given head dim.
AttentionOptions padded_options(const AttentionOptions& o, const AttentionShape& shape);

}  // namespace cuda_ext
