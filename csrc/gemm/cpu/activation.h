// The arithmetic of activations (gemm/activation.h) on vectors.
#pragma once

#include "cpu/math.h"
#include "gemm/gemm.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

template <class T>
struct VectorMath {
  using Value = Vec<T>;
  using Scalar = T;
  using Constant = double;
  static CUDA_EXT_INLINE Value broadcast(T x) { return splat(x); }
  static CUDA_EXT_INLINE Value exp(Value x) { return CUDA_EXT_ISA::exp(x); }
  static CUDA_EXT_INLINE Value erf(Value x) { return CUDA_EXT_ISA::erf(x); }
  static CUDA_EXT_INLINE Value reciprocal(Value x) { return T(1) / x; }
  static CUDA_EXT_INLINE Value divide(Value x, Value y) { return x / y; }
};

template <class T, class F>
CUDA_EXT_INLINE void with_activation(Activation activation, F&& f) {
  activations::with_formula<VectorMath<T>>(activation, f);
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
