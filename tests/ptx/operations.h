// Functions that translated PTX calls in addition to the emulator's instructions: arithmetic that differs from C++'s
// operators, and the addresses of a thread.
#pragma once

#include <algorithm>
#include <bit>
#include <cfenv>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <limits>
#include <type_traits>

#include "simt/machine.h"

namespace cuda_ext::ptx {

// Registers hold integers or floats of their width.
inline float as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline double as_double(uint64_t bits) { return std::bit_cast<double>(bits); }
inline uint32_t as_bits(float x) { return std::bit_cast<uint32_t>(x); }
inline uint64_t as_bits(double x) { return std::bit_cast<uint64_t>(x); }

// Products. Narrow types are widened explicitly, before C++ promotes them to int.
template <std::integral T>
using Wide =
    std::conditional_t<sizeof(T) == 8, std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
                       std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                                          std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>>>;
template <std::integral T>
Wide<T> wide_product(T a, T b) {
  return Wide<T>(a) * Wide<T>(b);
}
template <std::integral T>
T lo_product(T a, T b) {
  return T(wide_product(a, b));
}
template <std::integral T>
T hi_product(T a, T b) {
  return T(wide_product(a, b) >> 8 * sizeof(T));
}
template <std::integral T>
T quotient(T a, T b, Site site) {
  if (b == 0) simt::machine->fail("div", site, "a division by zero");
  return b == T(-1) && std::is_signed_v<T> ? T(lo_product(a, b)) : T(a / b);
}
template <std::integral T>
T remainder(T a, T b, Site site) {
  if (b == 0) simt::machine->fail("rem", site, "a division by zero");
  return b == T(-1) && std::is_signed_v<T> ? T(0) : T(a % b);
}

// Shifts by the width or more give zero, or the sign.
template <std::unsigned_integral T>
T shift_left(T value, uint32_t bits) {
  return bits < 8 * sizeof(T) ? T(value << bits) : T(0);
}
template <std::integral T>
T shift_right(T value, uint32_t bits) {
  if (bits < 8 * sizeof(T)) return T(value >> bits);
  return value < 0 ? T(-1) : T(0);
}

// Replaces `length` bits of `value`, starting at `first`, with the low bits of `field`.
template <std::unsigned_integral T>
T insert_bits(T field, T value, uint32_t first, uint32_t length) {
  const T ones = shift_left(T(~shift_left(T(~T(0)), length & 255)), first & 255);
  return T((shift_left(field, first & 255) & ones) | (value & ~ones));
}

// Digit i of `selector` chooses byte i of the result among those of a (0 to 3) and b (4 to 7); with bit 3 set, eight
// times the sign of this byte.
inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = selector >> 4 * i, byte = uint32_t(bytes >> (digit & 7) * 8) & 0xff;
    result |= ((digit & 8) == 0 ? byte : byte >> 7 == 0 ? 0 : 0xff) << 8 * i;
  }
  return result;
}

// If one operand is a NaN, the result is the other one. -0 is less than +0.
template <class T>
T minimum(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (a != a || b != b) return a != a ? b : a;
    if (a == b) return std::signbit(a) ? a : b;
  }
  return a < b ? a : b;
}
template <class T>
T maximum(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (a != a || b != b) return a != a ? b : a;
    if (a == b) return std::signbit(a) ? b : a;
  }
  return a > b ? a : b;
}
template <class T>
T absolute(T a) {
  if constexpr (std::is_floating_point_v<T>)
    return std::fabs(a);
  else
    return a < 0 ? T(-a) : a;
}
template <class T>
T copy_sign(T sign, T magnitude) {
  return std::copysign(magnitude, sign);
}

// Rounded towards minus infinity.
inline float fma_down(float a, float b, float c) {
  const int before = std::fegetround();
  std::fesetround(FE_DOWNWARD);
  const volatile float x = a, y = b, z = c;
  const volatile float result = std::fma(x, y, z);
  std::fesetround(before);
  return result;
}
// Pairs of 8-bit floats; a NaN becomes the one float16 that the hardware writes.
template <class T>
uint16_t to_float8_pair(float high, float low) {
  return uint16_t(uint32_t(simt::to_float8<T>(high).bits) << 8 | simt::to_float8<T>(low).bits);
}
template <class T>
uint32_t float8_pair_to_half(uint16_t pair) {
  const auto half = [](uint32_t bits) { return uint32_t(simt::to_half(simt::to_float(T{uint8_t(bits)})).bits); };
  return half(pair >> 8) << 16 | half(pair);
}
// Clamps to 0 .. 1; a NaN gives 0.
inline float saturate(float a) { return a > 0 ? std::min(a, 1.0f) : 0.0f; }
// Converts a whole number. Values out of range are clamped; a NaN gives 0.
template <std::integral T, std::floating_point F>
T to_integer(F a) {
  if (a != a) return 0;
  constexpr auto kMin = std::numeric_limits<T>::min(), kMax = std::numeric_limits<T>::max();
  if (a <= F(kMin)) return kMin;
  return a >= F(kMax) ? kMax : T(a);
}

template <class T = void>
T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

// The lane that a shuffle reads, or -1 if it is out of range; `clamp` is operand c of the instruction.
struct ShuffleRange {
  int lane, low, high, mask;
  explicit ShuffleRange(uint32_t clamp) : lane(simt::thread_index() % 32), mask(int(clamp >> 8 & 31)) {
    low = lane & mask;
    high = low | (int(clamp & 31) & ~mask);
  }
};
inline int shuffle_idx(uint32_t b, uint32_t clamp) {
  const ShuffleRange range(clamp);
  const int from = range.low | (int(b & 31) & ~range.mask);
  return from <= range.high ? from : -1;
}
inline int shuffle_up(uint32_t b, uint32_t clamp) {
  const ShuffleRange range(clamp);
  const int from = range.lane - int(b & 31);
  return from >= range.high ? from : -1;
}
inline int shuffle_down(uint32_t b, uint32_t clamp) {
  const ShuffleRange range(clamp);
  const int from = range.lane + int(b & 31);
  return from <= range.high ? from : -1;
}
inline int shuffle_bfly(uint32_t b, uint32_t clamp) {
  const ShuffleRange range(clamp);
  const int from = range.lane ^ int(b & 31);
  return from <= range.high ? from : -1;
}
// Waits for all lanes of the mask and elects the lowest.
inline bool elect(uint32_t mask, Site site) {
  simt::ballot(true, mask, site);
  return simt::thread_index() % 32 == std::countr_zero(mask);
}

template <bool float16>
void mma_m16n8k16(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                  uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3, Site site) {
  float d[] = {c0, c1, c2, c3};
  simt::mma_m16n8k16(float16, d, {a0, a1, a2, a3}, {b0, b1}, site);
  d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}
inline void mma_m16n8k8_tf32(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2,
                             uint32_t a3, uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3, Site site) {
  float d[] = {c0, c1, c2, c3};
  simt::mma_m16n8k8_tf32(d, {a0, a1, a2, a3}, {b0, b1}, site);
  d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}
template <simt::MatrixType a_type, simt::MatrixType b_type>
void mma_m16n8k32(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                  uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3, Site site) {
  float d[] = {c0, c1, c2, c3};
  simt::mma_m16n8k32(a_type, b_type, d, {a0, a1, a2, a3}, {b0, b1}, site);
  d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}
inline void mma_m16n8k8(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t b, float c0,
                        float c1, float c2, float c3, Site site) {
  float d[] = {c0, c1, c2, c3};
  simt::mma_m16n8k8(d, a0, a1, b, site);
  d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}
inline void wgmma(float* d, const simt::WgmmaOperands& operands, Site site) { simt::wgmma(d, operands, site); }
template <class... At>
void tma_load(uint32_t to, const uint64_t* map, uint64_t* barrier, uint32_t blocks, Site site, At... at) {
  const int coordinates[] = {at...};
  simt::tma_load(to, map, barrier, coordinates, sizeof...(at), blocks, site);
}
template <class... At>
void tma_store(const uint64_t* map, uint32_t from, bool add, Site site, At... at) {
  const int coordinates[] = {at...};
  simt::tma_store(map, from, coordinates, sizeof...(at), add, site);
}
[[noreturn]] inline void trap(Site site) { simt::machine->fail("trap", site, "the kernel has given up"); }

// vprintf, of whole numbers of 64 bits. Returns how many there are.
inline uint32_t print(uint64_t format, uint64_t arguments, Site site) {
  uint32_t count = 0;
  for (const char* at = pointer<const char>(format); *at != 0; ++at) {
    if (*at != '%') {
      std::fputc(*at, stdout);
    } else if (std::strncmp(at, "%lld", 4) == 0) {
      std::fprintf(stdout, "%lld", pointer<const long long>(arguments)[count++]);
      at += 3;
    } else {
      simt::machine->fail("vprintf", site, "expected the conversion %%lld, got %.4s", at);
    }
  }
  return count;
}

// Addresses of a thread, and a buffer for its vector accesses.
class Thread {
 public:
  Thread(const std::byte* parameters, int bytes)
      : shared(simt::shared_address(simt::shared_storage(0))),
        window_(static_cast<std::byte*>(simt::shared_storage(0)) - shared),
        parameters_(parameters),
        parameter_bytes_(uint64_t(bytes)) {}

  const uint32_t shared;  // address of the block's dynamic shared memory

  alignas(16) union {
    uint8_t uint8_ts[16];
    int8_t int8_ts[16];
    uint16_t uint16_ts[8];
    int16_t int16_ts[8];
    uint32_t uint32_ts[4];
    int32_t int32_ts[4];
    uint64_t uint64_ts[2];
    int64_t int64_ts[2];
    float floats[4];
    double doubles[2];
  } vector;
  alignas(16) std::byte local[64];
  int lane = 0;  // read by a shuffle; -1 if out of range

  int shuffled_lane() const { return lane >= 0 ? lane : simt::thread_index() % 32; }

  // Conversions between shared and generic addresses.
  uint64_t generic(uint32_t address) const { return reinterpret_cast<uint64_t>(window_ + address); }
  uint32_t window_address(uint64_t address, Site) const { return simt::shared_address(pointer(address)); }
  // The word of an mbarrier of this block.
  uint64_t* barrier(uint32_t address, Site site) const {
    simt::machine->shared(address, 8, 8, "mbarrier", site);
    return reinterpret_cast<uint64_t*>(window_ + address);
  }

  uint64_t parameter(int offset) const { return reinterpret_cast<uint64_t>(parameters_ + offset); }
  void load_parameter(void* to, uint64_t from, int bytes, Site site) const {
    const uint64_t begin = parameter(0);
    if (from < begin || from + uint64_t(bytes) > begin + parameter_bytes_)
      simt::machine->fail("ld.param", site, "%d bytes at %lld of the %llu bytes of parameters", bytes,
                          (long long)(from - begin), (unsigned long long)parameter_bytes_);
    std::memcpy(to, pointer(from), size_t(bytes));
  }

  void store_local(uint64_t to, const void* from, int bytes, Site site) {
    const uint64_t offset = to - reinterpret_cast<uint64_t>(local);
    if (offset > sizeof(local) - size_t(bytes))
      simt::machine->fail("st.local", site, "%d bytes at %lld of %zu bytes", bytes, (long long)offset, sizeof(local));
    std::memcpy(local + offset, from, size_t(bytes));
  }

  uint64_t time() { return ++time_; }

  uint32_t load_acquire(uint64_t address, Site site) {
    return simt::load_acquire(pointer<uint32_t>(address), poll_, site);
  }

  template <class Register>
  static float* accumulators(Register* registers) {
    static_assert(sizeof(Register) == 4);
    return reinterpret_cast<float*>(registers);
  }

 private:
  std::byte* window_;
  const std::byte* parameters_;
  uint64_t parameter_bytes_;
  simt::Poll poll_;
  uint64_t time_ = 0;
};

}  // namespace cuda_ext::ptx
