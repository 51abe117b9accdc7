// Tensor cores with operands in registers: ldmatrix, stmatrix, mma.sync.
//
// Fragments, with g = lane / 4 and t = lane % 4 (PTX ISA, "Matrix fragments for mma.m16n8k16"):
//   A (16 x 16): a[0] = (g, 2t..2t+1)  a[1] = (g+8, ..)  a[2] = (g, 2t+8..)  a[3] = (g+8, 2t+8..)
//   B (16 x 8):  b[0] = (k = 2t..2t+1, n = g)            b[1] = (k = 2t+8.., n = g)
//   D (16 x 8):  d[0], d[1] = (g, 2t), (g, 2t+1)         d[2], d[3] = (g+8, ..)
//   tf32, k = 8: a[0] = (g, t)  a[1] = (g+8, t)  a[2] = (g, t+4)  a[3] = (g+8, t+4);  b[0] = (t, g)  b[1] = (t+4, g)
//   8 bits, k = 32: a[0] = (g, 4t..4t+3)  a[1] = (g+8, ..)  a[2] = (g, 4t+16..)  a[3] = (g+8, 4t+16..)
//                   b[0] = (k = 4t..4t+3, n = g)  b[1] = (k = 4t+16.., n = g), as bytes from the lowest
// The tensor cores of sm_75 multiply only float16, 8 deep. There the same calls take two instructions for float16, and
// float32 arithmetic for bfloat16 and float32, several times slower than a kernel made for it would be.
// Products of 8-bit floats exist since sm_89; for older architectures they do not compile.
#pragma once

#include "arch/math.cuh"
#include "arch/memory.cuh"
#include "arch/warp.cuh"

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

// Whether there are 16-deep products, and those of bfloat16 and tf32.
DEVICE constexpr bool has_sm80_mma() { return kComputeCapability >= 80; }
template <class T>
DEVICE void issue_mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site = {}) {
#if __CUDA_ARCH__ >= 800
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
#endif
}
DEVICE void issue_mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site = {}) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
template <class A, class B>
DEVICE void issue_mma_m16n8k32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site = {}) {
#if __CUDA_ARCH__ >= 890
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.%10.%11.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "C"(Float8Name<A>::value),
                 "C"(Float8Name<B>::value));
#endif
}
// float16, with a (16 x 8): a0 = (g, 2t..2t+1), a1 = (g+8, ..), and b (8 x 8): (k = 2t..2t+1, n = g).
DEVICE void issue_mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b, Site = {}) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(b));
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
DEVICE bool has_sm80_mma() { return simt::compute_capability() >= 80; }
template <class T>
DEVICE void issue_mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site = {}) {
  simt::mma_m16n8k16(DtypeOf<T>::value == Dtype::kFloat16, d, a, b, site);
}
DEVICE void issue_mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site = {}) {
  simt::mma_m16n8k8_tf32(d, a, b, site);
}
template <class A, class B>
DEVICE void issue_mma_m16n8k32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site = {}) {
  simt::mma_m16n8k32(simt::matrix_type<A>(), simt::matrix_type<B>(), d, a, b, site);
}
DEVICE void issue_mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b, Site site = {}) {
  simt::mma_m16n8k8(d, a0, a1, b, site);
}

#endif

// d += A @ B in float32 arithmetic, with the fragments of a product of 32 bytes of T along k. Each lane fetches the
// lines of A and B that it needs from the lanes that have them: rows g and g + 8 of A are in the lanes 4g to 4g + 3,
// columns 2t and 2t + 1 of B in the lanes 8t to 8t + 7.
template <class T>
DEVICE void mma_in_float32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site = {}) {
  constexpr int kElements = 4 / sizeof(T);  // of a register
  const auto element = [](uint32_t word, int i) {
    if constexpr (kElements == 1)
      return bits_float(word);
    else
      return i == 0 ? unpack_low<T>(word) : unpack_high<T>(word);
  };
  const int first_a = lane_index() / 4 * 4, first_b = lane_index() % 4 * 8;
#pragma unroll 1  // kernels have hundreds of these products
  for (int t = 0; t < 4; ++t) {
    uint32_t rows[4], columns[2][2];
#pragma unroll
    for (int q = 0; q < 4; ++q) rows[q] = shuffle(a[q], first_a + t, kFullWarp, site);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int q = 0; q < 2; ++q) columns[n][q] = shuffle(b[q], first_b + 4 * n + t, kFullWarp, site);
#pragma unroll
    for (int q = 0; q < 2; ++q)
#pragma unroll
      for (int i = 0; i < kElements; ++i)
#pragma unroll
        for (int at = 0; at < 4; ++at)
          d[at] = fma(element(rows[2 * q + at / 2], i), element(columns[at % 2][q], i), d[at]);
  }
}

// d += A (16 x 16) @ B (16 x 8) with exact products and sums in float32. T: half_t or bfloat16_t.
template <class T>
DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site = {}) {
  if (has_sm80_mma()) {
    issue_mma_m16n8k16<T>(d, a, b, site);
  } else if constexpr (DtypeOf<T>::value == Dtype::kFloat16) {
    issue_mma_m16n8k8(d, a[0], a[1], b[0], site);
    issue_mma_m16n8k8(d, a[2], a[3], b[1], site);
  } else {
    mma_in_float32<T>(d, a, b, site);
  }
}

// d += A (16 x 8) @ B (8 x 8) on the upper 19 bits of float32 operands, or on all bits unless has_sm80_mma().
DEVICE void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site = {}) {
  if (has_sm80_mma())
    issue_mma_m16n8k8_tf32(d, a, b, site);
  else
    mma_in_float32<float>(d, a, b, site);
}

// Whether there are products of 8-bit floats. A kernel that is compiled for other architectures too asks in an if
// constexpr. (In the emulator, a device that lacks them fails.)
DEVICE constexpr bool has_float8_mma() { return kComputeCapability == 0 || kComputeCapability >= 89; }
// d += A (16 x 32) @ B (32 x 8). A, B: float8_e4m3_t or float8_e5m2_t.
template <class A, class B>
DEVICE void mma_m16n8k32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site = {}) {
  static_assert(sizeof(A) == 1 && sizeof(B) == 1 && has_float8_mma(), "products of 8-bit floats need sm_89 or later");
  issue_mma_m16n8k32<A, B>(d, a, b, site);
}

}  // namespace cuda_ext::arch
