// The launcher of flash attention forward on wgmma (sm_90a).
#pragma once

#include <string>

#include "attention/attention_plan.h"
#include "attention/tiles_sm90.h"
#include "base/device.h"
#include "base/workspace.h"

namespace cuda_ext::attention::sm90 {

// One instantiation per storage type and head dim: instantiations/attention_fwd_sm90_{f16,bf16}_d*.cu.
template <class T, int dim>
struct ForwardLauncher {
  static AttentionPlan plan(const AttentionParams& params, const rt::Device& device);
  static void launch(const AttentionParams& params, const AllocateWorkspace& allocate, void* stream);
};

// Why the kernel cannot run a problem; empty if it can.
inline std::string forward_refusal(const AttentionParams& p, const rt::Device& device) {
  if (!p.uses_wgmma) return "wgmma is switched off for attention";
  if (device.compute_capability != 90)
    return "the device has no wgmma; it is sm_" + std::to_string(device.compute_capability);
  if (p.dtype == Dtype::kFloat32) return "wgmma for attention is in float16 and bfloat16 only";
  const int64_t keys = p.cu_seqlens_k != nullptr ? p.total_k : p.seqlen_k;
  if (keys == 0) return "there are no keys";
  if (p.dim == 0 || p.dim_v == 0) return "TMA cannot read rows of no elements";
  const auto has_equal_rows = [](const HeadsView& view, int64_t rows) { return rows > 1 && view.seq_stride == 0; };
  if (has_equal_rows(p.query, p.cu_seqlens_q != nullptr ? p.total_q : p.seqlen_q) || has_equal_rows(p.key, keys) ||
      has_equal_rows(p.value, keys))
    return "TMA cannot read rows with a stride of 0";
  return "";
}

}  // namespace cuda_ext::attention::sm90
