// From the dtype and the head dims of a problem to the instantiation of a kernel.
#pragma once

#include <iterator>
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
template <template <class, int> class Op, const auto& dims, const auto& float32_dims, class F>
auto with_kernel(const char* op, const AttentionParams& p, const F& f) {
  const bool is_float32 = p.dtype == Dtype::kFloat32;
  const int most = is_float32 ? float32_dims[std::size(float32_dims) - 1].dim : kMaxHeadDim;
  if (p.dim > most || p.dim_v > most || p.dim % 8 != 0 || p.dim_v % 8 != 0 || p.dtype == Dtype::kFloat64)
    throw std::invalid_argument(
        std::string(op) + ": expected at most 32 bits and head dims that are multiples of 8 up to " +
        std::to_string(most) + ", got " + std::to_string(p.dim) + " and " + std::to_string(p.dim_v));
  if constexpr (float32_dims[0].dim > 0)
    if (is_float32) return with_head_dim<Op, float, float32_dims>(op, p, f);
  if (p.dtype == Dtype::kFloat16) return with_head_dim<Op, half_t, dims>(op, p, f);
  return with_head_dim<Op, bfloat16_t, dims>(op, p, f);
}

}  // namespace cuda_ext::attention
