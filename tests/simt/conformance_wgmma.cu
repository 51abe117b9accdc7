// wgmma: types, sizes, layouts, operands in registers; setmaxnreg.
//
// in: A (64, K) and B (N, K) in rows of elements of 8, 16 or 32 bits, with K of 32 bytes; then D (64, N) as floats. The
// kernel stores the operands in shared memory in the layout that the descriptors' documentation specifies, multiplies
// twice into D with scale_d = 1, and outputs D in rows.
#include "arch/wgmma.cuh"
#include "arch/warp.cuh"
#include "conformance.h"

namespace cuda_ext::conformance {

using namespace arch;

constexpr int kAOffset = 0, kBOffset = 16 * 1024, kStorageBytes = 48 * 1024;

struct OperandStorage {
  alignas(1024) unsigned char x[kStorageBytes];
};

constexpr int width_of(Swizzle swizzle) {
  return swizzle == Swizzle::k128 ? 128 : swizzle == Swizzle::k64 ? 64 : swizzle == Swizzle::k32 ? 32 : 16;
}

// Distances between atoms, with gaps, so that exchanging them changes the result. With the 128-byte swizzle A is in the
// first 16 KiB and B in the rest. An atom has 8 W bytes; at most 256 / 8 atoms lie along MN if the rows are K-major.
template <Swizzle swizzle, Major major, int element>
struct Layout {
  static constexpr int kWidth = width_of(swizzle), kAtom = 8 * kWidth, kAlongMn = kWidth / element;
  static constexpr bool kSwizzled = swizzle != Swizzle::kNone;
  // Bytes between neighbouring atoms along MN and along K.
  static constexpr int kMnStep = kAtom * (major == Major::kMn && !kSwizzled ? 1 : major == Major::kMn ? 2 : 1);
  static constexpr int kKStep = major == Major::kMn ? kAtom * (kSwizzled ? 1 : 40) : kAtom * 40;
  static DEVICE uint32_t offset(int mn, int k) {
    if (major == Major::kK) {
      const int bytes = k * element, along = kSwizzled ? bytes : bytes % 16 + bytes / 16 * kKStep;
      return uint32_t(mn % 8 * kWidth + mn / 8 * kMnStep + along);
    }
    return uint32_t(mn % kAlongMn * element + mn / kAlongMn * kMnStep + k % 8 * kWidth + k / 8 * kKStep);
  }
  // The same with the swizzle; `at` is the start of the operand.
  static DEVICE SharedAddress address(SharedAddress at, int mn, int k) {
    const SharedAddress linear = at + offset(mn, k);
    return linear ^ (linear >> 7 & uint32_t(kWidth / 16 - 1)) << 4;
  }
  static DEVICE uint64_t descriptor(SharedAddress at) {
    const bool mn_is_leading = kSwizzled && major == Major::kMn;
    return mn_is_leading ? make_descriptor(at, kMnStep, kKStep, swizzle)
                         : make_descriptor(at, kKStep, kMnStep, swizzle);
  }
};

// Stores one element. Other elements are in the same word, so one thread stores all elements one by one.
template <int element>
DEVICE void place(SharedAddress at, uint32_t value) {
  if constexpr (element == 4) {
    store_shared(at, value);
  } else {
    const uint32_t word = load_shared<uint32_t>(at & ~3u), shift = at % 4 * 8, mask = (1u << 8 * element) - 1;
    store_shared(at & ~3u, (word & ~(mask << shift)) | value << shift);
  }
}
template <int element>
DEVICE uint32_t element_at(const uint32_t* in, int i) {
  constexpr int kPerWord = 4 / element;
  if constexpr (element == 4) return in[i];
  return in[i / kPerWord] >> (i % kPerWord * 8 * element) & ((1u << 8 * (element % 4)) - 1);
}

template <class Layout, int element, int rows>
DEVICE void lay_out(SharedAddress at, const uint32_t* in) {
  constexpr int k_size = 32 / element;
  for (int i = 0; i < rows * k_size; ++i)
    place<element>(Layout::address(at, i / k_size, i % k_size), element_at<element>(in, i));
}

template <int n>
DEVICE void read_accumulators(float (&d)[n / 2], const uint32_t* in) {
  const int row = thread_index() / 32 * 16 + lane_index() / 4, column = 2 * (thread_index() % 4);
  for (int i = 0; i < n / 2; ++i)
    d[i] = __builtin_bit_cast(float, in[(row + i / 2 % 2 * 8) * n + i / 4 * 8 + column + i % 2]);
}
template <int n>
DEVICE void write_accumulators(const float (&d)[n / 2], uint32_t* out) {
  const int row = thread_index() / 32 * 16 + lane_index() / 4, column = 2 * (thread_index() % 4);
  for (int i = 0; i < n / 2; ++i)
    out[(row + i / 2 % 2 * 8) * n + i / 4 * 8 + column + i % 2] = __builtin_bit_cast(uint32_t, d[i]);
}

enum class Source { kShared, kRegisters };

// D = 2 A B + D. TB is the type of B's elements, of the same size as A's.
template <class T, class TB, int n, Source source, Major a_major, Swizzle a_swizzle, Major b_major, Swizzle b_swizzle>
GLOBAL(128, 1)
wgmma_case(const uint32_t* in, uint32_t* out) {
  constexpr int element = sizeof(T);
  using A = Layout<a_swizzle, a_major, element>;
  using B = Layout<b_swizzle, b_major, element>;
  SHARED_STORAGE(OperandStorage, shared);
  const SharedAddress a_at = shared_address(shared.x + kAOffset), b_at = shared_address(shared.x + kBOffset);
  for (int i = thread_index(); i < kStorageBytes / 16; i += 128)
    store_shared(shared_address(shared.x) + 16 * uint32_t(i), Words4{});
  arch::sync_threads();
  const uint32_t* const a_in = in;
  const uint32_t* const b_in = in + 64 * 8;
  const uint32_t* const d_in = b_in + n * 8;
  if (thread_index() == 0) {
    lay_out<A, element, 64>(a_at, a_in);
    lay_out<B, element, n>(b_at, b_in);
  }
  fence_async_shared();
  arch::sync_threads();

  float d[n / 2];
  read_accumulators<n>(d, d_in);
  uint32_t a[4];
  if constexpr (source == Source::kRegisters) {
    const int row = thread_index() / 32 * 16 + lane_index() / 4, word = thread_index() % 4;
    for (int i = 0; i < 4; ++i) a[i] = a_in[(row + i % 2 * 8) * 8 + word + i / 2 * 4];
    wgmma_fence(d, a);
  } else {
    wgmma_fence(d);
  }
  // Two products accumulate into the same sum.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if constexpr (element == 1)
      wgmma_m64k32<T, TB>(d, A::descriptor(a_at), B::descriptor(b_at), 1);
    else if constexpr (element == 4)
      wgmma_m64k8_tf32(d, A::descriptor(a_at), B::descriptor(b_at), 1);
    else if constexpr (source == Source::kRegisters)
      wgmma_m64k16<T, b_major>(d, a, B::descriptor(b_at), 1);
    else
      wgmma_m64k16<T, a_major, b_major>(d, A::descriptor(a_at), B::descriptor(b_at), 1);
    arch::wgmma_commit();
  }
  arch::wgmma_wait<0>(d);
  write_accumulators<n>(d, out);
}

template <class T, int n, Source source, Major a_major, Swizzle a_swizzle, Major b_major, Swizzle b_swizzle,
          class TB = T>
Case multiply(const char* name) {
  return {name, (64 + n) * 32 + 64 * n * 4, 64 * n * 4, [](const uint32_t* in, uint32_t* out) {
            rt::launch<wgmma_case<T, TB, n, source, a_major, a_swizzle, b_major, b_swizzle>>(
                "wgmma", {.threads = 128, .shared_bytes = sizeof(OperandStorage)}, in, out);
          }};
}

// Names: type (of A x of B if they may differ), N, then A's and B's layout (kN: K-major, swizzle of N bytes, 16 for
// none; mN: MN-major; reg: registers).
constexpr auto kNone = Swizzle::kNone, k32 = Swizzle::k32, k64 = Swizzle::k64, k128 = Swizzle::k128;
constexpr auto kK = Major::kK, kMn = Major::kMn;
constexpr auto kShared = Source::kShared, kRegisters = Source::kRegisters;
using E4M3 = float8_e4m3_t;
using E5M2 = float8_e5m2_t;
static const Register wgmma_cases[] = {
    Register(multiply<half_t, 8, kShared, kK, k128, kK, k128>("wgmma_f16_8_k128_k128")),
    Register(multiply<half_t, 24, kShared, kK, k64, kK, k64>("wgmma_f16_24_k64_k64")),
    Register(multiply<bfloat16_t, 64, kShared, kK, k32, kK, k32>("wgmma_bf16_64_k32_k32")),
    Register(multiply<bfloat16_t, 256, kShared, kK, kNone, kK, kNone>("wgmma_bf16_256_k16_k16")),
    Register(multiply<half_t, 128, kShared, kMn, k128, kMn, k128>("wgmma_f16_128_m128_m128")),
    Register(multiply<bfloat16_t, 32, kShared, kMn, k64, kMn, k64>("wgmma_bf16_32_m64_m64")),
    Register(multiply<half_t, 48, kShared, kMn, k32, kMn, k32>("wgmma_f16_48_m32_m32")),
    Register(multiply<half_t, 72, kShared, kMn, kNone, kMn, kNone>("wgmma_f16_72_m16_m16")),
    Register(multiply<bfloat16_t, 200, kShared, kK, k128, kMn, kNone>("wgmma_bf16_200_k128_m16")),
    Register(multiply<half_t, 256, kShared, kMn, k128, kK, k128>("wgmma_f16_256_m128_k128")),
    Register(multiply<bfloat16_t, 40, kRegisters, kK, k128, kK, k128>("wgmma_bf16_40_reg_k128")),
    Register(multiply<half_t, 64, kRegisters, kK, k128, kMn, k128>("wgmma_f16_64_reg_m128")),
    Register(multiply<bfloat16_t, 256, kRegisters, kK, k128, kMn, k64>("wgmma_bf16_256_reg_m64")),
    Register(multiply<float, 8, kShared, kK, k128, kK, k128>("wgmma_tf32_8_k128_k128")),
    Register(multiply<float, 96, kShared, kK, k32, kK, k64>("wgmma_tf32_96_k32_k64")),
    Register(multiply<float, 256, kShared, kK, kNone, kK, kNone>("wgmma_tf32_256_k16_k16")),
    Register(multiply<E4M3, 8, kShared, kK, k128, kK, k128>("wgmma_e4m3xe4m3_8_k128_k128")),
    Register(multiply<E4M3, 64, kShared, kK, k32, kK, k64>("wgmma_e4m3xe4m3_64_k32_k64")),
    Register(multiply<E5M2, 24, kShared, kK, k64, kK, k128>("wgmma_e5m2xe5m2_24_k64_k128")),
    Register(multiply<E4M3, 128, kShared, kK, k128, kK, k128, E5M2>("wgmma_e4m3xe5m2_128_k128_k128")),
    Register(multiply<E5M2, 256, kShared, kK, kNone, kK, kNone, E4M3>("wgmma_e5m2xe4m3_256_k16_k16")),
    Register(multiply<E5M2, 200, kShared, kK, k128, kK, k128, E4M3>("wgmma_e5m2xe4m3_200_k128_k128"))};

// in: where A and B begin and how far their atoms lie apart, in atoms of the 128-byte swizzle; four unused words; A
// (64, 128) and B (24, 128). The products over K = 128 are added up kTurns times: in the accumulators, and in float32.
constexpr int kTurns = 64, kLongN = 24, kLongK = 128, kAtomBytes = 1024, kLongRow = kLongK / 4;

// Stores `rows` rows of 128 bytes; the atoms begin at `at` and lie `stride` bytes apart.
DEVICE void lay_out_rows(SharedAddress at, uint32_t stride, const uint32_t* in, int rows) {
  for (int i = thread_index(); i < rows * kLongRow; i += 128) {
    const uint32_t row = uint32_t(i / kLongRow), byte = uint32_t(i % kLongRow * 4);
    store_shared(at + row / 8 * stride + row % 8 * 128 + (byte ^ row % 8 * 16), in[i]);
  }
}
template <class A, class B>
GLOBAL(128, 1)
wgmma_long(const uint32_t* in, uint32_t* out) {
  SHARED_STORAGE(OperandStorage, shared);
  const SharedAddress a_at = shared_address(shared.x) + in[0] * kAtomBytes;
  const SharedAddress b_at = shared_address(shared.x) + in[1] * kAtomBytes;
  const uint32_t a_stride = in[2] * kAtomBytes, b_stride = in[3] * kAtomBytes;
  lay_out_rows(a_at, a_stride, in + 8, 64);
  lay_out_rows(b_at, b_stride, in + 8 + 64 * kLongRow, kLongN);
  fence_async_shared();
  arch::sync_threads();
  const uint64_t a = make_descriptor(a_at, 16, a_stride, k128), b = make_descriptor(b_at, 16, b_stride, k128);
  float d[kLongN / 2];
  const auto add_products = [&](bool overwrites) {
    wgmma_fence(d);
#pragma unroll
    for (int step = 0; step < kLongK / 32; ++step)
      wgmma_m64k32<A, B>(d, advance_descriptor(a, 32 * step), advance_descriptor(b, 32 * step),
                         overwrites && step == 0 ? 0 : 1);
    arch::wgmma_commit();
    arch::wgmma_wait<0>(d);
  };
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) add_products(turn == 0);
  write_accumulators<kLongN>(d, out);
  float sum[kLongN / 2] = {};
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    add_products(true);
#pragma unroll
    for (int i = 0; i < kLongN / 2; ++i) sum[i] += d[i];
  }
  write_accumulators<kLongN>(sum, out + 64 * kLongN);
}
template <class A, class B>
Case long_sum(const char* name) {
  return {name, 32 + (64 + kLongN) * kLongK, 2 * 64 * kLongN * 4, [](const uint32_t* in, uint32_t* out) {
            rt::launch<wgmma_long<A, B>>("wgmma_long", {.threads = 128, .shared_bytes = sizeof(OperandStorage)}, in,
                                         out);
          }};
}
static const Register long_cases[] = {Register(long_sum<E4M3, E4M3>("wgmma_e4m3xe4m3_24_long")),
                                      Register(long_sum<E4M3, E5M2>("wgmma_e4m3xe5m2_24_long")),
                                      Register(long_sum<E5M2, E4M3>("wgmma_e5m2xe4m3_24_long"))};

// Sums that scale_d = 0 clears; three groups in flight at once; and three warpgroups that exchange registers, of which
// the second multiplies.
GLOBAL(384, 1) wgmma_groups_kernel(const uint32_t* in, uint32_t* out) {
  using A = Layout<k128, kK, 2>;
  SHARED_STORAGE(OperandStorage, shared);
  const SharedAddress a_at = shared_address(shared.x), b_at = shared_address(shared.x + kBOffset);
  const int group = thread_index() / 128;
  if (thread_index() == 0) {
    for (int i = 0; i < kStorageBytes / 4; ++i) store_shared(a_at + 4 * uint32_t(i), 0u);
    lay_out<A, 2, 64>(a_at, in);
    lay_out<A, 2, 16>(b_at, in + 64 * 8);
  }
  fence_async_shared();
  arch::sync_threads();
  if (group == 0) {
    decrease_registers<24>();
    return;
  }
  increase_registers<240>();
  if (group == 2) return;
  float d[3][8];
  for (int s = 0; s < 3; ++s)
    for (int i = 0; i < 8; ++i) d[s][i] = __builtin_bit_cast(float, in[s * 128 + i * 16 + thread_index() % 16]);
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    wgmma_fence(d[i]);
    wgmma_m64k16<half_t, kK, kK>(d[i], A::descriptor(a_at), A::descriptor(b_at), 0);
    if (i > 0) wgmma_m64k16<half_t, kK, kK>(d[i], A::descriptor(a_at), A::descriptor(b_at), 1);
    arch::wgmma_commit();
  }
  arch::wgmma_wait<2>(d[0]);
  arch::wgmma_wait<1>(d[1]);
  arch::wgmma_wait<0>(d[2]);
  const int row = thread_index() % 128 / 32 * 16 + lane_index() / 4, column = 2 * (thread_index() % 4);
  for (int s = 0; s < 3; ++s)
    for (int i = 0; i < 8; ++i)
      out[s * 1024 + (row + i / 2 % 2 * 8) * 16 + i / 4 * 8 + column + i % 2] = __builtin_bit_cast(uint32_t, d[s][i]);
}
static const Register wgmma_groups_case({"wgmma_groups", (64 + 16) * 32, 3 * 64 * 16 * 4,
                                         [](const uint32_t* in, uint32_t* out) {
                                           rt::launch<wgmma_groups_kernel>(
                                               "wgmma_groups", {.threads = 384, .shared_bytes = sizeof(OperandStorage)},
                                               in, out);
                                         }});

}  // namespace cuda_ext::conformance
