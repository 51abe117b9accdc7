// The launcher of flash attention backward on wgmma (sm_90a).
#pragma once

#include <string>

#include "attention/attention_fwd_sm90.h"
#include "attention/attention_plan.h"
#include "attention/tiles_sm90.h"
#include "base/device.h"
#include "base/workspace.h"

namespace cuda_ext::attention::sm90 {

// One instantiation per storage type and head dim: instantiations/attention_bwd_sm90_{f16,bf16}_d*.cu.
template <class T, int dim>
struct BackwardLauncher {
  static AttentionPlan plan(const AttentionBackwardParams& params, const rt::Device& device);
  static void launch(const AttentionBackwardParams& params, const AllocateWorkspace& allocate, void* stream);
};

// Why the kernel cannot run a problem; empty if it can.
inline std::string backward_refusal(const AttentionBackwardParams& p, const rt::Device& device) {
  if (const std::string refusal = forward_refusal(p, device); !refusal.empty()) return refusal;
  if (p.seqlen_q == 0 || p.batch == 0 || p.heads == 0) return "there are no queries";
  if (p.seqlen_k == 0) return "there are no keys";
  const int64_t queries = p.cu_seqlens_q != nullptr ? p.total_q : p.seqlen_q;
  if (queries > 1 && p.grad_out.seq_stride == 0) return "TMA cannot read rows with a stride of 0";
  return "";
}

}  // namespace cuda_ext::attention::sm90
