// wgmma: asynchronous tensor core products of a warpgroup, 128 threads aligned to 128 (sm_90a).
//
// d (64, N) = A (64, K) @ B (K, N) + scale_d * d, where K is 32 bytes: 32 elements of 8-bit floats, 16 of float16 or
// bfloat16, 8 of tf32. B is read from shared memory through a descriptor, A from there or, if it is of 16 bits, from
// registers. What threads wrote to shared memory needs fence_async_shared first.
//   wgmma_fence(d, a)    orders earlier writes to registers (accumulators, fragments of A) before products; needed
//                        before the first product after a wait, and in each group before the first product on
//                        accumulators without products in flight
//   wgmma...(d, ...)     products, executed in order; nothing may access d, a or write the operands until a wait
//   wgmma_commit()       closes a group of products
//   wgmma_wait<n>(d)     waits until at most n groups are in flight; afterwards the accumulators d may be read
// Accumulators, with warp w of the warpgroup, g = lane / 4, t = lane % 4 (PTX ISA, "Register fragments for wgmma"):
//   d[4j], d[4j + 1] = (16w + g, 8j + 2t), (16w + g, 8j + 2t + 1)      d[4j + 2], d[4j + 3] = (16w + g + 8, ..)
//   a[0] = (16w + g, 2t..2t+1)  a[1] = (16w + g + 8, ..)  a[2] = (16w + g, 2t+8..)  a[3] = (16w + g + 8, 2t+8..)
#pragma once

#include "arch/barrier.cuh"
#include "arch/math.cuh"

namespace cuda_ext::arch {

enum class Swizzle { kNone = 0, k128 = 1, k64 = 2, k32 = 3 };

// Operands are K-major (contiguous along K) or MN-major; only those of 16 bits may be MN-major.
enum class Major { kK, kMn };

// The layout of an operand in shared memory. It consists of atoms of 8 rows of W bytes, where W is the swizzle's width,
// or 16 without swizzle; rows count along M or N if the operand is K-major, else along K.
//   K-major swizzled:    stride_bytes between atoms along MN (8 of them); leading_bytes unused; K steps of 32 bytes
//                        add 32 to the address
//   MN-major swizzled:   leading_bytes between atoms along MN (W bytes), stride_bytes between atoms along K (8)
//   K-major, no swizzle: stride_bytes between atoms along MN (8), leading_bytes along K (16 bytes)
//   MN-major, none:      stride_bytes between atoms along MN (16 bytes), leading_bytes along K (8)
// Atoms of a swizzle are aligned to their size, 8 W bytes.
DEVICE uint64_t make_descriptor(SharedAddress address, uint32_t leading_bytes, uint32_t stride_bytes, Swizzle swizzle) {
  const auto field = [](uint32_t bytes) { return uint64_t(bytes >> 4 & 0x3fff); };
  return field(address) | field(leading_bytes) << 16 | field(stride_bytes) << 32 | uint64_t(swizzle) << 62;
}
// The same layout `bytes` further, a multiple of 16. Addresses never overflow their field, so the upper half stays.
DEVICE uint64_t advance_descriptor(uint64_t descriptor, int bytes) {
  return (descriptor & 0xffffffff00000000) | (uint32_t(descriptor) + uint32_t(bytes >> 4));
}

#if defined(__CUDACC__)

template <int n>
struct WgmmaInstruction;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <class T>
struct WgmmaTypeName {
  static constexpr char value[] = "bf16";
};
template <>
struct WgmmaTypeName<half_t> {
  static constexpr char value[] = "f16";
};

#define CUDA_EXT_WGMMA(n, p0, p1, p2, p3, p4, p5, p6, p7)                                                              \
  template <>                                                                                                          \
  struct WgmmaInstruction<n> {                                                                                         \
    template <class T, int a_major, int b_major>                                                                       \
    static DEVICE void shared(float (&d)[n / 2], uint64_t a, uint64_t b, int scale_d) {                                \
      asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, " p2 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #n              \
                   "k16.f32." p5 "." p5 " {" CUDA_EXT_P##n "}, " p0 ", " p1 ", p, 1, 1, " p3 ", " p4 ";\n}"            \
                   : CUDA_EXT_D##n                                                                                     \
                   : "l"(a), "l"(b), "r"(scale_d), "n"(a_major), "n"(b_major), "C"(WgmmaTypeName<T>::value));          \
    }                                                                                                                  \
    template <class T, int b_major>                                                                                    \
    static DEVICE void registers(float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, int scale_d) {                 \
      asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, " p5 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #n              \
                   "k16.f32." p7 "." p7 " {" CUDA_EXT_P##n "}, {" p0 ", " p1 ", " p2 ", " p3 "}, " p4 ", p, 1, 1, " p6 \
                                                           ";\n}"                                                      \
                   : CUDA_EXT_D##n                                                                                     \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d), "n"(b_major),                   \
                     "C"(WgmmaTypeName<T>::value));                                                                    \
    }                                                                                                                  \
    static DEVICE void tf32(float (&d)[n / 2], uint64_t a, uint64_t b, int scale_d) {                                  \
      asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, " p2 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #n              \
                   "k8.f32.tf32.tf32 {" CUDA_EXT_P##n "}, " p0 ", " p1 ", p, 1, 1;\n}"                                 \
                   : CUDA_EXT_D##n                                                                                     \
                   : "l"(a), "l"(b), "r"(scale_d));                                                                    \
    }                                                                                                                  \
    template <class A, class B>                                                                                        \
    static DEVICE void float8(float (&d)[n / 2], uint64_t a, uint64_t b, int scale_d) {                                \
      asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, " p2 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #n              \
                   "k32.f32." p3 "." p4 " {" CUDA_EXT_P##n "}, " p0 ", " p1 ", p, 1, 1;\n}"                            \
                   : CUDA_EXT_D##n                                                                                     \
                   : "l"(a), "l"(b), "r"(scale_d), "C"(Float8Name<A>::value), "C"(Float8Name<B>::value));              \
    }                                                                                                                  \
  };
#include "arch/wgmma_registers.inc"
#undef CUDA_EXT_WGMMA

#define CUDA_EXT_SM90A(...) __VA_ARGS__
#else
#define CUDA_EXT_SM90A(...)
#endif

// scale_d: 0 overwrites d, 1 adds to it.
template <class T, Major a_major, Major b_major, int registers>
DEVICE void wgmma_m64k16(float (&d)[registers], uint64_t a, uint64_t b, int scale_d, Site = {}) {
  CUDA_EXT_SM90A(WgmmaInstruction<2 * registers>::template shared<T, int(a_major), int(b_major)>(d, a, b, scale_d);)
}
// With A from registers.
template <class T, Major b_major, int registers>
DEVICE void wgmma_m64k16(float (&d)[registers], const uint32_t (&a)[4], uint64_t b, int scale_d, Site = {}) {
  CUDA_EXT_SM90A(WgmmaInstruction<2 * registers>::template registers<T, int(b_major)>(d, a, b, scale_d);)
}
// On the upper 19 bits of float32 operands, both K-major.
template <int registers>
DEVICE void wgmma_m64k8_tf32(float (&d)[registers], uint64_t a, uint64_t b, int scale_d, Site = {}) {
  CUDA_EXT_SM90A(WgmmaInstruction<2 * registers>::tf32(d, a, b, scale_d);)
}
// On 8-bit floats of one type or two (float8_e4m3_t, float8_e5m2_t), both operands K-major. The hardware adds their
// products with about 14 significant bits (simt/float8_sum.h): a long sum is added to float32 registers in between.
template <class A, class B, int registers>
DEVICE void wgmma_m64k32(float (&d)[registers], uint64_t a, uint64_t b, int scale_d, Site = {}) {
  static_assert(sizeof(A) == 1 && sizeof(B) == 1);
  CUDA_EXT_SM90A(WgmmaInstruction<2 * registers>::template float8<A, B>(d, a, b, scale_d);)
}

// Keeps the compiler from moving accesses to these registers (float or uint32_t) across this point.
template <int count>
DEVICE void hold_registers(float (&registers)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int count>
DEVICE void hold_registers(uint32_t (&registers)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

template <class T, int rows, int count>
DEVICE void hold_registers(T (&registers)[rows][count]) {
#pragma unroll
  for (int i = 0; i < rows; ++i) hold_registers(registers[i]);
}

DEVICE void wgmma_fence(Site = {}) { CUDA_EXT_SM90A(asm volatile("wgmma.fence.sync.aligned;" :: : "memory");) }
template <class D>
DEVICE void wgmma_fence(D& d, Site = {}) {
  hold_registers(d);
  wgmma_fence();
}
template <class D, class A>
DEVICE void wgmma_fence(D& d, A& a, Site = {}) {
  hold_registers(a);
  wgmma_fence(d);
}
DEVICE void wgmma_commit(Site = {}) { CUDA_EXT_SM90A(asm volatile("wgmma.commit_group.sync.aligned;" :: : "memory");) }
template <int pending>
DEVICE void wgmma_wait(Site = {}) {
  CUDA_EXT_SM90A(asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");)
}
template <int pending, class D>
DEVICE void wgmma_wait(D& d, Site = {}) {
  wgmma_wait<pending>();
  hold_registers(d);
}

// setmaxnreg: changes the number of registers per thread of a whole warpgroup; at launch all threads have the same
// number. `count` is a multiple of 8 from 24 to 256.
template <int count>
DEVICE void increase_registers(Site = {}) {
  CUDA_EXT_SM90A(asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));)
}
template <int count>
DEVICE void decrease_registers(Site = {}) {
  CUDA_EXT_SM90A(asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));)
}

#undef CUDA_EXT_SM90A

#else

template <class T, Major a_major, Major b_major, int registers>
DEVICE void wgmma_m64k16(float (&d)[registers], uint64_t a, uint64_t b, int scale_d, Site site = {}) {
  static_assert(registers % 4 == 0 && registers >= 4 && registers <= 128);
  constexpr auto type = simt::matrix_type<T>();
  simt::wgmma(d, {type, type, 2 * registers, nullptr, a, b, a_major == Major::kMn, b_major == Major::kMn, scale_d != 0},
              site);
}
template <class T, Major b_major, int registers>
DEVICE void wgmma_m64k16(float (&d)[registers], const uint32_t (&a)[4], uint64_t b, int scale_d, Site site = {}) {
  static_assert(registers % 4 == 0 && registers >= 4 && registers <= 128);
  constexpr auto type = simt::matrix_type<T>();
  simt::wgmma(d, {type, type, 2 * registers, a, 0, b, false, b_major == Major::kMn, scale_d != 0}, site);
}
template <int registers>
DEVICE void wgmma_m64k8_tf32(float (&d)[registers], uint64_t a, uint64_t b, int scale_d, Site site = {}) {
  static_assert(registers % 4 == 0 && registers >= 4 && registers <= 128);
  constexpr auto type = simt::MatrixType::kTf32;
  simt::wgmma(d, {type, type, 2 * registers, nullptr, a, b, false, false, scale_d != 0}, site);
}
template <class A, class B, int registers>
DEVICE void wgmma_m64k32(float (&d)[registers], uint64_t a, uint64_t b, int scale_d, Site site = {}) {
  static_assert(registers % 4 == 0 && registers >= 4 && registers <= 128 && sizeof(A) == 1 && sizeof(B) == 1);
  simt::wgmma(
      d, {simt::matrix_type<A>(), simt::matrix_type<B>(), 2 * registers, nullptr, a, b, false, false, scale_d != 0},
      site);
}
DEVICE void wgmma_fence(Site site = {}) { simt::wgmma_fence(site); }
template <class D>
DEVICE void wgmma_fence(D&, Site site = {}) {
  simt::wgmma_fence(site);
}
template <class D, class A>
DEVICE void wgmma_fence(D&, A&, Site site = {}) {
  simt::wgmma_fence(site);
}
DEVICE void wgmma_commit(Site site = {}) { simt::wgmma_commit(site); }
template <int pending>
DEVICE void wgmma_wait(Site site = {}) {
  simt::wgmma_wait(pending, site);
}
template <int pending, int count>
DEVICE void wgmma_wait(float (&d)[count], Site site = {}) {
  simt::wgmma_wait(pending, site);
  simt::wgmma_expect_idle(d, site);
}
template <int pending, int rows, int count>
DEVICE void wgmma_wait(float (&d)[rows][count], Site site = {}) {
  simt::wgmma_wait(pending, site);
  for (auto& row : d) simt::wgmma_expect_idle(row, site);
}
template <int count>
DEVICE void increase_registers(Site site = {}) {
  simt::set_max_registers(count, true, site);
}
template <int count>
DEVICE void decrease_registers(Site site = {}) {
  simt::set_max_registers(count, false, site);
}

#endif

}  // namespace cuda_ext::arch
