// The attention ops and their autograd.
#pragma once

#include "ops/attention_options.h"

namespace cuda_ext {

// The kernels of the ops. Calls go through the dispatcher: `find_op<decltype(flash_attention)>(...)`.
std::tuple<Tensor, Tensor> flash_attention(const Tensor& query, const Tensor& key, const Tensor& value, DENSE_OPTIONS);
std::tuple<Tensor, Tensor> flash_attention_varlen(const Tensor& query, const Tensor& key, const Tensor& value,
                                                  VARLEN_OPTIONS(Tensor));
std::tuple<Tensor, Tensor, Tensor> flash_attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                                           VARLEN_OPTIONS(OptionalTensor), PART_OPTIONS,
                                                           const OptionalTensor& rng_state);
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flash_attention_backward(
    const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& lse, const OptionalTensor& rng_state, bool needs_grad_bias,
    VARLEN_OPTIONS(OptionalTensor), PART_OPTIONS);

// How heads_first_attention returns its output.
enum class HeadsFirstOutput {
  kRowsFirst,        // (B, Sq, H, Dv), as flash_attention
  kTransposed,       // (B, H, Sq, Dv), a view of the same memory
  kDenseTransposed,  // (B, H, Sq, Dv), contiguous
};

// flash_attention of (B, H, S, D) tensors, as models and SDPA have them, with a node for backward but without an lse.
// Transposes happen below autograd, where they cost a tenth. None if the call needs no node or another derivative:
// autograd must then see the transposes.
OptionalTensor heads_first_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                     const AttentionOptions& options, HeadsFirstOutput output);

}  // namespace cuda_ext
