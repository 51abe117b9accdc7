// Products that are left to the BLAS of the host process (cpu/host.h).
#pragma once

#include "gemm/cpu/epilogue.h"

namespace cuda_ext::cpu::CUDA_EXT_ISA {

// Whether a BLAS can read a (rows, columns) matrix, as it is or as a transposed matrix.
template <class T>
bool blas_reads(const Operand& matrix, int64_t rows, int64_t columns) {
  return matrix.dtype == DtypeOf<T>::value && ((matrix.column_stride == 1 && matrix.row_stride >= columns) ||
                                               (matrix.row_stride == 1 && matrix.column_stride >= rows));
}

// True for large products whose operands and result have the compute type. There the BLAS is about 8 % faster, because
// it overlaps memory accesses better with arithmetic, and the epilogue finds the result in L3. Our kernels are faster
// for 16-bit operands, and for few rows or columns if there is an epilogue to fuse. The exception is a row-major b
// whose pieces arrive late, because it exceeds L2 or its rows compete for cache lines: then the BLAS wins from 9 rows
// on.
template <class T>
bool prefers_blas(const GemmParams& params) {
  const bool is_far = params.b.column_stride == 1 && params.k * params.n * int64_t(sizeof(T)) >= 4 << 20;
  const int64_t least = is_far || has_competing_rows<T>(params.b) ? 9 : has_epilogue(params) ? 256 : 64;
  return std::min(params.m, params.n) >= least && params.k >= 256 && !params.gated &&
         params.out.dtype == DtypeOf<T>::value && blas_reads<T>(params.a, params.m, params.k) &&
         blas_reads<T>(params.b, params.k, params.n);
}

template <class T>
void run_blas(const GemmParams& params, const Epilogues<T>& epilogues) {
  const bool transpose_a = params.a.column_stride != 1, transpose_b = params.b.column_stride != 1;
  const int64_t lda = transpose_a ? params.a.column_stride : params.a.row_stride;
  const int64_t ldb = transpose_b ? params.b.column_stride : params.b.row_stride;
  for (int64_t batch = 0; batch < product(params.batch_dims, params.batch_sizes); ++batch) {
    const auto* a = static_cast<const T*>(of_batch(params, params.a, batch).data);
    const auto* b = static_cast<const T*>(of_batch(params, params.b, batch).data);
    auto* out = static_cast<T*>(of_batch(params.out, batch, params.m * params.n).data);
    for (int64_t r = 0; r < product(params.reduced_dims, params.reduced_sizes); ++r)
      gemm(transpose_a, transpose_b, params.m, params.n, params.k, T(params.alpha),
           a + batch_offset(r, params.reduced_dims, params.reduced_sizes, params.reduced_strides_a), lda,
           b + batch_offset(r, params.reduced_dims, params.reduced_sizes, params.reduced_strides_b), ldb,
           r > 0                 ? T(1)
           : accumulates(params) ? T(params.beta)
                                 : T(0),
           out, params.n);
    const Operand result{out, params.out.dtype, params.n, 1, {}};
    if (epilogues.is_backward()) {
      for_tiles_of<T>(result, params.m, params.n, epilogues.backward());
    } else if (has_epilogue(params)) {
      ForwardEpilogue<T> epilogue = epilogues.forward(batch);
      if (accumulates(params)) epilogue.c = {};
      for_tiles_of<T>(result, params.m, params.n, epilogue);
    }
  }
}

}  // namespace cuda_ext::cpu::CUDA_EXT_ISA
