// The activations and their derivatives on vectors.
#pragma once

#include "cpu/math.h"
#include "gemm/gemm.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

template <class T>
struct ValueAndDerivative {
  Vec<T> value;
  Vec<T> derivative;
};

struct Identity {
  template <class T>
  static CUDA_EXT_INLINE Vec<T> value(Vec<T> x) {
    return x;
  }
  template <class T>
  static CUDA_EXT_INLINE ValueAndDerivative<T> value_and_derivative(Vec<T> x) {
    return {x, splat(T(1))};
  }
};

// The comparisons are chosen to propagate NaN.
struct Relu {
  template <class T>
  static CUDA_EXT_INLINE Vec<T> value(Vec<T> x) {
    return x < T(0) ? Vec<T>{} : x;
  }
  template <class T>
  static CUDA_EXT_INLINE ValueAndDerivative<T> value_and_derivative(Vec<T> x) {
    return {value<T>(x), x <= T(0) ? Vec<T>{} : splat(T(1))};
  }
};

// x Phi(x), Phi the normal distribution: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.
struct Gelu {
  template <class T>
  static CUDA_EXT_INLINE Vec<T> distribution(Vec<T> x) {
    return T(0.5) + T(0.5) * erf(x * T(0.70710678118654752));
  }
  template <class T>
  static CUDA_EXT_INLINE Vec<T> value(Vec<T> x) {
    return x * distribution<T>(x);
  }
  template <class T>
  static CUDA_EXT_INLINE ValueAndDerivative<T> value_and_derivative(Vec<T> x) {
    const Vec<T> phi = distribution<T>(x);
    const Vec<T> density = T(0.39894228040143268) * exp(T(-0.5) * x * x);
    return {x * phi, phi + x * density};
  }
};

// The same paper's approximation, x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), as x sigmoid(2 u). In
// the derivative, 1 - sigmoid is computed as a product, because the rounding error of a difference would be multiplied
// by x^3.
struct GeluTanh {
  static constexpr double kScale = 2 * 0.79788456080286536;
  static constexpr double kCubic = 0.044715;
  // e^(-2 u)
  template <class T>
  static CUDA_EXT_INLINE Vec<T> exponential(Vec<T> x) {
    return exp(T(-kScale) * x * (T(1) + T(kCubic) * x * x));
  }
  template <class T>
  static CUDA_EXT_INLINE Vec<T> value(Vec<T> x) {
    return x / (T(1) + exponential<T>(x));
  }
  template <class T>
  static CUDA_EXT_INLINE ValueAndDerivative<T> value_and_derivative(Vec<T> x) {
    const Vec<T> e = exponential<T>(x);
    const Vec<T> sigmoid = T(1) / (T(1) + e);
    const Vec<T> complement = min<T>(splat(T(1e30)), e) * sigmoid;
    const Vec<T> slope = T(kScale) * (T(1) + T(3 * kCubic) * x * x);
    return {x * sigmoid, sigmoid + (x * sigmoid) * complement * slope};
  }
};

// x sigmoid(x).
struct Silu {
  template <class T>
  static CUDA_EXT_INLINE Vec<T> value(Vec<T> x) {
    return x / (T(1) + exp(-x));
  }
  template <class T>
  static CUDA_EXT_INLINE ValueAndDerivative<T> value_and_derivative(Vec<T> x) {
    const Vec<T> sigmoid = T(1) / (T(1) + exp(-x));
    const Vec<T> y = x * sigmoid;
    return {y, sigmoid + y * (T(1) - sigmoid)};
  }
};

template <class F>
CUDA_EXT_INLINE void with_activation(Activation activation, F&& f) {
  switch (activation) {
    case Activation::kNone: return f(Identity{});
    case Activation::kRelu: return f(Relu{});
    case Activation::kGelu: return f(Gelu{});
    case Activation::kGeluTanh: return f(GeluTanh{});
    case Activation::kSilu: return f(Silu{});
  }
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
