// The emulator's tensor map: the fields of a CUtensorMap, in the same 128 bytes.
#pragma once

#include <array>
#include <cstdint>

namespace cuda_ext::simt {

enum class ElementType : uint8_t { kFloat32, kFloat16, kBFloat16, kUint8 };  // as rt::Element
constexpr int bytes_of(ElementType type) {
  return type == ElementType::kFloat32 ? 4 : type == ElementType::kUint8 ? 1 : 2;
}

struct TensorMapFields {
  uint64_t base;
  std::array<uint64_t, 4> strides;  // bytes, of dimensions 1 and up
  std::array<uint64_t, 5> sizes;    // elements, innermost first
  std::array<uint16_t, 5> box;
  uint16_t magic;
  uint8_t rank;
  ElementType type;
  uint8_t swizzle_bytes;  // 0, 32, 64 or 128
};
static_assert(sizeof(TensorMapFields) <= 128);

// Writes `fields` into the 128 bytes at `map`. rt::make_tensor_map has checked what the driver would check.
void encode_tensor_map(uint64_t* map, const TensorMapFields& fields);

}  // namespace cuda_ext::simt
