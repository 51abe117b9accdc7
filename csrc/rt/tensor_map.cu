#include "rt/tensor_map.cuh"

#include <stdexcept>
#include <string>

#if defined(__CUDACC__)
#include <cuda.h>

#include "rt/launch.cuh"
#else
#include "simt/tensor_map.h"
#endif

namespace cuda_ext::rt {
namespace {

void check_layout(const char* kernel, const TensorLayout& t) {
  const auto refuse = [&](const std::string& expected, int64_t got) {
    throw std::runtime_error(std::string(kernel) + ": tensor map: expected " + expected + ", got " +
                             std::to_string(got));
  };
  const auto dimension = [](int d) { return " of dimension " + std::to_string(d); };
  if (t.rank < 1 || t.rank > 5) refuse("1 to 5 dimensions", t.rank);
  if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0)
    refuse("an address that is a multiple of 16", int64_t(reinterpret_cast<uintptr_t>(t.data)));
  for (int d = 0; d < t.rank; ++d) {
    if (t.sizes[d] < 1 || t.sizes[d] > int64_t(1) << 32) refuse("1 to 2^32 for the size" + dimension(d), t.sizes[d]);
    if (t.box[d] < 1 || t.box[d] > 256) refuse("1 to 256 for the box's size" + dimension(d), t.box[d]);
    if (d == 0) continue;
    const int64_t stride = t.strides[d - 1];
    if (stride < 1 || stride % 16 != 0 || stride >= int64_t(1) << 40)
      refuse("a multiple of 16 below 2^40 for the stride in bytes" + dimension(d), stride);
  }
  const int row = t.box[0] * bytes_of(t.element);
  if (row % 16 != 0) refuse("rows of the box of a multiple of 16 bytes", row);
  if (t.swizzle_bytes != 0 && t.swizzle_bytes != 32 && t.swizzle_bytes != 64 && t.swizzle_bytes != 128)
    refuse("a swizzle of 0, 32, 64 or 128 bytes", t.swizzle_bytes);
  if (t.swizzle_bytes != 0 && row != t.swizzle_bytes)
    refuse("rows of the box as long as the swizzle's " + std::to_string(t.swizzle_bytes) + " bytes", row);
}

}  // namespace

#if defined(__CUDACC__)

namespace {

// The driver's encoder, looked up through the runtime because the extension is not linked with the driver's library.
auto tensor_map_encoder(const char* kernel) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  constexpr unsigned kFirstVersion = 12000;  // CUDA 12.0 introduced it
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  check(
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kFirstVersion, cudaEnableDefault, &result),
      kernel, "look for cuTensorMapEncodeTiled");
  if (result != cudaDriverEntryPointSuccess || function == nullptr)
    throw std::runtime_error(std::string(kernel) +
                             ": the driver has no cuTensorMapEncodeTiled; install a driver for CUDA 12.0 or newer");
  return reinterpret_cast<Encode>(function);
}

}  // namespace

arch::TensorMap make_tensor_map(const char* kernel, const TensorLayout& t) {
  check_layout(kernel, t);
  static const auto encode = tensor_map_encoder(kernel);
  static constexpr CUtensorMapDataType kTypes[] = {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                                                   CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_DATA_TYPE_UINT8};
  const CUtensorMapSwizzle swizzle = t.swizzle_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : t.swizzle_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                     : t.swizzle_bytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                                             : CU_TENSOR_MAP_SWIZZLE_NONE;
  cuuint64_t sizes[5], strides[4];
  cuuint32_t box[5], steps[5];
  for (int d = 0; d < t.rank; ++d) {
    sizes[d] = cuuint64_t(t.sizes[d]);
    box[d] = cuuint32_t(t.box[d]);
    steps[d] = 1;
    if (d > 0) strides[d - 1] = cuuint64_t(t.strides[d - 1]);
  }
  static_assert(sizeof(CUtensorMap) == sizeof(arch::TensorMap) && alignof(CUtensorMap) <= alignof(arch::TensorMap));
  arch::TensorMap map;
  const auto encode_map = [&] {
    return encode(reinterpret_cast<CUtensorMap*>(&map), kTypes[int(t.element)], cuuint32_t(t.rank),
                  const_cast<void*>(t.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult error = encode_map();
  if (error == CUDA_ERROR_INVALID_CONTEXT) {
    // The driver's functions, unlike the runtime's, do not make the device's context current in a new thread. A thread
    // of PyTorch's autograd may come here before its first launch. This is allowed while a graph is captured.
    check(cudaSetDevice(current_device(kernel)), kernel, "make the device's context current");
    error = encode_map();
  }
  if (error != CUDA_SUCCESS)
    throw std::runtime_error(std::string(kernel) + ": cuTensorMapEncodeTiled refused the tensor with error " +
                             std::to_string(int(error)));
  return map;
}

#else

arch::TensorMap make_tensor_map(const char* kernel, const TensorLayout& t) {
  check_layout(kernel, t);
  simt::TensorMapFields fields{};
  fields.base = reinterpret_cast<uintptr_t>(t.data);
  fields.rank = uint8_t(t.rank);
  fields.type = simt::ElementType(t.element);
  fields.swizzle_bytes = uint8_t(t.swizzle_bytes);
  for (int d = 0; d < t.rank; ++d) {
    fields.sizes[d] = uint64_t(t.sizes[d]);
    fields.box[d] = uint16_t(t.box[d]);
    if (d > 0) fields.strides[d - 1] = uint64_t(t.strides[d - 1]);
  }
  arch::TensorMap map;
  simt::encode_tensor_map(map.opaque, fields);
  return map;
}

#endif

}  // namespace cuda_ext::rt
