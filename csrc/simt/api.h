// The functions that csrc/arch calls when a kernel runs on a CPU: one per instruction, executed for the calling thread
// (fiber). Included by emulator sources and tests, never by kernels.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/dtype.h"
#include "base/float8.h"

namespace cuda_ext {

// The source line that an instruction was called from. As a default argument, `Site site = {}`, it is the caller's
// line. It is not in namespace simt, where argument-dependent lookup would find functions with the names of
// instructions.
struct Site {
  const char* file;
  int line;
  constexpr Site(const char* file_name = __builtin_FILE(), int line_number = __builtin_LINE())
      : file(file_name), line(line_number) {}
};

}  // namespace cuda_ext

namespace cuda_ext::simt {

using SharedAddress = uint32_t;

int compute_capability();  // 80 for 8.0

// Threads.
int thread_index();
int block_size();
int block_index(int axis);
int grid_size(int axis);
void sync_threads(Site site);
void sync_warp(uint32_t mask, Site site);
void named_barrier(int barrier, int threads, bool wait, Site site);
void fence_device(Site site);

// Warps. `lane` is the lane to read from, which may be the calling lane.
uint32_t shuffle(uint32_t value, int lane, uint32_t mask, Site site);
uint64_t shuffle(uint64_t value, int lane, uint32_t mask, Site site);
uint32_t ballot(bool predicate, uint32_t mask, Site site);

// Memory.
void* shared_storage(size_t bytes);
SharedAddress shared_address(const void* pointer);
void load_shared(void* to, SharedAddress from, int bytes, Site site);
void store_shared(SharedAddress to, const void* from, int bytes, Site site);
// read_only: through the cache for memory that nothing on the device writes while the kernel runs.
void load_global(void* to, const void* from, int bytes, bool read_only, Site site);
void store_global(void* to, const void* from, int bytes, Site site);
float atomic_add(float* pointer, float value, Site site);
int32_t atomic_add(int32_t* pointer, int32_t value, Site site);
uint32_t atomic_add(uint32_t* pointer, uint32_t value, Site site);
uint64_t atomic_add(uint64_t* pointer, uint64_t value, Site site);
uint32_t atomic_max(uint32_t* pointer, uint32_t value, Site site);
uint32_t atomic_or(uint32_t* pointer, uint32_t value, Site site);
void reduce_add(float* pointer, const float* values, int count, Site site);  // consecutive floats, one instruction
uint32_t atomic_add_acq_rel(uint32_t* pointer, uint32_t value, Site site);
void store_release(uint32_t* pointer, uint32_t value, Site site);
void wait_equal(const uint32_t* pointer, uint32_t value, Site site);
void wait_reached(const uint32_t* pointer, uint32_t value, Site site);  // at least `value`, for a counter that wraps
// One iteration of a polling loop that the calling code contains. `last` is the thread's previous poll: a poll of the
// same word from the same line waits until the word has changed.
struct Poll {
  const uint32_t* pointer = nullptr;
  uint32_t value = 0;
  int line = 0;
};
uint32_t load_acquire(const uint32_t* pointer, Poll& last, Site site);

// Asynchronous copies by threads (cp.async).
void cp_async(SharedAddress shared, const void* global, int bytes, int valid, Site site);
void cp_async_commit(Site site);
void cp_async_wait(int pending, Site site);

// Types of the operands of matrix products.
enum class MatrixType : uint8_t { kFloat16, kBFloat16, kTf32, kFloat8E4M3, kFloat8E5M2 };
constexpr int bytes_of(MatrixType type) {
  return type == MatrixType::kTf32 ? 4 : type == MatrixType::kFloat16 || type == MatrixType::kBFloat16 ? 2 : 1;
}
template <class T>
constexpr MatrixType matrix_type() {
  switch (DtypeOf<T>::value) {
    case Dtype::kFloat16: return MatrixType::kFloat16;
    case Dtype::kBFloat16: return MatrixType::kBFloat16;
    case Dtype::kFloat8E4M3: return MatrixType::kFloat8E4M3;
    case Dtype::kFloat8E5M2: return MatrixType::kFloat8E5M2;
    default: return MatrixType::kTf32;
  }
}

// Matrices in registers.
void ldmatrix(uint32_t* m, int count, bool transposed, SharedAddress row, Site site);
void stmatrix(SharedAddress row, const uint32_t* m, int count, bool transposed, Site site);
void mma_m16n8k16(bool float16, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site);
void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site);
void mma_m16n8k32(MatrixType a_type, MatrixType b_type, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                  Site site);                                                      // 8-bit floats
void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b, Site site);  // float16

// mbarriers.
void barrier_init(uint64_t* word, int arrivals, Site site);
void barrier_invalidate(uint64_t* word, Site site);
void fence_barrier_init(Site site);
void barrier_arrive(uint64_t* word, Site site);
void barrier_arrive_expect(uint64_t* word, uint32_t bytes, Site site);
void barrier_arrive_remote(SharedAddress barrier, Site site);
void barrier_expect(uint64_t* word, uint32_t bytes, Site site);
void barrier_wait(uint64_t* word, uint32_t parity, bool cluster, Site site);
void fence_async_shared(Site site);

// Clusters.
int cluster_rank();
int cluster_size();
SharedAddress mapa(SharedAddress address, int rank, Site site);
void cluster_arrive(bool relaxed, Site site);
void cluster_wait(Site site);
void load_shared_cluster(void* to, SharedAddress from, int bytes, Site site);
void store_shared_cluster(SharedAddress to, const void* from, int bytes, Site site);

// Registers per thread, and the order of kernels in a stream.
void set_max_registers(int count, bool increase, Site site);
void grid_dependency_wait(Site site);
void grid_launch_dependents(Site site);

// TMA. `map` is an encoded TensorMapFields. Bit r of `blocks` selects block r of the cluster; 0 means this block only.
void tma_load(SharedAddress to, const uint64_t* map, uint64_t* barrier, const int* at, int rank, uint32_t blocks,
              Site site);
void tma_store(const uint64_t* map, SharedAddress from, const int* at, int rank, bool add, Site site);
void bulk_load(SharedAddress to, const void* from, uint32_t bytes, uint64_t* barrier, Site site);
void bulk_store(void* to, SharedAddress from, uint32_t bytes, Site site);
void bulk_commit(Site site);
void bulk_wait(int pending, bool read_only, Site site);

// wgmma: d (64, n) = A (64, k) @ B (k, n) + (accumulate ? d : 0), where k elements take 32 bytes. `a` is the fragment
// of A in registers, or null if A is in shared memory at a_descriptor.
struct WgmmaOperands {
  MatrixType a_type;
  MatrixType b_type;  // differs from a_type only between the two types of 8 bits
  int n;
  const uint32_t* a;
  uint64_t a_descriptor;
  uint64_t b_descriptor;
  bool a_transposed;  // MN-major
  bool b_transposed;
  bool accumulate;
};
void wgmma(float* d, const WgmmaOperands& operands, Site site);
void wgmma_fence(Site site);
void wgmma_commit(Site site);
void wgmma_wait(int pending, Site site);
// Fails if products are still in flight on accumulators that are about to be read.
void wgmma_expect_idle(const float* d, Site site);

// Conversions round to nearest, ties to even; to_tf32 rounds ties away from zero.
inline uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float bits_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
// Instructions with .ftz flush subnormal inputs and results to zero.
inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float to_float(bfloat16_t x) { return bits_float(uint32_t(x.bits) << 16); }
inline float to_float(half_t x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return bits_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // Shifted into float's exponent field, the number is too small by the ratio of the biases, 2^112; also if subnormal.
  return bits_float(sign | float_bits(bits_float(magnitude << 13) * 0x1p112f));
}
inline float to_float(float8_e4m3_t x) { return float8_to_float(x); }
inline float to_float(float8_e5m2_t x) { return float8_to_float(x); }
inline bfloat16_t to_bfloat16(float x) {
  const uint32_t bits = float_bits(x);
  if (x != x) return {0x7fff};
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline half_t to_half(float x) {
  const uint32_t bits = float_bits(x), magnitude = bits & 0x7fffffff;
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  if (magnitude > 0x7f800000) return {0x7fff};
  if (magnitude >= 0x477ff000) return {uint16_t(sign | 0x7c00)};
  if (magnitude < 0x38800000)  // adding 0.5 aligns the subnormal's last place with float's
    return {uint16_t(sign | (float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000))};
  return {uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13))};
}
template <class T>
T to_float8(float x) {  // saturates: no number becomes infinity
  return float_to_float8<T>(x);
}
inline uint32_t to_tf32(float x) {
  const uint32_t bits = float_bits(x);
  // As in ptxas: the low bits of a NaN are dropped too, which turns some NaNs into infinities.
  const bool is_finite = (bits & 0x7f800000) != 0x7f800000;
  return (is_finite ? bits + 0x1000 : bits) & ~uint32_t(0x1fff);
}

}  // namespace cuda_ext::simt
