// The launchers of the small kernels around attention_bwd_sm90, which need no wgmma.
#pragma once

#include "attention/attention.h"

namespace cuda_ext::attention {

struct BackwardPlan;

namespace sm90 {

// One instantiation per storage type and head dim, in attention_bwd_passes.cu.
template <class T, int dim>
struct BackwardPasses {
  static void launch_before(const AttentionBackwardParams& params, const BackwardPlan& plan, void* stream);
  static void launch_after(const AttentionBackwardParams& params, const BackwardPlan& plan, void* stream);
};

}  // namespace sm90
}  // namespace cuda_ext::attention
