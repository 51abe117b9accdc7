// Addresses of operands: batches, storage types, strides.
#pragma once

#include "cpu/simd.h"
#include "gemm/gemm.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

inline int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

inline const void* offset(const void* data, Dtype dtype, int64_t elements) {
  return static_cast<const char*>(data) + elements * size_of(dtype);
}
inline void* offset(void* data, Dtype dtype, int64_t elements) {
  return static_cast<char*>(data) + elements * size_of(dtype);
}

// Calls f with a null pointer to the storage type. Only types whose compute type is T are instantiated.
template <class T, class F>
CUDA_EXT_INLINE void with_storage(Dtype dtype, F&& f) {
  if constexpr (std::is_same_v<T, double>) {
    f(static_cast<double*>(nullptr));
  } else {
    switch (dtype) {
      case Dtype::kFloat16: return f(static_cast<half_t*>(nullptr));
      case Dtype::kBFloat16: return f(static_cast<bfloat16_t*>(nullptr));
      default: return f(static_cast<float*>(nullptr));
    }
  }
}

// Offset of the index-th batch; dims are innermost first.
inline int64_t batch_offset(int64_t index, int dims, const int64_t* sizes, const int64_t* strides) {
  int64_t elements = 0;
  for (int d = 0; d < dims; ++d) {
    elements += index % sizes[d] * strides[d];
    index /= sizes[d];
  }
  return elements;
}
inline int64_t product(int dims, const int64_t* sizes) {
  int64_t count = 1;
  for (int d = 0; d < dims; ++d) count *= sizes[d];
  return count;
}

inline Operand of_batch(const GemmParams& params, Operand operand, int64_t batch) {
  if (operand.data != nullptr && batch > 0)
    operand.data = offset(operand.data, operand.dtype,
                          batch_offset(batch, params.batch_dims, params.batch_sizes, operand.batch_strides));
  return operand;
}
inline Output of_batch(Output output, int64_t batch, int64_t size) {
  if (output.data != nullptr) output.data = offset(output.data, output.dtype, batch * size);
  return output;
}

// Whether rows are whole pages apart, so that they compete for the same few lines of L1.
template <class T>
bool has_competing_rows(const Operand& matrix) {
  return matrix.column_stride == 1 && matrix.row_stride * int64_t(sizeof(T)) % 4096 == 0;
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
