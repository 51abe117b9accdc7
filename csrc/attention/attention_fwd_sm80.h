// The launcher of flash attention forward on mma.sync (sm_80 and later).
#pragma once

#include "attention/attention_plan.h"
#include "attention/tiles_sm80.h"
#include "base/device.h"
#include "base/workspace.h"

namespace cuda_ext::attention::sm80 {

// One instantiation per storage type and head dim: instantiations/attention_fwd_sm80_{f16,bf16}_d*.cu.
template <class T, int dim>
struct ForwardLauncher {
  static AttentionPlan plan(const AttentionParams& params, const rt::Device& device);
  static void launch(const AttentionParams& params, const AllocateWorkspace& allocate, void* stream);
};

}  // namespace cuda_ext::attention::sm80
