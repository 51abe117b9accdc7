// The table of launchers of the CUDA kernels. The library contains one for devices; the emulator, which runs the same
// kernels on CPU tensors, provides another (csrc/emulated).
#pragma once

#include "attention/attention_cache.h"
#include "attention/attention_cuda.h"
#include "bucket/bucket_cuda.h"
#include "bucket/symmetric_cuda.h"
#include "gemm/expert_passes.h"
#include "gemm/gemm_cuda.h"
#include "gemm/gemm_passes.h"
#include "gemm/quantize.h"
#include "gemm/scaled_gemm_cuda.h"
#include "loss/loss_cuda.h"

namespace cuda_ext {

struct CudaKernels {
  // Identifies tables compiled from other sources, whose parameter structs differ.
  static constexpr uint64_t kLayout = sizeof(AttentionBackwardParams) << 48 | sizeof(GemmParams) << 32 |
                                      sizeof(ActivationGradParams) << 16 |
                                      (sizeof(BucketParams) + sizeof(SymmetricParams) + sizeof(LogitGradParams) +
                                       sizeof(QuantizeParams) + sizeof(CombineParams) + sizeof(GateGradParams));
  uint64_t layout;

  void (*gemm)(const GemmParams&, const AllocateWorkspace&, void* stream, Float32Product, const Restriction&);
  sm90::GemmChoice (*choose_gemm_sm90)(const GemmParams&, Float32Product, const Restriction&);
  sm90::GemmChoice (*choose_grouped)(const GemmParams&);
  rt::Device (*gemm_device)();
  ScaledGemmChoice (*choose_scaled_gemm)(const ScaledGemmParams&, const Restriction&);
  void (*scaled_gemm)(const ScaledGemmParams&, const ScaledGemmChoice&, const AllocateWorkspace&, void* stream);
  void (*quantize)(const QuantizeParams&, const AllocateWorkspace&, void* stream);
  void (*activation_grad)(const ActivationGradParams&, const AllocateWorkspace&, void* stream);
  void (*combine_experts)(const CombineParams&, void* stream);
  void (*experts_gate_backward)(const GateGradParams&, void* stream);
  void (*report_wrong_targets)(const LossTargets&, void* stream);
  void (*logit_statistics)(const LogitStatisticsParams&, void* stream);
  void (*logit_grad)(const LogitGradParams&, void* stream);
  bool (*product_statistics)(const GemmParams&, const LogitStatisticsParams&, const AllocateWorkspace&, void* stream,
                             Float32Product);
  bool (*product_grad)(const GemmParams&, const LogitGradParams&, void* stream, Float32Product);
  AttentionPlan (*plan_attention)(const AttentionBackwardParams&, bool backward, const rt::Device&,
                                  std::string& refusal);
  rt::Device (*attention_device)();
  void (*attention_forward)(const AttentionParams&, const AllocateWorkspace&, void* stream);
  void (*attention_backward)(const AttentionBackwardParams&, const AllocateWorkspace&, void* stream);
  void (*attention_cache)(const CachedAttentionParams&, const AllocateWorkspace&, void* stream);
  void (*cache_append)(const CacheAppendParams&, void* stream);
  void (*bucket_pack)(const BucketParams&, float* stats, const AllocateWorkspace&, void* stream);
  void (*bucket_unpack)(const BucketParams&, float* stats, const AllocateWorkspace&, void* stream);
  void (*bucket_stats)(const BucketParams&, float* stats, const AllocateWorkspace&, void* stream);
  void (*symmetric_all_reduce)(const SymmetricParams&, float* stats, void* stream);
};

inline CudaKernels linked_cuda_kernels() {
  return {
      .layout = CudaKernels::kLayout,
      .gemm = launch_gemm_cuda,
      .choose_gemm_sm90 = choose_gemm_sm90,
      .choose_grouped = choose_grouped_gemm,
      .gemm_device = gemm_cuda_device,
      .choose_scaled_gemm = choose_scaled_gemm_cuda,
      .scaled_gemm = launch_scaled_gemm_cuda,
      .quantize = launch_quantize_cuda,
      .activation_grad = launch_activation_grad_cuda,
      .combine_experts = launch_combine_cuda,
      .experts_gate_backward = launch_gate_grad_cuda,
      .report_wrong_targets = launch_report_wrong_targets_cuda,
      .logit_statistics = launch_logit_statistics_cuda,
      .logit_grad = launch_logit_grad_cuda,
      .product_statistics = launch_product_statistics_cuda,
      .product_grad = launch_product_grad_cuda,
      .plan_attention = plan_attention_cuda,
      .attention_device = attention_cuda_device,
      .attention_forward = launch_attention_forward_cuda,
      .attention_backward = launch_attention_backward_cuda,
      .attention_cache = launch_attention_cache_cuda,
      .cache_append = launch_cache_append_cuda,
      .bucket_pack = launch_bucket_pack_cuda,
      .bucket_unpack = launch_bucket_unpack_cuda,
      .bucket_stats = launch_bucket_stats_cuda,
      .symmetric_all_reduce = launch_symmetric_all_reduce_cuda,
  };
}

}  // namespace cuda_ext
