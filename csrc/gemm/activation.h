// The activations: an enumerator, the name in Python, the value and the derivative of each.
//
// docs/architecture.md has the places of another one.
//
// Formulas are templates on the arithmetic: DeviceMath (gemm/activation.cuh) of a thread's float, or VectorMath
// (gemm/cpu/activation.h) of SIMD vectors. It has the types Value, Scalar (of an element) and Constant (in which
// constants are folded), and the functions of a few operations.
#pragma once

#include <cstdint>

// X(enumerator, name, formula). In the order of cuda_ext/_activations.py.
#define CUDA_EXT_ACTIVATIONS(X)       \
  X(kNone, "", Identity)              \
  X(kRelu, "relu", Relu)              \
  X(kGelu, "gelu", Gelu)              \
  X(kGeluTanh, "gelu_tanh", GeluTanh) \
  X(kSilu, "silu", Silu)              \
  X(kRelu2, "relu2", Relu2)

#if defined(__CUDACC__)
#define FORMULA __device__ __forceinline__
#else
#define FORMULA inline __attribute__((always_inline))
#endif

namespace cuda_ext {

#define ENUMERATOR(enumerator, name, formula) enumerator,
enum class Activation : uint8_t { CUDA_EXT_ACTIVATIONS(ENUMERATOR) };
#undef ENUMERATOR

namespace activations {

template <class Value>
struct ValueAndDerivative {
  Value value;
  Value derivative;
};

template <class Math, class Value = typename Math::Value>
struct Identity {
  FORMULA static Value value(Value x) { return x; }
  FORMULA static ValueAndDerivative<Value> both(Value x) { return {x, Math::broadcast(1)}; }
};

// The comparisons are chosen to propagate NaN.
template <class Math, class Value = typename Math::Value>
struct Relu {
  using T = typename Math::Scalar;
  FORMULA static Value value(Value x) { return x < T(0) ? Value{} : x; }
  FORMULA static ValueAndDerivative<Value> both(Value x) {
    return {value(x), x <= T(0) ? Value{} : Math::broadcast(1)};
  }
};

// x Phi(x), Phi the normal distribution: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.
template <class Math, class Value = typename Math::Value>
struct Gelu {
  using T = typename Math::Scalar;
  FORMULA static Value distribution(Value x) { return T(0.5) + T(0.5) * Math::erf(x * T(0.70710678118654752)); }
  FORMULA static Value value(Value x) { return x * distribution(x); }
  FORMULA static ValueAndDerivative<Value> both(Value x) {
    const Value phi = distribution(x);
    const Value density = T(0.39894228040143268) * Math::exp(T(-0.5) * x * x);
    return {x * phi, phi + x * density};
  }
};

// The same paper's approximation, x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), as x sigmoid(2 u). In
// the derivative, 1 - sigmoid is computed as a product, because the rounding error of a difference would be multiplied
// by x^3.
template <class Math, class Value = typename Math::Value>
struct GeluTanh {
  using T = typename Math::Scalar;
  static constexpr typename Math::Constant kScale = 2 * 0.79788456080286536;
  static constexpr typename Math::Constant kCubic = 0.044715;
  // e^(-2 u)
  FORMULA static Value exponential(Value x) { return Math::exp(T(-kScale) * x * (T(1) + T(kCubic) * x * x)); }
  FORMULA static Value value(Value x) { return Math::divide(x, T(1) + exponential(x)); }
  FORMULA static ValueAndDerivative<Value> both(Value x) {
    const Value e = exponential(x);
    const Value sigmoid = Math::reciprocal(T(1) + e);
    const Value complement = (e > T(1e30) ? Math::broadcast(1e30) : e) * sigmoid;
    const Value slope = T(kScale) * (T(1) + T(3 * kCubic) * x * x);
    return {x * sigmoid, sigmoid + (x * sigmoid) * complement * slope};
  }
};

// x sigmoid(x).
template <class Math, class Value = typename Math::Value>
struct Silu {
  using T = typename Math::Scalar;
  FORMULA static Value value(Value x) { return Math::divide(x, T(1) + Math::exp(-x)); }
  FORMULA static ValueAndDerivative<Value> both(Value x) {
    const Value sigmoid = Math::reciprocal(T(1) + Math::exp(-x));
    const Value y = x * sigmoid;
    return {y, sigmoid + y * (T(1) - sigmoid)};
  }
};

// relu(x)^2: So et al., Primer, 2021. NaN propagates.
template <class Math, class Value = typename Math::Value>
struct Relu2 {
  using T = typename Math::Scalar;
  FORMULA static Value relu(Value x) { return x <= T(0) ? Value{} : x; }
  FORMULA static Value value(Value x) { return relu(x) * relu(x); }
  FORMULA static ValueAndDerivative<Value> both(Value x) { return {value(x), relu(x) + relu(x)}; }
};

// f(the formula of an activation)
template <class Math, class F>
FORMULA void with_formula(Activation activation, F&& f) {
#define CASE(enumerator, name, formula) \
  case Activation::enumerator: return f(formula<Math>{});
  switch (activation) { CUDA_EXT_ACTIVATIONS(CASE) }
#undef CASE
}

}  // namespace activations
}  // namespace cuda_ext

#undef FORMULA
