// The additive bias or boolean mask of kernels with options. It can be broadcast, relative, and have any strides.
#pragma once

#include <cmath>

#include "arch/math.cuh"
#include "arch/memory.cuh"
#include "attention/attention.h"

namespace cuda_ext::attention {

// The offset of the first key of a row. diagonal: Sk - Sq.
DEVICE int64_t bias_offset(const BiasStrides& strides, int batch, int head, int query, int diagonal) {
  return batch * strides[0] + head * strides[1] + query * strides[2] + diagonal * strides[4];
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

// Whether the elements of two keys, from an even one on, are one aligned word.
inline bool can_read_two_keys(const AttentionParams& p) {
  const int64_t bytes = p.bias_kind == BiasKind::kStorage ? 2 : p.bias_kind == BiasKind::kAccumulation ? 4 : 1;
  const auto is_even = [](int64_t x) { return x % 2 == 0; };
  return p.bias_kind != BiasKind::kNone && p.bias_strides[3] == 1 && is_even(p.bias_strides[0]) &&
         is_even(p.bias_strides[1]) && is_even(p.bias_strides[2]) &&
         reinterpret_cast<uintptr_t>(p.bias) % uintptr_t(2 * bytes) == 0;
}

// Adds them to two logits.
template <class T>
DEVICE void add_bias_two_keys(const AttentionParams& p, int64_t offset, float& first, float& second) {
  switch (p.bias_kind) {
    case BiasKind::kStorage: {
      float pair[2];
      arch::unpack<T>(arch::load_global<arch::Pair<T>>(static_cast<const T*>(p.bias) + offset), pair);
      first += pair[0];
      second += pair[1];
      return;
    }
    case BiasKind::kAccumulation: {
      const auto pair = arch::load_global<arch::Words2>(static_cast<const float*>(p.bias) + offset);
      first += arch::bits_float(pair.data[0]);
      second += arch::bits_float(pair.data[1]);
      return;
    }
    default: {
      const auto pair = arch::load_global<uint16_t>(static_cast<const uint8_t*>(p.bias) + offset);
      if ((pair & 0xff) == 0) first += -INFINITY;
      if (pair >> 8 == 0) second += -INFINITY;
    }
  }
}

}  // namespace cuda_ext::attention
