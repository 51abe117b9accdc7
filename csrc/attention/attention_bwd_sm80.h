// The launcher of flash attention backward on mma.sync (sm_80 and later).
#pragma once

#include "attention/attention_plan.h"
#include "attention/tiles_sm80.h"
#include "base/device.h"
#include "base/workspace.h"

namespace cuda_ext::attention::sm80 {

// One instantiation per storage type and head dim: instantiations/attention_bwd_sm80_{f16,bf16}_d*.cu.
template <class T, int dim>
struct BackwardLauncher {
  static AttentionPlan plan(const AttentionBackwardParams& params, const rt::Device& device);
  static void launch(const AttentionBackwardParams& params, const AllocateWorkspace& allocate, void* stream);
};

}  // namespace cuda_ext::attention::sm80
