// The correct kernels of proof_gemm.cuh; test_proof.py calls them with sizes of its choice.
#include "proof_gemm.cuh"

#include "conformance.h"

namespace cuda_ext::conformance {

// in: m, n, k, padded to 256 bytes; a (m, k); b (n, k) at the next multiple of 256 bytes.
template <class Config>
void run_proof_gemm(const uint32_t* in, uint32_t* out) {
  const int m = int(in[0]), n = int(in[1]), k = int(in[2]);
  const auto* a = reinterpret_cast<const std::byte*>(in) + 256;
  const std::byte* b = a + (size_t(m) * size_t(k) * 2 + 255) / 256 * 256;
  launch_proof_gemm<Config>(a, b, reinterpret_cast<float*>(out), m, n, k);
}

// 0 bytes: of any size.
static const Register proof_gemm_cases[] = {
    Register({"gemm_f16_128x128", 0, 0, run_proof_gemm<GemmConfig<half_t, 128>>}),
    Register({"gemm_bf16_128x256", 0, 0, run_proof_gemm<GemmConfig<bfloat16_t, 256>>}),
    Register({"gemm_bf16_128x128_cluster", 0, 0, run_proof_gemm<GemmConfig<bfloat16_t, 128, 2>>}),
    Register({"gemm_f16_128x256_cluster", 0, 0, run_proof_gemm<GemmConfig<half_t, 256, 2>>})};

}  // namespace cuda_ext::conformance
