// ldmatrix, stmatrix, mma.sync.
#include <algorithm>

#include "simt/checker.h"
#include "simt/float8_sum.h"

// Compiles matrix products for several instruction sets. Products of operands of these types are exact in float32, so
// fused and separate multiply-adds give the same bits.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CUDA_EXT_SIMT_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CUDA_EXT_SIMT_CLONES
#endif

namespace cuda_ext::simt {

namespace {

constexpr int kRows = 8;  // of a matrix of ldmatrix
constexpr int kRowBytes = 16;

struct MatrixArguments {
  uint32_t* m;
  SharedAddress row;
};

// Eight rows of 16 bytes use each of the 32 banks once, unless two rows start at the same bank.
int wavefronts_of(const SharedAddress (&rows)[kRows]) {
  int most = 1;
  for (int i = 1; i < kRows; ++i) {
    int here = 1;
    for (int j = 0; j < i; ++j) here += rows[j] != rows[i] && (rows[j] / kRowBytes) % 8 == (rows[i] / kRowBytes) % 8;
    most = std::max(most, here);
  }
  return most;
}

// Calls f(matrix, row, the row's 8 elements in shared memory) for each row of `count` matrices.
template <class F>
void for_matrix_rows(const char* instruction, MatrixArguments* const (&all)[kLanes], int count, Access kind, Site site,
                     F&& f) {
  for (int i = 0; i < count; ++i) {
    SharedAddress addresses[kRows];
    for (int r = 0; r < kRows; ++r) {
      const SharedAddress address = all[i * kRows + r]->row;
      addresses[r] = address;
      std::byte* row = machine->shared(address, kRowBytes, kRowBytes, instruction, site);
      if (Checker* checker = machine->checker()) checker->access(kind, row, kRowBytes, instruction, site);
      f(i, r, reinterpret_cast<uint16_t*>(row));
    }
    machine->count(Count::kMatrixWavefronts) += uint64_t(wavefronts_of(addresses));
    ++machine->count(Count::kMatrixIdealWavefronts);
  }
}

}  // namespace

void ldmatrix(uint32_t* m, int count, bool transposed, SharedAddress row, Site site) {
  MatrixArguments mine{m, row};
  machine->warp_collective("ldmatrix", site, ~uint32_t(0), mine, [&](MatrixArguments* const(&all)[kLanes]) {
    ++machine->count(Count::kLdmatrix);
    uint16_t element[4][kRows][8];
    for_matrix_rows("ldmatrix", all, count, Access::kRead, site,
                    [&](int i, int r, const uint16_t* from) { std::memcpy(element[i][r], from, kRowBytes); });
    for (int lane = 0; lane < kLanes; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < count; ++i) {
        const auto& e = element[i];
        all[lane]->m[i] =
            transposed ? uint32_t(e[2 * t + 1][g]) << 16 | e[2 * t][g] : uint32_t(e[g][2 * t + 1]) << 16 | e[g][2 * t];
      }
    }
  });
}

void stmatrix(SharedAddress row, const uint32_t* m, int count, bool transposed, Site site) {
  MatrixArguments mine{const_cast<uint32_t*>(m), row};
  machine->warp_collective("stmatrix", site, ~uint32_t(0), mine, [&](MatrixArguments* const(&all)[kLanes]) {
    for_matrix_rows("stmatrix", all, count, Access::kWrite, site, [&](int i, int r, uint16_t* to) {
      for (int column = 0; column < 8; ++column) {
        const int g = transposed ? column : r, pair = transposed ? r : column;
        const uint32_t packed = all[g * 4 + pair / 2]->m[i];
        to[column] = uint16_t(pair % 2 == 0 ? packed : packed >> 16);
      }
    });
  });
}

namespace {

struct MmaArguments {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
};

constexpr int kMaxK = 32;

// k of a product of two registers of A by one of B.
int half_depth(MatrixType type) { return kRowBytes / bytes_of(type); }

// The fragments of all lanes of a warp. Register i of lanes 0 to 31, in this order, is an 8-row matrix with rows of 16
// bytes: part of A, part of B transposed, or pairs of columns of D.
struct MmaFragments {
  alignas(64) uint32_t a[4][kLanes];
  alignas(64) uint32_t b[2][kLanes];
  alignas(64) float d[2][kLanes][2];
};

// out[row * row_step + i * step] = element i of row `row` of the matrix in `words`.
inline void convert(MatrixType type, const uint32_t (&words)[kLanes], float* out, int row_step, int step) {
  constexpr int kRowHalves = kRowBytes / 2, kRowWords = kRowBytes / 4;
  if (type == MatrixType::kTf32) {
    for (int row = 0; row < kRows; ++row)
      for (int i = 0; i < kRowWords; ++i)  // the hardware ignores the low 13 bits
        out[row * row_step + i * step] = bits_float(words[row * kRowWords + i] & ~uint32_t(0x1fff));
    return;
  }
  if (bytes_of(type) == 1) {
    uint8_t bytes[kRows * kRowBytes];
    std::memcpy(bytes, words, sizeof bytes);
    for (int row = 0; row < kRows; ++row)
      for (int i = 0; i < kRowBytes; ++i) {
        const uint8_t bits = bytes[row * kRowBytes + i];
        out[row * row_step + i * step] =
            type == MatrixType::kFloat8E4M3 ? to_float(float8_e4m3_t{bits}) : to_float(float8_e5m2_t{bits});
      }
    return;
  }
  uint16_t halves[kRows * kRowHalves];
  std::memcpy(halves, words, sizeof halves);
  float values[kRows * kRowHalves];
  if (type == MatrixType::kFloat16)
    for (int i = 0; i < kRows * kRowHalves; ++i) values[i] = to_float(half_t{halves[i]});
  else
    for (int i = 0; i < kRows * kRowHalves; ++i) values[i] = to_float(bfloat16_t{halves[i]});
  for (int row = 0; row < kRows; ++row)
    for (int i = 0; i < kRowHalves; ++i) out[row * row_step + i * step] = values[row * kRowHalves + i];
}

// D (16, 8) += A (16, k) @ B (k, 8), summed in order of k. `halves` of the depth of A and B are in use.
CUDA_EXT_SIMT_CLONES
void multiply(MatrixType a_type, MatrixType b_type, int halves, int float8_sum_bits, MmaFragments& m) {
  using Eight = float __attribute__((vector_size(32)));
  constexpr int kBlock = 4;  // rows at a time: independent additions hide each other's latency
  const int half = half_depth(a_type), k = halves * half;
  float a[16][kMaxK], b[kMaxK][8];
  for (int i = 0; i < 2 * halves; ++i) convert(a_type, m.a[i], &a[i % 2 * 8][i / 2 * half], kMaxK, 1);
  for (int i = 0; i < halves; ++i) convert(b_type, m.b[i], &b[i * half][0], 1, 8);
  if (bytes_of(a_type) == 1 && float8_sum_bits != 0) {
    for (int row = 0; row < 16; ++row)
      for (int column = 0; column < 8; ++column) {
        float& sum = m.d[row / 8][row % 8 * 4 + column / 2][column % 2];
        sum = add_float8_products(sum, a[row], &b[0][column], 8, k, float8_sum_bits);
      }
    return;
  }
  for (int upper = 0; upper < 2; ++upper) {  // rows
    for (int first = 0; first < kRows; first += kBlock) {
      float* const d = &m.d[upper][first * 4][0];
      Eight sum[kBlock];
      std::memcpy(sum, d, sizeof sum);
      for (int p = 0; p < k; ++p) {
        Eight row_of_b;
        std::memcpy(&row_of_b, b[p], sizeof row_of_b);
#pragma GCC unroll 4
        for (int r = 0; r < kBlock; ++r) sum[r] += a[upper * 8 + first + r][p] * row_of_b;
      }
      std::memcpy(d, sum, sizeof sum);
    }
  }
}

void mma(const char* instruction, MatrixType a_type, MatrixType b_type, int halves, float (&d)[4], const uint32_t* a,
         const uint32_t* b, Site site) {
  if (halves == 2) machine->require(80, instruction, site);
  if (bytes_of(a_type) == 1) machine->require_float8(instruction, site);
  MmaArguments mine{d, a, b};
  machine->warp_collective(instruction, site, ~uint32_t(0), mine, [&](MmaArguments* const(&all)[kLanes]) {
    ++machine->count(Count::kMma);
    MmaFragments m;
    for (int lane = 0; lane < kLanes; ++lane) {
      const MmaArguments& own = *all[lane];
      for (int i = 0; i < 2 * halves; ++i) m.a[i][lane] = own.a[i];
      for (int i = 0; i < halves; ++i) m.b[i][lane] = own.b[i];
      for (int half = 0; half < 2; ++half) std::memcpy(m.d[half][lane], own.d + 2 * half, sizeof m.d[half][lane]);
    }
    multiply(a_type, b_type, halves, machine->float8_sum_bits(), m);
    for (int lane = 0; lane < kLanes; ++lane)
      for (int half = 0; half < 2; ++half)
        std::memcpy(all[lane]->d + 2 * half, m.d[half][lane], sizeof m.d[half][lane]);
  });
}

}  // namespace

void mma_m16n8k16(bool float16, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site) {
  const MatrixType type = float16 ? MatrixType::kFloat16 : MatrixType::kBFloat16;
  mma("mma_m16n8k16", type, type, 2, d, a, b, site);
}

void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site) {
  mma("mma_m16n8k8_tf32", MatrixType::kTf32, MatrixType::kTf32, 2, d, a, b, site);
}

void mma_m16n8k32(MatrixType a_type, MatrixType b_type, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                  Site site) {
  mma("mma_m16n8k32", a_type, b_type, 2, d, a, b, site);
}

void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b, Site site) {
  const uint32_t a[2] = {a0, a1};
  mma("mma_m16n8k8", MatrixType::kFloat16, MatrixType::kFloat16, 1, d, a, &b, site);
}

}  // namespace cuda_ext::simt
