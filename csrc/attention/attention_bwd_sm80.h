// The launcher of flash attention backward on mma.sync (sm_80 and later).
#pragma once

#include "attention/attention_fwd_sm80.h"

namespace cuda_ext {

namespace sm80 {

// One instantiation per storage type and tile, in attention_bwd_sm80_{f16,bf16}_d{64,128,192,256}.cu.
template <class T, int tile>
struct AttentionBackwardSm80 {
  static size_t workspace(const AttentionBackwardParams& params);
  static void launch(const AttentionBackwardParams& params, Workspace workspace, void* stream);
};
extern template struct AttentionBackwardSm80<half_t, 0>;
extern template struct AttentionBackwardSm80<half_t, 1>;
extern template struct AttentionBackwardSm80<half_t, 2>;
extern template struct AttentionBackwardSm80<half_t, 3>;
extern template struct AttentionBackwardSm80<bfloat16_t, 0>;
extern template struct AttentionBackwardSm80<bfloat16_t, 1>;
extern template struct AttentionBackwardSm80<bfloat16_t, 2>;
extern template struct AttentionBackwardSm80<bfloat16_t, 3>;
static_assert(kNumBackwardTiles == 4);

}  // namespace sm80

// Bytes of workspace that a launch with these parameters needs. Pointers are not dereferenced; null means absent.
inline size_t attention_backward_sm80_workspace(const AttentionBackwardParams& params) {
  return sm80::with_attention_tile<sm80::AttentionBackwardSm80>(
      "attention_bwd_sm80", sm80::kBackwardTiles, params, [&](auto backward) { return backward.workspace(params); });
}

// Launches backward on `stream`, an rt::Stream. Same requirements as launch_attention_forward_sm80.
inline void launch_attention_backward_sm80(const AttentionBackwardParams& params, Workspace workspace, void* stream) {
  sm80::with_attention_tile<sm80::AttentionBackwardSm80>(
      "attention_bwd_sm80", sm80::kBackwardTiles, params,
      [&](auto backward) { backward.launch(params, workspace, stream); });
}

}  // namespace cuda_ext
