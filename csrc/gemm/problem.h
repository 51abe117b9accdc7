// What every plan of a GEMM derives from its parameters.
#pragma once

#include <stdexcept>
#include <string>

#include "base/host_device.h"
#include "gemm/gemm.h"

namespace cuda_ext {

// How float32 operands are multiplied: rounded to tf32 (11 bits), or in three products as sums of two tf32 (about 22
// bits).
enum class Float32Product : uint8_t { kThreeTf32, kTf32 };

inline int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

inline int64_t product_of(int dims, const int64_t* sizes) {
  int64_t count = 1;
  for (int d = 0; d < dims; ++d) count *= sizes[d];
  return count;
}

inline bool is_empty(const GemmParams& params) {
  return params.m == 0 || params.n == 0 || product_of(params.batch_dims, params.batch_sizes) == 0;
}

// Whether the product has gate and up columns, of which the epilogue combines two to one column of the output.
HOST_DEVICE bool has_gate_up(const GemmParams& params) { return params.gated && params.preact.data == nullptr; }

// Restricts the choice of a plan, for tests and measurements, and to what was measured to be the fastest.
struct Restriction {
  int config = -1;    // of sm90::kConfigs, or a shape of sm80::kTiles; -1: any
  int cluster = 0;    // 0: any
  int k_blocks = 0;   // 0: any
  int splits = 0;     // 0: any
  bool sm80 = false;  // restricts the plan for mma.sync, which has neither clusters nor blocks of them; else for wgmma
  int copies = -1;    // of operands that TMA cannot read: -1: where they pay, 0: none, 1: wherever wgmma can then run
};

// Whether an operand is read along k. If only the other dim is contiguous, it is read along that one.
inline bool is_k_major(int64_t k, int64_t k_stride, int64_t other_stride) {
  return k == 1 ? other_stride != 1 : k_stride == 1;
}
inline bool is_k_major_a(const GemmParams& params) {
  return is_k_major(params.k, params.a.column_stride, params.a.row_stride);
}
inline bool is_k_major_b(const GemmParams& params) {
  return is_k_major(params.k, params.b.row_stride, params.b.column_stride);
}

// The same for b of a grouped product, whose a is read along k if rows are cut, and along m if terms are.
inline bool is_grouped_b_k_major(const GemmParams& params) {
  return params.groups.cut == Groups::Cut::kRows && params.k > 1 && params.b.row_stride == 1;
}

// Checks the limit that keeps the kernel's int arithmetic from overflowing, with a margin of a factor of 8.
inline int checked_count(int64_t count, const char* what) {
  constexpr int64_t kMax = 1 << 27;
  if (count > kMax)
    throw std::invalid_argument("expected at most 2^27 " + std::string(what) + ", got " + std::to_string(count) +
                                "; divide the product");
  return int(count);
}

}  // namespace cuda_ext
