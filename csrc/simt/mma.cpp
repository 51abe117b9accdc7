// ldmatrix, stmatrix, mma.sync.
#include <algorithm>

#include "simt/checker.h"

// The inner products, for the processor at hand. All products of 16-bit and tf32 operands are exact in float32, so that
// fused and separate multiply-adds agree.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CUDA_EXT_SIMT_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CUDA_EXT_SIMT_CLONES
#endif

namespace cuda_ext::simt {

namespace {

constexpr int kRows = 8;  // of a matrix that ldmatrix moves
constexpr int kRowBytes = 16;

struct MatrixArguments {
  uint32_t* m;
  SharedAddress row;
};

// Eight rows of 16 bytes fill the 32 banks once unless two start at the same four.
int wavefronts_of(const SharedAddress (&rows)[kRows]) {
  int most = 1;
  for (int i = 1; i < kRows; ++i) {
    int here = 1;
    for (int j = 0; j < i; ++j) here += rows[j] != rows[i] && (rows[j] / kRowBytes) % 8 == (rows[i] / kRowBytes) % 8;
    most = std::max(most, here);
  }
  return most;
}

// f(matrix, row, its 8 elements in shared memory) for each of `count` matrices.
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
  machine->meet("ldmatrix", site, ~uint32_t(0), mine, [&](MatrixArguments* const(&all)[kLanes]) {
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
  machine->meet("stmatrix", site, ~uint32_t(0), mine, [&](MatrixArguments* const(&all)[kLanes]) {
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

// d (16, 8) += a (16, k) @ b (k, 8), added up in order of k.
CUDA_EXT_SIMT_CLONES
void multiply(int k, const float (&a)[16][16], const float (&b)[16][8], float (&d)[16][8]) {
  for (int i = 0; i < 16; ++i) {
    float sum[8];
    for (int j = 0; j < 8; ++j) sum[j] = d[i][j];
    for (int p = 0; p < k; ++p)
      for (int j = 0; j < 8; ++j) sum[j] += a[i][p] * b[p][j];
    for (int j = 0; j < 8; ++j) d[i][j] = sum[j];
  }
}

template <class Read>
void multiply_fragments(MmaArguments* const (&all)[kLanes], int k, Read&& read_operands) {
  ++machine->count(Count::kMma);
  float a[16][16], b[16][8], d[16][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    const int g = lane / 4, t = lane % 4;
    const float* own = all[lane]->d;
    d[g][2 * t] = own[0];
    d[g][2 * t + 1] = own[1];
    d[g + 8][2 * t] = own[2];
    d[g + 8][2 * t + 1] = own[3];
    read_operands(*all[lane], g, t, a, b);
  }
  multiply(k, a, b, d);
  for (int lane = 0; lane < kLanes; ++lane) {
    const int g = lane / 4, t = lane % 4;
    float* own = all[lane]->d;
    own[0] = d[g][2 * t];
    own[1] = d[g][2 * t + 1];
    own[2] = d[g + 8][2 * t];
    own[3] = d[g + 8][2 * t + 1];
  }
}

template <class T>
void multiply_16bit(MmaArguments* const (&all)[kLanes]) {
  multiply_fragments(all, 16, [](const MmaArguments& own, int g, int t, float (&a)[16][16], float (&b)[16][8]) {
    const auto low = [](uint32_t x) { return to_float(T{uint16_t(x)}); };
    const auto high = [](uint32_t x) { return to_float(T{uint16_t(x >> 16)}); };
    for (int i = 0; i < 4; ++i) {
      const int row = g + i % 2 * 8, column = 2 * t + i / 2 * 8;
      a[row][column] = low(own.a[i]);
      a[row][column + 1] = high(own.a[i]);
    }
    for (int i = 0; i < 2; ++i) {
      b[2 * t + i * 8][g] = low(own.b[i]);
      b[2 * t + i * 8 + 1][g] = high(own.b[i]);
    }
  });
}

}  // namespace

void mma_m16n8k16(bool float16, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site) {
  MmaArguments mine{d, a, b};
  machine->meet("mma_m16n8k16", site, ~uint32_t(0), mine, [&](MmaArguments* const(&all)[kLanes]) {
    if (float16)
      multiply_16bit<half_t>(all);
    else
      multiply_16bit<bfloat16_t>(all);
  });
}

void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site) {
  MmaArguments mine{d, a, b};
  machine->meet("mma_m16n8k8_tf32", site, ~uint32_t(0), mine, [&](MmaArguments* const(&all)[kLanes]) {
    multiply_fragments(all, 8, [](const MmaArguments& own, int g, int t, float (&a)[16][16], float (&b)[16][8]) {
      // The hardware does not look at the low 13 bits.
      const auto value = [](uint32_t x) { return bits_float(x & ~uint32_t(0x1fff)); };
      for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][t + i / 2 * 4] = value(own.a[i]);
      for (int i = 0; i < 2; ++i) b[t + i * 4][g] = value(own.b[i]);
    });
  });
}

}  // namespace cuda_ext::simt
