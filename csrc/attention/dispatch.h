// From the dtype and the head dims of a problem to the instantiation of a kernel.
#pragma once

#include <string>

#include "attention/attention.h"
#include "attention/head_dims.h"
#include "base/built.h"

namespace cuda_ext::attention {

constexpr bool all_have_kernels(const int* built, int count) {
  for (int i = 0; i < count; ++i) {
    bool found = false;
    for (const HeadDims& dims : kHeadDims) found = found || dims.dim == built[i];
    if (!found) return false;
  }
  return true;
}
static_assert(all_have_kernels(kBuiltHeadDims, sizeof kBuiltHeadDims / sizeof *kBuiltHeadDims));

[[noreturn]] inline void refuse_head_dims(const char* op, const AttentionParams& p) {
  std::string built;
  for (const int dim : kBuiltHeadDims) built += (built.empty() ? "" : ", ") + std::to_string(dim);
  throw std::runtime_error(std::string(op) + ": expected head dims whose CUDA kernels are in this library, those of " +
                           built + ", got " + std::to_string(p.dim) + " of query and key and " +
                           std::to_string(p.dim_v) +
                           " of value; build it again without CUDA_EXT_HEAD_DIMS, which left theirs out");
}

// Calls f(Op<T, dim>{}) with the first of `dims` that fits the parameters.
template <template <class, int> class Op, class T, const auto& dims, int i = 0, class F>
auto with_head_dim(const char* op, const AttentionParams& p, const F& f) -> decltype(f(Op<T, dims[0].dim>{})) {
  if constexpr (i + 1 < int(sizeof dims / sizeof *dims)) {
    if (p.dim > dims[i].dim || p.dim_v > dims[i].dim_v) return with_head_dim<Op, T, dims, i + 1>(op, p, f);
  }
  if constexpr (is_built(dims[i].dim))
    return f(Op<T, dims[i].dim>{});
  else
    refuse_head_dims(op, p);
}

// The same with T for the parameters' dtype.
template <template <class, int> class Op, const auto& dims = kHeadDims, class F>
auto with_kernel(const char* op, const AttentionParams& p, const F& f) {
  if (p.dim > kMaxHeadDim || p.dim_v > kMaxHeadDim || p.dim % 8 != 0 || p.dim_v % 8 != 0)
    throw std::invalid_argument(std::string(op) + ": expected head dims that are multiples of 8 up to 256, got " +
                                std::to_string(p.dim) + " and " + std::to_string(p.dim_v));
  switch (p.dtype) {
    case Dtype::kFloat16: return with_head_dim<Op, half_t, dims>(op, p, f);
    case Dtype::kBFloat16: return with_head_dim<Op, bfloat16_t, dims>(op, p, f);
    default: throw std::invalid_argument(std::string(op) + ": expected float16 or bfloat16");
  }
}

}  // namespace cuda_ext::attention
