// The CPU GEMM's variant for AVX512-BF16, on one thread, with a model of the instruction and a vector length that every
// CPU supports. Also defines the functions of the host process that CPU kernels call.
#include "cpu/isa_prelude.h"

#define CUDA_EXT_ISA modelled
#define CUDA_EXT_VECTOR_BYTES 16
#define CUDA_EXT_BFLOAT16_PAIRS
#define CUDA_EXT_BFLOAT16_PAIRS_MODEL

#include "gemm/gemm.h"

namespace cuda_ext::cpu {

int num_threads() { return 1; }
void parallel_for(int64_t count, int64_t, FunctionRef<void(int64_t, int64_t)> body) { body(0, count); }
void run_workers(int64_t count, FunctionRef<void(TaskQueue&)> worker) {
  TaskQueue queue(count);
  worker(queue);
}
void gemm(bool, bool, int64_t, int64_t, int64_t, float, const float*, int64_t, const float*, int64_t, float, float*,
          int64_t) {
  std::abort();  // never called: 16-bit operands do not use the BLAS
}
Scratch::Scratch(int64_t bytes) : data_(std::aligned_alloc(64, size_t(bytes + 63) / 64 * 64)), bytes_(bytes) {}
Scratch::~Scratch() { std::free(data_); }

namespace avx512 {
void launch_gemm(const GemmParams&) { std::abort(); }  // never called: for products of other operands
}  // namespace avx512

}  // namespace cuda_ext::cpu

#include "gemm/gemm_cpu.inc"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void pairs_gemm(const cuda_ext::GemmParams* params) { cuda_ext::cpu::modelled::launch_gemm(*params); }
// sum (4,) += the products of 4 pairs.
EXPORT void pairs_multiply_add(float* sum, const uint32_t* a, const uint32_t* b) {
  using namespace cuda_ext::cpu::modelled;
  const auto* const pairs_a = reinterpret_cast<const BFloat16Pair*>(a);
  const auto* const pairs_b = reinterpret_cast<const BFloat16Pair*>(b);
  store(sum, multiply_add(load(sum), load(pairs_a), load(pairs_b)));
}
