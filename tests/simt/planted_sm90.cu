// Common bugs with the instructions of sm_90a, planted in the proof kernels. The emulator must detect each of them.
#include "conformance.h"
#include "proof_attention.cuh"
#include "proof_gemm.cuh"

namespace cuda_ext::conformance {

// More than 2 * stages K tiles, and two blocks.
constexpr int kM = 128, kN = 128, kK = 9 * 64 + 8;
constexpr size_t kGemmIn = size_t(kM + kN) * kK * 2, kGemmOut = size_t(kM) * kN * 4;
template <int cluster, int bug>
void run_gemm(const uint32_t* in, uint32_t* out) {
  const auto* a = reinterpret_cast<const std::byte*>(in);
  launch_proof_gemm<GemmConfig<bfloat16_t, 64, cluster, bug>>(a, a + size_t(kM) * kK * 2, reinterpret_cast<float*>(out),
                                                              kM, kN, kK);
}

constexpr int kRows = 100, kKeys = 5 * 64 - 10;
constexpr size_t kAttentionIn = size_t(kRows + 2 * kKeys) * kHeadDim * 2, kAttentionOut = size_t(kRows) * kHeadDim * 4;
template <int bug>
void run_attention(const uint32_t* in, uint32_t* out) {
  const auto* q = reinterpret_cast<const std::byte*>(in);
  const std::byte* k = q + size_t(kRows) * kHeadDim * 2;
  launch_proof_attention<bug>(q, k, k + size_t(kKeys) * kHeadDim * 2, reinterpret_cast<float*>(out), kRows, kKeys);
}

#define GEMM(bug) Register({#bug, kGemmIn, kGemmOut, run_gemm<1, bug>})
#define CLUSTER_GEMM(bug) Register({#bug, kGemmIn, kGemmOut, run_gemm<2, bug>})
#define ATTENTION(bug) Register({#bug, kAttentionIn, kAttentionOut, run_attention<bug>})
static const Register planted[] = {Register({"gemm", kGemmIn, kGemmOut, run_gemm<1, kNoGemmBug>}),
                                   Register({"cluster_gemm", kGemmIn, kGemmOut, run_gemm<2, kNoGemmBug>}),
                                   Register({"attention", kAttentionIn, kAttentionOut, run_attention<kNoAttentionBug>}),
                                   GEMM(kAnnouncesNothing),
                                   GEMM(kAnnouncesTooFewBytes),
                                   GEMM(kAnnouncesTooManyBytes),
                                   GEMM(kWrongFullParity),
                                   GEMM(kWrongEmptyParity),
                                   GEMM(kParityNeverFlips),
                                   GEMM(kNoFullWait),
                                   GEMM(kNoEmptyWait),
                                   GEMM(kReadsTheNextStageOfTheRing),
                                   GEMM(kReleasesBeforeTheWait),
                                   GEMM(kNoWgmmaWait),
                                   GEMM(kNoWgmmaFence),
                                   GEMM(kNoWgmmaCommit),
                                   GEMM(kTouchesAccumulatorsInFlight),
                                   GEMM(kWrongKStep),
                                   GEMM(kMisalignedAtom),
                                   GEMM(kWrongStride),
                                   GEMM(kWrongSwizzle),
                                   GEMM(kNoBarrierInitFence),
                                   GEMM(kNoBlockSyncAfterInit),
                                   GEMM(kTooManyArrivals),
                                   GEMM(kTooFewArrivals),
                                   GEMM(kWarpLeavesItsWarpgroup),
                                   GEMM(kRegistersDoNotFit),
                                   GEMM(kOverwritesABarrier),
                                   CLUSTER_GEMM(kBlockSyncInPlaceOfClusterSync),
                                   CLUSTER_GEMM(kNoClusterSyncBeforeExit),
                                   CLUSTER_GEMM(kReleasesItsOwnBlockOnly),
                                   CLUSTER_GEMM(kMulticastToItselfOnly),
                                   CLUSTER_GEMM(kWaitsAtBlockScope),
                                   ATTENTION(kNoProxyFenceAfterQ),
                                   ATTENTION(kNoBarrierAfterQ),
                                   ATTENTION(kOverwritesAInFlight),
                                   ATTENTION(kReadsScoresTooEarly),
                                   ATTENTION(kRescalesSumsInFlight),
                                   ATTENTION(kReleasesValuesTooEarly),
                                   ATTENTION(kSwapsDescriptorSteps),
                                   ATTENTION(kNoProxyFenceBeforeStore),
                                   ATTENTION(kNoBarrierBeforeStore),
                                   ATTENTION(kNoStoreWait),
                                   ATTENTION(kNoStoreCommit),
                                   ATTENTION(kWaitsForOneGroupLess)};

}  // namespace cuda_ext::conformance
