// Loads, stores and atomics with a given width, cache policy or memory order. Plain C++ accesses are allowed too, also
// to shared memory.
#pragma once

#include <bit>

#include "arch/thread.cuh"

namespace cuda_ext::arch {

#if defined(__CUDACC__)

DEVICE SharedAddress shared_address(const void* pointer) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(pointer));
}

// Vectors of 4, 8 or 16 bytes, at addresses aligned to their size.
template <class Vector>
DEVICE Vector load_shared(SharedAddress address, Site = {}) {
  static_assert(sizeof(Vector) == 4 || sizeof(Vector) == 8 || sizeof(Vector) == 16);
  Vector v;
  uint32_t* w = reinterpret_cast<uint32_t*>(&v);
  if constexpr (sizeof(Vector) == 16)
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(address)
                 : "memory");
  else if constexpr (sizeof(Vector) == 8)
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(address) : "memory");
  else
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w[0]) : "r"(address) : "memory");
  return v;
}
template <class Vector>
DEVICE void store_shared(SharedAddress address, const Vector& v, Site = {}) {
  static_assert(sizeof(Vector) == 4 || sizeof(Vector) == 8 || sizeof(Vector) == 16);
  const uint32_t* w = reinterpret_cast<const uint32_t*>(&v);
  if constexpr (sizeof(Vector) == 16)
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
  else if constexpr (sizeof(Vector) == 8)
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(w[0]), "r"(w[1]) : "memory");
  else
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(w[0]) : "memory");
}

// Loads 1 to 16 bytes through the read-only path; nothing on the device may write them while the kernel runs.
template <class Vector>
DEVICE Vector load_global(const void* pointer, Site = {}) {
  static_assert(sizeof(Vector) == 1 || sizeof(Vector) == 2 || sizeof(Vector) == 4 || sizeof(Vector) == 8 ||
                sizeof(Vector) == 16);
  if constexpr (sizeof(Vector) == 16) return __builtin_bit_cast(Vector, __ldg(static_cast<const uint4*>(pointer)));
  if constexpr (sizeof(Vector) == 8) return __builtin_bit_cast(Vector, __ldg(static_cast<const uint2*>(pointer)));
  if constexpr (sizeof(Vector) == 4) return __builtin_bit_cast(Vector, __ldg(static_cast<const uint32_t*>(pointer)));
  if constexpr (sizeof(Vector) == 2) return __builtin_bit_cast(Vector, __ldg(static_cast<const uint16_t*>(pointer)));
  if constexpr (sizeof(Vector) == 1) return __builtin_bit_cast(Vector, __ldg(static_cast<const uint8_t*>(pointer)));
}
// For data that is read once: it is evicted from the caches first.
template <class Vector>
DEVICE Vector load_global_streaming(const void* pointer, Site = {}) {
  static_assert(sizeof(Vector) == 2 || sizeof(Vector) == 4 || sizeof(Vector) == 8 || sizeof(Vector) == 16);
  if constexpr (sizeof(Vector) == 16) return __builtin_bit_cast(Vector, __ldcs(static_cast<const uint4*>(pointer)));
  if constexpr (sizeof(Vector) == 8) return __builtin_bit_cast(Vector, __ldcs(static_cast<const uint2*>(pointer)));
  if constexpr (sizeof(Vector) == 4) return __builtin_bit_cast(Vector, __ldcs(static_cast<const uint32_t*>(pointer)));
  if constexpr (sizeof(Vector) == 2) return __builtin_bit_cast(Vector, __ldcs(static_cast<const uint16_t*>(pointer)));
}
// Vectors use asm because nvcc splits a plain vector store if it knows some of the words; the lanes of a warp would
// then write words with gaps between them.
template <class Vector>
DEVICE void store_global(void* pointer, const Vector& v, Site = {}) {
  static_assert(sizeof(Vector) == 2 || sizeof(Vector) == 4 || sizeof(Vector) == 8 || sizeof(Vector) == 16);
  if constexpr (sizeof(Vector) == 16) {
    const uint4 w = __builtin_bit_cast(uint4, v);
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w)
                 : "memory");
  }
  if constexpr (sizeof(Vector) == 8) {
    const uint2 w = __builtin_bit_cast(uint2, v);
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(pointer), "r"(w.x), "r"(w.y) : "memory");
  }
  if constexpr (sizeof(Vector) == 4) *static_cast<uint32_t*>(pointer) = __builtin_bit_cast(uint32_t, v);
  if constexpr (sizeof(Vector) == 2) *static_cast<uint16_t*>(pointer) = __builtin_bit_cast(uint16_t, v);
}
template <class Vector>
DEVICE void store_global_streaming(void* pointer, const Vector& v, Site = {}) {
  static_assert(sizeof(Vector) == 2 || sizeof(Vector) == 4 || sizeof(Vector) == 8 || sizeof(Vector) == 16);
  if constexpr (sizeof(Vector) == 16) __stcs(static_cast<uint4*>(pointer), __builtin_bit_cast(uint4, v));
  if constexpr (sizeof(Vector) == 8) __stcs(static_cast<uint2*>(pointer), __builtin_bit_cast(uint2, v));
  if constexpr (sizeof(Vector) == 4) __stcs(static_cast<uint32_t*>(pointer), __builtin_bit_cast(uint32_t, v));
  if constexpr (sizeof(Vector) == 2) __stcs(static_cast<uint16_t*>(pointer), __builtin_bit_cast(uint16_t, v));
}

// Relaxed, device scope; returns the old value. T: int32_t, uint32_t, uint64_t or float.
template <class T>
DEVICE T atomic_add(T* pointer, T value, Site = {}) {
  if constexpr (sizeof(T) == 8)
    return atomicAdd(reinterpret_cast<unsigned long long*>(pointer), static_cast<unsigned long long>(value));
  else
    return atomicAdd(pointer, value);
}
// The same without a result, so that the thread does not wait for a round trip.
DEVICE void reduce_add(float* pointer, float value, Site = {}) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(pointer), "f"(value) : "memory");
}
DEVICE void reduce_add(uint32_t* pointer, uint32_t value, Site = {}) {
  asm volatile("red.global.add.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}
DEVICE void reduce_max(uint32_t* pointer, uint32_t value, Site = {}) {
  asm volatile("red.global.max.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}
DEVICE void reduce_or(uint32_t* pointer, uint32_t value, Site = {}) {
  asm volatile("red.global.or.b32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}
// Adds four consecutive floats, from an address aligned to 16 bytes; each addition is atomic.
DEVICE void reduce_add(float* pointer, const float (&values)[4], Site = {}) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "f"(values[0]), "f"(values[1]),
               "f"(values[2]), "f"(values[3])
               : "memory");
#else
  for (int i = 0; i < 4; ++i) reduce_add(pointer + i, values[i]);
#endif
}
// Whether reduce_add of four floats is one instruction.
DEVICE constexpr bool has_vector_reductions() {
#if __CUDA_ARCH__ >= 900
  return true;
#else
  return false;
#endif
}
// Acquire and release, device scope: a thread sees what was written before earlier calls on the same word.
DEVICE uint32_t atomic_add_acq_rel(uint32_t* pointer, uint32_t value, Site = {}) {
  uint32_t old;
  asm volatile("atom.global.acq_rel.gpu.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(pointer), "r"(value) : "memory");
  return old;
}
DEVICE void store_release(uint32_t* pointer, uint32_t value, Site = {}) {
  asm volatile("st.global.release.gpu.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}
// Waits until *pointer == value, which another block writes with release. That block must be guaranteed to run: it has
// a lower index, or all blocks fit on the device at once.
DEVICE void wait_equal(const uint32_t* pointer, uint32_t value, Site = {}) {
  uint32_t seen;
  do {
    asm volatile("ld.global.acquire.gpu.u32 %0, [%1];" : "=r"(seen) : "l"(pointer) : "memory");
  } while (seen != value);
}
// The same with system scope, for devices and processes that share the memory. The word is a counter that may wrap:
// waits until it has reached `value`. After `nanoseconds` the kernel ends with an error.
DEVICE void store_release_system(uint32_t* pointer, uint32_t value, Site = {}) {
  asm volatile("st.global.release.sys.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}
DEVICE void wait_reached_system(const uint32_t* pointer, uint32_t value, uint64_t nanoseconds, Site = {}) {
  uint64_t begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  while (true) {
    uint32_t seen;
    asm volatile("ld.global.acquire.sys.u32 %0, [%1];" : "=r"(seen) : "l"(pointer) : "memory");
    if (int32_t(seen - value) >= 0) return;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (now - begin > nanoseconds) __trap();
  }
}

#else

DEVICE SharedAddress shared_address(const void* pointer) { return simt::shared_address(pointer); }

template <class Vector>
DEVICE Vector load_shared(SharedAddress address, Site site = {}) {
  Vector v;
  simt::load_shared(&v, address, sizeof v, site);
  return v;
}
template <class Vector>
DEVICE void store_shared(SharedAddress address, const Vector& v, Site site = {}) {
  simt::store_shared(address, &v, sizeof v, site);
}
template <class Vector>
DEVICE Vector load_global(const void* pointer, Site site = {}) {
  Vector v;
  simt::load_global(&v, pointer, sizeof v, true, site);
  return v;
}
template <class Vector>
DEVICE Vector load_global_streaming(const void* pointer, Site site = {}) {
  Vector v;
  simt::load_global(&v, pointer, sizeof v, false, site);
  return v;
}
template <class Vector>
DEVICE void store_global(void* pointer, const Vector& v, Site site = {}) {
  simt::store_global(pointer, &v, sizeof v, site);
}
template <class Vector>
DEVICE void store_global_streaming(void* pointer, const Vector& v, Site site = {}) {
  store_global(pointer, v, site);
}
template <class T>
DEVICE T atomic_add(T* pointer, T value, Site site = {}) {
  return simt::atomic_add(pointer, value, site);
}
DEVICE void reduce_add(float* pointer, float value, Site site = {}) { simt::atomic_add(pointer, value, site); }
DEVICE void reduce_add(uint32_t* pointer, uint32_t value, Site site = {}) { simt::atomic_add(pointer, value, site); }
DEVICE void reduce_max(uint32_t* pointer, uint32_t value, Site site = {}) { simt::atomic_max(pointer, value, site); }
DEVICE void reduce_or(uint32_t* pointer, uint32_t value, Site site = {}) { simt::atomic_or(pointer, value, site); }
DEVICE void reduce_add(float* pointer, const float (&values)[4], Site site = {}) {
  simt::reduce_add(pointer, values, 4, site);
}
DEVICE bool has_vector_reductions() { return simt::compute_capability() >= 90; }
DEVICE uint32_t atomic_add_acq_rel(uint32_t* pointer, uint32_t value, Site site = {}) {
  return simt::atomic_add_acq_rel(pointer, value, site);
}
DEVICE void store_release(uint32_t* pointer, uint32_t value, Site site = {}) {
  simt::store_release(pointer, value, site);
}
DEVICE void wait_equal(const uint32_t* pointer, uint32_t value, Site site = {}) {
  simt::wait_equal(pointer, value, site);
}
DEVICE void store_release_system(uint32_t* pointer, uint32_t value, Site site = {}) {
  simt::store_release(pointer, value, site);
}
// Needs no time-out: the emulator detects a deadlock.
DEVICE void wait_reached_system(const uint32_t* pointer, uint32_t value, uint64_t, Site site = {}) {
  simt::wait_reached(pointer, value, site);
}

#endif

}  // namespace cuda_ext::arch
