// Creates tensor maps, which describe tensors to TMA, for both compilers.
#pragma once

#include <array>
#include <cstdint>

#include "arch/tma.cuh"

namespace cuda_ext::rt {

enum class Element { kFloat32, kFloat16, kBFloat16, kUint8 };
constexpr int bytes_of(Element element) {
  return element == Element::kFloat32 ? 4 : element == Element::kUint8 ? 1 : 2;
}

// A tensor of `rank` dimensions, innermost first and contiguous in the innermost; and the box that one copy moves.
struct TensorLayout {
  const void* data = nullptr;
  Element element = Element::kFloat32;
  int rank = 2;
  std::array<int64_t, 5> sizes{};    // elements
  std::array<int64_t, 4> strides{};  // bytes, of dimensions 1 and up
  std::array<int, 5> box{};          // elements
  int swizzle_bytes = 0;             // 0, 32, 64 or 128; if not 0, rows of the box have this size
};

// Throws if the hardware does not support the layout.
arch::TensorMap make_tensor_map(const char* kernel, const TensorLayout& layout);

}  // namespace cuda_ext::rt
