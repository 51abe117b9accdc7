// The launchers of the small kernels around attention_bwd_sm90, which need no wgmma.
#pragma once

#include "attention/attention.h"

namespace cuda_ext {

namespace sm80 {
struct BackwardPlan;
}

namespace sm90 {

// One instantiation per storage type and tile, in attention_bwd_passes.cu.
template <class T, int tile>
struct BackwardPasses {
  static void launch_before(const AttentionBackwardParams& params, const sm80::BackwardPlan& plan, void* stream);
  static void launch_after(const AttentionBackwardParams& params, const sm80::BackwardPlan& plan, void* stream);
};

}  // namespace sm90
}  // namespace cuda_ext
