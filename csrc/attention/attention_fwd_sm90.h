// The launcher of flash attention forward on wgmma (sm_90a).
#pragma once

#include <string>

#include "attention/attention.h"
#include "attention/attention_plan.h"
#include "attention/tiles_sm90.h"
#include "base/device.h"
#include "base/workspace.h"

namespace cuda_ext {

namespace sm90 {

// One instantiation per storage type and tile, in attention_fwd_sm90_{f16,bf16}_d{64,96,128,192,256}.cu.
template <class T, int tile>
struct AttentionForwardSm90 {
  static AttentionPlan plan(const AttentionParams& params, const rt::Device& device);
  static size_t workspace(const AttentionParams& params);
  static void launch(const AttentionParams& params, Workspace workspace, void* stream);
};
extern template struct AttentionForwardSm90<half_t, 0>;
extern template struct AttentionForwardSm90<half_t, 1>;
extern template struct AttentionForwardSm90<half_t, 2>;
extern template struct AttentionForwardSm90<half_t, 3>;
extern template struct AttentionForwardSm90<half_t, 4>;
extern template struct AttentionForwardSm90<bfloat16_t, 0>;
extern template struct AttentionForwardSm90<bfloat16_t, 1>;
extern template struct AttentionForwardSm90<bfloat16_t, 2>;
extern template struct AttentionForwardSm90<bfloat16_t, 3>;
extern template struct AttentionForwardSm90<bfloat16_t, 4>;
static_assert(kNumForwardTiles == 5);

// Why the kernel cannot run a problem; empty if it can.
inline std::string forward_refusal(const AttentionParams& p, const rt::Device& device) {
  if (!p.uses_wgmma) return "wgmma is switched off for attention";
  if (device.compute_capability != 90)
    return "the device has no wgmma; it is sm_" + std::to_string(device.compute_capability);
  const int64_t keys = p.cu_seqlens_k != nullptr ? p.total_k : p.seqlen_k;
  if (keys == 0) return "there are no keys";
  if (p.dim == 0 || p.dim_v == 0) return "TMA cannot read rows of no elements";
  const auto has_equal_rows = [](const HeadsView& view, int64_t rows) { return rows > 1 && view.seq_stride == 0; };
  if (has_equal_rows(p.query, p.cu_seqlens_q != nullptr ? p.total_q : p.seqlen_q) || has_equal_rows(p.key, keys) ||
      has_equal_rows(p.value, keys))
    return "TMA cannot read rows with a stride of 0";
  return "";
}

}  // namespace sm90

// Whether the library has these kernels: a build without sm_90a among its architectures has none.
bool has_attention_sm90();

}  // namespace cuda_ext
