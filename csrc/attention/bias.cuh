// The additive bias or boolean mask of the general kernels. It can be broadcast and have any strides, so it is read
// element by element.
#pragma once

#include <cmath>

#include "arch/math.cuh"
#include "arch/memory.cuh"
#include "attention/attention.h"

namespace cuda_ext::sm80 {

// The offset of the first key of a row; strides as in AttentionParams.
DEVICE int64_t bias_offset(const int64_t (&strides)[4], int batch, int head, int query) {
  return batch * strides[0] + head * strides[1] + query * strides[2];
}

// The value to add to a logit, from `offset`; T is the storage type.
template <class T>
DEVICE float bias_at(const AttentionParams& p, int64_t offset) {
  switch (p.bias_kind) {
    case BiasKind::kStorage: return arch::to_float(arch::load_global<T>(static_cast<const T*>(p.bias) + offset));
    case BiasKind::kAccumulation: return arch::load_global<float>(static_cast<const float*>(p.bias) + offset);
    default: return arch::load_global<uint8_t>(static_cast<const uint8_t*>(p.bias) + offset) != 0 ? 0.0f : -INFINITY;
  }
}

}  // namespace cuda_ext::sm80
