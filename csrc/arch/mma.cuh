// Tensor cores with operands in registers: ldmatrix, stmatrix, mma.sync.
//
// Fragments, with g = lane / 4 and t = lane % 4 (PTX ISA, "Matrix fragments for mma.m16n8k16"):
//   A (16 x 16): a[0] = (g, 2t..2t+1)  a[1] = (g+8, ..)  a[2] = (g, 2t+8..)  a[3] = (g+8, 2t+8..)
//   B (16 x 8):  b[0] = (k = 2t..2t+1, n = g)            b[1] = (k = 2t+8.., n = g)
//   D (16 x 8):  d[0], d[1] = (g, 2t), (g, 2t+1)         d[2], d[3] = (g+8, ..)
//   tf32, k = 8: a[0] = (g, t)  a[1] = (g+8, t)  a[2] = (g, t+4)  a[3] = (g+8, t+4);  b[0] = (t, g)  b[1] = (t+4, g)
#pragma once

#include "arch/memory.cuh"

namespace cuda_ext::arch {

#if defined(__CUDACC__)

// Loads `count` 8 x 8 matrices of 16-bit elements: lane 8i + r passes the address of row r (16 bytes) of matrix i. Each
// lane receives elements (g, 2t) and (g, 2t + 1) of every matrix or, transposed, of its transpose.
template <int count, bool transposed = false>
DEVICE void ldmatrix(uint32_t (&m)[count], SharedAddress row, Site = {}) {
  static_assert(count == 1 || count == 2 || count == 4);
  if constexpr (count == 4 && !transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row)
                 : "memory");
  if constexpr (count == 4 && transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row)
                 : "memory");
  if constexpr (count == 2 && !transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(m[0]), "=r"(m[1])
                 : "r"(row)
                 : "memory");
  if constexpr (count == 2 && transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(m[0]), "=r"(m[1])
                 : "r"(row)
                 : "memory");
  if constexpr (count == 1 && !transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(m[0]) : "r"(row) : "memory");
  if constexpr (count == 1 && transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(m[0]) : "r"(row) : "memory");
}

// The inverse of ldmatrix (sm_90).
template <int count, bool transposed = false>
DEVICE void stmatrix(SharedAddress row, const uint32_t (&m)[count], Site = {}) {
  static_assert(count == 1 || count == 2 || count == 4);
#if __CUDA_ARCH__ >= 900
  if constexpr (count == 4 && !transposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m[0]), "r"(m[1]),
                 "r"(m[2]), "r"(m[3])
                 : "memory");
  if constexpr (count == 4 && transposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m[0]),
                 "r"(m[1]), "r"(m[2]), "r"(m[3])
                 : "memory");
  if constexpr (count == 2 && !transposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(m[0]), "r"(m[1])
                 : "memory");
  if constexpr (count == 2 && transposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(m[0]), "r"(m[1])
                 : "memory");
  if constexpr (count == 1 && !transposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(row), "r"(m[0]) : "memory");
  if constexpr (count == 1 && transposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(row), "r"(m[0]) : "memory");
#endif
}

// d += A (16 x 16) @ B (16 x 8) with exact products and sums in float32. T: half_t or bfloat16_t.
template <class T>
DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site = {}) {
  if constexpr (DtypeOf<T>::value == Dtype::kFloat16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d += A (16 x 8) @ B (8 x 8) on the upper 19 bits of float32 operands.
DEVICE void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site = {}) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#else

template <int count, bool transposed = false>
DEVICE void ldmatrix(uint32_t (&m)[count], SharedAddress row, Site site = {}) {
  static_assert(count == 1 || count == 2 || count == 4);
  simt::ldmatrix(m, count, transposed, row, site);
}
template <int count, bool transposed = false>
DEVICE void stmatrix(SharedAddress row, const uint32_t (&m)[count], Site site = {}) {
  static_assert(count == 1 || count == 2 || count == 4);
  simt::stmatrix(row, m, count, transposed, site);
}
template <class T>
DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site = {}) {
  simt::mma_m16n8k16(DtypeOf<T>::value == Dtype::kFloat16, d, a, b, site);
}
DEVICE void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site = {}) {
  simt::mma_m16n8k8_tf32(d, a, b, site);
}

#endif

}  // namespace cuda_ext::arch
