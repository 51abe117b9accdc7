// Implements the services that CPU kernels need (cpu/host.h) with torch's thread pool, BLAS and allocator.
#include "ops/torch_headers.h"

#include "cpu/host.h"
#include "cpu/isa.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>

#include <utility>

#include <algorithm>
#include <array>
#include <climits>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if AT_PARALLEL_OPENMP && !defined(_OPENMP)
#error "compile with -fopenmp: at::parallel_for would run everything on one thread"
#endif

// The BLAS that torch contains or links. Weak symbols: if torch does not export its BLAS, at::addmm is used.
extern "C" {
__attribute__((weak)) void sgemm_(char*, char*, int*, int*, int*, float*, const float*, int*, const float*, int*,
                                  float*, float*, int*);
__attribute__((weak)) void dgemm_(char*, char*, int*, int*, int*, double*, const double*, int*, const double*, int*,
                                  double*, double*, int*);
}

namespace cuda_ext::cpu {

using at::Tensor;

namespace {

void blas_gemm(char* trans_a, char* trans_b, int* m, int* n, int* k, float* alpha, const float* a, int* lda,
               const float* b, int* ldb, float* beta, float* c, int* ldc) {
  sgemm_(trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
void blas_gemm(char* trans_a, char* trans_b, int* m, int* n, int* k, double* alpha, const double* a, int* lda,
               const double* b, int* ldb, double* beta, double* c, int* ldc) {
  dgemm_(trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

template <class T>
Tensor borrowed_matrix(const T* data, bool transposed, int64_t rows, int64_t columns, int64_t ld) {
  const std::array<int64_t, 2> strides = transposed ? std::array<int64_t, 2>{1, ld} : std::array<int64_t, 2>{ld, 1};
  return at::from_blob(const_cast<T*>(data), {rows, columns}, strides, at::CppTypeToScalarType<T>::value);
}

template <class T>
void row_major_gemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, T alpha, const T* a,
                    int64_t lda, const T* b, int64_t ldb, T beta, T* c, int64_t ldc) {
  if (sgemm_ != nullptr && dgemm_ != nullptr && std::max({m, n, k, lda, ldb, ldc}) <= INT_MAX) {
    // A row-major product is the column-major product of the swapped operands: C^T = op(B)^T op(A)^T.
    char trans_a = transpose_a ? 'T' : 'N', trans_b = transpose_b ? 'T' : 'N';
    int m32 = int(m), n32 = int(n), k32 = int(k), lda32 = int(lda), ldb32 = int(ldb), ldc32 = int(ldc);
    return blas_gemm(&trans_b, &trans_a, &n32, &m32, &k32, &alpha, b, &ldb32, a, &lda32, &beta, c, &ldc32);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  Tensor out = borrowed_matrix(c, false, m, n, ldc);
  at::addmm_out(out, out, borrowed_matrix(a, transpose_a, m, k, lda), borrowed_matrix(b, transpose_b, k, n, ldb), beta,
                alpha);
}

}  // namespace

int num_threads() { return at::get_num_threads(); }

bool has_amx() {
#if defined(__x86_64__) && defined(__linux__)
  static const bool has = [] {
    const char* wanted = std::getenv("CUDA_EXT_CPU_ISA");
    if (wanted != nullptr && std::strcmp(wanted, "avx512bf16") == 0) return false;
    unsigned a, b, c, d;
    constexpr unsigned kBFloat16 = 1u << 22, kTile = 1u << 24;  // in edx of leaf 7
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kBFloat16) == 0 || (d & kTile) == 0) return false;
    // Linux gives a process the state of tiles only on request.
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return has;
#else
  return false;
#endif
}

void parallel_for(int64_t count, int64_t grain, FunctionRef<void(int64_t, int64_t)> body) {
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { body(begin, end); });
}

void run_workers(int64_t count, FunctionRef<void(TaskQueue&)> worker) {
  TaskQueue queue(count);
  const int64_t workers = at::in_parallel_region() ? 1 : std::min<int64_t>(count, num_threads());
  if (workers <= 1) {
    if (count > 0) worker(queue);
    return;
  }
  at::parallel_for(0, workers, 1, [&](int64_t, int64_t) { worker(queue); });
}

void gemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
          const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
  row_major_gemm(transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void gemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, double alpha, const double* a,
          int64_t lda, const double* b, int64_t ldb, double beta, double* c, int64_t ldc) {
  row_major_gemm(transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

namespace {

// Each thread caches its last scratch memory up to this size. Otherwise the system would fault in a few megabytes page
// by page in each call, which costs up to a tenth of a GEMM.
constexpr int64_t kMaxKeptBytes = 4 << 20;

struct KeptScratch {
  void* data = nullptr;
  int64_t bytes = 0;
  ~KeptScratch() {
    if (data != nullptr) c10::GetCPUAllocator()->raw_deallocate(data);
  }
};
thread_local KeptScratch kept;

}  // namespace

Scratch::Scratch(int64_t bytes) : data_(nullptr), bytes_(bytes) {
  if (bytes <= 0) return;
  if (kept.bytes >= bytes) {
    data_ = std::exchange(kept.data, nullptr);
    bytes_ = std::exchange(kept.bytes, 0);
  } else {
    data_ = c10::GetCPUAllocator()->raw_allocate(bytes);
  }
}
Scratch::~Scratch() {
  if (data_ == nullptr) return;
  if (bytes_ <= kMaxKeptBytes && bytes_ > kept.bytes) {
    std::swap(kept.data, data_);
    std::swap(kept.bytes, bytes_);
  }
  if (data_ != nullptr) c10::GetCPUAllocator()->raw_deallocate(data_);
}

}  // namespace cuda_ext::cpu
