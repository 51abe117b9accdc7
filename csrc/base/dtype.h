// Element types, for kernels, launchers and csrc/ops alike, without a torch header.
#pragma once

#include <cstdint>

namespace cuda_ext {

enum class Dtype : uint8_t { kFloat32, kFloat16, kBFloat16, kFloat64, kFloat8E4M3, kFloat8E5M2 };

// Storage types only: loads convert to float, in which arithmetic is done (cpu/simd.h on the host, arch/ on the
// device).
struct half_t {
  uint16_t bits;
};
struct bfloat16_t {
  uint16_t bits;
};
// 8 bits, of scaled products only (Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433). E4M3 has no
// infinity, and one NaN of each sign; E5M2 is the upper half of a float16.
struct float8_e4m3_t {
  uint8_t bits;
};
struct float8_e5m2_t {
  uint8_t bits;
};

constexpr bool is_float8(Dtype dtype) { return dtype == Dtype::kFloat8E4M3 || dtype == Dtype::kFloat8E5M2; }
constexpr int64_t size_of(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : is_float8(dtype) ? 1 : 2;
}

template <class T>
struct DtypeOf;
template <>
struct DtypeOf<float> {
  static constexpr Dtype value = Dtype::kFloat32;
};
template <>
struct DtypeOf<half_t> {
  static constexpr Dtype value = Dtype::kFloat16;
};
template <>
struct DtypeOf<bfloat16_t> {
  static constexpr Dtype value = Dtype::kBFloat16;
};
template <>
struct DtypeOf<double> {
  static constexpr Dtype value = Dtype::kFloat64;
};
template <>
struct DtypeOf<float8_e4m3_t> {
  static constexpr Dtype value = Dtype::kFloat8E4M3;
};
template <>
struct DtypeOf<float8_e5m2_t> {
  static constexpr Dtype value = Dtype::kFloat8E5M2;
};

// float64 is computed in float64 (it is for checking gradients), all other types in float32.
template <class Storage>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
template <class Storage>
using Compute = typename ComputeOf<Storage>::type;

// Calls f with a value of the storage type that `dtype` names: dispatch(d, [&](auto tag) { using T = decltype(tag); ...
// }).
template <class F>
decltype(auto) dispatch(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::kFloat16: return f(half_t{});
    case Dtype::kBFloat16: return f(bfloat16_t{});
    case Dtype::kFloat64: return f(double{});
    default: return f(float{});
  }
}

}  // namespace cuda_ext
