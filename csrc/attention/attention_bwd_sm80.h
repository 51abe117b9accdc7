// The launcher of flash attention backward on mma.sync (sm_80 and later).
#pragma once

#include "attention/attention_fwd_sm80.h"

namespace cuda_ext {

namespace sm80 {

// One instantiation per storage type and tile, in attention_bwd_sm80_{f16,bf16}_d{64,96,128,192,256}.cu.
template <class T, int tile>
struct AttentionBackwardSm80 {
  static AttentionPlan plan(const AttentionBackwardParams& params, const rt::Device& device);
  static size_t workspace(const AttentionBackwardParams& params);
  static void launch(const AttentionBackwardParams& params, Workspace workspace, void* stream);
};
extern template struct AttentionBackwardSm80<half_t, 0>;
extern template struct AttentionBackwardSm80<half_t, 1>;
extern template struct AttentionBackwardSm80<half_t, 2>;
extern template struct AttentionBackwardSm80<half_t, 3>;
extern template struct AttentionBackwardSm80<half_t, 4>;
extern template struct AttentionBackwardSm80<bfloat16_t, 0>;
extern template struct AttentionBackwardSm80<bfloat16_t, 1>;
extern template struct AttentionBackwardSm80<bfloat16_t, 2>;
extern template struct AttentionBackwardSm80<bfloat16_t, 3>;
extern template struct AttentionBackwardSm80<bfloat16_t, 4>;
static_assert(kNumBackwardTiles == 5);

}  // namespace sm80

}  // namespace cuda_ext
